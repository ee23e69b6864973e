"""A training step of BERT with sparse attention, with dense, and with none: what attention costs end to end.

Masked-language modelling with Transformers' own model, forward and backward without an optimizer, parameters in the
dtype that is measured. This bench stands on the patch of models, above all others.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from ..extras import optional_imports
from ..layout import to_token_mask
from ..models.sparsify import sparsify
from ..modules.structured_attention import whole_blocks
from .bert_results import LABELLED, MODEL, Case, Row
from .cases import IN_BERT, NO_ATTENTION
from .machine import DTYPES, GIB, in_turns, timed
from .reasons import in_short
from .verification import require_as_accurate

with optional_imports():
    import transformers
    from transformers import AttentionInterface, BertConfig, BertForMaskedLM

VERIFIED_TOKENS, VERIFIED_LAYERS = 1024, 2

LOSS_SCALE = 2**12
"""What gradients are made with that are verified: without it fp16 has but a few bits for them."""

LEAST_ERROR_ALLOWED = 1e-3
"""Relative; another layout makes a hundred times that. In fp32 the layers above differ by more than a few roundings."""


def require_layouts(names: Sequence[str], seq_lens: Sequence[int]) -> None:
    """Raises ValueError where a structure has no layout of a length."""
    for name in names:
        for seq_len in seq_lens if name in IN_BERT else ():
            config = IN_BERT[name](1)
            try:
                config.make_bool_layout(whole_blocks(seq_len, config.block))
            except ValueError as error:
                raise ValueError(
                    f"{name} has no layout of {seq_len} tokens: {error} Give longer sequences, or leave it out."
                ) from None


def run_case(
    case: Case, names: Sequence[str], wrong: Mapping[str, str], device: torch.device, repeats: int, seconds: float
) -> list[Row]:
    """Times the steps in turns: `repeats` rounds, or as many as begin within `seconds`, three at least. Without any
    attention too, as the others are compared with that. Those that are `wrong`, with the reason, are not timed."""
    names = list(dict.fromkeys([NO_ATTENTION, *names]))
    peaks: dict[str, float | None] = {}
    runs: dict[str, Callable[[], float]] = {}
    reasons = dict(wrong)
    for name in names:
        if name not in reasons:
            try:
                runs[name], peaks[name] = prepared(name, case, device)
            except Exception as error:  # noqa: BLE001 - whatever stops one is a line of the table
                reasons[name] = in_short(error)
    times = in_turns(runs, repeats, seconds, f"{case.seq_len} tokens")
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    return [
        Row(name, reason=reasons[name])
        if name in reasons
        else Row(
            name,
            medians[name],
            medians[NO_ATTENTION] / medians[name] if NO_ATTENTION in medians else None,
            peaks[name],
            rounds=len(times[name]),
        )
        for name in names
    ]


def prepared(name: str, case: Case, device: torch.device) -> tuple[Callable[[], float], float | None]:
    """What times a step, and the GiB that one takes."""
    on_cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_cuda else 0
    model = make_model(case, device)
    switch(model, name)
    data = batch(case.batch, case.seq_len, model.config.vocab_size, device)
    step = partial(train_step, model, data, case.predicts_all)
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    step()
    peak = (torch.cuda.max_memory_allocated(device) - before) / GIB if on_cuda else None
    return partial(timed, step, device), peak


def make_model(case: Case, device: torch.device, **sizes: int) -> BertForMaskedLM:
    """In training mode, the same numbers at every call."""
    config = BertConfig(
        **(MODEL[case.device] | sizes),
        max_position_embeddings=case.seq_len,
        hidden_dropout_prob=case.dropout,
        attention_probs_dropout_prob=case.dropout,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return BertForMaskedLM(config).to(DTYPES[case.dtype]).train()


def switch(model: BertForMaskedLM, name: str) -> None:
    """Gives a model its attention."""
    if name in IN_BERT:
        sparsify(model, IN_BERT[name](model.config.num_attention_heads))
    else:
        model.set_attn_implementation(_VALUE if name == NO_ATTENTION else name)


class Batch(NamedTuple):
    """Tokens and labels, (B, T), and the flat places of those with a label."""

    tokens: Tensor
    labels: Tensor
    labelled: Tensor


def batch(sequences: int, seq_len: int, vocabulary: int, device: torch.device, seed: int = 0) -> Batch:
    """Random, without padding, the same at every call with a seed."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (sequences, seq_len), generator=generator)
    has_label = torch.rand(tokens.shape, generator=generator) < LABELLED
    labels = tokens.masked_fill(~has_label, -100)
    return Batch(tokens.to(device), labels.to(device), has_label.flatten().nonzero()[:, 0].to(device))


def train_step(model: BertForMaskedLM, data: Batch, predicts_all: bool) -> None:
    loss_of(model, data, predicts_all).backward()
    model.zero_grad(set_to_none=True)


def loss_of(model: BertForMaskedLM, data: Batch, predicts_all: bool) -> Tensor:
    if predicts_all:
        return model(input_ids=data.tokens, labels=data.labels).loss
    hidden = model.bert(input_ids=data.tokens).last_hidden_state.flatten(0, 1)
    return cross_entropy(model.cls(hidden[data.labelled]), data.labels.flatten()[data.labelled])


def wrong_ones(names: Sequence[str], dtype: str, device: torch.device) -> dict[str, str]:
    """Verifies the sparse ones; why those that are wrong, or fail, are."""
    reasons = {}
    for name in names:
        if name in IN_BERT:
            try:
                verify(name, dtype, device)
            except Exception as error:  # noqa: BLE001 - whatever stops one is a line of the table
                reasons[name] = in_short(error)
    return reasons


def verify(name: str, dtype: str, device: torch.device) -> None:
    """Holds what reaches the first layer's query, the gradient of its weight, to a dense model with the layout as its
    mask; that gradient goes through attention alone.

    Raises:
        ArithmeticError: an error larger than `require_as_accurate` allows.
    """
    case = Case(VERIFIED_TOKENS, 0.0, dtype, device.type)
    model = make_model(case, device, num_hidden_layers=VERIFIED_LAYERS)
    config = IN_BERT[name](model.config.num_attention_heads)
    layout = config.make_bool_layout(case.seq_len)
    data = batch(1, case.seq_len, model.config.vocab_size, device)
    AttentionInterface.register(_MASKED, partial(with_mask, to_token_mask(layout, config.block).to(device)))
    model.set_attn_implementation(_MASKED)
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


def value_as_it_is(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return value.transpose(1, 2).contiguous(), None


_VALUE, _MASKED = "ds_sparse_bench_value", "ds_sparse_bench_masked"
AttentionInterface.register(_VALUE, value_as_it_is)


def versions() -> dict[str, str]:
    return {"transformers": transformers.__version__}
