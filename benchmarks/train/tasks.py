"""Labels of tokens as a task: which pieces of documents are trained on when, which of their tokens are hidden, and what
all experiments are held to: unigram cross-entropy and F1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .results import Case
from .trainer import Task

MASKED = 0.15
"""Part of the tokens."""

IGNORED = -100
"""The label of a token that is not asked for."""

Batch = tuple[np.ndarray, np.ndarray]
"""Tokens that a model gets, and a label for each, `IGNORED` where none is asked for: integers (pieces, tokens)."""


def log_frequencies(labels: Iterable[np.ndarray], classes: int) -> Tensor:
    """fp32 (classes), the logarithm of each class's share of integer labels, arrays of any shape. Each counts once
    more than it is there, so that none is impossible."""
    counts = 1 + sum(np.bincount(np.ravel(some), minlength=classes) for some in labels)
    return torch.from_numpy(np.log(counts / counts.sum())).float()


def unigram_cross_entropy(frequencies: Tensor, labels: np.ndarray) -> float:
    """Nats, of integer labels, an array of any shape, by the result of `log_frequencies`."""
    return -float(frequencies[torch.from_numpy(labels.astype(np.int64))].mean())


@dataclass(frozen=True)
class Found:
    """Counts of what is predicted, of what is there, and of both that agree; of several sequences, their sum."""

    predicted: int = 0
    there: int = 0
    right: int = 0

    @classmethod
    def of(cls, predicted: np.ndarray, there: np.ndarray) -> Found:
        """Counts of two bool arrays."""
        return cls(int(predicted.sum()), int(there.sum()), int((predicted & there).sum()))

    def __add__(self, other: Found) -> Found:
        return Found(self.predicted + other.predicted, self.there + other.there, self.right + other.right)

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall; 0 where nothing is predicted or there."""
        both = self.predicted + self.there
        return 2 * self.right / both if both else 0.0


def macro_f1(predicted: np.ndarray, classes: np.ndarray) -> float:
    """The mean of the F1 of each class that is there; both arrays have a class for each of what is classified."""
    return float(np.mean([Found.of(predicted == one, classes == one).f1 for one in np.unique(classes)]))


class Rows:
    """Chooses the pieces of each step: all, in an order of each epoch's own.

    Args:
        rows: how many pieces there are, at least a step's.
    """

    def __init__(self, rows: int, per_step: int, seed: int) -> None:
        self.rows, self.per_step, self.seed = rows, per_step, seed
        self._order = lru_cache(maxsize=1)(lambda epoch: np.random.default_rng([seed, epoch]).permutation(rows))

    def of(self, step: int) -> np.ndarray:
        """Numbers of a step's pieces; the rest at an epoch's end is not seen in it."""
        epoch, place = divmod(step, self.rows // self.per_step)
        return self._order(epoch)[place * self.per_step :][: self.per_step]


def masked_places(shape: tuple[int, ...], *seed: int) -> np.ndarray:
    """bool, the same of a seed."""
    return np.random.default_rng(seed).random(shape) < MASKED


def hidden(tokens: np.ndarray, places: np.ndarray, mask: int) -> Batch:
    """Tokens with a mask at some places, and those that it hides as labels."""
    return np.where(places, mask, tokens.astype(np.int64)), np.where(places, tokens.astype(np.int64), IGNORED)


class TokenTask(Task):
    """Labels of tokens: those that are hidden, or their classes. All arms are asked for the same tokens of the same
    pieces, which are cut to sequences of an arm's length.

    Args:
        encoder, head: parts of the model, which make vectors of tokens, and logits of vectors.
        length: of sequences, at most the pieces'; it divides them, or they are shorter.
        batch_of: a step's pieces, from its number.
        held_out: pieces, as `batch_of` gives them.
        frequencies: of labels in training, by `log_frequencies`.
    """

    def __init__(
        self,
        asked: str,
        model: Any,
        encoder: Any,
        head: Any,
        length: int,
        batch_of: Callable[[int], Batch],
        held_out: Batch,
        frequencies: Tensor,
        case: Case,
        device: torch.device,
    ) -> None:
        self.asked, self.model, self.encoder, self.head = asked, model, encoder, head
        self.length, self.batch_of, self.held_out, self.frequencies = length, batch_of, held_out, frequencies
        self.tokens_per_step, self.device = case.tokens_per_step, device

    def loss(self, step: int) -> Tensor:
        ((logits, labels),) = self.answers(self.batch_of(step))
        return cross_entropy(logits, labels)

    def evaluate(self) -> float:
        return self.predictions()[0].mean().item()

    def unigram(self) -> float:
        labels = self.held_out[1]
        return unigram_cross_entropy(self.frequencies, labels[labels != IGNORED])

    def answers(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits, fp32, and labels of the tokens that have one, of as many sequences at a time as a step has."""
        length = min(self.length, batch[0].shape[1])
        rows = (torch.from_numpy(some.astype(np.int64)).reshape(-1, length) for some in batch)
        for tokens, labels in zip(*(some.split(self.tokens_per_step // length) for some in rows), strict=True):
            places = (labels.flatten() != IGNORED).nonzero()[:, 0]
            wanted = labels.flatten()[places].to(self.device)
            vectors = self.encoder(input_ids=tokens.to(self.device)).last_hidden_state.flatten(0, 1)
            yield self.head(vectors[places.to(self.device)]).float(), wanted

    def predictions(self) -> tuple[Tensor, Tensor]:
        """For each held-out token with a label, in order: the loss, fp32, and whether the likeliest label is right."""
        answers = [
            (cross_entropy(logits, labels, reduction="none").cpu(), (logits.argmax(1) == labels).cpu())
            for logits, labels in self.answers(self.held_out)
        ]
        losses, right = zip(*answers, strict=True)
        return torch.cat(losses), torch.cat(right)


def masked_task(
    kind: type[TokenTask], model: Any, length: int, train: np.ndarray, held_out: Batch, frequencies: Tensor, mask: int,
    case: Case, device: torch.device, **more: Any,
) -> Any:  # fmt: skip
    """A task that names hidden tokens of pieces, integers (N, T), at least as many as a step has."""
    rows = Rows(len(train), case.tokens_per_step // train.shape[1], case.seed)

    def batch_of(step: int) -> Batch:
        tokens = train[rows.of(step)]
        return hidden(tokens, masked_places(tokens.shape, case.seed, step), mask)

    parts = model, model.base_model, model.cls
    return kind("masked tokens", *parts, length, batch_of, held_out, frequencies, case, device, **more)
