"""A run shows metrics that survive a kill, and progress on terminals and in files; runs have numbered folders."""

import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from report import Metrics, Progress, how_long, median_figures, run_folder, say, speed_in_words

FIGURES = {"tokens_per_second": 1000.0, "model_tflops": 0.25}


class Stream(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.isatty = lambda: terminal


@pytest.mark.parametrize("resumed_step, kept", [(2, [0, 1, 2]), (None, [])])
def test_a_resumed_run_drops_later_records_and_a_half_written_one_and_a_new_run_all(tmp_path, resumed_step, kept):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "mlm_loss": step / 2}) for step in range(4)]
    path.write_text("\n".join([*lines, '{"step": 4, "mlm_']))
    metrics = Metrics(path, resumed_step)
    metrics.add(step=3, mlm_loss=9.0)
    metrics.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == metrics.records
    expected = [*((step, step / 2) for step in kept), (3, 9)]
    assert [(record["step"], record["mlm_loss"]) for record in metrics.records] == expected


def test_tensorboard_shows_no_step_twice_after_a_kill(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resumed_step, steps in ((None, (1, 2, 3)), (1, (2,))):
        metrics = Metrics(tmp_path / "metrics.jsonl", resumed_step)
        for step in steps:
            metrics.add(step=step, mlm_loss=float(step * len(steps)))
        metrics.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("mlm_loss")] == [(1, 3.0), (2, 2.0)]


@pytest.mark.parametrize("out, err", [(True, True), (True, False), (False, True), (False, False)])
def test_a_bar_on_a_terminal_and_lines_in_a_file(monkeypatch, out, err):
    monkeypatch.setattr(sys, "stdout", Stream(out))
    monkeypatch.setattr(sys, "stderr", Stream(err))
    progress = Progress("sparse", first_step=4, max_steps=8, seconds=60, print_steps=2)
    for step in (5, 6, 7, 8):
        progress.show(step, 1.25, FIGURES, 0.5)
        say(f"said {step}")
    progress.close()
    printed, bar = sys.stdout.getvalue(), sys.stderr.getvalue()
    assert [line for line in printed.splitlines() if "said" in line] == [f"said {step}" for step in (5, 6, 7, 8)]
    lines = [line for line in printed.splitlines() if "loss 1.2500" in line]
    assert [line.split("  ")[0] for line in lines] == ([] if out and err else ["sparse: step 6", "sparse: step 8"])
    assert all("1,000 tokens/s  0.250 TFLOP/s a rank  0.50 GiB" in line for line in lines)
    assert ("100%" in bar and "step 8  loss 1.2500" in bar) if err else bar == ""


@pytest.mark.parametrize("seconds, said", [(float("inf"), "no limit"), (-1.0, "dense: step 1  loss 2.0000")])
def test_progress_where_no_time_limit_is_or_the_time_is_already_up(capsys, seconds, said):
    Progress("dense", 0, max_steps=None, seconds=seconds, print_steps=1).show(1, 2.0, FIGURES, 0.1)
    assert said in capsys.readouterr().out


def test_the_speed_of_a_run_is_said_beside_that_of_its_median_step_of_those_recorded_with_figures():
    steps = [{"tokens_per_second": x, "model_tflops": 0.25} for x in (3000.0, 3000.0, 100.0)]  # 100 tokens took 1 s
    said = "3,000 tokens/s  0.250 TFLOP/s a rank in the median step, 281 tokens/s in all steps together"
    without = [{"step": 0, "held_out_mlm_loss": 2.0}, {"step": 1, "tokens_per_second": 9.0}]
    assert speed_in_words([*without, *steps]) == said and speed_in_words(without) == ""
    with_mfu = [{"tokens_per_second": x, "model_tflops": 2 * x, "mfu": x / 10} for x in (1.0, 5.0, 3.0)]
    assert median_figures([*without, *with_mfu]) == with_mfu[2]


@pytest.mark.parametrize(
    "steps, minutes, end",
    [(None, 5.0, "after 5 minutes"), (50, float("inf"), "after step 50"), (50, 1.0, "after step 50 or 1 minute")],
)
def test_a_run_says_when_it_ends_and_how_to_have_it_shorter(steps, minutes, end):
    earlier = "; a smaller --max-minutes or --max-steps ends it earlier"
    assert how_long(steps, minutes) == f"The run ends {end} at most{earlier}"


def test_runs_that_start_together_get_folders_of_their_own_and_a_dry_run_makes_none(tmp_path):
    (tmp_path / "0003").mkdir()
    assert run_folder(tmp_path, makes=False) == tmp_path / "0004" and not (tmp_path / "0004").exists()
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: run_folder(tmp_path), range(16)))
    assert sorted(folder.name for folder in folders) == [f"{number:04d}" for number in range(4, 20)]
    assert run_folder(tmp_path, resume=True).name == run_folder(tmp_path, resume=True, or_start=True).name == "0019"
    assert run_folder(tmp_path / "a", resume=True, or_start=True).name == "0001"


def test_a_folder_that_cannot_be_made_and_no_run_to_resume_are_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="There is no run in .* to resume; start one without --resume"):
        run_folder(tmp_path, resume=True)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--output-dir .* cannot be used: Not a directory; give another folder"):
        run_folder(tmp_path / "file" / "runs")
