"""Short pieces of held-out text with masked words, and what a model fills in: a held-out loss for people to read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from data import NOT_PREDICTED, Batch, PretrainingData
from tokens import MASK, SPECIAL_TOKENS

LINES, PIECES, MASKED_WORDS = 3, 30, 4


@dataclass(frozen=True)
class MaskedLines:
    """One line from each of the first held-out sequences; the same in every run on the same corpus.

    The model sees the whole sequence, in which nothing but the line's masked words is masked.
    """

    batch: Batch
    """A sample a line; what it predicts are the masked words, line after line."""
    lines: list[str]
    words: list[list[str]]
    """The masked words of each line."""
    vocabulary: list[str]

    @classmethod
    def of(cls, data: PretrainingData) -> MaskedLines:
        """The lines of `data`; fewer than three where it has fewer held-out sequences, or no words."""
        vocabulary = data.corpus.vocabulary
        held_out = next(data.held_out_batches(LINES))
        ids = torch.where(held_out.mlm_labels == NOT_PREDICTED, held_out.input_ids, held_out.mlm_labels)
        masked, labels = ids.clone(), torch.full_like(ids, NOT_PREDICTED)
        rows, lines, words = [], [], []
        for row in range(len(ids)):
            pieces = [vocabulary[token] for token in ids[row].tolist()]
            start, places = _places(pieces)
            if places:
                masked[row, places], labels[row, places] = MASK, ids[row, places]
                rows.append(row)
                shown = [vocabulary[token] for token in masked[row, start : start + PIECES].tolist()]
                lines.append(" ".join(shown).replace(" ##", ""))
                words.append([pieces[place] for place in places])
        chosen = (masked, held_out.input_mask, held_out.segment_ids, held_out.nsp_label, labels)
        return cls(Batch.of(*(tensor[rows] for tensor in chosen)), lines, words, vocabulary)

    def filled_in(self, engine: Any, device: torch.device) -> list[list[str]]:
        """The likeliest word of each masked one, by line. Every rank has to call it."""
        if not self.lines:
            return []
        engine.eval()
        with torch.no_grad():
            guesses = engine(self.batch.to(device))["guesses"].tolist()
        named = dict(enumerate(self.vocabulary))  # other rows of the embedding stand for no word
        return [[named.get(guesses.pop(0), "[unused]") for _ in line] for line in self.words]

    def beside(self, guesses: dict[str, list[list[str]]]) -> str:
        """Each line, its words, and the guesses of each run, by its name; plain text."""
        rows = {"the text": self.words, **guesses}
        width, text = max(map(len, rows)), []
        for number, line in enumerate(self.lines):
            text += [line, *(f"    {name:{width}}  {'  '.join(words[number])}" for name, words in rows.items())]
        return "\n".join(text)


def _places(pieces: list[str]) -> tuple[int, list[int]]:
    """Start of the first line of whole words from the middle on, and its masked words, each of one piece; or none."""
    for start in range(len(pieces) // 2, len(pieces) - PIECES):
        line = pieces[start : start + PIECES]
        begins = [not piece.startswith("##") for piece in pieces[start : start + PIECES + 1]]
        whole = [start + place for place in range(1, PIECES) if begins[place] and begins[place + 1]]
        if begins[0] and begins[-1] and len(whole) > 2 * MASKED_WORDS and not set(line) & set(SPECIAL_TOKENS):
            return start, [whole[n * len(whole) // (MASKED_WORDS + 1)] for n in range(1, MASKED_WORDS + 1)]
    return 0, []
