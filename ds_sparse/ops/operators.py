"""The operators: what each returns where it is traced, and counts in FLOPs; those in Python with their schemas, too.

Those of C++ have theirs in csrc/library.cpp. An operator `layout_*` is one on the lists of an index that takes a
`MasterLayout` as text instead, `window_numbers_*` one that takes the numbers of a window: they find the index when they
run. Rules of vmap are those of `_vmap`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .._ops import add_op_namespace_prefix, ops
from ..index.build import NUMBERS
from ..index.lookup import index_of_window
from ..index.master_layout import MasterLayout
from ..index.transforms import least_of
from ..index.window_sizes import WindowNumbers
from . import _flops
from ._vmap import OPERANDS, register_rule
from .attention_function import attention_backward, attention_bias_backward, attention_forward
from .block_selection import select, select_by_compression
from .distance_gradient import distance_bias_backward, distance_bias_gradient
from .earlier_operators import layout_distance_forward
from .operands import empty_as, wide_dtype
from .topk_operators import empty_gradients, empty_results, run_backward, run_forward
from .window_attention import window_attention_backward, window_attention_forward, window_order

Arguments = SimpleNamespace
"""The arguments of a call by the names of the schema."""


class Operator(NamedTuple):
    """An operator's row: all that PyTorch is told of it.

    Attributes:
        fake: results without values.
        flops: what it counts; None: nothing.
        schema: arguments and results of one in Python.
        run: what that computes of its arguments.
        one_by_one: under vmap each sample is a call.
    """

    fake: Callable[[Arguments], Any]
    flops: Callable[[Arguments], int] | None = None
    schema: str = ""
    run: Callable[[Arguments], Any] | None = None
    one_by_one: bool = False


def _of_text(run: Callable[..., Any]) -> Callable[[Arguments], Any]:
    """Runs what takes an index on that of a master layout."""

    def run_on_index(x: Arguments) -> Any:
        index = MasterLayout.read(x.layout).index(x.query.shape[2], x.query.device, x.causal)
        return run(index, *_others(x, {"layout"}))

    return run_on_index


def _of_numbers(run: Callable[..., Any]) -> Callable[[Arguments], Any]:
    """Runs what takes an index on that of a window."""

    def run_on_index(x: Arguments) -> Any:
        index = index_of_window(x.query.shape[2], _numbers(x), x.query.device).ready()
        return run(index, *_others(x, {"windows", "causal", "global_tokens", "dilations"}))

    return run_on_index


def _others(x: Arguments, names: set[str]) -> list[Any]:
    """The arguments without those of these names, in the order of the schema."""
    return [given for name, given in vars(x).items() if name not in names]


def _numbers(x: Arguments) -> WindowNumbers:
    return WindowNumbers.of(x.windows, x.causal, x.global_tokens, x.dilations)


def _attention(x: Arguments) -> tuple[Tensor, ...]:
    """output, lse and the two numbers of each row."""
    return _of_rows(x, *x.query.shape[:3])


def _selected_attention(x: Arguments) -> tuple[Tensor, ...]:
    """The same, of rows (B, Hq, T, g)."""
    return _of_rows(x, *x.query.shape[:4])


def _packed_attention(x: Arguments) -> tuple[Tensor, ...]:
    """The same, of rows by aligned numbers."""
    return _of_rows(x, 1, x.query.shape[1], x.spans.shape[0] * x.block)


def _of_rows(x: Arguments, *shape: int) -> tuple[Tensor, ...]:
    wide = wide_dtype(x.query.dtype)
    return empty_as(x.query), x.query.new_empty(shape, dtype=wide), x.query.new_empty((*shape, 2), dtype=wide)


def _with_sinks(x: Arguments) -> tuple[Tensor, ...]:
    return empty_as(x.output), x.rows.new_empty(x.rows.shape[:-1]), x.rows.new_empty(x.rows.shape)


def _gradients(x: Arguments) -> tuple[Tensor, ...]:
    return empty_as(x.query), empty_as(x.key), empty_as(x.value)


def _chosen(x: Arguments) -> Tensor:
    batch, _, tokens, _ = x.query.shape
    return x.query.new_empty(batch, x.groups, _ceil_div(tokens, getattr(x, "query_block", 1)), x.k, dtype=torch.int32)


def _dsd(x: Arguments) -> Tensor:
    rows, width = (x.offsets.shape[0] - 1) // x.layout_heads * x.block, x.dense.shape[3]
    return x.dense.new_empty(*x.dense.shape[:2], *((width, rows) if x.transpose_result else (rows, width)))


def _wide(name: str) -> Callable[[Arguments], Tensor]:
    """A gradient of the shape of an operand, in fp32 or wider."""
    return lambda x: x.query.new_empty(getattr(x, name).shape, dtype=wide_dtype(x.query.dtype))


def _like(name: str) -> Callable[[Arguments], Tensor]:
    return lambda x: getattr(x, name).new_empty(getattr(x, name).shape)


def _bits(x: Tensor, columns: Any) -> Tensor:
    return x.new_empty(*x.shape[:2], 4 * _ceil_div(columns, 32), dtype=torch.uint8)


def _bits_of_documents(x: Arguments) -> Tensor:
    heads, blocks = 1 if x.bits is None else x.bits.shape[0], x.ranges.shape[0]
    return x.ranges.new_empty(heads, blocks, 4 * _ceil_div(blocks, 32), dtype=torch.uint8)


def _index_plan(x: Arguments) -> tuple[Tensor, Tensor]:
    """As large as `plan_of` in csrc/index.h makes it."""
    heads, rows, _ = x.bits.shape
    size = sets = 0
    for of_rows, lines, others in ((True, rows, x.columns), (False, x.columns, rows)):
        if not (x.of_rows if of_rows else x.of_columns):
            continue
        parts = [] if of_rows else [lines * _ceil_div(others, 32)]
        block = _own_block(x, of_rows)
        for tiles, work, cuts in (_most(x, lines, tile, of_rows) for tile in x.tiles):
            sets += 1
            parts += [tiles, tiles, 4 * work, 3 * cuts]
        highest = max(1, x.tiles[-1] // block)
        if highest > 1 and not (of_rows and x.row_block):
            parts += [2 * lines, lines, lines, 1, _ceil_div(lines, highest) * highest]
        size += sum(4 * _ceil_div(heads * part, 4) for part in parts)
    counts = x.bits.new_empty(NUMBERS + 8 * sets * heads, dtype=torch.int64)
    return x.bits.new_empty(size, dtype=torch.int32), counts


def _own_block(x: Arguments, of_rows: bool) -> int:
    """Tokens of a line."""
    return x.row_block or x.block if of_rows else x.block


LONGEST, LONGEST_OF_CHOSEN, MORE_PARTS_OF_CHOSEN, TILES_OF_PART, TILES_OF_CUT = 6, 3, 256, 4, 8
"""As in csrc/index.h, which says what they are."""


def _most(x: Arguments, lines: Any, tile: int, of_rows: bool) -> tuple[Any, Any, Any]:
    """The tiles of a head's lines, and the most work tiles and cuts."""
    tiles = _ceil_div(lines, max(1, tile // _own_block(x, of_rows)))
    of_chosen = not of_rows and _own_block(x, True) < x.block
    longer = _ceil_div(4 * tiles, LONGEST_OF_CHOSEN if of_chosen else LONGEST) + 1
    if not x.bounded:
        return tiles, tiles + longer, longer
    parts, cuts = tiles // TILES_OF_PART + 1, tiles // TILES_OF_CUT + 1
    if not of_chosen:  # these are the least, whatever the number of tiles
        return tiles, tiles + parts, cuts
    more = MORE_PARTS_OF_CHOSEN // x.bits.shape[0]
    return tiles, tiles + least_of(longer, parts + more), least_of(tiles, cuts + more)


def _index_fill(x: Arguments) -> list[Tensor]:
    rows, columns, heads = x.bits.shape[1], x.columns, x.layout_heads
    sides = [(rows, columns, True)] if x.of_rows else []
    sides += [(columns, rows, False)] if x.of_columns else []
    shapes: list[tuple[Any, ...]] = []
    for number, ((lines, others, of_rows), tile) in enumerate(product(sides, x.tiles)):
        tiles, work, cuts = _most(x, lines, tile, of_rows)
        if x.bounded:
            sizes = least_of(x.sizes[0], heads * tiles * others), heads * work + 1, heads * cuts
        else:
            sizes = x.sizes[3 * number : 3 * number + 3]
        shapes += [(heads * tiles * max(1, tile // _own_block(x, of_rows)),), (sizes[0],), (sizes[1], 4), (sizes[2], 3)]
    return [x.bits.new_empty(shape, dtype=torch.int32) for shape in shapes]


def _ceil_div(x: Any, y: int) -> Any:
    return (x + y - 1) // y


_GIVEN = "Tensor query, Tensor key, Tensor value"
_MASKS = "Tensor? key_bias, Tensor? attn_mask, Tensor? dropout_seed, float scale, bool causal, float dropout_p"
_SAVED = f"Tensor grad_output, Tensor? grad_lse, {_GIVEN}, Tensor output, Tensor rows"
_LISTS = "Tensor row_offsets, Tensor row_columns, int[] row_lengths, int layout_heads, int block"
_LISTED = "Tensor topk_idxs, Tensor limits, int granularity, float scale"
_CHOICE = "bool causal, int first, int local"
_NUMBERS = "SymInt[] windows, bool causal, int[] global_tokens, SymInt[] dilations"
_THREE = "(Tensor, Tensor, Tensor)"

OPERATORS: dict[str, Operator] = {
    "index_bits": Operator(lambda x: _bits(x.layout, x.layout.shape[2])),
    "index_bits_of_blocks": Operator(lambda x: _bits(x.block_indices, x.columns)),
    "index_causal_bits": Operator(_like("bits")),
    "index_documents": Operator(lambda x: (x.cu_seqlens.new_empty(2, x.blocks, 2), x.cu_seqlens.new_empty(1))),
    "index_bits_of_documents": Operator(_bits_of_documents),
    "index_limits": Operator(lambda x: x.cu_seqlens.new_empty(x.windows.shape[0], x.tokens, 2)),
    "index_tile_spans": Operator(lambda x: x.spans.new_empty(x.lines.shape[0] + x.entries.shape[0], 2)),
    "index_plan": Operator(_index_plan),
    "index_fill": Operator(_index_fill),
    "transpose": Operator(_like("x")),
    "matmul_sdd": Operator(lambda x: x.a.new_empty(x.a.shape[0], _flops.num_values(x), x.block, x.block), _flops.sdd),
    "matmul_dsd": Operator(_dsd, lambda x: 2 * x.values.numel() * x.dense.shape[3]),
    "softmax_forward": Operator(lambda x: torch.empty_like(x.scores)),
    "softmax_backward": Operator(lambda x: torch.empty_like(x.probs)),
    "softmax_bias_backward": Operator(lambda x: x.values.new_empty(x.shape, dtype=wide_dtype(x.values.dtype))),
    "block_attention_forward": Operator(_attention, _flops.attention(_flops.FORWARD)),
    "block_attention_backward": Operator(_gradients, _flops.attention(_flops.BACKWARD)),
    "block_attention_bias_backward": Operator(
        lambda x: x.query.new_empty(x.shape, dtype=wide_dtype(x.query.dtype)), _flops.attention(_flops.BIAS_BACKWARD)
    ),
    "decode_attention_forward": Operator(
        lambda x: (x.query.new_empty(x.query.shape), _attention(x)[1]), _flops.at_positions
    ),
    "attention_sinks_forward": Operator(_with_sinks),
    "attention_sinks_backward": Operator(_like("sinks"), one_by_one=True),
    "block_attention_distance_backward": Operator(
        _wide("distances"),
        _flops.distances,
        f"({_SAVED}, Tensor distances, {_MASKS}, {_LISTS}) -> Tensor",
        distance_bias_gradient,
        one_by_one=True,
    ),
    "layout_attention_forward": Operator(
        _attention,
        _flops.attention_on_layout(_flops.FORWARD),
        f"({_GIVEN}, Tensor? rpe, {_MASKS}, str layout, float softcap=0.0) -> {_THREE}",
        _of_text(attention_forward),
    ),
    "layout_attention_backward": Operator(
        _gradients,
        _flops.attention_on_layout(_flops.BACKWARD),
        f"({_SAVED}, Tensor? rpe, {_MASKS}, bool deterministic, str layout, float softcap=0.0) -> {_THREE}",
        _of_text(attention_backward),
    ),
    "layout_attention_bias_backward": Operator(
        _wide("rpe"),
        _flops.attention_on_layout(_flops.BIAS_BACKWARD),
        f"({_SAVED}, Tensor? rpe, {_MASKS}, str layout) -> Tensor",
        _of_text(attention_bias_backward),
    ),
    "layout_attention_distance_backward": Operator(
        _wide("distances"),
        _flops.attention_on_layout(_flops.BIAS_BACKWARD),
        f"({_SAVED}, Tensor distances, {_MASKS}, str layout) -> Tensor",
        _of_text(distance_bias_backward),
        one_by_one=True,
    ),
    "layout_distance_forward": Operator(
        _attention,
        _flops.attention_on_layout(_flops.FORWARD),
        f"({_GIVEN}, Tensor distances, {_MASKS}, str layout) -> {_THREE}",
        _of_text(layout_distance_forward),
        one_by_one=True,
    ),
    "packed_attention_forward": Operator(_packed_attention, _flops.attention(_flops.FORWARD)),
    "packed_attention_backward": Operator(_gradients, _flops.attention(_flops.BACKWARD)),
    "selected_attention_forward": Operator(_selected_attention, _flops.selected(_flops.FORWARD)),
    "selected_attention_backward": Operator(_gradients, _flops.selected(_flops.BACKWARD)),
    "select_blocks": Operator(
        _chosen,
        _flops.choice,
        "(Tensor query, Tensor key, Tensor? keep, Tensor? positions, Tensor? ranges, SymInt offset, int block, int k, "
        f"str score, int groups, {_CHOICE}, int query_block) -> Tensor",
        select,
        one_by_one=True,
    ),
    "select_blocks_by_compression": Operator(
        _chosen,
        lambda x: 2 * x.query.numel() * x.compressed.shape[2],
        "(Tensor query, Tensor compressed, Tensor? seen, Tensor? keep, Tensor? positions, Tensor? ranges, "
        "SymInt offset, SymInt keys, int block, int k, int length, int stride, float scale, int groups, "
        f"{_CHOICE}) -> Tensor",
        select_by_compression,
        one_by_one=True,
    ),
    "topk_attention_forward": Operator(
        empty_results,
        _flops.listed(1, 1),
        f"({_GIVEN}, {_LISTED}) -> {_THREE}",
        run_forward,
        one_by_one=True,
    ),
    "topk_attention_backward": Operator(
        empty_gradients,
        _flops.listed(3, 2),
        f"({_SAVED}, {_LISTED}) -> {_THREE}",
        run_backward,
        one_by_one=True,
    ),
    "window_matmul": Operator(
        lambda x: x.a.new_empty(*x.a.shape[:3], 2 * x.window + 1), lambda x: _flops.band(x.a, x.window)
    ),
    "unwindow_matmul": Operator(_like("dense"), lambda x: _flops.band(x.dense, x.band.shape[3] // 2)),
    "window_softmax_forward": Operator(_like("band")),
    "window_softmax_backward": Operator(_like("grad")),
    "window_attention_forward": Operator(_attention, _flops.attention(_flops.FORWARD)),
    "window_attention_backward": Operator(_gradients, _flops.attention(_flops.BACKWARD)),
    "window_numbers_forward": Operator(
        _attention,
        lambda x: _flops.attention_in_window(x, _numbers(x), _flops.FORWARD),
        f"({_GIVEN}, Tensor? key_bias, float scale, {_NUMBERS}, float softcap=0.0) -> {_THREE}",
        _of_numbers(window_attention_forward),
    ),
    "window_numbers_backward": Operator(
        _gradients,
        lambda x: _flops.attention_in_window(x, _numbers(x), _flops.BACKWARD),
        f"(Tensor grad_output, {_GIVEN}, Tensor output, Tensor rows, Tensor? key_bias, float scale, "
        f"bool deterministic, {_NUMBERS}, float softcap=0.0) -> {_THREE}",
        _of_numbers(window_attention_backward),
    ),
    "window_order": Operator(
        lambda x: tuple(
            torch.empty(_numbers(x).layout_heads, x.tokens, dtype=torch.long, device=x.device) for _ in range(2)
        ),
        schema=f"(SymInt tokens, {_NUMBERS}, Device device) -> (Tensor, Tensor)",
        run=lambda x: window_order(x.tokens, _numbers(x), x.device),
    ),
    "token_matmul_sdd": Operator(
        lambda x: x.query.new_empty(
            x.query.shape[0] * x.query.shape[1] // (x.list_batch * x.list_heads), x.columns.shape[0]
        ),
        _flops.pairs(1, 0),
    ),
    "token_matmul_dsd": Operator(
        lambda x: x.dense.new_empty(
            *x.dense.shape[:2], (x.offsets.shape[0] - 1) // (x.list_batch * x.list_heads), x.dense.shape[3]
        ),
        lambda x: 2 * x.values.numel() * x.dense.shape[3],
    ),
    "token_attention_forward": Operator(
        lambda x: (x.query.new_empty(*x.query.shape[:3], x.value.shape[3]), *_attention(x)[1:]), _flops.pairs(1, 1)
    ),
    "token_attention_backward": Operator(
        lambda x: tuple(_like(name)(x) for name in ("query", "key", "value")), _flops.pairs(3, 2)
    ),
    "token_tiles_forward": Operator(_attention, _flops.pairs_in_tiles(_flops.FORWARD)),
    "token_tiles_backward": Operator(_gradients, _flops.pairs_in_tiles(_flops.BACKWARD)),
}

_library = torch.library.Library(ops.name, "FRAGMENT")


def _register(name: str, operator: Operator) -> None:
    full_name = add_op_namespace_prefix(name)
    if operator.schema:
        _library.define(name + operator.schema)
    arguments = getattr(ops, name).default._schema.arguments
    names = [argument.name for argument in arguments]
    defaults = {argument.name: argument.default_value for argument in arguments}

    def named(call: tuple, by_name: dict) -> Arguments:
        # Last arguments at their defaults are left out.
        return SimpleNamespace(**{**defaults, **dict(zip(names, call)), **by_name})

    if (run := operator.run) is not None:
        _library.impl(name, lambda *call: run(named(call, {})), "CompositeExplicitAutograd")
    torch.library.register_fake(full_name, lambda *call, **by_name: operator.fake(named(call, by_name)))
    if (flops := operator.flops) is not None:
        register_flop_formula(getattr(ops, name), get_raw=True)(
            lambda *call, out_val=None, **by_name: flops(named(call, by_name))
        )
    if not OPERANDS.isdisjoint(names):
        register_rule(name, names, operator.one_by_one)


for _name, _operator in OPERATORS.items():
    _register(_name, _operator)
