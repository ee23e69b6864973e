"""The index of documents packed in one row."""

from __future__ import annotations

import pytest
import torch

from ds_sparse import BlockIndex, PackedIndex, WindowIndex
from ds_sparse.index.packed import Documents
from ds_sparse.index.window import index_of_row
from ds_sparse.tools import memory

CU_SEQLENS = torch.tensor([0, 20, 20, 36, 41], dtype=torch.int32)
LAYOUT = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 1]], dtype=torch.bool)


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
    seen = torch.nn.functional.pad(document[:, None] == document, (0, 7, 0, 7)).view(6, 8, 6, 8).any(3).any(1)
    assert torch.equal(index.blocks.layout()[0], seen)
    assert torch.equal(index.limits[0].long(), torch.stack([begin, end], 1))
    with pytest.raises(ValueError, match="for a row of 41 tokens it has to be square and have 6 x 6 blocks or more"):
        index_of_row(torch.ones(5, 5), CU_SEQLENS, 8, 41, False, torch.device("cpu"))
