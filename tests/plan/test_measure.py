from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.plan.committed import COMMITTED
from ds_sparse.bench.cases import TABLE
from ds_sparse.bench.command import parse
from ds_sparse.plan import measure
from ds_sparse.plan.fitting import bert_model


@pytest.fixture
def measured(monkeypatch):
    """Calls and steps that are asked for, in the place of whose times stand a committed result and made-up numbers."""
    asked = []

    def run(operation, arguments):
        parse(operation, arguments)
        asked.append([operation, *arguments])
        print("a table")
        run = json.loads((COMMITTED / "attention-h200.json").read_text())
        run["rows"] = [row for row in run["rows"] if row["name"] == "longformer-64"]
        with open(arguments[arguments.index("--json") + 1], "w") as file:
            json.dump(run, file)
        return 0

    def timed(steps):
        asked.append(steps)
        return [replace(step, milliseconds=10.0 + len(step.attention) + step.dropout) for step in steps]

    monkeypatch.setattr(measure.command, "measure", run)
    monkeypatch.setattr(measure, "_timed", timed)
    return asked


def test_rates_come_from_short_runs_whose_tables_go_to_standard_error(measured, capsys):
    rates = measure.measured_rates("cpu")
    (operation, *arguments), steps = measured
    assert operation == "attention" and arguments[arguments.index("--device") + 1] == "cpu"
    assert len(steps) == 9 and {(step.dropout, step.predicts_all) for step in steps} == {(0, 1), (0, 0), (0.1, 1)}
    assert (rates.training, rates.itemsize, rates.measured.hidden) == (None, 4, 128)
    assert [source.partition(": commit ")[0] for source in rates.sources] == [
        "measured here: attention",
        "measured here: steps of BERT",
    ]
    printed = capsys.readouterr()
    assert printed.out == "" and "a table" in printed.err
    assert "1,024 tokens, dropout 0.1, logits of all tokens, attention longformer-64: 23.1 ms" in printed.err


@pytest.mark.parametrize("number", range(6))
def test_a_step_is_that_of_the_model_that_is_counted(number, monkeypatch):
    """Without attention no gradient of query and key; nothing of it is kept for the next step."""
    transformers = pytest.importorskip("transformers")
    made, without, zeroed = [], [], transformers.BertForMaskedLM.zero_grad

    def zero_grad(model, set_to_none):
        made.append(model)
        without.extend(name for name, x in model.named_parameters() if x.grad is None and ".0." in name)
        zeroed(model, set_to_none)

    monkeypatch.setattr(transformers.BertForMaskedLM, "zero_grad", zero_grad)
    step = replace(measure.steps_of_bert("cpu", 1024)[number], batch=1)
    measure.call_of(step)()
    (model,) = made
    by = {"none": "ds_sparse_plan_value", "sdpa": "sdpa", "longformer-64": "ds_sparse"}[step.attention]
    assert model.config._attn_implementation == by
    assert bool(without) == (step.attention == "none") and all(".query" in x or ".key" in x for x in without)
    assert sum(x.numel() for x in model.parameters()) == bert_model("cpu").parameters(1024)
    assert all(x.grad is None and x.dtype is torch.float32 for x in model.parameters())


def test_steps_that_do_not_fit_have_no_time(monkeypatch):
    def call_of(step):
        def call():
            if step.attention == "sdpa":
                raise torch.OutOfMemoryError

        return call

    monkeypatch.setattr(measure, "call_of", call_of)
    found = measure._timed(measure.steps_of_bert("cpu", 1024))
    assert len(found) == 6 and all(step.milliseconds > 0 and step.attention != "sdpa" for step in found)


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
