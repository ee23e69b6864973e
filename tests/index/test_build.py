"""The native builder of indices against plain Python, number by number, and what its operators refuse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
import torch
from helpers import EXAMPLES, generator, layouts_of_lines, seeded
from hypothesis import given
from hypothesis import strategies as st
from tile_reference import most_of, tile_sets
from torch._subclasses.fake_tensor import FakeTensorMode

import ds_sparse.ops  # noqa: F401  # results without values
from ds_sparse._ops import ops
from ds_sparse.index.build import NUMBERS
from ds_sparse.index.kernels import INDEX_OPERATORS
from ds_sparse.layout import unpack_bits

SIDES = (["rows"], ["columns"], ["rows", "columns"])


@st.composite
def heights(draw: st.DrawFn, block: int) -> list[int]:
    """One or two, ascending."""
    possible = [tile for tile in (16, 32, 64, 128, 256) if tile <= 8 * block]
    return sorted(draw(st.lists(st.sampled_from(possible), min_size=1, max_size=2, unique=True)))


def shapes(tensors: Any) -> list[tuple[torch.Size, torch.dtype]]:
    return [(x.shape, x.dtype) for x in tensors]


def check_lists(
    device: str,
    live: torch.Tensor,
    block: int,
    tiles: list[int],
    sides: list[str],
    bounded: bool,
    part: float = 1,
    row_block: int | None = None,
) -> None:
    """Asserts that counts and lists are those of plain Python; `part` of the entries of the largest set has space."""
    of = {"rows": row_block or block, "columns": block}
    heads, rows, columns = live.shape
    bits = ops.index_bits(live.to(device))
    call = (columns, block, tiles, "rows" in sides, "columns" in sides, bounded)
    plan, counts = ops.index_plan(bits, *call, row_block)

    of_all, of_first = (tile_sets(x, block, tiles, sides, bounded, None, row_block) for x in (live, live[:1]))
    equal, numbers = bool((live == live[:1]).all()), counts[:NUMBERS].tolist()
    # Of rows that keep their order nothing is asked.
    facts = [bool(live.triu(1).any()), not equal, live.sum(), live[0].sum()] if row_block is None else [0] * 4
    assert [*numbers[:2], *numbers[4:6]] == facts
    assert numbers[3] == sum(len(one.entries) for one in of_all)
    for begin, sets in ((6, of_all), (22, of_first)):
        for one in sets:
            parts = sum(count for *_, count in one.cuts)
            assert numbers[begin : begin + 4] == [len(one.entries), len(one.units), len(one.cuts), parts]
            begin += 4

    space = int(part * max(len(one.entries) for one in of_all)) + 1 if bounded else None
    for stored in {1, heads} if equal and row_block is None else {heads}:
        wanted, sizes = tile_sets(live[:stored], block, tiles, sides, bounded, space, row_block), []
        for one in wanted:
            sizes += (len(one.entries), len(one.units), len(one.cuts))
        sizes = [space] if bounded else sizes
        made = ops.index_fill(bits, plan, counts, *call, stored, sizes, None, row_block)
        others = {"rows": columns, "columns": rows}
        for (side, tile), one, *found in zip(product(sides, tiles), wanted, *(made[i::4] for i in range(4))):
            lines, entries, units, cuts = (x.tolist() for x in found)
            assert all(x.dtype == torch.int32 and x.is_contiguous() for x in found)
            if bounded:
                number = len(one.lines) // stored // max(1, tile // of[side])
                work, most_cuts = most_of(number, heads, side == "columns" and of["rows"] < block)
                assert len(units) == stored * work + 1 and len(cuts) == stored * most_cuts
                one.units += [[-1, len(one.units), 0, 0]] * (len(units) - len(one.units))
                one.cuts += [[0, 0, 0]] * (len(cuts) - len(one.cuts))
            assert (lines, units, cuts) == (one.lines, one.units, one.cuts)
            blocks = len(one.lines) // max(1, tile // of[side]) * others[side]
            assert len(entries) == (min(space, blocks) if bounded else len(one.entries))
            there = [(entry % 2**32, right) for entry, right in zip(entries, one.entries) if right is not None]
            assert [entry for entry, _ in there] == [right for _, right in there]
        check_fake(bits, plan, counts, call, row_block, stored, sizes, made)


def check_fake(
    bits: torch.Tensor, plan: torch.Tensor, counts: torch.Tensor, call: tuple, row_block: int | None, *of_fill: Any
) -> None:
    """Asserts that results without values have the shapes of those with."""
    *of_fill, made = of_fill
    with FakeTensorMode() as fake:
        traced = [fake.from_tensor(x) for x in (bits, plan, counts)]
        assert shapes(ops.index_plan(traced[0], *call, row_block)) == shapes((plan, counts))
        assert shapes(ops.index_fill(*traced, *call, *of_fill, None, row_block)) == shapes(made)


@EXAMPLES
@given(
    data=st.data(),
    live=layouts_of_lines(90, 150),
    block=st.sampled_from((8, 16, 32, 64, 128, 256)),
    bounded=st.booleans(),
)
def test_each_list_is_that_of_plain_python(
    device: str, data: st.DataObject, live: torch.Tensor, block: int, bounded: bool
):
    tiles, sides, part = data.draw(heights(block)), data.draw(st.sampled_from(SIDES)), data.draw(st.floats(0, 1))
    check_lists(device, live, block, tiles, sides, bounded, part)


@EXAMPLES
@given(
    data=st.data(),
    live=layouts_of_lines(90, 150),
    block=st.sampled_from((16, 64, 128, 512)),
    row_block=st.sampled_from((8, 16, 32)),
)
def test_rectangular_blocks(device: str, data: st.DataObject, live: torch.Tensor, block: int, row_block: int):
    tiles, part = data.draw(heights(min(block, row_block))), data.draw(st.floats(0, 1))
    check_lists(device, live, block, tiles, list(SIDES[-1]), True, part, row_block)


@pytest.mark.parametrize("chance", [0.004, 0.1, 0.5])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_long_lists_are_those_of_plain_python(device: str, block: int, chance: float):
    """With stretches in which halves take turns, and global lines that have to be cut into fewer parts."""
    live = torch.rand(2, 80, 500, generator=seeded()) < chance
    live[:, 5] = live[0, 30] = True
    for layout in (live, live.mT):
        for bounded in (False, True):
            check_lists(device, layout, block, [64, 128], SIDES[2], bounded)


def unpacked(bits: torch.Tensor, columns: int) -> torch.Tensor:
    """The layout of bits, which come in whole words, with nothing behind the last column."""
    assert bits.dtype == torch.uint8 and bits.is_contiguous() and bits.shape[2] == 4 * -(-columns // 32)
    live = unpack_bits(bits, 8 * bits.shape[2])
    assert not live[:, :, columns:].any()
    return live[:, :, :columns].cpu()


@EXAMPLES
@given(
    live=layouts_of_lines(90, 150), view=st.sampled_from(("as it is", "transposed", "in steps", "one row", "numbers"))
)
def test_bits_are_the_layout(device: str, live: torch.Tensor, view: str):
    given = live.to(device)
    if view == "transposed":
        given = given.mT.contiguous().mT
    elif view == "in steps":
        given = given.repeat_interleave(3, 2).repeat_interleave(2, 0)[::2, :, 1::3]
    elif view == "one row":
        given = given[:, :1].expand_as(given)
    elif view == "numbers":
        given = given * torch.tensor(6, dtype=torch.uint8, device=device)
    bits, expected = ops.index_bits(given), given.bool().cpu()
    assert torch.equal(unpacked(bits, live.shape[2]), expected)
    assert torch.equal(unpacked(ops.index_causal_bits(bits), live.shape[2]), expected.tril())


@EXAMPLES
@given(data=st.data(), dtype=st.sampled_from((torch.int32, torch.int64)))
def test_bits_of_block_lists(device: str, data: st.DataObject, dtype: torch.dtype):
    heads, rows, count, columns = (data.draw(st.integers(1, most)) for most in (3, 40, 20, 100))
    lists = torch.randint(-5, columns + 5, (heads, rows, count), generator=generator(data.draw))
    lists[:, :, 0] = data.draw(st.sampled_from((2**31 - 1, -(2**31), columns, columns - 1, -1, 0)))
    live = torch.zeros(heads, rows, columns, dtype=torch.bool)
    for head, row, column in named(lists):
        if 0 <= column < columns:
            live[head, row, column] = True
    bits = ops.index_bits_of_blocks(lists.to(device, dtype), columns)
    assert torch.equal(unpacked(bits, columns), live)


def named(lists: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    for head, of_head in enumerate(lists.tolist()):
        for row, of_row in enumerate(of_head):
            yield from ((head, row, column) for column in of_row)


def arguments(device: str = "cpu") -> dict[str, dict[str, Any]]:
    """What each operator takes, by name: two heads of 100 x 120 blocks of 16, with a list that is cut."""
    layout = torch.rand(2, 100, 120, generator=seeded()) < 0.02
    layout[:, 7] = layout[:, :, 9] = True
    bits = ops.index_bits(layout.to(device))
    call = {"columns": 120, "block": 16, "tiles": [64, 128], "of_rows": True, "of_columns": True, "bounded": False}
    plan, counts = ops.index_plan(bits, *call.values())
    totals = counts[6:22].view(4, 4)[:, :3]
    assert totals.all()
    blocks = torch.arange(24, device=device).view(2, 4, 3)
    # Three documents, of 2, 0 and 1 blocks.
    cu_seqlens = torch.tensor([0, 20, 20, 36], dtype=torch.int32, device=device)
    spans = torch.tensor([[0, 16], [16, 4], [20, 16]], dtype=torch.int32, device=device)
    ranges = torch.tensor([[0, 2], [0, 2], [2, 3]], dtype=torch.int32, device=device)
    lines = torch.tensor([1, 0, -1, 2], dtype=torch.int32, device=device)
    filled = {"layout_heads": 2, "sizes": totals.flatten().tolist()}
    return {
        "index_bits": {"layout": layout.to(device)},
        "index_bits_of_blocks": {"block_indices": blocks, "columns": 50},
        "index_causal_bits": {"bits": bits},
        "index_documents": {"cu_seqlens": cu_seqlens, "tokens": 36, "blocks": 4, "block": 16, "own": True, "most": 2},
        "index_bits_of_documents": {"bits": bits, "ranges": ranges, "own": True, "causal": False},
        "index_limits": {"cu_seqlens": cu_seqlens, "windows": lines[:2], "tokens": 36},
        "index_tile_spans": {"spans": spans, "lines": lines, "entries": lines},
        "index_plan": {"bits": bits, **call},
        "index_fill": {"bits": bits, "plan": plan, "counts": counts, **call, **filled},
    }


@pytest.mark.parametrize("operator", INDEX_OPERATORS)
def test_opcheck(device: str, operator: str):
    target, given = getattr(ops, operator).default, tuple(arguments(device)[operator].values())
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    # A plan has numbers that nobody reads, other ones each time.
    checks += [] if operator == "index_plan" else ["test_aot_dispatch_dynamic"]
    torch.library.opcheck(target, given, test_utils=checks)


REFUSED = {
    "index_bits": [
        ("layout has 2 dimensions", {"layout": torch.ones(4, 4, dtype=torch.bool)}),
        ("layout has to be bool or uint8", {"layout": torch.ones(1, 4, 4)}),
        (
            "more blocks on a side than an index holds",
            {"layout": torch.ones(1, 1, 2**24 + 1, dtype=torch.bool)},
        ),
        ("columns has to be 1 or more, got 0", {"layout": torch.ones(1, 4, 0, dtype=torch.bool)}),
    ],
    "index_bits_of_blocks": [
        ("block_indices has 2 dimensions", {"block_indices": torch.ones(4, 4, dtype=torch.int32)}),
        ("block_indices has to be int32 or int64", {"block_indices": torch.ones(1, 4, 4)}),
        ("block_indices has to be contiguous", {"block_indices": torch.ones(1, 4, 3, dtype=torch.int32).mT}),
        ("columns has to be 1 or more, got 0", {"columns": 0}),
        ("more blocks on a side than an index holds", {"columns": 2**24 + 1}),
    ],
    "index_causal_bits": [
        ("bits has 2 dimensions", {"bits": torch.ones(4, 4, dtype=torch.uint8)}),
        ("bits has to be uint8", {"bits": torch.ones(1, 4, 4, dtype=torch.int32)}),
        ("bits has to be contiguous", {"bits": torch.ones(1, 4, 8, dtype=torch.uint8).mT}),
        ("bits has to have whole words of 32 bits", {"bits": torch.ones(1, 4, 6, dtype=torch.uint8)}),
    ],
}
DOCUMENTS = {
    "index_documents": [
        ("cu_seqlens has 2 dimensions", {"cu_seqlens": torch.zeros(1, 3, dtype=torch.int32)}),
        ("cu_seqlens has to be int32", {"cu_seqlens": torch.tensor([0, 36])}),
        ("cu_seqlens has to be contiguous", {"cu_seqlens": torch.zeros(6, dtype=torch.int32)[::2]}),
        ("cu_seqlens has to have one document at least", {"cu_seqlens": torch.zeros(1, dtype=torch.int32)}),
        ("block has to be a power of two", {"block": 12}),
        ("tokens has to be 1 or more", {"tokens": 0}),
        ("most has to be 0 or more", {"most": -1}),
        ("blocks has to be 3 or more, got 2", {"blocks": 2}),
        ("blocks has to be 3, got 4", {"own": False}),
    ],
    "index_bits_of_documents": [
        *REFUSED["index_causal_bits"],
        ("ranges has 1 dimensions", {"ranges": torch.zeros(4, dtype=torch.int32)}),
        ("ranges has size 3 in dimension 1", {"ranges": torch.zeros(4, 3, dtype=torch.int32)}),
        ("ranges has to be int32", {"ranges": torch.zeros(4, 2)}),
    ],
    "index_limits": [
        ("cu_seqlens has to be int32", {"cu_seqlens": torch.tensor([0, 36])}),
        ("windows has 2 dimensions", {"windows": torch.zeros(1, 1, dtype=torch.int32)}),
        ("cu_seqlens has to have one document at least", {"cu_seqlens": torch.zeros(1, dtype=torch.int32)}),
        ("tokens has to be 1 or more", {"tokens": 0}),
    ],
    "index_tile_spans": [
        ("spans has size 3 in dimension 1", {"spans": torch.zeros(4, 3, dtype=torch.int32)}),
        ("lines has to be int32", {"lines": torch.zeros(4)}),
        ("entries has 2 dimensions", {"entries": torch.zeros(4, 1, dtype=torch.int32)}),
    ],
}
PLANS = [
    *REFUSED["index_causal_bits"],
    ("bits has size 16 in dimension 2; it has to be 12", {"columns": 96}),
    ("bits has size 16 in dimension 2; it has to be 20", {"columns": 129}),
    ("columns has to be 1 or more, got -1", {"columns": -1}),
    ("one head and one row at least", {"bits": torch.ones(0, 100, 16, dtype=torch.uint8)}),
    ("one head and one row at least", {"bits": torch.ones(2, 0, 16, dtype=torch.uint8)}),
    ("block has to be a power of two", {"block": 12}),
    ("one or two heights", {"tiles": []}),
    ("one or two heights", {"tiles": [32, 64, 128]}),
    ("power of two and at most 8 blocks, got 48", {"tiles": [48]}),
    ("power of two and at most 8 blocks, got 256", {"tiles": [64, 256]}),
    ("power of two and at most 8 blocks, got 0", {"tiles": [0]}),
    ("tiles has to ascend", {"tiles": [128, 64]}),
    ("of_rows or of_columns has to be true", {"of_rows": False, "of_columns": False}),
]
FILLS = [
    ("plan and counts have to be those of index_plan", {"plan": torch.zeros(7, dtype=torch.int32)}),
    ("plan and counts have to be those of index_plan", {"counts": torch.zeros(7, dtype=torch.int64)}),
    ("plan and counts have to be those of index_plan", {"bounded": True}),
    ("plan and counts have to be those of index_plan", {"tiles": [64]}),
    ("layout_heads has to be 1 or the heads of bits", {"layout_heads": 3}),
    ("sizes has to have 12 numbers, got 3", {"sizes": [700, 100, 30]}),
    ("lost is for tiles that nobody counts", {"lost": torch.zeros(1, dtype=torch.int32)}),
    ("lost has size 2 in dimension 0", {"lost": torch.zeros(2, dtype=torch.int32)}),
]


@pytest.mark.parametrize(
    ("operator", "sentence", "changed"),
    [
        (operator, *case)
        for operator, cases in (REFUSED | DOCUMENTS | {"index_plan": PLANS, "index_fill": [*PLANS, *FILLS]}).items()
        for case in cases
    ],
)
def test_what_is_refused(device: str, operator: str, sentence: str, changed: dict[str, Any]):
    call, fitting = getattr(ops, operator), arguments(device)[operator]
    call(**fitting)
    with pytest.raises(RuntimeError, match=sentence):
        call(**(fitting | {name: on_device(x, device) for name, x in changed.items()}))


def on_device(x: Any, device: str) -> Any:
    """A tensor with its strides, which a copy to a GPU does not always keep; anything else as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    ("cu_seqlens", "sentence"),
    [
        ([0, 20, 10, 36], "cu_seqlens has to ascend from 0 to the 36 tokens"),
        ([-1, 20, 20, 36], "cu_seqlens has to ascend from 0"),
        ([1, 20, 20, 36], "cu_seqlens has to ascend from 0"),
        ([0, 20, 20, 35], "cu_seqlens has to ascend from 0"),
        ([0, 2**31 - 1, -(2**31), 36], "cu_seqlens has to ascend from 0"),
        ([0, 0, 3, 36], "has 3 blocks, and the layout 2"),
        ([0, 2, 19, 36], "blocks has to be 5 or more, got 4"),
    ],
)
def test_a_cpu_refuses_documents_that_others_say_are_lost(device: str, own: bool, cu_seqlens: list[int], sentence: str):
    given = arguments(device)["index_documents"] | {"own": own, "blocks": 4 if own else 3}
    given["cu_seqlens"] = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
    is_wrong = own or "ascend" in sentence
    if device == "cpu" and is_wrong:
        with pytest.raises(RuntimeError, match=sentence):
            ops.index_documents(**given)
        return
    (spans, ranges), lost = ops.index_documents(**given)
    assert lost.tolist() == [int(is_wrong)]
    if is_wrong:
        assert spans.tolist() == [[0, 16], [16, 16], [32, 4], [0, 0]][: len(spans)] and not ranges.any()


def test_nothing_has_space_in_lists_that_are_lost(device: str):
    given = arguments(device)["index_fill"]
    sizes = given["columns"], given["block"], given["tiles"], True, True, True
    plan, counts = ops.index_plan(given["bits"], *sizes)
    made = ops.index_fill(
        given["bits"], plan, counts, *sizes, 2, [5000], torch.ones(1, dtype=torch.int32, device=device)
    )
    for units in made[2::4]:
        count = int(units[-1, 1])
        assert (units[:count, 0] >= 0).all() and (units[:count, 1] == -1).all() and (units[:, 2] == 0).all()


def test_bits_beyond_the_columns_are_refused():
    with pytest.raises(RuntimeError, match="bits has to be 0 beyond the columns"):
        ops.index_plan(**(arguments()["index_plan"] | {"columns": 119}))


@pytest.mark.parametrize("name", ["bits", "plan", "counts"])
def test_a_plan_that_leads_outside_is_refused_or_of_no_use(name: str):
    """The process lives on, whatever numbers there are; on a GPU nobody reads them before."""
    given, random_number = arguments()["index_fill"], seeded()
    for _ in range(2000):
        spoiled = given[name].clone()
        most = torch.iinfo(spoiled.dtype)
        number = torch.tensor([-1, 0, 1, 7, 2**20, most.max, most.min]).clamp(most.min, most.max)
        place = torch.randint(spoiled.numel(), (3,), generator=random_number)
        spoiled.view(-1)[place] = number[torch.randint(7, (3,), generator=random_number)].to(spoiled.dtype)
        with suppress(RuntimeError):
            ops.index_fill(**(given | {name: spoiled}))


@pytest.mark.parametrize("place", range(3))
def test_sizes_below_the_counts_are_refused(place: int):
    given = arguments()["index_fill"]
    given["sizes"][place] -= 1
    with pytest.raises(RuntimeError, match="sizes has to be the counts of the plan, or more"):
        ops.index_fill(**given)
