"""A run that goes on with another number of ranks than it was begun with."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import universal

HERE = Path(__file__).parent
MODEL = {
    "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip
# Steps so large that a state which is not moved as it was shows in the next losses.
OPTIMIZER = {"type": "AdamW", "params": {"lr": 3e-2, "weight_decay": 0.5, "torch_adam": True}}
JSON = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 1000000,
    "optimizer": OPTIMIZER,
    "gradient_clipping": 1.0,
    "sparse_attention": {"mode": "bigbird", "block": 16, "num_random_blocks": 1, "seed": 5},
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "corpus").mkdir()
    words = (Path(os.__file__).parent / "argparse.py").read_text().split()
    for number in range(40):
        start = random.Random(number).randrange(len(words) - 900)
        (folder / "corpus" / f"{number}.txt").write_text(" ".join(words[start : start + 800]))
    (folder / "model.json").write_text(json.dumps({"bert_model_config": MODEL}))
    return folder


def arguments(workplace, name, steps, *more, **changes):
    config = workplace / f"{name}{len(changes)}.json"
    config.write_text(json.dumps(JSON | changes))
    return [
        "--cf", str(workplace / "model.json"), "--corpus", str(workplace / "corpus"), "--max-seq-length", "128",
        "--max-steps", str(steps), "--warmup-steps", "1", "--eval-sequences", "1", "--deepspeed_sparse_attention",
        "--deepspeed_config", str(config), "--output-dir", str(workplace / name), *more,
    ]  # fmt: skip


def run(workplace, runs):
    """How each rank of each run ended, and what it printed."""
    done = subprocess.run(
        [sys.executable, HERE / "example_ranks.py", workplace / "ranks", json.dumps(runs)],
        env=os.environ | {"DS_SPARSE_CACHE": str(workplace / "cache")},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def losses(workplace, name):
    records = map(json.loads, (workplace / name / "0001" / "sparse" / "metrics.jsonl").read_text().splitlines())
    return [record["mlm_loss"] for record in records if "mlm_loss" in record]


@pytest.fixture(scope="module")
def moved(workplace):
    """Losses of a run on one rank, and of one of each ZeRO stage that goes from 2 ranks to 1 and to 4."""
    runs = [[1, arguments(workplace, "alone", 6)]]
    for stage in range(4):
        zero = {"zero_optimization": {"stage": stage}}
        for ranks, steps, *more in ([2, 2], [1, 4, "--resume"], [4, 6, "--resume"]):
            runs.append([ranks, arguments(workplace, f"zero{stage}", steps, *more, **zero)])
    ended = run(workplace, runs)
    assert all(code == 0 for *ranks, _ in ended for code in ranks), ended
    return {name: losses(workplace, name) for name in ("alone", *(f"zero{stage}" for stage in range(4)))}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.slow("trains 13 runs on up to four ranks")
def test_a_run_goes_on_with_any_number_of_ranks_as_on_one(moved, stage):
    """The same sequences in the same order, the same draws of dropout, the optimizer's states where they were."""
    assert len(moved["alone"]) == 6
    assert moved[f"zero{stage}"] == pytest.approx(moved["alone"], abs=1e-5)


@pytest.mark.slow("trains 13 runs on up to four ranks")
def test_no_universal_checkpoint_is_left(workplace, moved):
    folder = workplace / "zero1" / "0001" / "sparse" / "checkpoints"
    assert {path.name for path in folder.iterdir() if path.suffix != ".py"} == {"latest", "step4", "step6"}
    before = set(folder.iterdir())
    (folder / ".step4.universal" / "zero").mkdir(parents=True)  # as a kill leaves it
    universal.remove_left_over(folder)
    assert set(folder.iterdir()) == before


@pytest.mark.slow("trains 13 runs on up to four ranks")
def test_what_cannot_be_moved_ends_in_a_sentence_before_anything_is_built(workplace, moved):
    other = {"zero_optimization": {"stage": 1}, "train_batch_size": 16}
    ((ended, printed),) = run(workplace, [[1, arguments(workplace, "zero1", 8, "--resume", **other)]])
    assert "train_batch_size was 8 and is 16" in ended and "density" not in printed


@pytest.mark.parametrize(
    "kind, params, kept", [("Lion", {}, "Lion"), ("AdamW", {"amsgrad": True}, "AdamW with amsgrad")]
)
def test_states_that_deepspeed_does_not_move_are_refused(kind, params, kept):
    config = {"optimizer": {"type": kind, "params": params}, "zero_optimization": {"stage": 2}}
    universal.require_movable(config, 2, 2, "ds.json")
    universal.require_movable(config | {"zero_optimization": {"stage": 0}}, 2, 4, "ds.json")
    universal.require_movable(config | {"optimizer": OPTIMIZER}, 2, 4, "ds.json")
    with pytest.raises(ValueError, match=f"of 2 ranks, and there are 4.* not those of {kept}; continue on 2 ranks"):
        universal.require_movable(config, 2, 4, "ds.json")
