"""A decoder in the manner of nanoGPT: one projection, PyTorch's attention with is_causal, no code of ours."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ds_sparse

VOCABULARY, WIDTH, HEADS, TOKENS = 16, 32, 4, 64
LOCAL = {"mode": "local_sliding_window", "block": 16, "num_sliding_window_blocks": 3, "attention": "bidirectional"}


class CausalSelfAttention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.resid_dropout, self.dropout = nn.Dropout(dropout), dropout
        self.flash = hasattr(F, "scaled_dot_product_attention")

    def forward(self, x):
        batch, tokens, width = x.size()
        query, key, value = (
            y.view(batch, tokens, HEADS, width // HEADS).transpose(1, 2) for y in self.c_attn(x).split(WIDTH, dim=2)
        )
        dropout = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=dropout, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(batch, tokens, width)))


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), CausalSelfAttention(dropout), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.h, self.ln_f = nn.ModuleList(Block(dropout) for _ in range(2)), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, idx, count):
        for _ in range(count):
            idx = torch.cat([idx, self(idx[:, -TOKENS:])[0][:, -1:].argmax(-1)], dim=1)
        return idx


@pytest.fixture
def text():
    """A rule that a model learns: each token is the one before, times 5, plus 1."""
    torch.manual_seed(0)
    rows = [torch.randint(VOCABULARY, (4,))]
    for _ in range(TOKENS):
        rows.append((rows[-1] * 5 + 1) % VOCABULARY)
    return torch.stack(rows, 1)


def test_it_is_equal_to_dense_under_a_dense_layout(text):
    model = GPT()
    wanted = model(text[:, :50], text[:, 1:51])
    ds_sparse.sparsify(model, {"mode": "dense", "block": 16}, max_seq_length=TOKENS)
    torch.testing.assert_close(model(text[:, :50], text[:, 1:51]), wanted)


def test_it_sees_no_later_token_under_a_layout_that_would(text):
    model = GPT().eval()
    ds_sparse.sparsify(model, LOCAL, max_seq_length=TOKENS)
    before, changed = text[:, :50], text[:, :50].clone()
    changed[:, 30:] = 0
    torch.testing.assert_close(model(changed)[0][:, :30], model(before)[0][:, :30], rtol=0, atol=0)
    assert not torch.allclose(model(changed)[0][:, 30:], model(before)[0][:, 30:])


def test_it_learns_and_writes_the_text_on(text):
    model = GPT(dropout=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # before sparsify: the parameters stay
    ds_sparse.sparsify(model, LOCAL, max_seq_length=TOKENS)
    for _ in range(25):
        loss = model(text[:, :-1], text[:, 1:])[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert torch.equal(model.eval().generate(text[:, :20], 8), text[:, :28])
