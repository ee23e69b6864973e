"""Token pairs as bits in tiles: they are the pairs, and tiles are made where they pay."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from helpers import seeded

from ds_sparse import TokenIndex
from ds_sparse.index import token_tiles
from ds_sparse.index.tiles import Tiles
from ds_sparse.index.token_tiles import BLOCK, TokenTiles


def random_mask(heads: int, queries: int, keys: int, density: float) -> torch.Tensor:
    return torch.rand(heads, queries, keys, generator=seeded()) < density


def made(mask: torch.Tensor) -> TokenTiles | None:
    return TokenTiles.of(TokenIndex.from_mask(mask if len(mask) > 1 else mask[0]))


def pairs_of(tiles: Tiles, bits: torch.Tensor, heads: int, layout_heads: int, shape: tuple[int, int]) -> torch.Tensor:
    """The mask that tiles and their bits say, bool (heads, *shape), read entry by entry."""
    own, other = (-(-size // BLOCK) for size in shape)
    found = torch.zeros(heads, own * BLOCK, other * BLOCK, dtype=torch.bool)
    height, read = tiles.tile // BLOCK, set()
    for tile, first, count, _ in tiles.units.tolist():
        for entry in range(first, first + count):
            column = (int(tiles.entries[entry]) & 0xFFFFFF) * BLOCK
            words = (bits[:, entry].unsqueeze(-1) >> torch.arange(32) & 1).flatten(2).bool()
            for k, line in enumerate(tiles.lines[tile * height : (tile + 1) * height].tolist()):
                of_line = words[:, k * BLOCK : (k + 1) * BLOCK]
                if line < 0:
                    assert not of_line.any()
                    continue
                of_tile = tile * height * layout_heads // len(tiles.lines)
                sharing = range(heads) if layout_heads == 1 else (of_tile,)
                for head in sharing:
                    place = found[head, line * BLOCK : (line + 1) * BLOCK, column : column + BLOCK]
                    place |= of_line[head if len(bits) > 1 else 0]
            read.add(entry)
    assert len(read) == len(tiles.entries) == bits.shape[1]
    return found[:, : shape[0], : shape[1]]


@pytest.mark.parametrize("alike", [True, False], ids=["same blocks", "blocks of each head"])
@pytest.mark.parametrize(
    ("heads", "queries", "keys", "density"), [(1, 200, 300, 0.3), (3, 129, 64, 0.2), (2, 500, 700, 0.1)]
)
def test_the_bits_are_the_pairs(
    heads: int, queries: int, keys: int, density: float, alike: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(token_tiles, "LEAST_PAIRS", 0)
    mask = random_mask(heads, queries, keys, density)
    if not alike:
        mask[0, : queries // 2, : keys // 2] = False
    tiles = made(mask)
    layout_heads = tiles.layout_heads
    assert layout_heads == (heads if heads > 1 and not alike and keys > BLOCK else 1)
    assert torch.equal(pairs_of(tiles.rows, tiles.row_pairs, heads, layout_heads, (queries, keys)), mask)
    of_keys = pairs_of(tiles.columns, tiles.column_pairs, heads, layout_heads, (keys, queries))
    assert torch.equal(of_keys, mask.transpose(1, 2))


def test_they_are_made_where_blocks_hold_many_pairs():
    assert made(random_mask(1, 512, 512, 0.1)) is not None
    assert made(random_mask(1, 512, 512, 0.005)) is None
    # A few clusters are as good as many pairs.
    clusters = torch.zeros(1, 4096, 4096, dtype=torch.bool)
    clusters[0, 100:300, 2000:2100] = True
    assert made(clusters) is not None


def test_a_long_and_sparse_list_is_turned_down_in_its_own_memory():
    """Not in that of a layout, which has a square of the tokens."""
    tokens = 2**20
    ends = torch.arange(1, tokens + 1)
    index = TokenIndex.from_csr(torch.arange(tokens), ends, tokens, tokens)
    with mock.patch.object(TokenIndex, "blocks", side_effect=AssertionError):
        assert TokenTiles.of(index) is None


def test_what_bits_cannot_say_has_no_tiles():
    dense = torch.ones(64, 64, dtype=torch.bool).nonzero()
    assert TokenTiles.of(TokenIndex.from_pairs(dense, 64, 64)) is not None
    assert TokenTiles.of(TokenIndex.from_pairs(torch.cat([dense, dense[:1]]), 64, 64)) is None
    assert TokenTiles.of(TokenIndex.from_mask(torch.ones(2, 1, 64, 64, dtype=torch.bool))) is None
    assert TokenTiles.of(TokenIndex.from_mask(torch.zeros(64, 64, dtype=torch.bool))) is None
