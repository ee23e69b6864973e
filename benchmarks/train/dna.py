"""DNA: a model learns masked bases, then which bases are in a gene; F1 is that of genes on held-out sequences."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import dna_data
from .dna_data import HELD_OUT, IGNORED, TRAINING, Annotated, Stretches, Windows, class_labels
from .dna_files import Files, genomes_of_folder, installed_genomes, read_genome
from .dna_genes import BOTH, CLASSES, bases_found, genes_found, genes_in, owned, window_starts
from .dna_genomes import VOCABULARY, N
from .dna_models import GeneModel, loss_of, make_masked
from .dna_synthetic import write_genome
from .experiment import Experiment, Phase, Task, in_halves
from .f1 import Found
from .frequencies import log_frequencies, unigram_cross_entropy
from .models import ATTENTIONS, attention_of, require_attention
from .results import DENSE, length_of
from .settings import Settings

LENGTHS, QUICK_LENGTHS = (1024, 16384, 65536), (64, 256, 512)
"""Bases of the sequences of default arms: few, as many as dense attention takes, and many."""

LEAST_WINDOW = 2
"""Bases of the windows in which genes are looked for, which lie half of them apart."""

ARMS = f"ATTENTION-LENGTH of {', '.join(ATTENTIONS)}, such as bigbird-65536"

Batch = tuple[np.ndarray, np.ndarray]
"""Tokens that a model gets, and a label for each, `IGNORED` where none is asked for."""


def default_arms(settings: Settings) -> list[str]:
    few, some, many = QUICK_LENGTHS if settings.quick else LENGTHS
    return [f"{DENSE}-{few}", f"{DENSE}-{some}", f"bigbird-{some}", f"bigbird-{many}"]


def require(settings: Settings, arms: list[str]) -> None:
    """Raises ValueError where an arm is not known or does not divide pieces, or there are no genomes."""
    for arm in arms:
        require_attention(arm, settings, ARMS)
        if length_of(arm) < LEAST_WINDOW:
            raise ValueError(f"--arms {arm}: has windows of {length_of(arm)} base; give at least {LEAST_WINDOW}.")
    if settings.genomes or not settings.quick:
        files_of(settings)


def files_of(settings: Settings) -> list[Files]:
    return genomes_of_folder(Path(settings.genomes)) if settings.genomes else installed_genomes()


def prepare(settings: Settings, data: Path) -> None:
    """Reads the genomes, of a quick run one that is made up, says what they are, and writes them as `dna_data` has
    them.

    Raises:
        ValueError: a file is none of its kind, or there is nothing to find genes in.
    """
    if settings.quick and not settings.genomes:
        write_genome(data / "genome")
        files = genomes_of_folder(data / "genome")
    else:
        files = files_of(settings)
    genomes = [read_genome(one, settings.document_tokens) for one in files]
    print(*genomes, sep="\n", flush=True)
    if not any(genome.is_annotated for genome in genomes):
        raise ValueError("No held-out sequence has a gene that is known; give more of the genome, or of its genes.")
    dna_data.write(genomes, data)


@dataclass(frozen=True)
class Sequences:
    """What an arm sees of pieces, each of `Settings.document_tokens` bases.

    Attributes:
        window: bases of a sequence; it divides the pieces.
        per_step: bases of a step.
    """

    window: int
    per_step: int
    device: torch.device

    def cut(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """Sequences, int64 (sequences, window) on the device, as many at a time as a step has."""
        parts = (torch.from_numpy(part.astype(np.int64)).reshape(-1, self.window) for part in batch)
        for tokens, labels in zip(*(part.split(self.per_step // self.window) for part in parts), strict=True):
            yield tokens.to(self.device), labels.to(self.device)


class BaseTask(Task):
    """Something that is asked of bases.

    Args:
        held_out: what is asked of those that are held out.
        frequencies: of labels in training, by `log_frequencies`.
        seed: numbers from which what is drawn follows.
    """

    def __init__(
        self,
        model: nn.Module,
        sequences: Sequences,
        windows: Windows,
        held_out: Batch,
        frequencies: Tensor,
        seed: Sequence[int],
    ) -> None:
        self.model, self.sequences, self.windows = model, sequences, windows
        self.held_out, self.frequencies, self.seed = held_out, frequencies, seed
        self.tokens_per_step = sequences.per_step

    @abstractmethod
    def batch_of(self, bases: np.ndarray, labels: np.ndarray, generator: np.random.Generator) -> Batch:
        """What is asked of bases of these classes."""

    @abstractmethod
    def logits(self, tokens: Tensor) -> Tensor:
        """(sequences, bases, what a base may be)."""

    def loss(self, step: int) -> Tensor:
        generator = np.random.default_rng([*self.seed, step])
        drawn = self.windows.drawn(self.sequences.per_step // self.windows.length, generator)
        ((tokens, labels),) = self.sequences.cut(self.batch_of(*drawn, generator))
        return loss_of(self.logits(tokens), labels)

    def evaluate(self) -> float:
        losses = [loss_of(self.logits(tokens), labels, "sum") for tokens, labels in self.sequences.cut(self.held_out)]
        return float(torch.stack(losses).sum()) / int((self.held_out[1] != IGNORED).sum())

    def unigram(self) -> float:
        labels = self.held_out[1]
        return unigram_cross_entropy(self.frequencies, labels[labels != IGNORED])


class MaskedBases(BaseTask):
    """Which bases are hidden."""

    asked = "masked bases"

    def batch_of(self, bases: np.ndarray, labels: np.ndarray, generator: np.random.Generator) -> Batch:
        return dna_data.masked(bases, generator)

    def logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens).logits
        return logits

    def measures(self) -> dict[str, float]:
        return {"masked_loss": self.evaluate()}


class Genes(BaseTask):
    """Which bases are in a gene, introns too, and on which strand.

    Args:
        known: the held-out sequences whose genes are known, whole.
    """

    asked = "genes"

    def __init__(self, *arguments: Any, known: Sequence[Annotated]) -> None:
        super().__init__(*arguments)
        self.known = known

    def batch_of(self, bases: np.ndarray, labels: np.ndarray, generator: np.random.Generator) -> Batch:
        return bases, class_labels(labels)

    def logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens)
        return logits

    def measures(self) -> dict[str, float]:
        """Of bases and of genes, over all sequences together."""
        bases, genes = Found(), Found()
        for one in self.known:
            predicted = self.predicted(one.contig.bases)
            bases += bases_found(predicted, one.labels)
            genes += genes_found(genes_in(predicted), one.contig.genes)
        return {"base_f1": bases.f1, "gene_f1": genes.f1}

    def predicted(self, bases: np.ndarray) -> np.ndarray:
        """The class of each base of a whole sequence."""
        window = self.sequences.window
        starts = window_starts(len(bases), window)
        windows = np.stack([bases[start : start + window] for start in starts])
        said = [self.logits(tokens).argmax(-1).byte().cpu() for tokens, _ in self.sequences.cut((windows, windows))]
        own = owned(starts, window, len(bases))
        classes = zip(torch.cat(said).numpy(), starts, own, strict=True)
        return np.concatenate([of_window[a - start : b - start] for of_window, start, (a, b) in classes])


def phases(settings: Settings, data: Path, arm: str, seed: int, device: torch.device) -> list[Phase]:
    return in_halves(partial(make_task, settings, data, arm, seed, device))


def make_task(
    settings: Settings, data: Path, arm: str, seed: int, device: torch.device, before: nn.Module | None
) -> Task:
    """Masked bases with a new model, then genes with the encoder of that one."""
    attention = attention_of(arm)
    sequences = Sequences(attention.length, settings.tokens_per_step, device)
    training, held_out = dna_data.read(data, TRAINING), dna_data.read(data, HELD_OUT)
    stretches = Stretches.of(held_out, settings.document_tokens)
    if before is None:
        windows = Windows(training, settings.document_tokens)
        of_bases = log_frequencies((bases[bases > N] for one in training for bases in [one.contig.bases]), VOCABULARY)
        model = make_masked(attention, settings, of_bases, seed, device)
        return MaskedBases(model, sequences, windows, stretches.masked, of_bases, [seed, 0])
    windows = Windows([one for one in training if one.is_annotated], settings.document_tokens)
    of_classes = log_frequencies((one.labels[one.labels != BOTH] for one in windows.sequences), CLASSES)
    known = [one for one in held_out if one.is_annotated]
    model = GeneModel(before.base_model, of_classes)
    return Genes(model, sequences, windows, stretches.classes, of_classes, [seed, 1], known=known)


EXPERIMENT = Experiment(ARMS, default_arms, require, prepare, phases)
