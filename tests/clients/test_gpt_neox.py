"""A decoder in the manner of GPT-NeoX: a sparse type for each layer, one tensor-parallel rank, a triangular mask."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from clients.dense import DenseSelfAttention, assert_equal_to_dense
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::ds_sparse.SparsityWarning")
HEADS, HEAD_DIM, TOKENS, BATCH = 4, 8, 128, 2
OF_HEADS, FIXED_OR_VARIABLE = {"different_layout_per_head": False}, {"horizontal_global_attention": False}
LONGFORMER = {"global_block_indices": [0], "global_block_end_indices": None}
TYPES = {
    "sparse_fixed": ("Fixed", OF_HEADS | FIXED_OR_VARIABLE | {
        "num_local_blocks": 4, "num_global_blocks": 1, "num_different_global_patterns": 1,
    }),
    "sparse_variable": ("Variable", OF_HEADS | FIXED_OR_VARIABLE | LONGFORMER | {
        "num_random_blocks": 0, "local_window_blocks": [4],
    }),
    "local": ("LocalSlidingWindow", {"num_sliding_window_blocks": 4}),
    "bigbird": ("BigBird", OF_HEADS | {
        "num_random_blocks": 1, "num_sliding_window_blocks": 3, "num_global_blocks": 1,
    }),
    "bslongformer": ("BSLongformer", OF_HEADS | LONGFORMER | {"num_sliding_window_blocks": 3}),
}  # fmt: skip
"""Structures by their names in the program, and what it gives where its own settings do not."""


def configure_sparse_attention(args, attention_type, num_attention_heads, mpu):
    from deepspeed.ops.sparse_attention import SparseSelfAttention, sparsity_config

    name, defaults = TYPES[attention_type]
    config = getattr(sparsity_config, f"{name}SparsityConfig")(
        num_heads=num_attention_heads,
        block=args.sparsity_config.get("block", 16),
        attention="unidirectional",
        **{key: args.sparsity_config.get(key, value) for key, value in defaults.items()},
    )
    return SparseSelfAttention(sparsity_config=config, max_seq_length=args.seq_length, attn_mask_mode="add", mpu=mpu)


class ParallelSelfAttention(nn.Module):
    """(T, B, hidden) and a bool mask (1, 1, T, T), True where a token may not look."""

    def __init__(self, args, attention_type, mpu):
        super().__init__()
        hidden = HEADS * HEAD_DIM
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        heads = HEADS // mpu.get_model_parallel_world_size()
        self.sparse_attn = configure_sparse_attention(args, attention_type, heads, mpu)
        self.rpe = nn.Parameter(0.1 * torch.randn(1, heads, TOKENS, TOKENS)) if args.rpe else None
        self.dense = nn.Linear(hidden, hidden)

    def forward(self, hidden_states, attention_mask):
        mixed = self.query_key_value(hidden_states).unflatten(-1, (HEADS, 3 * HEAD_DIM))
        query, key, value = (x.permute(1, 2, 0, 3).contiguous() for x in mixed.chunk(3, dim=-1))
        tokens = query.shape[-2]
        attn_mask = attention_mask[..., :tokens, :tokens].to(query.dtype) * -10000
        rpe = None if self.rpe is None else self.rpe[..., :tokens, :tokens]
        context = self.sparse_attn(query, key, value, attn_mask=attn_mask, rpe=rpe)
        return self.dense(context.permute(2, 0, 1, 3).flatten(2))


@pytest.fixture
def mpu():
    return SimpleNamespace(get_model_parallel_world_size=lambda: 1, get_data_parallel_group=lambda: None)


def program_and_inputs(device, attention_type, mpu, tokens=TOKENS, rpe=False, **sparsity_config):
    random.seed(0)
    torch.manual_seed(0)
    args = SimpleNamespace(sparsity_config=sparsity_config, seq_length=TOKENS, rpe=rpe)
    program = ParallelSelfAttention(args, attention_type, mpu).to(device)
    attention_mask = torch.ones(TOKENS, TOKENS, device=device).triu(1).bool()[None, None]
    return program, torch.randn(tokens, BATCH, HEADS * HEAD_DIM, device=device), attention_mask


def make_dense(program):
    sparse = program.sparse_attn
    program.sparse_attn = DenseSelfAttention(sparse.master_layout, sparse.sparsity_config.block)


@pytest.mark.parametrize("attention_type", TYPES)
@pytest.mark.parametrize("different_layout_per_head", [False, True])
def test_each_sparse_type(device, mpu, attention_type, different_layout_per_head):
    program, x, mask = program_and_inputs(
        device, attention_type, mpu, different_layout_per_head=different_layout_per_head
    )
    assert program.sparse_attn.master_layout.float().mean() < 0.9
    assert_equal_to_dense(program, make_dense, x, mask)


def test_settings_of_its_own_a_shorter_sequence_and_a_position_bias(device, mpu):
    program, x, mask = program_and_inputs(
        device, "sparse_fixed", mpu, tokens=96, rpe=True, block=32, num_local_blocks=2, different_layout_per_head=True,
        num_different_global_patterns=2,
    )  # fmt: skip
    assert_equal_to_dense(program, make_dense, x, mask)


def test_no_token_sees_a_later_one(device, mpu):
    program, x, mask = program_and_inputs(device, "bigbird", mpu)
    changed = x.clone()
    changed[70:] += 1
    assert torch.equal(program(x, mask)[:70], program(changed, mask)[:70])


def test_in_the_half_precision_that_it_trains_in(device, mpu):
    program, x, mask = program_and_inputs(device, "bslongformer", mpu)
    assert_equal_to_dense(program.half(), make_dense, x.half(), mask)
