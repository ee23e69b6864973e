"""Text as bytes: what is trained, in which order, and what is held out."""

from itertools import islice

import pytest
import torch

from byte_text import Text, readable
from corpus import Corpus, Document


def corpus(documents: int = 40) -> Corpus:
    texts = [f"document {number}: " + "é" * (number % 7) + "words " * 30 for number in range(documents)]
    return Corpus("small", [Document(str(n), text, by_position=n % 10 == 0) for n, text in enumerate(texts)])


def test_documents_are_whole_and_end_with_a_zero():
    text = Text(corpus(), tokens=64, seed=0, eval_sequences=100)
    trained = readable(text.training.flatten())
    assert trained.startswith("document 1: é") and "\n----\ndocument 2: éé" in trained
    assert "document 10:" not in trained and "document 10:" in readable(text.held_out.flatten())


def test_each_pass_has_every_sequence_once_and_ranks_share_them():
    text = Text(corpus(), tokens=64, seed=3, eval_sequences=4)
    number = len(text.training)
    alone = torch.cat(list(islice(text.batches(1, 0, 1), 2 * number)))
    passes = alone.split(number)
    assert not torch.equal(*passes)
    assert all(torch.equal(x.sort(0).values, text.training.long().sort(0).values) for x in passes)
    ranks = [list(islice(text.batches(2, rank, 2), 5)) for rank in range(2)]
    together = torch.cat([batch for both in zip(*ranks, strict=True) for batch in both])
    assert torch.equal(together, alone[: len(together)])
    shares = [x for rank in range(2) for x in text.held_out_batches(2, rank, 2)]
    assert sum(map(len, shares)) == len(text.held_out) == 4


def test_the_unigram_cross_entropy_is_that_of_the_bytes():
    same = Corpus("same", [Document(str(n), "a" * 999, by_position=n == 0) for n in range(9)])
    assert Text(same, tokens=100, seed=0, eval_sequences=4).unigram_cross_entropy() < 0.05


def test_too_little_text_is_refused():
    with pytest.raises(
        ValueError, match="small has .* sequences of 4000 bytes to train and 0 to hold out; use a larger"
    ):
        Text(corpus(), tokens=4000, seed=0, eval_sequences=4)
