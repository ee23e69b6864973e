"""A training step of BERT on several ranks of this machine, beside one: data parallel and sequence parallel."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.models.processes import Failure, result_of
from benchmarks.models.results import ALONE, DATA, SEQUENCE, TOO_LONG, Case, Result, Row, ran_out_of_memory
from benchmarks.models.search import Bracket, tries
from benchmarks.models.sequence_rank import Task, run
from benchmarks.running import NOT_TRIED

UNVERIFIED = "not verified: the one rank has no row of this length, and no shorter one was found right"
NOT_HELD = f"{NOT_TRIED}one rank does not hold such sequences"

LONGEST_WAIT = 300
"""Seconds for the result of a task, besides those of its rounds; ranks that hang are ended then."""


def results(
    cases: Sequence[Case], ranks: Sequence[int], parallel: Sequence[str], repeats: int, seconds: float,
    longest: float, device: torch.device,
) -> Iterator[Result]:  # fmt: skip
    """Cases by rising length, each on one rank and then on more; then the longest sequence that fits, looked for so
    many seconds for each number of ranks. What is out of memory is not tried at longer ones.

    Args:
        parallel: what several ranks do, of DATA and SEQUENCE.
        repeats, seconds: rounds, and after how long none begins.
    """
    ways = [(1, ALONE), *((count, way) for count in sorted({*ranks} - {1}) for way in parallel)]
    measured: dict[tuple[int, str], dict[Case, Row]] = {way: {} for way in ways}
    task = partial(Task, repeats=repeats, seconds=seconds, threads=torch.get_num_threads())
    for case in cases:
        for count, way in ways:
            alone, before = measured[1, ALONE].get(case), measured[count, way]
            row = Row(ranks=count, parallel=way)
            if any(ran_out_of_memory(x.reason) for of, x in before.items() if of.of_any_length == case.of_any_length):
                row = replace(row, reason=TOO_LONG)
            elif way == DATA and alone.reason:
                row = replace(row, reason=NOT_HELD)
            else:
                row = row_of(task(case, count, way, alone=alone), device)
            before[case] = row
        yield case, [told(case, measured, *way) for way in ways]
    for count, way in ways if longest else ():
        if way == DATA:
            continue
        for settings in dict.fromkeys(case.of_any_length for case in cases):
            bracket = Bracket.of(device)
            for case, row in measured[count, way].items():
                if case.of_any_length == settings:
                    bracket.add(case.seq_len, row.peak_gib)
            one = replace(settings, is_try=True)
            for case, row in tries(bracket, partial(attempt, task(one, count, way), device), longest):
                yield case, [row]


def told(case: Case, measured: dict[tuple[int, str], dict[Case, Row]], ranks: int, parallel: str) -> Row:
    """The row of some ranks, with its tokens a second over as many times the one rank's as there are ranks; not where
    nothing says that its loss is right."""
    row, alone = measured[ranks, parallel][case], measured[1, ALONE][case]
    is_right = any(one.loss_alone is not None for one in measured[ranks, parallel].values())
    if parallel == SEQUENCE and not row.reason and not is_right:
        return Row(ranks=ranks, parallel=parallel, reason=UNVERIFIED)
    if parallel == ALONE or row.tokens_per_second is None or alone.tokens_per_second is None:
        return row
    return replace(row, efficiency=row.tokens_per_second / (ranks * alone.tokens_per_second))


def attempt(task: Task, device: torch.device, seq_len: int, left: float) -> tuple[Case, Row]:
    """A step of that length; ranks are given as long as for any task."""
    task = replace(task, case=replace(task.case, seq_len=seq_len))
    return task.case, row_of(task, device)


def row_of(task: Task, device: torch.device) -> Row:
    """Measures ranks in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = str(Path(folder) / "rendezvous")
        arguments = [(rank, rendezvous, task, device) for rank in range(task.ranks)]
        row = result_of(run, arguments, LONGEST_WAIT + task.seconds)
    return Row(ranks=task.ranks, parallel=task.parallel, reason=row.reason) if isinstance(row, Failure) else row


def require_gpus(ranks: int, device: torch.device) -> None:
    """Raises ValueError where there are fewer GPUs than ranks."""
    if device.type == "cuda" and ranks > torch.cuda.device_count():
        raise ValueError(f"--ranks {ranks}: torch finds {torch.cuda.device_count()} GPUs; each rank wants its own.")


def is_failure(case: Case, row: Row) -> bool:
    """True if something was wrong or failed; a sequence that does not fit was measured, too."""
    return bool(row.reason) and not (row.reason.startswith(NOT_TRIED) or ran_out_of_memory(row.reason) or case.is_try)
