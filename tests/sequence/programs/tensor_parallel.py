"""Layers of which each rank has some heads, and models whose parameters ranks share, against the same models whole."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from unittest import mock

import deepspeed
import torch
import transformers
from cases import BERT, BLOCK, TEXT, case, refusal, run_all, slow_case
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ds_sparse
from ds_sparse.integrations.transformers.functions import attention_of

SAME = {"mode": "bslongformer", "block": 16}
MODELS = {"BertForMaskedLM": BERT, "LlamaForCausalLM": TEXT | {"num_key_value_heads": 2}}
[getattr(transformers, name) for name in MODELS]  # imported before ranks are forks
LAYERS = {
    "BertForMaskedLM": ("bert.encoder.layer", ["query", "key", "value"], "attention.self.", "attention.output.dense"),
    "LlamaForCausalLM": ("model.layers", ["q_proj", "k_proj", "v_proj"], "self_attn.", "self_attn.o_proj"),
}


def make(name, **more):
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    return cls(cls.config_class(**MODELS[name] | more)).double()


def batch_of():
    ids = torch.randint(3, 50, (2, 165), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 60:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def deal(model, name, **columns):
    """The projections of query, key and value by columns, that of the output by rows."""
    layers, projections, inside, output = LAYERS[name]
    plan = {f"{inside}{projection}": ColwiseParallel(**columns) for projection in projections}
    for layer in model.get_submodule(layers):
        parallelize_module(layer, init_device_mesh("cpu", (2,)), plan | {output: RowwiseParallel()})


def step(model):
    loss = model(**batch_of()).loss
    loss.backward()
    whole = (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters())
    return loss.detach(), [grad for grad in whole if grad is not None]


def assert_same(found, wanted):
    torch.testing.assert_close(found[0], wanted[0])
    for grad, of_whole in zip(found[1], wanted[1], strict=True):
        torch.testing.assert_close(grad, of_whole)


@case
def a_rank_has_some_heads_and_their_layouts():
    for name in MODELS:
        for block in (BLOCK, SAME):
            whole, model = make(name), make(name)
            ds_sparse.sparsify(whole, block)
            ds_sparse.sparsify(model, block)
            deal(model, name)
            assert_same(step(model), step(whole))


@case
def dtensors_by_heads_are_taken():
    # Rotary positions are tensors, which PyTorch does not multiply with DTensors.
    whole, model = make("BertForMaskedLM"), make("BertForMaskedLM")
    ds_sparse.sparsify(whole, BLOCK)
    ds_sparse.sparsify(model, BLOCK)
    deal(model, "BertForMaskedLM", use_local_output=False)
    assert_same(step(model), step(whole))


@case
def dtensors_that_are_dealt_otherwise_are_refused():
    model = make("BertForMaskedLM")
    ds_sparse.sparsify(model, BLOCK)
    deal(model, "BertForMaskedLM", use_local_output=False)
    layer = model.bert.encoder.layer[0].attention.self
    layer.query.register_forward_hook(lambda module, given, output: output.redistribute(placements=[Replicate()]))
    said = refusal(lambda: model(**batch_of()))
    assert "dealt in another way than by heads" in said and "shard the projections" in said, said


@case
def ranks_that_have_other_numbers_of_heads_are_refused():
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(
        transformers.BertConfig(**BERT | {"hidden_size": 24, "num_attention_heads": 3})
    )
    ds_sparse.sparsify(model, BLOCK)
    layer, rank = model.bert.encoder.layer[0].attention.self, distributed.get_rank()
    layer.query.mp_group = distributed.group.WORLD  # as DeepSpeed's AutoTP leaves it
    said = refusal(lambda: attention_of(layer, *[torch.ones(1, 2 - rank, 32, 8)] * 2))
    assert f"has 3 heads, of which rank {rank} of 2 has {2 - rank}" in said and "that divides 3" in said, said


@case
def heads_that_choose_blocks_together_stay_on_a_rank():
    def steps(key_heads, columns, **more):
        block = {"mode": "moba", "block": 16, "num_chosen_blocks": 3, **more}
        whole, model = ((make("LlamaForCausalLM", num_key_value_heads=key_heads)) for _ in range(2))
        ds_sparse.sparsify(whole, block)
        ds_sparse.sparsify(model, block)
        for layer in model.model.layers:
            plan = {f"self_attn.{name}": ColwiseParallel() for name in columns}
            parallelize_module(layer, init_device_mesh("cpu", (2,)), plan | {"self_attn.o_proj": RowwiseParallel()})
        return model, whole

    for model, whole in (
        steps(2, ("q_proj", "k_proj", "v_proj"), chosen_by_group=True),
        steps(1, ("q_proj",), chosen_by_group=False),  # each rank has the key head of all
    ):
        torch.testing.assert_close(model(**batch_of()).loss, whole(**batch_of()).loss)
    model, _ = steps(1, ("q_proj",), chosen_by_group=True)
    said = refusal(lambda: model(**batch_of()))
    assert "groups of 4 heads" in said and "has 2 heads and 1 key head;" in said, said


@slow_case("the quick tests deal a model that is sparse")
def a_dealt_model_becomes_sparse():
    whole, model = make("LlamaForCausalLM"), make("LlamaForCausalLM")
    ds_sparse.sparsify(whole, BLOCK)
    deal(model, "LlamaForCausalLM")
    ds_sparse.sparsify(model, BLOCK)
    assert_same(step(model), step(whole))


@slow_case("the attention of each rank is whole, as without")
def parameters_are_shared_by_fully_shard():
    for name in MODELS:
        whole, model = make(name), make(name)
        ds_sparse.sparsify(whole, BLOCK)
        ds_sparse.sparsify(model, BLOCK)
        for layer in model.get_submodule(LAYERS[name][0]):
            fully_shard(layer)
        fully_shard(model)
        assert_same(step(model), step(whole))


@slow_case("an engine of its own; the quick tests deal layouts by PyTorch")
def deepspeeds_tensor_parallelism_deals_layouts_too():
    whole, model = make("LlamaForCausalLM").float(), make("LlamaForCausalLM").float()
    ds_sparse.sparsify(whole, BLOCK)
    ds_sparse.sparsify(model, BLOCK)
    expected = whole(**batch_of()).loss
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config = {"train_batch_size": 2, "optimizer": optimizer, "tensor_parallel": {"autotp_size": 2}}
    engine, *_ = deepspeed.initialize(model=deepspeed.tp_model_init(model, 2, torch.float32), config=config)
    loss = engine(**batch_of()).loss
    torch.testing.assert_close(loss, expected)
    engine.backward(loss)
    engine.step()
    assert engine(**batch_of()).loss < loss


@case
def heads_that_deepspeed_exchanges_are_refused():
    own = slice(64 * distributed.get_rank(), 64 * distributed.get_rank() + 64)
    part = {"input_ids": batch_of()["input_ids"][:, own], "position_ids": torch.arange(128).expand(2, -1)[:, own]}
    for block in (BLOCK, SAME | {"layers": {"0": None}}):
        model = make("LlamaForCausalLM")
        ds_sparse.sparsify(model, block)
        with ulysses(model):
            said = refusal(functools.partial(model, **part))
        assert "layers.0.self_attn" in said and "has 4 heads and its attention is called with 2" in said, said
        assert "UlyssesSPAttentionHF" in said and "sequence_parallel_size" in said, said
    dense = make("LlamaForCausalLM")
    with ulysses(dense):
        said = refusal(lambda: ds_sparse.sparsify(dense, BLOCK))
        assert "UlyssesSPAttentionHF exchanges heads around the attention function 'sdpa'" in said, said
    ds_sparse.sparsify(dense, BLOCK)


@contextmanager
def ulysses(model):
    """DeepSpeed's exchange of heads around the attention function that the model has."""
    core = model.config._attn_implementation
    deepspeed.init_distributed("gloo")
    with mock.patch.multiple(parallel_state_sp, _SEQUENCE_PARALLEL_GROUP=None, _SEQUENCE_DATA_PARALLEL_GROUP=None):
        UlyssesSPAttentionHF.register_with_transformers(model, core, sequence_parallel_size=2, micro_batch_size=2)
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[core]


run_all(ds_sparse.init_distributed)  # with which DeepSpeed compiles no operator of its own
