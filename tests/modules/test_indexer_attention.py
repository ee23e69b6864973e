"""IndexerAttention and its loss against their statement, and the ways on which the loss reaches training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import random, seeded
from torch import Tensor

from ds_sparse import IndexerAttention, indexer_loss, reference, select_blocks

DEPTH, INDEX_DIM = 8, 5


def module(heads: int = 4, key_heads: int = 2, dtype: torch.dtype = torch.float64, **more: Any) -> IndexerAttention:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"index_dim": INDEX_DIM, "block": 16, "k": 2} | more
    return IndexerAttention(heads, key_heads, DEPTH, **sizes).to(dtype)


def random_leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [random(seeded(i), *shape, dtype=dtype).requires_grad_() for i, shape in enumerate(shapes)]


def operands(tokens: int = 50, heads: int = 4, key_heads: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return random_leaves(*((2, n, tokens, DEPTH) for n in (heads, key_heads, key_heads)), dtype=dtype)


def index_operands(tokens: int, index_heads: int, key_heads: int) -> dict[str, Tensor]:
    shapes = ((2, n, tokens, INDEX_DIM) for n in (index_heads, key_heads))
    return dict(zip(("index_query", "index_key"), random_leaves(*shapes), strict=True))


def padded(tokens: int) -> Tensor:
    """The end of one sequence and the start of the other are padding."""
    keep = torch.ones(2, tokens, dtype=torch.bool)
    keep[0, -(tokens // 3) :] = keep[1, : tokens // 4 + 1] = False
    return keep


@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize(
    "heads",  # of query, key, and the indexer's query and key
    [(1, 1, 1, 1), (4, 2, 2, 2), (4, 2, 2, 1), (4, 2, 1, 1), (4, 2, 4, 4), (4, 2, 4, 1), (3, 3, 3, 3), (6, 1, 6, 1)],
    ids=str,
)
def test_output_and_all_gradients_are_those_of_the_statement(heads: tuple[int, ...], causal: bool, padding: bool):
    given, index = operands(50, *heads[:2]), index_operands(50, *heads[2:])
    keep = padded(50) if padding else None
    made = module(*heads[:2], index_dim=None, index_heads=heads[2], loss_weight=None)
    output = made(*given, **index, causal=causal, key_padding_mask=keep)
    expected, loss = reference.msa(*given, *index.values(), 16, 2, causal=causal, key_padding_mask=keep)
    torch.testing.assert_close(output, expected)
    weight, leaves = random(seeded(9), *output.shape), [*given, *index.values()]
    ours, theirs = (
        torch.autograd.grad((out * weight).sum() + 3 * loss, leaves)
        for out, loss in ((output, made.loss), (expected, loss))
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17])
def test_short_sequences_and_scales(tokens: int):
    given, index = operands(tokens), index_operands(tokens, 2, 1)
    chosen = select_blocks(*index.values(), 16, 2, score="max", causal=True, local=1)
    found = indexer_loss(*given[:2], *index.values(), chosen, 16, causal=True, scale=0.3, index_scale=0.7)
    _, loss = reference.msa(*given, *index.values(), 16, 2, scale=0.3, index_scale=0.7)
    ours, theirs = (torch.autograd.grad(x, list(index.values())) for x in (found, loss))
    torch.testing.assert_close(ours, theirs)


def test_the_loss_is_the_divergence_and_the_entropy_of_attention():
    """Of one block, which all tokens see, so that the teacher is dense attention."""
    given, index = operands(16), index_operands(16, 2, 2)
    chosen = torch.zeros(1, 1, 16, 1, dtype=torch.int32).expand(2, 2, 16, 1)
    found = indexer_loss(*given[:2], *index.values(), chosen, 16)
    keys = given[1].repeat_interleave(2, 1)
    teacher = (given[0] @ keys.mT * DEPTH**-0.5).softmax(-1).unflatten(1, (2, 2)).mean(2)
    student = (index["index_query"] @ index["index_key"].mT * INDEX_DIM**-0.5).log_softmax(-1)
    torch.testing.assert_close(found, -(teacher * student).sum(-1).mean())


def trained(made: IndexerAttention, call: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    """Output, the indexer's loss, and all gradients after a backward pass from the output alone."""
    for x in (*given, *made.parameters()):
        x.grad = None
    output = call(*given)
    output.square().sum().backward()
    return [output.detach(), made.loss.clone(), *(x.grad.clone() for x in (*given, *made.parameters()))]


@pytest.mark.parametrize("weight", [1.0, 0.25])
@pytest.mark.parametrize("index_heads", [1, 2, 4])
def test_the_loss_has_its_gradient_without_anybody_adding_it(index_heads: int, weight: float):
    """And nothing but the indexer's parameters gets it."""
    made, given = module(index_heads=index_heads, loss_weight=weight), operands()
    _, loss, *found = trained(made, made, given)
    other = module(index_heads=index_heads, loss_weight=None)
    output = other(*given)
    of_operands = torch.autograd.grad(output.square().sum(), given, retain_graph=True)
    of_indexer = torch.autograd.grad(weight * other.loss, list(other.parameters()))
    torch.testing.assert_close((loss, *found), (other.loss.detach(), *of_operands, *of_indexer))
    assert all(x.any() for x in of_indexer)


def test_a_frozen_model_teaches_too():
    made, given = module(), [x.detach() for x in operands()]
    made(*given).sum().backward()
    assert made.query_weight.grad.any() and made.key_weight.grad.any()


def test_there_is_no_loss_in_evaluation_nor_without_gradients_nor_while_decoding():
    made, given = module(), operands()
    expected = made(*given)
    made.loss.fill_(7)
    torch.testing.assert_close(copy.deepcopy(made).eval()(*given), expected)
    with torch.no_grad():
        torch.testing.assert_close(made(*given), expected)
    decoded = made(given[0][:, :, 40:], *given[1:], query_offset=40)
    torch.testing.assert_close(decoded, expected[:, :, 40:])
    decoded = made(given[0][:, :, 40:], *given[1:], query_offset=torch.tensor([40, 40]))
    torch.testing.assert_close(decoded, expected[:, :, 40:])
    assert made.loss == 7


def test_packed_documents_are_separate_calls():
    made, borders = module(), [0, 7, 40, 60]
    given = [x[:1] for x in operands(60)]
    output = made(*given, cu_seqlens=torch.tensor(borders))
    loss, total = made.loss.clone(), torch.zeros((), dtype=torch.float64)
    outputs = []
    for begin, end in pairwise(borders):
        outputs.append(made(*(x[:, :, begin:end] for x in given)))
        total += made.loss * (end - begin) / 60
    torch.testing.assert_close(output, torch.cat(outputs, 2))
    torch.testing.assert_close(loss, total)


def test_a_compiled_graph_gives_the_loss_to_who_adds_it():
    torch._dynamo.reset()
    made, given = module(dtype=torch.float32, loss_weight=None), operands(dtype=torch.float32)

    def step(*x: Tensor) -> Tensor:
        return made(*x).square().sum() + made.loss

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    leaves = [*given, *made.parameters()]
    found, expected = (torch.autograd.grad(f(*given), leaves) for f in (compiled, step))
    torch.testing.assert_close(found, expected)


def test_it_begins_as_the_product_of_queries_and_keys():
    """On the mean: with many numbers the random projection is nearly exact."""
    torch.manual_seed(0)
    made = IndexerAttention(4, 2, 256, index_dim=256, block=16, k=2)
    query, key = torch.randn(1, 4, 64, 256), torch.randn(1, 2, 64, 256)
    key = key + query.unflatten(1, (2, 2)).mean(2)
    index_query, index_key = made._index(query, key)
    scores = index_query @ index_key.mT * 256**-0.5
    expected = query.unflatten(1, (2, 2)).mean(2) @ key.mT * 256**-0.5
    assert torch.corrcoef(torch.stack([scores.flatten(), expected.flatten()]))[0, 1] > 0.8
    assert 0.8 < (scores * expected).sum() / expected.square().sum() < 1.25


def test_the_indexer_learns_what_attention_sees():
    """While an optimizer has the indexer's parameters alone, whose loss nobody adds."""
    torch.manual_seed(0)
    made = IndexerAttention(4, 2, 16, index_dim=8, block=16, k=4)
    query, key, value = (torch.randn(2, heads, 64, 16) for heads in (4, 2, 2))
    query = 2 * query
    optimizer, losses = torch.optim.Adam(made.parameters(), 0.01), []
    for _ in range(40):
        optimizer.zero_grad()
        made(query, key, value).sum().backward()
        optimizer.step()
        losses.append(made.loss.item())
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"num_key_heads": 3}, "num_heads is 4 and num_key_heads 3; the first has to be a multiple of the second"),
        ({"index_heads": 3}, r"index_heads is 3; it has to be num_key_heads \(2\), num_heads \(4\) or 1"),
        (
            {"index_dim": 9},
            "The indexer's heads have 9 numbers, their index_dim, and those of attention 8; give 1 to 8",
        ),
        ({"block": 8}, "block is 8; it has to be one of 16, 32"),
        ({"k": 0}, "k is 0; it has to be an integer of 1 or more"),
        ({"k": "3"}, "k is '3'; it has to be an integer of 1 or more"),
        ({"first": -1}, "first is -1; it has to be an integer of 0 or more"),
        ({"first": 2, "k": 2}, "k is 2, and first=2 and local=1 choose 3 blocks; give k=3 or more"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit(more: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        IndexerAttention(**{"num_heads": 4, "num_key_heads": 2, "head_dim": DEPTH, "index_dim": 4} | more)


def test_calls_that_do_not_fit():
    made, (query, key, value) = module(), operands(20)
    index = index_operands(20, 2, 1)
    with pytest.raises(ValueError, match="One of index_query and index_key is given; give both, or neither"):
        made(query, key, value, index_query=index["index_query"])
    with pytest.raises(ValueError, match="index_dim is None, so there are no projections; give index_query and"):
        module(index_dim=None)(query, key, value)
    with pytest.raises(ValueError, match=r"the module was built for query \(batch, 4, tokens, 8\)"):
        made(query, key[..., :4], value)
    wide = {name: torch.cat([x, x], -1) for name, x in index.items()}
    with pytest.raises(
        ValueError, match="The indexer's heads have 10 numbers, their index_dim, and those of attention 8"
    ):
        made(query, key, value, **wide)


def test_a_copy_after_a_step_has_the_loss_without_its_graph():
    """Whose loss has a gradient, as without loss_weight."""
    attention = IndexerAttention(4, 2, 16, index_dim=8, block=16, k=2, loss_weight=None)
    attention(*(torch.randn(1, heads, 40, 16, requires_grad=True) for heads in (4, 2, 2)))
    assert attention.loss.requires_grad
    copied = copy.deepcopy(attention)
    assert torch.equal(copied.loss, attention.loss) and not copied.loss.requires_grad


@pytest.mark.parametrize(
    "given", [{"index_dim": 17}, {"index_dim": 4.0}, {"index_heads": "2"}, {"loss_weight": 0.0}, {"loss_weight": "1"}]
)
def test_numbers_that_do_not_fit_have_a_sentence(given):
    with pytest.raises(
        ValueError, match="; (it has to be a number above 0|give 1 to 16|it has to be an integer of 1 or more)"
    ):
        IndexerAttention(4, 2, 16, **given)
