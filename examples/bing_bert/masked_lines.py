"""Short pieces of held-out text with masked words, and what a model fills in: a held-out loss for people to read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from data import NOT_PREDICTED, Batch, PretrainingData
from tokens import MASK, SPECIAL_TOKENS

LINES, MASKED_WORDS, COLUMNS = 3, 4, 90


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
            found = _find_line(pieces)
            if found is None:
                continue
            start, end, places = found
            masked[row, places], labels[row, places] = MASK, ids[row, places]
            shown = [vocabulary[token] for token in masked[row, start:end].tolist()]
            rows.append(row)
            lines.append(_joined(shown))
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
        unused = range(len(self.vocabulary), max(guesses) + 1)  # rows of the embedding that stand for no word
        shown = [*self.vocabulary, *("[unused]" for _ in unused)]
        return [[shown[guesses.pop(0)] for _ in line] for line in self.words]

    def beside(self, guesses: dict[str, list[list[str]]]) -> str:
        """Each line, its words, and the guesses of each run, by its name; plain text."""
        rows = {"the text": self.words, **guesses}
        width = max(map(len, rows))
        text = []
        for number, line in enumerate(self.lines):
            text.append(line)
            text += [f"    {name:{width}}  {'  '.join(words[number])}" for name, words in rows.items()]
        return "\n".join(text)


def _find_line(pieces: list[str]) -> tuple[int, int, list[int]] | None:
    """Where the first line from the middle on with enough words starts and ends, and which are masked.

    These are of one piece, punctuation included, and stand apart.
    """
    for start in range(len(pieces) // 2, len(pieces) - 1):
        end = _end_of_line(pieces, start)
        whole = [
            place
            for place in range(start + 1, end - 1)
            if not pieces[place].startswith("##") and not pieces[place + 1].startswith("##")
        ]
        if len(whole) > 2 * MASKED_WORDS:
            return (
                start,
                end,
                [whole[number * len(whole) // (MASKED_WORDS + 1)] for number in range(1, MASKED_WORDS + 1)],
            )
    return None


def _end_of_line(pieces: list[str], start: int) -> int:
    """The end of a line of whole words from `start` on, without special tokens; `start` itself where there is none."""
    end, columns = start, 0
    if pieces[start].startswith("##"):
        return start
    for place in range(start, len(pieces)):
        columns += len(pieces[place].removeprefix("##")) + (not pieces[place].startswith("##"))
        if pieces[place] in SPECIAL_TOKENS or columns > COLUMNS:
            return end
        if place + 1 == len(pieces) or not pieces[place + 1].startswith("##"):
            end = place + 1
    return end


def _joined(pieces: list[str]) -> str:
    return " ".join(pieces).replace(" ##", "")
