"""SparseSelfAttention: DeepSpeed's module, its checkpoints, its masks."""

import copy
import gc
import pickle
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_sparse import (
    BigBirdSparsityConfig,
    FixedSparsityConfig,
    MatMul,
    Softmax,
    SparseSelfAttention,
    SparsityConfig,
    VariableSparsityConfig,
    reference,
)
from ds_sparse.index.master_layout import MasterLayout
from ds_sparse.reference import bias_of_pairs

HEADS, BLOCK, TOKENS = 4, 16, 128
DROPS = (-0.1, 1.0, 1.5, float("nan"))


def make(config=None, max_seq_length=TOKENS, **arguments):
    config = config or FixedSparsityConfig(num_heads=HEADS, block=BLOCK)
    return SparseSelfAttention(config, max_seq_length=max_seq_length, **arguments)


def inputs(tokens=TOKENS, dtype=torch.float64, batch=2, heads=HEADS, head_dim=8):
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(batch, heads, tokens, head_dim, generator=generator, dtype=dtype) for _ in range(3)]


def expected(module, query, key, value, **arguments):
    layout = module.attention.layout_for(query.shape[2])
    return reference.attention(query, key, value, layout, BLOCK, scale=query.shape[-1] ** -0.5, **arguments)


@pytest.mark.parametrize("implementation", ["fused", "separate"])
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize(
    ("tokens", "key_heads", "causal"), [(1, 4, True), (50, 2, True), (128, 4, False), (130, 1, False)]
)
def test_is_attention_on_the_live_blocks_at_any_length(tokens, key_heads, causal, kind, implementation):
    structure = BigBirdSparsityConfig(HEADS, BLOCK, different_layout_per_head=True, seed=1, causal=causal)
    module, (query, key, value) = make(structure, implementation=implementation), inputs(tokens)
    operands = [x.requires_grad_() for x in (query, key[:, :key_heads].clone(), value[:, :key_heads].clone())]
    bias = torch.randn(1, HEADS, tokens, tokens, dtype=torch.float64, requires_grad=True)
    keep, pairs = torch.arange(tokens) < torch.tensor([[tokens], [tokens - 7]]), torch.rand(2, 1, tokens, tokens) < 0.8
    masks = {
        "none": {},
        "bool": {"key_padding_mask": keep, "attn_mask": pairs, "rpe": bias},
        "float": {"key_padding_mask": torch.where(keep, 0.0, -9.0), "attn_mask": torch.where(pairs, 0.5, -torch.inf)},
    }[kind]
    out, truth = module.attend(*operands, **masks), expected(module, *operands, causal=causal, **masks)
    torch.testing.assert_close(out, truth)
    leaves, weight = [*operands, *([bias] if "rpe" in masks else [])], torch.randn_like(out)
    ours, theirs = (torch.autograd.grad((x * weight).sum(), leaves) for x in (out, truth))
    torch.testing.assert_close(ours, theirs)


def test_a_module_keeps_few_indices_however_many_lengths_it_meets():
    attention = make(max_seq_length=40 * BLOCK).attention
    first = attention.index(BLOCK, torch.device("cpu"))
    assert attention.index(BLOCK, torch.device("cpu")) is first
    for blocks in range(2, 40):
        attention.index(blocks * BLOCK, torch.device("cpu"))
    assert len(attention.covering(1)._indices) <= 16
    assert attention.index(BLOCK, torch.device("cpu")) is not first


def test_shorter_sequences_take_the_top_left_of_the_master_layout():
    module = make(BigBirdSparsityConfig(num_heads=HEADS, block=BLOCK, seed=3))
    assert torch.equal(module.get_layout(64), module.master_layout[:, :4, :4])
    assert module.get_layout(64).dtype == torch.int64
    torch.testing.assert_close(module(*inputs(64)), expected(module, *inputs(64)))


def test_longer_sequences_get_a_layout_of_their_own_and_leave_the_master_alone():
    module = make()
    before = module.master_layout.clone()
    assert torch.equal(module.get_layout(256), module.sparsity_config.make_layout(256))
    torch.testing.assert_close(module(*inputs(256)), expected(module, *inputs(256)))
    assert torch.equal(module.master_layout, before)


def test_copies_share_the_layouts_of_longer_sequences():
    module = make(BigBirdSparsityConfig(num_heads=HEADS, block=BLOCK))
    twin = copy.deepcopy(module)
    layout = module.get_layout(256)
    for again in (twin, pickle.loads(pickle.dumps(module))):
        assert torch.equal(again.get_layout(256), layout)
    assert twin.get_ops(HEADS, 256) == module.get_ops(HEADS, 256)


def test_modules_with_other_layouts_do_not_share_operations():
    query, key, value = inputs()
    narrow, wide = make(FixedSparsityConfig(HEADS, BLOCK, num_local_blocks=2)), make(FixedSparsityConfig(HEADS, BLOCK))
    assert not torch.allclose(narrow(query, key, value), wide(query, key, value))
    torch.testing.assert_close(narrow(query, key, value), expected(narrow, query, key, value))


def test_key_may_come_transposed():
    query, key, value = inputs()
    module = make()
    torch.testing.assert_close(module(query, key.transpose(-1, -2), value), module(query, key, value))


@pytest.mark.parametrize("shape", [(2, TOKENS), (2, 1, 1, TOKENS)])
def test_key_padding_mask_is_added_by_default(shape):
    query, key, value = inputs()
    mask = torch.zeros(2, TOKENS)
    mask[1, 100:] = -10000.0
    module = make()
    out = module(query, key, value, key_padding_mask=mask.reshape(shape))
    torch.testing.assert_close(out, expected(module, query, key, value, key_padding_mask=mask.double()))
    assert not torch.allclose(out[1], module(query, key, value)[1])
    torch.testing.assert_close(out[0], module(query, key, value)[0])


@pytest.mark.parametrize("implementation", ["fused", "separate"])
@pytest.mark.parametrize("between", [(HEADS,), (HEADS, 1)], ids=str)
def test_of_a_key_padding_mask_a_head_the_first_counts_for_all(between, implementation):
    query, key, value = inputs()
    mask = torch.zeros(2, *between, TOKENS)
    mask[1, 0, ..., 100:] = -10000.0
    mask[:, 1:, ..., 7] = -10000.0
    module = make(implementation=implementation)
    with pytest.warns(UserWarning, match=r"the first head's counts for all, as in DeepSpeed"):
        out = module(query, key, value, key_padding_mask=mask)
    assert torch.equal(out, module(query, key, value, key_padding_mask=mask[:, 0].reshape(2, TOKENS)))


def test_attention_mask_keeps_where_not_zero_by_default():
    query, key, value = inputs()
    mask = torch.ones(TOKENS, TOKENS).tril()
    module = make()
    truth = expected(module, query, key, value, attn_mask=mask.bool())
    for given in (mask, mask.long(), mask.bool(), mask[None], mask[None, None].double(), mask[:, None]):
        torch.testing.assert_close(module(query, key, value, attn_mask=given), truth)


def test_bool_mask_in_add_mode_adds_one_and_warns():
    query, key, value = inputs()
    module = make(attn_mask_mode="add")
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    with pytest.warns(UserWarning, match="nothing is masked by 0 and 1"):
        out = module(query, key, value, attn_mask=mask)
    torch.testing.assert_close(out, expected(module, query, key, value, attn_mask=mask.double()))


def test_finite_lowest_masks_do_not_become_infinite_in_a_smaller_dtype():
    query, key, value = inputs(dtype=torch.bfloat16)
    mask = torch.full((2, TOKENS), torch.finfo(torch.float32).min)
    out = make()(query, key, value, key_padding_mask=mask)
    assert torch.isfinite(out).all() and (out != 0).any()


def test_a_bias_by_distance_is_trained_as_the_matrix_is():
    query, key, value = inputs()
    bias = torch.randn(HEADS, 2 * TOKENS - 1, dtype=torch.float64, requires_grad=True)
    module = make()
    rpe = bias_of_pairs(bias, TOKENS, TOKENS)[None]
    (ours,) = torch.autograd.grad(module(query, key, value, distance_bias=bias).square().sum(), bias)
    (truth,) = torch.autograd.grad(expected(module, query, key, value, rpe=rpe).square().sum(), bias)
    torch.testing.assert_close(ours, truth)
    with pytest.raises(ValueError, match='distance_bias is given, and only implementation="fused" takes it'):
        make(implementation="separate")(query, key, value, distance_bias=bias)


def test_dropout_drops_in_training_only_and_repeats_with_the_seed():
    query, key, value = inputs()
    module, plain = make(attention_dropout=0.5), make()
    torch.manual_seed(0)
    first = module(query, key, value)
    torch.manual_seed(0)
    assert torch.equal(first, module(query, key, value))
    assert not torch.allclose(first, plain(query, key, value))
    torch.testing.assert_close(module.eval()(query, key, value), plain(query, key, value))


def test_state_dict_has_the_layout_and_loads_with_without_and_with_another_size():
    config = BigBirdSparsityConfig(num_heads=HEADS, block=BLOCK, different_layout_per_head=True)
    trained, fresh = make(copy.deepcopy(config)), make(copy.deepcopy(config))
    state = trained.state_dict()
    assert list(state) == ["master_layout"]
    assert state["master_layout"].dtype == torch.int64 and state["master_layout"].shape == (HEADS, 8, 8)
    assert not torch.equal(fresh.master_layout, trained.master_layout)
    fresh(*inputs())
    fresh.load_state_dict(state)
    assert torch.equal(fresh.master_layout, trained.master_layout)
    torch.testing.assert_close(fresh(*inputs()), trained(*inputs()))
    fresh.load_state_dict({})
    assert torch.equal(fresh.master_layout, trained.master_layout)
    longer = make(copy.deepcopy(config), max_seq_length=256)
    longer.load_state_dict(state)
    assert longer.max_seq_length == TOKENS


def test_a_checkpoint_names_no_module_of_ours_which_may_move(tmp_path):
    module = make()
    torch.save(module.state_dict(), tmp_path / "checkpoint.pt")
    with zipfile.ZipFile(tmp_path / "checkpoint.pt") as checkpoint:
        (pickled,) = (name for name in checkpoint.namelist() if name.endswith("data.pkl"))
        assert b"ds_sparse" not in checkpoint.read(pickled)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert type(state["master_layout"]) is torch.Tensor and torch.equal(state["master_layout"], module.master_layout)


def test_checkpoint_of_another_number_of_heads_is_refused():
    state = make(FixedSparsityConfig(num_heads=2, block=BLOCK)).state_dict()
    with pytest.raises(RuntimeError, match=r"master_layout: A layout of shape \(2, 8, 8\) is given for 4 heads"):
        make().load_state_dict(state)


def unlike_the_default_device():
    """Ways in which a program may ask for tensors without memory while it builds a model."""
    deepspeed, accelerate = pytest.importorskip("deepspeed"), pytest.importorskip("accelerate")
    return {
        "torch.device": torch.device("meta"),
        "OnDevice": deepspeed.OnDevice(dtype=torch.float16, device="meta"),
        "init_empty_weights": accelerate.init_empty_weights(include_buffers=False),
        "with buffers": accelerate.init_empty_weights(include_buffers=True),
        "FakeTensorMode": FakeTensorMode(),
    }


@pytest.mark.filterwarnings("ignore::ds_sparse.SparsityWarning")
@pytest.mark.parametrize("way", ["torch.device", "OnDevice", "init_empty_weights", "with buffers", "FakeTensorMode"])
@pytest.mark.parametrize("structure", [FixedSparsityConfig, VariableSparsityConfig, BigBirdSparsityConfig])
def test_a_module_built_without_memory_has_its_layout_and_runs(way, structure):
    config = structure(num_heads=HEADS, block=BLOCK, different_layout_per_head=True, seed=1)
    real = make(config)
    with unlike_the_default_device()[way]:
        module = make(config)
    assert module.master_layout.device.type == "cpu"
    assert torch.equal(module.master_layout, real.master_layout)
    assert torch.equal(module.to_empty(device="cpu")(*inputs()), real(*inputs()))


def test_a_default_device_without_memory_is_not_asked_at_construction_nor_in_forward():
    real, given = make(), inputs(64)
    torch.set_default_device("meta")
    try:
        out = make()(*given)
    finally:
        torch.set_default_device(None)
    assert torch.equal(out, real(*given))


def test_a_structure_of_the_users_is_laid_out_on_the_cpu():
    class Own(SparsityConfig):
        def make_layout(self, seq_len):
            return self.setup_layout(seq_len) + torch.eye(seq_len // self.block, dtype=torch.int64)

    with torch.device("meta"):
        module = make(Own(num_heads=HEADS, block=BLOCK))
    assert torch.equal(module.master_layout[0], torch.eye(8, dtype=torch.int64))


def test_the_layout_is_a_persistent_buffer_that_stays_on_the_cpu():
    module = make()
    program = torch.nn.ModuleDict({"attention": module})
    assert torch.equal(program.get_buffer("attention.master_layout"), module.sparsity_config.make_layout(TOKENS))
    assert [name for name, _ in module.named_buffers()] == ["master_layout"]
    assert list(program.state_dict()) == ["attention.master_layout"]
    program.to("meta").half().to_empty(device="cpu")
    assert module.master_layout.device.type == "cpu" and module.master_layout.dtype == torch.int64
    assert torch.equal(module.master_layout, module.sparsity_config.make_layout(TOKENS))


class Holding:
    """A structure that hands out its own tensor, and derives from nothing."""

    num_heads, block = HEADS, 16

    def __init__(self):
        self.held = torch.rand(HEADS, 4, 4, generator=torch.Generator().manual_seed(0)) < 0.5

    def make_layout(self, seq_len):
        return self.held


def test_what_becomes_of_a_callers_tensor_changes_no_module():
    first, second = Holding(), Holding()
    SparseSelfAttention(first, max_seq_length=64)
    module, x = SparseSelfAttention(second, max_seq_length=64), torch.randn(1, HEADS, 64, 16)
    expected = SparseSelfAttention(Holding(), max_seq_length=64, implementation="separate")(x, x, x)
    first.held.fill_(True)
    assert torch.equal(module.attention.layout, second.held)
    torch.testing.assert_close(module(x, x, x), expected)


def test_equal_layouts_are_found_by_their_text_as_long_as_one_of_them_lives():
    first, second = make(), make()
    of_second = second.attention._master
    del first
    gc.collect()
    assert MasterLayout.read(of_second.text).layout is of_second.layout


@pytest.mark.parametrize("implementation", ["fused", "separate"])
def test_a_layout_is_made_inside_of_transforms_too(implementation: str):
    module = make(implementation=implementation)
    x = torch.randn(1, HEADS, 2 * module.max_seq_length, 16)
    (expected,) = torch.autograd.grad(module(leaf := x.clone().requires_grad_(), leaf, leaf).square().sum(), leaf)
    fresh = make(implementation=implementation)
    torch.testing.assert_close(torch.func.grad(lambda q: fresh(q, q, q).square().sum())(x), expected)
    state = fresh.state_dict()
    found = torch.func.grad(lambda q: torch.func.functional_call(fresh, state, (q, q, q)).square().sum())(x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("implementation", ["fused", "separate"])
def test_an_output_may_be_changed_in_place(implementation: str):
    with torch.no_grad():
        output = make(implementation=implementation)(*inputs())
    output.add_(torch.zeros_like(output, requires_grad=True))
    assert output.requires_grad


@pytest.mark.parametrize("kind", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_get_a_sentence(kind: torch.layout):
    x = torch.nested.nested_tensor([torch.randn(16, HEADS, 8), torch.randn(32, HEADS, 8)], layout=kind)
    with pytest.raises(ValueError, match="query is a nested tensor; give query.to_padded_tensor"):
        make()(x, x, x)


def test_layers_of_one_structure_share_one_tensor_of_one_head():
    module = make()
    twin = copy.deepcopy(module)
    buffer = module.master_layout
    assert buffer is twin.master_layout and buffer is make().master_layout
    assert module.attention._master.layout is make().attention._master.layout
    assert buffer.shape == (HEADS, 8, 8) and buffer.untyped_storage().nbytes() == 8 * 8 * 8
    states = module.state_dict()["master_layout"], twin.state_dict()["master_layout"]
    assert all(type(state) is torch.Tensor and state.is_contiguous() for state in states)
    assert states[0].data_ptr() != states[1].data_ptr()


def test_what_fills_missing_buffers_leaves_the_layout_and_what_a_checkpoint_wrote_counts():
    config = BigBirdSparsityConfig(num_heads=HEADS, block=BLOCK, seed=1)
    module, other = make(config), torch.eye(8, dtype=torch.int64).expand(HEADS, -1, -1)
    before = module.master_layout.clone()
    module.load_state_dict({"master_layout": torch.empty_like(module.master_layout)}, strict=False, assign=True)
    assert torch.equal(module.master_layout, before)
    module.load_state_dict({"master_layout": other}, assign=True)
    assert torch.equal(module.master_layout, other)


WRITES = {
    "all": torch.Tensor.zero_,
    "a part": lambda layout: layout.__setitem__(0, 1),
    "an operator": lambda layout: layout.__ior__(1),
    "a view": lambda layout: layout[0].zero_(),
    "a view of a view": lambda layout: layout[0].T[1].fill_(0),
    "a loop": lambda layout: [head.zero_() for head in layout],
    "data": lambda layout: layout.data[0].zero_(),
    "other data": lambda layout: setattr(layout, "data", torch.zeros_like(layout)),
    "detached": lambda layout: layout.detach()[0].zero_(),
    "out": lambda layout: torch.add(layout[0], 1, out=layout[0]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_the_layout_is_for_reading_and_so_is_what_shares_its_memory(write):
    module = make()
    layout = module.master_layout
    before = layout.clone()
    with pytest.raises(RuntimeError, match="master_layout is for reading.*module.master_layout = layout"):
        write(layout)
    assert torch.equal(layout, before)


def test_arrays_of_the_layout_are_read_only_and_copies_are_not():
    layout = make().master_layout
    for array in (layout.numpy(), np.asarray(layout), layout[0].numpy()):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    for changed in (layout.clone(), layout.float(), layout + 0):
        assert type(changed) is torch.Tensor
        changed.numpy()[...] = 0
    assert not torch.equal(layout, layout.clone().zero_())


def test_another_layout_is_assigned_and_copies_are_plain():
    module = make()
    module.master_layout = module.master_layout.float()
    for copied in (copy.deepcopy(module.master_layout), pickle.loads(pickle.dumps(module.master_layout))):
        assert type(copied) is torch.Tensor and torch.equal(copied, module.sparsity_config.make_layout(TOKENS))


def test_no_write_to_what_a_module_hands_out_reaches_its_layout():
    module, x = make(BigBirdSparsityConfig(num_heads=1, block=BLOCK, seed=1)), inputs()[0][:, :1]
    before, attended = module.get_layout(TOKENS), module(x, x, x)
    attention, (scores, *_) = module.attention, module.get_ops(1, TOKENS)
    layouts = (attention.layout, attention.layout_for(TOKENS), module.get_layout(TOKENS), scores.layout.layout())
    for given in layouts:
        given.numpy()[...] = 0
    assert torch.equal(module.master_layout, before) and torch.equal(module.get_layout(TOKENS), before)
    assert torch.equal(module(x, x, x), attended)


def test_accelerate_writes_the_layout_where_it_finds_the_buffer():
    write = pytest.importorskip("accelerate.utils").set_module_tensor_to_device
    module, layout = make(), torch.eye(8, dtype=torch.int64).repeat(HEADS, 1, 1)
    before = module(*inputs())
    write(module, "master_layout", "meta")
    assert torch.equal(module(*inputs()), before)
    write(module, "master_layout", "cpu", value=layout)
    torch.testing.assert_close(module(*inputs()), expected(module, *inputs()))
    assert torch.equal(module.master_layout, layout)


def test_operations_and_layouts_are_handed_out_as_deepspeed_did():
    module, (query, key, value) = make(), inputs(64)
    scores, output, softmax = module.get_ops(HEADS, 64)
    assert (type(scores), type(output), type(softmax)) == (MatMul, MatMul, Softmax)
    assert (scores.mode, scores.trans_b, output.mode, output.trans_b) == ("sdd", True, "dsd", False)
    layout = module.get_layout(64)
    assert scores.spdims == output.spdims == softmax.spdims == layout.shape
    assert softmax.num_blocks == layout.sum()
    out = output(softmax(scores(query, key), scale=query.shape[-1] ** -0.5), value)
    torch.testing.assert_close(out, module(query, key, value))
    module.get_ops(HEADS, TOKENS)
    assert module.ops == {64: (scores, output, softmax), TOKENS: module.get_ops(HEADS, TOKENS)}
    assert make().ops == {}
    with pytest.raises(AttributeError, match=r"module\.get_ops\(H, L\)"):
        SparseSelfAttention.ops  # noqa: B018


def test_keys_and_masks_are_transposed_as_deepspeed_did():
    module, key = make(), torch.ones(2, HEADS, 8, 64)
    assert module.transpose_key_for_scores(key, 64).shape == (2, HEADS, 64, 8)
    assert module.transpose_key_for_scores(key, 8) is key
    padding, pairs = torch.ones(1, 1, 1, 64, dtype=torch.bool), torch.ones(1, 64, 64, dtype=torch.int64)
    transposed = module.transpose_mask_for_sparse(torch.float16, padding, is_key_padding_mask=True)
    assert transposed.shape == (1, 64) and transposed.dtype == torch.float16
    assert module.transpose_mask_for_sparse(torch.float32, pairs).shape == (64, 64)


def test_ranks_have_to_agree_only_about_blocks_that_they_draw(monkeypatch):
    # Tests with DeepSpeed leave a group of one process.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    drawn = make(BigBirdSparsityConfig(num_heads=HEADS, block=BLOCK))
    assert drawn._need_layout_synchronization and not make()._need_layout_synchronization
    drawn._need_layout_synchronization = False
    assert not drawn._need_layout_synchronization


def test_an_assigned_layout_is_used():
    module, query_key_value = make(), inputs()
    module(*query_key_value)
    module.master_layout = torch.eye(8, dtype=torch.int64).expand(HEADS, -1, -1)
    torch.testing.assert_close(module(*query_key_value), expected(module, *query_key_value))
    with pytest.raises(ValueError, match=r"it has to be \(4, R, R\)"):
        module.master_layout = torch.ones(3, 8, 8)[..., :4].long()


def test_copies_share_the_operations_until_one_takes_another_layout():
    module = make(BigBirdSparsityConfig(num_heads=HEADS, block=BLOCK, seed=1))
    twin = copy.deepcopy(module)
    assert twin.get_ops(HEADS, TOKENS) == module.get_ops(HEADS, TOKENS)
    before = module(*inputs())
    twin.load_state_dict(make(BigBirdSparsityConfig(num_heads=HEADS, block=BLOCK, seed=2)).state_dict())
    assert torch.equal(module(*inputs()), before) and not torch.equal(twin(*inputs()), before)


def test_long_layouts_keep_one_head_and_little_memory():
    module = make(FixedSparsityConfig(num_heads=12, block=BLOCK), max_seq_length=32768)
    assert module.attention.layout.dtype == torch.bool and module.attention.layout.shape == (1, 2048, 2048)


def test_attend_scales_as_it_is_told_and_refuses_what_it_cannot_read():
    attention, (query, key, value) = make().attention, inputs(64)
    truth = reference.attention(query, key, value, attention.layout_for(64), BLOCK, scale=0.5)
    torch.testing.assert_close(attention(query, key, value, scale=0.5), truth)
    with pytest.raises(ValueError, match="key_padding_mask is torch.int64; it has to be bool"):
        attention(query, key, value, key_padding_mask=torch.ones(2, 64, dtype=torch.int64))
    query, key, value = inputs(50)
    keep = torch.ones(2, 50, dtype=torch.bool)
    for name, mask, shape in (
        ("key_padding_mask", keep[:, :40], r"\(2, 40\); it has to be \(2, 50\), where all but the last may be 1\."),
        ("attn_mask", keep[:, None, None, :1], r"\(2, 1, 1, 1\); it has to be \(2, 4, 50, 50\)"),
        ("rpe", torch.ones(4, 50, 50), r"\(4, 50, 50\); it has to be \(2, 4, 50, 50\), .* or \(50, 50\)"),
    ):
        with pytest.raises(ValueError, match=f"{name} has shape {shape}"):
            attention(query, key, value, **{name: mask})
    query, key, value = inputs(64)
    with pytest.raises(ValueError, match="without a token; give at least one"):
        attention(query[:, :, :0], key[:, :, :0], value[:, :, :0])


RANKS = """
import atexit, os, signal, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import ds_sparse
other = os.fork()
rank = 0 if other else 1
signal.alarm(100)  # the end of a rank that waits for nothing, before that of the test
if other:
    atexit.register(os.kill, other, signal.SIGKILL)  # which would wait for a rank that an error ended
dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=rank, world_size=2)
def make(**options):
    config = ds_sparse.BigBirdSparsityConfig(num_heads=2, block=16, **options)
    return ds_sparse.SparseSelfAttention(config, max_seq_length=64)
def attend(module, tokens):
    return module(*torch.ones(3, 1, 2, tokens, 8).unbind())
seeded = make(seed=1)
attend(seeded, 64 if rank == 0 else 128)
if rank == 1:
    attend(make(seed=1), 64)
drawn = make(num_random_blocks=2)
layouts = [None, None]
dist.all_gather_object(layouts, drawn.master_layout)
assert torch.equal(*layouts)
try:
    attend(drawn, 128)
except ValueError as error:
    print("rank", rank, error)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.attention = torch.nn.Linear(8, 8), make(seed=1)
    def forward(self, x):
        x = self.linear(x)
        return self.attention(x, x, x)
program = Model()
assert not list(program.buffers()) and "attention.master_layout" in program.state_dict()
DistributedDataParallel(program)(torch.ones(1, 2, 64, 8)).sum().backward()
with torch.device("meta"):
    sharded = Model()
fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
sharded.to_empty(device="cpu")(torch.ones(1, 2, 64, 8)).sum().backward()
assert torch.equal(sharded.attention.master_layout, program.attention.master_layout)
dist.destroy_process_group()
sys.stdout.flush()
status = os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) if other else 0
os._exit(status)  # at a usual end PyTorch's threads of the groups that models hold abort the process now and then
"""


def test_ranks_agree_on_random_layouts_and_otherwise_do_not_wait_for_each_other(tmp_path):
    start = [sys.executable, "-c", RANKS]
    done = subprocess.run(start, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("build the module with max_seq_length=128, or give the structure a seed") == 2


def test_any_object_with_block_num_heads_and_make_layout_is_a_structure():
    class Diagonal:
        block, num_heads = BLOCK, HEADS

        def make_layout(self, seq_len):
            return torch.eye(seq_len // BLOCK, dtype=torch.int64).expand(HEADS, -1, -1)

    module = make(Diagonal())
    torch.testing.assert_close(module(*inputs()), expected(module, *inputs()))


def test_a_structure_that_uses_the_name_causal_for_its_own_is_not_masked_by_token():
    class Own(FixedSparsityConfig):
        def __init__(self):
            super().__init__(HEADS, BLOCK)
            self.causal = True

    class OfNothing:
        block, num_heads, causal = BLOCK, HEADS, True
        make_layout = staticmethod(FixedSparsityConfig(HEADS, BLOCK).make_layout)

    plain = make(FixedSparsityConfig(HEADS, BLOCK))(*inputs())
    for structure in (Own(), OfNothing()):
        for implementation in ("fused", "separate"):
            torch.testing.assert_close(make(structure, implementation=implementation)(*inputs()), plain)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"max_seq_length": 100}, "The sequence length, 100, is not a multiple of the block, 16; use 112."),
        ({"implementation": "fast"}, "implementation is 'fast'; it has to be 'fused' or 'separate'"),
        ({"attn_mask_mode": "keep"}, "attn_mask_mode is 'keep'; it has to be 'add' or 'mul'"),
        *(({"attention_dropout": p}, f"_dropout is {p}; it has to be 0 or more and below 1") for p in DROPS),
    ],
)
def test_modules_that_cannot_be_built_say_why(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(**arguments)


@pytest.mark.parametrize(
    "operands, masks, error, sentence",
    [
        (inputs(72), {}, ValueError, "length, 72, is not .* block, 16; use 80.*_attention takes any length"),
        (inputs(heads=8), {}, ValueError, "query has 8 heads and the sparsity config num_heads=4"),
        ([*inputs()[:2], inputs(64)[2]], {}, NotImplementedError, "only self-attention"),
        ([inputs()[0], *inputs(heads=3)[1:]], {}, NotImplementedError, "fewer heads that divide H"),
        ([inputs()[0], *inputs(heads=0)[1:]], {}, NotImplementedError, "fewer heads that divide H"),
        ([inputs()[0], *inputs(batch=1)[1:]], {}, NotImplementedError, "only self-attention"),
        (inputs(), {"attn_mask": torch.ones(2, 128, 128)}, ValueError, r"attn_mask has shape \(2, 128, 128\)"),
        (inputs(), {"key_padding_mask": torch.ones(2, 5, 128)}, ValueError, r"key_padding_mask .* \(2, 5, 128\)"),
    ],
)
def test_calls_that_do_not_fit_say_what_is_wanted(operands, masks, error, sentence):
    with pytest.raises(error, match=sentence):
        make()(*operands, **masks)


def test_its_repr_names_the_structure():
    module = SparseSelfAttention()
    assert repr(module) == "SparseSelfAttention(FixedSparsityConfig, num_heads=4, block=16, max_seq_length=2048)"


def test_parts_of_a_module_that_the_first_release_pickled_are_made_anew():
    attention = SparseSelfAttention(FixedSparsityConfig(num_heads=2, block=16), max_seq_length=64).attention
    attention._parts = {}  # which it had in the place of the cache
    copied = pickle.loads(pickle.dumps(attention))
    assert copied.of_heads((1,)).sparsity_config.num_heads == 1
