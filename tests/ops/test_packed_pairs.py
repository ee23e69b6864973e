"""Attention over token pairs of documents packed in one row: the same as a call for each document."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from fuzz.compare import hold
from fuzz.documents import Documents
from fuzz.pairs import attention_case
from helpers import Pairs, leaf, random, seeded

from ds_sparse import (
    TokenIndex,
    gather_attention,
    jagged_attention,
    masked_attention,
    sparse_attn,
    torch_sparse_attention,
)
from ds_sparse.index.kernels import TOKEN_OPERATORS
from ds_sparse.ops import missing_kernels

OPERATORS = ()  # the steps are plain PyTorch, on any device
LENGTHS = (20, 1, 0, 37, 64, 9)
TOKENS, HEADS, LONGEST = sum(LENGTHS), 3, max(LENGTHS)
STEPS = (sparse_attn, gather_attention, jagged_attention, torch_sparse_attention, masked_attention)
CPU_CU_SEQLENS = torch.tensor([0, *LENGTHS]).cumsum(0).int()


@pytest.fixture(params=STEPS, ids=lambda step: step.__name__)
def step(request: pytest.FixtureRequest, device: str) -> Callable[..., Any]:
    if request.param is sparse_attn and missing_kernels(device, TOKEN_OPERATORS):
        pytest.skip(f"no {device} kernels here for token pairs")
    return request.param


def mask_for(document_layout: str, heads: int = 1, more: int = 3) -> torch.Tensor:
    """Pairs of one document, or of the row, for some tokens more than there are; with rows that see nothing."""
    tokens = (LONGEST if document_layout == "own" else TOKENS) + more
    mask = torch.rand(heads, tokens, tokens, generator=seeded(heads)) < 0.3
    mask[0, 5] = False
    return mask


def pairs_for(step: Callable[..., Any], mask: torch.Tensor, device: str) -> torch.Tensor | TokenIndex:
    return mask.to(device) if step is masked_attention else TokenIndex.from_mask(mask).to(device)


def operands(device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k and v, whose head size is another, (1, H, T, D)."""
    return [leaf(random(seeded(i), 1, HEADS, TOKENS, d, dtype=dtype), device) for i, d in enumerate((16, 16, 8))]


@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("document_layout", ["own", "row"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_packed_documents_are_as_separate_calls(
    step: Callable[..., Any], device: str, dtype: torch.dtype, document_layout: str, heads: int
):
    if step is torch_sparse_attention and dtype == torch.bfloat16:
        pytest.skip("torch.sparse takes float32 and float64")
    if step is masked_attention:
        pytest.skip("masks of documents are another test's")
    mask = mask_for(document_layout, heads)
    lists = Pairs(tuple(x.nonzero() for x in mask), 1, heads, *mask.shape[1:])
    tensors = dict(zip("qkv", (x.detach() for x in operands("cpu", dtype))))
    documents = Documents(CPU_CU_SEQLENS, document_layout)
    case = attention_case(step.__name__, tensors, lists, documents=documents, return_lse=step is sparse_attn)
    hold(case, device)


@pytest.mark.parametrize("document_layout", ["own", "row"])
@pytest.mark.parametrize("form", ["tokens first", "nested"])
def test_other_forms_of_a_packed_row_give_the_same(
    step: Callable[..., Any], device: str, form: str, document_layout: str
):
    given, cu_seqlens = operands(device), CPU_CU_SEQLENS.to(device)
    pairs = pairs_for(step, mask_for(document_layout, HEADS), device)
    first = [x[0].transpose(0, 1) for x in given]
    expected = step(*given, pairs, cu_seqlens=cu_seqlens, document_layout=document_layout)
    if form == "tokens first":
        output = step(*first, pairs, cu_seqlens=cu_seqlens, document_layout=document_layout)
        assert output.shape == (TOKENS, HEADS, 8)
        output = output.transpose(0, 1).unsqueeze(0)
    else:
        nested = [torch.nested.nested_tensor_from_jagged(x, cu_seqlens.long()).transpose(1, 2) for x in first]
        output = step(*nested, pairs, document_layout=document_layout)
        assert output.is_nested and output.size(0) == len(LENGTHS) and output.size(1) == HEADS
        output = output.values().unsqueeze(0)
    if step is sparse_attn:
        assert torch.equal(output, expected)
    torch.testing.assert_close(output, expected)  # on a GPU, sums of PyTorch's steps have no fixed order
    weights = torch.arange(output.numel(), device=device).view(output.shape) / output.numel()
    found, right = (torch.autograd.grad((x * weights).sum(), given) for x in (output, expected))
    torch.testing.assert_close(found, right)


def test_lse_comes_in_the_form_of_the_operands(device: str):
    if missing_kernels(device, TOKEN_OPERATORS):
        pytest.skip(f"no {device} kernels here for token pairs")
    given, cu_seqlens = operands(device), CPU_CU_SEQLENS.to(device)
    index = TokenIndex.from_mask(mask_for("own")).to(device)
    _, expected = sparse_attn(*given, index, cu_seqlens=cu_seqlens, return_lse=True)
    first = [x[0].transpose(0, 1) for x in given]
    _, lse = sparse_attn(*first, index, cu_seqlens=cu_seqlens, return_lse=True)
    assert expected.shape == (1, HEADS, TOKENS) and torch.equal(lse.T[None], expected)
    nested = [torch.nested.nested_tensor_from_jagged(x, cu_seqlens.long()).transpose(1, 2) for x in first]
    _, lse = sparse_attn(*nested, index, return_lse=True)
    assert torch.equal(lse.values()[None], expected)


@pytest.mark.parametrize("heads", [1, HEADS])
def test_lists_of_the_row_are_taken_with_the_rows_layout(step: Callable[..., Any], device: str, heads: int):
    if step is masked_attention:
        pytest.skip("it takes a mask")
    index = TokenIndex.from_mask(mask_for("row", heads, more=0)).to(device)
    arguments = {"cu_seqlens": CPU_CU_SEQLENS.to(device), "document_layout": "row"}
    given = operands(device)
    torch.testing.assert_close(step(*given, *index.csr(), **arguments), step(*given, index, **arguments))


def test_a_mask_that_is_added_has_its_gradient_from_all_documents(device: str):
    given, cu_seqlens = operands(device, torch.float64), CPU_CU_SEQLENS.to(device)
    mask = random(seeded(3), HEADS, LONGEST + 2, LONGEST + 2)
    mask = leaf(torch.where(mask < -1, -torch.inf, mask), device)
    found = masked_attention(*given, mask, cu_seqlens=cu_seqlens)
    parts = []
    for first, end in pairwise(CPU_CU_SEQLENS.tolist()):
        size = end - first
        parts.append(masked_attention(*(x[:, :, first:end] for x in given), mask[:, :size, :size]))
    expected = torch.cat(parts, 2)
    torch.testing.assert_close(found, expected)
    grad = random(seeded(4), *found.shape).to(device)
    for ours, right in zip(*(torch.autograd.grad(x, [*given, mask], grad) for x in (found, expected)), strict=True):
        torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("shape", [(), (TOKENS,), (1, TOKENS), (TOKENS, 1), (1, HEADS, 1, 1)], ids=str)
def test_a_mask_of_size_one_stands_for_all_tokens(device: str, shape: tuple[int, ...]):
    given, cu_seqlens = operands(device), CPU_CU_SEQLENS.to(device)
    mask = torch.rand(shape, generator=seeded()) < 0.6
    whole = mask.expand(1, HEADS, TOKENS, TOKENS)
    for document_layout in ("own", "row"):
        arguments = {"cu_seqlens": cu_seqlens, "document_layout": document_layout}
        found, expected = (masked_attention(*given, x.to(device), **arguments) for x in (mask, whole))
        assert torch.equal(found, expected)


def test_pairs_found_before_are_taken_and_compiled(device: str):
    if missing_kernels(device, TOKEN_OPERATORS):
        pytest.skip(f"no {device} kernels here for token pairs")
    given, index = operands(device), TokenIndex.from_mask(mask_for("own")).to(device)
    eager = sparse_attn(*given, index, cu_seqlens=CPU_CU_SEQLENS)
    packed = index.packed(CPU_CU_SEQLENS).prepared()
    assert torch.equal(sparse_attn(*given, packed), eager)
    compiled = torch.compile(lambda *qkv: sparse_attn(*qkv, packed), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*given), eager)
    with pytest.raises(ValueError, match="is that of 6 packed documents already; give it without cu_seqlens"):
        sparse_attn(*given, packed, cu_seqlens=CPU_CU_SEQLENS)


INDEX = TokenIndex.from_mask(mask_for("own"))


@pytest.mark.parametrize(
    ("changed", "error", "sentence"),
    [
        ({"cu_seqlens": torch.tensor([0, 60, 100])}, ValueError, "have 100 tokens together, and query has 131"),
        ({"cu_seqlens": torch.tensor([0, 131])}, ValueError, "pairs are for 67 query and 67 key tokens, and the "
         "longest document has 131; it takes as many of both"),
        ({"cu_seqlens": torch.tensor([0, 90, 80, 131])}, ValueError, "cu_seqlens falls from 90 to 80 at document 1"),
        ({"cu_seqlens": [0, 60, 131]}, TypeError, "cu_seqlens is list; it has to be an int32 or int64 tensor"),
        ({"document_layout": "row"}, ValueError, "pairs are for 67 query and 67 key tokens, and the row has 131"),
        ({"document_layout": "whole"}, ValueError, "document_layout is 'whole'; it has to be 'own', .* or 'row'"),
        ({"document_layout": "row", "cu_seqlens": None}, ValueError, "'row', and there are no packed documents"),
        ({"offsets": torch.zeros(131)}, ValueError, "values is a TokenIndex, which has its offsets"),
        (dict(zip(("values", "offsets"), INDEX.csr())), ValueError, "do not say for how many tokens they are; give a "
         "TokenIndex, such as TokenIndex.from_csr"),
        ({"values": mask_for("own")}, TypeError, "values are a mask; give TokenIndex.from_mask of it"),
        ({"values": INDEX.jagged()}, TypeError, "values are a jagged tensor; give TokenIndex.from_jagged of it"),
        ({"values": TokenIndex.from_mask(mask_for("own", 2))}, ValueError, "lists for 2 heads, and q has 3"),
        ({"values": TokenIndex.from_mask(mask_for("own", 2)[:, None])}, ValueError, "are one row; give lists"),
        ({"q": torch.zeros(2, 3, 131, 16)}, ValueError, r"q \(2, 3, 131, 16\), k .*; packed documents are one row"),
        ({"k": torch.zeros(1, 3, 130, 16)}, ValueError, "queries and keys are the same tokens"),
        ({"q": torch.zeros(131, 16)}, ValueError, r"packed documents are one row, .*: \(1, H, T, D\), or \(T, H, D\)"),
        ({"q": torch.zeros(131, 3, 16)}, ValueError, r"Shapes are q \(131, 3, 16\), k .* all \(1, heads, T, D\)"),
        ({"k": torch.zeros(1, 1, 131, 16)}, ValueError, "equal before the tokens"),
        ({"k": [1]}, TypeError, "k is a list; it has to be a tensor"),
    ],
)  # fmt: skip
def test_what_does_not_fit_packed_documents_is_refused(changed: dict, error: type[Exception], sentence: str):
    q, k, v = operands("cpu")
    given = {"q": q, "k": k, "v": v, "values": INDEX, "cu_seqlens": CPU_CU_SEQLENS}
    with pytest.raises(error, match=sentence):
        sparse_attn(**(given | changed))


@pytest.mark.parametrize(
    ("changed", "error", "sentence"),
    [
        ({"mask": torch.ones(40, 64) > 0}, ValueError, "mask is for 40 query and 64 key tokens, and the longest"),
        ({"document_layout": "row"}, ValueError, "mask is for 67 query and 67 key tokens, and the row has 131"),
        ({"document_layout": "whole"}, ValueError, "document_layout is 'whole'; it has to be 'own', .* or 'row'"),
        ({"document_layout": "row", "cu_seqlens": None}, ValueError, "'row', and there are no packed documents"),
        ({"cu_seqlens": torch.tensor([0, 60, 100])}, ValueError, "end at 100, and query has 131 tokens"),
        ({"mask": mask_for("own", 2)}, ValueError, r"has to broadcast to \(1, 3, 131, 131\)"),
        ({"mask": INDEX}, TypeError, "mask is TokenIndex; it has to be a tensor, bool"),
        ({"q": torch.zeros(2, 3, 131, 16)}, ValueError, r"q \(2, 3, 131, 16\), k .*; packed documents are one row"),
    ],
)  # fmt: skip
def test_masks_that_do_not_fit_packed_documents_are_refused(changed: dict, error: type[Exception], sentence: str):
    q, k, v = operands("cpu")
    given = {"q": q, "k": k, "v": v, "mask": mask_for("own"), "cu_seqlens": CPU_CU_SEQLENS}
    with pytest.raises(error, match=sentence):
        masked_attention(**(given | changed))


def test_nested_tensors_of_other_kinds_are_refused():
    nested = torch.nested.nested_tensor_from_jagged(torch.zeros(TOKENS, HEADS, 16), CPU_CU_SEQLENS.long())
    with pytest.raises(ValueError, match=r"q is a nested tensor that is not jagged \(B, H, tokens, D\) without holes"):
        sparse_attn(nested, nested, nested, INDEX)
    strided = torch.nested.nested_tensor([torch.zeros(HEADS, n, 16) for n in (7, 9)])
    with pytest.raises(ValueError, match=r"q is a nested tensor that is not jagged .* layout=torch\.jagged"):
        sparse_attn(strided, strided, strided, INDEX)
    query = nested.transpose(1, 2)
    with pytest.raises(ValueError, match="give q, k and v all nested, without cu_seqlens"):
        sparse_attn(query, query, query, INDEX, cu_seqlens=CPU_CU_SEQLENS)
