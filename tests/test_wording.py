import json

import pytest

from ds_sparse.tools.wording import cut, did_you_mean, hint_of_text, printable, reason, show, show_key


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
