"""A training step of BERT with sparse attention, with dense, and with none: what attention costs end to end.

Masked-language modelling with Transformers' own models, parameters in the dtype that is measured: BERT with each
attention, and Longformer and BigBird, all of the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from benchmarks.models.attentions import (
    BIGBIRD_MODEL,
    EAGER,
    FLEX_IN_BERT,
    FLOOR,
    LONGFORMER_MODEL,
    NO_ATTENTION,
    STRUCTURES_IN_BERT,
)
from benchmarks.models.bert_results import LABELLED, MODELS, Case, Result, Row
from benchmarks.models.longest_sequence import Bracket, tries
from benchmarks.models.processes import FORKSERVER, Failure, results_of
from benchmarks.models.reasons import NOT_TRIED, TOO_LONG, ran_out_of_memory
from benchmarks.models.step_times import measure_steps
from ds_sparse.bench import flex as flex_attention
from ds_sparse.bench.cases import IN_BERT
from ds_sparse.bench.machine import DTYPES, GIB, wall_ms
from ds_sparse.bench.reasons import Unsupported, in_short
from ds_sparse.layout import to_token_mask
from ds_sparse.models.sparsify import sparsify
from ds_sparse.modules.structured_attention import whole_blocks
from ds_sparse.tools.extras import optional_imports
from ds_sparse.verify.accuracy import require_as_accurate

with optional_imports():
    import transformers
    from transformers import AttentionInterface, BertConfig, BertForMaskedLM

WINDOW = 512
"""Window of Longformer's checkpoints; no token is global, which is fastest."""

BIGBIRD_BLOCK, BIGBIRD_RANDOM = 64, 3
"""Block and random blocks of BigBird's checkpoints."""

VERIFIED_TOKENS, VERIFIED_LAYERS = 1024, 2

LOSS_SCALE = 2**12
"""Scale of the loss for verified gradients, of which fp16 would keep but a few bits without it."""

LEAST_ERROR_ALLOWED = 1e-3
"""Relative; another layout makes a hundred times that. In fp32 the layers above differ by more than a few roundings."""

FIRST, FIRST_EAGER = 32768, 4096
"""The length that is tried first for the longest; that of attention whose memory grows with its square."""

VALUE_ALONE, PROJECTIONS = "ds_sparse_bench_value", "ds_sparse_bench_value_and_projections"
MASKED, FLEX = "ds_sparse_bench_masked", "ds_sparse_bench_flex"
"""Attentions by their names in Transformers: the first two return the value; the projections of query and key keep
their backward with the second."""


def results(
    cases: Sequence[Case],
    names: Sequence[str],
    wrong: Mapping[str, str],
    device: torch.device,
    repeats: int,
    seconds: float,
) -> Iterator[Result]:
    """Cases by rising length. What is out of memory, or takes longer than `seconds` for a step, is not tried at longer
    ones."""
    given_up = dict(wrong)
    for case in cases:
        rows = run_case(case, names, given_up | without_layout(names, case.seq_len), device, repeats, seconds)
        yield case, rows
        for row in rows:
            if ran_out_of_memory(row.reason):
                given_up[row.attention] = TOO_LONG
            elif not row.reason and row.milliseconds > seconds * 1e3:
                took = f"a step of {case.seq_len:,} tokens took {row.milliseconds / 1e3:.1f} s"
                given_up[row.attention] = f"{NOT_TRIED}{took}"


def without_layout(names: Sequence[str], seq_len: int) -> dict[str, str]:
    """Reasons by name for attentions that have no layout of a length."""
    reasons = {}
    for name in names:
        structure = FLEX_IN_BERT.get(name, name)
        if structure in STRUCTURES_IN_BERT:
            try:
                require_layout(structure, seq_len)
            except ValueError as error:
                reasons[name] = f"{NOT_TRIED}{error}"
    return reasons


def require_layout(name: str, seq_len: int) -> None:
    """Raises ValueError where a structure has no layout of a length."""
    config = STRUCTURES_IN_BERT[name](1)
    try:
        config.make_rows(whole_blocks(seq_len, config.block)).maker(0)
    except ValueError as error:
        raise ValueError(f"{name} has no layout of {seq_len} tokens: {error}") from None


def run_case(
    case: Case, names: Sequence[str], wrong: Mapping[str, str], device: torch.device, repeats: int, seconds: float
) -> list[Row]:
    """Times the steps in turns, as `measure_steps` does. Without any attention too, and the floor, as the others are
    compared with these. Those that are `wrong`, with the reason, are not timed."""
    # Each case compiles FlexAttention anew, and a function is compiled but so often before PyTorch gives up.
    torch.compiler.reset()
    make = {name: partial(make_step, name, case, device) for name in (NO_ATTENTION, FLOOR, *names)}
    measured = measure_steps(make, wrong, device, repeats, seconds, f"{case.seq_len} tokens")
    return [Row(name, **asdict(found)) for name, found in measured.items()]


def longest_tries(
    case: Case, names: Sequence[str], seconds: float, device: torch.device
) -> Iterator[tuple[Case, list[Row]]]:
    """Looks for the longest sequence of each attention on a GPU, for so many seconds at most."""
    for name in names:
        bracket = Bracket.of(device, FIRST_EAGER if name == EAGER else FIRST)
        for tried, row in tries(bracket, partial(attempt, name, case, device), seconds):
            yield tried, [row]


def attempt(name: str, case: Case, device: torch.device, seq_len: int, left: float) -> tuple[Case, Row]:
    """A step in a process of its own, which is ended after the seconds that are left."""
    case = replace(case, seq_len=seq_len)
    # Imports take most of a short try; those of this module touch no GPU.
    (row,) = results_of(single_step, [(name, case, device)], [left], FORKSERVER, [__name__])
    return case, Row(name, reason=row.reason) if isinstance(row, Failure) else row


def single_step(name: str, case: Case, device: torch.device) -> Iterator[Row]:
    milliseconds = wall_ms(make_step(name, case, device), device)
    peak = torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None
    yield Row(name, milliseconds, peak, 1)


def make_step(name: str, case: Case, device: torch.device) -> Callable[[], None]:
    """A step of the model with an attention: forward and backward, or whole, whose batch comes from the CPU."""
    model = model_with(name, case, device)
    data = batch(case.batch, case.seq_len, model.config.vocab_size, torch.device("cpu"))
    if not case.whole_step:
        data = data.to(device)
        return partial(train_step, model, lambda: data, case.predicts_all)
    on_cuda = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=on_cuda)
    make_states(optimizer)
    data = data.pinned() if on_cuda else data
    return partial(train_step, model, lambda: data.to(device), case.predicts_all, optimizer)


def train_step(
    model: Any, data: Callable[[], Batch], predicts_all: bool, optimizer: torch.optim.Optimizer | None = None
) -> None:
    loss_of(model, data(), predicts_all).backward()
    if optimizer is not None:
        optimizer.step()
    model.zero_grad(set_to_none=True)


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Has an optimizer make its states, so that the first step takes the memory of all."""
    parameters = [x for group in optimizer.param_groups for x in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class Batch(NamedTuple):
    """Tokens and labels, (B, T), and the flat places of those with a label."""

    tokens: Tensor
    labels: Tensor
    labelled: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(x.to(device, non_blocking=True) for x in self))

    def pinned(self) -> Batch:
        """In memory of the CPU from which a GPU copies while it computes."""
        return Batch(*(x.pin_memory() for x in self))


def batch(sequences: int, seq_len: int, vocabulary: int, device: torch.device, seed: int = 0) -> Batch:
    """Random, without padding, the same at every call with a seed."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (sequences, seq_len), generator=generator)
    has_label = torch.rand(tokens.shape, generator=generator) < LABELLED
    labels = tokens.masked_fill(~has_label, -100)
    return Batch(tokens, labels, has_label.flatten().nonzero()[:, 0]).to(device)


def loss_of(model: Any, data: Batch, predicts_all: bool) -> Tensor:
    if predicts_all:
        return model(input_ids=data.tokens, labels=data.labels).loss
    hidden = model.base_model(input_ids=data.tokens).last_hidden_state.flatten(0, 1)
    head = model.lm_head if hasattr(model, "lm_head") else model.cls
    return cross_entropy(head(hidden[data.labelled]), data.labels.flatten()[data.labelled])


def model_with(name: str, case: Case, device: torch.device) -> Any:
    """A model with an attention, in training mode, the same numbers at every call.

    Raises:
        Unsupported: the attention does not take the case.
    """
    if name in OTHER_MODELS:
        model = OTHER_MODELS[name](case, device)
    else:
        model = make_model(case, device)
        switch(model, name)
    if case.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def make_model(case: Case, device: torch.device, **sizes: int) -> BertForMaskedLM:
    """BERT with the attention that Transformers gives it."""
    return built(BertForMaskedLM, bert_config(case, **sizes), case, device)


def bert_config(case: Case, **sizes: int) -> BertConfig:
    return BertConfig(
        **(MODELS[case.model][case.device] | sizes),
        max_position_embeddings=case.seq_len,
        hidden_dropout_prob=case.dropout,
        attention_probs_dropout_prob=case.dropout,
    )


def built(model: Any, config: Any, case: Any, device: torch.device) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        return model(config).to(DTYPES[case.dtype]).train()


def longformer(case: Case, device: torch.device) -> Any:
    # Positions are counted from the number after that of padding.
    sizes = sizes_of(case) | {"max_position_embeddings": case.seq_len + 2, "pad_token_id": 1}
    config = transformers.LongformerConfig(**sizes, attention_window=WINDOW)
    return built(transformers.LongformerForMaskedLM, config, case, device)


def bigbird(case: Case, device: torch.device) -> Any:
    dense_until = (5 + 2 * BIGBIRD_RANDOM) * BIGBIRD_BLOCK
    if case.seq_len <= dense_until:
        raise Unsupported(f"up to {dense_until} tokens it is dense")
    config = transformers.BigBirdConfig(
        **sizes_of(case), attention_type="block_sparse", block_size=BIGBIRD_BLOCK, num_random_blocks=BIGBIRD_RANDOM
    )
    return built(transformers.BigBirdForMaskedLM, config, case, device)


OTHER_MODELS: dict[str, Callable[[Case, torch.device], Any]] = {LONGFORMER_MODEL: longformer, BIGBIRD_MODEL: bigbird}


def sizes_of(case: Case) -> dict[str, Any]:
    """Sizes of BERT's config that other models share."""
    names = [
        *("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"),
        *("hidden_act", "max_position_embeddings", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    ]
    config = bert_config(case)
    return {name: getattr(config, name) for name in names}


def switch(model: BertForMaskedLM, name: str) -> None:
    """Gives BERT its attention.

    Raises:
        Unsupported: it does not take the model.
    """
    if name in FLEX_IN_BERT:
        set_flex(model, FLEX_IN_BERT[name])
    elif name in STRUCTURES_IN_BERT:
        sparsify(model, STRUCTURES_IN_BERT[name](model.config.num_attention_heads))
    else:
        model.set_attn_implementation({NO_ATTENTION: VALUE_ALONE, FLOOR: PROJECTIONS}.get(name, name))


def set_flex(model: BertForMaskedLM, name: str) -> None:
    """FlexAttention on the layout of a structure, compiled at the first step."""
    if model.device.type == "cpu":
        raise Unsupported(flex_attention.ON_CPU)
    if model.config.attention_probs_dropout_prob:
        raise Unsupported("it has no dropout")
    config = IN_BERT[name](model.config.num_attention_heads)
    layout = config.make_bool_layout(whole_blocks(model.config.max_position_embeddings, config.block))
    call = flex_attention.compiled(flex_attention.of_layout(layout.to(model.device), config.block, flex_attention.TILE))

    def flex(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return call(query, key, value).transpose(1, 2).contiguous(), None

    AttentionInterface.register(f"{FLEX}_{name}", flex)
    model.set_attn_implementation(f"{FLEX}_{name}")


def wrong_ones(names: Sequence[str], verify: Callable[[str], object]) -> dict[str, str]:
    """Verifies attentions; why those that are wrong, or fail, are."""
    reasons = {}
    for name in names:
        try:
            verify(name)
        except Exception as error:  # noqa: BLE001 - whatever stops one is a line of the table
            reasons[name] = in_short(error)
    return reasons


def verify(name: str, dtype: str, device: torch.device) -> None:
    """Holds what reaches the first layer's query, the gradient of its weight, to a dense model with the layout as its
    mask; that gradient goes through attention alone.

    Raises:
        ArithmeticError: an error larger than `require_as_accurate` allows.
    """
    case = Case(VERIFIED_TOKENS, 0.0, dtype, device.type)
    model = make_model(case, device, num_hidden_layers=VERIFIED_LAYERS)
    config = STRUCTURES_IN_BERT[name](model.config.num_attention_heads)
    mask = to_token_mask(config.make_bool_layout(case.seq_len), config.block).to(device)
    data = batch(1, case.seq_len, model.config.vocab_size, device)
    with_mask(model, lambda module: mask)
    plain = query_gradient(model, data)
    exact = query_gradient(model.double(), data)
    model = make_model(case, device, num_hidden_layers=VERIFIED_LAYERS)
    switch(model, name)
    what = f"{name}: the gradient of the first layer's query weight"
    require_as_accurate(what, query_gradient(model, data), plain, exact, least=LEAST_ERROR_ALLOWED)


def query_gradient(model: BertForMaskedLM, data: Batch) -> Tensor:
    weight = model.bert.encoder.layer[0].attention.self.query.weight
    (grad,) = torch.autograd.grad(LOSS_SCALE * loss_of(model, data, predicts_all=True), [weight])
    return grad


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
