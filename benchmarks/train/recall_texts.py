"""Sequences whose masked values stand elsewhere in them, at a distance that is known: nothing is read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .tasks import IGNORED, Batch

CELL = 4
"""Tokens of a cell, which has a statement or a question at its beginning, or neither."""

FIRST_DISTANCE = 8
"""Distances are from this times a power of two to below twice that."""

HOPS = 4
"""Most names from a question to its value."""

PROPOSED = {4: 0.012, 3: 0.01, 2: 0.012, 1: 0.12}
"""Chains of so many names a cell that are proposed in each of `ROUNDS`; those whose cells are free are taken. One token
of about 16 is asked for then."""

ROUNDS = 3

PASSKEY_EVERY = 2048
"""Tokens of a sequence for each question after its passkey at a distance, of which there are 1 to 4."""

MASK, MARK, FIRST_VALUE = 0, 1, 2
VALUES, FILLERS = 64, 64
FIRST_NAME = FIRST_VALUE + VALUES + FILLERS
"""Tokens: what masks, what is before a passkey, values, what means nothing, and names."""

PASSKEY = 0
"""The number of hops that stands for the passkey; others are the names from a question to its value."""


def doublings(first: int, last: int) -> list[int]:
    """A number, twice that, and so on up to another."""
    return [first << number for number in range((last // first).bit_length())]


def distances_of(length: int) -> list[int]:
    """The least distance of each bucket in a sequence."""
    return doublings(FIRST_DISTANCE, length - 1)


@dataclass(frozen=True)
class Sequences:
    """Sequences with questions.

    Attributes:
        tokens, labels: (N, T); a label is a value's number, or `IGNORED` where nothing is asked for.
        hops: (N, T), of each label: names on the way to the value, or `PASSKEY`.
        distances: (N, T), of each label: the least distance of the bucket in which each step of the way lies.
    """

    tokens: np.ndarray
    labels: np.ndarray
    hops: np.ndarray
    distances: np.ndarray


class Writer:
    """Writes statements and questions into free cells of `rows` sequences."""

    def __init__(self, rows: int, length: int, names: int, causal: bool, generator: np.random.Generator) -> None:
        self.rows, self.cells, self.causal, self.generator = rows, length // CELL, causal, generator
        self.buckets = np.array(distances_of(length)) // CELL
        shape = rows * self.cells, CELL
        fillers = FIRST_VALUE + VALUES + generator.integers(FILLERS, size=shape)
        self.tokens, self.labels = fillers, np.full(shape, IGNORED)
        self.hops: np.ndarray = np.zeros(shape, int)
        self.distances: np.ndarray = np.zeros(shape, int)
        self.free: np.ndarray = np.ones(rows * self.cells, bool)
        # Names of a row are all different: a step of its own through an order that all rows share.
        self.order = FIRST_NAME + generator.permutation(names)
        self.starts, self.steps = (
            generator.integers(names, size=rows),
            2 * generator.integers(names // 2, size=rows) + 1,
        )
        self.given: np.ndarray = np.zeros(rows, int)

    def name(self, rows: np.ndarray) -> np.ndarray:
        """A new name for each of some rows, which may come several times."""
        order = np.argsort(rows, kind="stable")
        of_row = rows[order]
        rank: np.ndarray = np.empty(len(rows), int)
        rank[order] = np.arange(len(rows)) - np.searchsorted(of_row, of_row)
        number = self.given[rows] + rank
        np.add.at(self.given, rows, 1)
        return self.order[(self.starts[rows] + self.steps[rows] * number) % len(self.order)]

    def away(self, places: np.ndarray, buckets: np.ndarray) -> np.ndarray:
        """Cells at a distance of a bucket from others; behind in causal sequences, else on either side. -1 is none."""
        far = np.floor(buckets * 2 ** self.generator.random(places.shape)).astype(int)
        sign = np.where(self.causal | (self.generator.random(places.shape) < 0.5), 1, -1)
        there = places + sign * far
        if not self.causal:
            there = np.where((there < 0) | (there >= self.cells), places - sign * far, there)
        return np.where((places >= 0) & (there >= 0) & (there < self.cells), there, -1)

    def take(self, rows: np.ndarray, cells: np.ndarray) -> np.ndarray:
        """Takes cells (N, cells) of rows (N), and says of which (N) all were free; -1 is never."""
        places = rows[:, None] * self.cells + cells
        number = np.broadcast_to(np.arange(len(rows))[:, None], places.shape)
        good = (cells >= 0).all(1)
        good[good] = self.free[places[good]].all(1)
        first = np.full(len(self.free), len(rows))
        np.minimum.at(first, places[good], number[good])
        good[good] = (first[places[good]] == number[good]).all(1)
        mine = np.sort(places, 1)
        good &= (mine[:, 1:] != mine[:, :-1]).all(1)
        self.free[places[good]] = False
        return good

    def ask(self, places: np.ndarray, at: int, labels: np.ndarray, hops: int, distances: np.ndarray) -> None:
        self.tokens[places, at], self.labels[places, at] = MASK, labels
        self.hops[places, at], self.distances[places, at] = hops, distances

    def passkeys(self) -> None:
        """One of two values in each row, and questions at all distances."""
        rows = np.arange(self.rows)
        # In causal sequences it stands early, so that most distances fit.
        cells = self.generator.integers(max(1, self.cells // 8 if self.causal else self.cells), size=self.rows)
        values = self.generator.integers(VALUES, size=(self.rows, 2))
        self.take(rows, cells[:, None])
        here = rows * self.cells + cells
        self.tokens[here, 0], self.tokens[here, 1:3] = MARK, FIRST_VALUE + values
        for bucket in self.buckets:
            for _ in range(min(4, 1 + self.cells * CELL // PASSKEY_EVERY)):
                there = self.away(cells, np.full(self.rows, bucket))
                good = self.take(rows, there[:, None])
                places = rows[good] * self.cells + there[good]
                self.tokens[places, 0] = MARK
                for at in (0, 1):
                    self.ask(places, 1 + at, values[good, at], PASSKEY, bucket * CELL)

    def chains(self, hops: int, number: int) -> None:
        """Names of each other, the first of a value, and a question for each; all steps at distances of one bucket."""
        rows = self.generator.integers(self.rows, size=number)
        buckets = self.buckets[self.generator.integers(len(self.buckets), size=number)]
        statements = [self.generator.integers(self.cells, size=number)]
        while len(statements) < hops:
            statements.append(self.away(statements[-1], buckets))
        questions = [self.away(places, buckets) for places in statements]
        cells = np.stack([*statements, *questions], 1)
        good = self.take(rows, cells)
        rows, buckets, places = rows[good], buckets[good], rows[good, None] * self.cells + cells[good]
        values = self.generator.integers(VALUES, size=len(rows))
        content = FIRST_VALUE + values
        for hop in range(hops):
            statement, question = places[:, hop], places[:, hops + hop]
            names = self.name(rows)
            self.tokens[statement, 0], self.tokens[statement, 1] = names, content
            self.tokens[question, 0] = names
            self.ask(question, 1, values, hop + 1, buckets * CELL)
            content = names


def renamed(tokens: np.ndarray, labels: np.ndarray, names: int, generator: np.random.Generator) -> Batch:
    """The same sequences with other names and values."""
    values = generator.permutation(VALUES)
    other = np.arange(FIRST_NAME + names)
    other[FIRST_VALUE : FIRST_VALUE + VALUES] = FIRST_VALUE + values
    other[FIRST_NAME:] = FIRST_NAME + generator.permutation(names)
    return other[tokens], np.where(labels == IGNORED, IGNORED, values[labels.clip(min=0)])


def sequences(rows: int, length: int, names: int, causal: bool, *seed: int) -> Sequences:
    """Sequences of so many tokens, the same of a seed.

    Args:
        names: how many there are, a power of two, at least an eighth of the length.
        causal: what is asked for stands before, and each name after that which it names; else on both sides.
    """
    generator = np.random.default_rng(seed)
    writer = Writer(rows, length, names, causal, generator)
    writer.passkeys()
    for hops, share in PROPOSED.items():
        for _ in range(ROUNDS):
            writer.chains(hops, round(share * len(writer.free)))
    shape = rows, length
    return Sequences(*(x.reshape(shape) for x in (writer.tokens, writer.labels, writer.hops, writer.distances)))
