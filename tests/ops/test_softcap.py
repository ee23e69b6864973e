"""Soft caps of scores: results and gradients are those of the reference, in every way that attention runs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import assert_as_accurate, is_hopper, random, seeded

import ds_sparse
from ds_sparse import SparseSelfAttention, block_sparse_attention, reference, selected_attention, window_attention

TOKENS, BLOCK, CAP = 75, 16, 1.5
LAYOUT = torch.tensor([[1, 0, 0, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 1, 0], [0, 1, 0, 0, 1]]).bool()
KEPT = torch.rand(2, TOKENS, generator=seeded(7)) < 0.7
PAIRS = torch.rand(1, 1, TOKENS, TOKENS, generator=seeded(8)) < 0.7
EDGES = torch.tensor([0, 10, 47, TOKENS])


def operands(
    dtype: torch.dtype, batch: int = 2, queries: int = TOKENS, key_heads: int = 4, head_dim: int = 24
) -> list[torch.Tensor]:
    """Scores of some times the cap, with some far beyond it."""
    query = 3 * random(seeded(), batch, 4, queries, head_dim)
    key, value = random(seeded(1), 2, batch, key_heads, TOKENS, head_dim)
    query[:, :, 3] *= 10
    return [x.to(dtype).requires_grad_() for x in (query, key, value)]


def hold(ours: Any, meaning: Any, given: list[torch.Tensor], terms: float = 8.0) -> None:
    """Output and gradients are as near to float64's as those of plain PyTorch in the same dtype."""
    wide = [x.detach().double().requires_grad_() for x in given]
    plain = [x.detach().requires_grad_() for x in given]
    found = []
    for run, leaves in ((ours, given), (meaning, plain), (meaning, wide)):
        output = run(*leaves)
        found.append([output, *torch.autograd.grad(output.sin().sum(), leaves)])
    for name, *results in zip(("output", "query", "key", "value", "sinks"), *found, strict=False):
        of_ours, of_plain, exact = results
        assert_as_accurate(name, of_ours, of_plain, exact, largest_term=terms * exact.abs().max().item())


OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": {"causal": True},
    "padding": {"key_padding_mask": KEPT},
    "pairs": {"attn_mask": PAIRS, "causal": True},
    "scaled": {"scale": 0.7},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_on_blocks(dtype: torch.dtype, options: dict[str, Any]):
    given = operands(dtype, key_heads=2)
    hold(
        lambda *x: block_sparse_attention(*x, LAYOUT, softcap=CAP, **options),
        lambda *x: reference.attention(*x, LAYOUT, BLOCK, softcap=CAP, **options),
        given,
    )


def test_with_sinks_and_lse():
    sinks = random(seeded(4), 4).requires_grad_()
    given = [*operands(torch.float64), sinks]

    def run(attend: Any, *more: Any) -> Any:
        def of(*x: torch.Tensor) -> torch.Tensor:
            output, lse = attend(*x[:3], LAYOUT, *more, sinks=x[3], softcap=CAP, return_lse=True)
            return torch.cat([output, lse.unsqueeze(-1)], -1)

        return of

    hold(run(block_sparse_attention), run(reference.attention, BLOCK), given)


def test_dropout_drops_the_same():
    given = operands(torch.float64)
    torch.manual_seed(3)
    capped = block_sparse_attention(*given, LAYOUT, dropout_p=0.4, softcap=1e8)
    torch.manual_seed(3)
    expected = block_sparse_attention(*given, LAYOUT, dropout_p=0.4)
    torch.testing.assert_close(capped, expected)
    grads = (torch.autograd.grad(x.sum(), given) for x in (capped, expected))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("softcap", [1e-3, 1e4, 1e8])
def test_caps_of_any_size(softcap: float, dtype: torch.dtype):
    """Below all scores they are equal, so that a row is the mean of values; far above, a score keeps its digits."""
    given = operands(dtype)
    hold(
        lambda *x: block_sparse_attention(*x, LAYOUT, softcap=softcap),
        lambda *x: reference.attention(*x, LAYOUT, BLOCK, softcap=softcap),
        given,
    )


@pytest.mark.parametrize("queries", [5, 40])
@pytest.mark.parametrize("causal", [False, True])
def test_of_queries_at_an_offset(queries: int, causal: bool):
    options = {"query_offset": TOKENS - queries, "causal": causal, "softcap": CAP}
    hold(
        lambda *x: block_sparse_attention(*x, LAYOUT, block=BLOCK, **options),
        lambda *x: reference.attention(*x, LAYOUT, BLOCK, **options),
        operands(torch.float64, queries=queries, key_heads=2),
    )


def test_without_a_gradient_few_queries_are_capped_too():
    """There is a native operator for these, which knows of no cap."""
    given = [x.detach() for x in operands(torch.float64, queries=5)]
    options = {"query_offset": TOKENS - 5, "softcap": CAP}
    index = ds_sparse.BlockIndex.build(LAYOUT, BLOCK)
    expected = reference.attention(*given, LAYOUT, BLOCK, **options)
    for _ in range(2):  # the second call like one without a cap is remembered
        plain = block_sparse_attention(*given, index, query_offset=TOKENS - 5)
        torch.testing.assert_close(block_sparse_attention(*given, index, **options), expected)
    assert not torch.allclose(plain, expected)
    last = [x[:, :, -1:] if i == 0 else x for i, x in enumerate(given)]
    found = window_attention(*last, 20, causal=True, query_offset=TOKENS - 1, softcap=CAP)
    whole = [last[0].expand(-1, -1, TOKENS, -1), *last[1:]]
    torch.testing.assert_close(found, reference.window_attention(*whole, (20,), True, softcap=CAP)[:, :, -1:])


@pytest.mark.parametrize("document_layout", ["own", "row"])
def test_of_packed_documents(document_layout: str):
    layout = torch.ones(5, 5, dtype=torch.bool)
    seen = (torch.bucketize(torch.arange(TOKENS), EDGES, right=True)[:, None] == torch.bucketize(
        torch.arange(TOKENS), EDGES, right=True
    ))[None, None]  # fmt: skip
    hold(
        lambda *x: block_sparse_attention(
            *x, layout, block=BLOCK, cu_seqlens=EDGES, document_layout=document_layout, causal=True, softcap=CAP
        ),
        lambda *x: reference.attention(*x, layout, BLOCK, causal=True, attn_mask=seen, softcap=CAP),
        operands(torch.float64, batch=1),
    )


WINDOWS: dict[str, tuple[Any, ...]] = {
    "one": ([9], False, [], [1]),
    "causal": ([9], True, [], [1]),
    "global tokens": ([9], False, [3, 70], [1]),
    "dilated, a window a head": ([9, 4, 2, 1], True, [], [1, 2, 3, 1]),
}


@pytest.mark.parametrize("numbers", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_in_windows(dtype: torch.dtype, numbers: tuple[Any, ...]):
    window, causal, tokens, dilation = numbers
    hold(
        lambda *x: window_attention(
            *x, window, causal, KEPT, global_tokens=tokens or None, dilation=dilation, softcap=CAP
        ),
        lambda *x: reference.window_attention(
            *x, tuple(window), causal, KEPT, tuple(tokens), tuple(dilation), softcap=CAP
        ),
        operands(dtype),
    )


@pytest.mark.parametrize("implementation", ["fused", "separate"])
def test_of_a_module(implementation: str):
    """In parts too, which stores scores."""
    structure = ds_sparse.BSLongformerSparsityConfig(num_heads=4, block=BLOCK)
    module = SparseSelfAttention(structure, max_seq_length=80, implementation=implementation)
    hold(
        lambda *x: module.attend(*x, key_padding_mask=KEPT, softcap=CAP),
        lambda *x: reference.attention(*x, structure.make_layout(80), BLOCK, key_padding_mask=KEPT, softcap=CAP),
        operands(torch.float64),
    )


@pytest.mark.parametrize("kind", ["blocks", "windows", "module"])
def test_compiles_into_one_graph_for_any_length(kind: str):
    """Graphs of modules and windows hold operators of their own, which pass PyTorch's checks."""
    structure = ds_sparse.BSLongformerSparsityConfig(num_heads=4, block=BLOCK)
    module = SparseSelfAttention(structure, max_seq_length=160)
    index = ds_sparse.BlockIndex.build(LAYOUT, BLOCK)
    run = {
        "blocks": lambda *x: block_sparse_attention(*x, index, softcap=CAP),
        "windows": lambda *x: window_attention(*x, 9, softcap=CAP),
        "module": lambda *x: module.attend(*x, softcap=CAP),
    }[kind]
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for tokens in (TOKENS,) if kind == "blocks" else (TOKENS, 90, 130):
        given = [x.requires_grad_() for x in random(seeded(tokens), 3, 2, 4, tokens, 24)]
        found, expected = compiled(*given), run(*given)
        torch.testing.assert_close(found, expected)
        grads = (torch.autograd.grad(x.sin().sum(), given) for x in (found, expected))
        torch.testing.assert_close(*grads)


def test_under_vmap():
    given = [x.detach() for x in random(seeded(), 3, 3, 2, 4, TOKENS, 24)]
    found = torch.vmap(lambda *x: block_sparse_attention(*x, LAYOUT, block=BLOCK, softcap=CAP))(*given)
    expected = [block_sparse_attention(*x, LAYOUT, softcap=CAP) for x in zip(*given, strict=True)]
    torch.testing.assert_close(found, torch.stack(expected))


def test_numbers_that_are_not_finite_stay_in_rows_that_see_them():
    given = [x.detach() for x in operands(torch.float32)]
    given[1][:, :, 20] = math.nan
    given[2][:, :, 21] = math.inf
    leaves = [x.requires_grad_() for x in given]
    output = block_sparse_attention(*leaves, LAYOUT, softcap=CAP)
    sees = LAYOUT.repeat_interleave(BLOCK, 0)[:TOKENS, 1]
    assert output[:, :, ~sees].isfinite().all() and not output[:, :, sees].isfinite().any()
    grads = torch.autograd.grad(output[:, :, ~sees].sum(), leaves)
    assert grads[0][:, :, ~sees].isfinite().all()
    assert all(x[:, :, 48:64].isfinite().all() for x in grads[1:])


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"softcap": -1.0}, ValueError, "softcap is -1.0; it has to be 0, for none, or a number above it"),
        ({"softcap": math.nan}, ValueError, "softcap is nan; it has to be 0"),
        ({"softcap": 1e-60}, ValueError, "softcap is 1e-60; .* that fp32 holds"),
        ({"softcap": 1e39}, ValueError, "softcap is 1e[+]39; .* that fp32 holds"),
        ({"softcap": torch.tensor(2.0)}, TypeError, r"it has to be a Python number, 0 for none: give float\(softcap\)"),
        ({"softcap": None}, TypeError, "softcap is None; it has to be a Python number, 0 for none"),
        ({"softcap": True}, TypeError, "softcap is True; it has to be a Python number"),
        ({"rpe": torch.zeros(TOKENS, TOKENS)}, ValueError, "softcap is 1.5, and a mask or bias adds numbers to scores"),
        ({"distance_bias": torch.zeros(1, 2 * TOKENS - 1)}, ValueError, "beside a soft cap give bool masks alone"),
        (
            {"attn_mask": torch.zeros(TOKENS, TOKENS)},
            ValueError,
            "or compute attention in parts, by MatMul and Softmax",
        ),
        ({"key_padding_mask": torch.zeros(2, TOKENS)}, ValueError, "beside a soft cap give bool masks alone"),
    ],
)
def test_what_does_not_fit_is_a_sentence(options: dict[str, Any], error: type[Exception], sentence: str):
    with pytest.raises(error, match=sentence):
        block_sparse_attention(*operands(torch.float32), LAYOUT, **{"softcap": CAP, **options})


def test_blocks_that_are_chosen_have_none():
    structure = ds_sparse.MobaSparsityConfig(num_heads=4, block=BLOCK)
    module = SparseSelfAttention(structure, max_seq_length=80)
    with pytest.raises(ValueError, match="softcap: MobaSparsityConfig .*does not compute it; leave it out"):
        module.attend(*operands(torch.float32), softcap=CAP)
    with pytest.raises(TypeError, match="softcap"):
        selected_attention(*operands(torch.float32), torch.zeros(2, 4, TOKENS, 1).int(), BLOCK, softcap=CAP)


def on_gpu(run: Any, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    """The call with everything on a GPU; the result, and so its gradients, come back."""
    moved = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    return run(*(x.cuda() for x in tensors), **moved).cpu()


IMPLEMENTATIONS = [("portable", torch.float32), ("portable", torch.bfloat16), ("portable", torch.float16)]
IMPLEMENTATIONS += [("hopper", torch.bfloat16), ("hopper", torch.float16)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnAGpu:
    @pytest.fixture(autouse=True, params=IMPLEMENTATIONS, ids=lambda param: f"{param[0]}-{param[1]}")
    def implementation(self, request: pytest.FixtureRequest):
        name, self.dtype = request.param
        if name == "hopper" and not is_hopper("cuda"):
            pytest.skip("needs a Hopper GPU")
        with ds_sparse.force_implementation(name):
            yield

    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    @pytest.mark.parametrize("head_dim", [24, 64, 128])
    def test_on_blocks(self, head_dim: int, options: dict[str, Any]):
        hold(
            lambda *x: on_gpu(block_sparse_attention, *x, LAYOUT, softcap=CAP, **options),
            lambda *x: reference.attention(*x, LAYOUT, BLOCK, softcap=CAP, **options),
            operands(self.dtype, key_heads=2, head_dim=head_dim),
            # Scores of some hundreds are of products of TF32, three for each, in fp32.
            terms=48.0 if self.dtype == torch.float32 else 8.0,
        )

    @pytest.mark.parametrize("softcap", [0.05, 1e3])
    @pytest.mark.parametrize("deterministic", [False, True])
    def test_small_and_large_caps_in_either_sweep(self, softcap: float, deterministic: bool):
        torch.use_deterministic_algorithms(deterministic)
        try:
            hold(
                lambda *x: on_gpu(block_sparse_attention, *x, LAYOUT, softcap=softcap),
                lambda *x: reference.attention(*x, LAYOUT, BLOCK, softcap=softcap),
                operands(self.dtype),
            )
        finally:
            torch.use_deterministic_algorithms(False)

    def test_with_sinks_and_lse_in_one_graph(self):
        sinks = random(seeded(4), 4).float().requires_grad_()
        given, index = [*operands(self.dtype), sinks], ds_sparse.BlockIndex.build(LAYOUT.cuda(), BLOCK)
        torch._dynamo.reset()
        attend = torch.compile(block_sparse_attention, fullgraph=True, backend="aot_eager")

        def ours(*x: torch.Tensor) -> torch.Tensor:
            query, key, value, sinks = (y.cuda() for y in x)
            output, lse = attend(query, key, value, index, sinks=sinks, softcap=CAP, return_lse=True)
            return torch.cat([output.float(), lse.unsqueeze(-1)], -1).cpu()

        def meaning(*x: torch.Tensor) -> torch.Tensor:
            output, lse = reference.attention(
                *x[:3], LAYOUT, BLOCK, sinks=x[3].to(x[0].dtype), softcap=CAP, return_lse=True
            )
            return torch.cat([output, lse.unsqueeze(-1)], -1).to(torch.promote_types(x[0].dtype, torch.float32))

        hold(ours, meaning, given)

    @pytest.mark.parametrize("softcap", [1e8, 3e38])
    def test_a_cap_far_above_all_scores_changes_nothing(self, softcap: float):
        """But for roundings, and for tanh, which has 11 bits with fp16 and bf16. Scores are a few at most."""
        found, scale = [], 0.01
        for cap in (0.0, softcap):
            given = operands(self.dtype)
            output = on_gpu(block_sparse_attention, *given, LAYOUT, softcap=cap, scale=scale)
            found.append([output, *torch.autograd.grad(output.float().sin().sum(), given)])
        largest_score = (given[0] @ given[1].mT).abs().max().item() * scale
        of_tanh = 2.0**-11 * largest_score if self.dtype != torch.float32 else 1e-5
        for without, capped in zip(*found, strict=True):
            size = without.abs().max().item()
            atol = (4 * torch.finfo(self.dtype).eps + 2 * of_tanh) * size
            torch.testing.assert_close(capped, without, rtol=0, atol=atol)

    @pytest.mark.parametrize("numbers", WINDOWS.values(), ids=WINDOWS)
    def test_in_windows(self, numbers: tuple[Any, ...]):
        window, causal, tokens, dilation = numbers
        more = {"global_tokens": tokens or None, "dilation": dilation, "softcap": CAP}
        hold(
            lambda *x: on_gpu(window_attention, *x, window_size=window, causal=causal, key_padding_mask=KEPT, **more),
            lambda *x: reference.window_attention(
                *x, tuple(window), causal, KEPT, tuple(tokens), tuple(dilation), softcap=CAP
            ),
            operands(self.dtype),
        )

    def test_of_packed_documents_and_a_module(self):
        layout = torch.ones(5, 5, dtype=torch.bool)
        document = torch.bucketize(torch.arange(TOKENS), EDGES, right=True)
        hold(
            lambda *x: on_gpu(block_sparse_attention, *x, layout, block=BLOCK, cu_seqlens=EDGES, softcap=CAP),
            lambda *x: reference.attention(
                *x, layout, BLOCK, attn_mask=(document[:, None] == document)[None, None], softcap=CAP
            ),
            operands(self.dtype, batch=1),
        )
        structure = ds_sparse.BSLongformerSparsityConfig(num_heads=4, block=BLOCK)
        module = SparseSelfAttention(structure, max_seq_length=80).cuda()
        hold(
            lambda *x: on_gpu(module.attend, *x, key_padding_mask=KEPT, softcap=CAP),
            lambda *x: reference.attention(*x, structure.make_layout(80), BLOCK, key_padding_mask=KEPT, softcap=CAP),
            operands(self.dtype),
        )

    def test_rows_computed_anew_are_capped(self):
        """Kernels compute those again that a NaN of other rows may have reached."""
        given = operands(self.dtype)
        given[1].data[:, :, 20] = math.nan
        given[2].data[:, :, 21] = math.inf
        leaves = [x.detach().cuda().requires_grad_() for x in given]
        output = block_sparse_attention(*leaves, LAYOUT.cuda(), softcap=CAP)
        sees = LAYOUT.repeat_interleave(BLOCK, 0)[:TOKENS, 1]
        assert not output[:, :, sees].isfinite().any()
        grads = torch.autograd.grad(output[:, :, ~sees].float().sin().sum(), leaves)
        clean = [x.detach().float().nan_to_num(0, 0, 0).requires_grad_() for x in given]
        of_clean = reference.attention(*clean, LAYOUT, BLOCK, softcap=CAP)[:, :, ~sees]
        torch.testing.assert_close(output[:, :, ~sees].cpu().float(), of_clean, rtol=0.01, atol=0.02)
        rows = [~sees, slice(48, 64), slice(48, 64)]
        for found, expected, of in zip(grads, torch.autograd.grad(of_clean.sin().sum(), clean), rows, strict=True):
            size = expected.abs().max().item()
            assert size > 0
            torch.testing.assert_close(found.cpu().float()[:, :, of], expected[:, :, of], rtol=0.02, atol=0.02 * size)
