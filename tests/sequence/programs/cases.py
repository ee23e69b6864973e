"""Programs of several ranks, whose cases report by name: what a case asserts, every rank asserts.

On the CPU a program imports once, and its ranks are forks of it: `python program.py cpu [ranks] [quick | slow | all]`.
On GPUs torchrun starts them: `torchrun --nproc_per_node=2 program.py cuda`.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import torch
from torch import distributed

from ds_sparse.sequence import exchange

DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if sys.argv[1:2] == ["cuda"] else torch.device("cpu")
"""Where this rank computes, as the program's argument says: on the CPU through gloo, or each on a GPU through NCCL."""

WIDE = torch.float32 if DEVICE.type == "cuda" else torch.float64
"""The widest dtype of attention there."""

TEXT = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32,
    "max_position_embeddings": 256,
}  # fmt: skip
BERT = TEXT | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BLOCK = {"mode": "bigbird", "block": 16, "num_random_blocks": 1, "different_layout_per_head": True, "seed": 3}
"""Sizes of models, and the block that makes them sparse."""

_OF_LARGEST = {torch.float32: 1e-4, torch.bfloat16: 3e-2}

CASES: dict[str, Callable[[], None]] = {}
SLOW: set[str] = set()


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def case_on_cpu(function: Callable[[], None]) -> Callable[[], None]:
    """A case of more ranks than two, or one that is the same on a GPU."""
    return case(function) if DEVICE.type == "cpu" else function


def assert_same(found: torch.Tensor, wanted: torch.Tensor, at_least: float = 0.0) -> None:
    """They are equal to rounding: below float64 to a share of the largest number, or of `at_least` where that is more,
    as sums come in another order on a GPU and in matrices of other shapes."""
    if found.dtype == torch.float64:
        torch.testing.assert_close(found, wanted)
    else:
        largest = max(at_least, wanted.abs().max().item())
        torch.testing.assert_close(found, wanted, rtol=0, atol=_OF_LARGEST[found.dtype] * largest)


def drawn(*shape: int, seed: int, dtype: torch.dtype = WIDE) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def operands_of(heads: int, key_heads: int, tokens: int, dtype: torch.dtype = WIDE, rows: int = 2) -> list:
    """Query, key, value and the gradient of the output."""
    numbers = enumerate((heads, key_heads, key_heads, heads))
    return [drawn(rows, n, tokens, 8, seed=seed, dtype=dtype) for seed, n in numbers]


def assert_parts(output: torch.Tensor, parts: list, wanted: torch.Tensor, whole: list, own: slice) -> None:
    """Output and gradients of a rank's own tokens are those of them all."""
    assert_same(output, wanted[:, :, own])
    for x, of_all in zip(parts, whole, strict=True):
        assert_same(x.grad, of_all.grad[:, :, own], at_least=1.0)


def compare(
    of_one, attention, own: slice, operands: list, with_mask=False, with_sinks=False, lengths=None, **options
) -> None:
    """Compares outputs and gradients on each rank with its part of those of `of_one`, of all tokens."""
    *whole, grad = operands
    parts = [x[:, :, own].clone().requires_grad_() for x in whole]
    whole, (rows, heads, tokens, _) = [x.requires_grad_() for x in whole], grad.shape
    mask = drawn(rows, tokens, seed=6) > -1 if with_mask else None
    sinks, own_sinks = (
        torch.linspace(-1, 1, heads, dtype=grad.dtype, device=DEVICE).requires_grad_() if with_sinks else None
        for _ in range(2)
    )
    wanted = of_one(*whole, key_padding_mask=mask, sinks=sinks, **options)
    wanted.backward(grad)
    own_mask = mask if lengths or not with_mask else mask[:, own]
    output = attention(*parts, key_padding_mask=own_mask, lengths=lengths, sinks=own_sinks, **options)
    output.backward(grad[:, :, own])
    assert_parts(output, parts, wanted, whole, own)
    if with_sinks:
        assert_same(exchange.RanksOfSequence().sum_of(own_sinks.grad), sinks.grad)


def refusal(call: Callable[[], object], kind: type[Exception] = ValueError) -> str:
    """The sentence of the error that the call raises."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("it was not refused")


def slow_case(why: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A case that only the slow tests run, as the text of `why` says."""

    def mark(function: Callable[[], None]) -> Callable[[], None]:
        SLOW.add(function.__name__)
        return case(function)

    return mark


@contextmanager
def in_lines() -> Iterator[None]:
    """What goes between ranks is copied 16 bytes at a time, as that of long sequences is on a GPU."""
    with mock.patch.object(exchange, "LINES_FROM", {DEVICE.type: 0}):
        yield


def run_all(start: Callable[[], object] | None = None) -> None:
    """Runs the cases on each rank, once `start` has begun the ranks' group, and has rank 0 print of each what went
    wrong, or "ok"."""
    if "RANK" not in os.environ:
        _fork(int(sys.argv[2]))
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    if start is not None:
        start()
    if not distributed.is_initialized():
        backend = "nccl" if DEVICE.type == "cuda" else "gloo"
        distributed.init_process_group(backend, timeout=timedelta(seconds=60))
    part = sys.argv[3] if sys.argv[3:] else "all"
    for name, function in CASES.items():
        if part != "all" and (name in SLOW) != (part == "slow"):
            continue
        try:
            function()
            problem = None
        except Exception:  # noqa: BLE001  # the next case has to run, too
            problem = traceback.format_exc()
        of_all = [None] * distributed.get_world_size()
        distributed.all_gather_object(of_all, problem)
        if distributed.get_rank() == 0:
            problems = [text for text in of_all if text is not None]
            print(f"\n=== {name}", *(problems or ["ok"]), sep="\n")
    sys.stdout.flush()
    distributed.barrier()
    os._exit(0)  # at a usual end PyTorch's threads of groups abort the process now and then


def _fork(ranks: int) -> None:
    """Returns in each rank, with what torchrun tells one. The process that has imported waits for them, and ends."""
    for name in ("torch._dynamo", "torch.distributed.tensor", "torch.utils.checkpoint", *_late_of_deepspeed()):
        importlib.import_module(name)  # which each rank would do for itself
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sys.stdout.flush()
    left = set()
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
            os.environ |= {"MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            return
        left.add(pid)
    while left:
        pid, status = os.wait()
        left.discard(pid)
        if status:  # the others would wait for it
            for other in left:
                os.kill(other, signal.SIGKILL)
            os._exit(1)
    os._exit(0)


def _late_of_deepspeed() -> list[str]:
    """What an engine imports, which takes seconds."""
    return ["deepspeed.runtime.zero.muon.muon_optimizer"] if "deepspeed" in sys.modules else []
