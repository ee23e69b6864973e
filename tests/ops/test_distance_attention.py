"""A bias by distance: compared with the matrix that it stands for, which the operation never makes."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import gradients, leaf, random, seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_parameters import BACKENDS
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ds_sparse
from ds_sparse import BlockIndex, block_sparse_attention, reference
from ds_sparse.index.master_layout import MasterLayout
from ds_sparse.layout import to_token_mask
from ds_sparse.ops import distance_gradient
from ds_sparse.ops.attention_operators import attention_forward

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


@st.composite
def cases(draw: st.DrawFn) -> dict:
    def one_of(*values):
        return draw(st.sampled_from(values))

    rng, key_heads, shared_by, batch = seeded(draw(st.integers(0, 99))), one_of(1, 2), one_of(1, 2), one_of(1, 2)
    heads, block, tokens, more = key_heads * shared_by, one_of(8, 16, 32, 64), draw(st.integers(1, 90)), one_of(0, 3)
    keys = one_of(tokens, draw(st.integers(1, 90)))
    shape = (one_of(1, heads), -(-tokens // block), -(-keys // block))
    bias = random(rng, one_of(1, heads), 2 * (max(tokens, keys) + more) - 1)
    if one_of(False, True):
        bias[:, draw(st.integers(0, bias.shape[1] - 1))] = -math.inf
    masks = {
        "attn_mask": random(rng, one_of(1, batch), one_of(1, heads), one_of(1, tokens), keys),
        "key_padding_mask": random(rng, one_of(1, batch), keys),
    }
    masks = {name: one_of(None, mask, mask < 0.5) for name, mask in masks.items()}
    return {
        "inputs": [
            random(rng, batch, heads, tokens, 8), *random(rng, 2, batch, key_heads, keys, 8), bias, random(rng, heads)
        ],
        "layout": torch.rand(shape, generator=rng) < one_of(0.3, 0.6, 1.0),
        "options": {"block": block, "causal": one_of(False, True), **masks},
    }  # fmt: skip


@given(cases())
@settings(deadline=None, max_examples=60)
def test_output_lse_and_every_gradient_are_those_of_the_matrix(case: dict):
    inputs, layout, options = [leaf(x, "cpu") for x in case["inputs"]], case["layout"], case["options"]
    results = []
    for operation in (block_sparse_attention, reference.attention):
        query, key, value, bias, sinks = inputs
        output, lse = operation(
            query, key, value, layout, distance_bias=bias, sinks=sinks, return_lse=True, **options
        )  # fmt: skip
        loss = output.sin().sum() + lse.sin().sum()
        results.append((output, lse, *gradients(loss, inputs, torch.ones_like(loss))))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_in_every_precision_it_is_as_accurate_as_the_matrix(device: str, dtype: torch.dtype):
    """Its gradient is summed in fp32, and more exact than that of a matrix of the operands' dtype."""
    inputs = operands(device, dtype)
    layout = LAYOUT.to(device)
    wide = [leaf(x.detach().cpu().double(), "cpu") for x in inputs]
    outputs = [
        attend(*inputs, causal=True),
        block_sparse_attention(
            *inputs[:3], layout, causal=True, rpe=reference.bias_of_pairs(inputs[3], TOKENS, TOKENS).float()
        ),
        reference.attention(*wide[:3], LAYOUT, BLOCK, distance_bias=wide[3], causal=True),
    ]
    cotangent = random(seeded(1), *outputs[0].shape, dtype=dtype)
    found, of_matrix, truth = (
        [x, *gradients(x, of, cotangent.to(x))]
        for x, of in zip(outputs, (inputs, inputs, wide), strict=True)
    )  # fmt: skip
    for ours, theirs, true in zip(found, of_matrix, truth, strict=True):
        bound = 1.5 * (theirs.cpu().double() - true).abs().max() + torch.finfo(dtype).eps * true.abs().max()
        assert (ours.cpu().double() - true).abs().max() <= bound


def test_gradcheck(device: str):
    if device != "cpu":
        pytest.skip("fused attention takes float64 on the CPU alone")
    query, key, value, bias = (x[..., :11, :] for x in operands("cpu", torch.float64))
    inputs = [x.detach().requires_grad_() for x in (query, key, value, bias[:, 38:61])]
    layout = torch.tensor([[1, 0], [1, 1]])
    assert torch.autograd.gradcheck(
        lambda q, k, v, bias: block_sparse_attention(
            q, k, v, layout, block=8, distance_bias=bias, causal=True, return_lse=True
        ),
        inputs,
    )


def test_dropout_is_drawn_and_replayed_for_the_bias_too(device: str):
    dtype = torch.float64 if device == "cpu" else torch.float32
    inputs, layout = operands(device, dtype, key_heads=HEADS), LAYOUT.to(device)
    torch.manual_seed(3)
    output = attend(*inputs, dropout_p=0.3)
    torch.manual_seed(3)
    seed = tuple(torch.randint(2**62, (2,), device=device).tolist())
    keep = reference.dropout_keep(*seed, 2, HEADS, TOKENS, TOKENS, 0.3).to(device)
    live = to_token_mask(layout, BLOCK)[:, :TOKENS, :TOKENS]
    query, key, value, bias = inputs
    scores = query @ key.mT * 8**-0.5 + reference.bias_of_pairs(bias, TOKENS, TOKENS)
    probs = torch.softmax(scores.masked_fill(~live, -math.inf), -1).nan_to_num(0)
    expected = (probs * keep * (32768 / (32768 - int(0.3 * 32768 + 0.5)))) @ value
    torch.testing.assert_close(output, expected)
    cotangent = random(seeded(2), *output.shape, dtype=dtype).to(device)
    torch.testing.assert_close(gradients(output, inputs, cotangent), gradients(expected, inputs, cotangent))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias_heads", [1, HEADS])
@pytest.mark.parametrize(("offset", "tokens"), [(37, 1), (9, 30), (0, 41), ((3, 40), 4), ((3, 9), 20)])
def test_distances_count_from_the_position_of_the_first_query(device: str, offset, tokens, bias_heads, causal):
    inputs = operands(device, keys=50, bias_heads=bias_heads)
    query, key, value, bias = inputs
    query, layout = query[:, :, :tokens], torch.rand(2, 4, 4, generator=seeded(5)) < 0.7
    offsets = offset if isinstance(offset, tuple) else (offset, offset)
    given_offset = torch.tensor(offset) if isinstance(offset, tuple) else offset
    found = attend(query, key, value, bias, layout, causal=causal, query_offset=given_offset, return_lse=True)
    of_each = [
        reference.attention(
            query[i : i + 1], key[i : i + 1], value[i : i + 1], layout.to(device), BLOCK, distance_bias=bias,
            causal=causal, query_offset=first, return_lse=True,
        )
        for i, first in enumerate(offsets)
    ]  # fmt: skip
    expected = [torch.cat(x) for x in zip(*of_each, strict=True)]
    torch.testing.assert_close(list(found), expected)
    cotangent = random(seeded(2), *found[0].shape, dtype=torch.float32).to(device)
    of_found, of_expected = (gradients(x[0], inputs, cotangent) for x in (found, expected))
    torch.testing.assert_close(of_found, of_expected, rtol=1e-4, atol=1e-5)


def test_the_gradient_is_the_same_bits_each_time_however_many_threads(device: str):
    inputs = operands(device)
    results = []
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        results.append(torch.autograd.grad(attend(*inputs).sin().sum(), inputs[3])[0])
        torch.set_num_threads(before)
    assert all(torch.equal(x, results[0]) for x in results)


@pytest.mark.parametrize("layout", [LAYOUT, LAYOUT[:1]], ids=["by head", "shared"])
def test_parts_of_the_live_blocks_give_what_all_at_once_give(device: str, layout, monkeypatch):
    inputs = operands(device)

    def of_bias() -> torch.Tensor:
        torch.manual_seed(0)
        return torch.autograd.grad(attend(*inputs, layout, dropout_p=0.2).sin().sum(), inputs[3])[0]

    whole = of_bias()
    monkeypatch.setattr(distance_gradient, "SCORES_AT_ONCE", {"cpu": 1, "cuda": 1})
    torch.testing.assert_close(of_bias(), whole)


def test_what_is_masked_may_be_nan_and_gives_the_bias_no_gradient():
    query, key, value, bias = operands("cpu")
    padding = torch.arange(TOKENS) < 30
    clean = torch.autograd.grad(attend(query, key, value, bias, key_padding_mask=padding[None]).sum(), bias)[0]
    key, value = (x.detach().masked_fill(~padding[:, None], math.nan) for x in (key, value))
    output = attend(query, key, value, bias, key_padding_mask=padding[None])
    torch.testing.assert_close(torch.autograd.grad(output.sum(), bias)[0], clean)


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
    seen = Largest()

    def watched(*call):
        with seen:
            return distance_gradient.distance_bias_gradient(*call[:-5], distance_gradient.Blocks(*call[-5:]))

    ops = SimpleNamespace(distance_bias_backward=watched, matmul_sdd=torch.ops.ds_sparse.matmul_sdd)
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_into_one_graph_with_an_index_whose_rows_were_counted(backend: str):
    torch._dynamo.reset()
    inputs, index = operands("cpu"), BlockIndex.build(LAYOUT, BLOCK)

    def run(query, key, value, bias):
        return block_sparse_attention(query * 2, key, value, index, distance_bias=bias) * 2

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    with pytest.raises(Exception, match="read index.row_lengths once before"):
        compiled(*inputs)
    assert sum(index.row_lengths) == index.live_blocks
    torch._dynamo.reset()
    results, expected = compiled(*inputs), run(*inputs)
    torch.testing.assert_close(results, expected)
    found, wanted = (torch.autograd.grad(x.square().sum(), inputs) for x in (results, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


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
@pytest.mark.parametrize("operator", ["distance_bias_backward", "layout_distance_bias_backward"])
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
