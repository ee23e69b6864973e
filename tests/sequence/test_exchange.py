"""`Exchange` of several ranks in one process, between which what is sent is handed on."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_sparse.sequence import exchange as module
from ds_sparse.sequence.exchange import Exchange

IN_ORDER = ((0, 1), (2, 3), (4, 5))
DEALT = ((5, 0), (3,), (1, 2, 4))
COPIED = ((0,), (0,), (1,))
LENGTHS = (5, 1, 7)


@dataclass
class Rank:
    """A rank of some, whose letters lie in one box."""

    rank: int
    box: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def exchange(self, sent, to, of):
        for other, letter in enumerate(sent.split(to)):
            self.box[self.rank, other] = letter

        def land():
            letters = [self.box[other, self.rank] for other in range(len(of))]
            assert [len(letter) for letter in letters] == of
            return torch.cat(letters)

        return SimpleNamespace(land=land)


def ranks():
    box = {}
    return [Rank(rank, box) for rank in range(3)]


class Copies(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += any(name in str(function) for name in ("copy_", "clone", "cat"))
        return function(*args, **kwargs or {})


def whole_of(heads, dtype, width, rows=2):
    return torch.arange(rows * heads * sum(LENGTHS) * width).view(rows, heads, -1, width).to(dtype)


@pytest.mark.parametrize("width, lines_from", [(8, {}), (8, {"cpu": 0}), (3, {"cpu": 0})])  # 3 are no 16 bytes
@pytest.mark.parametrize("dtype", [torch.int16, torch.float32])
@pytest.mark.parametrize("deal", [IN_ORDER, DEALT])
def test_sequence_parallel_each_rank_gets_all_tokens_of_its_heads_and_its_own_back(
    deal, dtype, width, lines_from, monkeypatch
):
    monkeypatch.setattr(module, "LINES_FROM", lines_from)
    wholes = [whole_of(6, dtype, width), whole_of(2, dtype, width)]
    heads, all_ranks = (deal, COPIED), ranks()
    exchanges = [Exchange(heads, LENGTHS, rank) for rank in all_ranks]
    parts = list(zip(*(whole.split(LENGTHS, 2) for whole in wholes), strict=True))
    flights = [exchange.send_tokens(those) for exchange, those in zip(exchanges, parts, strict=True)]
    found = [exchange.heads_of(flight, 2, width) for exchange, flight in zip(exchanges, flights, strict=True)]
    for rank, own in enumerate(found):
        for x, whole, dealt in zip(own, wholes, heads, strict=True):
            torch.testing.assert_close(x, whole[:, list(dealt[rank])], rtol=0, atol=0)
    flights = [exchange.send_heads(own) for exchange, own in zip(exchanges, found, strict=True)]
    for exchange, flight, (query, key) in zip(exchanges, flights, parts, strict=True):
        results = [torch.zeros_like(query), torch.zeros_like(key)]
        exchange.write_tokens_of(flight, results, adds=True)
        torch.testing.assert_close(results[0], query, rtol=0, atol=0)
        twice = torch.tensor([2, 1], dtype=dtype)[:, None, None]  # two ranks have the first
        torch.testing.assert_close(results[1], key * twice, rtol=0, atol=0)
        exchange.write_tokens_of(flight, results, adds=False)
        torch.testing.assert_close(results[0], query, rtol=0, atol=0)


def test_sequence_parallel_heads_in_order_are_a_copy_a_tensor_and_go_back_without_one():
    (own, *_), (part, *_) = ranks(), whole_of(6, torch.bfloat16, 8, rows=1).split(LENGTHS, 2)
    exchange = Exchange((IN_ORDER, IN_ORDER, IN_ORDER), LENGTHS, own)
    with Copies() as copies:
        exchange.send_tokens((part, part, part))
    assert copies.count == 3
    alone, output = Exchange((IN_ORDER,), LENGTHS, own), torch.zeros(1, sum(LENGTHS), 2, 8)
    with Copies() as copies:
        alone.send_heads((output.transpose(1, 2),))
    assert copies.count == 0
