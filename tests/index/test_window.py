"""Windows: what their index holds, by hand and against the mask of the reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
import torch
from helpers import EXAMPLES
from hypothesis import example, given
from hypothesis import strategies as st

from ds_sparse import WindowIndex, reference
from ds_sparse.index.window import MAX_ROWS, fitting_block
from ds_sparse.layout import to_token_mask
from ds_sparse.tools.block_sizes import BLOCK_SIZES


def seen(index: WindowIndex) -> torch.Tensor:
    """Who sees whom by the index, bool (L, T, T), in the order of the sequence."""
    tokens = torch.arange(index.tokens)
    first, end = index.limits[..., :1], index.limits[..., 1:]
    live = (tokens >= first) & (tokens < end) | (tokens < index.num_global)
    if index.causal:
        places = tokens.expand(1, -1) if index.places is None else index.places
        live &= places[:, None] <= places[..., None]
    assert not (live & ~to_token_mask(index.blocks.layout(), index.blocks.block)[:, : len(tokens), : len(tokens)]).any()
    if index.inverse is not None:
        heads = torch.arange(len(live))[:, None, None]
        live = live[heads, index.inverse[..., None], index.inverse[:, None]]
    return live


@EXAMPLES
@given(
    tokens=st.sampled_from([1, 2, 8, 31, 64, 100]),
    windows=st.sampled_from([(0,), (1,), (5,), (40,), (500,), (2, 9), (3, 3)]),
    dilations=st.sampled_from([(1,), (2,), (7,), (300,), (1, 3), (2, 2)]),
    causal=st.booleans(),
    block=st.sampled_from([8, 16, 64, None]),
    data=st.data(),
)
def test_the_index_is_the_mask(tokens, windows, dilations, causal, block, data):
    global_tokens = tuple(data.draw(st.sets(st.integers(0, tokens - 1), max_size=5)))
    index = WindowIndex.build(tokens, windows, causal, global_tokens, dilations, block=block)
    expected = reference.window_mask(tokens, windows, causal, global_tokens, dilations)
    assert torch.equal(seen(index).expand_as(expected), expected)
    assert index.num_heads == max(len(windows), len(dilations))


def test_by_hand():
    index = WindowIndex.build(6, 1, dilation=2, global_tokens=[3])
    # Token 3, then the even ones, then the odd ones.
    assert index.order.tolist() == [[3, 0, 2, 4, 1, 5]]
    assert index.limits.tolist() == [[[0, 6], [1, 3], [1, 4], [2, 4], [4, 5], [5, 6]]]
    assert index.inverse.tolist() == [[1, 4, 2, 0, 3, 5]]
    assert index.places is None


def test_tokens_keep_their_order_where_they_can():
    for options in ({}, {"causal": True}, {"global_tokens": [0, 1]}):
        index = WindowIndex.build(100, 5, **options)
        assert index.order is None and index.inverse is None and index.places is None
    assert WindowIndex.build(100, 5, global_tokens=[1]).order is not None


def test_equal_heads_are_stored_once():
    assert WindowIndex.build(100, (5, 5), dilation=(2, 2)).limits.shape == (1, 100, 2)
    assert WindowIndex.build(100, (5, 6)).limits.shape == (2, 100, 2)


def test_few_blocks_are_live():
    """Those of the windows, and with a global token one block row and column, wherever it is."""
    for options in ({}, {"global_tokens": [777]}):
        index = WindowIndex.build(1600, 16, **options, block=16)
        added = 2 * 100 if options else 0
        assert index.blocks.live_blocks <= 3 * 100 + added
    assert WindowIndex.build(1600, 16, dilation=4, block=16).blocks.live_blocks <= 3 * 100


def test_long_sequences_have_larger_blocks():
    assert fitting_block(1024, 16, "cpu") == 16 and fitting_block(1024, 256, "cpu") == 32
    assert fitting_block(1024, 16, "cuda") == 32 and fitting_block(1024, 256, "cuda") == 64
    for device in ("cpu", "cuda"):
        assert fitting_block(64 * MAX_ROWS[device], 64, device) == 64
        assert fitting_block(10**9, 64, device) == 128


@pytest.mark.parametrize("instruction_set, block", [("avx512", 16), ("amx_bf16", 32)])
def test_tiles_of_a_cpu_pay_with_larger_blocks(instruction_set, block):
    with mock.patch("ds_sparse.index.window.instruction_set", return_value=instruction_set):
        assert WindowIndex.build(1024, 64).blocks.block == block


@EXAMPLES
@given(
    lengths=st.lists(st.integers(1, 1500), min_size=1, max_size=4),
    windows=st.lists(st.sampled_from([0, 16, 64, 128, 129, 300, 700]), min_size=1, max_size=2),
    causal=st.booleans(),
    block=st.sampled_from(BLOCK_SIZES),
)
@example(lengths=[3000] + 1000 * [40], windows=[700], causal=False, block=64)
@example(lengths=[3000] + 1000 * [40], windows=[16, 700], causal=False, block=64)
def test_tiles_without_space_for_cuts_have_none(device: str, lengths, windows, causal, block):
    """What a window over documents shows at most says that lists are too short to be cut; those of an index that was
    not told so have space for cuts, and the same work."""
    edges = torch.tensor([0, *lengths]).cumsum(0).to(device)
    built = WindowIndex.build(sum(lengths), windows, causal, block=block, device=device, cu_seqlens=edges).blocks
    of_line = (1 if causal else 2) * -(-min(max(windows), sum(lengths)) // block) + 1
    for blocks in (built, built.causal()):
        untold = replace(blocks, _most_of_line=None, _made={})
        for side, tile in product(("rows", "columns"), (16, 64, 128)):
            if tile > 8 * block:
                continue
            tiles, expected = blocks.tiles(side, tile), untold.tiles(side, tile)
            assert len(expected.cuts)
            assert bool(len(tiles.cuts)) == (max(1, tile // block) * of_line * block > 1024)
            if len(tiles.cuts) == 0:
                count = int(expected.units[-1, 1])
                assert (expected.units[:count, 3] == -1).all()


DOCUMENTS = torch.tensor([0, 20, 41])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tokens": 0}, "tokens is 0; it has to be an integer of 1 or more"),
        ({"tokens": 40.0}, "tokens is 40.0"),
        ({"block": 256}, "block is 256; windows take 8, 16, 32, 64 and 128"),
        ({"block": 12}, "block is 12"),
        (
            {"window_size": (1, 2, 3), "dilation": (1, 2)},
            "window_size has 3 numbers and dilation 2; give each one number, or one a head",
        ),
        ({"cu_seqlens": DOCUMENTS, "global_tokens": [0]}, "Both cu_seqlens and global_tokens are given"),
        ({"cu_seqlens": DOCUMENTS}, "end at 41, and query has 40 tokens"),
    ],
)
def test_arguments_that_do_not_fit(change: dict, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        WindowIndex.build(**({"tokens": 40, "window_size": 3} | change))


@pytest.mark.parametrize("tokens", [2**40, 2**63, 10**30])
def test_more_tokens_than_memory_holds_get_a_sentence(tokens: int):
    with pytest.raises(MemoryError, match=f"An index of {tokens} tokens in blocks of 128 takes .*; take shorter"):
        WindowIndex.build(tokens, 3)
