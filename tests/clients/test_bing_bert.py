"""A pre-LayerNorm BERT in the manner of bing_bert's modelingpreln: the structure from the DeepSpeed JSON,
`attention.self` swapped, inputs padded to whole blocks."""

from __future__ import annotations

import argparse
import copy
import json

import pytest
import torch
from clients.dense import DenseSelfAttention, assert_equal_to_dense
from torch import nn

import ds_sparse

HEADS, HIDDEN, BATCH, TOKENS = 2, 16, 2, 128


def get_deepspeed_config(args):
    if not getattr(args, "deepspeed_config", None):
        raise RuntimeError("deepspeed_config is not found in args.")
    from deepspeed import DeepSpeedConfig

    return DeepSpeedConfig(args.deepspeed_config)


def get_sparse_attention_config(args, num_heads):
    if not args.deepspeed_sparse_attention:
        return None
    import deepspeed.ops.sparse_attention

    ds_config = get_deepspeed_config(args)
    if not (hasattr(ds_config, "sparse_attention") and ds_config.sparse_attention):
        return deepspeed.ops.sparse_attention.FixedSparsityConfig(num_heads=num_heads)
    sa_config = ds_config.sparse_attention
    names = {"bigbird": "BigBird", "bslongformer": "BSLongformer"}
    name = names.get(sa_config.get("mode"), sa_config.get("mode").capitalize())
    del sa_config["mode"]
    return getattr(deepspeed.ops.sparse_attention, f"{name}SparsityConfig")(num_heads=num_heads, **sa_config)


def get_sparse_attention_utils(sparse_attention_config):
    if sparse_attention_config is None:
        return None
    from deepspeed.ops.sparse_attention import SparseAttentionUtils

    return SparseAttentionUtils


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self = None
        self.output = nn.Linear(config.hidden_size, config.hidden_size)


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = Attention(config)
        self.norm = nn.LayerNorm(config.hidden_size)

    def forward(self, hidden_states, attention_mask):
        return hidden_states + self.attention.output(self.attention.self(self.norm(hidden_states), attention_mask))


class Model(nn.Module):
    """ids (B, T) and an attention mask (B, T) of 0 and 1 -> (B, T, hidden)."""

    def __init__(self, config, args):
        super().__init__()
        self.sparse_attention_config = get_sparse_attention_config(args, config.num_attention_heads)
        self.sparse_attention_utils = get_sparse_attention_utils(self.sparse_attention_config)
        self.pad_token_id = 0
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        layer = Layer(config)
        from deepspeed.ops.sparse_attention import BertSparseSelfAttention

        layer.attention.self = BertSparseSelfAttention(config, sparsity_config=self.sparse_attention_config)
        self.layer = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))

    def forward(self, input_ids, attention_mask):
        pad_len, input_ids, attention_mask, *_ = self.sparse_attention_utils.pad_to_block_size(
            block_size=self.sparse_attention_config.block,
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=None,
            position_ids=None,
            inputs_embeds=None,
            pad_token_id=self.pad_token_id,
            model_mbeddings=self.embeddings,
        )
        hidden_states = self.embeddings(input_ids)
        mask = (1.0 - attention_mask[:, None, None].to(hidden_states.dtype)) * -10000.0
        for layer in self.layer:
            hidden_states = layer(hidden_states, mask)
        return self.sparse_attention_utils.unpad_sequence_output(pad_len, hidden_states)


class DenseBertSelfAttention(nn.Module):
    """In the place of a `BertSparseSelfAttention`, with its projections."""

    def __init__(self, sparse):
        super().__init__()
        self.query, self.key, self.value = sparse.query, sparse.key, sparse.value
        core = sparse.sparse_self_attention
        self.core = DenseSelfAttention(core.master_layout, core.sparsity_config.block)

    def forward(self, hidden_states, attention_mask):
        query, key, value = (
            projection(hidden_states).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        return self.core(query, key, value, key_padding_mask=attention_mask).transpose(1, 2).flatten(2)


def make_dense(program):
    for layer in program.layer:
        layer.attention.self = DenseBertSelfAttention(layer.attention.self)


@pytest.fixture
def make_program(tmp_path, device):
    def make(block):
        path = tmp_path / "ds.json"
        optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
        config = {"train_batch_size": 2, "optimizer": optimizer, "sparse_attention": block}
        path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
        args = argparse.Namespace(deepspeed_config=str(path), deepspeed_sparse_attention=True)
        torch.manual_seed(0)
        config = argparse.Namespace(vocab_size=30, hidden_size=HIDDEN, num_attention_heads=HEADS)
        program = Model(config, args).to(device)
        program.json = str(path)
        return program

    return make


BLOCKS = [
    {"mode": "dense", "block": 16},
    {"num_local_blocks": 2},
    {"mode": "variable", "block": 32, "local_window_blocks": [1, 2], "global_block_indices": [2]},
    {"mode": "bigbird", "num_random_blocks": 1, "different_layout_per_head": True},
    {"mode": "bslongformer", "block": 16, "num_sliding_window_blocks": 1, "global_block_indices": [0, 3]},
    None,
]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: "no block" if block is None else block.get("mode", "fixed"))
def test_each_mode_at_lengths_that_are_not_whole_blocks(make_program, device, block):
    program = make_program(block)
    input_ids = torch.randint(1, 30, (BATCH, TOKENS - 9), device=device)
    mask = torch.ones_like(input_ids)
    mask[1, 40:] = 0
    assert_equal_to_dense(program, make_dense, input_ids, mask)


def test_initialize_with_the_flag_takes_it_as_it_is(make_program):
    program = make_program({"mode": "bigbird", "num_random_blocks": 1, "attention": "unidirectional", "seed": 3})
    args = argparse.Namespace(deepspeed_config=program.json, deepspeed_sparse_attention=True)
    engine, *_ = ds_sparse.initialize(args=args, model=program, model_parameters=program.parameters())
    input_ids = torch.randint(1, 30, (BATCH, TOKENS), device=engine.device)
    engine.backward(engine(input_ids, torch.ones_like(input_ids)).square().mean())
    engine.step()


def test_an_old_checkpoint_loads(make_program, device):
    """DeepSpeed kept `master_layout` for 2,048 tokens with each layer; the layout that was trained is what goes on."""
    program = make_program({"mode": "fixed"})
    checkpoint = {key: value.clone() for key, value in program.state_dict().items()}
    layouts = [key for key in checkpoint if key.endswith("attention.self.sparse_self_attention.master_layout")]
    assert len(layouts) == 2 and checkpoint[layouts[0]].shape == (HEADS, 128, 128)
    for key in layouts:
        checkpoint[key][:, :, 5] = 1
    program.load_state_dict(checkpoint, strict=True)
    assert torch.equal(program.layer[1].attention.self.sparse_self_attention.master_layout, checkpoint[layouts[1]])
    input_ids = torch.randint(1, 30, (BATCH, TOKENS), device=device)
    assert_equal_to_dense(program, make_dense, input_ids, torch.ones_like(input_ids))


def test_a_dense_checkpoint_loads_too(make_program):
    program = make_program({"mode": "fixed"})
    dense = {key: value for key, value in program.state_dict().items() if not key.endswith("master_layout")}
    assert len(dense) == len(program.state_dict()) - 2
    program.load_state_dict(dense, strict=True)
