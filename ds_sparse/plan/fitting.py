"""Rates of a machine, taken from results that `ds_sparse bench` and the benchmarks of a clone wrote on it."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np

from ..bench.cases import IN_BERT, Case
from ..bench.runs import read, restored
from .communication import exchanged, reduced
from .layers import BACKWARD, FORWARD, Walk, Walked
from .model import NAMED, Model
from .operations import FP32, ITEM, Work, embeddings, layer, logits
from .rates import Measured, Rates, attention_row, key_of, times
from .settings import BUCKET, Settings, checks_gradients

LONGEST_LAYOUT = 2**18
"""Tokens of a case whose layout is made to learn from; a longer one takes seconds."""

OURS, DENSE = "ds_sparse", ("cudnn", "sdpa")
"""Peers of `ds_sparse bench attention` that rates come from."""

NO_ATTENTION, DENSE_IN_BERT = "none", "sdpa"
"""Attentions of `python -m benchmarks bert` that rates come from, besides `IN_BERT`."""

LABELLED = 0.15
"""Part of the tokens that have a label in `python -m benchmarks bert`."""

SMALL = replace(NAMED["bert-base"], layers=2, hidden=128, heads=2, key_heads=2, intermediate=512, vocabulary=1000)
"""The model of `python -m benchmarks bert` on a CPU."""

DIRECTIONS = FORWARD, BACKWARD


@dataclass(frozen=True, kw_only=True)
class Kernel(Case):
    """A call of attention: a row of `ds_sparse bench attention`."""

    peer: str
    direction: str
    milliseconds: float | None = None

    @property
    def teaches(self) -> bool:
        """Rates come from it."""
        known = self.peer in (OURS, *DENSE) and self.direction in DIRECTIONS and self.seq_len <= LONGEST_LAYOUT
        return known and self.milliseconds is not None

    def row(self) -> list[float]:
        """The quantities that the time of the call goes by."""
        walked = _walk_of_case(self) if self.peer == OURS else None
        return attention_row(walked, self.batch * self.heads, float(self.seq_len**2), self.seq_len, self.direction)


@dataclass(frozen=True)
class BertStep:
    """A row of `python -m benchmarks bert`, whose options the fields are."""

    seq_len: int
    dropout: float
    dtype: str
    device: str
    batch: int
    attention: str
    milliseconds: float | None = None
    peak_gib: float | None = None
    predicts_all: bool = True
    model: str = "base"
    whole_step: bool = False
    checkpointed: bool = False
    is_try: bool = False

    @property
    def teaches(self) -> bool:
        """Rates come from it, or it shows how good they are: forward and backward of BERT-base, nothing made again."""
        plain = self.model == "base" and not (self.whole_step or self.checkpointed or self.is_try)
        known = self.attention in (NO_ATTENTION, DENSE_IN_BERT, *IN_BERT)
        return plain and known and self.milliseconds is not None

    def walk(self) -> Walked:
        """Tiles of its sparse attention; None for dense."""
        heads = bert_model(self.device).heads
        return None if self.attention == DENSE_IN_BERT else walk_in_bert(self.attention, heads, self.seq_len)

    def work(self, attends: bool) -> Work:
        """The work of the step without the kernels of attention."""
        model = bert_model(self.device, self.dropout)
        share = 1.0 if self.predicts_all else LABELLED
        of_token = layer(model, attends) * model.layers + embeddings(model) + logits(model) * share
        return of_token.both * (self.batch * self.seq_len)

    def predicted(self, rates: Rates) -> float:
        """Milliseconds of the step with attention."""
        model, walked = bert_model(self.device, self.dropout), self.walk()
        kernels = sum(rates.attention(walked, self.batch, model, self.seq_len, way) for way in DIRECTIONS)
        return rates.work(self.work(True)) + model.layers * kernels


@dataclass(frozen=True)
class SequenceStep:
    """A row of `python -m benchmarks sequence`: a training step on some ranks, whose options the fields are.

    Attributes:
        profile: milliseconds by where they go.
    """

    seq_len: int
    structure: str
    dtype: str
    device: str
    zero_stage: int
    ranks: int
    parallel: str
    activations: str = "kept"
    tiles: int = 1
    micro_batches: int = 1
    tokens: int = 0
    milliseconds: float | None = None
    peak_gib: float | None = None
    profile: Mapping[str, float] = field(default_factory=dict)
    is_try: bool = False

    @property
    def teaches(self) -> bool:
        return self.milliseconds is not None and not self.is_try

    @property
    def shares(self) -> bool:
        """True where the ranks share a sequence."""
        return self.parallel == "sequence"

    def model(self) -> Model:
        """BERT whose logits are those of labelled tokens, in fp32, as in bing_bert."""
        return replace(bert_model(self.device), family="bing_bert")

    def settings(self) -> Settings:
        """Settings in the JSON of the bench."""
        return Settings(
            micro_batch=max(1, self.tokens // self.seq_len),
            accumulation=self.micro_batches,
            gpus=self.ranks,
            dtype=self.dtype,
            zero_stage=self.zero_stage,
            bucket_bytes=2 * BUCKET if self.zero_stage in (1, 2) else 0,
            checkpoints=self.activations != "kept",
            ranks=self.ranks if self.shares else 1,
            checks=checks_gradients(self.zero_stage, self.dtype),
        )


@dataclass(frozen=True)
class Results:
    """Measurements on one machine. sources: a line each file or run."""

    machine: str = ""
    kernels: list[Kernel] = field(default_factory=list)
    bert: list[BertStep] = field(default_factory=list)
    sequence: list[SequenceStep] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)


def from_files(paths: Iterable[Path]) -> Results:
    """Reads what `ds_sparse bench attention --json`, and bert and sequence of `python -m benchmarks`, wrote.

    Raises:
        ValueError: a file that is none of these, or of another machine than the first.
    """
    found = Results()
    kinds: dict[str, tuple[Any, list[Any]]] = {
        "attention": (Kernel, found.kernels),
        "bert": (BertStep, found.bert),
        "sequence": (SequenceStep, found.sequence),
    }
    for path in paths:
        run = read(str(path))
        machine = run.conditions["machine"]
        if found.machine not in ("", machine):
            raise ValueError(f"{path} is of {machine}, and the files before it of {found.machine}; give one machine's.")
        found = replace(found, machine=machine)
        if run.operation not in kinds:
            raise ValueError(
                f"{path}: is of the operation {run.operation!r}; rates come from `attention`, `bert` and `sequence`."
            )
        kind, rows = kinds[run.operation]
        try:
            rows.extend(row for row in (restored(kind, fields) for fields in run.rows) if row.teaches)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        found.sources.append(f"{path.stem}: commit {run.conditions['commit']}, {run.conditions['date']}")
    return found


def rates_of(results: Results) -> Rates:
    """The rates that results are nearest to, those of training left out.

    Raises:
        ValueError: kernels of attention or steps without attention are missing.
    """
    kernels, none = results.kernels, [step for step in results.bert if step.attention == NO_ATTENTION]
    ours, others = ([x for x in kernels if (x.peer == OURS) == is_ours] for is_ours in (True, False))
    if not ours or not others or not none:
        raise ValueError(
            "Rates need `ds_sparse bench attention` with ds_sparse and dense attention, and `python -m benchmarks "
            "bert` of a clone; one of them gave no times."
        )
    sparse, sparse_errors = _attention_rates(ours)
    dense, dense_errors = _attention_rates(others)
    model, itemsize = bert_model(results.bert[0].device), FP32 if results.bert[0].dtype == "fp32" else ITEM
    work = [step.work(False) for step in none]
    rows = [[x.flops, x.odd_flops, itemsize / ITEM * x.moved] for x in work]
    (products, odd, moved), errors = fit(rows, [step.milliseconds for step in none])
    lengths, dense_lengths = ([x.seq_len for x in those] for those in (kernels, others))
    rates = Rates(
        machine=results.machine,
        sources=tuple(results.sources),
        products=products,
        odd_products=odd or products,
        moved=moved,
        sparse=sparse,
        dense=dense,
        dropout={"sparse": 0.0, "dense": 0.0},
        training=None,
        measured=Measured(
            tokens=(min(lengths), max(lengths)),
            dense_tokens=(min(dense_lengths), max(dense_lengths)),
            blocks=tuple(sorted({x.block for x in kernels})),
            head_dims=tuple(sorted({x.head_dim for x in kernels})),
            layers=model.layers,
            hidden=model.hidden,
        ),
        itemsize=itemsize,
        # Of ranks of windows, and of one random block a row, as bigbird-16 has, keys are sent, fewer bytes.
        exchange=_least((x for x in results.sequence if x.shares and x.structure == "bigbird-64"), "all-to-all"),
        reduction=_least(results.sequence, "reduction of gradients"),
        errors={
            "sparse attention": in_short(sparse_errors),
            "dense attention": in_short(dense_errors),
            "model without attention": in_short(errors),
        },
    )
    dropped: dict[str, list[BertStep]] = {kind: [] for kind in rates.dropout}
    for step in results.bert:
        if step.dropout and step.attention != NO_ATTENTION:
            dropped["dense" if step.attention == DENSE_IN_BERT else "sparse"].append(step)
    return replace(rates, dropout={kind: _dropout(rates, steps) for kind, steps in dropped.items()})


def fit(rows: Sequence[Sequence[float]], measured: Sequence[float | None]) -> tuple[list[float], list[float]]:
    """Least squares of relative errors: coefficients, as many as a row has numbers and none below zero, of which rows
    times coefficients are nearest to what was measured, and those errors.

    Tries each set of columns that may be other than zero: exact, and quick for a handful.
    """
    matrix = np.array(rows, dtype=float) / np.array(measured, dtype=float)[:, None]
    scale = np.abs(matrix).max(0)
    scale[scale == 0] = 1
    matrix, wanted = matrix / scale, np.ones(len(measured))
    columns = range(matrix.shape[1])
    best, found = np.inf, np.zeros(len(columns))
    for those in chain.from_iterable(combinations(columns, count) for count in range(1, len(columns) + 1)):
        solution = np.linalg.lstsq(matrix[:, those], wanted, rcond=None)[0]
        error = ((matrix[:, those] @ solution - wanted) ** 2).sum()
        if (solution >= 0).all() and error < best - 1e-12:
            best, found = error, np.zeros(len(columns))
            found[list(those)] = solution
    coefficients = (found / scale).tolist()
    return coefficients, [times(coefficients, row) / ms - 1 for row, ms in zip(rows, measured) if ms]


def in_short(errors: Sequence[float]) -> tuple[float, float]:
    """The median and the largest, without sign."""
    sizes = [abs(error) for error in errors]
    return statistics.median(sizes), max(sizes)


def _attention_rates(kernels: Sequence[Kernel]) -> tuple[dict[str, list[float]], list[float]]:
    """Coefficients by head size and direction, and all errors."""
    by_key: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        by_key.setdefault(key_of(kernel.head_dim, kernel.direction), []).append(kernel)
    fits = {key: fit([x.row() for x in those], [x.milliseconds for x in those]) for key, those in by_key.items()}
    return {key: found for key, (found, _) in fits.items()}, [x for _, errors in fits.values() for x in errors]


def _dropout(rates: Rates, steps: Sequence[BertStep]) -> float:
    """Milliseconds a score, of steps with dropout: what they took beyond what rates without attention's predict."""
    scores = extra = 0.0
    for step in steps:
        model, walked = bert_model(step.device), step.walk()
        each = step.seq_len**2 * (walked.computed if walked else 1.0)
        scores += step.batch * model.heads * model.layers * each
        extra += (step.milliseconds or 0.0) - step.predicted(rates)
    return max(0.0, extra / scores) if steps else 0.0


def _least(steps: Iterable[SequenceStep], part: str) -> float | None:
    """The fewest milliseconds that a byte took in any step: a rank that waits for another counts as sending."""
    sent = exchanged if part == "all-to-all" else reduced
    found = [
        step.profile[part] / size
        for step in steps
        if step.profile.get(part) and (size := sent(step.model(), step.settings(), step.seq_len))
    ]
    return min(found, default=None)


def _walk_of_case(case: Case) -> Walk:
    name = repr((case.structure, case.block, case.heads, case.seq_len, sorted(case.options.items())))
    if name not in _WALKS:
        _WALKS[name] = Walk.of(case.layout(), case.block)
    return _WALKS[name]


_WALKS: dict[str, Walk] = {}
"""Walks of the cases seen: several runs measured the same."""


@functools.cache
def walk_in_bert(name: str, heads: int, seq_len: int) -> Walk:
    """The tiles of a structure of `python -m benchmarks bert`."""
    structure = IN_BERT[name](heads)
    return Walk.of(structure.make_bool_layout(seq_len), structure.block)


def bert_model(device: str, dropout: float = 0.0) -> Model:
    """The model of `python -m benchmarks bert`."""
    model = SMALL if device == "cpu" else NAMED["bert-base"]
    return replace(model, dropout=dropout, attention_dropout=dropout)
