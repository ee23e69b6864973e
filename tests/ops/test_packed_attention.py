"""Attention over documents packed in one row: the same as a call for each document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from fuzz.blocks import packed_case
from fuzz.compare import hold
from fuzz.documents import Documents
from helpers import DTYPES, captured, is_hopper, nothing_waits, poisoned_memory, random, seeded

from ds_sparse import (
    BlockIndex,
    PackedIndex,
    WindowIndex,
    block_sparse_attention,
    force_implementation,
    window_attention,
)

OPERATORS = ("block_attention_forward", "window_attention_forward")
LENGTHS = (
    (100, 1, 0, 64, 37, 129),
    (200,),
    (16, 16, 16),
    (5, 300, 3, 3, 70, 128, 1),
)
CASES = [
    # lengths, block, heads, key heads, head size, layouts of heads differ, causal, sums in a fixed order
    (LENGTHS[0], 16, 4, 2, 64, False, False, False),
    (LENGTHS[0], 32, 4, 4, 40, True, True, False),
    (LENGTHS[0], 64, 2, 1, 128, True, False, True),
    (LENGTHS[1], 128, 2, 2, 64, False, True, True),
    (LENGTHS[2], 16, 3, 3, 96, True, False, False),
    (LENGTHS[3], 8, 2, 2, 20, True, True, False),
    (LENGTHS[3], 64, 4, 2, 64, False, True, False),
    (LENGTHS[3], 128, 2, 2, 128, True, False, False),
    (LENGTHS[3], 32, 2, 2, 200, False, False, False),
    (LENGTHS[3], 16, 4, 1, 64, True, True, True),
]


def cu_seqlens_of(lengths: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def layout_for(lengths: tuple[int, ...], block: int, heads: int) -> torch.Tensor:
    blocks = -(-max(lengths) // block) + 1
    live = torch.rand(heads, blocks, blocks, generator=seeded(7)) < 0.5
    live[:, torch.arange(blocks), torch.arange(blocks)] = True
    live[0, blocks // 2] = False  # rows that see nothing
    return live


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("lengths", "block", "heads", "key_heads", "head_dim", "differ", "causal", "deterministic"), CASES
)
def test_packed_documents_are_as_separate_calls(
    device: str, lengths: tuple[int, ...], block: int, heads: int, key_heads: int, head_dim: int, differ: bool,
    causal: bool, deterministic: bool, dtype: torch.dtype,
):  # fmt: skip
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("fp64 is refused on CUDA")
    live = layout_for(lengths, block, heads if differ else 1)
    sizes = {"query": heads, "key": key_heads, "value": key_heads}
    tensors = {
        name: random(seeded(i), 1, n, sum(lengths), head_dim, dtype=dtype) for i, (name, n) in enumerate(sizes.items())
    }
    documents = Documents(cu_seqlens_of(lengths, "cpu"), "own")
    case = packed_case(tensors, live, block, documents, causal=causal, return_lse=True)
    hold(replace(case, poisoned=deterministic), device)


@pytest.mark.parametrize("scale", [1e-6, 1.00000005e-6, 2e-6])
def test_scales_about_the_least(device: str, scale: float):
    """The second is more than 1e-6, but not in float32."""
    tensors = tensors_of(torch.bfloat16)
    tensors["query"] *= 1e6  # scores of a usual size
    documents = Documents(cu_seqlens_of(LENGTHS[0], "cpu"), "own")
    hold(packed_case(tensors, LAYOUT, 16, documents, scale=scale), device)


@pytest.mark.parametrize("form", ["rows", "tokens first", "nested"])
@pytest.mark.parametrize("document_layout", ["own", "row"])
def test_other_forms_of_a_packed_row_give_the_same(device: str, document_layout: str, form: str):
    """As each document alone, with its own layout or with what the row's leaves of it, and its sinks."""
    for causal, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        tensors = tensors_of(dtype)
        tensors["sinks"] = random(seeded(), 4, dtype=dtype)
        live = torch.rand(4, 22, 22, generator=seeded(4)) < 0.5
        documents = Documents(cu_seqlens_of(LENGTHS[0], "cpu"), document_layout)
        hold(packed_case(tensors, live, 16, documents, form=form, causal=causal), device)


def operands(
    device: str, tokens: int = 331, dtype: torch.dtype = torch.float32, head_dim: int = 16
) -> list[torch.Tensor]:
    return [
        torch.randn(1, heads, tokens, head_dim, generator=seeded(heads)).to(device, dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]


def tensors_of(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    operands_of_cpu = (x.detach() for x in operands("cpu", dtype=dtype))
    return dict(zip(("query", "key", "value"), operands_of_cpu, strict=True))


LAYOUT = layout_for(LENGTHS[0], 16, 4)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_documents_are_read_where_they_lie_and_nothing_else_is_written(device: str, head_dim: int):
    """On Hopper, with memory poisoned, and with the copies that other GPUs make, bit by bit but for the gradient of
    query, which has sums in any order."""
    if not is_hopper(device):
        pytest.skip("others copy")
    cu_seqlens = cu_seqlens_of(LENGTHS[0], device)
    query, key, value = operands(device, dtype=torch.bfloat16, head_dim=head_dim)
    grad = torch.randn(query.shape, generator=seeded(3)).to(query)

    def run(causal: bool) -> list[torch.Tensor]:
        results = block_sparse_attention(
            query, key, value, LAYOUT.to(device), block=16, cu_seqlens=cu_seqlens, causal=causal, return_lse=True
        )
        grads = torch.autograd.grad(results[0], (query, key, value), grad)
        return [*results, *grads]

    for causal in (True, False):
        with poisoned_memory():
            found = run(causal)
            again = run(causal)
        with poisoned_memory(), force_implementation("portable"):
            copied = run(causal)
        for one, other, by_copies in zip(found, again, copied, strict=True):
            assert torch.equal(one, other)
            torch.testing.assert_close(one, by_copies, rtol=0.02, atol=0.02)


BORDERS = [LENGTHS[0], LENGTHS[0][::-1], (129, 100, 0, 60, 0, 42), (129, 129, 73, 0, 0, 0)]
"""Documents of one row whose number stays the same, as some have no tokens."""


def attentions(causal: bool, layout: BlockIndex, row: BlockIndex, of_row: str) -> Callable[..., torch.Tensor]:
    """One of the three ways to attend to documents of a row, of query, key, value and cu_seqlens."""
    if of_row == "window":
        return lambda *x: window_attention(*x[:3], 9, causal, cu_seqlens=x[3])
    index = layout if of_row == "own" else row
    return lambda *x: block_sparse_attention(*x[:3], index, cu_seqlens=x[3], causal=causal, document_layout=of_row)


def attention_and_gradients(
    attend: Callable[..., torch.Tensor], given: list[torch.Tensor], cu_seqlens: torch.Tensor
) -> list[torch.Tensor]:
    output = attend(*given, cu_seqlens)
    return [output.detach(), *torch.autograd.grad(output.float().sin().sum(), given)]


def in_each_way(test: Callable) -> Callable:
    ways = pytest.mark.parametrize("of_row", ["own", "row", "window"])
    return pytest.mark.parametrize("causal", [False, True])(ways(test))


def layouts(device: str) -> tuple[BlockIndex, BlockIndex]:
    """Layouts of the longest document, and of the row."""
    row = torch.rand(4, 21, 21, generator=seeded(4)) < 0.5
    return BlockIndex.build(LAYOUT.to(device), 16), BlockIndex.build(row.to(device), 16)


@in_each_way
def test_nothing_waits_for_a_new_batch(device: str, of_row: str, causal: bool):
    if device == "cpu":
        pytest.skip("a matter of GPUs")
    given = operands(device, dtype=torch.bfloat16, head_dim=64)
    attend = attentions(causal, *layouts(device), of_row)
    of_cpu = ["cpu"] if is_hopper(device) or of_row != "own" else []  # others copy, and count the live blocks then
    batches = [cu_seqlens_of(lengths, on) for on in (*of_cpu, device) for lengths in BORDERS]
    attention_and_gradients(attend, given, batches[0])
    torch.cuda.synchronize()
    with nothing_waits():
        for cu_seqlens in batches[1:]:
            attention_and_gradients(attend, given, cu_seqlens)


@in_each_way
@pytest.mark.parametrize("head_dim", [64, 16])
def test_a_cuda_graph_is_repeated_with_other_borders(device: str, of_row: str, causal: bool, head_dim: int):
    """And gives NaN alone where they are none; nothing of it is kept for others."""
    if device == "cpu":
        pytest.skip("a matter of GPUs")
    given = operands(device, dtype=torch.bfloat16 if head_dim == 64 else torch.float32, head_dim=head_dim)
    attend = attentions(causal, *layouts(device), of_row)
    cu_seqlens = cu_seqlens_of(BORDERS[0], device)
    graph, found = captured(partial(attention_and_gradients, attend, given, cu_seqlens))
    wrong = [(0, 300, 200, 331, 331, 331, 331), (0, 0, 0, 0, 0, 200, 330), (7, 100, 100, 200, 300, 331, 331)]
    wrong += [(0, 331, 331, 331, 331, 331, 331)] if of_row == "own" else []  # longer than the layout
    for lengths in (*BORDERS, wrong, BORDERS[0]):
        for edges in lengths if lengths is wrong else [cu_seqlens_of(lengths, "cpu")]:
            cu_seqlens.copy_(torch.as_tensor(edges))
            graph.replay()
            if lengths is wrong:
                assert all(x.isnan().all() for x in found)
                continue
            for x, y in zip(found, attention_and_gradients(attend, given, cu_seqlens_of(lengths, "cpu")), strict=True):
                torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)


@in_each_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_compiled_graph_takes_other_borders(device: str, of_row: str, causal: bool, dtype: torch.dtype):
    given, near = operands(device, dtype=dtype, head_dim=64), 1e-4 if dtype == torch.float32 else 0.02
    attend = attentions(causal, *layouts(device), of_row)
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for lengths in BORDERS:
        found = attention_and_gradients(compiled, given, cu_seqlens_of(lengths, device))
        right = attention_and_gradients(attend, given, cu_seqlens_of(lengths, "cpu"))
        for x, y in zip(found, right, strict=True):
            torch.testing.assert_close(x, y, rtol=near, atol=near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_of_packed_documents_is_replayed_backwards(device: str, dtype: torch.dtype):
    cu_seqlens = cu_seqlens_of(LENGTHS[0], device)
    query, key, _ = operands(device, dtype=dtype)
    ones = torch.ones_like(key).requires_grad_()

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(5)
        output = block_sparse_attention(
            query, key, ones, LAYOUT.to(device), block=16, cu_seqlens=cu_seqlens, dropout_p=0.4
        )
        return output, torch.autograd.grad(output.sum(), ones)[0]

    output, grad = run()
    kept = output.detach().float()
    assert kept[kept > 0].std() > 0.01 and abs(kept[kept > 0].mean() - 1) < 0.1
    # What a probability gives forward is what its gradient is multiplied by.
    torch.testing.assert_close(grad.float().sum(), kept.sum(), rtol=0.02, atol=0.1)
    assert torch.equal(run()[0], output)


def test_the_index_of_a_batch_is_built_once_and_again_after_a_change(device: str):
    cu_seqlens, given = cu_seqlens_of(LENGTHS[0], device), operands(device)
    layout, built = LAYOUT.to(device), []
    build = PackedIndex.build
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedIndex, "build", lambda *x, **y: built.append(1) or build(*x, **y))
        for _ in range(3):
            first = block_sparse_attention(*given, layout, block=16, cu_seqlens=cu_seqlens)
        assert len(built) == 1
        cu_seqlens[1] = 90
        second = block_sparse_attention(*given, layout, block=16, cu_seqlens=cu_seqlens)
        assert len(built) == 2 and not torch.equal(first, second)


def test_an_index_that_was_built_before_is_taken_and_compiled(device: str):
    given = operands(device)
    index = PackedIndex.build(LAYOUT, cu_seqlens_of(LENGTHS[0], "cpu"), 16, device=device)
    eager = block_sparse_attention(*given, index)
    assert torch.equal(
        block_sparse_attention(*given, LAYOUT.to(device), block=16, cu_seqlens=cu_seqlens_of(LENGTHS[0], "cpu")), eager
    )
    compiled = torch.compile(lambda *qkv: block_sparse_attention(*qkv, index), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*given), eager)


def test_a_causal_index_is_compiled_when_it_is_prepared(device: str):
    given = operands(device)
    index = PackedIndex.build(LAYOUT, cu_seqlens_of(LENGTHS[0], "cpu"), 16, device=device)

    def attend(*qkv):
        return block_sparse_attention(*qkv, index, causal=True)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"missing of a PackedIndex cannot be made under torch\.compile; pass index"):
        compiled(*given)
    index.prepared(causal=True)
    assert torch.equal(compiled(*given), attend(*given))


@pytest.mark.parametrize("document_layout", ["own", "row"])
def test_an_index_for_another_block_is_refused(document_layout: str):
    query, key, value = operands("cpu")
    index = BlockIndex.build(torch.ones(21, 21), 16)
    with pytest.raises(ValueError, match="block is 32, and the index was built for blocks of 16"):
        block_sparse_attention(
            query, key, value, index, block=32, cu_seqlens=CU_SEQLENS, document_layout=document_layout
        )


@pytest.mark.parametrize("given_as", ["tokens first", "nested", "index"])
def test_windows_take_a_packed_row_in_other_forms(device: str, given_as: str):
    cu_seqlens, given = cu_seqlens_of(LENGTHS[0], device), [x.requires_grad_() for x in operands(device)]
    expected = window_attention(*given, 9, True, cu_seqlens=cu_seqlens)
    rows = [x[0].transpose(0, 1) for x in given]
    if given_as == "nested":
        nested = [torch.nested.nested_tensor_from_jagged(x, cu_seqlens.long()).transpose(1, 2) for x in rows]
        found = window_attention(*nested, 9, True).transpose(1, 2).values()
    elif given_as == "index":
        index = WindowIndex.build(331, 9, True, device=device, cu_seqlens=cu_seqlens)
        found = window_attention(*rows, index)
    else:
        found = window_attention(*rows, 9, True, cu_seqlens=cu_seqlens)
    assert torch.equal(found, expected[0].transpose(0, 1))
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, given, grad)
    for x, y in zip(torch.autograd.grad(found, given, grad[0].transpose(0, 1)), wanted, strict=True):
        torch.testing.assert_close(x, y)


def test_windows_of_a_row_of_other_shapes_are_refused():
    row = torch.zeros(331, 4, 16)
    with pytest.raises(ValueError, match=r"all have to be \(T, heads, D\), or all \(1, heads, T, D\)"):
        window_attention(row, row[None], row, 9, cu_seqlens=CU_SEQLENS)
    with pytest.raises(ValueError, match="of which queries and keys are the same tokens"):
        window_attention(row, row[:40], row[:40], 9, cu_seqlens=CU_SEQLENS)
    with pytest.raises(ValueError, match=r"have to be \(batch, heads, tokens, head size\)"):
        window_attention(row, row, row, 9)


CU_SEQLENS = cu_seqlens_of(LENGTHS[0], "cpu")


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"cu_seqlens": torch.tensor([0, 100, 200, 330])}, "documents have 330 tokens together, and query has 331"),
        ({"key_padding_mask": torch.ones(1, 331)}, "key_padding_mask is given for packed documents"),
        ({"rpe": torch.ones(331, 331)}, "rpe is given for packed documents, .* call once for each document"),
        ({"query_offset": 3}, "query_offset is given for packed documents, and goes by places in a row"),
        ({"sinks": torch.zeros(3)}, r"sinks has shape \(3,\); it has to be \(4,\)"),
        ({"block": None}, "without its block; pass block"),
        ({"document_layout": "whole"}, "document_layout is 'whole'; it has to be 'own', .* or 'row'"),
        ({"document_layout": "row", "return_lse": True}, "are for document_layout='own'"),
        ({"document_layout": "row", "layout": torch.ones(3, 3)}, "for a row of 331 tokens .* 21 x 21 blocks"),
        ({"layout": torch.ones(3, 3)}, "for the longest document of 129 tokens .* 9 x 9 blocks or more"),
        ({"layout": torch.ones(3, 21, 21)}, "query has 4 heads and the layout 3"),
        ({"layout": torch.ones(3, 21, 21), "document_layout": "row"}, "query has 4 heads and the layout 3"),
        ({"query": torch.zeros(2, 4, 331, 16)}, "batch and head size"),
        ({"dropout_p": 1.0}, "dropout_p is 1.0"),
        ({"layout": PackedIndex.build(LAYOUT, CU_SEQLENS, 16)}, "and cu_seqlens besides; it was built with them"),
        (
            {"layout": PackedIndex.build(LAYOUT, CU_SEQLENS, 16), "cu_seqlens": None, "block": 32},
            "16 is given, and block=",
        ),
        (
            {x: torch.zeros(331, 4, 16).transpose(0, 1) for x in ("query", "key", "value")},
            r"Operands are \(T, heads, D\)",
        ),
        (
            {**dict.fromkeys(("query", "key", "value"), torch.zeros(331, 4, 16)), "cu_seqlens": None},
            "give their cu_seqlens",
        ),
        (
            {"layout": PackedIndex.build(LAYOUT, CU_SEQLENS, 16), "document_layout": "row"},
            "A PackedIndex is for document_layout='own'",
        ),
    ],
)
def test_what_does_not_fit_packed_documents_is_refused(changed: dict, sentence: str):
    query, key, value = operands("cpu")
    given = {"query": query, "key": key, "value": value, "layout": LAYOUT, "block": 16, "cu_seqlens": CU_SEQLENS}
    with pytest.raises(ValueError, match=sentence):
        block_sparse_attention(**(given | changed))


def test_a_document_layout_without_documents_is_refused():
    given = operands("cpu", 100)
    with pytest.raises(
        ValueError, match="document_layout is 'row', and there are no packed documents; give cu_seqlens"
    ):
        block_sparse_attention(*given, torch.ones(7, 7), block=16, document_layout="row")
    with pytest.raises(ValueError, match="document_layout is 'whole'; it has to be 'own'"):
        block_sparse_attention(*given, torch.ones(7, 7), block=16, document_layout="whole")


def test_rows_of_several_sequences_and_of_other_keys_are_refused():
    two = [torch.zeros(2, 2, 331, 16)] * 3
    with pytest.raises(ValueError, match="packed documents are one row"):
        block_sparse_attention(*two, LAYOUT[:1], block=16, cu_seqlens=CU_SEQLENS)
    with pytest.raises(ValueError, match="of which queries and keys are the same tokens"):
        block_sparse_attention(
            two[0][:1], *[torch.zeros(1, 2, 40, 16)] * 2, LAYOUT[:1], block=16, cu_seqlens=CU_SEQLENS
        )  # fmt: skip


def test_nested_tensors_of_other_kinds_are_refused():
    values = torch.zeros(331, 4, 16)
    nested = torch.nested.nested_tensor_from_jagged(values, CU_SEQLENS.long())
    with pytest.raises(ValueError, match=r"not jagged \(B, H, tokens, D\) without holes; .*transpose\(1, 2\)"):
        block_sparse_attention(nested, nested, nested, LAYOUT, block=16)
    strided = torch.nested.nested_tensor([torch.zeros(4, n, 16) for n in (31, 300)])
    with pytest.raises(ValueError, match=r"query is a nested tensor that is not jagged .* layout=torch\.jagged"):
        block_sparse_attention(strided, strided, strided, LAYOUT, block=16)
    query = nested.transpose(1, 2)
    for attend, index in (
        (block_sparse_attention, PackedIndex.build(LAYOUT, CU_SEQLENS, 16)),
        (window_attention, WindowIndex.build(331, 9)),
    ):
        sentence = f"A {type(index).__name__} is given for nested tensors, which know their documents"
        with pytest.raises(ValueError, match=sentence):
            attend(query, query, query, index)
        attend(*[query.values().unsqueeze(0)] * 3, index)
    with pytest.raises(ValueError, match="all nested, without cu_seqlens"):
        block_sparse_attention(query, query, query, LAYOUT, block=16, cu_seqlens=CU_SEQLENS)
    other = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 31, 331])).transpose(1, 2)
    with pytest.raises(ValueError, match="key has documents of other lengths than query"):
        block_sparse_attention(query, other, other, LAYOUT, block=16)


def test_flops_of_packed_documents_are_those_of_their_live_blocks(device: str):
    from torch.utils.flop_counter import FlopCounterMode

    given = operands(device)
    index = PackedIndex.build(LAYOUT[:1], CU_SEQLENS, 16, device=device)
    with FlopCounterMode(display=False) as counter:
        block_sparse_attention(*given, index)
    assert counter.get_total_flops() == 4 * index.blocks.live_blocks * 16 * 16 * 16 * 4
