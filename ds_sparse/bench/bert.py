"""A training step of BERT with sparse attention, with dense, and with none: what attention costs end to end.

Masked-language modelling with Transformers' own models, parameters in the dtype that is measured. This bench stands on
the patch of models, above all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from ..extras import optional_imports
from ..layout import to_token_mask
from ..modules.structured_attention import whole_blocks
from .bert_models import make_model, model_with, switch
from .bert_results import LABELLED, Case, Result, Row
from .cases import FLEX_IN_BERT, FLOOR, NO_ATTENTION, STRUCTURES_IN_BERT
from .reasons import NOT_TRIED, TOO_LONG, in_short, ran_out_of_memory
from .step_times import measure_steps
from .verification import require_as_accurate

with optional_imports():
    from transformers import AttentionInterface, BertForMaskedLM

VERIFIED_TOKENS, VERIFIED_LAYERS = 1024, 2

LOSS_SCALE = 2**12
"""What gradients are made with that are verified: without it fp16 has but a few bits for them."""

LEAST_ERROR_ALLOWED = 1e-3
"""Relative; another layout makes a hundred times that. In fp32 the layers above differ by more than a few roundings."""


def results(
    cases: Sequence[Case],
    names: Sequence[str],
    wrong: Mapping[str, str],
    device: torch.device,
    repeats: int,
    seconds: float,
) -> Iterator[Result]:
    """Cases by rising length. What is out of memory, or takes longer than `seconds` for a step, is not tried at longer
    ones."""
    given_up = dict(wrong)
    for case in cases:
        rows = run_case(case, names, given_up | without_layout(names, case.seq_len), device, repeats, seconds)
        yield case, rows
        for row in rows:
            if ran_out_of_memory(row.reason):
                given_up[row.attention] = TOO_LONG
            elif not row.reason and row.milliseconds > seconds * 1e3:
                took = f"a step of {case.seq_len:,} tokens took {row.milliseconds / 1e3:.1f} s"
                given_up[row.attention] = f"{NOT_TRIED}{took}"


def without_layout(names: Sequence[str], seq_len: int) -> dict[str, str]:
    """Why those that have no layout of a length are not tried."""
    reasons = {}
    for name in names:
        structure = FLEX_IN_BERT.get(name, name)
        if structure in STRUCTURES_IN_BERT:
            try:
                require_layout(structure, seq_len)
            except ValueError as error:
                reasons[name] = f"{NOT_TRIED}{error}"
    return reasons


def require_layout(name: str, seq_len: int) -> None:
    """Raises ValueError where a structure has no layout of a length."""
    config = STRUCTURES_IN_BERT[name](1)
    try:
        config.make_rows(whole_blocks(seq_len, config.block)).maker(0)
    except ValueError as error:
        raise ValueError(f"{name} has no layout of {seq_len} tokens: {error}") from None


def run_case(
    case: Case, names: Sequence[str], wrong: Mapping[str, str], device: torch.device, repeats: int, seconds: float
) -> list[Row]:
    """Times the steps in turns, as `measure_steps` does. Without any attention too, and the floor, as the others are
    compared with these. Those that are `wrong`, with the reason, are not timed."""
    # Each case compiles FlexAttention anew, and a function is compiled but so often before PyTorch gives up.
    torch.compiler.reset()
    make = {name: partial(make_step, name, case, device) for name in (NO_ATTENTION, FLOOR, *names)}
    measured = measure_steps(make, wrong, device, repeats, seconds, f"{case.seq_len} tokens")
    return [Row(name, **asdict(found)) for name, found in measured.items()]


def make_step(name: str, case: Case, device: torch.device) -> Callable[[], None]:
    """A step of the model with an attention: forward and backward, or whole."""
    model = model_with(name, case, device)
    data = batch(case.batch, case.seq_len, model.config.vocab_size, torch.device("cpu"))
    if not case.whole_step:
        return partial(train_step, model, data.to(device), case.predicts_all)
    on_cuda = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=on_cuda)
    make_states(optimizer)
    return partial(whole_step, model, data.pinned() if on_cuda else data, case.predicts_all, optimizer, device)


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Has an optimizer make its states, so that the first step takes the memory of all."""
    parameters = [x for group in optimizer.param_groups for x in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


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


def whole_step(
    model: Any, data: Batch, predicts_all: bool, optimizer: torch.optim.Optimizer, device: torch.device
) -> None:
    loss_of(model, data.to(device), predicts_all).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def loss_of(model: Any, data: Batch, predicts_all: bool) -> Tensor:
    if predicts_all:
        return model(input_ids=data.tokens, labels=data.labels).loss
    hidden = model.base_model(input_ids=data.tokens).last_hidden_state.flatten(0, 1)
    head = model.lm_head if hasattr(model, "lm_head") else model.cls
    return cross_entropy(head(hidden[data.labelled]), data.labels.flatten()[data.labelled])


def wrong_ones(names: Sequence[str], dtype: str, device: torch.device) -> dict[str, str]:
    """Verifies the sparse ones; why those that are wrong, or fail, are."""
    reasons = {}
    for name in names:
        if name in STRUCTURES_IN_BERT:
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
    config = STRUCTURES_IN_BERT[name](model.config.num_attention_heads)
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


_MASKED = "ds_sparse_bench_masked"
