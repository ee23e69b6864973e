"""How fast a machine is, taken from results that were measured on it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..bench.cases import DENSE_IN_BERT, IN_BERT, NO_ATTENTION, Case
from ..bench.machine import BACKWARD, FORWARD
from .bert_cases import LABELLED, MODEL
from .bert_cases import Case as BertCase
from .fit import fit, times
from .model import NAMED, Model
from .operations import FP32, ITEM, Part, Work, embeddings, layer, logits
from .results import Kernel, Results
from .walk import Walk

Walked = Walk | None
"""What a layer attends to; None is dense attention."""


@dataclass(frozen=True)
class Measured:
    """What rates come from: beyond it they are extrapolated.

    Attributes:
        tokens: the fewest and the most, of one sequence.
        blocks, head_dims: of the layouts.
        layers: of the model whose steps were measured.
        hidden: its size.
    """

    tokens: tuple[int, int]
    dense_tokens: tuple[int, int]
    blocks: tuple[int, ...]
    head_dims: tuple[int, ...]
    layers: int
    hidden: int


@dataclass(frozen=True)
class Rates:
    """Attributes:
    products, odd_products, moved: milliseconds a FLOP of matrix products, of those whose rows have odd lengths, and
        a byte of all other kernels.
    sparse, dense: the coefficients of attention's time, by direction and head size (see `key_of`); `sparse_row` and
        `dense_row` say of what.
    dropout: milliseconds that dropout adds a score, forward and backward, of sparse and of dense attention.
    training: milliseconds of a training step that are neither of these: what DeepSpeed, the optimizer's launches and
        the program's loop take. None where no training was measured.
    exchange, reduction: milliseconds a byte that leaves a rank, of what ranks of a sequence exchange, and of gradients;
        None where no steps on several GPUs were measured.
    itemsize: bytes of a number in what was measured.
    errors: by what was fitted, the relative errors of the fit.
    """

    machine: str
    sources: tuple[str, ...]
    products: float
    odd_products: float
    moved: float
    sparse: dict[str, list[float]]
    dense: dict[str, list[float]]
    dropout: dict[str, float]
    training: float | None
    measured: Measured
    itemsize: int = ITEM
    exchange: float | None = None
    reduction: float | None = None
    errors: dict[str, list[float]] = field(default_factory=dict)

    def work(self, work: Work) -> float:
        """Milliseconds of what is not attention."""
        wide = self.itemsize / ITEM
        return self.products * work.flops + self.odd_products * work.odd_flops + self.moved * wide * work.moved

    def attention(self, walked: Walked, batch: int, model: Model, seq_len: int, direction: str) -> float:
        """Milliseconds of attention in one layer, in one direction."""
        table, row = (self.dense, dense_row) if walked is None else (self.sparse, sparse_row)
        scores = float(seq_len**2) if walked is None else getattr(walked, SIDES[direction]).computed
        if walked is None and model.does.causal:
            scores /= 2
        heads = batch * model.heads
        coefficients = table[_nearest(model.head_dim, direction, table)]
        milliseconds = times(coefficients, row(walked, heads, scores, seq_len, direction))
        if model.attention_dropout:
            milliseconds += self.dropout["dense" if walked is None else "sparse"] * heads * scores / 2
        return milliseconds


SIDES = {FORWARD: "rows", BACKWARD: "columns"}
"""What each direction walks."""


def sparse_row(walked: Walked, heads: int, scores: float, seq_len: int, direction: str) -> list[float]:
    """What the time of sparse attention goes by: scores computed, scores of the tiles loaded, entries of their lists,
    tokens, and a constant."""
    assert walked is not None
    side = getattr(walked, SIDES[direction])
    return [heads * side.computed, heads * side.loaded, heads * side.entries, heads * seq_len, 1.0]


def dense_row(walked: Walked, heads: int, scores: float, seq_len: int, direction: str) -> list[float]:
    """The same of dense attention: scores, tokens, and a constant."""
    return [heads * scores, heads * seq_len, 1.0]


def key_of(head_dim: int, direction: str) -> str:
    """Where `Rates.sparse` and `Rates.dense` have a head size and a direction."""
    return f"{direction} {head_dim}"


def _nearest(head_dim: int, direction: str, table: Mapping[str, list[float]]) -> str:
    """The smallest head size that was measured and has room for this one; else the largest."""
    sizes = sorted(int(key.split()[1]) for key in table if key.startswith(f"{direction} "))
    return key_of(next((size for size in sizes if size >= head_dim), sizes[-1]), direction)


def rates_of(results: Results) -> Rates:
    """The rates that results are nearest to.

    Raises:
        ValueError: kernels of attention or steps without attention are missing.
    """
    cases = [kernel.case for kernel in results.kernels]
    errors: dict[str, list[float]] = {}
    sparse = _attention_rates(results.kernels, True, errors)
    dense = _attention_rates(results.kernels, False, errors)
    if not sparse or not dense or not any(step.attention == NO_ATTENTION for step in results.bert):
        raise ValueError(
            "Rates need `ds_sparse bench attention` with ds_sparse and dense attention, and `ds_sparse bench bert`; "
            "one of them gave no times."
        )
    model = bert_model(results.bert[0].case.device)
    of_dense = [kernel.case.seq_len for kernel in results.kernels if not kernel.sparse]
    measured = Measured(
        tokens=(min(case.seq_len for case in cases), max(case.seq_len for case in cases)),
        dense_tokens=(min(of_dense), max(of_dense)),
        blocks=tuple(sorted({case.block for case in cases})),
        head_dims=tuple(sorted({case.head_dim for case in cases})),
        layers=model.layers,
        hidden=model.hidden,
    )
    itemsize = FP32 if results.bert[0].case.dtype == "fp32" else ITEM
    none = [step for step in results.bert if step.attention == NO_ATTENTION]
    rows = [_numbers(bert_work(step.case, False), itemsize / ITEM) for step in none]
    products, odd, moved = fit(rows, [step.milliseconds for step in none])
    errors["model without attention"] = [
        times([products, odd, moved], row) / step.milliseconds - 1 for row, step in zip(rows, none)
    ]
    rates = Rates(
        results.machine,
        tuple(results.sources),
        products,
        odd or products,
        moved,
        sparse,
        dense,
        {"sparse": 0.0, "dense": 0.0},
        None,
        measured,
        itemsize,
        errors=errors,
    )
    return replace(rates, dropout=_dropout(rates, results))


def _attention_rates(kernels: Sequence[Kernel], sparse: bool, errors: dict[str, list[float]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    by_key: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        if kernel.sparse == sparse:
            by_key.setdefault(key_of(kernel.case.head_dim, kernel.direction), []).append(kernel)
    for key, those in by_key.items():
        rows = [kernel_row(kernel) for kernel in those]
        milliseconds = [kernel.milliseconds for kernel in those]
        found[key] = fit(rows, milliseconds)
        name = f"{'sparse' if sparse else 'dense'} attention"
        errors.setdefault(name, []).extend(times(found[key], row) / ms - 1 for row, ms in zip(rows, milliseconds))
    return found


def kernel_row(kernel: Kernel) -> list[float]:
    """What the time of a measured call goes by."""
    case = kernel.case
    heads = case.batch * case.heads
    walked = walk_of_case(case) if kernel.sparse else None
    make: Callable[..., list[float]] = sparse_row if kernel.sparse else dense_row
    return make(walked, heads, float(case.seq_len**2), case.seq_len, kernel.direction)


def walk_of_case(case: Case) -> Walk:
    """Of a case of `ds_sparse bench attention`."""
    name = (case.structure, case.block, case.heads, case.seq_len, repr(sorted(case.options.items())))
    if name not in _WALKS:
        _WALKS[name] = Walk.of(case.layout(), case.block)
    return _WALKS[name]


_WALKS: dict[tuple[object, ...], Walk] = {}
"""Of the cases seen: several runs measured the same."""


@functools.cache
def walk_in_bert(name: str, heads: int, seq_len: int) -> Walk:
    """Of a structure of `ds_sparse bench bert`."""
    structure = IN_BERT[name](heads)
    return Walk.of(structure.make_bool_layout(seq_len), structure.block)


def bert_model(device: str, dropout: float = 0.0) -> Model:
    """The model of `ds_sparse bench bert`."""
    given = MODEL[device]
    base = NAMED["bert-base"]
    heads = given.get("num_attention_heads", base.heads)
    hidden = given.get("hidden_size", base.hidden)
    return replace(
        base,
        layers=given.get("num_hidden_layers", base.layers),
        hidden=hidden,
        heads=heads,
        key_heads=heads,
        head_dim=hidden // heads,
        intermediate=given.get("intermediate_size", base.intermediate),
        vocabulary=given.get("vocab_size", base.vocabulary),
        dropout=dropout,
        attention_dropout=dropout,
    )


def bert_work(case: BertCase, attends: bool) -> Work:
    """All of its step but the kernels of attention, forward and backward."""
    model = bert_model(case.device, case.dropout)
    share = 1.0 if case.predicts_all else LABELLED
    of_token: Part = layer(model, attends) * model.layers + embeddings(model) + logits(model) * share
    return (of_token.forward + of_token.backward) * (case.batch * case.seq_len)


def _numbers(work: Work, wide: float) -> list[float]:
    return [work.flops, work.odd_flops, wide * work.moved]


def _dropout(rates: Rates, results: Results) -> dict[str, float]:
    """Milliseconds a score, of the steps with dropout: what they took beyond the same without attention's."""
    found = dict(rates.dropout)
    for kind in found:
        rows, extra = [], []
        for step in results.bert:
            wanted = step.attention == DENSE_IN_BERT if kind == "dense" else step.attention in IN_BERT
            if not step.case.dropout or not wanted:
                continue
            model = bert_model(step.case.device, step.case.dropout)
            walked = None if kind == "dense" else walk_in_bert(step.attention, model.heads, step.case.seq_len)
            without = bert_step(rates, step.case, walked, attention_dropout=0.0)
            scores = (
                float(step.case.seq_len**2) if walked is None else (walked.rows.computed + walked.columns.computed) / 2
            )
            rows.append(step.case.batch * model.heads * model.layers * scores)
            extra.append(step.milliseconds - without)
        if rows:
            found[kind] = max(0.0, sum(extra) / sum(rows))
    return found


def bert_step(rates: Rates, case: BertCase, walked: Walked, attention_dropout: float | None = None) -> float:
    """Milliseconds of a step of `ds_sparse bench bert`, predicted."""
    model = bert_model(case.device, case.dropout)
    if attention_dropout is not None:
        model = replace(model, attention_dropout=attention_dropout)
    kernels = sum(rates.attention(walked, case.batch, model, case.seq_len, way) for way in (FORWARD, BACKWARD))
    return rates.work(bert_work(case, True)) + model.layers * kernels
