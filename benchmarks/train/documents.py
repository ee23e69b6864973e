"""Long documents: which package a source file belongs to, from its whole text without names of packages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .documents_texts import Text, Wanted, installed_sources, texts_of
from .models import Classifier, attention_of, make_bert, require_attention
from .results import Case
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
"""Least files of a package, each of half as many tokens as the longest sequence or more."""

CHARACTERS = 4
"""Most characters of a token on the average."""

QUICK_PACKAGES = 4

MASKED_ROWS = 64
"""As long as the longest sequence, of what is held out, as many at most that the loss of masked tokens is of."""

TRAINING, HELD_OUT = "training", "held_out"

require = require_attention


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
    characters = CHARACTERS * case.document_tokens
    least_files = QUICK_LEAST_FILES if case.quick else LEAST_FILES
    # A file is read to one and a half times what a sequence takes, as its imports go.
    return Wanted(least_files, characters // 2, characters * 3 // 2, QUICK_PACKAGES if case.quick else None)


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
    """The package of a file, of which the first `length` tokens are seen; a step trains on so many tokens."""

    asked = "packages"
    model: Classifier

    def __init__(
        self,
        model: Classifier,
        length: int,
        training: Documents,
        held_out: Documents,
        frequencies: Tensor,
        case: Case,
        device: torch.device,
    ) -> None:
        self.model: Any = model
        self.length, self.device = length, device
        self.training, self.held_out, self.frequencies = training, held_out, frequencies
        self.files = min(case.tokens_per_step // length, len(training.packages))
        self.tokens_per_step = self.files * length
        self.rows = Rows(len(training.packages), self.files, case.seed)

    def logits(self, documents: Documents, files: np.ndarray) -> Tensor:
        tokens = torch.from_numpy(documents.tokens[files, : self.length].astype(np.int64))
        lengths = torch.from_numpy(np.minimum(documents.lengths[files], self.length))
        return self.model.of_sequences(tokens.to(self.device), lengths.to(self.device)).float()

    def loss(self, step: int) -> Tensor:
        files = self.rows.of(step)
        packages = torch.from_numpy(self.training.packages[files])
        return cross_entropy(self.logits(self.training, files), packages.to(self.device))

    def evaluate(self) -> float:
        return float(cross_entropy(self.held_out_logits(), torch.from_numpy(self.held_out.packages)))

    def unigram(self) -> float:
        return unigram_cross_entropy(self.frequencies, self.held_out.packages)

    def held_out_logits(self) -> Tensor:
        """fp32 (files, packages), on the CPU."""
        files = np.arange(len(self.held_out.packages))
        parts = np.array_split(files, -(-len(files) // self.files))
        return torch.cat([self.logits(self.held_out, part).cpu() for part in parts])

    def measures(self) -> dict[str, float]:
        predicted, packages = self.held_out_logits().argmax(1).numpy(), self.held_out.packages
        return {"accuracy": float((predicted == packages).mean()), "macro_f1": macro_f1(predicted, packages)}


def phases(case: Case, data: Path, device: torch.device) -> list[Phase]:
    return [partial(make_task, case, data, device)] * 2


def make_task(case: Case, data: Path, device: torch.device, before: Any) -> Task:
    """Masked tokens with a new model, then packages with the encoder of that one."""
    attention, size = attention_of(case.arm), vocabulary_of(case)
    training, held_out = read(data, TRAINING), read(data, HELD_OUT)
    if before is None:
        rows, of_held_out = (side.rows(case.document_tokens) for side in (training, held_out))
        of_tokens = log_frequencies([rows], size)
        model = make_bert(attention, case, of_tokens, device)
        some = of_held_out[:: -(-len(of_held_out) // MASKED_ROWS)]
        asked = hidden(some, masked_places(some.shape, 0), size - 1)
        return masked_task(TokenTask, model, attention.length, rows, asked, of_tokens, size - 1, case, device)
    of_packages = log_frequencies([training.packages], len(json.loads((data / "packages.json").read_text())))
    return Packages(
        Classifier(before.base_model, of_packages), attention.length, training, held_out, of_packages, case, device
    )
