"""Long documents: which package a source file belongs to, from its whole text without names of packages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ds_sparse.models.sparsify import sparsify

from . import chosen, recall
from .documents_texts import Text, Wanted, installed_sources, texts_of
from .models import Attention, Classifier, attention_of, make_bert, short_of
from .results import CAUSAL, DENSE, Answered, Case
from .tasks import (
    Rows,
    TokenTask,
    hidden,
    log_frequencies,
    macro_f1,
    masked_places,
    masked_task,
    unigram_cross_entropy,
)
from .texts import encoded, trained_tokenizer, vocabulary_of
from .trainer import Phase, Task

LEAST_FILES, QUICK_LEAST_FILES = 30, 8
"""Least files of a package."""

LEAST_TOKENS, QUICK_LEAST_TOKENS = 4096, 256
"""About the least of a file."""

CHARACTERS = 4
"""Most characters of a token on the average."""

QUICK_PACKAGES = 4

MASKED_ROWS = 64
"""As long as the longest sequence, of what is held out, as many at most that the loss of masked tokens is of."""

TRAINING, HELD_OUT = "training", "held_out"

PIECES = "pieces"
"""Kind of dense arms that see a whole file, in pieces of their length, each alone; they tell the mean of its logits."""

WHOLE, REMOVED = "whole", "far part removed"
SHUFFLED = {"far pieces shuffled": 64, "far tokens shuffled": 1}
"""What of a held-out file is shown: its far part is what an arm sees after the first tokens, as many as a short arm
sees. It is cut to so many tokens (in quick runs an eighth) that come in another order, the same for all seeds."""


def blocks_of(case: Case) -> chosen.Blocks:
    """Kinds of attention: those of `recall` that see both ways, and dense attention on pieces."""
    both_ways = {kind: block for kind, block in recall.blocks_of(case).items() if not kind.startswith(CAUSAL)}
    return both_ways | {PIECES: {}}


def default_arms(case: Case) -> list[str]:
    """The longest first: what is cut off then has something to compare."""
    short, longest = short_of(case), case.document_tokens
    lengths = [length for length in (longest, longest // 2, longest // 8) if length > short]
    kinds = DENSE, "bigbird", "bslongformer", "local_sliding_window"
    arms = [f"{kind}-{length}" for length in lengths for kind in kinds]
    return [f"{DENSE}-{short}", *arms[: len(kinds)], f"{PIECES}-{short}", f"indexer-{longest}", *arms[len(kinds) :]]


def require(case: Case) -> None:
    """Raises UsageError where the case's arm is not known, or its sequences do not fit."""
    chosen.require(case, blocks_of(case))


def prepare(case: Case, data: Path) -> None:
    """Says which files of installed packages there are, and writes them as `read` reads them.

    Raises:
        ValueError: too few packages are installed, or their files are fewer than a step takes.
    """
    texts = texts_of(installed_sources(), wanted(case))
    packages = dict.fromkeys(text.package for text in texts)
    print(f"{len(texts):,} files of {len(packages)} packages: {', '.join(packages)}", flush=True)
    write(texts, data, vocabulary_of(case) - 1, case.document_tokens)
    rows = len(read(data, TRAINING).rows(case.document_tokens))
    if rows < (least := case.tokens_per_step // case.document_tokens):
        raise ValueError(
            f"The files to train on have {rows:,} times {case.document_tokens:,} tokens, and a step takes {least}: "
            "give fewer --tokens-per-step."
        )


def wanted(case: Case) -> Wanted:
    least_files, least_tokens = (QUICK_LEAST_FILES, QUICK_LEAST_TOKENS) if case.quick else (LEAST_FILES, LEAST_TOKENS)
    # A file is read to one and a half times what a sequence takes, as its imports go.
    characters = CHARACTERS * least_tokens, CHARACTERS * case.document_tokens * 3 // 2
    return Wanted(least_files, *characters, QUICK_PACKAGES if case.quick else None)


@dataclass(frozen=True)
class Documents:
    """Files as tokens.

    Attributes:
        tokens: uint16 (files, tokens), 0 after the end of a file.
        lengths: int64 (files), how many tokens each has.
        packages: int64 (files), the number of the package.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    packages: np.ndarray

    def rows(self, length: int) -> np.ndarray:
        """The tokens of all files end to end, in rows (rows, length), without the rest."""
        tokens = self.tokens[np.arange(self.tokens.shape[1]) < self.lengths[:, None]]
        return tokens[: len(tokens) // length * length].reshape(-1, length)

    def pieces(self, length: int, most: int) -> tuple[Documents, np.ndarray]:
        """The first pieces of so many tokens of each file, as files, at most so many; and the number of the file that
        each is of."""
        tokens = self.tokens[:, : most * length].reshape(-1, length)
        first = np.arange(0, min(most * length, self.tokens.shape[1]), length)
        lengths = (self.lengths[:, None] - first).clip(0, length)
        files = lengths.nonzero()[0]
        there = lengths.ravel() > 0
        return Documents(tokens[there], lengths.ravel()[there], self.packages[files]), files

    def shuffled(self, near: int, size: int) -> Documents:
        """The same with pieces of so many tokens in a random order, of what comes after the first `near` tokens. What
        is left of a file after its last whole piece stays."""
        tokens = self.tokens.copy()
        for number, length in enumerate(self.lengths):
            far = tokens[number, near : near + max(length - near, 0) // size * size].reshape(-1, size)
            far[:] = np.random.default_rng(number).permutation(far)
        return replace(self, tokens=tokens)


def write(texts: Sequence[Text], folder: Path, size: int, length: int) -> None:
    """Writes what `read` reads: the first `length` tokens of each text, by a tokenizer of at most `size` tokens that is
    trained on those that are not held out."""
    tokenizer = trained_tokenizer((text.text for text in texts if not text.is_held_out), size)
    tokenizer.save(str(folder / "tokenizer.json"))
    packages = sorted({text.package for text in texts})
    (folder / "packages.json").write_text(json.dumps(packages))
    for side in (TRAINING, HELD_OUT):
        of_side = [text for text in texts if text.is_held_out == (side == HELD_OUT)]
        ids = [one[:length] for one in encoded(tokenizer, [text.text for text in of_side])]
        np.savez(
            folder / f"{side}.npz",
            tokens=np.stack([np.pad(one, (0, length - len(one))) for one in ids]),
            lengths=np.array([len(one) for one in ids]),
            packages=np.array([packages.index(text.package) for text in of_side]),
        )


def read(folder: Path, side: str) -> Documents:
    """Reads the files of a side, `TRAINING` or `HELD_OUT`."""
    return Documents(**np.load(folder / f"{side}.npz"))


class Packages(Task):
    """The package of a file, of which the first `most` pieces of `length` tokens are seen, each alone; a step trains on
    so many tokens."""

    asked = "packages"
    model: Classifier

    def __init__(
        self,
        model: Classifier,
        length: int,
        most: int,
        training: Documents,
        held_out: Documents,
        frequencies: Tensor,
        case: Case,
        device: torch.device,
    ) -> None:
        self.model: Any = model
        self.length, self.most, self.near, self.device = length, most, short_of(case), device
        self.training, self.held_out, self.frequencies = training.pieces(length, most)[0], held_out, frequencies
        self.sizes = {shown: size // 8 or 1 if case.quick else size for shown, size in SHUFFLED.items()}
        self.files = min(case.tokens_per_step // length, len(self.training.packages))
        self.tokens_per_step = self.files * length
        self.rows = Rows(len(self.training.packages), self.files, case.seed)

    def logits(self, documents: Documents, files: np.ndarray) -> Tensor:
        tokens = torch.from_numpy(documents.tokens[files].astype(np.int64))
        lengths = torch.from_numpy(documents.lengths[files])
        return self.model.of_sequences(tokens.to(self.device), lengths.to(self.device)).float()

    def loss(self, step: int) -> Tensor:
        files = self.rows.of(step)
        packages = torch.from_numpy(self.training.packages[files])
        return cross_entropy(self.logits(self.training, files), packages.to(self.device))

    def evaluate(self) -> float:
        logits, packages = self.logits_of_files(self.held_out), self.held_out.packages
        self.predicted = logits.argmax(1).numpy()
        return float(cross_entropy(logits, torch.from_numpy(packages)))

    def unigram(self) -> float:
        return unigram_cross_entropy(self.frequencies, self.held_out.packages)

    def logits_of_files(self, documents: Documents) -> Tensor:
        """fp32 (files, packages), on the CPU."""
        pieces, files = documents.pieces(self.length, self.most)
        parts = np.array_split(np.arange(len(files)), -(-len(files) // self.files))
        logits = torch.cat([self.logits(pieces, part).cpu() for part in parts])
        total = torch.zeros(len(documents.packages), logits.shape[1]).index_add_(0, torch.from_numpy(files), logits)
        return total / torch.from_numpy(np.bincount(files))[:, None]

    def measures(self) -> dict[str, float]:
        """Of the last evaluation."""
        predicted, packages = self.predicted, self.held_out.packages
        return {"accuracy": float((predicted == packages).mean()), "macro_f1": macro_f1(predicted, packages)}

    def answered(self) -> list[Answered]:
        """By what of files is shown, the whole as in the last evaluation, and by the tokens that they have."""
        files = self.held_out
        seen = replace(files, lengths=files.lengths.clip(max=self.most * self.length))
        others = {REMOVED: replace(files, lengths=files.lengths.clip(max=self.near))}
        others |= {shown: seen.shuffled(self.near, size) for shown, size in self.sizes.items()}
        predicted = {shown: self.logits_of_files(other).argmax(1).numpy() for shown, other in others.items()}
        powers = 2 ** np.log2(files.lengths).astype(int)
        return [
            Answered(0, int(power), int(of.sum()), int((of & (told == files.packages)).sum()), shown)
            for shown, told in ({WHOLE: self.predicted} | predicted).items()
            for power in np.unique(powers)
            for of in [powers == power]
        ]


def phases(case: Case, data: Path, device: torch.device) -> list[Phase]:
    return [partial(make_task, case, data, device)] * 2


def make_task(case: Case, data: Path, device: torch.device, before: Any) -> Task:
    """Masked tokens with a new model, then packages with the encoder of that one."""
    blocks, size = blocks_of(case), vocabulary_of(case)
    attention = attention_of(case.arm, blocks.keys())
    training, held_out = read(data, TRAINING), read(data, HELD_OUT)
    if before is None:
        rows, of_held_out = (side.rows(case.document_tokens) for side in (training, held_out))
        of_tokens = log_frequencies([rows], size)
        model = make_bert(Attention(DENSE, attention.length), case, of_tokens, device)
        if block := blocks[attention.kind]:
            sparsify(model, {"seed": 0} | block if "num_random_blocks" in block else block)
        some = of_held_out[:: -(-len(of_held_out) // MASKED_ROWS)]
        asked = hidden(some, masked_places(some.shape, 0), size - 1)
        return masked_task(TokenTask, model, attention.length, rows, asked, of_tokens, size - 1, case, device)
    of_packages = log_frequencies([training.packages], len(json.loads((data / "packages.json").read_text())))
    classifier = Classifier(before.base_model, of_packages)
    most = case.document_tokens // attention.length if attention.kind == PIECES else 1
    return Packages(classifier, attention.length, most, training, held_out, of_packages, case, device)
