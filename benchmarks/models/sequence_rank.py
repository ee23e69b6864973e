"""One rank of `python -m benchmarks sequence` makes an engine for each task, verifies it, and times steps."""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import distributed

from benchmarks.models.bert import Batch, batch
from benchmarks.models.sequence_model import make_engine, make_model, saved
from benchmarks.models.sequence_results import DATA, SEQUENCE, Case, Row
from benchmarks.models.step_profile import optimizer_range, profile_of
from ds_sparse.bench.machine import GIB
from ds_sparse.extras import optional_imports
from ds_sparse.integrations.deepspeed import init_distributed

with optional_imports():
    from deepspeed.utils import logger

ROUND_MS = 200
"""Least length of a round, whose steps are issued one after the other as in training."""

LEAST_ROUNDS = 3

BOUNDS = {"fp32": (1e-5, 1e-3), "bf16": (1e-3, 1e-2)}
"""Parts by which the loss and the gradient's norm may differ from those of one rank."""


@dataclass(frozen=True)
class Task:
    """A measurement that all ranks of a group of processes make together.

    Attributes:
        threads: of a rank on a CPU.
        alone: the row of the one rank, which the loss and the gradient are held to; None where there is none.
        only_tries: whether it is enough that a step runs.
    """

    case: Case
    ranks: int
    parallel: str
    repeats: int
    seconds: float
    threads: int
    alone: Row | None = None
    only_tries: bool = False


def start(rank: int, ranks: int, rendezvous: str, device: torch.device) -> torch.device:
    """Joins the other ranks, which meet at a file; the device of this one."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    logger.setLevel("WARNING")
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    init_distributed(dist_backend=backend)
    return device


def run(task: Task, device: torch.device) -> Row:
    """Verifies a task, and measures it.

    Raises:
        ArithmeticError: loss or gradient are not those of one rank, or no numbers.
    """
    torch.set_num_threads(task.threads)
    engine = None
    try:
        engine = make_engine(make_model(task.case, device), task.case, task.ranks, task.parallel)
        return measured(task, engine, device)
    finally:
        if engine is not None:
            engine.destroy()
        del engine
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def measured(task: Task, engine: Any, device: torch.device) -> Row:
    rank = distributed.get_rank()
    seed = rank if task.parallel == DATA else 0
    data = batch(task.case.sequences, task.case.seq_len, engine.module.config.vocab_size, device, seed)
    step = partial(train_step, engine, data, task.case)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    loss, norm = float(step()), engine.get_global_grad_norm()
    if not math.isfinite(loss):
        raise ArithmeticError(f"the loss is {loss}")
    row = Row(task.ranks, task.parallel, loss=loss, gradient_norm=None if norm is None else float(norm))
    if task.alone is not None:
        row = compared(row, task.alone, task.case.dtype)
    times = [elapsed(step, 1, device)] if task.only_tries else step_times(step, task.repeats, task.seconds, device)
    own = torch.tensor([statistics.median(times), peak_gib(device)], device=device)
    distributed.all_reduce(own, distributed.ReduceOp.MAX)
    milliseconds, peak = own.tolist()
    sequences = task.case.sequences * (task.ranks if task.parallel == DATA else 1)
    row = replace(
        row,
        milliseconds=milliseconds,
        tokens_per_second=sequences * task.case.micro_batches * task.case.seq_len / milliseconds * 1e3,
        peak_gib=peak if device.type == "cuda" else None,
        rounds=len(times),
        is_try=task.only_tries,
    )
    if task.only_tries:
        return row
    memory = memory_of(engine, data, task.case, device) if device.type == "cuda" else {}
    return replace(row, profile=profile_of(step, milliseconds, device), memory=memory)


def train_step(engine: Any, data: Batch, case: Case) -> torch.Tensor:
    """The loss of a step, of its last micro batch."""
    return [micro_batch(engine, data, case) for _ in range(case.micro_batches)][-1]


def micro_batch(engine: Any, data: Batch, case: Case) -> torch.Tensor:
    with saved(case):
        loss = engine(input_ids=data.tokens, labels=data.labels).loss
    engine.backward(loss)
    with optimizer_range():
        engine.step()
    return loss.detach()


def compared(row: Row, alone: Row, dtype: str) -> Row:
    """The row with what one rank has beside it.

    Raises:
        ArithmeticError: they differ by more than `BOUNDS`.
    """
    row = replace(row, loss_alone=alone.loss)
    if row.parallel == SEQUENCE:
        row = replace(row, gradient_norm_alone=alone.gradient_norm)
    pairs = (("loss", row.loss, row.loss_alone), ("norm of the gradient", row.gradient_norm, row.gradient_norm_alone))
    for bound, (what, found, one) in zip(BOUNDS[dtype], pairs, strict=True):
        # Rank 0 alone has the sequence of the one rank where each rank has its own.
        if (row.parallel == DATA and distributed.get_rank()) or found is None or one is None:
            continue
        if not abs(found - one) <= bound * abs(one):
            raise ArithmeticError(
                f"the {what} is {found:.6g}, and {one:.6g} on one rank; they may differ by a part of {bound:g}"
            )
    return row


def step_times(step: Callable[[], object], repeats: int, seconds: float, device: torch.device) -> list[float]:
    """Milliseconds of a step in each round: `repeats` rounds, or as many as begin within `seconds`, three at least. All
    ranks make as many."""
    first = elapsed(step, 1, device)
    steps = max(1, round(ROUND_MS / first))
    rounds = min(repeats, max(LEAST_ROUNDS, math.ceil(seconds * 1e3 / (steps * first))))
    agreed = torch.tensor([steps, rounds], device=device)
    distributed.broadcast(agreed, src=0)
    steps, rounds = agreed.tolist()
    counted = [first] if steps == 1 else []
    return counted + [elapsed(step, steps, device) for _ in range(rounds - len(counted))]


def elapsed(step: Callable[[], object], steps: int, device: torch.device) -> float:
    """Milliseconds of one of so many steps, which all ranks begin together."""
    synchronize(device)
    distributed.barrier()
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e3 / steps


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else 0.0


def memory_of(engine: Any, data: Batch, case: Case, device: torch.device) -> dict[str, float]:
    """GiB of a step by what they are for: what stays between steps; what forward keeps for backward; and what else is
    there at the highest in a layer's attention, in the loss, in backward and in the optimizer's step."""
    for _ in range(case.micro_batches - 1):
        micro_batch(engine, data, case)
    model, meter = engine.module, MemoryMeter(device)
    parameters = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    at_rest = meter.allocated()
    found = {"parameters": parameters / GIB, "optimizer states and buffers": (at_rest - parameters) / GIB}

    def encoded(*_: Any) -> None:
        found["activations kept"] = (meter.allocated() - at_rest) / GIB
        meter.open("loss")

    hooks = [model.bert.register_forward_hook(encoded)]
    for layer in model.bert.encoder.layer:
        hooks.append(layer.attention.register_forward_pre_hook(lambda *_: meter.open("attention")))
        hooks.append(layer.attention.register_forward_hook(lambda *_: meter.close("attention")))
    with saved(case):
        loss = engine(input_ids=data.tokens, labels=data.labels).loss
    meter.close("loss")
    meter.open("backward")
    engine.backward(loss)
    meter.close("backward")
    meter.open("step")
    engine.step()
    meter.close("step")
    for hook in hooks:
        hook.remove()
    return found | meter.gib


class MemoryMeter:
    """The most that was allocated while each of some spans was open, over what was allocated when it opened.

    Args:
        device: a CUDA GPU.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._open: dict[str, tuple[int, int]] = {}
        self.gib: dict[str, float] = {}
        torch.cuda.reset_peak_memory_stats(device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def open(self, name: str) -> None:
        self._cut()
        self._open[name] = self.allocated(), 0

    def close(self, name: str) -> None:
        self._cut()
        before, highest = self._open.pop(name)
        self.gib[name] = max(self.gib.get(name, 0.0), (highest - before) / GIB)

    def _cut(self) -> None:
        """The allocator has one mark of the highest, which all open spans share."""
        highest = torch.cuda.max_memory_allocated(self._device)
        self._open = {name: (before, max(top, highest)) for name, (before, top) in self._open.items()}
        torch.cuda.reset_peak_memory_stats(self._device)
