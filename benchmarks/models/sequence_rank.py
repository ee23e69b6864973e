"""One rank of `python -m benchmarks sequence`: it makes a model under DeepSpeed, verifies it, and times steps."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from benchmarks.models.bert import MODELS, batch, bert_config
from benchmarks.models.results import BASE, DATA, KEPT, OFFLOADED, SEQUENCE, Case, Row
from benchmarks.models.step_profile import optimizer_range, profile_of
from benchmarks.models.steps import Piece, built
from ds_sparse.bench.cases import IN_BERT
from ds_sparse.bench.machine import GIB
from ds_sparse.config.block import sparse_attention_block
from ds_sparse.integrations.deepspeed import init_distributed, initialize
from ds_sparse.tools.arguments import UsageError
from ds_sparse.tools.extras import optional_imports

with optional_imports():
    import deepspeed
    import transformers
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
    from deepspeed.utils import logger
    from transformers import BertConfig, BertForMaskedLM
    from transformers.modeling_outputs import MaskedLMOutput

FLAG = argparse.Namespace(deepspeed_sparse_attention=True)

IGNORED = -100
"""The label of a token that is not in the loss."""


class LabelledBertForMaskedLM(BertForMaskedLM):
    """BERT whose logits are those of tokens with a label alone, in some chunks. Each chunk but a single one is computed
    again in backward, so that logits of one are there at a time."""

    chunks = 1

    def forward(self, input_ids: Tensor, labels: Tensor, **rest: Any) -> MaskedLMOutput:
        hidden = self.bert(input_ids, **rest).last_hidden_state
        places = (labels.flatten() != IGNORED).nonzero()[:, 0]
        chosen, answers = hidden.flatten(0, 1)[places], labels.flatten()[places]
        call = partial(checkpoint, self.sum_of_losses, use_reentrant=False) if self.chunks > 1 else self.sum_of_losses
        losses = [call(*both) for both in zip(chosen.chunk(self.chunks), answers.chunk(self.chunks), strict=True)]
        return MaskedLMOutput(loss=torch.stack(losses).sum() / len(places))

    def sum_of_losses(self, hidden: Tensor, answers: Tensor) -> Tensor:
        return cross_entropy(self.cls(hidden).float(), answers, reduction="sum")


def require_heads(ranks: int, device: str) -> None:
    """Raises UsageError where ranks that share a sequence are more than the model's heads."""
    heads = BertConfig(**MODELS[BASE][device]).num_attention_heads
    if ranks > heads:
        raise UsageError(
            f"--ranks {ranks}: the model has {heads} heads, and each rank that shares a sequence wants one; give "
            f"{heads} ranks or fewer, or --parallel data."
        )


def make_model(case: Case, device: torch.device) -> LabelledBertForMaskedLM:
    """In training mode, without dropout, the same numbers at every call."""
    model = built(LabelledBertForMaskedLM, bert_config(case), case.dtype, device)
    if case.activations != KEPT:
        # The reentrant way hands a layer's input to autograd, where `saved` meets it; the other keeps it to itself.
        model.gradient_checkpointing_enable({"use_reentrant": case.activations == OFFLOADED})
    if case.tiles > 1:
        model.chunks = case.tiles
        for layer in model.bert.encoder.layer:
            # A method, whose layer is copied with it where a copy of the model is tried.
            layer.tiles, layer.feed_forward_chunk = case.tiles, MethodType(tiled_mlp, layer)
    return model


def tiled_mlp(layer: Any, hidden: Tensor) -> Tensor:
    """A BERT layer's MLP over parts of the tokens, one after the other, and again in backward, as DeepSpeed has it."""
    parameters = [*layer.intermediate.parameters(), *layer.output.parameters()]
    return TiledMLP.apply(type(layer).feed_forward_chunk, layer, hidden, layer.tiles, parameters)


def saved(case: Case) -> AbstractContextManager[Any]:
    """Around a forward: where what it saves for backward goes."""
    if case.activations == OFFLOADED:
        return torch.autograd.graph.save_on_cpu(pin_memory=case.device == "cuda")
    return nullcontext()


def make_engine(model: BertForMaskedLM, case: Case, ranks: int, parallel: str) -> Any:
    """DeepSpeed's engine around a model, its sequences shared or not."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case.batch,
        "gradient_accumulation_steps": case.micro_batches,
        "bf16": {"enabled": case.dtype == "bf16"},
        "zero_optimization": {"stage": case.zero_stage},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True, "fused": True}},
        "sparse_attention": sparse_attention_block(IN_BERT[case.structure](model.config.num_attention_heads)),
    }
    if parallel == SEQUENCE:
        config["sequence_parallel_size"] = ranks
    engine, *_ = initialize(FLAG, model, model_parameters=model.parameters(), config=config)
    return engine


def versions() -> dict[str, str]:
    return {"transformers": transformers.__version__, "deepspeed": deepspeed.__version__}


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
    """

    case: Case
    ranks: int
    parallel: str
    repeats: int
    seconds: float
    threads: int
    alone: Row | None = None


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


def run(rank: int, rendezvous: str, task: Task, device: torch.device) -> Row:
    """Verifies a task, and measures it; a try is one step.

    Raises:
        ArithmeticError: loss or gradient are not those of one rank, or no numbers.
    """
    torch.set_num_threads(task.threads)
    device = start(rank, task.ranks, rendezvous, device)
    engine = make_engine(make_model(task.case, device), task.case, task.ranks, task.parallel)
    seed = rank if task.parallel == DATA else 0
    data = batch(task.case.batch, task.case.seq_len, engine.module.config.vocab_size, device, seed)
    step = partial(train_step, engine, data, task.case)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    loss, norm = float(step()), engine.get_global_grad_norm()
    if not math.isfinite(loss):
        raise ArithmeticError(f"the loss is {loss}")
    row = Row(ranks=task.ranks, parallel=task.parallel, loss=loss, gradient_norm=None if norm is None else float(norm))
    if task.alone is not None:
        row = compared(row, task.alone, task.case.dtype)
    times = [elapsed(step, 1, device)] if task.case.is_try else step_times(step, task.repeats, task.seconds, device)
    own = torch.tensor([statistics.median(times), peak_gib(device)], device=device)
    distributed.all_reduce(own, distributed.ReduceOp.MAX)
    milliseconds, peak = own.tolist()
    sequences = task.case.batch * (task.ranks if task.parallel == DATA else 1)
    row = replace(
        row,
        milliseconds=milliseconds,
        tokens_per_second=sequences * task.case.micro_batches * task.case.seq_len / milliseconds * 1e3,
        peak_gib=peak if device.type == "cuda" else None,
        rounds=len(times),
    )
    if task.case.is_try:
        return row
    memory = memory_of(engine, data, task.case, device) if device.type == "cuda" else {}
    return replace(row, profile=profile_of(step, milliseconds, device), memory=memory)


def train_step(engine: Any, data: Piece, case: Case) -> torch.Tensor:
    """The loss of a step, of its last micro batch."""
    return [micro_batch(engine, data, case) for _ in range(case.micro_batches)][-1]


def micro_batch(engine: Any, data: Piece, case: Case) -> torch.Tensor:
    with saved(case):
        loss = engine(**data.inputs, labels=data.labels).loss
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


def memory_of(engine: Any, data: Piece, case: Case, device: torch.device) -> dict[str, float]:
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
        loss = engine(**data.inputs, labels=data.labels).loss
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
