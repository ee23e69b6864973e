"""The cache of indices: what is kept, for how long and in how much memory, in threads, forks, traces and captures; and
whether a tensor still holds what it held."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from unittest import mock

import pytest
import torch
from helpers import seeded
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_sparse import BlockIndex, TokenIndex, block_sparse_attention
from ds_sparse.index import cache
from ds_sparse.index.cache import Cache, Contents, Refusal, can_tell, memory_of
from ds_sparse.index.master_layout import MasterLayout
from ds_sparse.ops import MatMul, Softmax


class Index:
    """A holder of so many bytes."""

    def __init__(self, size: int = 1):
        self.memory = torch.zeros(size, dtype=torch.uint8)

    def _held(self) -> Iterator[torch.Tensor]:
        yield self.memory


def keys(kept: Cache) -> list:
    return [key for key, _ in kept.items()]


@pytest.mark.parametrize(
    ("asked", "left"),
    [
        ({"a": 30, "b": 30, "c": 30}, "abc"),
        ({"a": 30, "b": 30, "c": 30, "d": 30}, "bcd"),
        ({"a": 30, "b": 30, "c": 70}, "bc"),
        ({"a": 10, "b": 1000}, "b"),
    ],
)
def test_what_was_used_last_is_kept_in_so_many_bytes(asked: dict[str, int], left: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "BYTES", 100)
    kept = Cache()
    for key, size in asked.items():
        kept.get(key, partial(Index, size))
    assert keys(kept) == list(left)
    kept.get(left[0], AssertionError)
    assert keys(kept) == [*left[1:], left[0]]


def test_a_cache_keeps_so_many_and_memory_that_is_shared_counts_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "BYTES", 100)
    kept, index = Cache(most=3), Index(60)
    for key in range(5):
        kept.get(key, lambda: (index, index))
    assert keys(kept) == [2, 3, 4]


def test_threads_build_once():
    kept, built, start = Cache(), [], threading.Barrier(8)

    def build() -> Index:
        built.append(Index())
        return built[-1]

    def ask(found: list) -> None:
        start.wait()
        found += [kept.get(key % 4, build) for key in range(100)]

    found = [[] for _ in range(8)]
    threads = [threading.Thread(target=ask, args=(of_one,)) for of_one in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 4 and all(of_one == found[0] for of_one in found)


def test_a_process_forked_while_another_thread_builds_waits_for_nobody():
    kept, building, forked = Cache(), threading.Event(), threading.Event()

    def build() -> Index:
        building.set()
        forked.wait(60)
        return Index()

    thread = threading.Thread(target=kept.get, args=("key", build))
    thread.start()
    building.wait(60)
    child = os.fork()
    if child == 0:
        alarm = threading.Timer(10, os._exit, [1])  # where the lock were still held
        alarm.daemon = True
        alarm.start()
        kept.get("other", lambda: None)
        os._exit(0)
    forked.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_what_is_made_of_tensors_lasts_until_one_changes_or_goes():
    kept, tensors = Cache(), [torch.zeros(2), torch.zeros(3)]
    first = kept.get("key", Index, owners=tensors)
    assert kept.get("key", AssertionError, owners=tensors) is first
    assert kept.get("other", Index, owners=tensors) is not first
    assert kept.find("key", tensors) is first and kept.find("key", tensors[::-1]) is kept.find("key") is None
    tensors[1].numpy()[0] = 1
    assert kept.find("key", tensors) is None
    changed = kept.get("key", Index, owners=tensors)
    assert changed is not first and kept.get("key", AssertionError, owners=tensors) is changed
    assert [value for _, value in kept.items()][-1] is changed and len(keys(kept)) == 2
    del tensors[1]
    gc.collect()
    assert not keys(kept)


def test_what_is_written_while_it_is_built_is_seen_by_the_next_call():
    kept, x = Cache(), torch.zeros(2)

    def build() -> Index:
        x.numpy()[0] += 1
        return Index()

    kept.get("key", build, owners=[x])
    second = kept.get("key", Index, owners=[x])
    assert kept.get("key", AssertionError, owners=[x]) is second


def test_what_a_graph_reads_is_kept_for_good(captures: mock.Mock):
    kept, x = Cache(most=1), torch.zeros(2)
    found = [weakref.ref(kept.get("key", Index)), weakref.ref(kept.get("other", Index, owners=[x]))]
    captures.return_value = False
    found.append(weakref.ref(kept.get("last", Index)))
    del x, kept
    gc.collect()
    assert [ref() is None for ref in found] == [False, False, True]


REFUSAL = Refusal("It cannot be built", "do that.", "do this.")


def test_a_trace_changes_no_cache_and_builds_nothing_that_is_refused():
    kept, x = Cache(), torch.zeros(2)
    first, of_tensor = kept.get("a", Index), kept.get("b", Index, owners=[x])
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
        assert kept.get("a", AssertionError, REFUSAL) is first
        assert kept.get("b", Index, owners=[x]) is not of_tensor, "whether x is changed is not known there"
        kept.get("c", Index)
        for owners in ([], [x]):
            with pytest.raises(RuntimeError, match=r"^It cannot be built under torch.compile; do that\.$"):
                kept.get("c", Index, REFUSAL, owners=owners)
    assert keys(kept) == ["a", ("b", id(x))]


def test_a_capture_builds_nothing_that_is_refused(captures: mock.Mock):
    kept, gpu = Cache(), torch.device("cuda")
    with pytest.raises(RuntimeError, match=r"^It cannot be built while a CUDA graph is captured; do this\.$"):
        kept.get("a", Index, REFUSAL, gpu)
    found = kept.get("a", Index, REFUSAL)
    assert kept.get("a", Index, REFUSAL, gpu) is found


def test_a_capture_is_one_on_a_gpu_and_not_in_a_trace(captures: mock.Mock):
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert cache.is_captured(gpu) and not cache.is_captured(cpu)
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
        assert not cache.is_captured(gpu)
    captures.return_value = False
    assert not cache.is_captured(gpu)


def test_all_that_an_index_keeps_counts():
    layout = torch.rand(2, 6, 6, generator=seeded()) < 0.5
    index = BlockIndex.build(layout, 16)
    before = memory_of(index)
    lists = (x.nbytes for x in vars(index.with_lists().lists).values() if isinstance(x, torch.Tensor))
    assert memory_of(index) == before + sum(lists)
    with_lists, cut = memory_of(index), index.causal()
    assert memory_of(index) == with_lists + memory_of(cut)
    kept, x = Cache(), torch.zeros(3)
    kept.get("operations", lambda: (MatMul(index, 16, "sdd"), Softmax(index, 16)))
    assert memory_of(kept) == memory_of(index)
    kept.get("key", lambda: Index(5), owners=[x, index])
    assert memory_of(kept) == memory_of(index) + 5 + x.nbytes
    master = MasterLayout(layout, 16)
    of_master = master.index(96, torch.device("cpu"))
    assert memory_of(master) == layout.nbytes + memory_of(of_master)
    pairs = TokenIndex.from_mask(torch.ones(4, 5, dtype=torch.bool))
    before = memory_of(pairs)
    made = sum(x.nbytes for x in pairs.by_key)
    assert memory_of(pairs) == before + made


TENSORS = {
    "bools": torch.eye(3, dtype=torch.bool),
    "integers": torch.eye(3, dtype=torch.int64),
    "with a gradient": torch.eye(3).requires_grad_(),
    "bfloat16": torch.eye(3, dtype=torch.bfloat16),
    "transposed": torch.ones(3, 2).T,
    "a part": torch.zeros(4, 4)[1:3, ::2],
    "expanded": torch.zeros(1, 2, 2).expand(3, 2, 2),
    "one number": torch.tensor(0),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_every_value_counts(kind: str):
    x = TENSORS[kind]
    for place in range(x.numel()):
        held = Contents(x)
        assert held.are_of(x) and held.are_of(x.detach())
        index = torch.unravel_index(torch.tensor(place), x.shape)
        x.data[index] = 1 - x.data[index].int()
        assert not held.are_of(x)


def test_a_tensor_of_nothing_holds_the_same():
    x = torch.empty(0, 2)
    assert Contents(x).are_of(x) and Contents(x).copy is None


def test_memory_that_a_tensor_has_left_is_not_looked_at():
    x = torch.zeros(64)
    held, first = Contents(x), x.data
    x.data = torch.ones(64)
    assert not held.are_of(x)
    first.fill_(1)
    x.data.fill_(0)
    assert held.are_of(x)


def test_the_same_bytes_in_another_form_are_something_else():
    x = torch.tensor([[1, 0], [0, 1]])
    held = Contents(x)
    for other in (torch.tensor([[1, 0, 0, 1]]), x.T, x.to(torch.float64).view(torch.int64), x.view(torch.float64)):
        assert not held.are_of(other)
    across, down = torch.tensor([1, 0]).expand(2, 2), torch.tensor([[1], [0]]).expand(2, 2)
    assert not Contents(across).are_of(down)
    x.data = torch.tensor([[1, 0, 0, 1]])
    assert not held.are_of(x)


@pytest.mark.parametrize("is_contiguous", [True, False])
@pytest.mark.parametrize("shape", [(5, 3), (1, 5, 3), (2, 5, 3)], ids=str)
def test_of_some_rows_no_others_are_looked_at(shape: tuple[int, ...], is_contiguous: bool):
    for row in range(5):
        x = torch.zeros(shape, dtype=torch.int32)
        x = x if is_contiguous else torch.stack([x, x], -1)[..., 0]
        held = Contents(x)
        x[..., row, 1] = 1
        for rows in (range(2), range(1, 4), range(4, 9), range(7, 9)):
            assert held.are_of(x, rows) == (is_contiguous and row not in rows)
        assert not held.are_of(x) and held.copy.sum() == 0


def test_a_look_is_made_inside_of_transforms_and_modes():
    x = torch.ones(3, 2).T
    held = Contents(x)
    seen = []

    def look(y: torch.Tensor) -> torch.Tensor:
        seen.append(held.are_of(x) and Contents(x).are_of(x))
        return y.sum()

    torch.func.grad(look)(torch.ones(2))
    torch.vmap(look)(torch.ones(2, 2))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        seen.append(held.are_of(x))
    assert seen == [True] * 3


def test_what_nothing_tells_of_a_change_keeps_nothing():
    with FakeTensorMode():
        x = torch.ones(2)
    assert not can_tell(x)
    with torch.inference_mode():
        here, elsewhere = torch.ones(2), torch.ones(2, device="meta")
    assert can_tell(here) and not can_tell(elsewhere) and Contents(here).are_of(here)
    with pytest.raises(ValueError, match="Nothing tells"):
        Contents(x)
    kept = Cache()
    assert kept.get("key", Index, owners=[x]) is not kept.get("key", Index, owners=[x]) and not keys(kept)


def test_elsewhere_than_on_the_cpu_the_count_of_changes_tells():
    x = torch.ones(2, device="meta")
    held = Contents(x)
    assert held.are_of(x) and held.copy is None
    x.add_(1)
    assert not held.are_of(x)


def test_the_environment_says_whether_a_gpu_is_looked_at():
    code = (
        "import importlib, os; from ds_sparse.index import cache\n"
        "for text in ('1', '0', '', None):\n"
        "    os.environ.pop('DS_SPARSE_CHECK_LAYOUTS', None)\n"
        "    os.environ |= {} if text is None else {'DS_SPARSE_CHECK_LAYOUTS': text}\n"
        "    print(importlib.reload(cache).COMPARED_ON_GPU)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["True", "False", "False", "False"]


def test_no_values_are_looked_at_in_a_capture(captures: mock.Mock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "COMPARED_ON_GPU", True)
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    x = torch.ones(2, device="meta")
    held = Contents(x)
    assert held.copy is not None and held.are_of(x)
    captures.return_value = False
    assert not held.are_of(x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_a_gpu_is_looked_at_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "COMPARED_ON_GPU", True)
    x, layout = torch.randn(1, 1, 32, 8, device="cuda"), torch.ones(2, 2, dtype=torch.bool, device="cuda")
    block_sparse_attention(x, x, x, layout)
    layout.data[0, 1] = False
    index = BlockIndex.build(layout, 16)
    assert torch.equal(block_sparse_attention(x, x, x, layout), block_sparse_attention(x, x, x, index))
    held = Contents(layout)
    layout.data[0, 0] = False
    assert not held.are_of(layout)
