"""Indices of masks over tokens, and of flex attention's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import random, seeded
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from ds_sparse import block_sparse_attention, masked_attention
from ds_sparse.index import BlockIndex
from ds_sparse.layout import to_token_mask

LAYOUT = torch.tensor([[[1, 0, 1], [0, 1, 1]], [[1, 1, 0], [0, 0, 1]]], dtype=torch.bool)


@pytest.mark.parametrize(("tokens", "keys"), [(32, 48), (31, 41), (17, 33)])
def test_a_mask_of_whole_blocks_is_its_layout(tokens: int, keys: int):
    mask = to_token_mask(LAYOUT, 16)[:, :tokens, :keys]
    for partial in ("error", "live"):
        assert torch.equal(BlockIndex.from_mask(mask, 16, partial=partial).layout(), LAYOUT)
    shared = BlockIndex.from_mask(mask[0], 16)
    assert shared.num_heads == 1 and torch.equal(shared.layout(), LAYOUT[:1])


def test_a_mask_that_cuts_through_a_block_is_an_error_that_says_where():
    mask = to_token_mask(LAYOUT, 16)[:, :30, :40].clone()
    mask[1, 29, 39] = False
    mask[1, 3, 20] = False
    with pytest.raises(
        ValueError,
        match=r"cuts through 2 of 7 live blocks of 16 x 16 tokens, first in head 1 at block row 0, column 1: query "
        r"tokens 0 to 15, key tokens 16 to 31\. With partial='live'",
    ):
        BlockIndex.from_mask(mask, 16)
    mask[0, 29, 39] = False
    with pytest.raises(ValueError, match=r"1 of 4 .*, first at block row 1, column 2: query .* 16 to 29, .* 32 to 39"):
        BlockIndex.from_mask(mask[0], 16)
    assert torch.equal(BlockIndex.from_mask(mask, 16, partial="live").layout(), LAYOUT)


def test_a_mask_beside_its_live_blocks_is_the_mask():
    mask = torch.rand(40, 40, generator=seeded()) < 0.02
    index = BlockIndex.from_mask(mask, 8, partial="live")
    assert 0 < index.live_blocks < 25
    q, k, v = random(seeded(), 3, 2, 2, 40, 8)
    found = block_sparse_attention(q, k, v, index, attn_mask=mask)
    torch.testing.assert_close(found, masked_attention(q, k, v, mask))


BOOLS = torch.ones(8, 8, dtype=torch.bool)


@pytest.mark.parametrize(
    ("mask", "options", "error", "sentence"),
    [
        (torch.ones(8, 8), {}, TypeError, "bool tensor, got torch.float32; convert it with mask != 0"),
        ([[True]], {}, TypeError, "bool tensor, got list"),
        (BOOLS[None, None], {}, ValueError, r"got \(1, 1, 8, 8\)"),
        (BOOLS[:, :0], {}, ValueError, "none of them 0"),
        (BOOLS, {"block": 12}, ValueError, "power of two"),
        (BOOLS, {"partial": "dead"}, ValueError, "it has to be 'error' or 'live'"),
        (BOOLS.to("meta"), {}, ValueError, "meta device, where it has no values"),
    ],
)
def test_masks_that_cannot_be(mask: object, options: dict, error: type[Exception], sentence: str):
    with pytest.raises(error, match=sentence):
        BlockIndex.from_mask(mask, **({"block": 8} | options))


DOCUMENTS = torch.arange(200) // 64


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q - k).abs() <= 20


def document(b, h, q, k):
    return DOCUMENTS[q] == DOCUMENTS[k]


def by_head(b, h, q, k):
    return (q - k).abs() <= 20 * (h + 1)


def flex(mask_mod: Callable, heads: int | None, tokens: int, keys: int, block: int | tuple[int, int] = 32) -> BlockMask:
    return create_block_mask(mask_mod, None, heads, tokens, keys, device="cpu", BLOCK_SIZE=block)


@pytest.mark.parametrize(("tokens", "keys"), [(192, 192), (200, 200), (100, 200)])
@pytest.mark.parametrize(("mask_mod", "heads"), [(causal, None), (window, None), (document, None), (by_head, 3)])
def test_flex_masks_have_the_blocks_of_their_tokens(mask_mod: Callable, heads: int | None, tokens: int, keys: int):
    mask = create_mask(mask_mod, 1, heads, tokens, keys, device="cpu")[0]
    index = BlockIndex.from_flex(flex(mask_mod, heads, tokens, keys), partial="live")
    expected = BlockIndex.from_mask(mask, 32, partial="live")
    assert torch.equal(index.layout(), expected.layout()) and index.num_heads == expected.num_heads == (heads or 1)
    q = random(seeded(), 1, heads or 1, tokens, 8)
    k, v = random(seeded(1), 2, 1, heads or 1, keys, 8)
    found = block_sparse_attention(q, k, v, index, attn_mask=mask[None])
    torch.testing.assert_close(found, masked_attention(q, k, v, mask))


@pytest.mark.parametrize(("tokens", "keys"), [(192, 192), (200, 200), (100, 200)])
def test_flex_masks_of_whole_blocks_need_no_partial_ones(tokens: int, keys: int):
    # Documents of two blocks; where the last is short, flex attention calls its blocks partial.
    index = BlockIndex.from_flex(flex(document, 2, tokens, keys))
    assert torch.equal(
        index.layout(), BlockIndex.from_mask(create_mask(document, 1, 1, tokens, keys, "cpu")[0, 0], 32).layout()
    )


def test_flex_masks_that_cut_through_blocks_say_where():
    with pytest.raises(ValueError, match="cuts through 6 of 21 live blocks of 32 x 32 .* at block row 0, column 0"):
        BlockIndex.from_flex(flex(causal, None, 192, 192))
    with pytest.raises(ValueError, match="cuts through .* in head 0 at block row 0, column 0"):
        BlockIndex.from_flex(flex(by_head, 3, 200, 200))


def test_flex_masks_made_of_lists_alone_are_whole():
    counts, columns = torch.tensor([[[2, 1]]], dtype=torch.int32), torch.tensor([[[[1, 0], [1, 0]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, columns, BLOCK_SIZE=32)
    assert BlockIndex.from_flex(mask).layout().tolist() == [[[True, True], [False, True]]]


@pytest.mark.parametrize("partial", ["error", "live"])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("padding", [0, -1, 3, 99])
def test_what_stands_behind_the_blocks_of_a_row_does_not_count(padding: int, full: bool, partial: str):
    rows = [[0], [1, 0], [], [3, 0, 2, 3]]  # in any order, one of them twice
    counts = torch.tensor([[[len(row) for row in rows]]], dtype=torch.int32)
    columns = torch.tensor([[[row + [padding] * (4 - len(row)) for row in rows]]], dtype=torch.int32)
    none = torch.zeros_like(counts), torch.zeros_like(columns)
    lists = (*none, counts, columns) if full else (counts, columns)
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16, compute_q_blocks=False)
    expected = [[[column in row for column in range(4)] for row in rows]]
    assert BlockIndex.from_flex(mask, partial=partial).layout().tolist() == expected


@pytest.mark.parametrize("keys", [64, 60])
@pytest.mark.parametrize("dims", [4, 2])
def test_flex_masks_list_fewer_blocks_a_row_than_there_are(dims: int, keys: int):
    counts, columns = torch.tensor([1, 2, 2, 2]), torch.tensor([[0, 9], [0, 1], [1, 2], [2, 3]])
    counts, columns = (x[None, None] for x in (counts, columns)) if dims == 4 else (counts, columns)
    mask = BlockMask.from_kv_blocks(
        counts, columns, BLOCK_SIZE=16, seq_lengths=(64, keys), mask_mod=window, compute_q_blocks=False
    )
    expected = torch.ones(1, 4, 4, dtype=torch.bool).tril().triu(-1)
    assert torch.equal(BlockIndex.from_flex(mask, partial="live").layout(), expected)


def test_flex_masks_that_list_blocks_that_do_not_exist():
    counts, columns = torch.tensor([[[1, 2]]]), torch.tensor([[[[0, 0], [1, 3]]]])

    def of(counts: torch.Tensor, columns: torch.Tensor) -> BlockIndex:
        return BlockIndex.from_flex(BlockMask.from_kv_blocks(counts, columns, BLOCK_SIZE=16, compute_q_blocks=False))

    with pytest.raises(ValueError, match="kv_indices lists block 3, and its 32 keys have the blocks 0 to 1; .*seq_len"):
        of(counts, columns)
    with pytest.raises(ValueError, match="kv_indices lists block -1, "):
        of(counts, columns.clamp(max=1).neg())
    with pytest.raises(ValueError, match="kv_num_blocks has 3, and its kv_indices lists 2 blocks a row"):
        of(counts + 1, columns)


def test_flex_masks_of_sequences_are_layouts_together():
    """What the sentence about a mask of several sequences says to do."""
    masks = [flex(mod, None, 64, 64) for mod in (causal, window)]
    layout = torch.stack([BlockIndex.from_flex(mask, partial="live").layout() for mask in masks])
    bools = torch.stack([create_mask(mod, 1, 1, 64, 64, device="cpu")[0] for mod in (causal, window)])
    q, k, v = random(seeded(), 3, 2, 2, 64, 8)
    found = block_sparse_attention(q, k, v, layout, attn_mask=bools)
    torch.testing.assert_close(found, masked_attention(q, k, v, bools))


def test_flex_masks_that_do_not_fit():
    with pytest.raises(TypeError, match="block_mask is a Tensor; it has to be a BlockMask"):
        BlockIndex.from_flex(torch.ones(2, 2))
    with pytest.raises(ValueError, match="blocks of 32 x 64 tokens; make it with one BLOCK_SIZE"):
        BlockIndex.from_flex(flex(causal, None, 192, 192, (32, 64)))
    with pytest.raises(
        ValueError, match="has 2 sequences, and from_flex takes one. Make it with B=None if they are alike"
    ):
        BlockIndex.from_flex(create_block_mask(causal, 2, None, 64, 64, device="cpu", BLOCK_SIZE=32))
    with pytest.raises(ValueError, match="it has to be 'error' or 'live'"):
        BlockIndex.from_flex(flex(causal, None, 64, 64), partial="whole")
