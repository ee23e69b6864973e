"""`Exchange` of several ranks in one process, between which what is sent is handed on."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier

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
    """A rank of three, each in a thread, whose letters lie in one box."""

    rank: int
    box: dict[tuple[int, int], torch.Tensor]
    meet: Barrier

    def exchange(self, sent, to, of):
        for other, letter in enumerate(sent.split(to)):
            self.box[self.rank, other] = letter
        self.meet.wait()
        letters = [self.box[other, self.rank] for other in range(len(of))]
        self.meet.wait()
        assert [len(letter) for letter in letters] == of
        return torch.cat(letters)


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
    found = on_ranks(lambda rank, those: Exchange(heads, LENGTHS, rank).to_heads(those), parts)
    for rank, own in enumerate(found):
        for x, whole, dealt in zip(own, wholes, heads, strict=True):
            torch.testing.assert_close(x, whole[:, list(dealt[rank])], rtol=0, atol=0)
    twice = torch.tensor([2, 1], dtype=dtype)[:, None, None]  # two ranks have the first
    for back, (query, key) in zip(
        on_ranks(lambda rank, own: Exchange(heads, LENGTHS, rank).to_tokens(own), found), parts, strict=True
    ):
        torch.testing.assert_close(back[0].transpose(1, 2), query, rtol=0, atol=0)
        torch.testing.assert_close(back[1].transpose(1, 2), key * twice, rtol=0, atol=0)
    alone = on_ranks(lambda rank, own: Exchange((deal,), LENGTHS, rank).to_tokens(own[:1]), found)
    for (back,), (query, _) in zip(alone, parts, strict=True):
        torch.testing.assert_close(back.transpose(1, 2), query, rtol=0, atol=0)


class Nobody:
    """A rank that sends nothing."""

    rank = 0

    def exchange(self, sent, to, of):
        return sent


def test_sequence_parallel_heads_in_order_are_a_copy_a_tensor_and_go_back_without_one():
    part, *_ = torch.zeros(1, 6, 15, 8, dtype=torch.bfloat16).split(5, 2)
    even = (5, 5, 5)
    with Copies() as copies:
        Exchange((IN_ORDER, IN_ORDER, IN_ORDER), even, Nobody()).to_heads((part, part, part))
    assert copies.count == 3
    with Copies() as copies:
        Exchange((IN_ORDER,), even, Nobody()).to_tokens((torch.zeros(1, 15, 2, 8).transpose(1, 2),))
    assert copies.count == 1, "of what came"
