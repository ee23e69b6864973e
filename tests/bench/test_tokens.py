from argparse import Namespace
from dataclasses import replace

import pytest
import torch

from ds_sparse.bench import tokens
from ds_sparse.bench.machine import FORWARD, TRAIN
from ds_sparse.bench.reasons import Unsupported
from ds_sparse.bench.runs import Result, Row

CPU = torch.device("cpu")
CASE = tokens.Case(seq_len=96, d_model=32, heads=2, sparsity=0.9)


def problem(case=CASE):
    return tokens.Problem(case, CPU, Namespace(profile=0))


def test_the_top_operators_of_a_step_are_named(measure):
    expected = {
        tokens.OURS: "ds_sparse::token_attention_backward x1",
        "gather": "aten::index_add_",
        "sparse_matmul": "ds_sparse::token_matmul_sdd x1",
        "sparse_matmul_vo": "ds_sparse::token_matmul_sdd x1",
    }
    result = measure(tokens.OPERATION, CASE, [*expected, tokens.TORCH_SPARSE], profile=99)
    named = {row.name: row.operators for row in result.rows if row.direction == FORWARD}
    for name, operator in expected.items():
        assert any(operator in line for line in named[name])
    for operators in named.values():
        shares = [int(line.partition("%")[0]) for line in operators]
        assert shares == sorted(shares, reverse=True) and sum(shares) <= 110


def test_a_step_that_takes_too_much_memory_is_named(measure, monkeypatch):
    """Several sequences take theirs together."""
    for name, numbers in (("gather", 8 * 16 * problem().index.num_pairs), (tokens.DENSE, 6 * 96**2)):
        monkeypatch.setattr(tokens, "MEMORY", 2 * CASE.heads * numbers * 4)
        tokens.OPERATION.peers[name](problem())
        with pytest.raises(Unsupported, match="takes"):
            tokens.OPERATION.peers[name](problem(replace(CASE, batch=3)))
    monkeypatch.setattr(tokens, "MEMORY", 1 << 19)
    result = measure(tokens.OPERATION, CASE, ["gather", tokens.OURS])
    assert result.measured == [tokens.OURS] and result.rows[0].reason == "takes 0.0 GiB"


def test_floors_are_rows_of_all_pairs_from_l2(monkeypatch):
    monkeypatch.setattr(tokens, "l2_read_rate", lambda device: 1e9)
    made = problem(replace(CASE, batch=3))
    made.device = torch.device("cuda")
    rows = [Row(tokens.OURS, way) for way in (FORWARD, TRAIN)]
    forward, both = (tokens.numbers_of(made, None, row, {})["l2_floor_ms"] for row in rows)
    assert forward == pytest.approx(3 * 2 * made.index.num_pairs * 2 * 16 * 4 / 1e9)
    assert both == pytest.approx(3 * forward)


@pytest.mark.parametrize("pattern", list(tokens.PATTERNS))
@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_masks_have_the_sparsity_they_can_have(pattern, sparsity):
    mask = tokens.PATTERNS[pattern](1024, 1 - sparsity)
    assert mask.shape == (1024, 1024) and mask.dtype == torch.bool
    assert mask.double().mean().item() == pytest.approx(1 - sparsity, abs=0.1)
    if pattern != "random":
        assert mask[0].all() and mask[:, 0].all() and mask.diagonal().all()


def test_a_reason_that_is_not_that_of_all_cases_names_its_own():
    def result(sparsity, reasons):
        rows = [Row(tokens.OURS, FORWARD, 1.0), *(Row(name, FORWARD, reason=why) for name, why in reasons.items())]
        return Result(tokens.Case(1024, 64, 1, sparsity), tokens.Pairs(1000), rows)

    made = [result(0.5, {"gather": "takes 9.0 GiB", "flex": "forward only"}), result(0.9, {"flex": "forward only"})]
    assert list(tokens.lines(made))[-2:] == ["50% gather: takes 9.0 GiB", "flex: forward only"]
