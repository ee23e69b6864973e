"""Work in processes of its own, whose results come back one by one: what one of them leaves behind or takes down with
it harms nobody else."""

from __future__ import annotations

import multiprocessing
import os
import queue
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.models.reasons import no_result_within
from ds_sparse.bench.reasons import in_short

SPAWN, FORKSERVER = "spawn", "forkserver"
"""Ways to begin processes: each imports all by itself, or is forked from one that has preloaded modules. The
second is for work whose imports take no GPU, as a GPU does not survive a fork."""


@dataclass(frozen=True)
class Failure:
    """The reason why there is no result."""

    reason: str


def results_of(
    work: Callable[..., Iterable[Any]],
    arguments: Sequence[tuple[Any, ...]],
    waits: Iterable[float],
    method: str = SPAWN,
    preload: Sequence[str] = (),
) -> Iterator[Any]:
    """Yields what `work(*arguments[0])` yields in its process, while `work` has the other arguments in others.

    The last is a `Failure` where a process raised something or ended, or a result did not come in time. The processes
    are ended then, as they are after the last result that is waited for.

    Args:
        waits: seconds for each result.
        preload: modules that the server of `FORKSERVER` imports.
    """
    context: Any = multiprocessing.get_context(method)
    if method == FORKSERVER:
        context.set_forkserver_preload(list(preload))
    results = context.Queue()
    processes = [
        context.Process(target=run, args=(work, mine, number == 0, results), daemon=True)
        for number, mine in enumerate(arguments)
    ]
    for process in processes:
        process.start()
    try:
        for seconds in waits:
            found = next_result(results, processes, seconds)
            yield found
            if isinstance(found, Failure):
                return
    finally:
        for process in processes:
            process.kill()
            process.join()


def next_result(results: Any, processes: Sequence[Any], seconds: float) -> Any:
    """A result of the first, or why one of them has none."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            return results.get(timeout=0.5)
        except queue.Empty:
            broken = [process for process in processes if process.exitcode]
        if broken and results.empty():
            return Failure(f"a process ended with status {broken[0].exitcode}")
    return Failure(no_result_within(seconds))


def run(work: Callable[..., Iterable[Any]], arguments: tuple[Any, ...], is_first: bool, results: Any) -> None:
    """A process. What it prints goes to the error output: results are the parent's."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        for result in work(*arguments):
            if is_first:
                results.put(result)
    except Exception as error:  # noqa: BLE001 - whatever stops one is a line of the table
        results.put(Failure(in_short(error)))
    results.close()
    results.join_thread()
    os._exit(0)  # at a usual end PyTorch's threads of groups abort the process now and then
