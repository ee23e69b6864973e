"""Video attention in the manner of VideoGPT: a structure of its own, `MatMul` and `Softmax` called directly, scores
masked before the softmax."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from clients.dense import assert_equal_to_dense, attention
from torch import nn

SHAPE, HEADS, BATCH = (4, 8, 4), 2, 2


class StridedSparsityConfig:
    """Derives from nothing: a token looks along each axis of the video, and at its neighbours in order."""

    def __init__(self, shape, n_head, causal, block, num_local_blocks):
        self.shape, self.n_head, self.causal, self.block, self.num_local_blocks = (
            shape, n_head, causal, block, num_local_blocks,
        )  # fmt: skip
        self.tokens = torch.Size(shape).numel()

    def seen(self):
        """Bool (T, T): which tokens a token looks at."""
        places = torch.tensor(list(itertools.product(*map(range, self.shape))))
        differing = (places[:, None] != places[None]).sum(-1)
        order = torch.arange(self.tokens)
        window = order // (self.block * self.num_local_blocks)
        seen = (differing <= 1) | (window[:, None] == window)
        return seen & (order[:, None] >= order) if self.causal else seen

    def make_layout(self):
        blocks = self.seen().unflatten(0, (-1, self.block)).unflatten(-1, (-1, self.block)).any(3).any(1)
        return blocks.long().repeat(self.n_head, 1, 1)

    def make_sparse_attn_mask(self):
        """(V, block, block): 1 where a token of a live block looks, in the order of `MatMul`'s values."""
        seen = self.seen().unflatten(0, (-1, self.block)).unflatten(-1, (-1, self.block)).transpose(1, 2)
        _, row, column = self.make_layout().nonzero().T
        return seen[row, column].long()


class SparseAttention(nn.Module):
    """Query, key and value (B, H, *SHAPE, D)."""

    ops = {}  # noqa: RUF012 - as in the program

    def __init__(self, shape, n_head, causal, num_local_blocks=2, block=16):
        super().__init__()
        self.shape, self.causal = shape, causal
        self.sparsity_config = StridedSparsityConfig(shape, n_head, causal, block, num_local_blocks)
        self.layout = self.sparsity_config.make_layout()
        self.sparse_mask = self.sparsity_config.make_sparse_attn_mask() if causal else None

    def get_ops(self):
        from deepspeed.ops.sparse_attention import MatMul, Softmax

        key = (self.shape, self.causal)
        if key not in SparseAttention.ops:
            block = self.sparsity_config.block
            SparseAttention.ops[key] = (
                MatMul(self.layout, block, "sdd", trans_a=False, trans_b=True),
                MatMul(self.layout, block, "dsd", trans_a=False, trans_b=False),
                Softmax(self.layout, block),
            )
        return SparseAttention.ops[key]

    def forward(self, q, k, v):
        sparse_dot_sdd_nt, sparse_dot_dsd_nn, sparse_softmax = self.get_ops()
        q, k, v = (x.flatten(2, -2) for x in (q, k, v))
        attn = sparse_dot_sdd_nt(q / q.shape[-1] ** 0.5, k)
        if self.sparse_mask is not None:
            attn = attn.masked_fill(self.sparse_mask.to(attn.device) == 0, float("-inf"))
        return sparse_dot_dsd_nn(sparse_softmax(attn), v).unflatten(2, self.shape)


class DenseAttention(nn.Module):
    """The same, over all pairs."""

    def __init__(self, program):
        super().__init__()
        self.config, self.layout = program.sparsity_config, program.layout

    def forward(self, q, k, v):
        q, k, v = (x.flatten(2, -2) for x in (q, k, v))
        masked = torch.zeros(self.config.tokens, self.config.tokens)
        if self.config.causal:
            masked.masked_fill_(~self.config.seen(), float("-inf"))
        out = attention(q, k, v, self.layout, self.config.block, (masked.to(q.device),))
        return out.unflatten(2, self.config.shape)


class Attention(nn.Module):
    def __init__(self, core):
        super().__init__()
        self.core = core

    def forward(self, q, k, v):
        return self.core(q, k, v)


def make_dense(program):
    program.core = DenseAttention(program.core)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("channels", [16, 24])
def test_its_own_structure_and_operations(device, causal, channels):
    torch.manual_seed(0)
    program = Attention(SparseAttention(SHAPE, HEADS, causal)).to(device)
    assert program.core.layout.float().mean() < 0.8
    assert_equal_to_dense(program, make_dense, *torch.randn(3, BATCH, HEADS, *SHAPE, channels, device=device))


def test_a_structure_that_sets_its_attributes_before_the_base_class(device):
    from deepspeed.ops.sparse_attention import SparseSelfAttention, SparsityConfig

    class VideoSparsityConfig(SparsityConfig):
        def __init__(self, num_heads, shape, block=16):
            self.shape = shape
            self.num_sliding_window_blocks = 3
            super().__init__(num_heads, block)

        def set_frames(self, h, layout):
            blocks = layout.shape[1] // self.shape[0]
            for start in range(0, layout.shape[1], blocks):
                layout[h, start : start + blocks, start : start + blocks] = 1
            layout[h, :, 0] = 1
            return layout

        def make_layout(self, seq_len):
            layout = self.setup_layout(seq_len)
            for h in range(self.num_layout_heads):
                layout = self.set_frames(h, layout)
            return self.check_and_propagate_first_head_layout(layout)

    torch.manual_seed(0)
    core = SparseSelfAttention(VideoSparsityConfig(HEADS, SHAPE), max_seq_length=128).to(device)
    assert core.sparsity_config.num_sliding_window_blocks == 3 and core.master_layout.sum() == HEADS * (8 * 2 + 6)
    program = Attention(core)

    def in_place(program):
        from clients.dense import DenseSelfAttention

        program.core = DenseSelfAttention(copy.copy(core.master_layout), 16)

    assert_equal_to_dense(program, in_place, *torch.randn(3, BATCH, HEADS, 128, 16, device=device))
