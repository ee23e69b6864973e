"""Attention on an index that waits for nothing, and on layouts of groups of heads and of sequences."""

from __future__ import annotations

import copy
import math
from itertools import product

import pytest
import torch
from helpers import EXAMPLES, captured, generator, gradients, leaf, nothing_waits, random
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from ds_sparse import BlockIndex, MatMul, block_sparse_attention
from ds_sparse.index.kernels import INDEX_OPERATORS

OPERATORS = ("block_attention_forward", "block_attention_backward", "block_attention_bias_backward", *INDEX_OPERATORS)


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, live: torch.Tensor, block: int, causal: bool,
    **more: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention in fp64 over the tokens of live blocks (B or 1, H, Hkv or 1, R, C), and lse."""
    heads, tokens, keys = query.shape[1], query.shape[2], key.shape[2]
    mask = live.repeat_interleave(heads // live.shape[1], 1)
    mask = mask.repeat_interleave(block, 2).repeat_interleave(block, 3)[..., :tokens, :keys]
    mask = mask.tril() if causal else mask
    if "key_padding_mask" in more:
        mask = mask & more["key_padding_mask"][:, None, None]
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT / math.sqrt(query.shape[3]) + more.get("rpe", torch.zeros(()))
    scores = scores.masked_fill(~mask, -math.inf)
    if "sinks" in more:
        scores = torch.cat([scores, more["sinks"][None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    lse = scores.logsumexp(-1)
    probs = (scores - lse.clamp(min=-1e30)[..., None]).exp()[..., :keys]
    return probs @ value, lse


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, int, dict[str, torch.Tensor], dict[str, torch.Tensor], bool]:
    """Live blocks (B or 1, H, Hkv or 1, R, C), the block, operands, and options with and without a gradient."""
    rng, block = generator(draw), draw(st.sampled_from((16, 32, 64, 128)))
    batch, key_heads, group = (draw(st.integers(1, most)) for most in (3, 3, 4))
    tokens = draw(st.integers(1, 300))
    causal = draw(st.booleans())
    keys = tokens if causal else draw(st.sampled_from((tokens, 77)))
    layouts = draw(st.sampled_from((1, batch))), draw(st.sampled_from((1, key_heads, key_heads * group)))
    live = torch.rand(*layouts, -(-tokens // block), -(-keys // block), generator=rng)
    live = live < draw(st.sampled_from((0.0, 0.1, 0.4, 1.0)))
    sizes = {"query": (key_heads * group, tokens), "key": (key_heads, keys), "value": (key_heads, keys)}
    tensors = {name: random(rng, batch, *size, 16) for name, size in sizes.items()}
    more = {}
    if draw(st.booleans()):
        more["rpe"] = random(rng, *draw(st.sampled_from(((1, 1), (batch, 1), (1, key_heads * group)))), tokens, keys)
    if draw(st.booleans()):
        more["sinks"] = random(rng, key_heads * group)
    if draw(st.booleans()):
        more["key_padding_mask"] = torch.rand(batch, keys, generator=rng) < 0.8
    return live, block, tensors, more, causal


@EXAMPLES
@given(case=cases(), bounded=st.booleans())
def test_outputs_and_gradients_are_those_of_dense_attention(device: str, case: tuple, bounded: bool):
    live, block, tensors, more, causal = case
    dtype = torch.float64 if device == "cpu" else torch.float32
    capacity = int(live.sum()) if bounded else None
    index = BlockIndex.build(live.to(device), block, capacity=capacity)
    given = tensors | more
    given = {
        name: leaf(x if x.dtype == torch.bool else x.to(dtype), device, x.dtype != torch.bool)
        for name, x in given.items()
    }
    exact = {name: leaf(x, "cpu", x.dtype != torch.bool) for name, x in (tensors | more).items()}
    found = block_sparse_attention(**given, layout=index, causal=causal, return_lse=True)
    output, lse = dense(**exact, live=live, block=block, causal=causal)
    torch.testing.assert_close(found[0].double().cpu(), output, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1].double().cpu(), lse, atol=1e-4, rtol=1e-4)
    grad = torch.randn_like(output)
    names = [name for name, x in exact.items() if x.requires_grad]
    right = gradients(output.nan_to_num(), [exact[name] for name in names], grad)
    ours = gradients(found[0], [given[name] for name in names], grad.to(device, dtype))
    for name, a, b in zip(names, ours, right):
        torch.testing.assert_close(a.double().cpu(), b.nan_to_num(), atol=1e-3, rtol=1e-3, msg=name)


@pytest.mark.parametrize("dims", [2, 3, 4])
def test_named_blocks_are_live(device: str, dims: int):
    rng, blocks = torch.Generator().manual_seed(0), torch.tensor([[1, 1, -1], [3, 0, 5], [-1, -1, -1], [2, 5, 2]])
    named = blocks.expand(2, 3, -1, -1)[(0,) * (4 - dims)]
    live = torch.zeros(4, 6, dtype=torch.bool)
    live[[0, 1, 1, 1, 3, 3], [1, 3, 0, 5, 2, 5]] = True
    for dtype in (torch.int32, torch.int64):
        index = BlockIndex.from_blocks(named.to(device, dtype), 16, 6)
        heads = {2: 1, 3: 3, 4: 6}[dims]
        assert torch.equal(index.layout().cpu(), live.expand(heads, -1, -1))
        assert index.capacity == heads * 4 * 3 and index.live_blocks == heads * 6 and index.reaches_ahead
        assert torch.equal(index.causal().layout().cpu(), live.tril().expand(heads, -1, -1))
    query, key = torch.randn(2, 3, 60, 8, generator=rng).to(device), torch.randn(2, 3, 90, 8, generator=rng).to(device)
    ours = block_sparse_attention(query, key, key, index)
    torch.testing.assert_close(
        ours, block_sparse_attention(query, key, key, live.expand(3, -1, -1).to(device), block=16)
    )


def test_blocks_beyond_the_columns_are_refused_on_the_cpu_and_none_elsewhere(device: str):
    named = torch.tensor([[0, 1], [7, 0]], device=device)
    if device == "cpu":
        with pytest.raises(ValueError, match="names block 7 for row 1 of head 0, and there are 2 columns"):
            BlockIndex.from_blocks(named, 16)
    else:
        assert BlockIndex.from_blocks(named, 16).layout().tolist() == [[[True, True], [True, False]]]


@pytest.mark.parametrize("given, sentence", [
    (torch.zeros(2, 2), "block_indices is torch.float32; it has to be an int32 or int64 tensor"),
    ([[0]], "block_indices is list"),
    (torch.zeros(2, dtype=torch.int64), r"block_indices has shape \(2,\)"),
    (torch.zeros(2, 0, dtype=torch.int64), r"block_indices has shape \(2, 0\)"),
])  # fmt: skip
def test_other_block_indices_are_refused(given: object, sentence: str):
    with pytest.raises((TypeError, ValueError), match=sentence):
        BlockIndex.from_blocks(given, 16)


def test_numbers_that_do_not_fit_are_refused():
    named = torch.zeros(4, 1, dtype=torch.int64)
    for columns in (0, 2.0, True):
        with pytest.raises(ValueError, match=f"columns is {columns!r}; it has to be an integer of 1 or more"):
            BlockIndex.from_blocks(named, 16, columns)
    with pytest.raises(ValueError, match="capacity is -1; it has to be an integer of 0 or more and below"):
        BlockIndex.build(torch.ones(2, 2, dtype=torch.bool), 16, capacity=-1)
    with pytest.raises(TypeError, match="layout is torch.int64, and nobody can wait here"):
        BlockIndex.build(torch.ones(2, 2, dtype=torch.int64), 16, capacity=4)
    query = torch.zeros(3, 1, 64, 8)
    with pytest.raises(ValueError, match="query has 3 sequences and the layout 2"):
        block_sparse_attention(query, query, query, torch.ones(2, 1, 4, 4, dtype=torch.bool))


@pytest.mark.parametrize("by_sequence", [False, True])
def test_beyond_the_capacity_rows_are_nan_and_others_right(device: str, by_sequence: bool):
    rng = torch.Generator().manual_seed(1)
    live = torch.rand(2 if by_sequence else 1, 2, 12, 12, generator=rng) < 0.3
    tensors = [leaf(random(rng, 2, 2, 190, 16, dtype=torch.float32), device) for _ in range(3)]
    grad = random(rng, 2, 2, 190, 16, dtype=torch.float32).to(device)
    right = block_sparse_attention(*tensors, live.to(device), block=16)
    index = BlockIndex.build(live.to(device), 16, capacity=40)
    output, lse = block_sparse_attention(*tensors, index, return_lse=True)
    lost = output.isnan()
    assert (
        lost.any()
        and not lost.all()
        and torch.equal(lost.all(-1), lost.any(-1))
        and torch.equal(lse.isnan(), lost.all(-1))
    )
    torch.testing.assert_close(output[~lost], right[~lost])
    for ours, exact in zip(gradients(output, tensors, grad), gradients(right, tensors, grad)):
        lost = ours.isnan()
        assert lost.any()
        torch.testing.assert_close(ours[~lost], exact[~lost], atol=1e-4, rtol=1e-4)
    with pytest.raises(
        ValueError, match=rf"has {live.sum()} live blocks, and its index space for 40: .*capacity={live.sum()}"
    ):
        _ = index.live_blocks


def test_a_graph_makes_an_index_of_the_blocks_that_it_chooses(device: str):
    query, key = torch.randn(2, 4, 128, 16), torch.randn(2, 2, 128, 16)
    query, key = (x.to(device).requires_grad_() for x in (query, key))

    def attend(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = (
            query.unflatten(1, (2, 2)).mean(2).unflatten(2, (-1, 16)).mean(3) @ key.unflatten(2, (-1, 16)).mean(3).mT
        )
        chosen = BlockIndex.from_blocks(scores.topk(3).indices, 16).causal()
        built = BlockIndex.build(scores > 0, 16)
        outputs = [block_sparse_attention(query, key, key, index, causal=True) for index in (chosen, built.causal())]
        return outputs[0], outputs[1]

    right = attend(query, key)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")(query, key)
    for ours, exact in zip(compiled, right):
        torch.testing.assert_close(ours, exact)
    of_both = [gradients(outputs[0] + outputs[1], [query, key], right[0].detach()) for outputs in (compiled, right)]
    for ours, exact in zip(*of_both):
        torch.testing.assert_close(ours, exact)


def test_building_and_attending_waits_for_nothing_and_a_cuda_graph_repeats_it(device: str):
    if device == "cpu":
        pytest.skip("a matter of GPUs")
    shape, dtype = (2, 4, 1024, 64), torch.bfloat16
    query, key, value, grad = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(4))
    query.requires_grad_()
    scores = torch.rand(2, 4, 16, 16, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        index = BlockIndex.from_blocks(scores.topk(4).indices, 64).causal()
        output = block_sparse_attention(query, key, value, index, causal=True)
        return output, torch.autograd.grad(output, query, grad)[0]

    step()
    with nothing_waits():
        step()
    graph, results = captured(step)
    for seed in range(3):
        scores.copy_(torch.rand(2, 4, 16, 16, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        right = step()
        torch.testing.assert_close(results[0], right[0], atol=0, rtol=0)
        torch.testing.assert_close(results[1], right[1], atol=2e-2, rtol=2e-2)


def test_another_stream_waits_for_the_one_that_named_the_blocks(device: str):
    if device == "cpu":
        pytest.skip("a matter of GPUs")
    query = torch.randn(1, 1, 256, 64, device=device)
    named = torch.tensor([[0], [1], [2], [3]], device=device)
    right = block_sparse_attention(query, query, query, BlockIndex.from_blocks(named, 64).causal(), causal=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(int(1e8))
        index = BlockIndex.from_blocks(named, 64)
    with torch.cuda.stream(torch.cuda.Stream()):
        found = block_sparse_attention(query, query, query, index.causal(), causal=True)
    torch.cuda.synchronize()
    torch.testing.assert_close(found, right, atol=0, rtol=0)


def test_a_capture_makes_no_parts_of_an_index_from_outside(device: str):
    if device == "cpu":
        pytest.skip("a matter of GPUs")
    query = torch.randn(1, 1, 64, 64, device=device)
    index = BlockIndex.from_blocks(torch.zeros(1, 1, dtype=torch.int64, device=device), 64)
    BlockIndex.from_blocks(torch.zeros(1, 1, dtype=torch.int64, device=device), 64).tiles("rows")
    torch.cuda.synchronize()
    with (
        pytest.raises(
            RuntimeError, match="made outside, cannot be made while a CUDA graph is captured; build the index"
        ),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        block_sparse_attention(query, query, query, index)
    block_sparse_attention(query, query, query, index)


def test_what_is_made_under_modes_is_none_of_theirs():
    query = torch.randn(1, 1, 64, 8)
    fresh = [BlockIndex.from_blocks(torch.tensor([[0, 1]] * 4), 16) for _ in range(3)]
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        x = fake.from_tensor(query)
        assert isinstance(block_sparse_attention(x, x, x, fresh[0].causal(), causal=True), FakeTensor)
    torch.func.grad(lambda x: block_sparse_attention(x, x, x, fresh[1].causal(), causal=True).sum())(query)
    with torch.inference_mode():
        block_sparse_attention(query, query, query, fresh[2].causal(), causal=True)
    right = BlockIndex.build(fresh[0].layout(), 16).causal()
    right = block_sparse_attention(query, query, query, right, causal=True)
    for index in fresh:
        assert not any(isinstance(x, FakeTensor) or x.is_inference() for x in index._held())
        for same in (index, copy.deepcopy(index)):
            torch.testing.assert_close(block_sparse_attention(query, query, query, same, causal=True), right)


def test_causal_parts_are_for_as_many_heads_as_their_index():
    for index in (BlockIndex.from_blocks(torch.tensor([[1], [0]]), 16), BlockIndex.build(torch.ones(2, 2).bool(), 16)):
        assert (index.for_heads(4).causal().num_heads, index.causal().num_heads) == (4, 1)
        assert index.causal() is index.causal()


def test_a_learned_bias_by_distance_is_read_where_no_gradient_is_asked_for():
    query, live = torch.randn(2, 1, 64, 8), torch.rand(2, 1, 4, 4) < 0.5
    bias = torch.randn(1, 127, requires_grad=True)
    with pytest.raises(ValueError, match="Gradients of distance_bias are of one layout for all sequences"):
        block_sparse_attention(query, query, query, live, distance_bias=bias)
    with torch.no_grad():
        ours = block_sparse_attention(query, query, query, live, distance_bias=bias)
    right = [block_sparse_attention(x[None], x[None], x[None], of, distance_bias=bias) for x, of in zip(query, live)]
    torch.testing.assert_close(ours, torch.cat(right))


def test_products_count_a_bounded_index_once_and_refuse_one_of_sequences(device: str):
    live = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    index = BlockIndex.build(live.to(device), 16, capacity=32)
    a, b = torch.randn(1, 2, 64, 8, device=device), torch.randn(1, 2, 8, 64, device=device)
    torch.testing.assert_close(MatMul(index, 16, "sdd")(a, b), MatMul(live.to(device), 16, "sdd")(a, b))
    assert index.exact() is index.exact() and not index.exact().bounded
    of_sequences = BlockIndex.build(torch.ones(2, 1, 4, 4, dtype=torch.bool, device=device).tril(), 16)
    with pytest.raises(ValueError, match="of one layout for all sequences, and this index has one for each of 2"):
        MatMul(of_sequences, 16, "sdd")


def test_layouts_of_sequences_that_are_equal_are_kept_once():
    live = torch.ones(3, 2, 4, 4, dtype=torch.bool).tril()
    index = BlockIndex.build(live, 16)
    assert (index.layout_heads, index.num_heads, index.num_sequences, index.by_sequence) == (1, 2, 3, False)
    assert repr(index) == "BlockIndex(4 x 4 blocks of 16, 2 heads of 3 sequences alike, density 62.5%, cpu)"
    assert index.causal() is index


def test_an_index_moves_to_a_device_without_waiting(device: str):
    index = BlockIndex.from_blocks(torch.tensor([[0, 1], [1, 0]]), 16).to(device)
    assert index.device.type == device and index.bounded and index.live_blocks == 4
    query = torch.randn(1, 2, 32, 8, device=device)
    torch.testing.assert_close(
        block_sparse_attention(query, query, query, index),
        block_sparse_attention(query, query, query, torch.ones(2, 2, dtype=torch.bool, device=device)),
    )


@pytest.mark.parametrize("layouts", list(product((1, 2), (1, 2, 4))))
def test_vmap_takes_layouts_of_groups_and_of_sequences(layouts: tuple[int, int]):
    live = torch.rand(*layouts, 4, 4, generator=torch.Generator().manual_seed(0)) < 0.6
    index = BlockIndex.build(live, 16)
    query, key = torch.randn(3, 2, 4, 64, 8), torch.randn(3, 2, 2, 64, 8)
    ours = torch.vmap(lambda query, key: block_sparse_attention(query, key, key, index))(query, key)
    right = torch.stack([block_sparse_attention(q, k, k, index) for q, k in zip(query, key)])
    torch.testing.assert_close(ours, right)


def test_flops_are_those_of_live_blocks():
    live = torch.rand(2, 2, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.4
    query, key = torch.randn(2, 4, 96, 8), torch.randn(2, 2, 96, 8)
    for capacity in (None, 72):
        with FlopCounterMode(display=False) as counter:
            block_sparse_attention(query, key, key, BlockIndex.build(live, 16, capacity=capacity))
        assert counter.get_total_flops() == 4 * 8 * 2 * int(live.sum()) * 16**2
