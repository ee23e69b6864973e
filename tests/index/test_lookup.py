"""The index of what a call was given: built once, again after a change, and kept for a CUDA graph."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from ds_sparse import TokenIndex, block_sparse_attention, sparse_attn, sparse_matmul, sparse_matmul_vo, window_attention
from ds_sparse.index import cache, lookup
from ds_sparse.index.lookup import copy_of, index_of_layout, index_of_lists, index_of_window, packed_pairs_of
from ds_sparse.index.packed_pairs import mask_of_documents
from ds_sparse.index.window_sizes import WindowNumbers

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


def of_packed_pairs() -> tuple:
    cu_seqlens, x = torch.tensor([0, 2, 5]), torch.ones(1, 1, 5, 8)
    index = TokenIndex.from_mask(torch.ones(3, 3, dtype=torch.bool))
    return cu_seqlens[1:2], lambda: sparse_attn(x, x, x, index, cu_seqlens=cu_seqlens)


PARTS = {
    "layout": (of_a_layout, "_of_layouts"),
    "window": (of_a_window, "_of_windows"),
    "pairs": (of_pairs, "_of_lists"),
    "packed pairs": (of_packed_pairs, "_of_packed_pairs"),
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


def by_another_view(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy())


WRITES = {
    "numpy": torch.Tensor.numpy,
    "data": lambda x: x.data,
    "another view": by_another_view,
    "in place": lambda x: x,
}
"""What shares the memory of a tensor, and is written to; PyTorch counts the last alone."""


def attention_on(layout: torch.Tensor) -> torch.Tensor:
    x = torch.arange(32.0 * 8).view(1, 1, 32, 8).sin()
    return block_sparse_attention(x, x, x, layout)


def attention_of_lists(values: torch.Tensor) -> torch.Tensor:
    x = torch.arange(16.0).view(1, 2, 8)
    return sparse_attn(x, x, x, values, torch.tensor([1, 3]))


def attention_of_ends(ends: torch.Tensor) -> torch.Tensor:
    x = torch.arange(16.0).view(1, 2, 8)
    return sparse_attn(x, x, x, torch.tensor([0, 1, 0]), ends)


def attention_of_documents(cu_seqlens: torch.Tensor) -> torch.Tensor:
    x = torch.arange(24.0).view(1, 1, 3, 8).sin()
    return sparse_attn(x, x, x, ALL, cu_seqlens=cu_seqlens)


def attention_of_a_row(values: torch.Tensor) -> torch.Tensor:
    x, arguments = torch.arange(24.0).view(3, 1, 8).sin(), {"cu_seqlens": EDGES, "document_layout": "row"}
    return sparse_attn(x, x, x, values, torch.tensor([1, 2, 4]), **arguments)


def scores_of_lists(values: torch.Tensor) -> torch.Tensor:
    x = torch.arange(16.0).view(1, 2, 8)
    return sparse_matmul_vo(x, x, [values], [torch.tensor([1, 3])])[0]


def scores_of_pairs(pairs: torch.Tensor) -> torch.Tensor:
    x = torch.arange(16.0).view(1, 2, 8)
    return sparse_matmul(x, x, pairs)


ALL, EDGES = TokenIndex.from_mask(torch.ones(3, 3, dtype=torch.bool)), torch.tensor([0, 1, 3])


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    ("call", "given", "then"),
    [
        (attention_on, torch.ones(2, 2, dtype=torch.bool), [[True, False], [True, True]]),
        (attention_on, torch.ones(1, 2, 2, dtype=torch.int64), [[[1, 0], [0, 1]]]),
        (attention_on, torch.ones(2, 2).T, [[1, 0], [1, 1]]),
        (attention_of_lists, torch.tensor([0, 1, 0]), [1, 0, 1]),
        (attention_of_ends, torch.tensor([1, 3]), [2, 3]),
        (attention_of_documents, torch.tensor([0, 1, 3]), [0, 2, 3]),
        (attention_of_a_row, torch.tensor([0, 1, 1, 2]), [0, 2, 1, 2]),
        (scores_of_lists, torch.tensor([0, 1, 0]), [1, 0, 1]),
        (scores_of_pairs, torch.tensor([[0, 0], [1, 1]]), [[0, 1], [1, 0]]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_write_counts_however_it_is_made(write: str, call: Callable, given: torch.Tensor, then: list):
    given = given.clone()
    before = call(given)
    WRITES[write](given)[...] = WRITES[write](torch.tensor(then, dtype=given.dtype))
    assert torch.equal(call(given), call(given.clone())) and not torch.equal(call(given), before)


def test_tensors_made_in_inference_mode_are_kept_until_they_change():
    with torch.inference_mode():
        layout = torch.ones(2, 2, dtype=torch.bool)
    first, cpu = index_of_layout(layout, 16, torch.device("cpu")), torch.device("cpu")
    assert index_of_layout(layout, 16, cpu) is first
    with torch.inference_mode():
        layout[0, 1] = False
    assert index_of_layout(layout, 16, cpu).live_blocks == 3


def test_a_layout_for_each_sample_gets_a_sentence():
    x = torch.ones(1, 1, 32, 8)
    with pytest.raises(ValueError, match="The layout is another one for each sample of torch.vmap"):
        torch.vmap(lambda layout: block_sparse_attention(x, x, x, layout))(torch.ones(3, 2, 2))


def test_a_layout_has_an_index_for_each_block_and_device():
    layout, cpu, meta = torch.ones(2, 2, dtype=torch.bool), torch.device("cpu"), torch.device("meta")
    index = index_of_layout(layout, 16, cpu)
    assert index_of_layout(layout, 32, cpu).block == 32 and index_of_layout(layout, 16, cpu) is index
    assert index_of_layout(layout, 16, meta) is index
    copied = copy_of(index, meta)
    assert copied.device == meta and copy_of(index, meta) is copied


def test_pairs_of_documents_are_kept_for_each_index_and_document_layout():
    own = packed_pairs_of(ALL, EDGES, "own")
    assert packed_pairs_of(ALL, EDGES, "own") is own
    assert packed_pairs_of(ALL, EDGES, "row") is not own
    other = TokenIndex.from_mask(torch.ones(3, 3, dtype=torch.bool).tril())
    assert packed_pairs_of(other, EDGES, "own").num_pairs == 4 and own.num_pairs == 5


@pytest.mark.parametrize("kind", [kind for kind in PARTS if kind != "window"])
def test_a_graph_of_torch_compile_ends_where_an_index_has_to_be_built(kind: str):
    torch._dynamo.reset()
    _, call = PARTS[kind][0]()
    expected = call()
    with pytest.raises(Exception, match="under torch.compile; "):
        torch.compile(call, backend="eager", fullgraph=True)()
    with warnings.catch_warnings(action="error", category=UserWarning):
        compiled = torch.compile(call, backend="eager")
        assert torch.equal(compiled(), expected) and torch.equal(compiled(), expected)


def test_nothing_is_built_in_a_trace_or_a_capture(captures: mock.Mock):
    layout, gpu = torch.ones(2, 2, dtype=torch.bool), torch.device("cuda")
    with pytest.raises(RuntimeError, match="captured; pass BlockIndex.build.*or call once before the capture"):
        index_of_layout(layout, 16, gpu)
    with pytest.raises(RuntimeError, match="captured; pass WindowIndex.build.*or call once before the capture"):
        index_of_window(64, WindowNumbers((3,), False, (), (1,)), gpu)
    pairs = mock.Mock(spec=torch.Tensor, device=gpu, _version=0, is_cpu=False)
    pairs.is_inference.return_value = False
    with pytest.raises(RuntimeError, match="captured; build a TokenIndex before.*or call once before the capture"):
        index_of_lists(AssertionError, (pairs,), 4, 5)
    index = mock.Mock(spec=TokenIndex, device=gpu)
    with pytest.raises(RuntimeError, match="captured; pass index.packed.*or call once before the capture"):
        packed_pairs_of(index, torch.tensor([0, 3]), "own")
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
        with pytest.raises(RuntimeError, match="under torch.compile; pass BlockIndex.build.*on the device of query"):
            index_of_layout(layout, 16, gpu)
        with pytest.raises(RuntimeError, match="under torch.compile; build a TokenIndex before"):
            index_of_lists(AssertionError, (pairs,), 4, 5)
        with pytest.raises(RuntimeError, match="under torch.compile; pass index.packed.*without cu_seqlens"):
            packed_pairs_of(ALL, EDGES, "own")
        with pytest.raises(RuntimeError, match="under torch.compile; give the mask of the whole row"):
            mask_of_documents(layout, EDGES, "own", 3)
