"""DeepSpeed's configuration and the block, from wherever they are."""

import base64
import json
import os
import random

import pytest

from ds_sparse.config import SparseAttentionConfigError, load_config, parse_config


def test_files_are_read_as_deepspeed_reads_them(write):
    path = write('{ // a comment\n "train_batch_size": 8,\n # another\n sparse_attention: {mode: "dense",},\n}')
    expected = ({"train_batch_size": 8}, {"mode": "dense"})
    assert load_config(path) == expected
    assert load_config(str(path)) == expected
    text = json.dumps({"train_batch_size": 8, "sparse_attention": {"mode": "dense"}})
    assert load_config(base64.urlsafe_b64encode(text.encode()).decode()) == expected
    assert load_config(write(b"\xef\xbb\xbf" + text.encode())) == expected
    assert load_config({"train_batch_size": 8}) == ({"train_batch_size": 8}, None)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "not valid JSON: Expecting property name"),
        ('{"a": 1 "b": 2}', "not valid JSON: Expecting ',' delimiter: line 1 column 9"),
        ('# a comment\n{"a": 1', "not valid JSON: Bad key name"),
        ('{"a": NaN}', "not valid JSON: JSON has no NaN; write a number."),
        ('{"a": 1e999}', "not valid JSON: a number beyond all bounds."),
        ("", "holds nothing; a DeepSpeed config is an object such as"),
        ("# a comment\n", "holds nothing; "),
        ('{"a": 1} x', "not valid JSON: "),
        (
            '{"a": 1, /* one',
            "not valid JSON: a comment that begins with /* or a text that begins with ''' is not closed",
        ),
        ("{\n a: '''", "not valid JSON: a comment that begins with /* or a text that begins with ''' is not closed."),
        (
            "{a: '''one'''}",
            "not valid JSON: a comment that begins with /* or a text that begins with ''' is not "
            "closed, or such a text stands on the file's only line.",
        ),
        ("{\n a: '''one\n}", "not valid JSON: Bad multiline string: line 3 column 2"),
        ('{"a": 1' + "0" * 5000 + "}", "not valid JSON: Exceeds the limit"),
        ("[1, 2]", "a DeepSpeed config is an object {...}, got [1, 2]."),
        ("\xff\xfe".encode("latin-1"), "not UTF-8 text (byte 0): save it as UTF-8."),
        ('{"a": ' + "[" * 100000, "not a DeepSpeed config: nested too deeply to read."),
        ('{"sparse_attention": {"block": 16, "block": 32}}', "block: given twice in one object; keep one."),
        ('{"sparse_atention": {"block": 16}}', 'sparse_atention: unknown key. Did you mean "sparse_attention"?'),
        (
            '{"mode": "bigbird", "block": 64}',
            "mode, block: of a sparse_attention block, but at the top level, where nothing reads it; put it into one: "
            '"sparse_attention": {"mode": "bigbird", ...}.',
        ),
        ('{"train_batch_size": 8, "num_local_blocks": 4}', "num_local_blocks: of a sparse_attention block, but"),
        ('{"bert": {"model": {"sparse_attention": {}}}}', "bert.model.sparse_attention: the block is nested, where"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_file_that_is_no_config_is_one_sentence(write, content, sentence):
    path = write(content)
    with pytest.raises(SparseAttentionConfigError) as caught:
        load_config(path)
    assert len(caught.value.mistakes) == 1
    assert caught.value.mistakes[0].startswith(f"{path}: {sentence}")


ALL_SYNTAX = """{
  // a comment
  "train_batch_size": 8, # another
  "fp16": {"enabled": false, "loss_scale": 2.5e1}, /* one
  of two lines */
  name: '''
    a text of
    two lines
  '''
  more: text without quotes
  "sparse_attention": {mode: "variable", "local_window_blocks": [4, -2, null, true], é: "\\u00e9\\n\\""},
}"""


def outcome(raw: bytes) -> str:
    """What becomes of a file's content: anything but these two ends the test."""
    mistakes: list[str] = []
    try:
        parse_config(raw, "ds.json")
    except SparseAttentionConfigError as error:
        mistakes = error.mistakes
    assert all(mistake.startswith("ds.json: ") for mistake in mistakes)
    return "refused" if mistakes else "read"


def test_a_file_that_is_cut_anywhere_is_read_or_refused():
    raw = ALL_SYNTAX.encode()
    outcomes = [outcome(raw[:end]) for end in range(len(raw) + 1)]
    assert outcomes[-1] == "read" and set(outcomes[:-1]) == {"refused"}


def test_a_file_with_a_wrong_byte_anywhere_is_read_or_refused():
    raw, draw = ALL_SYNTAX.encode(), random.Random(0)
    wrong = ["'''", "'", '"', "/*", "*/", "//", "#", *"{}[]:,-\\\n\0", "\\ud800", "1e999", "9" * 5000]
    outcomes = []
    for place in range(len(raw)):
        flipped = bytearray(raw)
        flipped[place] ^= 1 << draw.randrange(8)
        outcomes += [outcome(bytes(flipped)), outcome(raw[:place] + draw.choice(wrong).encode() + raw[place:])]
    assert set(outcomes) == {"read", "refused"}


def test_keys_that_a_program_has_for_itself_are_left_to_it():
    config = {"train_batch_size": 8, "seed": 3, "attention": "flash", "mode": "train", "model": {"mode": "fixed"}}
    assert load_config(config) == (config, None)


def test_files_that_cannot_be_opened(tmp_path):
    with pytest.raises(SparseAttentionConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)
    missing = tmp_path / "missing.json"
    with pytest.raises(SparseAttentionConfigError, match=f"^{missing}: no such file"):
        load_config(missing)
    with pytest.raises(SparseAttentionConfigError, match="^dsconfig: no such file"):
        load_config("dsconfig")
    with pytest.raises(TypeError, match="got int"):
        load_config(3)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission(write):
    path = write("{}")
    path.chmod(0)
    with pytest.raises(SparseAttentionConfigError, match="cannot be read: Permission denied"):
        load_config(path)
