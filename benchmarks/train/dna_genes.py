"""Genes as labels of bases, and how well predicted labels find them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import itemgetter

import numpy as np

from .dna_genomes import Contig, Gene, in_order
from .f1 import Found

OUTSIDE, FORWARD, REVERSE, BOTH = range(4)
"""Classes of a base: in no gene, in one on the strand "+", in one on "-". `BOTH` is no class: such a base counts
nowhere."""

CLASSES = 3

STRANDS = {"+": FORWARD, "-": REVERSE}

OTHER_STRAND = np.array([OUTSIDE, REVERSE, FORWARD, BOTH], np.uint8)
"""A class to that of the same base read on the other strand."""

CLOSED_GAP, SHORTEST = 50, 150
"""Predicted genes of one strand with a gap of fewer bases between them are one, and shorter ones are none. The shortest
twentieth of the annotated genes of U. maydis has up to 466 bases."""

LEAST_OVERLAP = 0.5
"""A gene is found by an interval on its strand whose Jaccard index with it is this or more."""


def labels_of(contig: Contig) -> np.ndarray:
    """The class of each base, uint8, introns included."""
    labels: np.ndarray = np.zeros(len(contig.bases), np.uint8)
    for gene in contig.genes:
        labels[gene.start : gene.end] |= STRANDS[gene.strand]
    return labels


def genes_in(labels: np.ndarray) -> list[Gene]:
    """The genes that predicted classes say."""
    return in_order(gene for strand in STRANDS for gene in of_strand(labels, strand))


def of_strand(labels: np.ndarray, strand: str) -> Iterator[Gene]:
    inside = np.concatenate([[0], labels == STRANDS[strand], [0]]).astype(np.int8)
    borders = np.flatnonzero(np.diff(inside)).reshape(-1, 2)
    if not len(borders):
        return
    apart = borders[1:, 0] - borders[:-1, 1] >= CLOSED_GAP
    starts = borders[np.concatenate([[True], apart]), 0]
    ends = borders[np.concatenate([apart, [True]]), 1]
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if end - start >= SHORTEST:
            yield Gene(start, end, strand)


def bases_found(predicted: np.ndarray, labels: np.ndarray) -> Found:
    """Bases in a gene, on the right strand."""
    counts = labels != BOTH
    return Found(
        predicted=int((counts & (predicted != OUTSIDE)).sum()),
        there=int((counts & (labels != OUTSIDE)).sum()),
        right=int((counts & (predicted == labels) & (labels != OUTSIDE)).sum()),
    )


def genes_found(predicted: Sequence[Gene], genes: Sequence[Gene]) -> Found:
    """Genes that an interval finds; one finds one."""
    return Found(len(predicted), len(genes), sum(finds(predicted, genes)))


def finds(predicted: Iterable[Gene], genes: Sequence[Gene]) -> Iterator[bool]:
    """Of each predicted one, whether it finds a gene that none before it has found."""
    left = set(genes)
    starts = [gene.start for gene in genes]
    longest = max((gene.end - gene.start for gene in genes), default=0)
    for one in predicted:
        near = slice(bisect_left(starts, one.start - longest), bisect_left(starts, one.end))
        free = (gene for gene in genes[near] if gene in left)
        overlaps, best = max(((overlap(one, gene), gene) for gene in free), key=itemgetter(0), default=(0.0, None))
        if is_found := best is not None and overlaps >= LEAST_OVERLAP:
            left.discard(best)
        yield is_found


def overlap(one: Gene, other: Gene) -> float:
    """The Jaccard index of two genes, 0 on different strands."""
    if one.strand != other.strand:
        return 0.0
    shared = min(one.end, other.end) - max(one.start, other.start)
    return max(0, shared) / (max(one.end, other.end) - min(one.start, other.start))


def window_starts(bases: int, window: int) -> list[int]:
    """Where windows begin that lie one half of them apart and cover a sequence; the last ends with it."""
    return [*range(0, bases - window, window // 2), bases - window]


def owned(starts: Sequence[int], window: int, bases: int) -> Iterator[tuple[int, int]]:
    """The bases that each window says the class of: those that lie no deeper in another one."""
    middles = [(here + window + after) // 2 for here, after in pairwise(starts)]
    return zip([0, *middles], [*middles, bases], strict=True)
