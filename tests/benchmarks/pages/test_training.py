"""The summary of training runs."""

import json
import sys

import pytest

from benchmarks.pages import training

BLOCK = {"mode": "bslongformer", "block": 64, "num_sliding_window_blocks": 5}


@pytest.fixture
def folder(tmp_path):
    """A run with a sparse and a dense part of 14 steps; the first four take longer."""
    for name in ("sparse", "dense"):
        terms = {
            "sparse": name == "sparse",
            "deepspeed_config": {"train_batch_size": 4, "sparse_attention": BLOCK},
            "model": {"num_attention_heads": 2},
            "max_seq_length": 1024,
        }
        checkpoint = tmp_path / name / "checkpoints" / "step14"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text(json.dumps({"terms": terms, "position": {}}))
        (checkpoint.parent / "latest").write_text("step14")
        steps = [
            {"step": n, "mlm_loss": 6 - n / 10, "tokens_per_second": 10.0 * n, "memory_gib": 1 + n / 100}
            for n in range(1, 15)
        ]
        records = [{"step": 0, "held_out_mlm_loss": 6.0}, *steps, {"step": 14, "held_out_mlm_loss": 4.5}]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "manifest.json").write_text(json.dumps({"versions": {"torch": "2.13"}}))
    return tmp_path


def test_a_run_is_summed_up(folder):
    sparse, dense = map(training.summary, training.runs(folder))
    assert sparse["name"] == "`bslongformer`, block 64, window 5"
    assert (dense["name"], dense["density"]) == ("dense", 1.0)
    assert 0.25 < sparse["density"] < 0.5  # of 16 x 16 blocks a band of five, a row and a column
    for run in (sparse, dense):
        assert run["tokens_per_second"] == 125.0  # of the steps 11 to 14
        assert (round(run["peak_gib"], 3), run["held_out"]) == (1.14, [[0, 6.0], [14, 4.5]])
        assert run["training"][0] == 5.9 and len(run["training"]) == 14


def test_too_few_steps_are_refused(folder):
    path = folder / "dense" / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:8]))
    with pytest.raises(ValueError, match="has 7 steps; train more than 10"):
        training.summary(folder / "dense")


def test_the_command_writes_the_summary(folder, monkeypatch):
    summary = folder / "summary.json"
    words = ["--machine", "a GPU", "--commit", "abc", "--date", "2026-11-23", str(folder), "--summary", str(summary)]
    monkeypatch.setattr(sys, "argv", ["training", *words])
    training.main()
    written = json.loads(summary.read_text())
    assert (written["machine"], written["torch"], written["commit"]) == ("a GPU", "2.13", "abc")
    assert written["runs"] == [training.summary(run) for run in training.runs(folder)]
