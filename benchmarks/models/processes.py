"""Work in processes of its own: what one of them leaves behind or takes down with it harms nobody else."""

from __future__ import annotations

import multiprocessing
import os
import queue
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.models.results import NO_RESULT
from ds_sparse.bench.reasons import in_short


@dataclass(frozen=True)
class Failure:
    """The reason why there is no result."""

    reason: str


def result_of(work: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], seconds: float, preload: str = "") -> Any:
    """Runs `work(*arguments[0])` in its process, while `work` has the other arguments in others; a `Failure`
    where a process raised something or ended, or the result did not come in time. All processes are ended then.

    Args:
        preload: a module whose imports touch no GPU, as none survives a fork: processes are forked from one that has
            it. Without, each imports all by itself.
    """
    context: Any = multiprocessing.get_context("forkserver" if preload else "spawn")
    if preload:
        context.set_forkserver_preload([preload])
    results = context.Queue()
    processes = [context.Process(target=run, args=(work, mine, results), daemon=True) for mine in arguments]
    for process in processes:
        process.start()
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            try:
                number, found = results.get(timeout=0.5)
            except queue.Empty:
                if results.empty() and (broken := [process for process in processes if process.exitcode]):
                    return Failure(f"a process ended with status {broken[0].exitcode}")
                continue
            if number == processes[0].pid or isinstance(found, Failure):
                return found
        return Failure(f"{NO_RESULT} {seconds:.0f} seconds")
    finally:
        for process in processes:
            process.kill()
            process.join()


def run(work: Callable[..., Any], arguments: tuple[Any, ...], results: Any) -> None:
    """A process. What it prints goes to the error output: results are the parent's."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        results.put((os.getpid(), work(*arguments)))
    except Exception as error:  # noqa: BLE001 - whatever stops one is a line of the table
        results.put((os.getpid(), Failure(in_short(error))))
    results.close()
    results.join_thread()
    os._exit(0)  # at a usual end PyTorch's threads of groups abort the process now and then
