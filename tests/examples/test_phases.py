"""Phases of pretraining, each from the weights of the one before, at tiny size."""

import json
import sys

import pytest
import torch

import checkpoints
import phases


@pytest.fixture(scope="module")
def ran(workplace):
    """The folder of three phases, whose command was given twice, and what was printed."""
    arguments = [
        "--phase", "128:3", "--phase", "256:2", "--phase", "1024:2:sparse", "--output-dir",
        str(workplace.folder / "runs"), "--cf", str(workplace.folder / "model.json"), "--corpus",
        str(workplace.folder / "corpus"), "--eval-sequences", "2",
    ]  # fmt: skip
    ended = workplace.run([arguments] * 2, program="phases")
    assert [status for status, _ in ended] == [0, 0], ended
    return workplace.folder / "runs", "".join(printed for _, printed in ended)


def weights(run, step):
    file = run / "checkpoints" / f"step{step}" / "mp_rank_00_model_states.pt"
    return torch.load(file, weights_only=False)["module"]


@pytest.mark.slow("trains three phases")
def test_each_phase_begins_where_the_one_before_ended_and_a_finished_one_is_not_trained_again(ran):
    folder, printed = ran
    short, middle = folder / "1-128-dense" / "0001" / "dense", folder / "2-256-dense" / "0001" / "dense"
    long = folder / "3-1024-sparse" / "0001" / "sparse"
    words = "bert.embeddings.word_embeddings.weight"
    before, after = weights(short, 3), weights(middle, 2)
    moved = (after[words] - before[words]).abs().max()
    assert moved < 0.02 < before[words].abs().max(), "two steps of AdamW with a warming learning rate"
    positions = before[checkpoints.POSITIONS][:128].repeat(2, 1)
    assert (after[checkpoints.POSITIONS][:256] - positions).abs().max() < 0.02
    assert weights(long, 2)[checkpoints.POSITIONS].shape[0] == 1024

    assert printed.count("The JSON asks for Lamb, which DeepSpeed has on GPUs only: AdamW with lr 1e-3") == 6
    assert printed.count("The run ends after step 3 at most; ") == 2 and "minutes at most" not in printed
    assert printed.count("nothing left to train") == 3
    assert sorted(path.name for path in folder.glob("*/*")) == ["0001"] * 3


def test_the_learning_rate_rises_in_a_line_and_then_falls_as_the_root_of_steps():
    optimizer = torch.optim.AdamW(torch.nn.Linear(1, 1).parameters(), lr=2.0)
    (factor,) = phases.deepspeed_train.warmed_up(optimizer, warmup_steps=4).lr_lambdas
    assert [factor(step) for step in (0, 1, 3, 15)] == [0.25, 0.5, 1, 0.5]


@pytest.mark.parametrize("text", ["128", "128:0", "0:5", "128:5:dense:1", "128:5:wide", "a:5"])
def test_a_phase_is_a_length_and_steps(text):
    with pytest.raises(phases.argparse.ArgumentTypeError, match="is not TOKENS:STEPS or TOKENS:STEPS:sparse"):
        phases.phase(text)
    assert phases.phase("128:5") == (128, 5, "dense") and phases.phase("64:5:sparse") == (64, 5, "sparse")


def test_a_run_without_a_checkpoint_gives_no_weights(tmp_path):
    with pytest.raises(ValueError, match="has no checkpoint; name a run's folder, such as 0001/dense."):
        checkpoints.take_weights(torch.nn.Linear(1, 1), tmp_path, {})


def main_of(monkeypatch, folder, *options):
    monkeypatch.setattr(sys, "argv", ["phases.py", "--output-dir", str(folder / "runs"), *options])
    return phases.main()


def test_what_a_later_phase_would_end_in_is_refused_before_the_first(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="each phase says whether it is sparse, as in 4096:100:sparse; leave it out"):
        main_of(monkeypatch, tmp_path, "--deepspeed_sparse_attention")
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_batch_size": 2, "zero_optimization": {"stage": 3}}))
    with pytest.raises(ValueError, match=r"ds\.json: has ZeRO 3, .* give stage 2"):
        main_of(monkeypatch, tmp_path, "--deepspeed_config", str(config))
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_describes_all_phases(monkeypatch, tmp_path):
    phases_seen = []
    monkeypatch.setattr(phases.deepspeed_train, "main", lambda: phases_seen.append(sys.argv[1:]) or 0)
    assert main_of(monkeypatch, tmp_path, "--phase", "64:2", "--phase", "128:2:sparse", "--dry-run") == 0
    lengths = [options[options.index("--max-seq-length") + 1] for options in phases_seen]
    assert lengths == ["64", "128"] and not any("--weights-from" in options for options in phases_seen)
