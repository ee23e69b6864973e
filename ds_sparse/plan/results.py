"""What was measured, as rates are taken from it: results of `ds_sparse bench`, and of training runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..bench import attention
from ..bench.cases import DENSE_IN_BERT, IN_BERT, NO_ATTENTION, Case
from ..bench.machine import BACKWARD, FORWARD
from ..bench.peers import DENSE, OURS
from ..bench.runs import read
from . import bert_cases, sequence_cases

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results"
"""Of a clone."""

ATTENTION = ("attention-h200", "attention-growth-h200", "attention-break-even-h200", "attention-peers-h200")
BERT = ("bert-h200", "bert-long-h200", "bert-labelled-h200", "bert-dropout-h200")
SEQUENCE = ("sequence-h200",)
TRAINING = "training-h200"
"""Files of `COMMITTED` that hold the rates of an H200."""

H200 = "NVIDIA H200"

LONGEST_LAYOUT = 2**18
"""Tokens of a case whose layout is made to learn from; a longer one takes seconds."""


@dataclass(frozen=True)
class Kernel:
    """A call of attention, measured. `sparse` is ours, else PyTorch's dense attention."""

    case: Case
    sparse: bool
    direction: str
    milliseconds: float


@dataclass(frozen=True)
class BertStep:
    """A step of `ds_sparse bench bert`, measured."""

    case: bert_cases.Case
    attention: str
    milliseconds: float
    peak_gib: float | None


@dataclass(frozen=True)
class TrainingStep:
    """The median step of a training run of examples/bing_bert."""

    name: str
    seq_len: int
    batch: int
    milliseconds: float
    peak_gib: float


@dataclass(frozen=True)
class Results:
    """Attributes:
    machine: its name.
    sequence: cases and rows of `ds_sparse bench sequence`, those that have a time.
    sources: a line each file or run.
    """

    machine: str
    kernels: list[Kernel] = field(default_factory=list)
    bert: list[BertStep] = field(default_factory=list)
    sequence: list[tuple[sequence_cases.Case, sequence_cases.Row]] = field(default_factory=list)
    training: list[TrainingStep] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def without(self, step: TrainingStep) -> Results:
        """All but one training run, to predict that one."""
        return replace(self, training=[other for other in self.training if other != step])


def committed(folder: Path = COMMITTED) -> Results:
    """What is committed for an H200."""
    found = from_files([folder / f"{name}.json" for name in (*ATTENTION, *BERT, *SEQUENCE)])
    about = json.loads((folder / f"{TRAINING}.json").read_text(encoding="utf-8"))
    found.sources.append(f"{TRAINING}: commit {about['commit']}, {about['date']}")
    return replace(found, training=[training_step(run) for run in about["runs"]])


def from_files(paths: Iterable[Path]) -> Results:
    """What `ds_sparse bench attention --json`, `bench bert --json` and `bench sequence --json` wrote, of one machine.

    Raises:
        ValueError: a file that is none of these, or of another machine than the first.
    """
    found = Results("")
    for path in paths:
        run = read(str(path))
        machine = run.conditions["machine"]
        if found.machine not in ("", machine):
            raise ValueError(f"{path} is of {machine}, and the files before it of {found.machine}; give one machine's.")
        found = replace(found, machine=machine)
        try:
            if run.operation == "attention":
                found.kernels.extend(kernels_of(attention.restore(run.rows)))
            elif run.operation == "bert":
                found.bert.extend(steps_of(bert_cases.restore(run.rows)))
            elif run.operation == "sequence":
                found.sequence.extend(timed(sequence_cases.restore(run.rows)))
            else:
                raise ValueError(
                    f"is of `ds_sparse bench {run.operation}`; rates come from `attention`, `bert` and `sequence`."
                )
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        found.sources.append(f"{path.stem}: commit {run.conditions['commit']}, {run.conditions['date']}")
    return found


def kernels_of(results: Iterable[attention.Result]) -> list[Kernel]:
    """The times of ours and of dense attention, each way."""
    dense = set(DENSE.values())
    return [
        Kernel(result.case, row.peer == OURS, row.direction, row.milliseconds)
        for result in results
        if result.case.seq_len <= LONGEST_LAYOUT
        for row in result.rows
        if row.milliseconds is not None and row.direction in (FORWARD, BACKWARD) and row.peer in {OURS, *dense}
    ]


def steps_of(results: Iterable[bert_cases.Result]) -> list[BertStep]:
    """Forward and backward of BERT-base with nothing computed again, and attentions that plans know."""
    return [
        BertStep(case, row.attention, row.milliseconds, row.peak_gib)
        for case, rows in results
        if case == bert_cases.Case(case.seq_len, case.dropout, case.dtype, case.device, case.predicts_all)
        for row in rows
        if row.milliseconds is not None and row.attention in (NO_ATTENTION, DENSE_IN_BERT, *IN_BERT)
    ]


def timed(
    results: Iterable[sequence_cases.Result],
) -> list[tuple[sequence_cases.Case, sequence_cases.Row]]:
    return [(case, row) for case, rows in results for row in rows if row.milliseconds is not None and not row.is_try]


def training_step(run: dict[str, Any]) -> TrainingStep:
    """Of a row that website/training_table.py wrote."""
    milliseconds = run["batch"] * run["seq_len"] / run["tokens_per_second"] * 1e3
    return TrainingStep(run["name"], run["seq_len"], run["batch"], milliseconds, run["peak_gib"])


def names(steps: Sequence[BertStep]) -> list[str]:
    return sorted({step.attention for step in steps})
