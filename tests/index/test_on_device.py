"""What every index has: a device, copies on others and in pickles, streams that wait, and one line that shows it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
from helpers import captured, counted_waits, seeded

from ds_sparse import BlockIndex, PackedIndex, TokenIndex, WindowIndex, block_sparse_attention
from ds_sparse.index import cache
from ds_sparse.index.on_device import OnDevice

LAYOUT = torch.rand(2, 9, 9, generator=seeded()) < 0.4
MAKE: dict[str, Callable[[], OnDevice]] = {
    "blocks": lambda: BlockIndex.build(LAYOUT, 16),
    "documents": lambda: PackedIndex.build(LAYOUT, torch.tensor([0, 40, 64]), 16),
    "window": lambda: WindowIndex.build(64, 3, True, [9], dilation=[1, 2]),
    "pairs": lambda: TokenIndex.from_pairs(torch.tensor([[1, 0], [0, 1], [5, 3]]), 64, 64),
    "pairs of documents": lambda: TokenIndex.from_mask(LAYOUT[0]).packed(torch.tensor([0, 1, 3])),
}


def prepared(index: OnDevice) -> OnDevice:
    """The index with all that is made of it at first use."""
    if isinstance(index, BlockIndex):
        index.with_lists().with_strips().causal().tiles("rows", 128)
    elif not isinstance(index, WindowIndex):
        index.prepared()
    return index


@pytest.mark.parametrize("kind", MAKE)
def test_it_is_where_its_tensors_are_and_no_copy_is_made_of_it_there(device: str, kind: str):
    index = prepared(MAKE[kind]().to(device))
    assert index.device.type == device and {x.device for x in index._held()} == {index.device}
    assert index.to(device) is index and index.to(index.device) is index and index.ready() is index


@pytest.mark.parametrize("kind", MAKE)
def test_copies_and_pickles_hold_what_it_holds(kind: str, device: str):
    index = prepared(MAKE[kind]().to(device))
    held, elsewhere = list(index._held()), MAKE[kind]().to("meta")
    for other in (copy.deepcopy(index), pickle.loads(pickle.dumps(index))):
        assert repr(other) == repr(index)
        assert all(torch.equal(x, y) for x, y in zip(other._held(), held, strict=True))
    assert repr(elsewhere) == repr(MAKE[kind]()).replace("cpu)", "meta)")
    assert [x.shape for x in elsewhere._held()] == [x.shape for x in MAKE[kind]()._held()]
    assert {x.device.type for x in elsewhere._held()} == {"meta"}


@pytest.mark.parametrize("kind", ["documents", "window"])
def test_what_an_index_holds_is_counted_with_the_blocks_in_it(kind: str):
    index = prepared(MAKE[kind]())
    held = {id(x) for x in index._held()}
    assert {id(x) for x in index.blocks._held()} < held
    assert {id(x) for x in vars(index).values() if isinstance(x, torch.Tensor)} < held


@pytest.mark.parametrize("kind", MAKE)
def test_an_index_made_in_inference_mode_serves_training(kind: str):
    with torch.inference_mode():
        index = prepared(MAKE[kind]())
    assert not any(x.is_inference() for x in index._held())


USES = {"blocks": lambda index: index.lists, "pairs": lambda index: index.by_key, "window": None}
"""What is made of an index at first use."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("kind", USES)
def test_another_stream_waits_once_for_the_one_that_made_it(kind: str):
    index, stream = MAKE[kind]().to("cuda"), torch.cuda.Stream()
    with counted_waits() as wait:
        index.ready()
        assert wait.call_count == 0
        with torch.cuda.stream(stream):
            index.ready()
            index.ready()
            assert wait.call_count == 1
            if USES[kind]:
                USES[kind](index)  # made here, so that the first stream waits in its turn
        index.ready()
        assert wait.call_count == (2 if USES[kind] else 1)


@pytest.mark.parametrize("kind", MAKE)
def test_a_capture_keeps_an_index_for_good(kind: str, monkeypatch: pytest.MonkeyPatch):
    index = prepared(MAKE[kind]())
    monkeypatch.setattr(cache, "captured", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    vars(index)["_ready"]._event = mock.Mock()
    index.ready()
    there = weakref.ref(index)
    del index
    gc.collect()
    assert there() is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("offset", [None, 143], ids=["whole", "a new token"])
def test_a_graph_reads_an_index_that_was_dropped(offset: int | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "captured", set())
    index = MAKE["blocks"]().to("cuda")
    key = torch.randn(1, 2, 144, 16, device="cuda")
    query = key if offset is None else key[:, :, :1]
    for _ in range(2):
        expected = block_sparse_attention(query, key, key, index, query_offset=offset)
    graph, output = captured(partial(block_sparse_attention, query, key, key, index, query_offset=offset))
    there = weakref.ref(index)
    del index
    gc.collect()
    assert there() is not None
    graph.replay()
    assert torch.equal(output, expected)


def test_its_repr_is_one_short_line():
    one, pairs = torch.tensor([[1, 0], [1, 1]]), torch.ones(2, 5, 3, 4, dtype=torch.bool)
    alike, different = one.repeat(3, 1, 1), torch.stack([one, one.mT])
    assert [
        repr(index)
        for index in (
            *(BlockIndex.build(layout, 16) for layout in (one, alike, different)),
            WindowIndex.build(100, 3),
            WindowIndex.build(100, [3, 4], True, [1]),
            TokenIndex.from_mask(pairs[0, 0]),
            TokenIndex.from_mask(pairs),
        )
    ] == [
        "BlockIndex(2 x 2 blocks of 16, any heads, density 75.0%, cpu)",
        "BlockIndex(2 x 2 blocks of 16, 3 heads alike, density 75.0%, cpu)",
        "BlockIndex(2 x 2 blocks of 16, 2 heads, density 75.0%, cpu)",
        "WindowIndex(100 tokens, any heads, 0 global, blocks of 16, cpu)",
        "WindowIndex(100 tokens, 2 heads, 1 global, causal, blocks of 16, cpu)",
        "TokenIndex(3 x 4 tokens, 12 pairs, any heads, cpu)",
        "TokenIndex(3 x 4 tokens, 120 pairs, 2 sequences, 5 heads, cpu)",
    ]
