"""The operators that compiled graphs hold: they find the index of a layout by its text."""

import pytest
import torch
from helpers import random, seeded

from ds_sparse.index.master_layout import MasterLayout
from ds_sparse.ops.attention_operators import (
    LAYOUT_OPERATORS,
    attention_backward,
    attention_bias_backward,
    attention_forward,
)

OPERATORS = ("block_attention_forward", "block_attention_backward", "block_attention_bias_backward")
TOKENS, BLOCK = 41, 16
MASTER = MasterLayout(torch.rand(2, 5, 5, generator=seeded()) < 0.5, BLOCK)


def calls(device: str, dtype: torch.dtype, causal: bool, dropout_p: float) -> dict[str, tuple]:
    """Arguments of each operator but the index, which comes last in the graph and first in Python."""
    rng = seeded()
    query, grad = (random(rng, 2, 2, TOKENS, 16, dtype=dtype).to(device) for _ in range(2))
    key, value = (random(rng, 2, 1, TOKENS, 16, dtype=dtype).to(device) for _ in range(2))
    rpe = random(rng, 1, 2, TOKENS, TOKENS, dtype=dtype).to(device)
    mask = (torch.rand(2, 1, 1, TOKENS, generator=rng) < 0.8).to(device)
    key_bias, seed = random(rng, 2, TOKENS, dtype=torch.float32).to(device), torch.tensor([5, 6], device=device)
    options, numbers = (rpe, key_bias, mask, seed), (0.25, causal, dropout_p)
    forward = (query, key, value, *options, *numbers)
    output, lse, rows = attention_forward(MASTER.index(TOKENS, query.device, causal), *forward)
    saved = (grad, None if causal else lse.nan_to_num(0, 0, 0), query, key, value, output, rows, *options)
    return {
        "layout_attention_forward": forward,
        "layout_attention_backward": (*saved, *numbers, False),
        "layout_attention_bias_backward": (*saved, *numbers),
    }


@pytest.mark.parametrize("operator", LAYOUT_OPERATORS)
@pytest.mark.parametrize(("causal", "dropout_p"), [(True, 0.1), (False, 0.0)])
def test_opcheck(device: str, operator: str, causal: bool, dropout_p: float):
    call = calls(device, torch.float32, causal, dropout_p)[operator]
    torch.library.opcheck(getattr(torch.ops.ds_sparse, operator).default, (*call, MASTER.text))


@pytest.mark.parametrize(("causal", "dropout_p"), [(True, 0.1), (False, 0.0)])
def test_a_text_gives_what_its_index_gives(device: str, causal: bool, dropout_p: float):
    index = MASTER.index(TOKENS, torch.device(device), causal)
    steps = (attention_forward, attention_backward, attention_bias_backward)
    for step, call in zip(steps, calls(device, torch.float32, causal, dropout_p).values(), strict=True):
        results, expected = step(MASTER, *call), step(index, *call)
        torch.testing.assert_close(results, expected, rtol=0, atol=0)
