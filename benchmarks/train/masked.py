"""Masked-language modelling on pieces of documents: which are trained on when, and which of their tokens are masked;
and what all experiments are held to: unigram cross-entropy and F1.

A document's piece is a row of tokens. A model with shorter sequences has it in parts, so that all see the same tokens,
masked at the same places, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.models.steps import Piece, loss_of

from .results import Case
from .trainer import Task

MASKED = 0.15
"""Part of the tokens."""


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


def make_batch(tokens: np.ndarray, masked: np.ndarray, mask_token: int, length: int) -> Piece:
    """Sequences of a length, (B, length), of pieces and masked places, (N, T) each."""
    right = torch.from_numpy(tokens.astype(np.int64))
    places = torch.from_numpy(masked)
    labels = right.masked_fill(~places, -100).view(-1, length)
    labelled = places.flatten().nonzero()[:, 0]
    return Piece({"input_ids": right.masked_fill(places, mask_token).view(-1, length)}, labels, labelled)


class MaskedTask(Task):
    """Args:
    model: of Transformers, with a head for masked tokens.
    length: of its sequences; it divides the pieces'.
    train, held_out: integers (N, T) each, with at least as many rows as a step has.
    frequencies: of the tokens of `train`, by `log_frequencies`.
    mask_token: what stands for a masked one.
    """

    asked = "masked tokens"

    def __init__(
        self,
        model: Any,
        length: int,
        train: np.ndarray,
        held_out: np.ndarray,
        frequencies: Tensor,
        mask_token: int,
        case: Case,
        device: torch.device,
    ) -> None:
        self.model: Any = model
        self.length, self.device, self.seed = length, device, case.seed
        self.tokens, self.held_out, self.mask_token = train, held_out, mask_token
        self.frequencies, self.tokens_per_step = frequencies, case.tokens_per_step
        self.rows = Rows(len(train), case.tokens_per_step // train.shape[1], case.seed)
        self.held_out_masked = masked_places(held_out.shape, 0)

    def loss(self, step: int) -> Tensor:
        tokens = self.tokens[self.rows.of(step)]
        data = make_batch(tokens, masked_places(tokens.shape, self.seed, step), self.mask_token, self.length)
        on_cuda = self.device.type == "cuda"
        return loss_of(self.model, (data.pinned() if on_cuda else data).anew(self.device), predicts_all=False)

    def evaluate(self) -> float:
        return self.predictions()[0].mean().item()

    def unigram(self) -> float:
        return unigram_cross_entropy(self.frequencies, self.held_out[self.held_out_masked])

    def predictions(self) -> tuple[Tensor, Tensor]:
        """For each masked token that is held out, in order: the loss, fp32, and whether the likeliest token is
        the right one."""
        losses, right = [], []
        for first in range(0, len(self.held_out), self.rows.per_step):
            some = slice(first, first + self.rows.per_step)
            data = make_batch(self.held_out[some], self.held_out_masked[some], self.mask_token, self.length)
            data = data.anew(self.device)
            hidden = self.model.base_model(**data.inputs).last_hidden_state.flatten(0, 1)
            logits = self.model.cls(hidden[data.labelled]).float()
            labels = data.labels.flatten()[data.labelled]
            losses.append(cross_entropy(logits, labels, reduction="none").cpu())
            right.append((logits.argmax(1) == labels).cpu())
        return torch.cat(losses), torch.cat(right)
