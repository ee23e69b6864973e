"""selected_attention_forward and selected_attention_backward as they are called on a CPU, beside plain PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from helpers import DTYPES, assert_as_accurate, random, seeded

from ds_sparse._ops import ops

OPERATORS = ("selected_attention_forward", "selected_attention_backward")
ORDERS = ("heads", "tokens", "rows", "groups")
"""How queries (B, Hq, T, g, D) lie in memory, from the outside: heads and tokens, tokens and heads, or tokens within
Hq, each with its g rows; groups: the same with NaN behind each row."""


@dataclass
class Given:
    """What the operators are given, and what it means."""

    query: torch.Tensor  # (B, Hq, T, g, D)
    key: torch.Tensor  # (B, Hkv, S, D)
    value: torch.Tensor
    chosen: torch.Tensor  # bool (L or B * L, T, blocks)
    block: int = 16
    heads: int = 1  # of chosen, for a sequence
    key_bias: torch.Tensor | None = None
    offset: int | torch.Tensor = 0
    causal: bool = False
    scale: float = 0.3

    def arguments(self) -> tuple[Any, ...]:
        """From key_bias to offset."""
        offsets = self.offset if isinstance(self.offset, torch.Tensor) else None
        bits = ops.index_bits(self.chosen) if self.chosen.numel() else self.chosen.new_zeros(*self.chosen.shape[:2], 4)
        return self.key_bias, bits.byte(), offsets, 0 if offsets is not None else self.offset

    @property
    def most(self) -> int:
        return self.chosen.shape[2]

    def forward(self) -> tuple[torch.Tensor, ...]:
        return ops.selected_attention_forward(
            self.query, self.key, self.value, *self.arguments(), *[None] * 4, self.heads, self.most, self.block, 64,
            self.scale, self.causal, "cpu",
        )  # fmt: skip

    def backward(
        self, output: torch.Tensor, rows: torch.Tensor, grad: torch.Tensor, grad_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        return ops.selected_attention_backward(
            grad, grad_lse, self.query, self.key, self.value, output, rows, *self.arguments(), *[None] * 8, self.heads,
            self.most, self.block, 64, self.scale, self.causal, True, "cpu",
        )  # fmt: skip

    def upstream(self, *, with_lse: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gradients of output and lse."""
        *rows, _ = self.query.shape
        grad_lse = random(seeded(11), *rows, dtype=wide(self.query.dtype)) if with_lse else None
        return random(seeded(10), *self.query.shape, dtype=self.query.dtype), grad_lse

    def run(self, grad: torch.Tensor, grad_lse: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        output, lse, rows = self.forward()
        grads = self.backward(output, rows, grad, grad_lse)
        return dict(zip(("output", "lse", "query", "key", "value"), (output, lse, *grads), strict=True))

    def seen(self) -> torch.Tensor:
        """Bool (B, Hq, T, 1, S)."""
        (batch, heads, tokens), keys = self.query.shape[:3], self.key.shape[2]
        chosen = self.chosen.unflatten(0, (-1, self.heads)).repeat_interleave(self.block, -1)[..., :keys]
        seen = chosen.repeat_interleave(heads // self.heads, 1).expand(batch, -1, -1, -1)
        if self.causal:
            position = torch.as_tensor(self.offset).view(-1, 1, 1, 1) + torch.arange(tokens)[:, None]
            seen = seen & (torch.arange(keys) <= position)
        return seen.unsqueeze(3)

    def plain(self, dtype: torch.dtype, grad: torch.Tensor, grad_lse: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """The same by plain PyTorch in `dtype`."""
        leaves = [x.detach().to(dtype).requires_grad_() for x in (self.query, self.key, self.value)]
        key, value = (x.repeat_interleave(self.query.shape[1] // x.shape[1], 1) for x in leaves[1:])
        scores = torch.einsum("bhtgd,bhsd->bhtgs", leaves[0], key) * self.scale
        if self.key_bias is not None:
            scores = scores + self.key_bias.to(dtype)[:, None, None, None]
        scores = scores.masked_fill(~self.seen(), -math.inf)
        empty = (scores == -math.inf).all(-1, keepdim=True)
        scores = scores.masked_fill(empty, 0.0)
        output = torch.einsum("bhtgs,bhsd->bhtgd", scores.softmax(-1).masked_fill(empty, 0.0), value)
        lse = scores.logsumexp(-1).masked_fill(empty[..., 0], -math.inf)
        upstream = [grad.to(dtype), torch.zeros_like(lse) if grad_lse is None else grad_lse.to(dtype)]
        grads = torch.autograd.grad([output, lse], leaves, upstream)
        return dict(zip(("output", "lse", "query", "key", "value"), (output.detach(), lse.detach(), *grads)))


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def laid_out(x: torch.Tensor, order: str) -> torch.Tensor:
    """(B, Hq, T, g, D) in one of the orders of memory."""
    if order == "rows":
        return x.contiguous()
    if order == "groups":
        behind = x.new_full((*x.shape[:-1], x.shape[-1] + 8), math.nan)
        behind[..., : x.shape[-1]] = x
        return behind[..., : x.shape[-1]]
    dims = (0, 1, 3, 2, 4) if order == "heads" else (0, 2, 1, 3, 4)
    return x.permute(dims).contiguous().permute(dims)


def given(
    batch: int = 2, heads: int = 2, key_heads: int = 1, tokens: int = 37, group: int = 2, depth: int = 16,
    keys: int = 90, block: int = 16, bits_heads: int = 1, of_each: bool = False, dtype: torch.dtype = torch.float32,
    chance: float = 0.4, seed: int = 0, **more: Any,
) -> Given:  # fmt: skip
    rng = seeded(seed)
    shapes = (batch, heads, tokens, group, depth), *[(batch, key_heads, keys, depth)] * 2
    shape = (bits_heads * (batch if of_each else 1), tokens, -(-keys // block))
    operands = [random(rng, *shape, dtype=dtype) for shape in shapes]
    return Given(*operands, torch.rand(shape, generator=rng) < chance, block, bits_heads, **more)


def hold(case: Given, *, with_lse: bool = True) -> None:
    """The results are as near to those in float64 as plain PyTorch's are, empty rows nothing."""
    dtype, upstream = case.query.dtype, case.upstream(with_lse=with_lse)
    found, exact, plain = case.run(*upstream), *(case.plain(x, *upstream) for x in (torch.float64, dtype))
    exact_lse, lse = exact.pop("lse"), found.pop("lse")
    empty = exact_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty) and not found["output"][empty].any() and not found["query"][empty].any()
    of_lse = case.plain(wide(dtype), *upstream)["lse"]
    assert_as_accurate("lse", *(x.masked_fill(empty, 0.0) for x in (lse, of_lse, exact_lse)), largest_term=1.0)
    # Terms of gradients of scores cancel where a row has few keys.
    terms = case.scale * math.prod(x.abs().max().item() for x in (case.query, case.key, upstream[0], case.value))
    for name, result in found.items():
        largest = abs(terms) if dtype.itemsize > 2 and name in ("query", "key") else 1.0
        assert_as_accurate(name, result, plain[name], exact[name], largest)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_a_token(group: int, dtype: torch.dtype, causal: bool):
    hold(given(group=group, dtype=dtype, causal=causal, offset=50))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [8, 16, 32, 64, 128, 256, 1024])
def test_block_sizes(block: int, dtype: torch.dtype):
    """The last block is short, and the end of the keys falls within what kernels take at once."""
    case = given(1, tokens=9, group=4, keys=2 * block + 7, block=block, dtype=dtype, chance=0.6)
    hold(replace(case, causal=True, offset=2 * block))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("depth", [8, 24, 64, 128, 200, 256])
def test_head_sizes(depth: int, dtype: torch.dtype):
    hold(given(1, tokens=9, depth=depth, keys=50, dtype=dtype))


@pytest.mark.parametrize("seed", range(40))
def test_random_calls(seed: int):
    draw = Random(seed)
    batch, key_heads, group = draw.choice((1, 2, 3)), draw.choice((1, 2)), draw.choice((1, 2, 4, 8, 16))
    heads = key_heads * draw.choice((1, 2, 3))
    bits_heads = draw.choice([n for n in range(1, heads + 1) if heads % n == 0])
    tokens, keys = (draw.choice((1, 2, 5, 16, 17, 40, 70)) for _ in range(2))
    positions = [draw.randint(0, keys) for _ in range(draw.choice((1, batch)))]
    case = given(
        batch, heads, key_heads, tokens, group, draw.choice((8, 16, 40, 64)), keys, draw.choice((16, 32, 64)),
        bits_heads, draw.random() < 0.5, draw.choice(DTYPES), draw.choice((0.1, 0.5, 1.0)), seed,
        causal=draw.random() < 0.6, scale=draw.choice((0.1, 1.0, -0.5)),
        offset=torch.tensor(positions, dtype=draw.choice((torch.int32, torch.int64)))
        if draw.random() < 0.5
        else positions[0],
    )  # fmt: skip
    case.query = laid_out(case.query, draw.choice(ORDERS))
    if draw.random() < 0.5:
        case.key_bias = random(seeded(seed + 1), draw.choice((1, batch)), keys, dtype=wide(case.query.dtype))
        case.key_bias[torch.rand(case.key_bias.shape, generator=seeded(seed)) < 0.3] = -math.inf
    hold(case, with_lse=draw.random() < 0.7)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_orders_of_memory(order: str, dtype: torch.dtype):
    """Results lie as what they are of; gradients and outputs may lie otherwise than queries."""
    case = given(heads=4, key_heads=2, dtype=dtype)
    grad, grad_lse = case.upstream()
    expected = case.run(grad, grad_lse)
    key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (case.key, case.value))
    case = replace(case, query=laid_out(case.query, order), key=torch.cat([key, key], -1)[..., :16], value=value)
    found = case.run(laid_out(grad, "tokens"), grad_lse)
    output, _, rows = case.forward()
    other = case.backward(laid_out(output, "tokens"), rows, laid_out(grad, order), grad_lse)
    for name, x in found.items():
        assert torch.equal(x, expected[name]), name
    for name, x in zip(("query", "key", "value"), other, strict=True):
        assert torch.equal(x, expected[name]), name
    as_query = laid_out(case.query, "rows" if order == "groups" else order)
    assert found["output"].stride() == found["query"].stride() == as_query.stride()
    assert found["value"].stride() == case.value.stride()
    assert found["lse"].is_contiguous() and rows.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [2, 16])
def test_any_number_of_threads(group: int, dtype: torch.dtype):
    """The bits are the same: sums have one order. Enough tokens for several parts of the keys' gradients."""
    case = given(1, 4, 2, 300, group, keys=300, dtype=dtype, chance=0.3, causal=True)
    threads, results = torch.get_num_threads(), []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results.append(case.run(*case.upstream()))
    finally:
        torch.set_num_threads(threads)
    for other, name in product(results[1:], results[0]):
        assert torch.equal(other[name], results[0][name]), name


@pytest.mark.parametrize("group", [1, 4, 16])
def test_what_is_no_block_of_the_keys(group: int):
    """Bits beyond the keys, and wholly ahead of a causal query, are none."""
    case = given(keys=90, group=group, causal=True)
    ahead = 16 * torch.arange(6) > torch.arange(37)[:, None]
    expected = replace(case, chosen=case.chosen & ~ahead).run(*case.upstream())
    more = torch.cat([case.chosen | ahead, torch.ones(1, 37, 60, dtype=torch.bool)], -1)
    found = replace(case, chosen=more).run(*case.upstream())
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("tokens", "keys", "batch"), [(0, 20, 1), (5, 0, 1), (0, 0, 1), (5, 20, 0)], ids=str)
def test_nothing_there(tokens: int, keys: int, batch: int):
    case = given(batch, tokens=tokens, keys=keys)
    found = case.run(*case.upstream())
    assert not any(x.any() for name, x in found.items() if name != "lse") and (found["lse"] == -math.inf).all()
    for name, x in zip(("output", "query", "key", "value"), (case.query, case.query, case.key, case.value)):
        assert found[name].shape == x.shape


SPOILT = ("key", "value", "query", "grad")
NUMBERS = pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)


@NUMBERS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize("where", SPOILT)
def test_what_is_not_finite_stays_with_its_block(where: str, group: int, dtype: torch.dtype, number: float):
    """Neighbouring tokens, which are multiplied together, choose blocks 0 and 3, or 1 and 2; what is spoilt are keys of
    block 2, or an odd token."""
    case = given(keys=60, group=group, dtype=dtype)
    case.chosen = torch.tensor([[1, 0, 0, 1], [0, 1, 1, 0]], dtype=torch.bool).repeat(19, 1)[None, :37]
    grad, grad_lse = case.upstream()
    expected = case.run(grad, grad_lse)
    spoilt = {"key": case.key, "value": case.value, "query": case.query, "grad": grad}
    changed = spoilt[where].clone()
    changed[:, :, 5 if where in ("query", "grad") else 40, ..., 3] = number
    spoilt[where] = changed
    found = replace(case, **{name: spoilt[name] for name in ("key", "value", "query")}).run(spoilt["grad"], grad_lse)
    close = {"rtol": 3e-2, "atol": 3e-2} if dtype.itemsize == 2 else {}
    for name, x in found.items():
        clean = slice(0, None, 2) if name in ("output", "lse", "query") else [*range(16), *range(48, 60)]
        torch.testing.assert_close(
            x[:, :, clean], expected[name][:, :, clean], msg=lambda text, name=name: f"{name}: {text}", **close
        )
    reached = {"key": "output", "value": "output", "query": "output", "grad": "value"}[where]
    assert not found[reached].isfinite().all()


@NUMBERS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 16])
def test_what_is_not_finite_stays_behind_padding(group: int, dtype: torch.dtype, number: float):
    case = given(group=group, dtype=dtype)
    padding = torch.rand(2, 90, generator=seeded(4)) < 0.4
    case.key_bias = torch.zeros(2, 90, dtype=wide(dtype)).masked_fill(padding, -math.inf)
    expected = case.run(*case.upstream())
    for name in ("key", "value"):
        setattr(case, name, getattr(case, name).masked_fill(padding[:, None, :, None], number))
    found = case.run(*case.upstream())
    close = {"rtol": 3e-2, "atol": 3e-2} if dtype.itemsize == 2 else {}
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], msg=lambda text, name=name: f"{name}: {text}", **close)
    for name in ("key", "value"):
        assert not found[name].transpose(1, 2)[padding].any()


BITS = torch.zeros(1, 37, 8, dtype=torch.uint8)
REFUSED = {
    "query has 4 dimensions": {"query": torch.zeros(2, 2, 37, 16)},
    "1, 2, 4, 8 or 16 rows a token, got 3": {"query": torch.zeros(2, 2, 37, 3, 16)},
    "1, 2, 4, 8 or 16 rows a token, got 32": {"query": torch.zeros(2, 2, 37, 32, 16)},
    "a multiple of 8, got 12": {
        "query": torch.zeros(2, 2, 37, 2, 12),
        "key": torch.zeros(2, 1, 90, 12),
        "value": torch.zeros(2, 1, 90, 12),
    },
    "query has 2 heads; they have to be a multiple of key's 3": {
        "key": torch.zeros(2, 3, 90, 16),
        "value": torch.zeros(2, 3, 90, 16),
    },
    "key has to have the dtype": {"key": torch.zeros(2, 1, 90, 16).double()},
    "value has size 80": {"value": torch.zeros(2, 1, 80, 16)},
    "rows that are heads": {"query": torch.zeros(2, 2, 37, 3, 16)[..., :2, :]},
    "numbers of a token adjacent": {"query": torch.zeros(2, 2, 37, 2, 32)[..., ::2]},
    "bits has size 36": {"bits": BITS[:, 1:].contiguous()},
    "bits has to be uint8": {"bits": BITS.int()},
    "bits has to be contiguous": {"bits": BITS[..., ::2]},
    "bits has to have whole words": {"bits": torch.zeros(1, 37, 6, dtype=torch.uint8)},
    "a block for each of the 90 keys": {"bits": BITS[..., :0]},
    "layout_heads is 0 for 2 heads": {"bits_heads": 0},
    "bits_heads is 2 for 2 heads and 1 of bits": {"bits_heads": 2},
    "layout_heads is 3 for 2 heads": {"bits_heads": 3},
    "block has to be a power of two": {"block": 24},
    "offset has to be 0 or more": {"offset": -1},
    "offsets has to have one number, or one a sequence": {"offsets": torch.zeros(3, dtype=torch.int32)},
    "offsets has -3; it has to be 0 or more": {"offsets": torch.tensor([4, -3])},
    "implementation is": {"implementation": "portable"},
    "offsets has to be int32 or int64": {"offsets": torch.zeros(2)},
    "key_bias has size 3": {"key_bias": torch.zeros(3, 90)},
    "key_bias has a dtype": {"key_bias": torch.zeros(2, 90, dtype=torch.bool)},
    "grad_output has size 36": {"grad_output": torch.zeros(2, 2, 36, 2, 16)},
    "grad_lse has to be contiguous": {"grad_lse": torch.zeros(2, 2, 37, 4)[..., ::2]},
    "rows has size 3": {"rows": torch.zeros(2, 2, 37, 2, 3)},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_does_not_fit_is_refused(sentence: str):
    """Both operators refuse it before they read anything."""
    query, keys = torch.zeros(2, 2, 37, 2, 16), torch.zeros(2, 1, 90, 16)
    arguments: dict[str, Any] = {
        "query": query, "key": keys, "value": keys, "key_bias": None, "bits": BITS, "offsets": None, "offset": 0,
        "bits_heads": 1, "most": 3, "block": 16, "tile": 64, "scale": 1.0, "causal": True, "implementation": "cpu",
    }  # fmt: skip
    tiles = {f"row_{name}": None for name in ("lines", "entries", "units", "cuts")}
    columns = {name.replace("row", "column"): None for name in tiles}
    results = {
        "grad_output": query, "grad_lse": torch.zeros(2, 2, 37, 2), "output": query,
        "rows": torch.zeros(2, 2, 37, 2, 2), "deterministic": False,
    }  # fmt: skip
    ops.selected_attention_forward(**arguments, **tiles)
    ops.selected_attention_backward(**arguments, **tiles, **columns, **results)
    changed = REFUSED[sentence]
    if not changed.keys() & results.keys():
        with pytest.raises(RuntimeError, match=sentence):
            ops.selected_attention_forward(**arguments | changed, **tiles)
    with pytest.raises(RuntimeError, match=sentence):
        ops.selected_attention_backward(**arguments | results | changed, **tiles, **columns)
