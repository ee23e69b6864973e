"""The summary of training runs."""

import json
import sys

import pytest

from benchmarks.pages import training
from benchmarks.plan.committed import BLOCKS


def test_the_command_sums_up_a_run_of_each_attention(tmp_path, monkeypatch):
    """A run of 14 steps; the first four take longer."""
    checkpoint = tmp_path / "sparse" / "checkpoints" / "step14"
    checkpoint.mkdir(parents=True)
    terms = {"train_batch_size": 4, "max_seq_length": 8192}
    (checkpoint / "state.json").write_text(json.dumps({"terms": terms, "position": {}}))
    (checkpoint.parent / "latest").write_text("step14")
    steps = [
        {"step": n, "mlm_loss": 6 - n / 10, "tokens_per_second": 10.0 * n, "memory_gib": 1 + n / 100}
        for n in range(1, 15)
    ]
    records = [{"step": 0, "held_out_mlm_loss": 6.0}, *steps, {"step": 14, "held_out_mlm_loss": 4.5}]
    (tmp_path / "sparse" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "manifest.json").write_text(json.dumps({"versions": {"torch": "2.13"}}))
    committed = json.loads(training.SUMMARY.read_text())["runs"]
    monkeypatch.setattr(training, "SUMMARY", tmp_path / "summary.json")
    folders = [str(tmp_path / "sparse")] * len(BLOCKS)
    words = ["training", *folders, "--machine", "a GPU", "--commit", "abc", "--date", "2026-11-23"]
    monkeypatch.setattr(sys, "argv", words)
    training.main()
    written = json.loads(training.SUMMARY.read_text())
    assert (written["machine"], written["torch"], written["commit"]) == ("a GPU", "2.13", "abc")
    assert [(run["name"], run["density"]) for run in written["runs"]] == [
        (run["name"], pytest.approx(run["density"]))
        for run in sorted(committed, key=lambda x: [*BLOCKS].index(x["name"]))
    ]
    for run in written["runs"]:
        assert run["tokens_per_second"] == 125.0  # of the steps 11 to 14
        assert (round(run["peak_gib"], 3), run["held_out"]) == (1.14, [[0, 6.0], [14, 4.5]])
        assert run["training"][0] == 5.9 and len(run["training"]) == 14
