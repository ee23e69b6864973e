"""What attention layers are made of, given a row of packed documents: each is computed alone."""

import pytest
import torch

import ds_sparse
from ds_sparse.modules.dense_attention import dense_attention
from ds_sparse.modules.local_attention import LocalAttention
from ds_sparse.modules.structured_attention import StructuredAttention

LENGTHS = [20, 1, 0, 33, 10]
CU_SEQLENS = torch.tensor([0, 20, 21, 21, 54, 64])


def structured(implementation: str = "fused") -> StructuredAttention:
    structure = ds_sparse.BigBirdSparsityConfig(num_heads=4, block=8, different_layout_per_head=True, seed=1)
    return StructuredAttention(structure, 48, implementation)


ATTENTIONS = {"blocks": structured(), "window": LocalAttention(5), "dense": dense_attention}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_each_document_is_computed_alone(kind, with_sinks, causal):
    attention = ATTENTIONS[kind]
    query = torch.randn(1, 4, 64, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(1, 2, 64, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if with_sinks else None
    given = {"scale": 0.3, "causal": causal, "sinks": sinks}
    packed = attention(query, key, value, cu_seqlens=CU_SEQLENS, **given)
    documents = zip(*(x.split(LENGTHS, 2) for x in (query, key, value)), strict=True)
    apart = torch.cat([attention(*those, **given) for those in documents if those[0].shape[2]], 2)
    torch.testing.assert_close(packed, apart)
    leaves = [query, key, value, *([sinks] if with_sinks else [])]
    ours, theirs = (torch.autograd.grad(x.sin().sum(), leaves) for x in (packed, apart))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_documents_have_to_be_the_row(kind):
    x = torch.randn(1, 4, 60, 8)
    with pytest.raises(ValueError, match=r"60( tokens|; the last number of cu_seqlens)"):
        ATTENTIONS[kind](x, x, x, cu_seqlens=CU_SEQLENS)


@pytest.mark.parametrize("kind", ["blocks", "dense"])
@pytest.mark.parametrize(
    "more",
    [
        {"rpe": torch.zeros(64, 64)},
        {"distance_bias": torch.zeros(4, 127)},
        {"attn_mask": torch.zeros(64, 64)},
        {"key_padding_mask": torch.ones(1, 64, dtype=torch.bool)},
        {"query_offset": 0},
    ],
)
def test_what_goes_by_places_in_a_row_is_refused(kind, more):
    x = torch.randn(1, 4, 64, 8)
    with pytest.raises(ValueError, match="given for packed documents, and goes by places in a row; leave it out"):
        ATTENTIONS[kind](x, x, x, cu_seqlens=CU_SEQLENS, **more)


@pytest.mark.parametrize("structure", [structured().sparsity_config, ds_sparse.MobaSparsityConfig(4, block=16)])
def test_operands_of_three_dimensions_are_refused(structure):
    x = torch.randn(64, 4, 8)
    with pytest.raises(NotImplementedError, match=r"packed documents are one row, B 1; got \(64, 4, 8\)"):
        StructuredAttention(structure, 64)(x, x, x, cu_seqlens=CU_SEQLENS)


def test_separate_operations_take_no_packed_documents():
    x = torch.randn(1, 4, 64, 8)
    with pytest.raises(ValueError, match='cu_seqlens is given, and only implementation="fused" takes it'):
        structured("separate")(x, x, x, cu_seqlens=CU_SEQLENS)


def test_a_row_may_be_longer_than_the_layout_and_so_may_a_document():
    attention = structured()
    lengths = [30, 40, 45]
    query = torch.randn(1, 4, 115, 8)
    edges = torch.tensor([0, 30, 70, 115])
    packed = attention(query, query, query, cu_seqlens=edges)
    apart = torch.cat([attention(x, x, x) for x in query.split(lengths, 2)], 2)
    torch.testing.assert_close(packed, apart)
    assert not attention._master.longer
    one = attention(query, query, query, cu_seqlens=torch.tensor([0, 100, 115]))
    torch.testing.assert_close(one[:, :, :100], attention(*[query[:, :, :100]] * 3))
