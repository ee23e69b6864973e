"""The index of what a call was given: built once, again after a change, and kept for a CUDA graph."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from unittest import mock

import pytest
import torch

from ds_sparse import TokenIndex, block_sparse_attention, sparse_attn, window_attention
from ds_sparse.index import cache, lookup
from ds_sparse.index.lookup import copy_of, index_of_layout, index_of_lists, index_of_window

VALUES, ENDS = [0, 4, 1, 2], [1, 1, 3, 4]


def of_a_layout() -> tuple:
    layout, x = torch.ones(2, 2, dtype=torch.bool), torch.ones(1, 1, 32, 8)
    return layout, lambda: block_sparse_attention(x, x, x, layout)


def of_a_window() -> tuple:
    x = torch.ones(1, 1, 32, 8)
    return None, lambda: window_attention(x, x, x, 3)


def of_pairs() -> tuple:
    values, offsets, x = torch.tensor([0, 1, 0]), torch.tensor([1, 3]), torch.ones(1, 2, 8)
    return values, lambda: sparse_attn(x, x, x, values, offsets)


PARTS = {
    "layout": (of_a_layout, "_of_layouts"),
    "window": (of_a_window, "_of_windows"),
    "pairs": (of_pairs, "_of_lists"),
}


@pytest.mark.parametrize("kind", PARTS)
def test_operations_keep_their_indices_here(kind: str, captures: mock.Mock, monkeypatch: pytest.MonkeyPatch):
    make, name = PARTS[kind]
    part = OrderedDict()
    monkeypatch.setattr(lookup, name, part)
    captures.return_value = False
    given, call = make()
    expected = call()
    (entry,) = part.values()
    assert torch.equal(call(), expected) and list(part.values()) == [entry] and not cache.captured
    captures.return_value = True
    call()
    assert cache.captured == {entry}
    if given is not None:
        captures.return_value = False
        given ^= True if given.dtype == torch.bool else 1
        call()
        assert list(part.values()) != [entry]


def test_an_index_is_kept_until_its_tensors_change_or_go():
    values, ends = torch.tensor(VALUES), torch.tensor(ENDS)
    built = []

    def index(*tensors: torch.Tensor) -> TokenIndex:
        def build() -> TokenIndex:
            built.append(1)
            return TokenIndex.from_csr(*tensors, 4, 5)

        return index_of_lists(build, tensors, 4, 5)

    first = index(values, ends)
    assert index(values, ends) is first and len(built) == 1
    values[0] = 3
    second = index(values, ends)
    assert second is not first and int(second.columns[0]) == 3
    ends[0] = 0
    assert index(values, ends).row_offsets.tolist() == [0, 0, 1, 3, 4]
    assert index(values, ends.clone()) is not index(values, ends)
    kept = weakref.ref(index(values, ends))
    del values
    gc.collect()
    assert kept() is None


def test_tensors_made_in_inference_mode_are_read_each_time():
    with torch.inference_mode():
        values, ends = torch.tensor(VALUES), torch.tensor(ENDS)
        made = [index_of_lists(lambda: TokenIndex.from_csr(values, ends, 4, 5), (values, ends), 4, 5) for _ in range(2)]
    assert made[0] is not made[1]


def test_a_layout_has_an_index_for_each_block_and_device():
    layout, cpu, meta = torch.ones(2, 2, dtype=torch.bool), torch.device("cpu"), torch.device("meta")
    index = index_of_layout(layout, 16, cpu)
    assert index_of_layout(layout, 32, cpu).block == 32 and index_of_layout(layout, 16, cpu) is index
    assert index_of_layout(layout, 16, meta) is index
    copied = copy_of(index, meta)
    assert copied.device == meta and copy_of(index, meta) is copied


def test_nothing_is_built_in_a_trace_or_a_capture(captures: mock.Mock):
    layout, gpu = torch.ones(2, 2, dtype=torch.bool), torch.device("cuda")
    with pytest.raises(RuntimeError, match="captured; pass BlockIndex.build.*or call once before the capture"):
        index_of_layout(layout, 16, gpu)
    with pytest.raises(RuntimeError, match="captured; pass WindowIndex.build.*or call once before the capture"):
        index_of_window(64, (3,), False, (), (1,), gpu)
    pairs = mock.Mock(spec=torch.Tensor, device=gpu, _version=0)
    pairs.is_inference.return_value = False
    with pytest.raises(RuntimeError, match="captured; build a TokenIndex before.*or call once before the capture"):
        index_of_lists(AssertionError, (pairs,), 4, 5)
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
        with pytest.raises(RuntimeError, match="under torch.compile; pass BlockIndex.build.*on the device of query"):
            index_of_layout(layout, 16, gpu)
        with pytest.raises(RuntimeError, match="under torch.compile; build a TokenIndex before"):
            index_of_lists(AssertionError, (pairs,), 4, 5)
