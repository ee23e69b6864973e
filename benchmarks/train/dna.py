"""DNA: a model learns masked bases, then which bases are in a gene; F1 is that of genes on held-out sequences."""

from __future__ import annotations

import pickle
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_sparse.tools.arguments import UsageError
from ds_sparse.tools.extras import optional_imports

from .genomes import (
    BOTH,
    CLASSES,
    FORWARD,
    MASK,
    OUTSIDE,
    PAD,
    REVERSE,
    STRANDS,
    VOCABULARY,
    A,
    C,
    Contig,
    Files,
    G,
    Gene,
    N,
    T,
    genomes_of_folder,
    in_order,
    installed_genomes,
    read_genome,
    write_genome,
)
from .models import Attention, Classifier, attention_of, make_model, require_attention
from .results import DENSE, MODELS, Case
from .tasks import IGNORED, MASKED, Batch, Found, TokenTask, hidden, log_frequencies
from .trainer import Phase, Task

with optional_imports():
    from transformers import NomicBertConfig, NomicBertForMaskedLM

LENGTHS, QUICK_LENGTHS = (1024, 16384, 65536), (64, 256, 512)
"""Bases of the sequences of default arms: few, as many as dense attention takes, and many."""

LEAST_WINDOW = 2
"""Bases of the windows in which genes are looked for, which lie half of them apart."""

ROPE_THETA = 10_000.0
"""The slowest of the rotary angles has then a period of about 63,000 bases."""

STRETCHES = 8
"""Most stretches in the held-out loss of genomes with known genes, and of others, spread evenly."""

CLOSED_GAP, SHORTEST = 50, 150
"""Predicted genes of one strand with a gap of fewer bases between them are one, and shorter ones are none. The shortest
twentieth of the annotated genes of U. maydis has up to 466 bases."""

LEAST_OVERLAP = 0.5
"""A gene is found by an interval on its strand whose Jaccard index with it is this or more."""

COMPLEMENT: np.ndarray = np.arange(VOCABULARY, dtype=np.uint8)
COMPLEMENT[[A, C, G, T]] = T, G, C, A
OTHER_STRAND = np.array([OUTSIDE, REVERSE, FORWARD, BOTH], np.uint8)
"""Tokens and classes to those of the same base read on the other strand."""

TRAINING, HELD_OUT = "training", "held_out"


def default_arms(case: Case) -> list[str]:
    few, some, many = QUICK_LENGTHS if case.quick else LENGTHS
    return [f"{DENSE}-{few}", f"{DENSE}-{some}", f"bslongformer-{some}", f"bigbird-{some}", f"bslongformer-{many}"]


def require(case: Case) -> None:
    """Raises UsageError where the arm is not known or does not divide pieces, ValueError where there are no genomes."""
    require_attention(case)
    if attention_of(case.arm).length < LEAST_WINDOW:
        raise UsageError(f"--arms {case.arm}: has windows of 1 base; give at least {LEAST_WINDOW}.")
    if case.genomes or not case.quick:
        files_of(case)


def files_of(case: Case) -> list[Files]:
    return genomes_of_folder(Path(case.genomes)) if case.genomes else installed_genomes()


def prepare(case: Case, data: Path) -> None:
    """Reads the genomes, of a quick run one that is made up, says what they are, and writes their sequences.

    Raises:
        ValueError: a file is none of its kind, or there is nothing to find genes in.
    """
    if case.quick and not case.genomes:
        write_genome(data / "genome")
        files = genomes_of_folder(data / "genome")
    else:
        files = files_of(case)
    sides: dict[str, list[Contig]] = {TRAINING: [], HELD_OUT: []}
    for one in files:
        training, held_out = read_genome(one, case.document_tokens)
        trained, held = (sum(len(contig.bases) for contig in side) for side in (training, held_out))
        genes = sum(len(contig.genes) for contig in held_out)
        print(f"{one.name}: {trained:,} bases train, {held:,} with {genes:,} known genes are held out", flush=True)
        sides[TRAINING] += training
        sides[HELD_OUT] += held_out
    if not any(contig.genes for contig in sides[HELD_OUT]):
        raise ValueError("No held-out sequence has a gene that is known; give more of the genome, or of its genes.")
    for name, contigs in sides.items():
        (data / f"{name}.pickle").write_bytes(pickle.dumps(contigs))


def read(data: Path, side: str) -> list[Contig]:
    """Reads the sequences of a side, `TRAINING` or `HELD_OUT`, from a folder that `prepare` wrote."""
    found: list[Contig] = pickle.loads((data / f"{side}.pickle").read_bytes())
    return found


@dataclass(frozen=True)
class Windows:
    """Windows of some bases of sequences that are as long, each as probable as any other."""

    sequences: Sequence[Contig]
    length: int

    @cached_property
    def ends(self) -> np.ndarray:
        """Counts of windows in the sequences up to each."""
        return np.cumsum([len(one.bases) - self.length + 1 for one in self.sequences])

    def drawn(self, number: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(number, length) bases and their classes, half of them read on the other strand."""
        pairs = [self.at(place, generator) for place in generator.integers(self.ends[-1], size=number)]
        bases, labels = zip(*pairs, strict=True)
        return np.stack(bases), np.stack(labels)

    def at(self, place: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        which = int(np.searchsorted(self.ends, place, side="right"))
        start = int(place - (self.ends[which - 1] if which else 0))
        part = slice(start, start + self.length)
        bases, labels = self.sequences[which].bases[part], self.sequences[which].labels[part]
        return reverse_complement(bases, labels) if generator.integers(2) else (bases, labels)


def reverse_complement(bases: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same bases read on the other strand."""
    return COMPLEMENT[bases][..., ::-1], OTHER_STRAND[labels][..., ::-1]


def masked(bases: np.ndarray, generator: np.random.Generator) -> Batch:
    """Hides the part `MASKED` of known bases, and asks for them."""
    return hidden(bases, (generator.random(bases.shape) < MASKED) & (bases > N), MASK)


def class_labels(labels: np.ndarray) -> np.ndarray:
    return np.where(labels == BOTH, IGNORED, labels.astype(np.int64))


def stretches(sequences: Sequence[Contig], length: int, is_annotated: bool) -> Batch:
    """Bases and classes of `STRETCHES` held-out stretches, of genomes whose genes are known or are not: every arm
    predicts the same bases of them."""
    places = [
        (one, start)
        for one in sequences
        if one.is_annotated == is_annotated
        for start in range(0, len(one.bases) - length + 1, length)
    ]
    numbers = np.unique(np.linspace(0, len(places) - 1, min(STRETCHES, len(places))).astype(int))
    parts = [(one, slice(start, start + length)) for one, start in (places[number] for number in numbers)]
    of = [[one.bases[part] for one, part in parts], [one.labels[part] for one, part in parts]]
    return tuple(np.array(some, np.uint8).reshape(-1, length) for some in of)


class MaskedBases(TokenTask):
    """Names hidden bases."""

    def measures(self) -> dict[str, float]:
        return {"masked_loss": self.evaluate()}


class Genes(TokenTask):
    """Says of each base whether it is in a gene, introns too, and on which strand.

    Args:
        known: the held-out sequences whose genes are known, whole.
    """

    def __init__(self, *arguments: Any, known: Sequence[Contig]) -> None:
        super().__init__(*arguments)
        self.known = known

    def measures(self) -> dict[str, float]:
        """F1 of bases and of genes, over all sequences together."""
        bases, genes = Found(), Found()
        for one in self.known:
            predicted = self.predicted(one.bases)
            bases += bases_found(predicted, one.labels)
            genes += genes_found(genes_in(predicted), one.genes)
        return {"base_f1": bases.f1, "gene_f1": genes.f1}

    def predicted(self, bases: np.ndarray) -> np.ndarray:
        """The class of each base of a whole sequence."""
        starts = window_starts(len(bases), self.length)
        windows = np.stack([bases[start : start + self.length] for start in starts])
        said = [logits.argmax(-1).byte().cpu() for logits, _ in self.answers((windows, windows))]
        own = owned(starts, self.length, len(bases))
        classes = zip(torch.cat(said).view(-1, self.length).numpy(), starts, own, strict=True)
        return np.concatenate([of_window[a - start : b - start] for of_window, start, (a, b) in classes])


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
    there = counts & (labels != OUTSIDE)
    return Found(
        int((counts & (predicted != OUTSIDE)).sum()), int(there.sum()), int((there & (predicted == labels)).sum())
    )


def genes_found(predicted: Sequence[Gene], genes: Sequence[Gene]) -> Found:
    """Genes that an interval finds; one finds one."""
    return Found(len(predicted), len(genes), sum(finds(predicted, genes)))


def finds(predicted: Iterable[Gene], genes: Sequence[Gene]) -> Iterator[bool]:
    """Says of each predicted gene whether it finds one that none before it has found."""
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
    """Starts of windows that lie one half of them apart and cover a sequence; the last ends with it."""
    return [*range(0, bases - window, window // 2), bases - window]


def owned(starts: Sequence[int], window: int, bases: int) -> Iterator[tuple[int, int]]:
    """The bases that each window says the class of: those that lie no deeper in another one."""
    middles = [(here + window + after) // 2 for here, after in pairwise(starts)]
    return zip([0, *middles], [*middles, bases], strict=True)


def phases(case: Case, data: Path, device: torch.device) -> list[Phase]:
    return [partial(make_task, case, data, device)] * 2


def make_task(case: Case, data: Path, device: torch.device, before: Any) -> Task:
    """Masked bases with a new model, then genes with the encoder of that one."""
    attention, length = attention_of(case.arm), case.document_tokens
    training, held_out = read(data, TRAINING), read(data, HELD_OUT)
    bases, labels = stretches(held_out, length, True)
    windows = Windows([one for one in training if before is None or one.is_annotated], length)

    def drawn(step: int) -> Batch:
        generator = np.random.default_rng([case.seed, int(before is not None), step])
        some, of = windows.drawn(case.tokens_per_step // length, generator)
        return masked(some, generator) if before is None else (some, class_labels(of))

    if before is None:
        every = np.concatenate([bases, stretches(held_out, length, False)[0]])
        frequencies = log_frequencies((one.bases[one.bases > N] for one in training), VOCABULARY)
        model = make_masked(attention, case, frequencies, device)
        asked = masked(every, np.random.default_rng(0))  # the same for every arm and seed
        parts = model, model.base_model, model.cls
        return MaskedBases("masked bases", *parts, attention.length, drawn, asked, frequencies, case, device)
    frequencies = log_frequencies((one.labels[one.labels != BOTH] for one in windows.sequences), CLASSES)
    model = Classifier(before.base_model, frequencies)
    asked = bases, class_labels(labels)
    known = [one for one in held_out if one.is_annotated]
    parts = model, model.encoder, model.classes
    return Genes("genes", *parts, attention.length, drawn, asked, frequencies, case, device, known=known)


def make_masked(attention: Attention, case: Case, frequencies: Tensor, device: torch.device) -> NomicBertForMaskedLM:
    """BERT with rotary positions."""
    config = NomicBertConfig(
        **MODELS[case.model],
        vocab_size=VOCABULARY,
        pad_token_id=PAD,
        type_vocab_size=1,
        max_position_embeddings=attention.length,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
    )
    return make_model(NomicBertForMaskedLM, config, attention, case, frequencies, device)
