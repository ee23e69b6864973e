"""The cache of indices: what is kept, for how long and in how much memory, in threads, traces and captures."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from helpers import seeded

from ds_sparse import BlockIndex, TokenIndex, WindowIndex
from ds_sparse.index import cache
from ds_sparse.index.cache import kept, kept_with
from ds_sparse.index.master_layout import MasterLayout
from ds_sparse.ops import MatMul, Softmax


class Index:
    """What takes so many bytes."""

    def __init__(self, size: int):
        self.memory = torch.zeros(size, dtype=torch.uint8)

    def _held(self) -> Iterator[torch.Tensor]:
        yield self.memory


def test_what_was_used_last_is_kept_in_so_many_bytes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "BYTES", 100)
    part = OrderedDict()
    for key in "abc":
        kept(part, key, lambda: Index(30))
    kept(part, "a", AssertionError)
    kept(part, "d", lambda: Index(30))
    assert list(part) == ["c", "a", "d"]
    kept(part, "e", lambda: Index(70))
    assert list(part) == ["d", "e"]


def test_what_is_larger_than_the_bound_is_kept_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "BYTES", 100)
    part = OrderedDict()
    kept(part, "a", lambda: Index(10))
    large = kept(part, "b", lambda: Index(1000))
    assert kept(part, "b", AssertionError) is large and list(part) == ["b"]


def test_memory_that_is_shared_counts_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "BYTES", 100)
    part, index = OrderedDict(), Index(60)
    kept(part, "a", lambda: (index, index))
    kept(part, "b", lambda: index)
    assert list(part) == ["a", "b"]


def test_a_part_keeps_so_many():
    part = OrderedDict()
    for key in range(5):
        kept(part, key, lambda: Index(1), most=3)
    assert list(part) == [2, 3, 4]


def test_threads_build_once():
    part, built, start = OrderedDict(), [], threading.Barrier(8)

    def build() -> Index:
        built.append(Index(1))
        return built[-1]

    def ask(found: list) -> None:
        start.wait()
        found += [kept(part, key % 4, build) for key in range(100)]

    found = [[] for _ in range(8)]
    threads = [threading.Thread(target=ask, args=(of_one,)) for of_one in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 4 and all(of_one == found[0] for of_one in found)


def test_what_is_made_of_tensors_lasts_until_one_changes_or_goes():
    part, tensors = OrderedDict(), [torch.zeros(2), torch.zeros(3)]
    first = kept_with(part, tensors, "key", lambda: Index(1))
    assert kept_with(part, tensors, "key", AssertionError) is first
    assert kept_with(part, tensors, "other", lambda: Index(1)) is not first
    tensors[1].numpy()[0] = 1
    changed = kept_with(part, tensors, "key", lambda: Index(1))
    assert changed is not first and kept_with(part, tensors, "key", AssertionError) is changed
    assert len(part) == 2
    del tensors[1]
    gc.collect()
    assert not part


def test_what_nothing_tells_of_a_change_keeps_nothing():
    part, x = OrderedDict(), torch.zeros(2)
    with mock.patch.object(cache, "can_tell", return_value=False):
        assert kept_with(part, [x], "key", lambda: Index(1)) is not kept_with(part, [x], "key", lambda: Index(1))
    assert not part


def test_what_is_written_while_it_is_built_is_seen_by_the_next_call():
    part, x = OrderedDict(), torch.zeros(2)

    def build() -> Index:
        x.numpy()[0] += 1
        return Index(1)

    kept_with(part, [x], "key", build)
    second = kept_with(part, [x], "key", lambda: Index(1))
    assert kept_with(part, [x], "key", AssertionError) is second


def test_what_a_graph_reads_is_kept_for_good(captures: mock.Mock):
    part, x = OrderedDict(), torch.zeros(2)
    plain = weakref.ref(kept(part, "key", lambda: Index(1)))
    of_tensor = weakref.ref(kept_with(part, [x], "other", lambda: Index(1)))
    part.clear()
    del x
    gc.collect()
    assert plain() is not None and of_tensor() is not None
    captures.return_value = False
    freed = weakref.ref(kept(part, "key", lambda: Index(1)))
    part.clear()
    assert freed() is None


def test_what_is_traced_changes_no_part():
    part = OrderedDict()
    first, _ = (kept(part, key, lambda: Index(1)) for key in "ab")
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
        assert kept(part, "a", AssertionError) is first
        kept(part, "c", lambda: Index(1))
    assert list(part) == ["a", "b"]


def test_all_that_an_index_keeps_counts():
    layout = torch.rand(2, 6, 6, generator=seeded()) < 0.5
    index = BlockIndex.build(layout, 16)
    before = size(index)
    assert before >= index.bits.nbytes + index.row_tiles.entries.nbytes + index.column_tiles.entries.nbytes
    index.with_lists()
    with_lists = size(index)
    assert with_lists == before + sum(x.nbytes for x in vars(index.lists).values() if isinstance(x, torch.Tensor))
    cut = index.causal()
    assert size(index) == with_lists + size(cut)
    assert size((MatMul(index, 16, "sdd"), Softmax(index, 16))) == size(index)
    master = MasterLayout(layout, 16)
    assert size(master) == layout.nbytes
    of_master = master.index(96, torch.device("cpu"))
    assert size(master) == layout.nbytes + size(of_master)
    windows = WindowIndex.build(96, 3, dilation=2)
    assert size(windows) == size(windows.blocks) + sum(
        x.nbytes for x in (windows.limits, windows.order, windows.inverse)
    )
    part, x = OrderedDict(), torch.zeros(3)
    kept_with(part, [x, index], "key", lambda: Index(5))
    assert cache._bytes(part) == 5 + x.nbytes
    pairs = TokenIndex.from_mask(torch.ones(4, 5, dtype=torch.bool))
    before = size(pairs)
    _ = pairs.by_key
    assert size(pairs) == before + sum(x.nbytes for x in pairs.by_key)


def size(*values) -> int:
    return cache._bytes(OrderedDict(enumerate(values)))
