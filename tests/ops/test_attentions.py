"""What every kind of attention promises of numbers: any scale, rows with nothing left, numbers that are not finite. The
cases are those of the fuzz, of sizes that are given here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fuzz import blocks, pairs, windows
from fuzz.cases import Case
from fuzz.compare import hold
from fuzz.documents import Documents
from fuzz.meanings import Tensors
from fuzz.spoilt import plant, seen
from helpers import Pairs, deterministic_algorithms, random, seeded

from ds_sparse.index import kernels

OPERATORS = kernels.OPERATORS
TOKENS, BLOCK = 75, 16
LAYOUT = torch.rand(2, 5, 5, generator=seeded(3)) < 0.6
EDGES = torch.tensor([0, 10, 47, 48, TOKENS])
SEEN = torch.rand(TOKENS, TOKENS, generator=seeded(9)) < 0.1
KEPT = torch.rand(2, TOKENS, generator=seeded(7)) < 0.6


@dataclass(frozen=True)
class Kind:
    """A kind of attention, as a case of operands and options; its sequences, and its queries where they are fewer."""

    case: Callable[..., Case]
    batch: int = 2
    queries: int = TOKENS
    key_heads: int = 2

    def operands(self, dtype: torch.dtype, head_dim: int = 16) -> Tensors:
        sizes = {"query": (2, self.queries), "key": (self.key_heads, TOKENS), "value": (self.key_heads, TOKENS)}
        return {
            name: random(seeded(i), self.batch, *size, head_dim, dtype=dtype)
            for i, (name, size) in enumerate(sizes.items())
        }


def on_blocks(device: str, masks: Tensors | None = None, **options: Any) -> Callable[..., Case]:
    def case(tensors: Tensors, **more: Any) -> Case:
        return blocks.attention_case(tensors | (masks or {}), LAYOUT, BLOCK, device, **(options | more))

    return case


def of_row(document_layout: str, **options: Any) -> Callable[..., Case]:
    documents = Documents(EDGES, document_layout)
    return lambda x, **more: blocks.packed_case(x, LAYOUT, BLOCK, documents, **(options | more))


def in_windows(*numbers: Any, **options: Any) -> Callable[..., Case]:
    return lambda x, **more: windows.attention_case(x, *numbers, **(options | more))


def of_pairs(name: str, documents: Documents | None = None) -> Callable[..., Case]:
    lists = Pairs((SEEN.nonzero(),), 1, 1, TOKENS, TOKENS)

    def case(tensors: Tensors, **more: Any) -> Case:
        operands = dict(zip("qkv", tensors.values(), strict=True))
        return pairs.attention_case(name, operands, lists, documents=documents, **more)

    return case


def added(keeps: torch.Tensor) -> torch.Tensor:
    return torch.zeros(keeps.shape).masked_fill(~keeps, -math.inf)


def kinds(device: str) -> dict[str, Kind]:
    few, many, each = {"offset": 62}, {"offset": 35}, {"offset": torch.tensor([9, 41])}
    near = torch.arange(2 * 80 - 1).expand(2, -1) % 7 != torch.tensor([[2], [3]])  # distances that count, by head
    mask = torch.rand(2, 1, TOKENS, TOKENS, generator=seeded(8)) < 0.6
    late = torch.zeros(1, 2 * TOKENS - 1)
    late[:, TOKENS - 6 :] = -math.inf  # the last keys are hidden from all queries, but not from what fills their block
    of_few, bias = torch.rand(2, 2, 5, TOKENS, generator=seeded(8)) < 0.6, {"distance_bias": added(near)}
    return {
        "blocks": Kind(on_blocks(device), key_heads=1),
        "causal": Kind(on_blocks(device, causal=True)),
        "key_padding_mask": Kind(on_blocks(device, {"key_padding_mask": KEPT}), key_heads=1),
        "float key_padding_mask": Kind(on_blocks(device, {"key_padding_mask": added(KEPT)})),
        "attn_mask": Kind(on_blocks(device, {"attn_mask": mask})),
        "distance_bias": Kind(on_blocks(device, bias)),
        "hidden by distance": Kind(on_blocks(device, {"distance_bias": late})),
        "dropout": Kind(on_blocks(device, {"key_padding_mask": KEPT}, dropout_p=0.3)),
        "few at an offset": Kind(on_blocks(device, **few), queries=5, key_heads=1),
        "few, causal, at offsets": Kind(on_blocks(device, causal=True, **each), queries=5, key_heads=1),
        "few with a key_padding_mask": Kind(on_blocks(device, {"key_padding_mask": KEPT}, **few), queries=5),
        "few with an attn_mask": Kind(on_blocks(device, {"attn_mask": of_few}, **few), queries=5, key_heads=1),
        "few with an rpe": Kind(on_blocks(device, {"rpe": added(of_few)}, **few), queries=5),
        "few with a distance_bias": Kind(on_blocks(device, bias, **few), queries=5),
        "many at an offset": Kind(on_blocks(device, **many), queries=33, key_heads=1),
        "many, causal, at an offset": Kind(on_blocks(device, causal=True, **many), queries=33),
        "many, causal, at offsets": Kind(on_blocks(device, causal=True, **each), queries=33),
        "many with a mask": Kind(on_blocks(device, {"attn_mask": added(mask[:, :, :33])}, **many), queries=33),
        "many with a distance_bias": Kind(on_blocks(device, bias, causal=True, **each), queries=33),
        "packed": Kind(of_row("own"), batch=1),
        "packed, causal": Kind(of_row("own", causal=True), batch=1),
        "row": Kind(of_row("row", causal=True), batch=1),
        "window": Kind(in_windows([9])),
        "window, causal": Kind(in_windows([9], True)),
        "window with global tokens": Kind(in_windows([9], False, [3, 70])),
        "window, dilated": Kind(in_windows([9, 4], False, [], [2, 3])),
        "window with padding": Kind(lambda x, **more: in_windows([9])(x | {"key_padding_mask": KEPT}, **more)),
        "few in windows": Kind(in_windows([3, 9], offset=20), queries=5),
        "many in windows": Kind(in_windows([3, 9], offset=20), queries=25),
        "window in documents": Kind(in_windows([9], documents=Documents(EDGES, "row")), batch=1),
        "pairs": Kind(of_pairs("sparse_attn")),
        "pairs in PyTorch": Kind(of_pairs("gather_attention")),
        "pairs of documents": Kind(of_pairs("sparse_attn", Documents(EDGES, "own")), batch=1),
    }


KINDS = list(kinds("cpu"))
OF_KEYS = {"key": ("key",), "value": ("value",), "key and value": ("key", "value")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "pairs in PyTorch"])  # its scores are in fp16
def test_any_scale_of_large_scores(device: str, kind: str, dtype: torch.dtype):
    """Whole numbers, of which all scores are exact: what is not stable is found out."""
    for scale, head_dim in ((-0.5, 65), (0.0, 72), (0.25, 64), (0.7, 128), (-0.5, 128), (1.0, 129)):
        of_kind, rng = kinds(device)[kind], seeded(head_dim)
        tensors = {
            name: torch.randint(-most, most + 1, x.shape, generator=rng).to(dtype)
            for (name, x), most in zip(of_kind.operands(dtype, head_dim).items(), (30, 30, 2), strict=True)
        }
        hold(of_kind.case(tensors, scale=scale), device)


def tokens_of(case: Case, names: tuple[str, ...]) -> torch.Tensor:
    """Some tokens of the first sequence's last head, that some rows see and others not."""
    operand = case.meaning.operands[0] if names == ("output",) else names[0]
    tokens = torch.zeros(case.tensors[operand].shape[:3], dtype=torch.bool)
    tokens[0, -1, [2] if operand in ("query", "q") else [5, 16, 40]] = True
    return tokens


@pytest.mark.parametrize("operand", [*OF_KEYS, "query", "output"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_with_the_rows_that_see_it(device: str, kind: str, operand: str):
    """And with the gradients of what these see; "output" is its gradient."""
    for dtype, head_dim, number in (
        (torch.float32, 16, math.nan),
        (torch.float32, 72, math.inf),
        (torch.bfloat16, 128, -math.inf),
        (torch.bfloat16, 16, math.nan),
    ):
        of_kind = kinds(device)[kind]
        case = of_kind.case(of_kind.operands(dtype, head_dim))
        roles = dict(zip(("query", "key", "value"), case.meaning.operands, strict=True))
        names = tuple(roles.get(name, name) for name in OF_KEYS.get(operand, (operand,)))
        tokens = tokens_of(case, names)
        planted = plant(case, names, tokens, number)
        live = seen(planted)
        if operand == "value" and number != number:
            group = live.shape[1] // tokens.shape[1]
            rows = (live & tokens.repeat_interleave(group, 1).unsqueeze(2)).any(3)
            assert rows.any() and not rows.all(), "nothing to look at"
            if kind != "dropout":
                output = planted.call({name: x.to(device) for name, x in planted.tensors.items()})["output"]
                assert output.isnan().any(-1)[rows.to(device)].all(), "what a row sees has to show"
        hold(planted, device)


PADDED = ["key_padding_mask", "float key_padding_mask", "dropout", "window with padding", "hidden by distance"]


@pytest.mark.parametrize("kind", PADDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_behind_a_key_padding_mask(device: str, kind: str, dtype: torch.dtype):
    """Every masked key may hold anything: no row changes, and its own gradients are zero."""
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("fused attention refuses float64 on CUDA")
    for number in (math.nan, math.inf, -math.inf):
        of_kind = kinds(device)[kind]
        case = of_kind.case(of_kind.operands(dtype))
        hidden = ~seen(case).unflatten(1, (of_kind.key_heads, -1)).any(3).any(2)
        assert hidden.any()
        hold(plant(case, ("key", "value"), hidden, number), device)


@pytest.mark.parametrize("kind", ["key_padding_mask", "window with padding", "few with a key_padding_mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_rows_with_nothing_left_are_zeros_with_zero_gradient(device: str, kind: str, dtype: torch.dtype):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("fused attention refuses float64 on CUDA")
    of_kind = kinds(device)[kind]
    case = of_kind.case(of_kind.operands(dtype))
    case.tensors["key_padding_mask"] = torch.stack([torch.zeros(TOKENS), torch.arange(TOKENS) < 20]).bool()
    live = seen(case).any(3)
    assert live[1].any() and not live[0].any() and not live.all()
    with deterministic_algorithms():
        given = {name: x.to(device).requires_grad_(name in case.wanted) for name, x in case.tensors.items()}
        results = case.call(given)
        # Large gradients at dead rows count for nothing.
        grads = [torch.full_like(x, 100.0).cumsum(2) for x in results.values()]
        found = torch.autograd.grad(list(results.values()), [given[name] for name in case.wanted], grads)
    dead = ~live.to(device)
    for rows in (results["output"], found[0]):
        assert rows.isfinite().all() and not rows[dead].any()
    assert results["output"][~dead].any(-1).all()
    assert all(x.isfinite().all() for x in found) and not found[1][0].any() and not found[2][0].any()
    if "lse" in results:
        assert torch.equal(results["lse"] == -math.inf, dead)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("value", ["finfo.min", -10000.0])
@pytest.mark.parametrize("kind", ["blocks", "causal", "few at an offset", "many, causal, at offsets", "window"])
def test_large_finite_negatives_are_a_softmax(device: str, kind: str, value: str | float, dtype: torch.dtype):
    """Never -inf by overflow: a row of them is a softmax, and where other keys are left they get nothing."""
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("fused attention refuses float64 on CUDA")
    of_kind, low = kinds(device)[kind], torch.finfo(dtype).min if isinstance(value, str) else value
    padding = torch.full((2, TOKENS), low, dtype=dtype)
    padding[1, 20:40] = 0
    bias = torch.full((of_kind.queries, TOKENS), low, dtype=dtype)
    for masks in ({"key_padding_mask": padding}, {"attn_mask": bias, "rpe": bias, "key_padding_mask": padding}):
        if kind == "window" and len(masks) > 1:
            continue  # it has none of the others
        tensors = of_kind.operands(dtype) | {name: x.clone() for name, x in masks.items()}
        hold(of_kind.case(tensors), device)
