"""A bias by distance: the matrix that it stands for is never made; transforms, and what it refuses."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import leaf, random, seeded
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ds_sparse
from ds_sparse import BlockIndex, block_sparse_attention
from ds_sparse.index.master_layout import MasterLayout
from ds_sparse.ops import distance_gradient
from ds_sparse.ops.attention_function import attention_forward

OPERATORS = ("block_attention_forward", "block_attention_backward", "matmul_sdd")
BLOCK, TOKENS, HEADS = 16, 41, 2
LAYOUT = torch.tensor([[[1, 0, 1], [0, 0, 0], [1, 1, 1]], [[1, 1, 0], [1, 1, 1], [0, 1, 0]]], dtype=torch.bool)


def operands(
    device: str, dtype: torch.dtype = torch.float32, keys: int = TOKENS, key_heads: int = 1, bias_heads: int = HEADS
) -> list[torch.Tensor]:
    """query, key, value and a distance_bias for 50 tokens and fewer."""
    rng = seeded()
    shapes = [(2, HEADS, TOKENS, 8), *[(2, key_heads, keys, 8)] * 2, (bias_heads, 99)]
    return [leaf(random(rng, *shape, dtype=dtype), device) for shape in shapes]


def attend(query, key, value, bias, layout=LAYOUT, **options):
    return block_sparse_attention(
        query, key, value, layout.to(query.device), block=BLOCK, distance_bias=bias, **options
    )


@pytest.mark.parametrize("layout", [LAYOUT, LAYOUT[:1]], ids=["by head", "shared"])
def test_parts_of_the_live_blocks_give_what_all_at_once_give(device: str, layout, monkeypatch):
    inputs = operands(device)

    def of_bias() -> torch.Tensor:
        torch.manual_seed(0)
        return torch.autograd.grad(attend(*inputs, layout, dropout_p=0.2).sin().sum(), inputs[3])[0]

    whole = of_bias()
    monkeypatch.setattr(distance_gradient, "SCORES_AT_ONCE", {"cpu": 1, "cuda": 1})
    torch.testing.assert_close(of_bias(), whole)


class Largest(TorchDispatchMode):
    """Notes the numbers of the largest memory that an operator returns."""

    numbers = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        results = operator(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(results):
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return results


def test_memory_is_linear_in_tokens(monkeypatch):
    """What is in memory at once, the gradient's parts too, which are an operator of their own."""
    tokens = 4096
    layout = ds_sparse.BSLongformerSparsityConfig(num_heads=1, block=64).make_layout(tokens)
    index = BlockIndex.build(layout, 64)
    query, key, value = (torch.randn(1, 2, tokens, 8, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, 2 * tokens - 1, requires_grad=True)
    schema = torch.ops.ds_sparse.block_attention_distance_backward.default._schema
    names, seen = [argument.name for argument in schema.arguments], Largest()

    def watched(*call):
        with seen:
            return distance_gradient.distance_bias_gradient(SimpleNamespace(**dict(zip(names, call, strict=True))))

    ops = SimpleNamespace(block_attention_distance_backward=watched, matmul_sdd=torch.ops.ds_sparse.matmul_sdd)
    monkeypatch.setattr(distance_gradient, "ops", ops)
    with seen:
        block_sparse_attention(query, key, value, index, distance_bias=bias).sum().backward()
    assert bias.grad.abs().sum() > 0
    assert 2 * tokens - 1 < seen.numbers <= 2 * index.live_blocks * 64 * 2 * 64 < tokens**2


def test_under_vmap_each_sample_has_its_own_bias():
    query, key, value, bias = operands("cpu")
    biases = torch.stack([bias.detach(), 2 * bias.detach()])

    def loss(bias, **options):
        return attend(query.detach(), key.detach(), value.detach(), bias, **options).sin().sum()

    found = vmap(grad(loss))(biases)
    torch.testing.assert_close(found, torch.stack([grad(loss)(x) for x in biases]))
    with pytest.raises(RuntimeError, match='give vmap randomness="same"'):
        vmap(grad(lambda bias: loss(bias, dropout_p=0.1)), randomness="different")(biases)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"bias": torch.zeros(HEADS, 98)}, r"has shape \(2, 98\); it has to be \(2, 2 \* M - 1\) .* M at least 41"),
        ({"bias": torch.zeros(3, 99)}, r"has shape \(3, 99\)"),
        ({"bias": torch.zeros(99)}, r"has shape \(99,\)"),
        ({"bias": torch.zeros(1, 79)}, "79 distances, up to 39, .* position 40 and 41 keys; give 81 or more"),
        ({"bias": torch.zeros(1, 99, dtype=torch.long)}, "it has to be float16"),
        ({"rpe": torch.zeros(TOKENS, TOKENS)}, "rpe and distance_bias are both given; .*bias_of_pairs"),
        ({"query_offset": 10}, "position 50 and 41 keys; give 101 or more"),
        ({"bias": [0.0]}, "distance_bias is a list; it has to be a tensor"),
    ],
)
def test_what_does_not_fit_is_a_sentence(change: dict, sentence: str):
    query, key, value, bias = operands("cpu")
    layout = torch.ones(4, 3) if "query_offset" in change else LAYOUT
    with pytest.raises((ValueError, TypeError), match=sentence):
        attend(query, key, value, change.pop("bias", bias), layout, **change)


def test_packed_documents_refuse_it():
    query, key, value, bias = (x[:1] for x in operands("cpu"))
    with pytest.raises(ValueError, match="distance_bias is given for packed documents"):
        attend(query, key, value, bias, cu_seqlens=torch.tensor([0, 20, TOKENS], dtype=torch.int32))


@pytest.mark.parametrize("dropout_p", [0.1, 0.0])
@pytest.mark.parametrize("operator", ["block_attention_distance_backward", "layout_attention_distance_backward"])
def test_opcheck_and_flops_of_the_gradient_of_distances(device: str, operator: str, dropout_p: float):
    master = MasterLayout(torch.rand(2, 5, 5, generator=seeded()) < 0.5, BLOCK)
    query, key, value, bias = (x.detach() for x in operands(device))
    index, causal, seed = master.index(TOKENS, query.device, True), True, torch.tensor([5, 6], device=device)
    mask = torch.rand(2, 1, 1, TOKENS, generator=seeded()).to(device) < 0.8
    numbers = 0.25, causal, dropout_p
    output, lse, rows = attention_forward(index, query, key, value, bias, None, mask, seed, *numbers)
    call = output, lse.nan_to_num(0, 0, 0), query, key, value, output, rows, bias, None, mask, seed, *numbers
    lists = index.row_offsets, index.row_columns, index.row_lengths, index.layout_heads, BLOCK
    with FlopCounterMode(display=False) as counter:
        distance_gradient.distance_bias_backward(index, *call)
    assert counter.get_total_flops() == 4 * 8 * 2 * index.live_blocks * BLOCK**2
    call = (*call, *((master.text,) if operator.startswith("layout") else lists))
    torch.library.opcheck(getattr(torch.ops.ds_sparse, operator).default, call)
    if operator.startswith("layout"):
        of_text, of_index = (distance_gradient.distance_bias_backward(x, *call[:-1]) for x in (master, index))
        assert torch.equal(of_text, of_index)


def test_programs_that_earlier_versions_exported_run(device: str):
    """They hold queries in the opposite order, and distances that have causality."""
    query, key, value, bias = (x.detach() for x in operands(device))
    master, rows = MasterLayout(LAYOUT, BLOCK), 48
    queries = torch.nn.functional.pad(query, (0, 0, 0, rows - TOKENS)).flip(2)
    distances = bias[:, 50 - rows : 49 + TOKENS].clone()
    distances[:, rows:] = -math.inf
    mask = (torch.arange(TOKENS, device=device) < torch.arange(rows, device=device)[:, None] + 1)[None, None].flip(2)
    call = queries, key, value, distances, None, mask, None, 8**-0.5, True, 0.0, master.text
    torch.library.opcheck(torch.ops.ds_sparse.layout_distance_forward.default, call)
    output, lse, _ = torch.ops.ds_sparse.layout_distance_forward(*call)
    expected = attend(query, key, value, bias, causal=True, return_lse=True)
    torch.testing.assert_close((output.flip(2)[:, :, :TOKENS], lse.flip(2)[:, :, :TOKENS]), expected)
