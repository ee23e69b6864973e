"""`Exchange` of several ranks in one process, between which what is sent is handed on."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_sparse.sequence import exchange as module
from ds_sparse.sequence.exchange import Exchange, Flight

IN_ORDER = ((0, 1), (2, 3), (4, 5))
DEALT = ((5, 0), (3,), (1, 2, 4))
COPIED = ((0,), (0,), (1,))
LENGTHS = (5, 1, 7)


@dataclass
class Rank:
    """A rank of three, each in a thread, whose letters lie in one box."""

    rank: int
    box: dict[tuple[int, int], torch.Tensor]
    meet: Barrier

    def exchange(self, sent, to, of, overlaps):
        for other, letter in enumerate(sent.split(to)):
            self.box[self.rank, other] = letter
        self.meet.wait()
        letters = [self.box[other, self.rank] for other in range(len(of))]
        self.meet.wait()
        assert [len(letter) for letter in letters] == of
        return Flight(sent, torch.cat(letters), None)


def on_ranks(call, *arguments):
    """What `call(rank, ...)` returns on each rank, with its own of each of the arguments."""
    box, meet = {}, Barrier(3, timeout=60)
    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(call, [Rank(rank, box, meet) for rank in range(3)], *arguments))


class Copies(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += any(name in str(function) for name in ("copy_", "clone", "cat"))
        return function(*args, **kwargs or {})


def at_heads(exchange, tensors):
    return exchange.heads_of(exchange.send_tokens(tensors), len(tensors[0]), tensors[0].shape[3])


def at_tokens(exchange, tensors, rank, numbers):
    """With sums where several ranks have a head."""
    rows, _, _, width = tensors[0].shape
    results = [tensors[0].new_zeros(rows, n, LENGTHS[rank], width) for n in numbers]
    exchange.write_tokens_of(exchange.send_heads(tensors), results, adds=len(numbers) > 1)
    return results


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
    heads = (deal, COPIED)
    parts = list(zip(*(whole.split(LENGTHS, 2) for whole in wholes), strict=True))
    found = on_ranks(lambda rank, those: at_heads(Exchange(heads, LENGTHS, rank), those), parts)
    for rank, own in enumerate(found):
        for x, whole, dealt in zip(own, wholes, heads, strict=True):
            torch.testing.assert_close(x, whole[:, list(dealt[rank])], rtol=0, atol=0)
    twice = torch.tensor([2, 1], dtype=dtype)[:, None, None]  # two ranks have the first
    both = on_ranks(lambda rank, own: at_tokens(Exchange(heads, LENGTHS, rank), own, rank.rank, (6, 2)), found)
    for back, (query, key) in zip(both, parts, strict=True):
        torch.testing.assert_close(back[0], query, rtol=0, atol=0)
        torch.testing.assert_close(back[1], key * twice, rtol=0, atol=0)
    alone = on_ranks(lambda rank, own: at_tokens(Exchange((deal,), LENGTHS, rank), own[:1], rank.rank, (6,)), found)
    for (back,), (query, _) in zip(alone, parts, strict=True):
        torch.testing.assert_close(back, query, rtol=0, atol=0)


class Nobody:
    """A rank that sends nothing."""

    rank = 0

    def exchange(self, sent, to, of, overlaps):
        return Flight(sent, sent, None)


SECONDS = ((1,), (3,), (5,))


@pytest.mark.parametrize("heads", [IN_ORDER, SECONDS])  # all of each rank's, and a chunk of them
def test_sequence_parallel_heads_in_order_are_a_copy_a_tensor_and_go_back_without_one(heads):
    part, *_ = torch.zeros(1, 6, 15, 8, dtype=torch.bfloat16).split(5, 2)
    even, own = (5, 5, 5), len(heads[0])
    with Copies() as copies:
        Exchange((heads, heads, heads), even, Nobody()).send_tokens((part, part, part))
    assert copies.count == 3
    exchange = Exchange((heads,), even, Nobody())
    with Copies() as copies:
        flight = exchange.send_heads((torch.zeros(1, 15, own, 8).transpose(1, 2),))
        exchange.write_tokens_of(flight, [torch.zeros(1, 6, 5, 8)], adds=False)
    assert copies.count == 1, "of what came"
