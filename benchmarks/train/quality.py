"""Masked-language modelling on Python sources: each structure beside dense attention of short and long sequences, and
what each knows from afar."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ds_sparse.models.sparse_attention_utils import SparseAttentionUtils

from . import texts
from .models import (
    Attention,
    attention_of,
    default_arms,  # noqa: F401 - the arms of this experiment, too
    give_attention,
    make_bert,
    require_attention,
)
from .results import DENSE, SHORT, Case, short_of
from .tasks import IGNORED, TokenTask, hidden, log_frequencies, masked_places, masked_task
from .trainer import Phase, Task

HELD_OUT_TOKENS, QUICK_HELD_OUT_TOKENS = 2**20, 2**13

QUICK_BYTES, TOKENIZER_BYTES = 2_000_000, 10_000_000
"""Bytes of documents that are read, and that the tokenizer is trained on."""

MOST_PIECES = 16
"""Most pieces of a document, so that a large table is not most of the text."""

FAR = 2048
"""Tokens between a name and its last place before; in short documents half of their tokens."""

NAME = re.compile(rb"[A-Za-z0-9]*(?:[a-z0-9][A-Z]|[A-Za-z0-9]_[A-Za-z0-9])\w*")
"""Names of several words, such as read_rows or RowReader: those are identifiers wherever they stand, and no English."""

WORD = re.compile(rb"[A-Za-z0-9]")

CONTINUED = "continued-"


def require(case: Case) -> None:
    """Raises UsageError where the arm is not known, or does not divide documents."""
    also = f", or {CONTINUED}ATTENTION-LENGTH, whose first half trains dense attention on {SHORT} tokens"
    require_attention(case, case.arm.removeprefix(CONTINUED), also)


def prepare(case: Case, data: Path) -> None:
    """Writes train.npy and held_out.npy, uint16 (N, T), pieces of documents, far.npy, bool as held_out, and
    tokenizer.json."""
    length = case.document_tokens
    found = read_texts(case)
    learned = [text for text in found if not texts.is_held_out(text)]
    every = max(1, -(-sum(map(len, learned)) // TOKENIZER_BYTES))
    tokenizer = texts.trained_tokenizer(learned[::every], texts.vocabulary_of(case) - 1)
    tokenizer.save(str(data / "tokenizer.json"))
    train: list[np.ndarray] = []
    held_out: list[np.ndarray] = []
    for text, ids in zip(found, texts.encoded(tokenizer, found)):
        count = min(len(ids) // length, MOST_PIECES)
        (held_out if texts.is_held_out(text) else train).append(ids[: count * length].reshape(count, length))
    rows = np.concatenate(train)
    chosen = spread(held_out, (QUICK_HELD_OUT_TOKENS if case.quick else HELD_OUT_TOKENS) // length)
    if min(len(rows), len(chosen)) < (least := case.tokens_per_step // length):
        raise ValueError(
            f"The Python sources here have {len(rows):,} pieces of {length:,} tokens to train on and {len(chosen):,} "
            f"held out; a step takes {least}: give shorter --document-tokens."
        )
    pieces, distance = texts.pieces(tokenizer), min(FAR, length // 2)
    np.save(data / "far.npy", np.stack([far_tokens(row, pieces, distance) for row in chosen]))
    np.save(data / "held_out.npy", chosen)
    np.save(data / "train.npy", rows)


def read_texts(case: Case) -> list[str]:
    """Documents long enough to have a piece, if each token is one byte."""
    found, left = [], QUICK_BYTES if case.quick else float("inf")
    for text in texts.documents(case.document_tokens):
        found.append(text)
        left -= len(text)
        if left <= 0:
            break
    return found


def spread(documents: list[np.ndarray], rows: int) -> np.ndarray:
    """The first piece of each document, then the second, until there are so many."""
    ordered = [pieces[number] for number in range(MOST_PIECES) for pieces in documents if number < len(pieces)]
    return np.stack(ordered[:rows])


def far_tokens(ids: np.ndarray, pieces: Sequence[bytes], distance: int) -> np.ndarray:
    """bool (T): the tokens of names that stand more than `distance` tokens before, and not nearer before or after.

    Args:
        ids: integers (T), a document.
        pieces: the bytes of each token.
    """
    places: dict[bytes, list[tuple[int, int]]] = {}
    for name, first, stop in names_of(ids, pieces):
        places.setdefault(name, []).append((first, stop))
    far: np.ndarray = np.zeros(len(ids), dtype=bool)
    for of_name in places.values():
        for before, here, after in zip(of_name, of_name[1:], [*of_name[2:], None]):
            if here[0] - before[0] > distance and (after is None or after[0] - here[0] > distance):
                far[slice(*here)] = True
    return far & np.array([WORD.search(pieces[token]) is not None for token in ids], dtype=bool)


def names_of(ids: np.ndarray, pieces: Sequence[bytes]) -> Iterator[tuple[bytes, int, int]]:
    """The names of a document in order, each with the first token that is its own and the one after the last. With its
    own is the space before a name, which byte-level BPE has in its first token."""
    parts = [pieces[token] for token in ids]
    sizes = np.array([len(part) for part in parts])
    ends = np.cumsum(sizes)
    for found in NAME.finditer(b"".join(parts)):
        first, stop = (int(np.searchsorted(ends, place, side="right")) for place in found.span())
        yield found[0], first + int(ends[first] - sizes[first] < found.start() - 1), stop


class QualityTask(TokenTask):
    """Says what is known from afar.

    Args:
        far: bool as held_out, which tokens are known from afar alone.
    """

    def __init__(self, *arguments: Any, far: np.ndarray) -> None:
        super().__init__(*arguments)
        self.far = torch.from_numpy(far[self.held_out[1] != IGNORED])

    def measures(self) -> dict[str, float]:
        losses, right = self.predictions()
        far = self.far
        found = {"accuracy": right.float().mean().item(), "far_tokens": int(far.sum())}
        if not far.any():
            return found
        return found | {"far_loss": losses[far].mean().item(), "far_accuracy": right[far].float().mean().item()}


def phases(case: Case, data: Path, device: torch.device) -> list[Phase]:
    task = partial(make_task, case, data, device)
    attention = attention_of(case.arm.removeprefix(CONTINUED))
    before = [partial(task, Attention(DENSE, short_of(case)))] if case.arm.startswith(CONTINUED) else []
    return [*before, partial(task, attention)]


def make_task(case: Case, data: Path, device: torch.device, attention: Attention, before: nn.Module | None) -> Task:
    """A task of new weights, or of a dense model's before, which gets longer positions as by `ds_sparse adapt`,
    and the attention."""
    train, held_out, far = (np.load(data / f"{name}.npy", mmap_mode="r") for name in ("train", "held_out", "far"))
    size = texts.vocabulary_of(case)
    frequencies = log_frequencies([train], size)
    if before is None:
        model = make_bert(attention, case, frequencies, device)
    else:
        model = SparseAttentionUtils.extend_position_embedding(before, attention.length)
        give_attention(model, attention.kind, case)
    # All that can be known from afar is hidden, so that no part of a name gives the rest away.
    asked = hidden(held_out, masked_places(held_out.shape, 0) | far, size - 1)
    fixed = train, asked, frequencies, size - 1, case, device
    return masked_task(QualityTask, model, attention.length, *fixed, far=far)
