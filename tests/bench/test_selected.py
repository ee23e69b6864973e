import argparse

import pytest
import torch

from ds_sparse.bench import selected
from ds_sparse.bench.machine import BACKWARD, DIRECTIONS, FORWARD
from ds_sparse.bench.selected import CHOOSING, INDEX, OPERATION, OURS, Case

CPU = torch.device("cpu")
CASES = [
    Case("shared", 4, 2, 200, 16, 16, 4, "shared", True, "fp32"),
    Case("random", 6, 1, 160, 16, 32, 3, "random", True, "fp32"),
    Case("encoder", 3, 3, 160, 16, 16, 5, "shared", False, "fp32"),
]
of_each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def problem_of(case):
    return selected.Problem(case, CPU, argparse.Namespace())


@pytest.mark.parametrize("case", [*CASES, *(case.small() for case in selected.TABLE)], ids=lambda case: case.name)
def test_tokens_choose_their_own_block_first_and_none_twice(case):
    numbers = case.block_indices()
    own = torch.arange(case.seq_len) // case.block
    assert numbers.shape == (1, case.groups, case.seq_len, case.top) and numbers.dtype == torch.int32
    assert torch.equal(numbers, case.block_indices()) and (numbers[..., 0] == own).all()
    ordered = numbers.sort(-1).values
    assert ((ordered[..., 1:] > ordered[..., :-1]) | (ordered[..., :-1] == -1)).all()
    assert (numbers <= (own[:, None] if case.causal else own[-1])).all()
    assert (numbers >= 0).all() or case.causal
    # Others than its own tokens choose each block, but for the last one if nothing follows it.
    assert set(numbers[..., 1:].flatten().tolist()) - {-1} == set(range(own[-1] + (not case.causal)))


@pytest.mark.parametrize("block", [64, 128])
def test_neighbours_share_most_blocks_or_choose_anew(block):
    shared, random = (
        problem_of(Case("", 1, 1, 32768, 1, block, 16, choice, True, "fp32")).about.together
        for choice in ("shared", "random")
    )
    assert 22 <= shared <= 24.5 and random > 60


@of_each
def test_live_pairs_are_those_of_the_mask(case):
    problem = problem_of(case)
    mask = torch.zeros(case.groups, case.seq_len, case.seq_len, dtype=torch.bool)
    for group, tokens in enumerate(case.block_indices()[0].tolist()):
        for token, numbers in enumerate(tokens):
            for number in numbers:
                if number >= 0:
                    mask[group, token, number * case.block : (number + 1) * case.block] = True
    if case.causal:
        mask = mask.tril()
    assert torch.equal(problem.live(slice(None), slice(0, case.seq_len)), mask)
    about = problem.about
    assert about.pairs == int(mask.sum()) * case.heads // case.groups
    assert about.density == pytest.approx(mask.double().mean().item())
    pieces = list(problem.pieces(case.heads - 1, OPERATION.peers[OURS](problem)))
    assert torch.equal(torch.cat([live for _, _, live in pieces]), mask[-1])


@of_each
def test_all_are_verified_and_rates_count_live_pairs(case, measure):
    result = measure(OPERATION, case, [OURS, INDEX, CHOOSING, "sdpa", "sdpa-mask"])
    assert result.measured == [OURS, INDEX, CHOOSING, "sdpa", "sdpa-mask"]
    made = result.row(INDEX, FORWARD)
    assert made.tflops is None and made.to_ours == pytest.approx(
        made.milliseconds / result.row(OURS, FORWARD).milliseconds
    )
    assert result.row(INDEX, BACKWARD) is None and result.row(CHOOSING, BACKWARD) is None
    assert result.row(CHOOSING, FORWARD).tflops is None
    for way, flops in zip(DIRECTIONS, (4, 10, 14), strict=True):
        for row in (result.row(name, way) for name in (OURS, "sdpa")):
            assert row.tflops == pytest.approx(flops * case.head_dim * result.about.pairs / row.milliseconds / 1e9)


@pytest.mark.parametrize("head", [0, 1, 2, 3])
def test_a_mistake_in_any_head_of_a_group_is_found(measure, monkeypatch, head):
    right = OPERATION.peers["sdpa-mask"]

    def build(problem):
        call = right(problem).call
        return selected.Peer(lambda *inputs: call(*inputs).index_fill(1, torch.tensor([head]), 0))

    monkeypatch.setitem(OPERATION.peers, "sdpa-mask", build)
    result = measure(OPERATION, CASES[0], [OURS, "sdpa-mask"])
    assert result.measured == [OURS] and "output, batch 0, head" in result.rows[-1].reason


def test_an_index_of_other_blocks_is_found(measure, monkeypatch):
    right = selected.Selection.of_blocks
    monkeypatch.setattr(selected.Selection, "of_blocks", lambda numbers, *more: right(numbers.flip(1), *more))
    result = measure(OPERATION, CASES[0], [INDEX, "sdpa"])
    assert result.measured == ["sdpa"] and "other blocks" in result.rows[0].reason


def test_a_mask_that_takes_too_much_memory_is_named(measure, monkeypatch):
    monkeypatch.setattr(selected, "MEMORY", 1000)
    assert measure(OPERATION, CASES[0], ["sdpa-mask"]).rows[0].reason == "its mask takes 0 GiB"


def test_a_cpu_has_cases_of_a_quarter_of_the_blocks_at_most():
    small = {case.small().name: case.small() for case in selected.TABLE}
    names = "msa-2k", "msa-random-2k", "nsa-2k", "nsa-random-2k", "encoder-2k", "moba-2k", "moba-64-2k"
    sizes = [(4, 1, 128, 4)] * 2 + [(4, 1, 64, 8)] * 2 + [(4, 4, 64, 8)] + [(4, 4, 128, 3)] * 2
    assert tuple(small) == names
    assert [(case.heads, case.groups, case.block, case.top) for case in small.values()] == sizes
    assert all(case.seq_len == 2048 for case in small.values())
