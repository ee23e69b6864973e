"""The operators of attention with a bias by distance; those that compiled graphs hold find their index by its text."""

from __future__ import annotations

import pytest
import torch
from helpers import random, seeded
from torch.utils.flop_counter import FlopCounterMode

from ds_sparse.index.master_layout import MasterLayout
from ds_sparse.ops.distance_operators import (
    DISTANCE_OPERATORS,
    distance_backward,
    distance_bias_backward,
    distance_forward,
)

OPERATORS = ("block_attention_forward", "block_attention_backward", "matmul_sdd")
TOKENS, BLOCK = 48, 16
MASTER = MasterLayout(torch.rand(2, 5, 5, generator=seeded()) < 0.5, BLOCK)


def calls(device: str, causal: bool, dropout_p: float) -> dict[str, tuple]:
    """Arguments of each operator but the index, which comes last in the graph and first in Python."""
    rng = seeded()
    query, grad = (random(rng, 2, 2, TOKENS, 16, dtype=torch.float32).to(device) for _ in range(2))
    key, value = (random(rng, 2, 1, TOKENS, 16, dtype=torch.float32).to(device) for _ in range(2))
    distances = random(rng, 2, 2 * TOKENS - 1, dtype=torch.float32).to(device)
    mask = (torch.rand(2, 1, 1, TOKENS, generator=rng) < 0.8).to(device)
    key_bias, seed = random(rng, 2, TOKENS, dtype=torch.float32).to(device), torch.tensor([5, 6], device=device)
    options, numbers = (distances, key_bias, mask, seed), (0.25, causal, dropout_p)
    forward = (query, key, value, *options, *numbers)
    output, lse, rows = distance_forward(MASTER.index(TOKENS, query.device, causal).reversed(), *forward)
    saved = (grad, None if causal else lse.nan_to_num(0, 0, 0), query, key, value, output, rows, *options)
    return {
        "layout_distance_forward": forward,
        "layout_distance_backward": (*saved, *numbers, False),
        "layout_distance_bias_backward": (*saved, *numbers),
    }


@pytest.mark.parametrize("operator", DISTANCE_OPERATORS)
@pytest.mark.parametrize(("causal", "dropout_p"), [(True, 0.1), (False, 0.0)])
def test_opcheck(device: str, operator: str, causal: bool, dropout_p: float):
    given = calls(device, causal, dropout_p)
    if operator == "distance_bias_backward":
        *tensors, scale, _, dropout_p = given["layout_distance_bias_backward"]
        index = MASTER.index(TOKENS, torch.device(device), causal).reversed()
        lists = (index.row_offsets, index.row_columns, index.row_lengths, index.layout_heads, BLOCK)
        call = (*tensors, scale, dropout_p, *lists)
    else:
        call = (*given[operator], MASTER.text)
    torch.library.opcheck(getattr(torch.ops.ds_sparse, operator).default, call)


@pytest.mark.parametrize(("causal", "dropout_p"), [(True, 0.1), (False, 0.0)])
def test_a_text_gives_what_its_index_gives(device: str, causal: bool, dropout_p: float):
    index = MASTER.index(TOKENS, torch.device(device), causal).reversed()
    steps = (distance_forward, distance_backward, distance_bias_backward)
    for step, call in zip(steps, calls(device, causal, dropout_p).values(), strict=True):
        torch.testing.assert_close(step(MASTER, *call), step(index, *call), rtol=0, atol=0)


@pytest.mark.parametrize("with_text", [True, False])
def test_flops_are_counted_as_those_of_rpe(with_text: bool):
    call = calls("cpu", False, 0.0)["layout_distance_bias_backward"]
    index = MASTER.index(TOKENS, torch.device("cpu")).reversed()
    with FlopCounterMode(display=False) as counter:
        distance_bias_backward(MASTER if with_text else index, *call)
    assert counter.get_total_flops() == 4 * 16 * 2 * index.live_blocks * BLOCK**2
