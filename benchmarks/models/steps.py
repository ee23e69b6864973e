"""A training step of a model with each attention: verified, timed in turns, or tried at longer and longer sequences.

A family is a module of this folder: `make_model` and `switch` give a model with an attention, `pieces_of` its inputs,
`queries_of` the weight whose gradient is verified, and `masks_of` what each of its layers has to see.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from benchmarks.models.attentions import EAGER, FLOOR, GRAPH_IN_BERT, NO_ATTENTION, OF_STRUCTURES, STRUCTURES_IN_BERT
from benchmarks.models.processes import Failure, result_of
from benchmarks.models.results import TOO_LONG, Case, Result, Row, ran_out_of_memory
from benchmarks.models.search import Bracket, tries
from benchmarks.running import NOT_TRIED, release_memory
from ds_sparse.bench.machine import CALLS_ON_CUDA, DTYPES, GIB, in_turns, timed, wall_ms
from ds_sparse.bench.reasons import in_short
from ds_sparse.modules.structured_attention import whole_blocks
from ds_sparse.tools.arguments import UsageError
from ds_sparse.tools.extras import optional_imports
from ds_sparse.verify.accuracy import require_as_accurate

with optional_imports():
    from transformers import AttentionInterface

VERIFIED_TOKENS = 1024

LOSS_SCALE = 2**12
"""Scale of the loss for verified gradients, of which fp16 would keep but a few bits without it."""

LEAST_ERROR_ALLOWED = 1e-3
"""Relative; another layout makes a hundred times that. In fp32 the layers above differ by more than a few roundings."""

FIRST, FIRST_EAGER = 32768, 4096
"""The length that is tried first for the longest; that of attention whose memory grows with its square."""

ROUND_MS = 100
"""Least milliseconds of a round of a step on a GPU: as many steps as that, at most `CALLS_ON_CUDA`."""

VALUE_ALONE, PROJECTIONS = "ds_sparse_bench_value", "ds_sparse_bench_value_and_projections"
MASKED = "ds_sparse_bench_masked"
"""Attentions by their names in Transformers: the first two return the value; the projections of query and key keep
their backward with the second."""


class Piece(NamedTuple):
    """Inputs of one forward: the model's arguments, labels (B, T), and the flat places of those with a label."""

    inputs: dict[str, Any]
    labels: Tensor
    labelled: Tensor

    @classmethod
    def of(cls, inputs: dict[str, Any], labels: Tensor) -> Piece:
        return cls(inputs, labels, (labels.flatten() >= 0).nonzero()[:, 0])

    def anew(self, device: torch.device) -> Piece:
        """The piece as one that was not seen before: copied to a device, or with edges of documents of its own."""
        edges = {name: x.clone() for name, x in self.inputs.items() if name.startswith("cu_seq_lens")}
        if self.labels.device.type == device.type:
            return self._replace(inputs=self.inputs | edges)
        inputs = {name: x.to(device, non_blocking=True) for name, x in self.inputs.items()}
        return Piece(inputs, *(x.to(device, non_blocking=True) for x in self[1:]))

    def pinned(self) -> Piece:
        """In memory of the CPU from which a GPU copies while it computes."""
        return Piece({name: x.pin_memory() for name, x in self.inputs.items()}, *(x.pin_memory() for x in self[1:]))


def results(
    family: Any, cases: Sequence[Case], names: Sequence[str], device: torch.device, repeats: int, seconds: float
) -> Iterator[Result]:
    """Cases by rising length, of attentions that are verified before. What is out of memory, or takes longer than
    `seconds` for a step, is not tried at longer ones."""
    given_up: dict[str, dict[str, str]] = {}
    for case in cases:
        if case.dtype not in given_up:
            given_up[case.dtype] = wrong_ones(family, names, case, device)
        reasons = given_up[case.dtype]
        rows = run_case(family, case, names, reasons | without_layout(names, case.seq_len), device, repeats, seconds)
        yield case, rows
        for row in rows:
            if ran_out_of_memory(row.reason):
                reasons[row.attention] = TOO_LONG
            elif not row.reason and row.milliseconds > seconds * 1e3:
                took = f"a step of {case.seq_len:,} tokens took {row.milliseconds / 1e3:.1f} s"
                reasons[row.attention] = f"{NOT_TRIED}{took}"


def wrong_ones(family: Any, names: Sequence[str], case: Case, device: torch.device) -> dict[str, str]:
    """Verifies attentions; why those that are wrong, or fail, are."""
    reasons = {}
    for name in filter(family.is_verified, names):
        try:
            if name in GRAPH_IN_BERT:
                family.require_same_losses(name, case, device)
            else:
                verify(family, name, case, device)
        except Exception as error:  # noqa: BLE001 - whatever stops one is a line of the table
            reasons[name] = in_short(error)
    return reasons


def without_layout(names: Sequence[str], seq_len: int) -> dict[str, str]:
    """Reasons by name for attentions that have no layout of a length."""
    reasons = {}
    for name in names:
        structure = OF_STRUCTURES.get(name, name)
        if structure in STRUCTURES_IN_BERT:
            try:
                require_layout(structure, seq_len)
            except ValueError as error:
                reasons[name] = f"{NOT_TRIED}{error}"
    return reasons


def require_layout(name: str, seq_len: int) -> None:
    """Raises UsageError where a structure has no layout of a length."""
    config = STRUCTURES_IN_BERT[name](1)
    try:
        config.make_rows(whole_blocks(seq_len, config.block)).maker(0)
    except ValueError as error:
        raise UsageError(f"{name} has no layout of {seq_len} tokens: {error}") from None


@dataclass
class Measured:
    """A step and its row so far. on_clock: with what Python takes to issue it, which on a GPU may be longer."""

    step: Callable[[], object]
    row: Row
    on_clock: bool = False

    def time(self, device: torch.device) -> float:
        """Milliseconds of one step; of one that fails, the reason is noted, and it is not called again."""
        if self.row.reason:
            return float("nan")
        try:
            if self.on_clock:
                return wall_ms(lambda: [self.step() for _ in range(CALLS_ON_CUDA)], device) / CALLS_ON_CUDA
            calls = max(1, min(CALLS_ON_CUDA, round(ROUND_MS / self.row.milliseconds)))
            return timed(self.step, device, calls)
        except Exception as error:  # noqa: BLE001 - whatever stops one is a line of the table
            self.row = Row(self.row.attention, reason=in_short(error))
            return float("nan")


def run_case(
    family: Any,
    case: Case,
    names: Sequence[str],
    wrong: Mapping[str, str],
    device: torch.device,
    repeats: int,
    seconds: float,
) -> list[Row]:
    """Times steps in turns: `repeats` rounds, or as many as begin within `seconds`, three at least. One that takes
    longer than `seconds` by itself is timed once. `wrong` has reasons why some are not even made.

    Besides `names` the family's floors are timed, with which the others are compared.
    """
    # Each case compiles FlexAttention anew, and a function is compiled but so often before PyTorch gives up.
    torch.compiler.reset()
    rows: dict[str, Row] = {}
    runs: dict[str, Measured] = {}
    for name in dict.fromkeys((*family.FLOORS, *names)):
        if name in wrong:
            rows[name] = Row(name, reason=wrong[name])
            continue
        try:
            measured = tried(partial(make_step, family, name, case, device), name, device)
            measured.on_clock = case.packed
            rows[name] = measured.row
            if measured.row.milliseconds <= seconds * 1e3:
                runs[name] = measured
            del measured
        except Exception as error:  # noqa: BLE001 - whatever stops one is a line of the table
            rows[name] = Row(name, reason=in_short(error))
        release_memory(device)
    timers = {name: partial(measured.time, device) for name, measured in runs.items()}
    for name, samples in in_turns(timers, repeats, seconds, f"{case.seq_len} tokens").items():
        rows[name] = runs[name].row
        if not rows[name].reason:
            rows[name] = replace(rows[name], milliseconds=statistics.median(samples), rounds=len(samples))
    return [with_speed(case, row) for row in rows.values()]


def with_speed(case: Case, row: Row) -> Row:
    """The row with its tokens a second."""
    tokens = case.batch * case.seq_len
    return row if row.reason else replace(row, tokens_per_second=tokens / row.milliseconds * 1e3)


def tried(make: Callable[[], Callable[[], object]], name: str, device: torch.device) -> Measured:
    """A step, after two of them: the memory of the first, which may compile something, and the time of the second."""
    on_cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_cuda else 0
    step = make()
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    step()
    peak = (torch.cuda.max_memory_allocated(device) - before) / GIB if on_cuda else None
    return Measured(step, Row(name, milliseconds=wall_ms(step, device), peak_gib=peak, rounds=1))


def longest(
    family: Any, case: Case, names: Sequence[str], seconds: float, device: torch.device
) -> Iterator[tuple[Case, list[Row]]]:
    """Looks for the longest sequence of each attention on a GPU, for so many seconds at most."""
    for name in names:
        bracket = Bracket.of(device, FIRST_EAGER if name == EAGER else FIRST)
        for tried_case, row in tries(bracket, partial(attempt, family, name, case, device), seconds):
            yield tried_case, [row]


def attempt(family: Any, name: str, case: Case, device: torch.device, seq_len: int, left: float) -> tuple[Case, Row]:
    """A step in a process of its own, which is ended after the seconds that are left."""
    case = replace(case, seq_len=seq_len)
    # Imports take most of a short try; those of a family touch no GPU.
    row = result_of(single_step, [(family.__name__, name, case, device)], left, family.__name__)
    return case, Row(name, reason=row.reason) if isinstance(row, Failure) else row


def single_step(family: str, name: str, case: Case, device: torch.device) -> Row:
    milliseconds = wall_ms(make_step(importlib.import_module(family), name, case, device), device)
    peak = torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None
    return Row(name, milliseconds=milliseconds, peak_gib=peak, rounds=1)


def make_step(family: Any, name: str, case: Case, device: torch.device) -> Callable[[], object]:
    """A step of the model with an attention: forward and backward, or whole, with AdamW and a batch from the CPU."""
    if case.packed:
        return family.make_step(name, case, device)
    model = model_with(family, name, case, device)
    on_cuda = device.type == "cuda"
    copies = family.COPIES and case.whole_step
    pieces = family.pieces_of(name, case, model.config, torch.device("cpu") if copies else device)
    optimizer = None
    if case.whole_step:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=on_cuda)
        make_states(optimizer)
        pieces = [piece.pinned() for piece in pieces] if on_cuda and copies else pieces
    return partial(train_step, model, pieces, device, case.predicts_all, optimizer)


def train_step(
    model: Any,
    pieces: Sequence[Piece],
    device: torch.device,
    predicts_all: bool,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """A step on all pieces together, as on a batch that was not seen before: ours makes its indices anew."""
    for piece in pieces:
        share_of_loss(model, piece.anew(device), pieces, predicts_all).backward()
    if optimizer is not None:
        optimizer.step()
    model.zero_grad(set_to_none=True)


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Has an optimizer make its states, so that the first step takes the memory of all."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def model_with(family: Any, name: str, case: Case, device: torch.device) -> Any:
    """A model with an attention, in training mode, the same numbers at every call.

    Raises:
        Unsupported: the attention does not take the case.
    """
    model = family.make_model(case, device, name=name)
    family.switch(model, name)
    if case.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def built(model: Any, config: Any, dtype: str, device: torch.device) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        return model(config).to(DTYPES[dtype]).train()


def share_of_loss(model: Any, piece: Piece, pieces: Sequence[Piece], predicts_all: bool) -> Tensor:
    """A piece's share of the mean loss over all labels."""
    return loss_of(model, piece, predicts_all) * (len(piece.labelled) / sum(len(x.labelled) for x in pieces))


def loss_of(model: Any, piece: Piece, predicts_all: bool) -> Tensor:
    if predicts_all:
        return model(**piece.inputs, labels=piece.labels).loss
    hidden = model.base_model(**piece.inputs).last_hidden_state.flatten(0, 1)[piece.labelled]
    return cross_entropy(head_of(model)(hidden), piece.labels.flatten()[piece.labelled])


def head_of(model: Any) -> Callable[[Tensor], Tensor]:
    """From vectors to logits: of BERT and BigBird, of Longformer, or of ModernBERT."""
    if hasattr(model, "decoder"):
        return lambda hidden: model.decoder(model.head(hidden)).float()
    return model.lm_head if hasattr(model, "lm_head") else model.cls


def verify(family: Any, name: str, case: Case, device: torch.device) -> None:
    """Holds what reaches the first layer's queries, the gradient of their weight, to a dense model with what each token
    sees as its mask; that gradient goes through attention alone.

    Raises:
        ArithmeticError: an error larger than `require_as_accurate` allows.
    """
    case = Case(VERIFIED_TOKENS, case.dtype, device.type, tokens=case.tokens, packed=case.packed)
    make = partial(family.make_model, case, device, num_hidden_layers=family.VERIFIED_LAYERS)
    model = make()
    with_mask(model, family.masks_of(name, case, model.config, device))
    pieces = family.pieces_of(FLOOR, case, model.config, device)
    plain = query_gradient(family, model, pieces)
    exact = query_gradient(family, model.double(), pieces)
    model = make()
    family.switch(model, name)
    found = query_gradient(family, model, family.pieces_of(name, case, model.config, device))
    what = f"{name}: the gradient of the first layer's query weight"
    require_as_accurate(what, found, plain, exact, least=LEAST_ERROR_ALLOWED)


def query_gradient(family: Any, model: Any, pieces: Sequence[Piece]) -> Tensor:
    """(hidden size, hidden size), or with those of keys and values below, of which queries are the first."""
    weight = family.queries_of(model)
    losses = (LOSS_SCALE * share_of_loss(model, piece, pieces, predicts_all=True) for piece in pieces)
    grads = [torch.autograd.grad(loss, [weight])[0] for loss in losses]
    return torch.stack(grads).double().sum(0).to(weight.dtype)[: weight.shape[1]]


def with_mask(model: Any, mask_of: Callable[[Any], Tensor]) -> None:
    """Gives a model dense attention with a mask, bool (B or 1, H or 1, T, T) or without B, of each of its modules."""

    def dense(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return scaled_dot_product_attention(query, key, value, mask_of(module)).transpose(1, 2).contiguous(), None

    AttentionInterface.register(MASKED, dense)
    model.set_attn_implementation(MASKED)


class _Value(torch.autograd.Function):
    """The value as it is. Query and key get its gradient, so that the projections that make them keep their
    backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return value.transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grad = grad.transpose(1, 2)
        return grad, grad, grad


def value_alone(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return value.transpose(1, 2).contiguous(), None


def value_and_projections(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    return _Value.apply(query, key, value), None


AttentionInterface.register(VALUE_ALONE, value_alone)
AttentionInterface.register(PROJECTIONS, value_and_projections)
WITHOUT_ATTENTION = {NO_ATTENTION: VALUE_ALONE, FLOOR: PROJECTIONS}
