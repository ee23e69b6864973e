"""torch.compile and torch.export of attention layers: one graph, any length, the results of eager."""

import copy
import subprocess
import sys

import pytest
import torch
from helpers import NEEDS_COMPILER, random, seeded
from torch._dynamo.utils import counters

from ds_sparse import (
    BertSparseSelfAttention,
    BigBirdSparsityConfig,
    FixedSparsityConfig,
    SparseSelfAttention,
    WindowIndex,
    window_attention,
)

HEADS, BLOCK, TOKENS = 4, 16, 128
RANDOM = BigBirdSparsityConfig(num_heads=HEADS, block=BLOCK, different_layout_per_head=True, seed=1)
CAUSAL = FixedSparsityConfig(num_heads=HEADS, block=BLOCK, causal=True)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()


def make(structure=RANDOM, **arguments):
    return SparseSelfAttention(structure, max_seq_length=TOKENS, **arguments)


def inputs(device, tokens=TOKENS, heads=HEADS, key_heads=HEADS, head_dim=20):
    rng = seeded(tokens)
    sizes = (heads, key_heads, key_heads)
    return [random(rng, 2, n, tokens, head_dim, dtype=torch.float32).to(device).requires_grad_() for n in sizes]


def assert_equal_with_gradients(compiled, eager, leaves):
    results, expected = compiled(*leaves), eager(*leaves)
    torch.testing.assert_close(results, expected)
    found, wanted = (torch.autograd.grad(x.square().sum(), leaves) for x in (results, expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(("structure", "key_heads"), [(RANDOM, 2), (CAUSAL, HEADS)], ids=["random", "causal"])
def test_compiles_into_one_graph_with_masks_and_a_bias(device: str, structure, key_heads: int):
    module = make(structure, key_padding_mask_mode="mul")
    padding = (torch.rand(2, TOKENS, generator=seeded()) < 0.8).to(device)
    keep = (torch.rand(TOKENS, TOKENS, generator=seeded()) < 0.8).to(device)
    rpe = random(seeded(), 1, HEADS, TOKENS, TOKENS, dtype=torch.float32).to(device).requires_grad_()

    def run(query, key, value, rpe):
        return module(query * 2, key, value, rpe=rpe, key_padding_mask=padding, attn_mask=keep)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_equal_with_gradients(compiled, run, [*inputs(device, key_heads=key_heads), rpe])


@pytest.mark.parametrize(
    ("structure", "backend"),
    [
        (RANDOM, "aot_eager"),
        pytest.param(CAUSAL, "aot_eager", marks=pytest.mark.slow("the graphs of a random structure are counted")),
        pytest.param(CAUSAL, "inductor", marks=[NEEDS_COMPILER, pytest.mark.slow("compiles C++ of four graphs")]),
    ],
    ids=["random", "causal", "inductor"],
)
def test_a_bias_by_distance_takes_one_graph_for_all_lengths(structure, backend: str):
    module = make(structure)
    bias = random(seeded(), HEADS, 255, dtype=torch.float32).requires_grad_()

    def run(query, key, value, bias):
        return module.attend(query * 2, key, value, distance_bias=bias)

    compiled = torch.compile(run, fullgraph=True, backend=backend, dynamic=True)
    for tokens in (21, 64, 90, 128):
        assert_equal_with_gradients(compiled, run, [*inputs("cpu", tokens), bias])
    assert counters["stats"]["unique_graphs"] == 1


def test_twenty_lengths_are_one_dynamic_graph(device: str):
    module = make()
    compiled = torch.compile(module.attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in range(21, 121, 5):
        assert_equal_with_gradients(compiled, module.attend, inputs(device, tokens))
    assert counters["stats"]["unique_graphs"] == 1


def test_compiled_dropout_is_replayed_in_backward(device: str):
    module = make(attention_dropout=0.4)
    query, key, value = inputs(device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for output in (first := compiled(query, key, value), second := compiled(query, key, value)):
        # Probabilities do not depend on the values, in which attention is linear.
        grad = random(seeded(), *output.shape, dtype=torch.float32).to(device)
        (of_value,) = torch.autograd.grad(output, value, grad, retain_graph=True)
        torch.testing.assert_close((of_value * value).sum(), (output * grad).sum(), rtol=1e-3, atol=1e-3)
    assert not torch.equal(first, second)


def test_a_key_padding_mask_a_head_warns_and_does_not_end_the_graph(device: str):
    module, mask = make(), torch.zeros(2, HEADS, TOKENS, device=device)
    mask[:, 0, 70:] = -10000.0
    x = random(seeded(), 2, HEADS, TOKENS, 16, dtype=torch.float32).to(device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with pytest.warns(UserWarning, match="a mask a head: the first head's counts for all"):
        output = compiled(x, x, x, None, mask)
    torch.testing.assert_close(output, module(x, x, x, None, mask[:, 0]))


def test_a_layout_that_is_replaced_is_used_by_what_was_compiled_before(device: str):
    module = make()
    query, key, value = inputs(device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    before = compiled(query, key, value)
    module.master_layout = torch.eye(TOKENS // BLOCK, dtype=torch.bool).expand(HEADS, -1, -1)
    assert torch.equal(compiled(query, key, value), module(query, key, value))
    assert not torch.equal(compiled(query, key, value), before)


def test_a_longer_sequence_is_refused_where_all_is_one_graph_and_served_else(device: str):
    module = make()
    longer = inputs(device, TOKENS * 2)
    with pytest.raises(Exception, match=f"build the module with max_seq_length={2 * TOKENS}"):
        torch.compile(module, fullgraph=True, backend="aot_eager")(*longer)
    assert torch.equal(torch.compile(module, backend="aot_eager")(*longer), module(*longer))


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_layer_carries_its_layout(device: str, strict: bool, tmp_path):
    module = make()
    batch = tuple(x.detach() for x in inputs(device))
    expected = module(*batch)
    torch.export.save(torch.export.export(module, batch, strict=strict), tmp_path / "layer.pt2")
    del module
    assert torch.equal(torch.export.load(tmp_path / "layer.pt2").module()(*batch), expected)


@pytest.mark.slow("imports torch in another process")
def test_an_exported_layer_runs_in_another_process_that_imports_the_operations(tmp_path):
    module = make()
    batch = tuple(x.detach() for x in inputs("cpu"))
    torch.export.save(torch.export.export(module, batch), tmp_path / "layer.pt2")
    torch.save([batch, module(*batch)], tmp_path / "expected.pt")
    program = """
import torch, ds_sparse.ops
batch, expected = torch.load("expected.pt")
assert torch.equal(torch.export.load("layer.pt2").module()(*batch), expected)
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)


@pytest.mark.parametrize("keys", [0, 1], ids=["all-one", "key-is-value"])
def test_operands_may_be_one_tensor(device: str, keys: int):
    module, window = make(), WindowIndex.build(TOKENS, 8, device=device)
    query, key, _ = inputs(device)

    def run(query, key=None):
        key = query if key is None else key
        return module(query, key, key) + window_attention(query, key, key, window) + key

    assert_equal_with_gradients(torch.compile(run, fullgraph=True, backend="aot_eager"), run, [query, key][: 1 + keys])


def test_an_exported_length_may_be_dynamic(device: str):
    module = make()
    tokens = torch.export.Dim("blocks", max=TOKENS // BLOCK) * BLOCK
    batch = tuple(x.detach() for x in inputs(device))
    program = torch.export.export(module, batch, dynamic_shapes=[{2: tokens}] * 3).module()
    for length in (48, 96):
        shorter = tuple(x.detach() for x in inputs(device, length))
        torch.testing.assert_close(program(*shorter), module(*shorter))


class BertSizes:
    hidden_size, num_attention_heads, attention_probs_dropout_prob = 64, HEADS, 0.0


@NEEDS_COMPILER
def test_bert_sparse_self_attention_compiles_with_inductor(device: str):
    module = BertSparseSelfAttention(BertSizes(), RANDOM, TOKENS).to(device)
    twin = copy.deepcopy(module)
    hidden = random(seeded(), 2, TOKENS, 64, dtype=torch.float32).to(device)
    mask = torch.zeros(2, 1, 1, TOKENS, device=device)
    mask[1, ..., 100:] = -10000
    compiled = torch.compile(module, fullgraph=True)
    results, expected = compiled(hidden, mask), twin(hidden, mask)
    torch.testing.assert_close(results, expected)
    results.square().sum().backward()
    expected.square().sum().backward()
    for found, wanted in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_compiled_layers_run_in_cuda_graphs_for_each_length(device: str):
    if device == "cpu":
        pytest.skip("no CUDA graphs")
    module = make()
    compiled = torch.compile(lambda *x: module.attend(*x) * 2, fullgraph=True, mode="reduce-overhead")
    for tokens in (TOKENS, 80, 96, TOKENS, 80):
        leaves = inputs(device, tokens, head_dim=32)
        for _ in range(3):  # warmed up, captured, replayed
            torch.compiler.cudagraph_mark_step_begin()
            assert_equal_with_gradients(compiled, lambda *x: module.attend(*x) * 2, leaves)
    assert not counters["inductor"]["cudagraph_skips"]
