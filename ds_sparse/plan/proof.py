"""Steps that were measured, beside what is predicted for them: none of them is among what its prediction comes from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ..bench.cases import DENSE_IN_BERT, FLOOR, NO_ATTENTION
from . import sequence_steps
from .bert_cases import LABELLED
from .bert_cases import Case as BertCase
from .memory import GIB, memory_of
from .model import NAMED
from .operations import Work
from .rates import Rates, bert_model, bert_step, walk_in_bert
from .results import COMMITTED, LONGEST_LAYOUT, Results, TrainingStep
from .sequence_cases import OFFLOADED, ranks_of
from .settings import Settings
from .step import model_work
from .training import predicted, predicted_memory, with_training

MODERNBERT = "modernbert-h200"
"""The file of `COMMITTED` with steps of ModernBERT."""

BF16_ADAMW_BYTES, BF16_ADAMW_STATES = 14, 4
"""Of a parameter where all of AdamW is in bf16: moved by a step (four numbers read, three written), and its moments."""


@dataclass(frozen=True)
class Compared:
    """A step.

    Attributes:
        what: the model, and how it is trained.
        measured, predicted: milliseconds.
        measured_gib, predicted_gib: at the highest.
    tokens: of a rank in a forward pass, where there are several.
    """

    what: str
    attention: str
    seq_len: int
    measured: float
    predicted: float
    measured_gib: float
    predicted_gib: float
    tokens: int = 0

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_gib / self.measured_gib - 1


def compared(results: Results, rates: Rates) -> Iterator[Compared]:
    """All measured steps that were not used.

    Those of BERT with attention: rates come from single calls of attention, and from steps of BERT without attention.
    Not those with dropout, from which what dropout costs is taken. Training runs: each with what the *others* took
    besides what they compute.
    """
    for step in results.bert:
        if step.attention == NO_ATTENTION or step.case.dropout:
            continue
        model = bert_model(step.case.device)
        walked = (
            None if step.attention == DENSE_IN_BERT else walk_in_bert(step.attention, model.heads, step.case.seq_len)
        )
        what = "BERT-base, forward and backward"
        what += "" if step.case.predicts_all else ", logits of labelled tokens alone"
        yield Compared(
            what,
            step.attention,
            step.case.seq_len,
            step.milliseconds,
            bert_step(rates, step.case, walked),
            step.peak_gib or 0.0,
            bert_gib(step.case),
        )
    for run in results.training:
        yield compared_training(results, rates, run)
    yield compared_modernbert(rates)


def compared_training(results: Results, rates: Rates, run: TrainingStep) -> Compared:
    """A training run, predicted by the others."""
    of_others = with_training(rates, results.without(run))
    step, memory = predicted(of_others, run), predicted_memory(run)
    what = "BERT-base of bing_bert, trained by DeepSpeed, dropout 0.1"
    return Compared(what, run.name, run.seq_len, run.milliseconds, step.total, run.peak_gib, memory.total / GIB)


def compared_modernbert(rates: Rates, folder: Path = COMMITTED) -> Compared:
    """A step of another family, at the rates of BERT: ModernBERT-base without attention, with an AdamW in bf16."""
    data = json.loads((folder / f"{MODERNBERT}.json").read_text(encoding="utf-8"))
    (row,) = (row for row in data["rows"] if row["attention"] == FLOOR)
    model, tokens = NAMED["modernbert-base"], row["rows"] * row["seq_len"]
    parameters = model.parameters(row["seq_len"])
    step = rates.work(model_work(model) * tokens + Work(moved=BF16_ADAMW_BYTES * parameters))
    memory = memory_of(model, Settings(row["rows"]), row["seq_len"], trains=False)
    gib = (memory.total + BF16_ADAMW_STATES * parameters) / GIB
    what = "ModernBERT-base, forward, backward and AdamW"
    return Compared(what, "none", row["seq_len"], row["milliseconds"], step, row["peak_gib"], gib)


def compared_on_several(results: Results, rates: Rates) -> Iterator[Compared]:
    """Steps of `ds_sparse bench sequence`, but for those with what is not planned: tiles, activations on the CPU. Rates
    of what ranks send are from profiles of the same steps; nothing else is."""
    for case, row in results.sequence:
        if case.seq_len > LONGEST_LAYOUT or case.tiles > 1 or case.activations == OFFLOADED:
            continue
        assert row.milliseconds is not None
        step, memory = sequence_steps.predicted(rates, case, row), sequence_steps.predicted_memory(case, row)
        passes = f", {case.micro_batches} micro batches" if case.micro_batches > 1 else ""
        yield Compared(
            f"{ranks_of(case, row)}, activations {case.activations}{passes}",
            case.structure,
            case.seq_len,
            row.milliseconds,
            step.total,
            row.peak_gib or 0.0,
            memory.total / GIB,
            sequence_steps.settings_of(case, row).tokens(case.seq_len),
        )


def bert_gib(case: BertCase) -> float:
    """Memory of a step of `ds_sparse bench bert`, predicted."""
    model = bert_model(case.device, case.dropout)
    of_all = memory_of(model, Settings(case.batch), case.seq_len, trains=False)
    share = 1.0 if case.predicts_all else LABELLED
    return replace(of_all, logits=of_all.logits * share).total / GIB
