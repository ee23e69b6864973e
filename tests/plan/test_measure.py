from __future__ import annotations

import shutil
import sys

import pytest
import torch

from ds_sparse.bench.command import parse
from ds_sparse.bench.runs import read
from ds_sparse.plan import bert_cases, bert_steps, measure
from ds_sparse.plan.results import COMMITTED


@pytest.fixture
def benched(monkeypatch):
    """The measurements in the place of which committed results are taken."""
    calls = []
    files = iter(["bert-h200", "bert-labelled-h200", "bert-dropout-h200"])

    def run(operation, arguments):
        parse(operation, arguments)
        calls.append([operation, *arguments])
        print("a table")
        shutil.copy(COMMITTED / "attention-h200.json", arguments[arguments.index("--json") + 1])
        return 0

    def measured(cases, names, device, repeats, seconds):
        calls.append(cases)
        return bert_cases.restore(read(str(COMMITTED / f"{next(files)}.json")).rows)

    monkeypatch.setattr(measure, "measure", run)
    monkeypatch.setattr(bert_steps, "measured", measured)
    return calls


def test_rates_come_from_short_runs_whose_tables_go_to_standard_error(benched, capsys):
    rates = measure.measured_rates("cuda")
    attention, *bert = benched
    assert attention[0] == "attention" and attention[attention.index("--device") + 1] == "cuda"
    assert [(cases[0].dropout, cases[0].predicts_all) for cases in bert] == [(0.0, True), (0.0, False), (0.1, True)]
    assert all(case.device == "cuda" for cases in bert for case in cases)
    assert rates.training is None
    assert all(source.startswith("measured here: ") for source in rates.sources)
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("a table") == 1 and "bert with dropout, 8192 tokens" in printed.err


def test_a_step_of_bert_is_timed_with_each_attention():
    case = bert_cases.Case(1024, 0.0, "fp32", "cpu", predicts_all=False)
    ((found, rows),) = bert_steps.measured([case], measure.BERT_ATTENTIONS, torch.device("cpu"), 1, 1)
    assert found == case and [row.attention for row in rows] == ["none", "sdpa", "longformer-64"]
    assert all(row.milliseconds > 0 and not row.reason for row in rows)


def test_a_wrong_structure_of_bert_is_a_sentence(monkeypatch):
    monkeypatch.setattr(bert_steps, "switch", lambda model, name: model.set_attn_implementation("sdpa"))
    with pytest.raises(ValueError, match="A step of BERT is wrong here, so that there are no rates for a plan: long"):
        measure.measured_bert("bert", 0.0, True, "cpu")


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
