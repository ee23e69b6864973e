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
from .masked import MaskedTask, Rows, log_frequencies, macro_f1, unigram_cross_entropy
from .models import ATTENTIONS, Classifier, attention_of, default_arms, make_bert, require_attention
from .results import Settings
from .texts import encoded, trained_tokenizer, vocabulary_of
from .trainer import Experiment, Phase, Task, in_halves

LEAST_FILES, QUICK_LEAST_FILES = 30, 8
"""Least files of a package, each of half as many tokens as the longest sequence or more."""

CHARACTERS = 4
"""Most characters of a token on the average."""

QUICK_PACKAGES = 4

MASKED_ROWS = 64
"""As long as the longest sequence, of what is held out, as many at most that the loss of masked tokens is of."""

ARMS = f"ATTENTION-LENGTH of {', '.join(ATTENTIONS)}, such as bslongformer-8192"

TRAINING, HELD_OUT = "training", "held_out"


def require(settings: Settings, arms: list[str]) -> None:
    """Raises ValueError where an arm is not known, or does not divide documents."""
    for arm in arms:
        require_attention(arm, settings, ARMS)


def prepare(settings: Settings, data: Path) -> None:
    """Says which files of installed packages there are, and writes them as `read` reads them.

    Raises:
        ValueError: too few packages are installed, or their files are fewer than a step takes.
    """
    texts = texts_of(installed_sources(), wanted(settings))
    packages = dict.fromkeys(text.package for text in texts)
    print(f"{len(texts):,} files of {len(packages)} packages: {', '.join(packages)}", flush=True)
    write(texts, data, vocabulary_of(settings) - 1, settings.document_tokens)
    rows = len(read(data, TRAINING).rows(settings.document_tokens))
    if rows < (least := settings.tokens_per_step // settings.document_tokens):
        raise ValueError(
            f"The files to train on have {rows:,} times {settings.document_tokens:,} tokens, and a step takes {least}: "
            "give fewer --tokens-per-step."
        )


def wanted(settings: Settings) -> Wanted:
    characters = CHARACTERS * settings.document_tokens
    least_files = QUICK_LEAST_FILES if settings.quick else LEAST_FILES
    # A file is read to one and a half times what a sequence takes, as its imports go.
    return Wanted(least_files, characters // 2, characters * 3 // 2, QUICK_PACKAGES if settings.quick else None)


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
        tokens_per_step: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self.model: Any = model
        self.length, self.device = length, device
        self.training, self.held_out, self.frequencies = training, held_out, frequencies
        self.files = min(tokens_per_step // length, len(training.packages))
        self.tokens_per_step = self.files * length
        self.rows = Rows(len(training.packages), self.files, seed)

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


def phases(settings: Settings, data: Path, arm: str, seed: int, device: torch.device) -> list[Phase]:
    return in_halves(partial(make_task, settings, data, arm, seed, device))


def make_task(settings: Settings, data: Path, arm: str, seed: int, device: torch.device, before: Any) -> Task:
    """Masked tokens with a new model, then packages with the encoder of that one."""
    attention, size, per_step = attention_of(arm), vocabulary_of(settings), settings.tokens_per_step
    training, held_out = read(data, TRAINING), read(data, HELD_OUT)
    if before is None:
        rows, of_held_out = (side.rows(settings.document_tokens) for side in (training, held_out))
        of_tokens = log_frequencies([rows], size)
        model = make_bert(attention, settings, of_tokens, seed, device)
        some = of_held_out[:: -(-len(of_held_out) // MASKED_ROWS)]
        return MaskedTask(model, attention.length, rows, some, of_tokens, size - 1, per_step, seed, device)
    of_packages = log_frequencies([training.packages], len(json.loads((data / "packages.json").read_text())))
    model = Classifier(before.base_model, of_packages)
    return Packages(model, attention.length, training, held_out, of_packages, per_step, seed, device)


EXPERIMENT = Experiment(default_arms, require, prepare, phases)
