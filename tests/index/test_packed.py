"""The index of documents packed in one row."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from helpers import EXAMPLES, generator
from hypothesis import given
from hypothesis import strategies as st
from tile_reference import tile_sets
from torch.nn.functional import pad

from ds_sparse import BlockIndex, PackedIndex, WindowIndex
from ds_sparse.index import cache, packed
from ds_sparse.index.packed import Documents
from ds_sparse.index.tiles import SIDES
from ds_sparse.index.window import index_of_row
from ds_sparse.tools import memory

CU_SEQLENS = torch.tensor([0, 20, 20, 36, 41], dtype=torch.int32)
LAYOUT = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 1]], dtype=torch.bool)


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths of documents, some without tokens, and a layout, bool (heads, R, R), for the longest of them and for the
    row, with blocks of 8."""
    lengths = draw(st.lists(st.sampled_from((0, 1, 7, 8, 9, 64, 257)) | st.integers(0, 300), min_size=1, max_size=6))
    lengths = torch.tensor([*lengths, draw(st.integers(1, 100))])
    rng, heads, rows = generator(draw), draw(st.integers(1, 3)), -(-int(lengths.sum()) // 8) + draw(st.integers(0, 40))
    live = torch.rand(heads, rows, rows, generator=rng) < draw(st.sampled_from((0.0, 0.03, 0.5, 1.0)))
    return lengths, live.tril() if draw(st.booleans()) else live


def edges_of(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


@EXAMPLES
@given(
    batch=batches(), block=st.sampled_from((8, 16, 64)), causal=st.booleans(), wide=st.booleans(), bounded=st.booleans()
)
def test_all_of_it_is_as_composed_of_pytorchs_operations(
    device: str, batch: tuple[torch.Tensor, torch.Tensor], block: int, causal: bool, wide: bool, bounded: bool
):
    lengths, live = batch
    cu_seqlens = edges_of(lengths)
    counts = -(-lengths // block)
    document = torch.arange(len(lengths)).repeat_interleave(counts)
    end = counts.cumsum(0)[document]
    begin = end - counts[document]
    number = torch.arange(len(document)) - begin
    spans = torch.stack([cu_seqlens[document] + number * block, (lengths[document] - number * block).clamp(max=block)])
    expected = live[:, number][:, :, number] & (document[:, None] == document)
    expected = expected.tril() if causal else expected
    ranges = torch.stack([begin, end])
    if bounded:
        most = min(len(lengths), int(lengths.sum()))
        more = (int(lengths.sum()) + most * (block - 1)) // block - len(document)
        spans, ranges, expected = pad(spans, (0, more)), pad(ranges, (0, more)), pad(expected, (0, more, 0, more))

    given = (cu_seqlens if wide else cu_seqlens.int()).to(device)
    index = PackedIndex.build(live.to(device), given, block, tokens=int(lengths.sum()) if bounded else None)
    assert index.documents == len(lengths) and index.tokens == lengths.sum() and index.bounded == bounded
    assert index.spans.tolist() == spans.T.tolist() and index.ranges.tolist() == ranges.T.tolist()
    blocks = index.causal_blocks(causal)
    assert torch.equal(blocks.layout().cpu().expand_as(expected), expected)
    assert blocks.live_blocks * expected.shape[0] == expected.sum() * blocks.layout_heads
    place = torch.arange(block)
    exists = place < spans[1][:, None]
    assert torch.equal(index.exists.cpu(), exists.view(1, -1))
    assert torch.equal(index.tokens_of.cpu().view(-1, block)[exists], torch.arange(index.tokens))
    assert torch.equal(index.aligned.cpu(), exists.flatten().nonzero().flatten())

    stored, tile = expected[: index.layout_heads], 8 * block
    capacity = index.capacity[index._cuts(causal)]
    assert index.live_blocks[causal] == stored.sum() <= capacity and (bounded or capacity == stored.sum())
    for side, wanted in zip(SIDES, tile_sets(stored, block, [tile], list(SIDES), bounded=True)):
        tiles, count, cuts = index.tiles(side, tile, causal), len(wanted.units), len(wanted.cuts)
        assert tiles.lines.tolist() == wanted.lines and capacity >= len(tiles.entries) >= len(wanted.entries)
        assert [x % 2**32 for x in tiles.entries[: len(wanted.entries)].tolist()] == wanted.entries
        assert tiles.units[:count].tolist() == wanted.units and tiles.cuts[:cuts].tolist() == wanted.cuts
        assert len(tiles.units) > count
        assert tiles.units[count:].tolist() == [[-1, count, 0, 0]] * (len(tiles.units) - count)


@EXAMPLES
@given(batch=batches(), block=st.sampled_from((8, 16, 64)), causal=st.booleans())
def test_a_rows_layout_is_as_composed_of_pytorchs_operations(
    device: str, batch: tuple[torch.Tensor, torch.Tensor], block: int, causal: bool
):
    lengths, live = batch
    tokens = int(lengths.sum())
    rows = -(-tokens // block)
    document = torch.arange(len(lengths)).repeat_interleave(lengths)
    first, last = document[::block], document[(torch.arange(1, rows + 1) * block - 1).clamp(max=tokens - 1)]
    expected = live[:, :rows, :rows] & (first[:, None] <= last) & (first <= last[:, None])
    expected = expected.tril() if causal else expected

    index = index_of_row(live.to(device), edges_of(lengths), block, tokens, causal, torch.device(device))
    assert torch.equal(index.blocks.layout().cpu().expand_as(expected), expected)
    assert torch.equal(index.limits[0].cpu(), edges_of(lengths).int()[torch.stack([document, document + 1], 1)])


@EXAMPLES
@given(
    batch=batches(),
    windows=st.lists(st.sampled_from((0, 1, 5, 40, 5000)), min_size=1, max_size=3),
    block=st.sampled_from((8, 16, 64)),
    causal=st.booleans(),
)
def test_windows_of_documents_are_as_composed_of_pytorchs_operations(
    device: str, batch: tuple[torch.Tensor, torch.Tensor], windows: list[int], block: int, causal: bool
):
    lengths, _ = batch
    tokens = int(lengths.sum())
    document, place = torch.arange(len(lengths)).repeat_interleave(lengths), torch.arange(tokens)
    far = (place[:, None] - place).abs()
    seen = torch.stack([(far <= window) & (document[:, None] == document) for window in windows])
    expected = pad(seen, (0, -tokens % block, 0, -tokens % block)).unflatten(2, (-1, block)).any(3)
    expected = expected.unflatten(1, (-1, block)).any(2)
    expected = expected.tril() if causal else expected

    index = WindowIndex.build(tokens, windows, causal, block=block, device=device, cu_seqlens=edges_of(lengths))
    assert index.order is None and torch.equal(index.blocks.layout().cpu().expand_as(expected), expected)
    first, end = index.limits.cpu().unsqueeze(-1).unbind(2)
    assert torch.equal(((place >= first) & (place < end)).expand_as(seen), seen)


def test_each_document_has_the_layouts_corner_and_nothing_of_others():
    index = PackedIndex.build(LAYOUT, CU_SEQLENS, block=8)
    assert (index.tokens, index.documents, index.block) == (41, 4, 8)
    assert index.spans.tolist() == [[0, 8], [8, 8], [16, 4], [20, 8], [28, 8], [36, 5]]
    corners = (LAYOUT, LAYOUT[:2, :2], LAYOUT[:1, :1])
    assert torch.equal(index.blocks.layout()[0], torch.block_diag(*(x.int() for x in corners)).bool())


def test_aligned_numbers_lead_to_tokens_and_back():
    index = PackedIndex.build(LAYOUT, CU_SEQLENS, block=8)
    assert torch.equal(index.tokens_of[index.aligned], torch.arange(41))
    assert index.exists.shape == (1, 48) and index.exists.sum() == 41 and index.exists[0, index.aligned].all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_spans_lie_beside_lines_and_entries(side: str, causal: bool):
    index = PackedIndex.build(LAYOUT, CU_SEQLENS, block=8)
    tiles = index.tiles(side, 32, causal)
    blocks = [*tiles.lines.tolist(), *(entry & 0xFFFFFF for entry in tiles.entries[: tiles.units[:, 2].sum()].tolist())]
    assert -1 in blocks
    assert index.tile_spans(side, 32, causal)[: len(blocks)].tolist() == [
        [0, 0] if block < 0 else index.spans[block].tolist() for block in blocks
    ]


def test_a_bounded_index_says_how_large_it_is_at_most(device: str):
    edges = torch.tensor([0, 20, 20, 41], device=device)
    index = PackedIndex.build(LAYOUT.to(device), edges, 8, tokens=41)
    assert repr(index).startswith("PackedIndex(3 documents of 41 tokens together, at most 7 blocks of 8, density up to")
    assert index.live_blocks == (12, 10) and index.capacity == (14, 14)
    assert index.to("cpu").lost.device.type == "cpu"


def test_documents_that_are_more_than_tokens_take_no_space(device: str):
    cu_seqlens = torch.cat([torch.arange(4), torch.full((1000,), 3)]).to(device)
    index = PackedIndex.build(LAYOUT.to(device), cu_seqlens, 8, tokens=3)
    assert len(index.spans) == 3 and index.documents == 1003 and index.live_blocks == (3, 3)


@pytest.mark.parametrize("causal", [False, True])
def test_a_prepared_bounded_index_has_all_that_attention_walks(device: str, causal: bool):
    index = PackedIndex.build(LAYOUT.to(device), CU_SEQLENS.to(device), 8, tokens=41).prepared(causal)
    moved = index_of_row(torch.ones(6, 6, dtype=torch.bool), CU_SEQLENS, 8, 41, causal, torch.device(device)).to("cpu")
    for blocks in (index.causal_blocks(causal), moved.blocks):
        assert {key[0] for key in blocks._made if isinstance(key, tuple)} == set(SIDES)


def test_heads_of_a_layout_are_kept_and_those_of_a_block_index():
    layout = torch.stack([LAYOUT, LAYOUT.mT])
    expected = PackedIndex.build(layout, CU_SEQLENS, block=8)
    assert expected.blocks.num_heads == 2
    found = PackedIndex.build(BlockIndex.build(layout, 8), CU_SEQLENS)
    assert torch.equal(found.blocks.layout(), expected.blocks.layout())


def test_equal_heads_of_a_layout_are_stored_once():
    index = PackedIndex.build(LAYOUT.long().expand(12, -1, -1), CU_SEQLENS, block=8)
    assert (index.blocks.num_heads, index.blocks.layout_heads) == (12, 1)
    assert torch.equal(index.blocks.layout(), PackedIndex.build(LAYOUT, CU_SEQLENS, block=8).blocks.layout())


def test_documents_that_do_not_fit_are_refused_or_lost_where_nobody_reads_them(device: str):
    for edges, sentence in {
        (0, 30, 20, 41): "cu_seqlens has to ascend",
        (0, 20, 20, 40): "cu_seqlens has to ascend",
        (0, 20, 20, 2**32 + 41): "cu_seqlens has to ascend",
        (0, 5, 5, 41): "a document of cu_seqlens has 5 blocks, and the layout 3",
    }.items():
        given = LAYOUT.to(device), torch.tensor(edges, device=device), 8
        if device == "cpu":
            with pytest.raises(RuntimeError, match=sentence):
                PackedIndex.build(*given, tokens=41)
            continue
        index = PackedIndex.build(*given, tokens=41)
        for read in (PackedIndex.live_blocks.fget, lambda x: x.blocks.exact()):
            with pytest.raises(ValueError, match="cu_seqlens, at which nobody looked .* DS_SPARSE_CHECK_LAYOUTS=1"):
                read(index)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packed, "COMPARED_ON_GPU", True)
            with pytest.raises(ValueError, match="cu_seqlens falls|documents of cu_seqlens end|longest doc"):
                PackedIndex.build(*given, tokens=41)


def test_a_graph_has_to_say_how_many_tokens_there_are(monkeypatch: pytest.MonkeyPatch):
    build = torch.compile(lambda x: PackedIndex.build(layout, x).spans, backend="eager", fullgraph=True)
    layout = BlockIndex.build(LAYOUT, 8)
    with pytest.raises(RuntimeError, match=r"cu_seqlens cannot be read under torch\.compile; give tokens"):
        build(CU_SEQLENS)
    monkeypatch.setattr(cache, "is_captured", lambda device: True)
    with pytest.raises(RuntimeError, match="cannot be read while a CUDA graph is captured; give .* tokens"):
        PackedIndex.build(layout, CU_SEQLENS)


@pytest.mark.parametrize("longest", [None, 1, 3])
def test_a_graph_that_counts_no_live_blocks_has_space_for_all(longest: int | None, monkeypatch: pytest.MonkeyPatch):
    counted, full = (packed.most_live(BlockIndex.build(x, 8), 3, longest) for x in (LAYOUT, torch.ones(3, 3)))
    with monkeypatch.context() as patch:
        patch.setattr(packed, "is_in_graph", lambda x: True)
        assert packed.most_live(BlockIndex.build(LAYOUT, 8), 3, longest) == full
    assert counted == {None: (6, 5), 1: (3, 3), 3: (6, 6)}[longest]


def test_a_capture_takes_nothing_from_the_cpu(captures: mock.Mock):
    with pytest.raises(RuntimeError, match="built while a CUDA graph is captured, .* on the CPU; give cu_seqlens and"):
        packed.sent_to(CU_SEQLENS, torch.device("cuda"))
    assert packed.sent_to(CU_SEQLENS, torch.device("cpu")) is CU_SEQLENS


def test_more_blocks_than_memory_holds_get_a_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "machine_memory", lambda: 1 << 30)
    documents = torch.arange(92691) * 8
    with pytest.raises(MemoryError, match="741520 tokens in blocks of 8 takes 1 GiB, .* use larger blocks, or pack"):
        PackedIndex.build(LAYOUT, documents, block=8)


@pytest.mark.parametrize(
    ("changed", "error", "sentence"),
    [
        ({"cu_seqlens": [0, 41]}, TypeError, "cu_seqlens is list; it has to be an int32 or int64 tensor"),
        ({"cu_seqlens": torch.tensor([0.0, 41.0])}, TypeError, r"cu_seqlens is torch\.float32"),
        ({"cu_seqlens": torch.tensor([0])}, ValueError, r"has shape \(1,\); it has to be \(documents \+ 1\)"),
        ({"cu_seqlens": torch.tensor([[0, 41]])}, ValueError, r"has shape \(1, 2\)"),
        ({"cu_seqlens": torch.tensor([1, 41])}, ValueError, "goes from 1 to 41; it has to begin with 0"),
        ({"cu_seqlens": torch.tensor([0, 0])}, ValueError, "goes from 0 to 0; .* all tokens, one at least"),
        ({"cu_seqlens": torch.tensor([0, 30, 20, 41])}, ValueError, "falls from 30 to 20 at document 1"),
        ({"cu_seqlens": torch.tensor([0, 25, 41])}, ValueError, "document of 25 tokens .* 4 x 4 blocks"),
        ({"layout": LAYOUT[:, :2]}, ValueError, "has 3 x 2 blocks of 8; .* square"),
        ({"block": None}, ValueError, "without its block; pass block"),
        ({"block": 7}, ValueError, "block is 7"),
        ({"layout": BlockIndex.build(LAYOUT, 16)}, ValueError, "block is 8, and the index was built for blocks of 16"),
        ({"layout": LAYOUT.int() * 2}, ValueError, "holds only 0 and 1"),
        *(({"tokens": x}, ValueError, "tokens is .* integer of 1 or more") for x in (0, True, "a", 41.0)),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict, error: type[Exception], sentence: str):
    with pytest.raises(error, match=sentence):
        PackedIndex.build(**({"layout": LAYOUT, "cu_seqlens": CU_SEQLENS, "block": 8} | changed))


def test_windows_end_with_their_document():
    index = WindowIndex.build(41, [3, 2], dilation=[1, 4], cu_seqlens=CU_SEQLENS)
    begin, end = Documents.read(CU_SEQLENS).of_tokens("cpu").unbind(1)
    place = torch.arange(41)
    for head, (window, dilation) in enumerate([(3, 1), (2, 4)]):
        distance = place - place[:, None]
        seen = (distance.abs() <= window * dilation) & (distance % dilation == 0)
        seen &= (place >= begin[:, None]) & (place < end[:, None])
        order = index.order[head]
        first, after = index.limits[head].unbind(1)
        found = (place >= first[:, None]) & (place < after[:, None])
        assert torch.equal(found, seen[order][:, order])


def test_a_rows_layout_keeps_the_blocks_in_which_a_document_sees_itself():
    index = index_of_row(torch.ones(6, 6), CU_SEQLENS, 8, 41, False, torch.device("cpu"))
    begin, end = Documents.read(CU_SEQLENS).of_tokens("cpu").unbind(1)
    document = torch.repeat_interleave(torch.arange(4), CU_SEQLENS.diff())
    seen = pad(document[:, None] == document, (0, 7, 0, 7)).view(6, 8, 6, 8).any(3).any(1)
    assert torch.equal(index.blocks.layout()[0], seen)
    assert torch.equal(index.limits[0].long(), torch.stack([begin, end], 1))
    with pytest.raises(ValueError, match="for a row of 41 tokens it has to be square and have 6 x 6 blocks or more"):
        index_of_row(torch.ones(5, 5), CU_SEQLENS, 8, 41, False, torch.device("cpu"))
