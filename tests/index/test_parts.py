"""Rows of a layout: their index, and the keys that queries at any position see."""

from __future__ import annotations

import pytest
import torch

from ds_sparse import BlockIndex
from ds_sparse.index.master_layout import MasterLayout
from ds_sparse.index.parts import MOST_PARTS, parts_of

LIVE = torch.rand(2, 6, 5, generator=torch.Generator().manual_seed(0)) < 0.5
CPU = torch.device("cpu")


def test_a_part_is_the_index_of_a_crop_and_built_once():
    parts = parts_of(BlockIndex.build(LIVE, 8))
    index = parts.index(range(2, 5), range(1, 4), CPU)
    assert torch.equal(index.layout(), LIVE[:, 2:5, 1:4])
    assert parts.index(range(2, 5), range(1, 4), CPU) is index


def test_a_layout_has_one_set_of_parts_as_long_as_it_lives():
    index, master = BlockIndex.build(LIVE, 8), MasterLayout(LIVE[:, :5], 8)
    assert parts_of(index) is parts_of(index) and parts_of(master) is parts_of(master)
    assert torch.equal(parts_of(master).layout, LIVE[:, :5])


def seen_by(live: torch.Tensor, offset: int, keys: int, causal: bool, tokens: int = 1) -> torch.Tensor:
    """(L, T, S)."""
    mask = live.repeat_interleave(8, 1).repeat_interleave(8, 2)[:, :, :keys]
    return (mask.tril() if causal else mask)[:, offset : offset + tokens]


def position(offsets: tuple[int, ...]) -> int | torch.Tensor:
    return offsets[0] if len(offsets) == 1 else torch.tensor(offsets, dtype=torch.int32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("offsets", [(0,), (13,), (30, 5), (44, 0)])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("tokens", [1, 4, 11])
def test_keys_are_listed_that_a_query_sees_and_no_others_are_seen(
    tokens: int, heads: int, offsets: tuple[int, ...], causal: bool
):
    live, tokens, keys = LIVE[:heads], min(tokens, 48 - max(offsets)), 37
    seen = parts_of(BlockIndex.build(live, 8)).keys_seen(position(offsets), tokens, keys, causal, CPU)
    for place, offset in enumerate(offsets):
        mask = seen_by(live, offset, keys, causal, tokens)
        assert seen.position[place].tolist() == list(range(offset, offset + tokens))
        for head in range(heads):
            for query in range(tokens):
                found = seen.token[place, head][seen.seen[place, head, query]]
                assert torch.equal(found.sort().values, mask[head, query].nonzero()[:, 0])
    assert seen.all_read == (heads == len(offsets) == tokens == 1)
    assert not seen.all_read or seen.seen.all()


def test_what_is_kept_of_a_long_text_is_bounded():
    parts = parts_of(BlockIndex.build(torch.ones(64, 64, dtype=torch.bool), 8))
    for offset in range(500):
        parts.keys_seen(offset, 1, offset + 1, True, CPU)
    assert len(parts._kept) == MOST_PARTS


def test_the_lists_of_all_rows_are_made_once():
    parts = parts_of(BlockIndex.build(torch.ones(128, 128, dtype=torch.bool), 8))
    table = parts._table(True, CPU)
    for offset in range(0, 1024, 4):
        parts.keys_seen(offset, 1, 1024, True, CPU)
    assert parts._table(True, CPU) is table
