"""Processes of this machine that are the ranks of a benchmark: each a rank, all with the same tasks."""

from __future__ import annotations

import multiprocessing
import os
import queue
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .reasons import in_short
from .sequence_rank import Task, run, start
from .sequence_results import Case, Row

LONGEST_WAIT = 300
"""Seconds for the result of a task, besides those of its rounds; ranks that hang are ended then."""

TOO_LONG = "not tried: a shorter sequence ran out of memory"


def rows_of(tasks: Sequence[Task], device: torch.device) -> Iterator[tuple[Task, Row]]:
    """Measures tasks for the same number of ranks, by rising length, in processes that all share. After one that fails,
    which may leave anything behind, the rest have new processes; after one that does not fit, no longer one of its kind
    is tried."""
    rest, too_long = list(tasks), set[tuple[str, Case]]()
    while rest:
        for task, row in until_one_fails(rest, device):
            rest = rest[1:]
            yield task, row
            if "out of memory" in row.reason:
                too_long.add((task.parallel, task.case.of_any_length))
        skipped = [task for task in rest if (task.parallel, task.case.of_any_length) in too_long]
        for task in skipped:
            yield task, Row(task.ranks, task.parallel, reason=TOO_LONG)
        rest = [task for task in rest if task not in skipped]


def until_one_fails(tasks: Sequence[Task], device: torch.device) -> Iterator[tuple[Task, Row]]:
    """Rows of the first tasks, until one has a reason instead of a time."""
    spawn, ranks = multiprocessing.get_context("spawn"), tasks[0].ranks
    results = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = str(Path(folder) / "rendezvous")
        processes = [
            spawn.Process(target=run_rank, args=(rank, rendezvous, tasks, device, results), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            for task in tasks:
                found = next_result(results, processes, LONGEST_WAIT + task.seconds)
                if isinstance(found, str):
                    yield task, Row(task.ranks, task.parallel, reason=found, is_try=task.only_tries)
                    return
                yield task, found
        finally:
            for process in processes:
                process.kill()
                process.join()


def next_result(results: Any, processes: Sequence[Any], seconds: float) -> Row | str:
    """A row of rank 0, or why a rank has none."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            return results.get(timeout=0.5)
        except queue.Empty:
            broken = [process for process in processes if process.exitcode]
        if broken and results.empty():
            return f"a rank ended with status {broken[0].exitcode}"
    return f"no result within {seconds:g} seconds"


def run_rank(rank: int, rendezvous: str, tasks: Sequence[Task], device: torch.device, results: Any) -> None:
    """A rank's process. What it prints goes to the error output: rows are the parent's."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        device = start(rank, tasks[0].ranks, rendezvous, device)
        for task in tasks:
            row = run(task, device)
            if rank == 0:
                results.put(row)
    except Exception as error:  # noqa: BLE001 - whatever stops one is a line of the table
        results.put(in_short(error))
    results.close()
    results.join_thread()
    os._exit(0)  # at a usual end PyTorch's threads of groups abort the process now and then
