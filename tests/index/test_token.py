"""Every form of a list of token pairs to every other, what is refused, and how long an index is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import EXAMPLES, CountedOperators, Pairs, generator, random_pairs, seeded
from hypothesis import given
from hypothesis import strategies as st

from ds_sparse import BlockIndex, TokenIndex, sparse_matmul
from ds_sparse.index.token_forms import tensors_in


@st.composite
def pairs(draw: st.DrawFn, repeated: bool | None = None) -> Pairs:
    sizes = st.sampled_from((1, 1, 2, 3, 7, 20))
    return random_pairs(
        generator(draw),
        draw(sizes),
        draw(sizes),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from((0.4, 0.1, 1.0, 0.0))),
        draw(st.booleans()) if repeated is None else repeated,
    )


def counts_of(index: TokenIndex) -> torch.Tensor:
    """What an index lists, by the definition of its attributes."""
    counts = torch.zeros(index.num_lists, index.queries, index.keys, dtype=torch.int64)
    for line, (begin, end) in enumerate(zip(index.row_offsets[:-1].tolist(), index.row_offsets[1:].tolist())):
        for column in index.columns[begin:end].tolist():
            counts[line // index.queries, line % index.queries, column] += 1
    return counts.view(index.batch, index.heads, index.queries, index.keys)


@EXAMPLES
@given(pairs=pairs())
def test_pairs_and_csr_in_every_form_give_the_same_index(device: str, pairs: Pairs):
    pairs = replace(pairs, lists=tuple(x.to(device) for x in pairs.lists))
    lengths = pairs.queries, pairs.keys
    values, ends = pairs.csr()
    _, pointers = pairs.csr(pointer=True)
    forms = {
        "pairs": TokenIndex.from_pairs(pairs.nested(list(pairs.lists)), *lengths),
        "padded pairs": TokenIndex.from_pairs(pairs.stacked(list(pairs.lists), -1), *lengths),
        "int32 pairs": TokenIndex.from_pairs(pairs.nested([x.int() for x in pairs.lists]), *lengths),
        "ends": TokenIndex.from_csr(pairs.nested(values), pairs.nested(ends), *lengths),
        "pointers": TokenIndex.from_csr(pairs.nested(values), pairs.nested(pointers), *lengths),
    }
    if len(values) > 1:
        stacked = torch.stack(ends).view(*pairs.counts.shape[pairs.batch == 1 : 2], pairs.queries)
        forms["padded values"] = TokenIndex.from_csr(pairs.stacked(values, 99), stacked, *lengths)
    if int(pairs.counts.max()) < 2:
        forms["mask"] = TokenIndex.from_mask(pairs.counts.to(device) > 0)
    for name, index in forms.items():
        assert (index.batch, index.heads, index.device.type) == (pairs.batch, pairs.heads, device), name
        assert torch.equal(counts_of(index), pairs.counts), name
        assert index.ends == tuple(torch.tensor([len(x) for x in pairs.lists]).cumsum(0).tolist()), name
        listed = [x[order] for x, order in zip(pairs.lists, orders(index), strict=True)] if "pairs" in name else []
        for mine, wanted in zip(tensors_in(index.pairs()), listed):
            assert torch.equal(mine, wanted), f"order of {name}"


def orders(index: TokenIndex) -> list[torch.Tensor]:
    if index.order is None:
        return [torch.arange(n, device=index.device) for n in torch.tensor((0, *index.ends)).diff().tolist()]
    return [index.order[begin:end] for begin, end in zip((0, *index.ends), index.ends)]


@EXAMPLES
@given(pairs=pairs())
def test_what_an_index_gives_can_be_read_again(pairs: Pairs):
    lengths = pairs.queries, pairs.keys
    index = TokenIndex.from_pairs(pairs.nested(list(pairs.lists)), *lengths)
    again = [TokenIndex.from_pairs(index.pairs(), *lengths), TokenIndex.from_csr(*index.csr(), *lengths)]
    again.append(TokenIndex.from_jagged(index.jagged(), pairs.keys))
    if int(pairs.counts.max()) < 2:
        again.append(TokenIndex.from_mask(index.mask()))
        assert torch.equal(index.mask().view(pairs.counts.shape), pairs.counts > 0)
    for other in again:
        assert other.order is None
        assert (other.batch, other.heads) == (index.batch, index.heads)
        assert torch.equal(other.row_offsets, index.row_offsets) and torch.equal(other.columns, index.columns)


def test_lists_of_integers_are_tensors():
    index = TokenIndex.from_pairs([(1, 0), (0, 2)], 2, 3)
    assert index.pairs().tolist() == [[0, 2], [1, 0]] and (index.batch, index.heads) == (1, 1)
    of_heads = TokenIndex.from_pairs([[(1, 0)], [(0, 2), (1, 1)]], 2, 3)
    assert [x.tolist() for x in of_heads.pairs()] == [[[1, 0]], [[0, 2], [1, 1]]]
    assert torch.equal(TokenIndex.from_csr([2, 0], [1, 2], 2, 3).columns, index.columns)


def test_rows_of_a_jagged_tensor_may_be_shorter_than_its_offsets_say():
    values, offsets = torch.tensor([0, 9, 9, 2, 1, 9]), torch.tensor([0, 3, 6])
    lists = torch.nested.nested_tensor_from_jagged(values, offsets, lengths=torch.tensor([1, 2]))
    assert TokenIndex.from_jagged(lists, 3).pairs().tolist() == [[0, 0], [1, 1], [1, 2]]


@EXAMPLES
@given(pairs=pairs())
def test_by_key_is_the_transpose(device: str, pairs: Pairs):
    index = TokenIndex.from_pairs(pairs.nested([x.to(device) for x in pairs.lists]), pairs.queries, pairs.keys)
    offsets, rows, slots = (x.cpu() for x in index.by_key)
    index = index.to("cpu")
    line = index.row_offsets.diff().new_tensor(range(index.num_lists * index.queries))
    line = line.repeat_interleave(index.row_offsets.diff())
    of_slot = line[slots.long()]
    assert torch.equal(of_slot % index.queries, rows.long())
    column = torch.arange(index.num_lists * index.keys).repeat_interleave(offsets.diff())
    assert torch.equal(index.columns[slots.long()].long(), column % index.keys)
    assert torch.equal(of_slot // index.queries, column // index.keys)
    assert sorted(slots.tolist()) == list(range(index.num_pairs))
    assert ((rows.diff() >= 0) | (column.diff() > 0)).all()


@pytest.mark.parametrize("heads", [1, 2])
def test_blocks_and_back(heads: int):
    layout = torch.rand(heads, 3, 4, generator=seeded()) < 0.5
    blocks = BlockIndex.build(layout, 16)
    index = TokenIndex.from_blocks(blocks)
    assert index.num_pairs == int(layout.sum()) * 256
    assert torch.equal(index.blocks(16).layout(), blocks.layout())
    cropped = TokenIndex.from_blocks(blocks, 41, 50)
    full = layout.repeat_interleave(16, 1).repeat_interleave(16, 2)
    assert torch.equal(cropped.mask().view(heads, 41, 50), full[:, :41, :50])
    assert torch.equal(cropped.blocks(16).layout(), blocks.layout())


def test_blocks_cover_every_pair():
    index = TokenIndex.from_pairs(torch.tensor([[0, 17], [40, 3]]), 41, 20)
    live = index.blocks(16).layout()[0]
    assert live.nonzero().tolist() == [[0, 1], [2, 0]]


@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 3, 5)])
def test_sparse_csr_holds_the_scores_where_they_belong(shape: tuple[int, ...]):
    pairs = torch.tensor([[2, 1], [0, 3], [2, 0], [0, 0], [1, 2]])
    index = TokenIndex.from_pairs(pairs, 4, 4)
    scores = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    expected = torch.zeros(*shape[:-1], 4, 4)
    expected[..., pairs[:, 0], pairs[:, 1]] = scores
    found = index.sparse_csr(scores)
    assert found.layout == torch.sparse_csr
    assert torch.equal(found.to_dense(), expected)


def test_sparse_csr_passes_gradients_on():
    index = TokenIndex.from_pairs(torch.tensor([[2, 1], [0, 3], [2, 0]]), 3, 4)
    scores = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    weights = torch.arange(12.0).view(4, 3)
    (index.sparse_csr(scores) @ weights).sum().backward()
    assert torch.equal(scores.grad, weights.sum(1)[[1, 3, 0]])


def test_sparse_csr_of_each_head():
    lists = [torch.tensor([[1, 0]]), torch.tensor([[1, 1], [0, 0]])]
    index = TokenIndex.from_pairs(lists, 2, 2)
    first, second = index.sparse_csr([torch.tensor([5.0]), torch.tensor([6.0, 7.0])])
    assert first.to_dense().tolist() == [[0, 0], [5, 0]] and second.to_dense().tolist() == [[7, 0], [0, 6]]
    with pytest.raises(ValueError, match=r"Scores have shape \(2,\), and the list has 1 pairs"):
        index.sparse_csr([torch.zeros(2), torch.zeros(2)])


@pytest.mark.parametrize("form", ["mask", "sparse_csr"])
def test_forms_that_are_sets_refuse_a_pair_listed_twice(form: str):
    index = TokenIndex.from_pairs([torch.tensor([[0, 1]]), torch.tensor([[3, 1], [2, 2], [3, 1]])], 4, 3)
    arguments = [[torch.zeros(1), torch.zeros(3)]] if form == "sparse_csr" else []
    with pytest.raises(ValueError, match=r"The pair \(3, 1\) is listed twice, which a .* cannot say; list it once"):
        getattr(index, form)(*arguments)


LONG = torch.int64
REFUSED_PAIRS = [
    (torch.tensor([[0, 0], [1, 5], [9, 0]]), ValueError, r"indices\[1\] is \(1, 5\); key tokens are 0 to 4"),
    (torch.tensor([[0, 0], [4, 1]]), ValueError, r"indices\[1\] is \(4, 1\); query tokens are 0 to 3"),
    (torch.tensor([[0, -1]]), ValueError, r"indices\[0\] is \(0, -1\); key tokens are 0 to 4"),
    ([torch.zeros(1, 2, dtype=LONG), torch.tensor([[0, 7]])], ValueError, r"indices of list 1\[0\] is \(0, 7\)"),
    (torch.tensor([[[0, 0], [-1, -1]], [[-1, -1], [0, 0]]]), ValueError, r"of list 1\[0\] is \(-1, -1\);.* come last"),
    (torch.tensor([[[0, 0], [-1, 2]]]), ValueError, r"\[1\] is \(-1, 2\); query tokens are 0 to 3"),
    (torch.zeros(3, 3, dtype=LONG), ValueError, r"have shape \(3, 3\); pairs have the shape \(pairs, 2\)"),
    (torch.zeros(2, dtype=LONG), ValueError, "have 1 dimensions"),
    (torch.zeros(2, 2, 2, 2, 2, dtype=LONG), ValueError, "have 5 dimensions"),
    (torch.zeros(1, 2), TypeError, r"indices are torch.float32; they have to be int32 or int64, such as indices.long"),
    ([torch.zeros(1, 2, dtype=LONG), torch.zeros(1, 2)], TypeError, r"indices\[1\] are torch.float32"),
    (torch.zeros(1, 2, dtype=torch.bool), TypeError, "indices are a mask; give TokenIndex.from_mask of it"),
    (torch.eye(2).to_sparse_csr(), TypeError, r"torch.sparse_csr; give its col_indices\(\) and crow_indices\(\)"),
    ("pairs", TypeError, "indices are 'pairs'; they have to be a tensor, or a list of one for each head"),
    ([], TypeError, r"indices are \[\]"),
    ([torch.zeros(1, 2, dtype=LONG), [torch.zeros(1, 2, dtype=LONG)]], ValueError, "unlike or too deeply nested"),
    ([[[torch.zeros(1, 2, dtype=LONG)]]], ValueError, "unlike or too deeply nested"),
    *(
        (pairs, TypeError, "^indices are no lists of integers of equal lengths: ")
        for pairs in ([[0, 2**63]], [[0, 1], [1]], [[0, "1"]], [[0, None]])
    ),
]


@pytest.mark.parametrize(("pairs", "error", "sentence"), REFUSED_PAIRS)
def test_pairs_that_are_refused(device: str, pairs: object, error: type[Exception], sentence: str):
    with pytest.raises(error, match=sentence):
        TokenIndex.from_pairs(on_device(pairs, device), 4, 5)


@pytest.mark.parametrize(
    ("length", "error", "sentence"),
    [
        (-1, ValueError, r"is -1; it has to be 0 or more and below 2\*\*31"),
        (2**31, ValueError, r"is 2147483648; it has to be 0 or more and below 2\*\*31"),
        (10**30, ValueError, "is 10{30}; it has to be 0 or more and below"),
        (True, TypeError, "is True; it has to be an integer, the number of tokens"),
        (4.0, TypeError, "is 4.0; it has to be an integer"),
        (None, TypeError, "is None; it has to be an integer"),
    ],
)
def test_lengths_that_are_none(length: object, error: type[Exception], sentence: str):
    pairs, values, ends = torch.zeros(1, 2, dtype=LONG), torch.tensor([0]), torch.tensor([1])
    blocks = BlockIndex.build(torch.ones(1, 1, dtype=torch.bool), 8)
    for name, sizes in (("queries", (length, 1)), ("keys", (1, length))):
        with pytest.raises(error, match=f"^{name} {sentence}"):
            TokenIndex.from_pairs(pairs, *sizes)
        with pytest.raises(error, match=f"^{name} {sentence}"):
            TokenIndex.from_csr(values, ends, *sizes)
        if length is not None:
            with pytest.raises(error, match=f"^{name} {sentence}"):
                TokenIndex.from_blocks(blocks, *sizes)
    assert type(TokenIndex.from_pairs(pairs, np.int64(1), np.uint8(1)).queries) is int


def on_device(x: object, device: str) -> object:
    """Tensors, and lists of them, moved there."""
    return [on_device(part, device) for part in x] if isinstance(x, list) else x.to(device) if torch.is_tensor(x) else x


VALUES, ENDS = [0, 4, 1, 2], [1, 1, 3, 4]
REFUSED_CSR = [
    ([0, 4, 5, 2], ENDS, r"values\[2\], in row 2, is 5; key tokens are 0 to 4"),
    ([0, -1, 5, 2], ENDS, r"values\[1\], in row 2, is -1; key tokens are 0 to 4"),
    (VALUES, [1, 3, 2, 4], r"offsets\[2\] is 2 after 3; the ends of rows must not fall"),
    (VALUES, [0, 1, 3, 2, 4], r"offsets\[3\] is 2 after 3; the ends of rows must not fall"),
    (VALUES, [-1, 1, 3, 4], r"offsets\[0\] is -1 after 0; the ends"),
    (VALUES, [1, 1, 2, 4, 4], r"offsets\[0\] is 1; a CSR row pointer begins with 0"),
    (VALUES, [1, 1, 3, 3], "offsets end at 3 and values has 4 pairs"),
    (VALUES, [1, 1, 3, 5], "offsets end at 5 and values has 4 pairs"),
    (VALUES, [1, 4], r"offsets has 2 entries for 4 query tokens; it has to have the end of each row, 4, or a CSR .* 5"),
    ([VALUES, VALUES], [ENDS, [1, 1, 3, 5]], "offsets of list 1 end at 5 and values of list 1 has 4 pairs"),
    ([VALUES, VALUES], ENDS, "values are 2 lists and offsets 1; give offsets for each list of values"),
]


@pytest.mark.parametrize(("values", "offsets", "sentence"), REFUSED_CSR)
def test_values_and_offsets_that_are_refused(device: str, values: list, offsets: list, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        TokenIndex.from_csr(torch.tensor(values, device=device), torch.tensor(offsets, device=device), 4, 5)


@pytest.mark.parametrize(
    ("build", "error", "sentence"),
    [
        (
            lambda: TokenIndex.from_csr([torch.tensor(VALUES)] * 2, [torch.tensor([1, 1, 3, 3])] * 2, 4, 5),
            ValueError,
            "offsets of list 0 end at 3 and values of list 0 has 4 pairs",
        ),
        (lambda: TokenIndex.from_mask(torch.zeros(2, 2)), TypeError, "A mask is a bool tensor, got torch.float32"),
        (lambda: TokenIndex.from_mask(torch.zeros(2) > 0), ValueError, r"got \(2,\)"),
        (lambda: TokenIndex.from_jagged(torch.zeros(2, 2, dtype=LONG), 4), TypeError, "layout torch.jagged"),
        (lambda: TokenIndex.from_mask(torch.ones(2, 1, 9, 9) > 0).blocks(16), ValueError, "shared by all sequences"),
        *(
            (lambda block=block: TokenIndex.from_mask(torch.ones(4, 5) > 0).blocks(block), ValueError, "power of two")
            for block in (0, 7, -8, True, 2**40)
        ),
    ],
)
def test_what_does_not_fit_is_refused(build: Callable, error: type[Exception], sentence: str):
    with pytest.raises(error, match=sentence):
        build()


def test_lists_of_heads_and_of_sequences_are_told_apart():
    x, a, b = torch.randn(2, 2, 2, 4), torch.tensor([[0, 0]]), torch.tensor([[0, 1], [1, 1]])
    heads, sequences = sparse_matmul(x, x, [a, b]), sparse_matmul(x, x, [[a], [b]])
    assert [one.shape for one in heads] == [(2, 1), (2, 2)]
    torch.testing.assert_close(heads[1][:, 1], (x[:, 1, 1] * x[:, 1, 1]).sum(-1))
    torch.testing.assert_close(sequences[1][0][:, 1], (x[1, :, 1] * x[1, :, 1]).sum(-1))


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("document_layout", ["own", "row"])
def test_packed_documents_have_the_pairs_of_each_and_none_between(device: str, document_layout: str, heads: int):
    lengths = torch.tensor([5, 0, 1, 13, 7])
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    tokens = 15 if document_layout == "own" else 26
    pairs = random_pairs(seeded(heads), tokens, tokens + 2, 1, heads, repeated=True)
    index = TokenIndex.from_pairs(pairs.nested(list(pairs.lists)), tokens, tokens + 2).to(device)
    packed = index.packed(cu_seqlens.to(device, torch.int32), document_layout)
    assert (packed.queries, packed.keys, packed.batch, packed.heads) == (26, 26, 1, heads)
    expected = torch.zeros(heads, 26, 26, dtype=torch.int64)
    for first, end in pairwise(cu_seqlens.tolist()):
        those = slice(0, end - first) if document_layout == "own" else slice(first, end)
        expected[:, first:end, first:end] = pairs.counts[0][:, those, those]
    found = torch.stack([
        torch.bincount((one[:, 0] * 26 + one[:, 1]).cpu(), minlength=26 * 26).view(26, 26)
        for one in tensors_in(packed.pairs())
    ])  # fmt: skip
    assert expected.max() > 1 and torch.equal(found, expected)


def test_packing_takes_no_more_steps_for_more_documents():
    index = TokenIndex.from_mask(torch.rand(40, 40) < 0.3)

    def steps(documents: int) -> int:
        with CountedOperators() as counted:
            index.packed(torch.arange(documents + 1) * 3)
        return counted.number

    assert steps(300) == steps(2) > 5


@pytest.mark.parametrize(
    ("index", "arguments", "sentence"),
    [
        (TokenIndex.from_mask(torch.ones(4, 3) > 0), {}, "for 4 query and 3 key tokens, and the longest .* has 4"),
        (TokenIndex.from_mask(torch.ones(5, 6) > 0), {"document_layout": "row"}, "5 query .* and the row has 6"),
        (TokenIndex.from_mask(torch.ones(2, 1, 6, 6) > 0), {}, "of 2 sequences, and packed documents are one row"),
        (TokenIndex.from_mask(torch.ones(6, 6) > 0), {"document_layout": "both"}, "document_layout is 'both'; it has"),
    ],
)
def test_pairs_that_do_not_fit_packed_documents_are_refused(index: TokenIndex, arguments: dict, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        index.packed(torch.tensor([0, 2, 6]), **arguments)
