"""Layers and small models of each family in plain PyTorch, which the tests beside this make sparse."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

HEADS, EMBED, TOKENS = 4, 32, 50
DENSE = {"mode": "dense", "block": 16}
LOCAL = {
    "mode": "local_sliding_window", "block": 16, "num_sliding_window_blocks": 1, "attention": "bidirectional",
}  # fmt: skip


def hidden(tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(2, tokens, EMBED, generator=torch.Generator().manual_seed(0))


def padding() -> torch.Tensor:
    """What the second of two sequences keeps."""
    keep = torch.ones(2, 1, 1, TOKENS, dtype=torch.bool)
    keep[1, ..., 30:] = False
    return keep


class InTheManner(nn.Module):
    """In the manner of bing_bert."""

    def __init__(self, hidden=EMBED, **more):
        super().__init__()
        self.num_attention_heads, self.dropout = HEADS, nn.Dropout(0.0)
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        for name, module in more.items():
            setattr(self, name, module)

    def forward(self, hidden_states, attention_mask=None):
        query, key, value = (
            linear(hidden_states).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        scores = query @ key.mT / query.shape[-1] ** 0.5
        scores = scores if attention_mask is None else scores + attention_mask
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


class Own(nn.Module):
    """nn.MultiheadAttention in a module of one's own, called as many do: without need_weights."""

    def __init__(self, **more):
        super().__init__()
        self.attention = nn.MultiheadAttention(EMBED, HEADS, **more)

    def forward(self, x, memory=None):
        memory = x if memory is None else memory
        return self.attention(x, memory, memory)[0]


class Fused(nn.Module):
    """One projection, as many models have it; what scaled_dot_product_attention is given besides can be set."""

    def __init__(self, key_heads=HEADS, **options):
        super().__init__()
        self.heads, self.options = (HEADS, key_heads, key_heads), options
        self.qkv, self.out = nn.Linear(EMBED, 8 * sum(self.heads)), nn.Linear(EMBED, EMBED)

    def forward(self, x, mask=None):
        parts = self.qkv(x).split([8 * heads for heads in self.heads], dim=-1)
        query, key, value = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in parts)
        output = F.scaled_dot_product_attention(query, key, value, mask, **self.options)
        return self.out(output.transpose(1, 2).flatten(2))


class Attend(nn.Module):
    def forward(self, *operands):
        return scaled_dot_product_attention(*operands)


class Outer(nn.Module):
    """The call is in a module inside, and keys may be of another sequence."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_kv, self.attend = nn.Linear(EMBED, EMBED), nn.Linear(EMBED, 2 * EMBED), Attend()

    def forward(self, x, context=None):
        operands = (self.to_q(x), *self.to_kv(x if context is None else context).chunk(2, -1))
        heads = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in operands)
        return self.attend(*heads).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """The whole layer in one module, with what it calls in a method."""

    def __init__(self):
        super().__init__()
        self.norm, self.projections = nn.LayerNorm(EMBED), nn.Linear(EMBED, 3 * EMBED)

    def attention(self, x):
        heads = self.projections(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)

    def forward(self, x):
        return x + self.attention(self.norm(x))


class Rotated(Fused):
    """Needs angles, which only the model gives it."""

    def forward(self, x, angles):
        return super().forward(x * angles.cos())


class Language(nn.Module):
    def __init__(self, last=Rotated):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(9, EMBED), nn.ModuleList([Rotated(), last()])

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x, torch.arange(ids.shape[1], device=ids.device)[:, None])
        return x


class Sequence(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, *more):
        for layer in self.layers:
            x = layer(x, *more)
        return x


class Loss(nn.Module):
    """Layers one after the other, each beside its input, and the mean square of what they give."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def encoder(layers: int = 2, **more) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 64, batch_first=True, **more)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=not more.get("norm_first", False))


def output_and_gradients(model, *inputs, **named):
    output = model(*inputs, **named)
    grads = torch.autograd.grad(output.square().sum(), list(model.parameters()), allow_unused=True)
    return output, [grad for grad in grads if grad is not None]
