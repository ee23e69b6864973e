"""A training step of Transformers' BERT with sparse, dense and no attention."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from benchmarks.models.bert_cases import LABELLED, MODEL, Case
from ds_sparse.bench.cases import NO_ATTENTION, STRUCTURES_IN_BERT
from ds_sparse.bench.machine import DTYPES
from ds_sparse.bench.verification import require_as_accurate
from ds_sparse.extras import optional_imports
from ds_sparse.layout import to_token_mask
from ds_sparse.models.sparsify import sparsify

with optional_imports():
    from transformers import AttentionInterface, BertConfig, BertForMaskedLM

VERIFIED_TOKENS, VERIFIED_LAYERS = 1024, 2

LOSS_SCALE = 2**12
"""What gradients are made with that are verified: without it fp16 has but a few bits for them."""

LEAST_ERROR_ALLOWED = 1e-3
"""Relative; another layout makes a hundred times that. In fp32 the layers above differ by more than a few roundings."""

VALUE_ALONE, MASKED = "ds_sparse_bench_value", "ds_sparse_bench_masked"
"""Attentions by their names in Transformers."""


def bert_config(case: Case, **sizes: int) -> BertConfig:
    return BertConfig(
        **(MODEL[case.device] | sizes),
        max_position_embeddings=case.seq_len,
        hidden_dropout_prob=case.dropout,
        attention_probs_dropout_prob=case.dropout,
    )


def make_model(case: Case, device: torch.device, **sizes: int) -> BertForMaskedLM:
    """BERT with the attention that Transformers gives it, the same numbers at every call."""
    return built(BertForMaskedLM, bert_config(case, **sizes), case, device)


def built(model: Any, config: Any, case: Case, device: torch.device) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        return model(config).to(DTYPES[case.dtype]).train()


def switch(model: BertForMaskedLM, name: str) -> None:
    """Gives BERT its attention: a structure, none, or one that Transformers names."""
    if name in STRUCTURES_IN_BERT:
        sparsify(model, STRUCTURES_IN_BERT[name](model.config.num_attention_heads))
    else:
        model.set_attn_implementation(VALUE_ALONE if name == NO_ATTENTION else name)


class Batch(NamedTuple):
    """Tokens and labels, (B, T), and the flat places of those with a label."""

    tokens: Tensor
    labels: Tensor
    labelled: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(x.to(device, non_blocking=True) for x in self))

    def pinned(self) -> Batch:
        """In memory of the CPU from which a GPU copies while it computes."""
        return Batch(*(x.pin_memory() for x in self))


def batch(sequences: int, seq_len: int, vocabulary: int, device: torch.device, seed: int = 0) -> Batch:
    """Random, without padding, the same at every call with a seed."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (sequences, seq_len), generator=generator)
    has_label = torch.rand(tokens.shape, generator=generator) < LABELLED
    labels = tokens.masked_fill(~has_label, -100)
    return Batch(tokens, labels, has_label.flatten().nonzero()[:, 0]).to(device)


def train_step(model: Any, data: Batch, predicts_all: bool) -> None:
    loss_of(model, data, predicts_all).backward()
    model.zero_grad(set_to_none=True)


def loss_of(model: Any, data: Batch, predicts_all: bool) -> Tensor:
    if predicts_all:
        return model(input_ids=data.tokens, labels=data.labels).loss
    hidden = model.base_model(input_ids=data.tokens).last_hidden_state.flatten(0, 1)
    head = model.lm_head if hasattr(model, "lm_head") else model.cls
    return cross_entropy(head(hidden[data.labelled]), data.labels.flatten()[data.labelled])


def verify(name: str, dtype: str, device: torch.device) -> None:
    """Holds what reaches the first layer's query, the gradient of its weight, to a dense model with the layout as its
    mask; that gradient goes through attention alone.

    Raises:
        ArithmeticError: an error larger than `require_as_accurate` allows.
    """
    case = Case(VERIFIED_TOKENS, 0.0, dtype, device.type)
    model = make_model(case, device, num_hidden_layers=VERIFIED_LAYERS)
    config = STRUCTURES_IN_BERT[name](model.config.num_attention_heads)
    layout = config.make_bool_layout(case.seq_len)
    data = batch(1, case.seq_len, model.config.vocab_size, device)
    AttentionInterface.register(MASKED, partial(with_mask, to_token_mask(layout, config.block).to(device)))
    model.set_attn_implementation(MASKED)
    plain = query_gradient(model, data)
    exact = query_gradient(model.double(), data)
    model = make_model(case, device, num_hidden_layers=VERIFIED_LAYERS)
    switch(model, name)
    what = f"{name}: the gradient of the first layer's query weight"
    require_as_accurate(what, query_gradient(model, data), plain, exact, least=LEAST_ERROR_ALLOWED)


def query_gradient(model: BertForMaskedLM, data: Batch) -> Tensor:
    weight = model.bert.encoder.layer[0].attention.self.query.weight
    (grad,) = torch.autograd.grad(LOSS_SCALE * loss_of(model, data, predicts_all=True), [weight])
    return grad


def with_mask(
    mask: Tensor, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Dense attention with a mask, bool (H or 1, T, T)."""
    return scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).contiguous(), None


def value_alone(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """The value as it is: what a step takes without any attention."""
    return value.transpose(1, 2).contiguous(), None


AttentionInterface.register(VALUE_ALONE, value_alone)
