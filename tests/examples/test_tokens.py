"""The vocabulary of a corpus and its tokens in the cache."""

import os
import subprocess
import sys

import numpy as np
import pytest

import tokens
from corpus import Corpus, Document, load_corpus
from tokens import build_tokenizer, learn_vocabulary, open_corpus

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def folder(tmp_path, texts):
    path = tmp_path / "texts"
    path.mkdir()
    for number, text in enumerate(texts):
        (path / f"{number:03}.txt").write_text(text)
    return path


def environment():
    """For a Python process that is to import the example's modules."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(tokens.__file__), *sys.path])}


VOCABULARY = """
import sys, hashlib, tokens
print(hashlib.sha256(repr(tokens.learn_vocabulary(sys.argv[1:], 512)).encode()).hexdigest())
"""


@pytest.mark.slow("starts processes")
def test_the_vocabulary_is_the_same_in_every_process(texts):
    """The trainer's own numbering changes from process to process."""
    command = [sys.executable, "-c", VOCABULARY, *texts[40:70]]
    assert len({subprocess.check_output(command, env=environment()) for _ in range(2)}) == 1


def test_the_vocabulary_keeps_case_and_starts_with_the_special_tokens():
    vocabulary = learn_vocabulary(["Path path Café [MASK] " * 20], 512)
    assert vocabulary[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    encoded = build_tokenizer(vocabulary).encode("Path path Café [MASK]").tokens
    assert encoded[:3] == ["Path", "path", "Café"]
    assert "".join(encoded[3:]).replace("##", "") == "[MASK]" and len(encoded) > 4


def test_held_out_text_does_not_shape_the_vocabulary(monkeypatch):
    held_out = next(f"unheard{number}" for number in range(1000) if Document("", f"unheard{number} " * 99).held_out)
    texts = [(held_out + " ") * 99, "alpha beta " * 999, "gamma " * 999]
    corpus = Corpus("invented", [Document(str(number), text) for number, text in enumerate(texts)])
    monkeypatch.setattr(tokens, "load_corpus", lambda *_: corpus)
    tokenized = open_corpus("invented", 512)
    assert held_out not in tokenized.vocabulary
    assert tokenized.padded_vocabulary_size % 8 == 0
    assert 0 <= tokenized.padded_vocabulary_size - len(tokenized.vocabulary) < 8


def test_tokens_are_those_of_the_documents_in_order_however_many_are_tokenised_at_once(folder, monkeypatch):
    monkeypatch.setattr(tokens, "AT_ONCE", 3000)
    tokenized = open_corpus(str(folder), 512)
    tokenizer, documents = build_tokenizer(tokenized.vocabulary), load_corpus(str(folder)).documents
    assert len(tokenized.offsets) == len(documents) + 1
    for number, document in enumerate(documents):
        expected = tokenizer.encode(document.text, add_special_tokens=False).ids
        assert tokenized.tokens[tokenized.offsets[number] : tokenized.offsets[number + 1]].tolist() == expected
        assert tokenized.held_out[number] == document.held_out


def test_a_second_run_reads_the_cache_and_a_changed_text_does_not(folder, tmp_path, monkeypatch):
    first = open_corpus(str(folder), 512)
    other = open_corpus(str(folder), 640)
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "learn_vocabulary", None)
        assert open_corpus(str(folder), 512).directory == first.directory != other.directory
        moved = open_corpus(str(folder.rename(tmp_path / "moved")), 512)
        assert moved.directory == first.directory and moved.summary["corpus"] == str(tmp_path / "moved")
    (tmp_path / "moved" / "000.txt").write_text("another text altogether")
    assert open_corpus(str(tmp_path / "moved"), 512).directory != first.directory


def test_what_a_dry_run_makes_is_gone_from_the_disk_and_can_be_read(cache, folder):
    made = open_corpus(str(folder), 512, keeps=False)
    assert not cache.exists() and not made.directory.exists()
    kept = open_corpus(str(folder), 512)
    assert made.directory.name == kept.directory.name and np.array_equal(made.tokens, kept.tokens)
    assert open_corpus(str(folder), 512, keeps=False).directory == kept.directory


@pytest.mark.parametrize("damage", [os.unlink, lambda file: os.truncate(file, 99)])
def test_a_damaged_entry_is_named_and_what_a_kill_left_is_not_taken_for_one(folder, cache, damage):
    directory = open_corpus(str(folder), 512).directory
    directory.rename(directory.with_suffix(".partial1"))
    assert open_corpus(str(folder), 512).directory == directory
    damage(directory / "tokens.npy")
    with pytest.raises(ValueError, match="The cache entry .* cannot be read .*delete it and run again"):
        open_corpus(str(folder), 512)


def test_a_cache_that_cannot_be_written_and_a_vocabulary_too_small_for_letters_are_refused(folder, cache):
    cache.touch()
    with pytest.raises(ValueError, match="cannot be written to .*; set DS_SPARSE_CACHE to a folder that can"):
        open_corpus(str(folder), 512)
    with pytest.raises(ValueError, match="vocabulary of 100 is too small"):
        open_corpus(str(folder), 100)
