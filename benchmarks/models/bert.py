"""A training step of BERT with sparse attention, with dense, and with none: what attention costs end to end.

Masked-language modelling with Transformers' own models, parameters in the dtype that is measured. This bench stands on
the patch of models, above all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from benchmarks.models.bert_models import model_with
from benchmarks.models.bert_results import Case, Result, Row
from benchmarks.models.bert_steps import Batch, batch, loss_of, train_step, verify
from ds_sparse.bench.cases import FLEX_IN_BERT, FLOOR, NO_ATTENTION, STRUCTURES_IN_BERT
from ds_sparse.bench.reasons import NOT_TRIED, TOO_LONG, in_short, ran_out_of_memory
from ds_sparse.bench.step_times import measure_steps
from ds_sparse.modules.structured_attention import whole_blocks


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


def whole_step(
    model: Any, data: Batch, predicts_all: bool, optimizer: torch.optim.Optimizer, device: torch.device
) -> None:
    loss_of(model, data.to(device), predicts_all).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


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
