"""Programs in the manner of ru-gpts and of copies of DeepSpeed's module: a forward of their own, out of the methods
that DeepSpeed's had."""

from __future__ import annotations

import random

import deepspeed
import pytest
import torch
from clients.dense import attention
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::ds_sparse.SparsityWarning")
HEADS, HEAD_DIM, TOKENS, BATCH = 4, 16, 128, 2


def fork():
    from deepspeed.ops.sparse_attention import SparseSelfAttention

    class Fork(SparseSelfAttention):
        def forward(self, query, key, value, rpe=None, key_padding_mask=None, attn_mask=None):
            heads, tokens, head_dim = query.shape[1:]
            key = self.transpose_key_for_scores(key, tokens)
            if key_padding_mask is not None:
                key_padding_mask = self.transpose_mask_for_sparse(query.dtype, key_padding_mask, True)
            if attn_mask is not None:
                attn_mask = self.transpose_mask_for_sparse(query.dtype, attn_mask)
            scores, output, softmax = self.get_ops(heads, tokens)
            probs = softmax(
                scores(query, key),
                scale=float(head_dim) ** -0.5,
                rpe=rpe,
                key_padding_mask=key_padding_mask,
                attn_mask=attn_mask,
                key_padding_mask_mode=self.key_padding_mask_mode,
                attn_mask_mode=self.attn_mask_mode,
            )
            return output(probs, value)

    return Fork


@pytest.mark.parametrize("tokens", [TOKENS, 64])
def test_a_forward_of_its_own_equals_ours_and_dense_attention(device, tokens):
    from deepspeed.ops.sparse_attention import FixedSparsityConfig, SparseSelfAttention

    structure = FixedSparsityConfig(HEADS, different_layout_per_head=True, num_different_global_patterns=4)
    forked, ours = (cls(structure, max_seq_length=TOKENS) for cls in (fork(), SparseSelfAttention))
    query, key, value = torch.randn(3, BATCH, HEADS, tokens, HEAD_DIM, device=device)
    keep = torch.ones(1, tokens, tokens, device=device).tril()
    padding = torch.zeros(BATCH, 1, 1, tokens, device=device)
    padding[1, ..., 50:] = -10000.0
    out = forked(query, key.transpose(2, 3), value, key_padding_mask=padding, attn_mask=keep)
    masked = torch.zeros_like(keep).masked_fill(keep == 0, float("-inf"))
    truth = attention(query, key, value, forked.get_layout(tokens), 16, (padding, masked))
    torch.testing.assert_close(out, truth, rtol=1e-5, atol=1e-5)
    same = ours(query, key, value, key_padding_mask=padding, attn_mask=keep)
    torch.testing.assert_close(same, truth, rtol=1e-5, atol=1e-5)


def test_a_fork_may_keep_operations_for_all_its_modules(device):
    from deepspeed.ops.sparse_attention import BigBirdSparsityConfig

    class Caching(fork()):
        ops = dict()  # noqa: RUF012, C408 - for all its modules

        def get_ops(self, H, L):
            if L not in Caching.ops:
                Caching.ops[L] = super().get_ops(H, L)
            return Caching.ops[L]

    module = Caching(BigBirdSparsityConfig(HEADS, seed=1), max_seq_length=TOKENS)
    x = torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM, device=device)
    assert torch.equal(module(x, x, x), module(x, x, x)) and list(Caching.ops) == [TOKENS]


class AlternatingDecoder(nn.Module):
    """As ru-gpts: every other layer is sparse, in half precision whatever comes in."""

    def __init__(self, config, layers=2):
        super().__init__()
        from deepspeed.ops.sparse_attention import SparseSelfAttention

        hidden = HEADS * HEAD_DIM
        self.mixed = nn.ModuleList(nn.Linear(hidden, 3 * hidden) for _ in range(layers))
        self.sparse = nn.ModuleDict({str(i): SparseSelfAttention(config) for i in range(0, layers, 2)})

    def forward(self, x, ltor_mask):
        for number, mixed in enumerate(self.mixed):
            query, key, value = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in mixed(x).chunk(3, -1))
            if str(number) in self.sparse:
                y = self.sparse[str(number)](query.half(), key.half(), value.half(), attn_mask=ltor_mask).to(x.dtype)
            else:
                y = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=ltor_mask.bool())
            x = x + y.transpose(1, 2).flatten(2)
        return x


@pytest.fixture
def config():
    """The structure of ru-gpts's JSON, through DeepSpeed's configuration."""
    block = {
        "mode": "fixed", "block": 16, "different_layout_per_head": True, "num_local_blocks": 8, "num_global_blocks": 1,
        "attention": "unidirectional", "horizontal_global_attention": False, "num_different_global_patterns": 4,
    }  # fmt: skip
    given = deepspeed.DeepSpeedConfig({"train_batch_size": 1, "sparse_attention": block}).sparse_attention
    assert given.pop("mode") == "fixed"
    from deepspeed.ops.sparse_attention import FixedSparsityConfig

    return FixedSparsityConfig(num_heads=HEADS, **given)


def test_a_decoder_in_half_precision_sees_no_later_token(device, config):
    random.seed(0)
    program = AlternatingDecoder(config).to(device)
    x = torch.randn(BATCH, TOKENS, HEADS * HEAD_DIM, device=device)
    mask = torch.ones(1, 1, TOKENS, TOKENS, device=device).tril()
    changed = x.clone()
    changed[:, 70:] += 1
    assert torch.equal(program(x, mask)[:, :70], program(changed, mask)[:, :70])
    program(x, mask).sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in program.parameters())


@pytest.mark.parametrize("way", ["OnDevice", "torch.device"])
def test_a_decoder_built_without_memory_takes_a_checkpoint(device, config, way):
    trained = AlternatingDecoder(config).to(device)
    places = {"OnDevice": deepspeed.OnDevice(dtype=torch.float32, device="meta"), "torch.device": torch.device("meta")}
    with places[way]:
        program = AlternatingDecoder(config)
    program.load_state_dict(trained.state_dict(), assign=True)
    x = torch.randn(BATCH, TOKENS, HEADS * HEAD_DIM, device=device)
    mask = torch.ones(1, 1, TOKENS, TOKENS, device=device).tril()
    assert torch.equal(program(x, mask), trained(x, mask))
