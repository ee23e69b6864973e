"""The summary of training runs."""

import argparse
import json
import sys
from types import SimpleNamespace

import pytest

from benchmarks.pages import training
from benchmarks.plan.committed import BLOCKS

from checkpoints import STATE
from modeling import BertConfig
from training_run import SPARSE, TrainingRun


def terms_of(folder):
    """What a run of the example keeps beside a checkpoint."""
    args = argparse.Namespace(
        deepspeed_config="ds.json", max_seq_length=8192, warmup_steps=50, seed=42, checkpoint_activations=False
    )
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4}
    manifest = {"cache_entry": "sources", "eval_sequences": 32}
    data = SimpleNamespace(manifest=lambda: manifest, max_predictions_per_seq=1229)
    model = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)
    return TrainingRun(SPARSE, args, config, model, data, folder).terms()


def test_the_command_sums_up_a_run_of_each_attention(tmp_path, monkeypatch):
    """A run of 14 steps; the first four take longer."""
    checkpoint = tmp_path / "sparse" / "checkpoints" / "step14"
    checkpoint.mkdir(parents=True)
    (checkpoint / STATE).write_text(json.dumps({"terms": terms_of(tmp_path), "position": {}}))
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
        assert (run["batch"], run["seq_len"]) == (4, 8192)
        assert (round(run["peak_gib"], 3), run["held_out"]) == (1.14, [[0, 6.0], [14, 4.5]])
        assert run["training"][0] == 5.9 and len(run["training"]) == 14
