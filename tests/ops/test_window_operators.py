"""The operators that compiled graphs hold of windows: they find the index of the numbers."""

import pytest
import torch
from helpers import random, seeded

from ds_sparse.index.lookup import index_of_window
from ds_sparse.index.window_sizes import WindowNumbers
from ds_sparse.ops.window_operators import (
    NUMBERS_OPERATORS,
    order_of,
    window_attention_backward,
    window_attention_forward,
)

OPERATORS = ("window_attention_forward", "window_attention_backward")
TOKENS = 41
IN_ORDER = WindowNumbers((5,), True, (0, 1), (1,))
REORDERED = WindowNumbers((5, 2), False, (7,), (2,))


def calls(numbers: WindowNumbers, device: str) -> dict[str, tuple]:
    """Arguments of each operator but the numbers."""
    rng = seeded()
    query, key, value, grad = (random(rng, 2, 2, TOKENS, 16, dtype=torch.float32).to(device) for _ in range(4))
    key_bias = random(rng, 2, 1, 1, TOKENS, dtype=torch.float32).to(device)
    forward = (query, key, value, key_bias, 0.25)
    index = index_of_window(TOKENS, numbers, query.device)
    output, _, rows = window_attention_forward(index, *forward)
    backward = (grad, query, key, value, output, rows, key_bias, 0.25, True)
    return dict(zip(NUMBERS_OPERATORS, (forward, backward), strict=True))


@pytest.mark.parametrize("operator", NUMBERS_OPERATORS)
@pytest.mark.parametrize("numbers", [IN_ORDER, REORDERED], ids=["in-order", "reordered"])
def test_opcheck(device: str, operator: str, numbers: WindowNumbers):
    call = calls(numbers, device)[operator]
    torch.library.opcheck(getattr(torch.ops.ds_sparse, operator).default, (*call, *map_lists(numbers)))


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_opcheck_of_the_order(device: str, tokens: int):
    numbers = WindowNumbers((5,), False, (), (2,))
    call = (tokens, *map_lists(numbers), torch.device(device))
    torch.library.opcheck(torch.ops.ds_sparse.window_order.default, call)


@pytest.mark.parametrize("numbers", [IN_ORDER, REORDERED], ids=["in-order", "reordered"])
def test_numbers_give_what_their_index_gives(device: str, numbers: WindowNumbers):
    index = index_of_window(TOKENS, numbers, torch.device(device))
    steps = (window_attention_forward, window_attention_backward)
    for step, call in zip(steps, calls(numbers, device).values(), strict=True):
        torch.testing.assert_close(step(numbers, *call), step(index, *call), rtol=0, atol=0)
    orders = (order_of(x, TOKENS, torch.device(device)) for x in (numbers, index))
    torch.testing.assert_close(*orders, rtol=0, atol=0)


def map_lists(numbers: WindowNumbers) -> tuple:
    return tuple(list(x) if isinstance(x, tuple) else x for x in numbers)
