"""Programs of several ranks, whose cases report by name: what a case asserts, every rank asserts."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import torch
from torch import distributed

from ds_sparse.sequence import exchange

DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if sys.argv[1:] == ["cuda"] else torch.device("cpu")
"""Where this rank computes, as the program's argument says: on the CPU through gloo, or each on a GPU through NCCL."""

WIDE = torch.float32 if DEVICE.type == "cuda" else torch.float64
"""The widest dtype of attention there."""

_OF_LARGEST = {torch.float32: 1e-4, torch.bfloat16: 3e-2}

CASES: dict[str, Callable[[], None]] = {}


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


def refusal(call: Callable[[], object], kind: type[Exception] = ValueError) -> str:
    """The sentence of the error that the call raises."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("it was not refused")


@contextmanager
def in_lines() -> Iterator[None]:
    """What goes between ranks is copied 16 bytes at a time, as that of long sequences is on a GPU."""
    with mock.patch.object(exchange, "LINES_FROM", {DEVICE.type: 0}):
        yield


def run_all() -> None:
    """Runs all cases, and has rank 0 print of each what went wrong, or "ok"."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    if not distributed.is_initialized():
        backend = "nccl" if DEVICE.type == "cuda" else "gloo"
        distributed.init_process_group(backend, timeout=timedelta(seconds=60))
    for name, function in CASES.items():
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
