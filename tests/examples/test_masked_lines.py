"""Lines of held-out text with masked words: which they are, and how a model's guesses stand beside them."""

from types import SimpleNamespace

import pytest
import torch

from data import NOT_PREDICTED, Batch
from masked_lines import PIECES, MaskedLines
from tokens import CLS, MASK, PAD, SEP, SPECIAL_TOKENS

VOCABULARY = [*SPECIAL_TOKENS, "def", "get", "##_all", "(", "self", "name", "return", ")", ":"]
SOURCE = ["def", "get", "##_all", "(", "self", "name", ")", ":", "return", "self", "(", "name", ")"] * 8
CPU = torch.device("cpu")


def held_out(*texts):
    """Data with one held-out sequence a text, some of it already masked for the held-out loss."""
    width = max(map(len, texts)) + 4
    ids, labels = torch.full((len(texts), width), PAD), torch.full((len(texts), width), NOT_PREDICTED)
    for row, text in enumerate(texts):
        tokens = [VOCABULARY.index(piece) for piece in text]
        ids[row, : len(text) + 2] = torch.tensor([CLS, *tokens, SEP])
        labels[row, 5:30:6] = ids[row, 5:30:6]
        ids[row, 5:30:6] = MASK
    batch = Batch.of(ids, (ids != PAD).long(), torch.zeros_like(ids), torch.zeros(len(texts)).long(), labels)
    return SimpleNamespace(corpus=SimpleNamespace(vocabulary=VOCABULARY), held_out_batches=lambda _: iter([batch]))


class Engine:
    """Guesses what `guess` makes of the right tokens."""

    def __init__(self, guess):
        self.guess, self.eval = guess, lambda: None

    def __call__(self, batch):
        return {"guesses": self.guess(batch.mlm_labels.flatten()[batch.mlm_positions])}


def test_a_line_is_short_whole_words_of_text_and_nothing_else_of_its_sequence_is_masked():
    lines = MaskedLines.of(held_out(SOURCE, SOURCE))
    assert len(lines.lines) == len(lines.words) == 2
    line = lines.lines[0]
    assert line.count("[MASK]") == 4 and len(line.split()) <= PIECES
    assert "##" not in line and "get_all" in line and "[SEP]" not in line
    for row in range(2):
        ids, labels = lines.batch.input_ids[row], lines.batch.mlm_labels[row]
        assert (ids == MASK).sum() == 4 and torch.equal(ids == MASK, labels != NOT_PREDICTED)
        assert [VOCABULARY[token] for token in labels[labels != NOT_PREDICTED]] == lines.words[row]
        whole = [VOCABULARY[token] for token in torch.where(ids == MASK, labels, ids)[1 : len(SOURCE) + 1]]
        assert whole == SOURCE


def test_guesses_stand_below_the_line_beside_the_words_of_the_text():
    """The embedding has a few rows more than the vocabulary has words."""
    lines = MaskedLines.of(held_out(SOURCE))
    guesses = (lambda tokens: tokens, lambda tokens: tokens * 0 + 8, lambda tokens: tokens * 0 + 15)
    right, wrong, beyond = (lines.filled_in(Engine(guess), CPU) for guess in guesses)
    assert right == lines.words and wrong == [["("] * 4] and beyond == [["[unused]"] * 4]
    line, *rows = lines.beside({"sparse": right, "dense": wrong}).splitlines()
    words = "  ".join(lines.words[0])
    assert line == lines.lines[0]
    assert rows == [f"    the text  {words}", f"    sparse    {words}", "    dense     (  (  (  ("]


@pytest.mark.parametrize("text", [["get", "##_all"] * 30, ["get", "("] * 4])
def test_text_without_enough_words_gives_no_line_and_asks_no_model(text):
    lines = MaskedLines.of(held_out(text))
    assert lines.lines == [] and lines.filled_in(None, CPU) == []
