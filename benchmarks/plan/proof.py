"""Steps that were measured, beside what is predicted for them: none of them is among what its prediction comes from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.models.results import Case, Row, who
from ds_sparse.bench.runs import restored
from ds_sparse.plan.fitting import LABELLED, LONGEST_LAYOUT, NO_ATTENTION, BertStep, Results, bert_model, walk_in_bert
from ds_sparse.plan.memory import GIB, memory_of
from ds_sparse.plan.model import NAMED
from ds_sparse.plan.operations import Work, whole_model
from ds_sparse.plan.rates import Rates
from ds_sparse.plan.settings import Settings
from ds_sparse.plan.step import step_of

from .committed import COMMITTED, MODEL, TrainingStep, with_training

BF16_ADAMW_BYTES, BF16_ADAMW_STATES = 14, 4
"""Bytes that a step moves for a parameter, four numbers read and three written, and bytes of its moments, where all of
AdamW is in bf16."""


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


def compared(results: Results, steps: Sequence[TrainingStep], rates: Rates) -> Iterator[Compared]:
    """Compares all measured steps that were not used.

    Those of BERT with attention: rates come from single calls of attention, and from steps of BERT without attention.
    Not those with dropout, from which what dropout costs is taken. Training runs: each with what the *others* took
    besides what they compute.
    """
    for step in results.bert:
        if step.attention == NO_ATTENTION or step.dropout:
            continue
        what = "BERT-base, forward and backward" + ("" if step.predicts_all else ", logits of labelled tokens alone")
        times, gib = (step.milliseconds or 0.0, step.predicted(rates)), (step.peak_gib or 0.0, bert_gib(step))
        yield Compared(what, step.attention, step.seq_len, *times, *gib)
    for run in steps:
        yield compared_training(steps, rates, run)
    yield compared_modernbert(rates)


def compared_training(steps: Sequence[TrainingStep], rates: Rates, run: TrainingStep) -> Compared:
    """A training run, predicted by the others."""
    of_others = with_training(rates, [other for other in steps if other != run])
    milliseconds = run.predicted(of_others).total
    gib = memory_of(MODEL, run.settings(), run.seq_len).total / GIB
    what = "BERT-base of bing_bert, trained by DeepSpeed, dropout 0.1"
    return Compared(what, run.name, run.seq_len, run.milliseconds, milliseconds, run.peak_gib, gib)


def compared_modernbert(rates: Rates, folder: Path = COMMITTED) -> Compared:
    """A step of another family, at the rates of BERT: ModernBERT-base without attention, with an AdamW in bf16."""
    data = json.loads((folder / "modernbert-h200.json").read_text(encoding="utf-8"))
    (row,) = (row for row in data["rows"] if row["attention"] == "floor")
    model, tokens = NAMED["modernbert-base"], row["rows"] * row["seq_len"]
    parameters = model.parameters(row["seq_len"])
    step = rates.work(whole_model(model).both * tokens + Work(moved=BF16_ADAMW_BYTES * parameters))
    memory = memory_of(model, without_optimizer(row["rows"]), row["seq_len"])
    gib = (memory.total + BF16_ADAMW_STATES * parameters) / GIB
    what = "ModernBERT-base, forward, backward and AdamW"
    return Compared(what, "none", row["seq_len"], row["milliseconds"], step, row["peak_gib"], gib)


def compared_on_several(results: Results, rates: Rates) -> Iterator[Compared]:
    """Steps of `python -m benchmarks sequence`, but for those with what is not planned: tiles, activations on the CPU.
    Rates of what ranks send are from profiles of the same steps; nothing else is."""
    for step in results.sequence:
        if step.seq_len > LONGEST_LAYOUT or step.tiles > 1 or step.activations == "offloaded":
            continue
        model, settings = step.model(), step.settings()
        walk = walk_in_bert(step.structure, model.heads, step.seq_len)
        milliseconds = step_of(rates, model, settings, step.seq_len, [walk] * model.layers).total
        gib = memory_of(model, settings, step.seq_len).total / GIB
        ranks = who(restored(Case, vars(step)), restored(Row, vars(step)))
        passes = f", {step.micro_batches} micro batches" if step.micro_batches > 1 else ""
        yield Compared(
            f"{ranks}, activations {step.activations}{passes}",
            step.structure,
            step.seq_len,
            step.milliseconds or 0.0,
            milliseconds,
            step.peak_gib or 0.0,
            gib,
            settings.tokens(step.seq_len),
        )


def without_optimizer(sequences: int) -> Settings:
    """Settings of a step that is measured without an optimizer: states that are offloaded take no memory of a GPU."""
    return Settings(sequences, offloads=True)


def bert_gib(step: BertStep) -> float:
    """Memory of a step of `python -m benchmarks bert`, predicted."""
    of_all = memory_of(bert_model(step.device, step.dropout), without_optimizer(step.batch), step.seq_len)
    return replace(of_all, logits=of_all.logits * (1.0 if step.predicts_all else LABELLED)).total / GIB
