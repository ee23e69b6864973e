"""A text-to-image decoder in the manner of DALLE-pytorch: global text blocks, random blocks, `~mask` added."""

from __future__ import annotations

import random

import pytest
import torch
from clients.dense import DenseSelfAttention, assert_equal_to_dense
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.filterwarnings("ignore::ds_sparse.SparsityWarning")
TEXT, IMAGE, BATCH = 24, 88, 2


class SparseAttention(nn.Module):
    """(B, T, dim), any T up to `seq_len`, and a bool mask (B, T), True for what is no padding."""

    def __init__(self, dim, seq_len, causal=True, heads=2, dim_head=16, block_size=16, text_seq_len=TEXT):
        super().__init__()
        from deepspeed.ops.sparse_attention import SparseSelfAttention, VariableSparsityConfig

        self.heads, self.causal, self.block_size = heads, causal, block_size
        self.attn_fn = SparseSelfAttention(
            sparsity_config=VariableSparsityConfig(
                num_heads=heads,
                block=block_size,
                num_random_blocks=seq_len // block_size // 4,
                global_block_indices=list(range(-(-text_seq_len // block_size))),
                attention="unidirectional" if causal else "bidirectional",
            ),
            max_seq_length=seq_len,
            attn_mask_mode="add",
        )
        self.to_qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.to_out = nn.Linear(heads * dim_head, dim)

    def forward(self, x, mask=None):
        tokens = x.shape[1]
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        padding = -tokens % self.block_size
        if padding:
            x, mask = F.pad(x, (0, 0, 0, padding)), F.pad(mask, (0, padding), value=False)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.to_qkv(x).chunk(3, dim=-1))
        attn_mask = None
        if self.causal:
            later = torch.ones(q.shape[-2], k.shape[-2], device=x.device).triu_(1).bool()
            attn_mask = torch.zeros_like(later, dtype=q.dtype).masked_fill_(later, -torch.finfo(q.dtype).max / 2)
        out = self.attn_fn(q, k, v, attn_mask=attn_mask, key_padding_mask=~mask)
        return self.to_out(out.transpose(1, 2).flatten(2)[:, :tokens])


def make_dense(program):
    program.attn_fn = DenseSelfAttention(program.attn_fn.master_layout, program.block_size)


@pytest.fixture
def program(device, request):
    random.seed(0)
    torch.manual_seed(0)
    return SparseAttention(dim=32, seq_len=128, causal=request.param).to(device)


@pytest.mark.parametrize("program", [True, False], indirect=True, ids=["causal", "bidirectional"])
def test_random_blocks_and_a_bool_mask_that_is_added(program, device):
    layout = program.attn_fn.master_layout
    assert layout[0].sum() > 8 and (layout[0] == layout[1]).all()
    mask = torch.ones(BATCH, TEXT + IMAGE, dtype=torch.bool, device=device)
    mask[1, 10:TEXT] = False
    with pytest.warns(UserWarning, match="key_padding_mask is torch.bool in mode 'add'"):
        assert_equal_to_dense(program, make_dense, torch.randn(BATCH, TEXT + IMAGE, 32, device=device), mask)


@pytest.mark.parametrize("program", [True], indirect=True)
@pytest.mark.filterwarnings("ignore:key_padding_mask is torch.bool")
def test_a_sequence_that_is_still_growing(program, device):
    assert_equal_to_dense(program, make_dense, torch.randn(BATCH, TEXT + 5, 32, device=device))


@pytest.mark.parametrize("program", [True], indirect=True)
@pytest.mark.filterwarnings("ignore:key_padding_mask is torch.bool")
def test_a_checkpoint_restores_the_random_layout(program, device):
    random.seed(1)
    other = SparseAttention(dim=32, seq_len=128).to(device)
    assert not torch.equal(other.attn_fn.master_layout, program.attn_fn.master_layout)
    checkpoint = {key: value.clone() for key, value in program.state_dict().items()}
    assert checkpoint["attn_fn.master_layout"].dtype == torch.int64
    other.load_state_dict(checkpoint, strict=True)
    x = torch.randn(BATCH, TEXT + IMAGE, 32, device=device)
    assert torch.equal(other(x), program(x))
