"""Long documents: which package a source file belongs to, from its whole text without names of packages."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ds_sparse.extras import optional_imports

from . import documents_data
from .documents_data import HELD_OUT, TRAINING, Documents
from .documents_texts import Wanted, installed_sources, texts_of
from .experiment import Experiment, Phase, Task, in_halves
from .f1 import macro_f1
from .frequencies import log_frequencies, unigram_cross_entropy
from .masked import MaskedTask, Rows
from .models import ATTENTIONS, attention_of, default_arms, give_frequencies, make_bert, require_attention
from .settings import Settings
from .vocabulary import size_of

with optional_imports():
    from transformers import PreTrainedModel

LEAST_FILES, QUICK_LEAST_FILES = 30, 8
"""Of a package, each of half as many tokens as the longest sequence or more."""

CHARACTERS = 4
"""Of a token, as many at most on the average."""

QUICK_PACKAGES = 4

MASKED_ROWS = 64
"""As long as the longest sequence, of what is held out, as many at most that the loss of masked tokens is of."""

ARMS = f"ATTENTION-LENGTH of {', '.join(ATTENTIONS)}, such as bslongformer-8192"


def require(settings: Settings, arms: list[str]) -> None:
    """Raises ValueError where an arm is not known, or does not divide documents."""
    for arm in arms:
        require_attention(arm, settings, ARMS)


def prepare(settings: Settings, data: Path) -> None:
    """Says which files of installed packages there are, and writes them as `documents_data` has them.

    Raises:
        ValueError: too few packages are installed, or their files are fewer than a step takes.
    """
    texts = texts_of(installed_sources(), wanted(settings))
    packages = dict.fromkeys(text.package for text in texts)
    print(f"{len(texts):,} files of {len(packages)} packages: {', '.join(packages)}", flush=True)
    documents_data.write(texts, data, size_of(settings) - 1, settings.document_tokens)
    rows = len(documents_data.rows_of(documents_data.read(data, TRAINING), settings.document_tokens))
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


class PackageModel(nn.Module):
    """Packages from the mean of an encoder's vectors; it begins with their frequencies."""

    def __init__(self, encoder: PreTrainedModel, frequencies: Tensor) -> None:
        super().__init__()
        self.encoder = encoder
        self.packages = nn.Linear(encoder.config.hidden_size, len(frequencies), device=encoder.device)
        give_frequencies(self.packages, frequencies)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Logits (files, packages) of int64 tokens (files, tokens), of which each file has so many."""
        mask = torch.arange(input_ids.shape[1], device=input_ids.device) < lengths[:, None]
        hidden = self.encoder(input_ids=input_ids, attention_mask=mask.long()).last_hidden_state
        mean = (hidden * mask[..., None]).sum(1) / lengths[:, None]
        logits: Tensor = self.packages(mean)
        return logits


class Packages(Task):
    """The package of a file, of which the first `length` tokens are seen.

    Args:
        model: of which a step trains on so many tokens.
    """

    asked = "packages"

    def __init__(
        self,
        model: PackageModel,
        length: int,
        training: Documents,
        held_out: Documents,
        frequencies: Tensor,
        tokens_per_step: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self.model, self.length, self.device = model, length, device
        self.training, self.held_out, self.frequencies = training, held_out, frequencies
        self.files = min(tokens_per_step // length, len(training.packages))
        self.tokens_per_step = self.files * length
        self.rows = Rows(len(training.packages), self.files, seed)

    def logits(self, documents: Documents, files: np.ndarray) -> Tensor:
        tokens = torch.from_numpy(documents.tokens[files, : self.length].astype(np.int64))
        lengths = torch.from_numpy(np.minimum(documents.lengths[files], self.length))
        return self.model(tokens.to(self.device), lengths.to(self.device)).float()

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
        accuracy = float((predicted == packages).mean())
        return {"accuracy": accuracy, "macro_f1": macro_f1(predicted, packages)}


def phases(settings: Settings, data: Path, arm: str, seed: int, device: torch.device) -> list[Phase]:
    return in_halves(partial(make_task, settings, data, arm, seed, device))


def make_task(
    settings: Settings, data: Path, arm: str, seed: int, device: torch.device, before: PreTrainedModel | None
) -> Task:
    """Masked tokens with a new model, then packages with the encoder of that one."""
    attention, size, per_step = attention_of(arm), size_of(settings), settings.tokens_per_step
    training, held_out = documents_data.read(data, TRAINING), documents_data.read(data, HELD_OUT)
    if before is None:
        rows = documents_data.rows_of(training, settings.document_tokens)
        of_tokens = log_frequencies([rows], size)
        model = make_bert(attention, settings, of_tokens, seed, device)
        of_held_out = documents_data.rows_of(held_out, settings.document_tokens)
        some = of_held_out[:: -(-len(of_held_out) // MASKED_ROWS)]
        return MaskedTask(model, attention.length, rows, some, of_tokens, size - 1, per_step, seed, device)
    of_packages = log_frequencies([training.packages], len(documents_data.names(data)))
    packages = PackageModel(before.base_model, of_packages)
    return Packages(packages, attention.length, training, held_out, of_packages, per_step, seed, device)


EXPERIMENT = Experiment(ARMS, default_arms, require, prepare, phases)
