"""Programs of several ranks, whose cases report by name: what a case asserts, every rank asserts."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta

from torch import distributed

CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def refusal(call: Callable[[], object]) -> str:
    """The sentence of the ValueError that the call raises."""
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("it was not refused")


def run_all() -> None:
    """Runs all cases, and has rank 0 print of each what went wrong, or "ok"."""
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", timeout=timedelta(seconds=30))
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
