"""A training step of BERT on several ranks of this machine, beside one: data parallel and sequence parallel."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

from benchmarks.models.longest_sequence import Bracket, of_any_length, require_gpu, tries
from benchmarks.models.processes import Failure, results_of
from benchmarks.models.reasons import NOT_TRIED, TOO_LONG, ran_out_of_memory
from benchmarks.models.sequence_rank import Task, run, start
from benchmarks.models.sequence_results import ALONE, DATA, SEQUENCE, Case, Row

UNVERIFIED = "not verified: the one rank has no row of this length, and no shorter one was found right"
NOT_HELD = f"{NOT_TRIED}one rank does not hold such sequences"


@dataclass(frozen=True)
class Comparison:
    """Measures cases on one rank, and then on more.

    Attributes:
        cases: by rising length.
        ranks: numbers of ranks. One is measured first, as all others are compared with it.
        parallel: what several ranks do, of DATA and SEQUENCE.
        repeats, seconds: rounds, and after how long none begins.
        longest: seconds to look for the longest sequence that fits, for each number of ranks.
    """

    cases: Sequence[Case]
    ranks: Sequence[int]
    parallel: Sequence[str]
    repeats: int
    seconds: float
    longest: float = 0

    def results(self, device: torch.device) -> Iterator[tuple[Case, Row]]:
        """Rows as they come: all lengths on one rank, then all on more."""
        alone: dict[Case, Row] = {}
        for task, row in rows_of([self._task(case, 1, ALONE) for case in self.cases], device):
            alone[task.case] = row
            yield task.case, row
        yield from self._tries(alone, 1, ALONE, device)
        for ranks in sorted(set(self.ranks) - {1}):
            yield from self._beside(alone, ranks, device)

    def _beside(self, alone: Mapping[Case, Row], ranks: int, device: torch.device) -> Iterator[tuple[Case, Row]]:
        tasks = []
        for case, way in product(self.cases, self.parallel):
            if way == DATA and alone[case].reason:
                yield case, Row(ranks, way, reason=NOT_HELD)
            else:
                tasks.append(self._task(case, ranks, way, alone[case]))
        shared: dict[Case, Row] = {}
        for task, row in rows_of(tasks, device):
            if task.parallel == SEQUENCE:
                shared[task.case] = row
                if not any(one.loss_alone is not None for one in shared.values()) and not row.reason:
                    row = Row(ranks, SEQUENCE, reason=UNVERIFIED)
            yield task.case, with_efficiency(row, alone[task.case])
        yield from self._tries(shared, ranks, SEQUENCE, device)

    def _tries(
        self, measured: Mapping[Case, Row], ranks: int, parallel: str, device: torch.device
    ) -> Iterator[tuple[Case, Row]]:
        """Looks for the longest sequence, with each of the settings that cases have beside their length."""
        for settings in dict.fromkeys(of_any_length(case) for case in measured if self.longest):
            bracket = Bracket.of(device)
            for case, row in measured.items():
                if of_any_length(case) == settings:
                    bracket.add(case.seq_len, row.peak_gib)
            task = replace(self._task(settings, ranks, parallel), only_tries=True)
            yield from tries(bracket, partial(attempt, task, device), self.longest)

    def _task(self, case: Case, ranks: int, parallel: str, alone: Row | None = None) -> Task:
        return Task(case, ranks, parallel, self.repeats, self.seconds, torch.get_num_threads(), alone)


def attempt(task: Task, device: torch.device, seq_len: int, left: float) -> tuple[Case, Row]:
    """A step of that length; ranks are given as long as any task's."""
    ((tried, row),) = rows_of([replace(task, case=replace(task.case, seq_len=seq_len))], device)
    return tried.case, row


def require_gpus(ranks: int, longest: float, device: torch.device) -> None:
    """Raises ValueError where there are fewer GPUs than ranks, or none whose memory could be filled."""
    if longest:
        require_gpu(device)
    if device.type == "cuda" and ranks > torch.cuda.device_count():
        raise ValueError(f"--ranks {ranks}: torch finds {torch.cuda.device_count()} GPUs; each rank wants its own.")


def is_failure(row: Row) -> bool:
    """True if something was wrong or failed; a sequence that does not fit was measured, too."""
    return bool(row.reason) and not (row.reason.startswith(NOT_TRIED) or ran_out_of_memory(row.reason) or row.is_try)


def with_efficiency(row: Row, alone: Row) -> Row:
    """The row with its tokens a second over as many times the one rank's as there are ranks."""
    if row.tokens_per_second is None or alone.tokens_per_second is None:
        return row
    return replace(row, efficiency=row.tokens_per_second / (row.ranks * alone.tokens_per_second))


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
    """Rows that a rank measures."""
    device = start(rank, tasks[0].ranks, rendezvous, device)
    for task in tasks:
        yield run(task, device)
