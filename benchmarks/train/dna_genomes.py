"""Genomes: tokens of bases, genes, and which sequences are held out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

PAD, MASK, N, A, C, G, T = range(7)
"""Tokens, one a base; N is any base that is not known. Nothing is padded, but models keep token 0 for padding."""

VOCABULARY = 8

TOKEN_OF: np.ndarray = np.full(256, N, np.uint8)
"""A byte of a FASTA file to its token."""
for token, letters in ((A, b"Aa"), (C, b"Cc"), (G, b"Gg"), (T, b"Tt")):
    TOKEN_OF[list(letters)] = token

COMPLEMENT: np.ndarray = np.arange(VOCABULARY, dtype=np.uint8)
"""A token to that of the base on the other strand."""
COMPLEMENT[[A, C, G, T]] = T, G, C, A

HELD_OUT_EVERY = 5
"""The last of so many sequences of a genome is held out."""

HELD_OUT_SHARE = 0.1
"""Of each sequence where a genome has fewer; its end."""


@dataclass(frozen=True)
class Gene:
    """Bases `start` to `end` (half open, from 0) of a sequence, introns too, on the strand "+" or "-"."""

    start: int
    end: int
    strand: str


@dataclass(frozen=True)
class Contig:
    """A sequence of a genome, (bases,) tokens in uint8, and its genes where they are known."""

    name: str
    bases: np.ndarray
    genes: Sequence[Gene] = ()


@dataclass(frozen=True)
class Genome:
    """The sequences of a genome that train, and those that are held out."""

    name: str
    training: list[Contig]
    held_out: list[Contig]

    @property
    def is_annotated(self) -> bool:
        return any(contig.genes for contig in self.held_out)

    def __str__(self) -> str:
        training, held_out = (sum(len(of.bases) for of in side) for side in (self.training, self.held_out))
        genes = sum(len(contig.genes) for contig in self.held_out)
        return f"{self.name}: {training:,} bases train, {held_out:,} with {genes:,} known genes are held out"


def split(name: str, contigs: Sequence[Contig], least: int) -> Genome:
    """Every fifth sequence is held out, in the order of the file; the end of each where there are fewer than five."""
    if len(contigs) >= HELD_OUT_EVERY:
        held_out = list(contigs[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
        names = {contig.name for contig in held_out}
        return Genome(name, [contig for contig in contigs if contig.name not in names], held_out)
    genome = Genome(name, [], [])
    for contig in contigs:
        cut = len(contig.bases) - max(least, round(HELD_OUT_SHARE * len(contig.bases)))
        if cut >= least:
            genome.training.append(part_of(contig, 0, cut))
            genome.held_out.append(part_of(contig, cut, len(contig.bases)))
    if not genome.training:
        raise ValueError(
            f"The genome {name} has {len(contigs)} sequences of {least:,} bases or more: too few to hold any out. Give "
            "a larger one."
        )
    return genome


def part_of(contig: Contig, start: int, end: int) -> Contig:
    """Some bases of a sequence, with the genes that lie in them whole."""
    genes = [
        Gene(gene.start - start, gene.end - start, gene.strand)
        for gene in contig.genes
        if start <= gene.start and gene.end <= end
    ]
    return Contig(f"{contig.name}:{start + 1}-{end}", contig.bases[start:end], genes)


def in_order(genes: Iterable[Gene]) -> list[Gene]:
    return sorted(genes, key=lambda gene: (gene.start, gene.end, gene.strand))
