"""Processes of this machine that are the ranks of a benchmark: each a rank, all with the same tasks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.models.longest_sequence import of_any_length
from benchmarks.models.own_processes import Failure, results_of
from benchmarks.models.sequence_rank import Task, run, start
from benchmarks.models.sequence_results import Case, Row
from ds_sparse.bench.reasons import TOO_LONG, ran_out_of_memory

LONGEST_WAIT = 300
"""Seconds for the result of a task, besides those of its rounds; ranks that hang are ended then."""


def rows_of(tasks: Sequence[Task], device: torch.device) -> Iterator[tuple[Task, Row]]:
    """Measures tasks for the same number of ranks, by rising length, in processes that all share. After one that fails,
    which may leave anything behind, the rest have new processes; after one that does not fit, no longer one of its kind
    is tried."""
    rest, too_long = list(tasks), set[tuple[str, Case]]()
    while rest:
        for task, row in until_one_fails(rest, device):
            rest = rest[1:]
            yield task, row
            if ran_out_of_memory(row.reason):
                too_long.add((task.parallel, of_any_length(task.case)))
        skipped = [task for task in rest if (task.parallel, of_any_length(task.case)) in too_long]
        for task in skipped:
            yield task, Row(task.ranks, task.parallel, reason=TOO_LONG)
        rest = [task for task in rest if task not in skipped]


def until_one_fails(tasks: Sequence[Task], device: torch.device) -> Iterator[tuple[Task, Row]]:
    """Rows of the first tasks, until one has a reason instead of a time."""
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = str(Path(folder) / "rendezvous")
        arguments = [(rank, rendezvous, tasks, device) for rank in range(tasks[0].ranks)]
        found = results_of(rows_of_rank, arguments, [LONGEST_WAIT + task.seconds for task in tasks])
        for row, task in zip(found, tasks):
            if isinstance(row, Failure):
                row = Row(task.ranks, task.parallel, reason=row.reason, is_try=task.only_tries)
            yield task, row


def rows_of_rank(rank: int, rendezvous: str, tasks: Sequence[Task], device: torch.device) -> Iterator[Row]:
    """What a rank measures."""
    device = start(rank, tasks[0].ranks, rendezvous, device)
    for task in tasks:
        yield run(task, device)
