"""Random cases with a fixed seed, and that they find faults; `python -m tests.fuzz --seconds 600 --seed 7` for more."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fuzz import attack
from fuzz.cases import Case
from fuzz.meanings import Tensors

SLOW = pytest.mark.slow("those before them are run always")


def silent(line: str) -> None:
    """Failures are in the report."""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("device", "first", "cases"),
    [("cpu", 0, 800), pytest.param("cpu", 800, 800, marks=SLOW), pytest.param("cuda", 0, 2000, marks=pytest.mark.gpu)],
    indirect=["device"],
)
def test_random_cases_are_within_their_bounds(device: str, first: int, cases: int):
    report = attack.run(1, device, cases, say=silent, first=first)
    assert not report.failures, "\n".join(report.failures)
    assert report.cases.keys() == attack.OPERATIONS.keys() and report.cases.total() == cases


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "operation", ["block_sparse_attention", "Softmax", "window_softmax", "window_attention", "sparse_attn"]
)
def test_a_scale_that_is_off_by_2e_5_is_found(operation: str):
    cases = {"window_softmax": 40}.get(operation, 60)
    report = attack.run(1, "cpu", cases, operation=operation, skew=2e-5, failures=1, say=silent)
    assert report.failures, f"{cases} cases do not show it"
    assert "is above" in report.failures[0]


def with_results(case: Case, change) -> Case:
    def call(given: Tensors) -> Tensors:
        return {name: change(x) for name, x in case.call(given).items()}

    return attack.replace(case, call=call)


@pytest.mark.slow("plants a fault in every operation")
@pytest.mark.parametrize("operation", attack.OPERATIONS)
def test_one_wrong_number_in_a_result_is_found(operation: str):
    """By 2 % in 16 bits, where results have two or three digits, by a thousandth else."""

    def spoiled(x: torch.Tensor) -> torch.Tensor:
        off = torch.zeros_like(x)
        wide = x.detach().abs()
        wide = torch.where(wide.isfinite(), wide, 0)
        share = 2e-2 if x.dtype.itemsize == 2 else 1e-3
        off.view(-1)[int(wide.argmax())] = share * wide.max()
        return x + off

    found = []
    for number in itertools.islice(attack.numbers(operation), 12):
        case = attack.case_of(1, number, "cpu")
        results = case.call({name: x.detach() for name, x in case.tensors.items()})
        if all(x.numel() and x.nan_to_num(neginf=0).abs().max() > 1e-3 for x in results.values()):
            found.append(bool(attack.outcome_of(with_results(case, spoiled), "cpu").faults))
    # Large logits, and sums in 16 bits, have large errors, beside which this one does not show.
    assert any(found)


@pytest.mark.slow("runs the case again in another process")
def test_a_failing_case_prints_the_line_that_repeats_it(capsys: pytest.CaptureFixture[str]):
    report = attack.run(1, "cpu", 60, operation="Softmax", skew=1e-2, failures=1, say=silent)
    command = report.failures[0].splitlines()[-1].removeprefix("  again: python ").split()
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, *command, "--skew", "1e-2"], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.strip() == report.failures[0]
    seed, number = map(int, command[-1].split("/"))
    assert attack.repeat(seed, number, "cpu")
    assert capsys.readouterr().out.startswith("passed Softmax: ")
