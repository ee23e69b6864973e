"""The index of what a call was given: built once, again after a change, and kept for a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from ds_sparse import TokenIndex, block_sparse_attention, sparse_attn, sparse_matmul, sparse_matmul_vo, window_attention
from ds_sparse.index import cache, lookup
from ds_sparse.index.cache import Cache
from ds_sparse.index.lookup import copy_of, index_of_layout, index_of_lists, index_of_window, packed_pairs_of
from ds_sparse.index.packed import mask_of_documents
from ds_sparse.index.window_sizes import WindowNumbers

OF_LOOKUPS = [name for name, kept in vars(lookup).items() if isinstance(kept, Cache)]
CPU = torch.device("cpu")
ENDS = torch.tensor([1, 3])
ALL, EDGES = TokenIndex.from_mask(torch.ones(3, 3, dtype=torch.bool)), torch.tensor([0, 1, 3])


def waves(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape).float().sin()


def attention_on(layout: torch.Tensor) -> torch.Tensor:
    x = waves(1, 1, 32, 8)
    return block_sparse_attention(x, x, x, layout)


def attention_of_a_window(_: None) -> torch.Tensor:
    x = waves(1, 1, 32, 8)
    return window_attention(x, x, x, 3)


def attention_of_lists(values: torch.Tensor) -> torch.Tensor:
    x = waves(1, 2, 8)
    return sparse_attn(x, x, x, values, ENDS)


def attention_of_ends(ends: torch.Tensor) -> torch.Tensor:
    x = waves(1, 2, 8)
    return sparse_attn(x, x, x, torch.tensor([0, 1, 0]), ends)


def attention_of_documents(cu_seqlens: torch.Tensor) -> torch.Tensor:
    x = waves(1, 1, 3, 8)
    return sparse_attn(x, x, x, ALL, cu_seqlens=cu_seqlens)


def attention_of_a_row(values: torch.Tensor) -> torch.Tensor:
    x, arguments = waves(3, 1, 8), {"cu_seqlens": EDGES, "document_layout": "row"}
    return sparse_attn(x, x, x, values, torch.tensor([1, 2, 4]), **arguments)


def scores_of_lists(values: torch.Tensor) -> torch.Tensor:
    x = waves(1, 2, 8)
    return sparse_matmul_vo(x, x, [values], [torch.tensor([1, 3])])[0]


def scores_of_pairs(pairs: torch.Tensor) -> torch.Tensor:
    x = waves(1, 2, 8)
    return sparse_matmul(x, x, pairs)


CALLS = [
    (attention_on, torch.ones(2, 2, dtype=torch.bool), [[True, False], [True, True]]),
    (attention_of_lists, torch.tensor([0, 1, 0]), [1, 0, 1]),
    (attention_of_documents, torch.tensor([0, 1, 3]), [0, 2, 3]),
]
"""A call, what it is given, and other values of that."""


@pytest.mark.parametrize(("call", "given", "then"), [*CALLS, (attention_of_a_window, None, None)])
def test_operations_keep_their_indices_here(call: Callable, given, then, captures, monkeypatch: pytest.MonkeyPatch):
    kept = Cache()
    for name in OF_LOOKUPS:
        monkeypatch.setattr(lookup, name, kept)
    given = None if given is None else given.clone()
    captures.return_value = False
    expected = call(given)
    (entry,) = kept.items()
    assert torch.equal(call(given), expected) and kept.items() == [entry] and not cache.captured
    captures.return_value = True
    call(given)
    assert cache.captured == {entry[1]}
    if given is not None:
        captures.return_value = False
        given.copy_(torch.tensor(then))
        call(given)
        assert entry not in kept.items()


@pytest.mark.parametrize(("call", "given", "then"), CALLS)
def test_a_graph_of_torch_compile_ends_where_an_index_has_to_be_built(call: Callable, given: torch.Tensor, then):
    torch._dynamo.reset()
    expected = call(given)
    with pytest.raises(Exception, match="under torch.compile; "):
        torch.compile(call, backend="eager", fullgraph=True)(given)
    with warnings.catch_warnings(action="error", category=UserWarning):
        compiled = torch.compile(call, backend="eager")
        assert torch.equal(compiled(given), expected) and torch.equal(compiled(given), expected)


WRITES = {
    "numpy": torch.Tensor.numpy,
    "data": lambda x: x.data,
    "another view": lambda x: torch.from_numpy(x.numpy()),
    "in place": lambda x: x,
}
"""What shares the memory of a tensor, and is written to; PyTorch counts the last alone."""


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    ("call", "given", "then"),
    [
        *CALLS,
        (attention_on, torch.ones(1, 2, 2, dtype=torch.int64), [[[1, 0], [0, 1]]]),
        (attention_on, torch.ones(2, 2).T, [[1, 0], [1, 1]]),
        (attention_of_ends, torch.tensor([1, 3]), [2, 3]),
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


def test_a_layout_for_each_sample_gets_a_sentence():
    x = torch.ones(1, 1, 32, 8)
    with pytest.raises(ValueError, match="The layout is another one for each sample of torch.vmap"):
        torch.vmap(lambda layout: block_sparse_attention(x, x, x, layout))(torch.ones(3, 2, 2))


def test_a_layout_has_an_index_for_each_block_and_device():
    layout, meta = torch.ones(2, 2, dtype=torch.bool), torch.device("meta")
    index = index_of_layout(layout, 16, CPU)
    assert index_of_layout(layout, 32, CPU).block == 32 and index_of_layout(layout, 16, CPU) is index
    assert index_of_layout(layout, 16, meta) is index
    copied = copy_of(index, meta)
    assert copied.device == meta and copy_of(index, meta) is copied


def test_pairs_of_documents_are_kept_for_each_index_and_document_layout():
    own = packed_pairs_of(ALL, EDGES, "own")
    assert packed_pairs_of(ALL, EDGES, "own") is own
    assert packed_pairs_of(ALL, EDGES, "row") is not own
    other = TokenIndex.from_mask(torch.ones(3, 3, dtype=torch.bool).tril())
    assert packed_pairs_of(other, EDGES, "own").num_pairs == 4 and own.num_pairs == 5


def test_indices_of_one_kind_leave_those_of_others(monkeypatch: pytest.MonkeyPatch):
    for name in OF_LOOKUPS:
        monkeypatch.setattr(lookup, name, Cache(most=1))
    layouts = torch.ones(2, 2, 2, dtype=torch.bool).unbind()
    pairs, first, second = packed_pairs_of(ALL, EDGES, "own"), *(index_of_layout(x, 16, CPU) for x in layouts)
    assert packed_pairs_of(ALL, EDGES, "own") is pairs and index_of_layout(layouts[1], 16, CPU) is second
    assert index_of_layout(layouts[0], 16, CPU) is not first


def test_nothing_is_built_in_a_trace_or_a_capture(captures: mock.Mock):
    layout, gpu = torch.ones(2, 2, dtype=torch.bool), torch.device("cuda")
    pairs = mock.Mock(spec=torch.Tensor, device=gpu, is_cpu=False)
    index = mock.Mock(spec=TokenIndex, device=gpu)
    lookups = {
        "pass BlockIndex.build": lambda: index_of_layout(layout, 16, gpu),
        "pass WindowIndex.build": lambda: index_of_window(64, WindowNumbers((3,), False, (), (1,)), gpu),
        "build a TokenIndex before": lambda: index_of_lists(AssertionError, (pairs,), 4, 5),
        "pass index.packed.*without cu_seqlens": lambda: packed_pairs_of(index, torch.tensor([0, 3]), "own"),
    }
    for instead, look in lookups.items():
        with pytest.raises(RuntimeError, match=f"captured; {instead}.*or call once before the capture"):
            look()
    lookups["give the mask of the whole row"] = lambda: mask_of_documents(layout, EDGES, "own", 3)
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
        for instead, look in lookups.items():
            with pytest.raises(RuntimeError, match=f"under torch.compile; {instead}"):
                look()
