from __future__ import annotations

import shutil
import sys

import pytest

from ds_sparse.bench.command import parse
from ds_sparse.plan import measure
from ds_sparse.plan.results import COMMITTED


@pytest.fixture
def benched(monkeypatch):
    """The calls of `ds_sparse bench` in the place of which committed results are written."""
    calls = []
    files = iter(["attention-h200", "bert-h200", "bert-labelled-h200", "bert-dropout-h200"])

    def run(operation, arguments):
        parse(operation, arguments)
        calls.append([operation, *arguments])
        print("a table")
        shutil.copy(COMMITTED / f"{next(files)}.json", arguments[arguments.index("--json") + 1])
        return 0

    monkeypatch.setattr(measure, "measure", run)
    return calls


def test_rates_come_from_short_runs_whose_tables_go_to_standard_error(benched, capsys):
    rates = measure.measured_rates("cuda")
    assert [call[0] for call in benched] == ["attention", "bert", "bert", "bert"]
    assert all(call[call.index("--device") + 1] == "cuda" for call in benched)
    assert "--labelled-only" in benched[2] and "--dropout" in benched[3]
    assert rates.training is None
    assert all(source.startswith("measured here: ") for source in rates.sources)
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("a table") == 4


def test_a_run_that_fails_ends_in_a_sentence(monkeypatch):
    def fails(*_):
        print("no GPU", file=sys.stderr)
        return 1

    monkeypatch.setattr(measure, "measure", fails)
    with pytest.raises(ValueError, match="ds_sparse bench attention failed here, so that there are no rates"):
        measure.measured_rates("cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_cases_are_there(device):
    from ds_sparse.bench.cases import TABLE

    assert set(measure.CASES[device].split(",")) <= {case.name for case in TABLE}
