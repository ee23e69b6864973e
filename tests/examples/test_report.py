"""A run shows metrics that survive a kill, and progress on terminals and in files."""

import io
import json
import sys

import pytest
from pydantic import BaseModel, ValidationError

from report import Metrics, Progress, how_long, median_figures, mistakes, read_metrics, say, speed_in_words

FIGURES = {"tokens_per_second": 1000.0, "model_tflops": 0.25}


class Stream(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


def write(path, *steps, tail=""):
    path.write_text("".join(json.dumps({"step": step, "mlm_loss": step / 2}) + "\n" for step in steps) + tail)


@pytest.mark.parametrize("resumed_step, kept", [(2, [0, 1, 2]), (None, [])])
def test_a_resumed_run_drops_later_records_and_a_half_written_one_and_a_new_run_all(tmp_path, resumed_step, kept):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1, 2, 3, tail='{"step": 4, "mlm_')
    metrics = Metrics(path, resumed_step)
    metrics.add(step=3, mlm_loss=9.0)
    metrics.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == metrics.records
    expected = [*((step, step / 2) for step in kept), (3, 9)]
    assert [(record["step"], record["mlm_loss"]) for record in metrics.records] == expected


def test_tensorboard_shows_no_step_twice_after_a_kill(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    path = tmp_path / "metrics.jsonl"
    killed = Metrics(path, resumed_step=None)
    for step in (1, 2, 3):
        killed.add(step=step, mlm_loss=float(step))
    killed.close()
    resumed = Metrics(path, resumed_step=1)
    resumed.add(step=2, mlm_loss=20.0)
    resumed.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("mlm_loss")] == [(1, 1.0), (2, 20.0)]


@pytest.mark.parametrize(
    "garbage", ["garbage", "[1]", "{}", '{"step": "1"}', '{"step": 2, "mlm_loss": "x"}', "[" * 100000]
)
def test_lines_that_are_no_records_are_left_out_and_named(tmp_path, capsys, garbage):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1)
    path.write_text(f'{path.read_text()}{garbage}\n{{"step": 3, "mlm_loss": 1.5}}\n')
    assert [record["step"] for record in read_metrics(path, before=4)] == [0, 1, 3]
    said = capsys.readouterr().out
    assert f"{path}: 1 of 4 lines are no records, the first is line 3: left out.\n" in said
    assert f"{path} has no record of 1 of the 3 steps so far; the curve goes without them.\n" in said


@pytest.mark.parametrize("data", [None, b"", b"\xff\xfe\x00"])
def test_metrics_that_are_gone_are_missed_and_whole_ones_read_without_a_word(tmp_path, capsys, data):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1, 2, tail='{"step": 3, "mlm_')
    assert len(read_metrics(path, before=3)) == 3 and capsys.readouterr().out == ""
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    assert read_metrics(path, before=4) == []
    assert f"{path} has no record of 3 of the 3 steps so far" in capsys.readouterr().out


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
    lines = [line.split("  ")[0] for line in printed.splitlines() if "loss 1.2500" in line]
    assert lines == ([] if out and err else ["sparse: step 6", "sparse: step 8"])
    assert all(
        "1,000 tokens/s  0.250 TFLOP/s a rank  0.50 GiB" in line for line in printed.splitlines() if "loss" in line
    )
    assert ("100%" in bar and "step 8  loss 1.2500" in bar) if err else bar == ""


def test_progress_where_no_time_limit_is_or_the_time_is_already_up(capsys):
    Progress("dense", 0, max_steps=None, seconds=float("inf"), print_steps=1).show(1, 2.0, FIGURES, 0.1)
    assert "no limit" in capsys.readouterr().out
    Progress("dense", first_step=0, max_steps=None, seconds=-1.0, print_steps=1).show(1, 2.0, FIGURES, 0.1)
    assert "dense: step 1  loss 2.0000" in capsys.readouterr().out


def test_the_speed_of_a_run_is_said_beside_that_of_its_median_step_of_those_recorded_with_figures():
    steps = [{"tokens_per_second": x, "model_tflops": 0.25} for x in (3000.0, 3000.0, 100.0)]  # 100 tokens took 1 s
    said = "3,000 tokens/s  0.250 TFLOP/s a rank in the median step, 281 tokens/s in all steps together"
    without = [{"step": 0, "held_out_mlm_loss": 2.0}, {"step": 1, "tokens_per_second": 9.0}]
    assert speed_in_words([*without, *steps]) == said and speed_in_words(without) == ""
    with_mfu = [{"tokens_per_second": x, "model_tflops": 2 * x, "mfu": x / 10} for x in (1.0, 5.0, 3.0)]
    assert median_figures([*without, *with_mfu]) == with_mfu[2]


def test_mistakes_name_the_key_and_what_was_given():
    class Section(BaseModel):
        type: str

    class Shapes(BaseModel):
        fp16: dict = {}
        optimizer: Section

    with pytest.raises(ValidationError) as caught:
        Shapes.model_validate({"fp16": True, "optimizer": {"params": 1}})
    sentence = mistakes(caught.value)
    assert "fp16: " in sentence and "(given true)" in sentence and "optimizer.type: Field required" in sentence
    assert "http" not in sentence and "\n" not in sentence


def test_a_run_says_when_it_ends_and_how_to_have_it_shorter():
    earlier = "; a smaller --max-minutes or --max-steps ends it earlier"
    assert how_long(None, 5.0) == f"The run ends after 5 minutes at most{earlier}"
    assert how_long(50, float("inf")) == f"The run ends after step 50 at most{earlier}"
    assert how_long(50, 1.0) == f"The run ends after step 50 or 1 minute at most{earlier}"
