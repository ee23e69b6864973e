"""Masked-language modelling on Python sources: each structure beside dense attention of short and long sequences, and
what each knows from afar."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ds_sparse.models.sparse_attention_utils import SparseAttentionUtils

from . import sources, vocabulary
from .experiment import Experiment, Phase, Task
from .far import far_tokens
from .frequencies import log_frequencies
from .masked import MaskedTask
from .models import (
    ATTENTIONS,
    SHORT,
    Attention,
    attention_of,
    default_arms,
    give_attention,
    make_bert,
    require_attention,
    short_of,
)
from .results import DENSE
from .settings import Settings

HELD_OUT_TOKENS, QUICK_HELD_OUT_TOKENS = 2**20, 2**13

QUICK_BYTES = 2_000_000
"""Of the documents that are read."""

TOKENIZER_BYTES = 10_000_000
"""Of the documents that the tokenizer is trained on."""

MOST_PIECES = 16
"""Of a document, so that a large table is not most of the text."""

FAR = 2048
"""Tokens between a name and its last place before; in short documents half of their tokens."""

CONTINUED = "continued-"

ARMS = (
    f"ATTENTION-LENGTH of {', '.join(ATTENTIONS)}, such as bigbird-4096, or {CONTINUED}ATTENTION-LENGTH, whose first "
    f"half trains dense attention on {SHORT} tokens"
)


def require(settings: Settings, arms: list[str]) -> None:
    """Raises ValueError where an arm is not known, or does not divide documents."""
    for arm in arms:
        require_attention(arm.removeprefix(CONTINUED), settings, ARMS)


def prepare(settings: Settings, data: Path) -> None:
    """Writes train.npy and held_out.npy, uint16 (N, T), pieces of documents, far.npy, bool as held_out, and
    tokenizer.json."""
    texts = list(some_documents(settings))
    size = vocabulary.size_of(settings)
    tokenizer = vocabulary.train(sample([text for text in texts if not sources.is_held_out(text)]), size - 1)
    tokenizer.save(str(data / "tokenizer.json"))
    train: list[np.ndarray] = []
    held_out: list[np.ndarray] = []
    for text, ids in zip(texts, vocabulary.encoded(tokenizer, texts)):
        rows = pieces_of(ids, settings.document_tokens)
        (held_out if sources.is_held_out(text) else train).append(rows)
    rows = np.concatenate(train)
    chosen = spread(held_out, held_out_rows(settings))
    if min(len(rows), len(chosen)) < (least := settings.tokens_per_step // settings.document_tokens):
        raise ValueError(
            f"The Python sources here have {len(rows):,} pieces of {settings.document_tokens:,} tokens to train on and "
            f"{len(chosen):,} held out; a step takes {least}: give shorter --document-tokens."
        )
    pieces, distance = vocabulary.pieces(tokenizer), min(FAR, settings.document_tokens // 2)
    np.save(data / "far.npy", np.stack([far_tokens(row, pieces, distance) for row in chosen]))
    np.save(data / "held_out.npy", chosen)
    np.save(data / "train.npy", rows)


def some_documents(settings: Settings) -> Iterator[str]:
    """Those long enough to have a piece, if each token is one byte."""
    left = QUICK_BYTES if settings.quick else float("inf")
    for text in sources.documents(settings.document_tokens):
        yield text
        left -= len(text)
        if left <= 0:
            return


def sample(texts: list[str]) -> Iterator[str]:
    """Every so many, of all parts."""
    every = max(1, -(-sum(map(len, texts)) // TOKENIZER_BYTES))
    return iter(texts[::every])


def pieces_of(ids: np.ndarray, length: int) -> np.ndarray:
    """(N, length), without the rest."""
    count = min(len(ids) // length, MOST_PIECES)
    return ids[: count * length].reshape(count, length)


def held_out_rows(settings: Settings) -> int:
    return (QUICK_HELD_OUT_TOKENS if settings.quick else HELD_OUT_TOKENS) // settings.document_tokens


def spread(documents: list[np.ndarray], rows: int) -> np.ndarray:
    """The first piece of each document, then the second, until there are so many."""
    ordered = [pieces[number] for number in range(MOST_PIECES) for pieces in documents if number < len(pieces)]
    return np.stack(ordered[:rows])


class QualityTask(MaskedTask):
    """What can be known from afar alone is masked in all that is held out, so that no part of a name gives the rest
    away.

    Args:
        far: bool as held_out, which tokens those are.
    """

    def __init__(self, *arguments: Any, far: np.ndarray) -> None:
        super().__init__(*arguments)
        self.held_out_masked |= far
        self.far = torch.from_numpy(far[self.held_out_masked])

    def measures(self) -> dict[str, float]:
        losses, right = self.predictions()
        far = self.far
        found = {"accuracy": right.float().mean().item(), "far_tokens": int(far.sum())}
        if not far.any():
            return found
        return found | {"far_loss": losses[far].mean().item(), "far_accuracy": right[far].float().mean().item()}


def phases(settings: Settings, data: Path, arm: str, seed: int, device: torch.device) -> list[Phase]:
    attention = attention_of(arm.removeprefix(CONTINUED))
    task = partial(make_task, settings, data, seed=seed, device=device)
    if not arm.startswith(CONTINUED):
        return [Phase(1.0, partial(task, attention))]
    return [Phase(0.5, partial(task, Attention(DENSE, short_of(settings)))), Phase(0.5, partial(task, attention))]


def make_task(
    settings: Settings,
    data: Path,
    attention: Attention,
    before: nn.Module | None,
    *,
    seed: int,
    device: torch.device,
) -> Task:
    """Of new weights, or of a dense model's before, which gets room for longer sequences as `ds_sparse adapt` gives it,
    and the attention."""
    train, held_out, far = (np.load(data / f"{name}.npy", mmap_mode="r") for name in ("train", "held_out", "far"))
    size = vocabulary.size_of(settings)
    frequencies = log_frequencies([train], size)
    if before is None:
        model = make_bert(attention, settings, frequencies, seed, device)
    else:
        model = SparseAttentionUtils.extend_position_embedding(before, attention.length)
        give_attention(model, attention.kind, settings)
    fixed = frequencies, size - 1, settings.tokens_per_step, seed, device
    return QualityTask(model, attention.length, train, held_out, *fixed, far=far)


EXPERIMENT = Experiment(ARMS, default_arms, require, prepare, phases)
