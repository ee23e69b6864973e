import json
from pathlib import Path

import pytest

from ds_sparse.tools.wording import cut, did_you_mean, hint_of_text, printable, reason, show, show_key

ROOT = Path(__file__).resolve().parents[1]
OLD_SENTENCES = """
    in brackets is its time over
    Who is compared was timed
    Parts of all scores: in
    with as many tokens in sequences of other lengths
    0.89 to 0.93 times at equal tokens
    gives the operations to build
    everything: a check on the rest
    needs to be dividable by
    built sparse without it
    leave the flag away
    Stopped by signal
    at once, {
    needs a name less like
    that there shall be room for
    verify holds every kernel
    ## Ways in
    says time, memory
    A fault that lets something in
    is taken and has not run
    code that minds these
    What is said of damage
    No sentence, no damage
    Into an environment of your own
    , 1 threads
    Beside it <
    point at one
    see: ds_sparse command --help
""".strip().splitlines()
"""Those that readers stumbled over, which have plainer ones now."""


def test_sentences_that_readers_stumbled_over_do_not_come_back():
    sources = (path for folder in ("ds_sparse", "examples", "docs") for path in (ROOT / folder).rglob("*.*"))
    files = [path for path in sources if path.suffix in (".py", ".md", ".html", ".js")]
    texts = {path: " ".join(path.read_text().split()) for path in (*files, *ROOT.glob("*.md"))}
    found = {path: old for path, text in texts.items() for old in OLD_SENTENCES if old.strip() in text}
    assert len(texts) > 300 and not found


def test_what_would_move_a_terminals_cursor_or_a_line_is_escaped():
    text = "a\n\x00\x1b[31m\x7f\x9b\u2028\u202e\ud800é"
    assert printable(text) == r"a\n\u0000\u001b[31m\u007f\u009b\u2028\u202e\ud800é"
    assert json.loads(show(text)) == text


def test_a_long_value_is_cut_and_its_length_said():
    assert show("y" * 78) == json.dumps("y" * 78) and show([1, "é", None]) == '[1, "é", null]'
    assert show("y" * 5000) == f'"{"y" * 59}... (5,002 characters)'
    assert cut("abc" * 100, 60) == f"{('abc' * 100)[:40]}... (300 characters)"


@pytest.mark.parametrize(
    "key, shown",
    [("block", "block"), ("", '""'), (" a", '" a"'), ("a\n", '"a\\n"'), (3, "3"), ("dotted.key", "dotted.key")],
)
def test_a_key_is_quoted_only_where_it_could_be_misread(key, shown):
    assert show_key(key) == shown


@pytest.mark.parametrize(
    "value, hint",
    [
        ("True,", " JSON spells it true, without quotes."),
        ("False", " JSON spells it false, without quotes."),
        ("-Infinity,", " JSON has no -Infinity: write a number."),
        ("uni,", " It stands there without quotes, so it was read as text up to the end of its line."),
        ("uni", ""),
        (3, ""),
    ],
)
def test_text_that_was_meant_as_something_else_gets_a_hint(value, hint):
    assert hint_of_text(value) == hint


def test_the_nearest_known_word_is_named():
    known = ["bigbird", "local_sliding_window"]
    assert did_you_mean("BigBrid", known) == ' Did you mean "bigbird"?'
    assert did_you_mean("sliding", known) == ' Did you mean "local_sliding_window"?'
    assert [did_you_mean(word, known) for word in ("xyz", "b", "", 3)] == [""] * 4


def test_an_error_is_one_line_with_its_kind_where_the_text_says_little():
    assert reason(ValueError("two\n lines")) == "two lines"
    assert reason(IndexError("out of range")) == "IndexError: out of range"
    assert reason(ValueError()) == "ValueError: "
