"""A decoder on bytes of Python sources, dense, in windows, and with blocks that it chooses."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.models.attentions import DENSE_IN_BERT
from ds_sparse.models.sparsify import sparsify
from ds_sparse.tools.extras import optional_imports

from . import chosen
from .examples import example
from .models import Attention, attention_of
from .results import DENSE, MODELS, Case
from .tasks import Rows, log_frequencies, unigram_cross_entropy
from .trainer import Phase, Task

with optional_imports():
    from transformers import LlamaConfig, LlamaForCausalLM

CORPUS, BYTES = "stdlib", 256

HELD_OUT, QUICK_HELD_OUT = 32, 4
"""Sequences at most."""

GROUP = 4
"""Most heads that share a key head."""


def keys_of(case: Case) -> dict[str, int]:
    return chosen.sizes(case, 16)


def blocks_of(case: Case) -> chosen.Blocks:
    """All but NSA see as many keys: those of `num_chosen_blocks`."""
    both = keys_of(case)
    block, number = both.values()
    window = {
        "block": block,
        "num_sliding_window_blocks": 2 * number - 1,
        "attention": "unidirectional",
        "causal": True,
    }
    return {
        "local_sliding_window": {"mode": "local_sliding_window", **window},
        "moba": {"mode": "moba", **both, "chosen_by_group": True},
        "nsa": {"mode": "nsa", **both, "window": number * block // 2},
        "indexer": {"mode": "indexer", **both},
    }


def default_arms(case: Case) -> list[str]:
    return chosen.default_arms(case, blocks_of(case))


def require(case: Case) -> None:
    chosen.require(case, blocks_of(case))


def prepare(case: Case, data: Path) -> None:
    """Writes train.npy and held_out.npy, uint8 (N, T): bytes of the corpus of examples/gpt_neox.

    Raises:
        ValueError: the corpus is too small for a step.
    """
    corpus, most = example("corpus").load_corpus(CORPUS), QUICK_HELD_OUT if case.quick else HELD_OUT
    text = example("byte_text").Text(corpus.split(), case.document_tokens, 0, most)
    if len(text.training) < (least := case.tokens_per_step // case.document_tokens):
        raise ValueError(
            f"The corpus {CORPUS} has {len(text.training)} sequences of {case.document_tokens:,} bytes, and a step "
            f"takes {least}: give shorter --document-tokens."
        )
    np.save(data / "train.npy", text.training.numpy())
    np.save(data / "held_out.npy", text.held_out.numpy())


class Bytes(Task):
    """The next byte.

    Args:
        length: of sequences; it divides the pieces'.
        train, held_out: uint8 (pieces, T).
    """

    asked = "bytes"
    classes = BYTES

    def __init__(
        self, model: Any, length: int, train: np.ndarray, held_out: np.ndarray, case: Case, device: torch.device
    ) -> None:
        self.model, self.length, self.device = model, length, device
        self.train, self.held_out, self.tokens_per_step = train, held_out, case.tokens_per_step
        self.rows = Rows(len(train), case.tokens_per_step // train.shape[1], case.seed)

    def sequences(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(rows.astype(np.int64)).reshape(-1, self.length).to(self.device)

    def losses(self, tokens: Tensor) -> Tensor:
        """Of each next byte (B, length - 1), fp32."""
        logits = self.model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
        return cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")

    def loss(self, step: int) -> Tensor:
        return self.losses(self.sequences(self.train[self.rows.of(step)])).mean()

    def held_out_losses(self) -> Tensor:
        parts = self.sequences(self.held_out).split(max(1, self.tokens_per_step // self.length))
        return torch.cat([self.losses(part) for part in parts])

    def evaluate(self) -> float:
        return self.held_out_losses().mean().item()

    def unigram(self) -> float:
        return unigram_cross_entropy(log_frequencies([self.train], self.classes), self.held_out[:, 1:])

    def measures(self) -> dict[str, float]:
        """The loss of the last quarter of sequences, and what is chosen in one."""
        late = self.held_out_losses()[:, -(self.length // 4) :].mean().item()
        tokens = self.sequences(self.held_out[:1])[:1]
        return {"late_loss": late} | chosen.measures(self.model, input_ids=tokens, use_cache=False)


def phases(case: Case, data: Path, device: torch.device) -> list[Phase]:
    return [partial(make_task, case, data, device)]


def make_task(case: Case, data: Path, device: torch.device, before: Any) -> Task:
    attention = attention_of(case.arm, (DENSE, *blocks_of(case)))
    train, held_out = (np.load(data / f"{name}.npy") for name in ("train", "held_out"))
    return Bytes(make_decoder(attention, case, device), attention.length, train, held_out, case, device)


def make_decoder(attention: Attention, case: Case, device: torch.device) -> LlamaForCausalLM:
    """New weights in fp32, the same of a seed but for those that learn to choose."""
    model = new_decoder(attention.length, case, device)
    if attention.kind != DENSE:
        sparsify(model, blocks_of(case)[attention.kind])
    return model


def new_decoder(length: int, case: Case, device: torch.device, classes: int = BYTES, **config: Any) -> LlamaForCausalLM:
    """A dense one."""
    shape = MODELS[case.model]
    settings = LlamaConfig(
        **shape,
        num_key_value_heads=max(1, shape["num_attention_heads"] // GROUP),
        vocab_size=classes,
        max_position_embeddings=length,
        attn_implementation=DENSE_IN_BERT,
        **config,
    )
    torch.manual_seed(case.seed)
    return LlamaForCausalLM(settings).to(device)
