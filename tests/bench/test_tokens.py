from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from ds_sparse import TokenIndex
from ds_sparse.bench import tokens
from ds_sparse.bench.machine import FORWARD, TRAIN
from ds_sparse.bench.reasons import Unsupported
from ds_sparse.cli import main

CPU = torch.device("cpu")
CASE = tokens.Case(seq_len=96, d_model=32, heads=2, sparsity=0.9)
STEPS = [name for name in tokens.STEPS if name != "C++ loop"]  # a clone adds it


@pytest.fixture(scope="module")
def result() -> tokens.Result:
    return tokens.run_case(CASE, list(STEPS), CPU, repeats=3, seconds=60, top=99)


def test_every_step_is_right_and_timed_in_both_directions(result: tokens.Result):
    times = {(row.step, row.direction): row.milliseconds for row in result.rows if not row.reason}
    missing = {(tokens.FLEX, way) for way in tokens.DIRECTIONS}
    assert times.keys() == {(name, way) for name in STEPS for way in tokens.DIRECTIONS} - missing
    for row in result.rows:
        if not row.reason:
            assert row.rounds == 3
            assert row.to_dense == pytest.approx(row.milliseconds / times[tokens.DENSE, row.direction])
            assert row.to_ours == pytest.approx(row.milliseconds / times[tokens.OURS, row.direction])


def test_the_top_operators_of_a_step_are_named(result: tokens.Result):
    expected = {
        tokens.OURS: "ds_sparse::token_attention_backward x1",
        "gather": "aten::index_add_",
        "sparse_matmul": "ds_sparse::token_matmul_sdd x1",
        "sparse_matmul_vo": "ds_sparse::token_matmul_sdd x1",
    }
    for name, operator in expected.items():
        assert any(operator in line for line in result.operators[name])
    for operators in result.operators.values():
        shares = [int(line.partition("%")[0]) for line in operators]
        assert shares == sorted(shares, reverse=True) and sum(shares) <= 110


@pytest.mark.parametrize("name", [tokens.OURS, "gather", tokens.TORCH_SPARSE])
@pytest.mark.parametrize("backward", [False, True])
def test_a_wrong_step_is_not_timed_but_named(monkeypatch, name: str, backward: bool):
    class Spoiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * (1 if backward else 1.001)

        @staticmethod
        def backward(ctx, grad):
            return grad * 1.001

    step = tokens.STEPS[name]
    spoiled = replace(step, build=lambda problem: lambda *x: Spoiled.apply(step.build(problem)(*x)))
    monkeypatch.setitem(tokens.STEPS, name, spoiled)
    rows = tokens.run_case(CASE, [name, tokens.SDPA], CPU, repeats=2, seconds=60).rows
    reasons = {row.reason for row in rows if row.step == name}
    assert len(reasons) == 1 and f"{'gradient of query' if backward else 'output'} has an RMS error" in reasons.pop()
    assert all(row.milliseconds for row in rows if row.step == tokens.SDPA)


def test_a_step_that_takes_too_much_memory_is_named(monkeypatch):
    monkeypatch.setattr(tokens, "MEMORY", 1 << 19)
    rows = tokens.run_case(CASE, ["gather", tokens.OURS], CPU, repeats=2, seconds=60).rows
    assert {row.reason for row in rows if row.step == "gather"} == {"takes 0.0 GiB"}
    assert all(row.milliseconds for row in rows if row.step == tokens.OURS)


def test_steps_take_several_sequences():
    case = replace(CASE, batch=3)
    rows = tokens.run_case(case, list(STEPS), CPU, repeats=2, seconds=60).rows
    wrong = {row.step: row.reason for row in rows if row.reason and row.step != tokens.FLEX}
    assert not wrong


def test_what_several_sequences_take_is_theirs_together(monkeypatch):
    index = TokenIndex.from_mask(CASE.mask())
    one, three = (tokens.Problem(replace(CASE, batch=batch), CASE.mask(), index) for batch in (1, 3))
    for name in ("gather", tokens.DENSE):
        step = tokens.STEPS[name]
        numbers = step.numbers(CASE.head_dim) * index.num_pairs + step.numbers_of_all * CASE.seq_len**2
        monkeypatch.setattr(tokens, "MEMORY", 2 * CASE.heads * numbers * 4)
        tokens.refuse_too_large(step, one)
        with pytest.raises(Unsupported, match="takes"):
            tokens.refuse_too_large(step, three)
    monkeypatch.setattr(tokens, "l2_read_rate", lambda device: 1e9)
    floors = [tokens.l2_floors(problem.case, 99, torch.device("cuda")) for problem in (one, three)]
    assert floors[1] == {direction: pytest.approx(3 * ms) for direction, ms in floors[0].items()}


@pytest.mark.parametrize("pattern", list(tokens.PATTERNS))
@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_masks_have_the_sparsity_they_can_have(pattern: str, sparsity: float):
    mask = tokens.PATTERNS[pattern](1024, 1 - sparsity)
    assert mask.shape == (1024, 1024) and mask.dtype == torch.bool
    assert mask.double().mean().item() == pytest.approx(1 - sparsity, abs=0.1)
    if pattern != "random":
        assert mask[0].all() and mask[:, 0].all() and mask.diagonal().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_on_a_gpu_steps_are_right_and_held_to_their_floor(dtype: str):
    case = tokens.Case(seq_len=512, d_model=128, heads=2, sparsity=0.9, dtype=dtype)
    steps = [tokens.DENSE, tokens.OURS, tokens.FLEX]
    result = tokens.run_case(case, steps, torch.device("cuda"), repeats=3, seconds=60)
    assert [row.reason for row in result.rows] == [""] * 6
    if result.l2_floors:  # measured where there is Triton
        assert result.l2_floors[TRAIN] == pytest.approx(3 * result.l2_floors[FORWARD])
        assert tokens.L2_FLOOR in "\n".join(tokens.table([result]))


def results(milliseconds: dict[str, list[float]]) -> list[tokens.Result]:
    """Results of 50, 90 and 99 % with these forward times."""
    made = []
    for i, sparsity in enumerate((0.5, 0.9, 0.99)):
        case = tokens.Case(1024, 64, 1, sparsity)
        ours = milliseconds[tokens.OURS][i]
        rows = [tokens.Row(name, FORWARD, ms[i], to_ours=ms[i] / ours) for name, ms in milliseconds.items()]
        made.append(tokens.Result(case, round(1024**2 * (1 - sparsity)), rows, {}, {}))
    return made


def test_a_reason_that_is_not_that_of_all_cases_names_its_own():
    why = {"gather": ["takes 9.0 GiB", "", ""], "jagged": ["wrong", "", "wrong"], tokens.FLEX: ["forward only"] * 3}
    made = results({tokens.OURS: [2.0, 0.9, 0.1]})
    for i, result in enumerate(made):
        result.rows.extend(tokens.Row(name, FORWARD, reason=reasons[i]) for name, reasons in why.items() if reasons[i])
    said = list(tokens.table(made))[-3:]
    assert said == ["50% gather: takes 9.0 GiB", "50%, 99% jagged: wrong", f"{tokens.FLEX}: forward only"]


def test_from_which_sparsity_on_a_step_beats_dense():
    times = {
        tokens.OURS: [2.0, 0.9, 0.1],
        "gather": [0.5, 3.0, 0.9],
        "jagged": [0.5, 0.5, 2.0],
        tokens.DENSE: [1.0] * 3,
    }
    found = [tokens.beats_from(results(times), name, tokens.DENSE, FORWARD) for name in times]
    assert found == ["90%", "99%", "-", "-"]
    assert tokens.beats_from(results(times), tokens.OURS, tokens.DENSE, TRAIN) == "-"


def test_ratios_are_from_the_least_to_the_largest_of_the_cases():
    times = {tokens.OURS: [2.0, 0.5, 0.1], tokens.TORCH_SPARSE: [5.0, 0.9, 0.2], tokens.SDPA: [1.0, 1.0, 1.0]}
    heading, directions, *lines = tokens.ratios(results(times))
    assert heading == "over the time of sparse_attn, least and largest of 3 cases"
    assert directions.split() == list(tokens.DIRECTIONS)
    assert [line.split() for line in lines] == [
        ["torch.sparse", "1.80", "-", "2.50", "-"], ["sdpa", "0.500", "-", "10.0", "-"],
    ]  # fmt: skip
    assert list(tokens.ratios([])) == []


def test_command_prints_the_table_and_writes_the_rows(tmp_path, printed_again):
    path = tmp_path / "rows.json"
    arguments = (
        "bench tokens --seq-len 64 --heads 2,1 --head-dim 16 --sparsity 75,99 --peers masked,gather,sparse_attn "
        "--repeats 2 --batch 2 --profile 1"
    )
    assert main([*arguments.split(), "--json", str(path)]) == 0
    printed = printed_again(path)
    assert "over the time of sparse_attn, least and largest of 4 cases" in printed
    assert "beats masked from" in printed and "B 2, T 64, d_model 32, heads 2, random pairs, fp32" in printed
    rows = json.loads(path.read_text())["rows"]
    assert {(row["d_model"], row["sparsity"], row["step"]) for row in rows} == {
        (d, s, step) for d in (32, 16) for s in (0.75, 0.99) for step in ("masked", "gather", "sparse_attn")
    }
    assert all(row["milliseconds"] > 0 and row["batch"] == 2 for row in rows)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--sparsity 100", "'100' is not a percentage from 0 to below 100"),
        ("--peers fast", "'fast' is not one of masked, gather"),
    ],
)
def test_options_that_make_no_sense_end_in_a_sentence(capsys, option: str, sentence: str):
    with pytest.raises(SystemExit):
        main(f"bench tokens {option}".split())
    assert sentence in capsys.readouterr().err
