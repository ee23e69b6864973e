"""window_attention: long rows, blocks and forms of numbers beyond those of the fuzz, memory, graphs, and refusals."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from fuzz.compare import hold
from fuzz.windows import attention_case
from helpers import leaf, random, seeded
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from ds_sparse import WindowIndex, window_attention
from ds_sparse.index import lookup
from ds_sparse.index.cache import Cache

OPERATORS = ("window_attention_forward", "window_attention_backward")


def operands(
    tokens: int = 40, heads: int = 2, head_dim: int = 16, batch: int = 2, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    rng, names = seeded(), ("query", "key", "value")
    return {name: random(rng, batch, heads, tokens, head_dim, dtype=dtype) for name in names}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"windows": [20]},
        {"windows": [20], "global_tokens": [0, 1, 2]},
        {"windows": [20], "global_tokens": [50, 3, 299]},
        {"windows": [20], "dilations": [3]},
        {"windows": [20], "dilations": [3], "global_tokens": [50, 3, 299]},
        {"windows": [33, 4], "dilations": [1, 7], "global_tokens": [60]},
    ],
    ids=str,
)
def test_every_option_over_many_blocks(device: str, options: dict, causal: bool, dtype: torch.dtype):
    keep = torch.rand(1, 300, generator=seeded()) < 0.9
    for head_dim in (16, 128):
        tensors = operands(300, head_dim=head_dim, batch=1, dtype=dtype) | {"key_padding_mask": keep}
        hold(attention_case(tensors, causal=causal, **options), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_long_rows_and_columns_are_put_together(device: str, dtype: torch.dtype, deterministic: bool):
    if device == "cpu" and not deterministic:
        pytest.skip("sums are always in a fixed order on the CPU")
    tokens = 1400 if device == "cpu" else 2300
    index = WindowIndex.build(tokens, 20, global_tokens=(7,), device=device)
    assert len(index.blocks.row_tiles.cuts) > 0 and len(index.blocks.column_tiles.cuts) > 0
    case = attention_case(operands(tokens, head_dim=64, batch=1, dtype=dtype), [20], global_tokens=[7])
    hold(replace(case, poisoned=deterministic), device)


@pytest.mark.parametrize("block", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_every_block(device: str, block: int, causal: bool):
    hold(attention_case(operands(300), [37], causal, [4, 130], as_index=True, block=block), device)


def test_forms_of_numbers(device: str):
    inputs = [x.to(device) for x in operands().values()]
    expected = window_attention(*inputs, (3, 7), global_tokens=(9, 2), dilation=(2, 1))
    for windows, tokens, dilations in (
        ([3, 7], [2, 9, 2], torch.tensor([2, 1])),
        (torch.tensor([3, 7], dtype=torch.int32), torch.tensor([9, 2]), [2, 1]),
    ):
        found = window_attention(*inputs, windows, global_tokens=tokens, dilation=dilations)
        assert torch.equal(found, expected)
    expected = window_attention(*inputs, 3)
    for windows in (torch.tensor(3), (3, 3), [3]):
        assert torch.equal(window_attention(*inputs, windows, global_tokens=()), expected)


def test_the_index_of_numbers_is_built_once(device: str, monkeypatch: pytest.MonkeyPatch):
    build, built = WindowIndex.build.__func__, []

    def counted(cls, *arguments, **options) -> WindowIndex:
        built.append(build(cls, *arguments, **options))
        return built[-1]

    monkeypatch.setattr(WindowIndex, "build", classmethod(counted))
    monkeypatch.setattr(lookup, "_of_windows", Cache(most=64))
    inputs = [x.to(device) for x in operands().values()]
    for _ in range(3):
        window_attention(*inputs, 6, causal=True)
    assert len(built) == 1
    # Not even inference mode leaves tensors in it that backward cannot take.
    with torch.inference_mode():
        window_attention(*inputs, 6, causal=True, dilation=2)
    leaves = [x.requires_grad_() for x in inputs]
    torch.autograd.grad(window_attention(*leaves, 6, causal=True, dilation=2).sum(), leaves)


@pytest.mark.parametrize(
    ("windows", "options"),
    [
        (5, {"causal": True}),
        (5, {"dilation": 2, "global_tokens": [0]}),
        ([5, 0, 9, 3], {"dilation": [1, 2, 3, 1]}),
        *(
            pytest.param(*case, marks=pytest.mark.slow_on_cpu("other pairs of the same windows and options"))
            for case in (
                (5, {"global_tokens": [9, 3]}),
                (5, {"dilation": [1, 2, 3, 1]}),
                ([5, 0, 9, 3], {"causal": True}),
                ([5, 0, 9, 3], {"global_tokens": [9, 3]}),
                ([5, 0, 9, 3], {"dilation": 2, "global_tokens": [0]}),
            )
        ),
    ],
    ids=str,
)
def test_numbers_compile_into_two_graphs_for_all_lengths(device: str, windows, options: dict):
    torch._dynamo.reset()
    counters.clear()

    def run(query, key, value, keep):
        return window_attention(query * 2, key, value, windows, key_padding_mask=keep, **options) * 2

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for tokens in (40, 64, 21):
        shapes = [(2, heads, tokens, 20) for heads in (4, 2, 2)]
        inputs = [leaf(random(seeded(), *shape, dtype=torch.float32), device) for shape in shapes]
        keep = (torch.rand(2, tokens, generator=seeded()) < 0.8).to(device)
        results, expected = compiled(*inputs, keep), run(*inputs, keep)
        torch.testing.assert_close(results, expected)
        found, wanted = (torch.autograd.grad(x.square().sum(), inputs) for x in (results, expected))
        torch.testing.assert_close(found, wanted)
    assert counters["stats"]["unique_graphs"] == 2


def test_memory_is_that_of_the_tensors(device: str):
    """Nothing of the size of the band, or of tokens squared, is a tensor."""
    x = random(seeded(), 1, 1, 4096, 16, dtype=torch.float32).to(device).requires_grad_()
    index = WindowIndex.build(4096, 500, global_tokens=[77], device=device)
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            results = result if isinstance(result, tuple) else (result,)
            sizes.extend(x.numel() for x in results)
            return result

    with Sizes():
        torch.autograd.grad(window_attention(x, x, x, index).sum(), x)
    assert max(sizes) == x.numel()


@dataclass(frozen=True)
class Refusal:
    """How a call is changed, and the sentence it ends in."""

    change: dict
    sentence: str
    error: type[Exception] = field(default=ValueError)


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal({"window_size": -1}, "window_size is -1; it has to be 0 or more"),
        Refusal({"window_size": True}, "window_size is True; it has to be an integer", TypeError),
        Refusal({"window_size": 2.0}, "window_size is 2.0", TypeError),
        Refusal({"window_size": torch.tensor([2.0])}, "window_size is a 1-D tensor of torch.float32", TypeError),
        Refusal({"window_size": (1, 2, 3)}, "window_size has 3 numbers; give one, or 2, one a head"),
        Refusal({"dilation": 0}, "dilation is 0; it has to be 1 or more"),
        Refusal({"dilation": (1, 2, 3)}, "dilation has 3 numbers; give one, or 2"),
        Refusal({"dilation": 1.5}, "dilation is 1.5", TypeError),
        Refusal({"global_tokens": [32]}, "global_tokens has 32, and there are 32 tokens, numbered from 0"),
        Refusal({"global_tokens": [-1]}, r"global_tokens is \[-1\]; it has to be 0 or more"),
        Refusal({"global_tokens": torch.ones(32).bool()}, r"mask .* \(32,\); .* mask.nonzero\(\)\[:, 0\]", TypeError),
        Refusal({"global_tokens": torch.ones(2, 32).bool()}, r"a mask of shape \(2, 32\); .* call once for", TypeError),
        Refusal({"global_tokens": [[0], [1, 2]]}, r"is \[\[0\], \[1, 2\]\]; .* call once .* by torch.cat", TypeError),
        Refusal({"key": torch.zeros(2, 2, 31, 16)}, "those of key and value equal"),
        Refusal({"query": torch.zeros(2, 2, 31, 16)}, "query has 31 tokens and key 32"),
        Refusal({"query": torch.zeros(2, 3, 32, 16)}, "query has 3 heads and key 2"),
        Refusal({"value": torch.zeros(2, 2, 32, 16).half()}, "value is torch.float16 and query torch.float32"),
        Refusal({"scale": math.nan}, "scale is nan; it has to be finite"),
        Refusal({"key_padding_mask": torch.ones(2, 31)}, r"key_padding_mask has shape \(2, 31\)"),
        Refusal({"key_padding_mask": torch.ones(2, 32, requires_grad=True)}, "key_padding_mask requires a gradient"),
        Refusal({"window_size": WindowIndex.build(31, 2)}, "WindowIndex is for 31 tokens .* query has 32 tokens"),
        Refusal({"window_size": WindowIndex.build(32, (1, 2, 3))}, "and 3 heads .* and 2 heads"),
        Refusal(
            {"window_size": WindowIndex.build(32, 2), "causal": True},
            "A WindowIndex is given, and causal besides; build it with that",
        ),
        Refusal({"window_size": WindowIndex.build(32, 2), "dilation": 2}, "and dilation besides"),
        Refusal({"window_size": WindowIndex.build(32, 2), "global_tokens": ()}, "and global_tokens besides"),
        Refusal({"global_tokens": torch.ones(2, 2).long()}, "all sequences of a batch share. .* call once", TypeError),
    ],
    ids=lambda refusal: refusal.sentence,
)
def test_arguments_that_do_not_fit(refusal: Refusal):
    x = torch.zeros(2, 2, 32, 16)
    with pytest.raises(refusal.error, match=refusal.sentence):
        window_attention(**{"query": x, "key": x, "value": x, "window_size": 2, **refusal.change})
