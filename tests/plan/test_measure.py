from __future__ import annotations

import shutil
import sys

import pytest

from benchmarks.plan.committed import COMMITTED
from ds_sparse.bench.cases import TABLE
from ds_sparse.bench.command import parse
from ds_sparse.plan import measure


@pytest.fixture
def benched(monkeypatch):
    """Calls of `ds_sparse bench`, in the place of which committed results are written; and a small BERT."""
    calls = []

    def run(operation, arguments):
        parse(operation, arguments)
        calls.append([operation, *arguments])
        print("a table")
        shutil.copy(COMMITTED / "attention-cpu.json", arguments[arguments.index("--json") + 1])
        return 0

    monkeypatch.setattr(measure.command, "measure", run)
    monkeypatch.setitem(measure.LENGTHS, "cpu", (1024,))
    monkeypatch.setitem(measure.TOKENS, "cpu", 1)
    return calls


def test_rates_come_from_short_runs_whose_tables_go_to_standard_error(benched, capsys):
    pytest.importorskip("transformers")
    rates = measure.measured_rates("cpu")
    ((operation, *arguments),) = benched
    assert operation == "attention" and arguments[arguments.index("--device") + 1] == "cpu"
    assert (rates.training, rates.itemsize, rates.measured.hidden) == (None, 4, 128)
    assert rates.moved > 0 and max(rates.errors["model without attention"]) < 1
    assert [source.partition(":")[0] for source in rates.sources] == ["measured here"] * 2
    printed = capsys.readouterr()
    assert printed.out == "" and "a table" in printed.err


def test_a_run_that_fails_ends_in_a_sentence(monkeypatch):
    def fails(*_):
        print("no GPU", file=sys.stderr)
        return 1

    monkeypatch.setattr(measure.command, "measure", fails)
    with pytest.raises(ValueError, match="ds_sparse bench attention failed here, so that there are no rates"):
        measure.measured_rates("cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_cases_are_there(device):
    assert set(measure.CASES[device].split(",")) <= {case.name for case in TABLE}
