"""The steps in plain PyTorch: what they take and refuse as `sparse_attn` does. The fuzz compares their numbers."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import random, seeded

from ds_sparse import (
    TokenIndex,
    gather_attention,
    jagged_attention,
    masked_attention,
    reference,
    sparse_attn,
    torch_sparse_attention,
)
from ds_sparse.index.kernels import TOKEN_OPERATORS
from ds_sparse.ops import missing_kernels

OPERATORS = ()  # plain PyTorch, on any device

STEPS = {
    "gather": gather_attention,
    "jagged": jagged_attention,
    "torch.sparse": torch_sparse_attention,
    "native": sparse_attn,
}


@pytest.fixture(scope="module", params=[*STEPS, "masked"])
def step(request: pytest.FixtureRequest, device: str):
    """Every step, called with q, k, v, values, offsets and a scale."""
    if request.param == "native" and missing_kernels(device, TOKEN_OPERATORS):
        pytest.skip(f"no {device} kernels here for token pairs")
    if request.param != "masked":
        return STEPS[request.param]

    def masked(q, k, v, values, offsets=None, scale=None):
        index = values if offsets is None else TokenIndex.from_csr(values, offsets, q.shape[-2], k.shape[-2])
        return masked_attention(q, k, v, index.mask().to(q.device), scale)

    return masked


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_torch_sparse_refuses_16_bits(device: str, dtype: torch.dtype):
    x = torch.zeros(2, 20, 8, dtype=dtype, device=device)
    index = TokenIndex.from_mask(torch.ones(20, 20, dtype=torch.bool))
    with pytest.raises(ValueError, match="torch.sparse takes float32 and float64"):
        torch_sparse_attention(x, x, x, index)


def test_values_and_offsets_are_taken_as_they_are(step, device: str):
    values, ends = torch.tensor([1, 0, 2], device=device), torch.tensor([0, 2, 2, 3], device=device)
    q, k, v = (random(seeded(i), 3, n, 8).to(device) for i, n in enumerate((4, 3, 3)))
    counts = torch.tensor([[0, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1]])
    expected = reference.token_attention(q.cpu(), k.cpu(), v.cpu(), counts)
    torch.testing.assert_close(step(q, k, v, values, ends).cpu(), expected)


def test_large_scores_of_either_sign_stay_finite(step, device: str):
    q = torch.tensor([[3e3], [-3e3], [1.0]], device=device, requires_grad=True)
    k = torch.tensor([[1.0], [1.001], [0.9]], device=device)
    v = torch.eye(3, device=device)
    index = TokenIndex.from_mask(torch.ones(3, 3, dtype=torch.bool))
    output = step(q, k, v, index, scale=1.0)
    torch.testing.assert_close(output, (q @ k.T).softmax(-1))
    assert torch.isfinite(torch.autograd.grad(output[:, 0].sum(), q)[0]).all()


@pytest.mark.parametrize("name", ["torch.sparse", "masked"])
def test_a_pair_listed_twice_is_refused_where_it_cannot_count_twice(name: str):
    index = TokenIndex.from_pairs(torch.tensor([[1, 0], [0, 1], [1, 0]]), 2, 2)
    x = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"The pair \(1, 0\) is listed twice"):
        masked_attention(x, x, x, index.mask()) if name == "masked" else torch_sparse_attention(x, x, x, index)


@pytest.mark.parametrize("name", ["gather", "jagged", "torch.sparse"])
def test_steps_refuse_what_the_native_operation_refuses(name: str):
    x = torch.zeros(2, 5, 4)
    with pytest.raises(ValueError, match=r"values\[0\], in row 0, is 7; key tokens are 0 to 4"):
        STEPS[name](x, x, x, torch.tensor([7]), torch.ones(5, dtype=torch.int64))
    with pytest.raises(ValueError, match="k and v the same tokens"):
        STEPS[name](x, x, x[:, :4], TokenIndex.from_mask(torch.ones(5, 5, dtype=torch.bool)))


@pytest.mark.parametrize("name", STEPS)
def test_steps_under_autocast_give_what_they_give_of_cast_operands(device: str, name: str):
    if name == "native" and missing_kernels(device, TOKEN_OPERATORS):
        pytest.skip(f"no {device} kernels here for token pairs")
    q, k, v = (random(seeded(i), 2, 5, 8, dtype=torch.float32).to(device) for i in range(3))
    index = TokenIndex.from_mask(torch.ones(5, 5, dtype=torch.bool))
    with torch.autocast(device, dtype=torch.bfloat16):
        found = STEPS[name](q, k, v, index)
    # torch.sparse has no such dtype.
    cast = (q, k, v) if name == "torch.sparse" else (x.bfloat16() for x in (q, k, v))
    expected = STEPS[name](*cast, index)
    assert found.dtype == expected.dtype
    # On CUDA index_add rounds sums to bf16 one after the other, in any order.
    any_order = device == "cuda" and name in ("gather", "jagged")
    torch.testing.assert_close(found, expected, **({"rtol": 0.02, "atol": 0.02} if any_order else {}))


def test_masks_broadcast():
    q, k, v = (random(seeded(i), 2, 3, n, 8) for i, n in enumerate((5, 7, 7)))
    for shape in ((5, 7), (3, 5, 7), (2, 1, 5, 7), (1, 7), (2, 3, 5, 7)):
        mask = torch.rand(shape, generator=seeded()) < 0.5
        counts = mask.expand(2, 3, 5, 7).long()
        expected = reference.token_attention(q, k, v, counts)
        torch.testing.assert_close(masked_attention(q, k, v, mask), expected)
        added = torch.zeros(shape, dtype=q.dtype).masked_fill(~mask, float("-inf"))
        torch.testing.assert_close(masked_attention(q, k, v, added), expected)
    bias = random(seeded(3), 5, 7)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(masked_attention(q, k, v, bias), expected)
    low = torch.tensor([[-1e30, -1e300, -math.inf]], dtype=q.dtype)
    torch.testing.assert_close(
        masked_attention(q, k[:, :, :3], v[:, :, :3], low), v[:, :, :2].mean(2, keepdim=True).expand(-1, -1, 5, -1)
    )
    # A mask that is wider than the operands.
    found = masked_attention(q.float(), k.float(), v.float(), bias)
    torch.testing.assert_close(found, expected.float())


def test_what_is_no_mask_is_refused():
    q, k, v = (random(seeded(i), 2, 3, n, 8) for i, n in enumerate((5, 7, 7)))
    with pytest.raises(TypeError, match="mask is torch.int64; it has to be a tensor, bool"):
        masked_attention(q, k, v, torch.zeros(5, 7, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"mask is TokenIndex; .* TokenIndex.mask\(\) makes one of lists"):
        masked_attention(q, k, v, TokenIndex.from_mask(torch.ones(5, 7, dtype=torch.bool)))
    with pytest.raises(ValueError, match=r"mask has shape \(2, 5, 7\); it has to broadcast to \(2, 3, 5, 7\)"):
        masked_attention(q, k, v, torch.ones(2, 5, 7, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask is on meta and q on cpu; move it there"):
        masked_attention(q, k, v, torch.ones(5, 7, dtype=torch.bool, device="meta"))
    with pytest.raises(ValueError, match="k is torch.float32 and q torch.float64"):
        masked_attention(q, k.float(), v, torch.ones(5, 7, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_finite_mask_hides_no_key_whatever_the_scores_are(device: str, dtype: torch.dtype):
    """The lowest number of a dtype and a score below 0 are beyond that dtype."""
    query, value = torch.full((2, 1, 4, 8), 8.0, device=device, dtype=dtype), torch.randn(1, 1, 8, device=device)
    mask = torch.full((4, 1), torch.finfo(dtype).min, device=device, dtype=dtype)
    value = value.to(dtype).expand(2, 1, 1, 8)
    torch.testing.assert_close(masked_attention(query, -query[:, :, :1], value, mask), value.expand(2, 1, 4, 8))
