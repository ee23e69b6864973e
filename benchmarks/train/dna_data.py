"""What arms of `--experiment dna` train on and are held to: windows of genomes, masked bases, labels of bases."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from .dna_genes import BOTH, OTHER_STRAND, labels_of
from .dna_genomes import COMPLEMENT, MASK, Contig, Gene, Genome, N
from .masked import MASKED

IGNORED = -100
"""The label of a base that is not predicted."""

STRETCHES = 8
"""Of genomes with known genes, and of others, as many at most that the held-out loss is of, spread evenly."""

TRAINING, HELD_OUT = "training", "held_out"


def write(genomes: Sequence[Genome], folder: Path) -> None:
    """Writes what the data of `read` are, into a folder that is there."""
    for side in (TRAINING, HELD_OUT):
        contigs = [(genome, contig) for genome in genomes for contig in getattr(genome, side)]
        np.save(folder / f"{side}-bases.npy", np.concatenate([contig.bases for _, contig in contigs]))
        np.save(folder / f"{side}-labels.npy", np.concatenate([labels_of(contig) for _, contig in contigs]))
        listed = [
            {
                "name": f"{genome.name} {contig.name}",
                "bases": len(contig.bases),
                "is_annotated": genome.is_annotated,
                "genes": [list(asdict(gene).values()) for gene in contig.genes],
            }
            for genome, contig in contigs
        ]
        (folder / f"{side}.json").write_text(json.dumps(listed))


@dataclass(frozen=True)
class Annotated:
    """A sequence with the class of each base, of a genome whose genes are known or are not."""

    contig: Contig
    labels: np.ndarray
    is_annotated: bool


def read(folder: Path, side: str) -> list[Annotated]:
    """The sequences of a side, mapped from the files of `write`."""
    bases, labels = (np.load(folder / f"{side}-{what}.npy", mmap_mode="r") for what in ("bases", "labels"))
    found, start = [], 0
    for one in json.loads((folder / f"{side}.json").read_text()):
        end = start + one["bases"]
        contig = Contig(one["name"], bases[start:end], [Gene(*gene) for gene in one["genes"]])
        found.append(Annotated(contig, labels[start:end], one["is_annotated"]))
        start = end
    return found


@dataclass(frozen=True)
class Windows:
    """Windows of some bases of sequences that are as long, each as probable as any other."""

    sequences: Sequence[Annotated]
    length: int

    @cached_property
    def ends(self) -> np.ndarray:
        """How many windows there are in the sequences up to each."""
        return np.cumsum([len(one.labels) - self.length + 1 for one in self.sequences])

    def drawn(self, number: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(number, length) bases and their classes, half of them read on the other strand."""
        pairs = [self.at(place, generator) for place in generator.integers(self.ends[-1], size=number)]
        bases, labels = zip(*pairs, strict=True)
        return np.stack(bases), np.stack(labels)

    def at(self, place: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        which = int(np.searchsorted(self.ends, place, side="right"))
        one = self.sequences[which]
        start = int(place - (self.ends[which - 1] if which else 0))
        part = slice(start, start + self.length)
        bases, labels = one.contig.bases[part], one.labels[part]
        return reverse_complement(bases, labels) if generator.integers(2) else (bases, labels)


def reverse_complement(bases: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same bases read on the other strand."""
    return COMPLEMENT[bases][..., ::-1], OTHER_STRAND[labels][..., ::-1]


def masked(bases: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Bases as a model gets them, and labels of the same shape: the base where it is hidden, else `IGNORED`. Of bases
    that are known `MASKED` are hidden."""
    hidden = (generator.random(bases.shape) < MASKED) & (bases > N)
    return np.where(hidden, np.uint8(MASK), bases), np.where(hidden, bases.astype(np.int64), IGNORED)


@dataclass(frozen=True)
class Stretches:
    """Stretches of the held-out sequences, (stretches, bases of one): every arm predicts the same bases of them."""

    bases: np.ndarray
    labels: np.ndarray
    are_annotated: np.ndarray

    @classmethod
    def of(cls, sequences: Sequence[Annotated], length: int) -> Stretches:
        """`STRETCHES` of those whose genes are known, and as many of the others."""
        chosen = []
        for wanted in (True, False):
            places = [
                (one, start)
                for one in sequences
                if one.is_annotated == wanted
                for start in range(0, len(one.labels) - length + 1, length)
            ]
            numbers = np.unique(np.linspace(0, len(places) - 1, min(STRETCHES, len(places))).astype(int))
            chosen += [places[number] for number in numbers]
        return cls(
            np.stack([one.contig.bases[start : start + length] for one, start in chosen]),
            np.stack([one.labels[start : start + length] for one, start in chosen]),
            np.array([one.is_annotated for one, _ in chosen]),
        )

    @cached_property
    def masked(self) -> tuple[np.ndarray, np.ndarray]:
        """The same for every arm and seed."""
        return masked(self.bases, np.random.default_rng(0))

    @cached_property
    def classes(self) -> tuple[np.ndarray, np.ndarray]:
        """Bases whose genes are known, and their classes, `IGNORED` where they count nowhere."""
        return self.bases[self.are_annotated], class_labels(self.labels[self.are_annotated])


def class_labels(labels: np.ndarray) -> np.ndarray:
    return np.where(labels == BOTH, IGNORED, labels.astype(np.int64))
