"""The page of gains says what committed runs say, and how to make those that are not there."""

import json
import shlex
from dataclasses import replace

import gains
import pytest

from ds_sparse.bench import bert_results
from ds_sparse.bench.command import parse

CASE = bert_results.Case(512, 0.0, "bf16", "cuda", predicts_all=False)
TRY = replace(CASE, whole_step=True, is_try=True)


def test_figures_are_those_of_the_runs():
    text = gains.PAGE.read_text()
    assert text == gains.with_gains(text), "run website/gains.py"


@pytest.mark.parametrize("name", gains.GAINS)
def test_each_picture_that_can_be_drawn_is_there(name):
    assert (gains.PICTURES / f"gain-{name}.svg").exists() == gains.is_there(gains.GAINS[name].runs())


@pytest.mark.parametrize("run", gains.TO_MEASURE)
def test_commands_of_runs_to_come_can_be_given(run):
    words = shlex.split(gains.command(run))
    assert words[:3] == ["ds_sparse", "bench", "bert"] and parse("bert", words[3:]).json == f"{run}.json"


@pytest.fixture
def all_measured(monkeypatch, tmp_path):
    """All runs are there, those to come with times of our own."""
    for path in gains.RESULTS.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    times = {"none": 40.0, "floor": 45.0, "transformers-longformer": 500.0, "bigbird-64": 50.0}
    longest = {"eager": 10_240, "bigbird-64": 512_000}
    runs = {
        "bert-lengths-h200": [
            (
                replace(CASE, seq_len=length),
                [bert_results.Row(name, ms) for name, ms in (times | {"sdpa": length / 100}).items()],
            )
            for length in (4096, 65536)
        ],
        "bert-longest-h200": [
            (replace(TRY, seq_len=length), [bert_results.Row(name, 9.0, 70.0)]) for name, length in longest.items()
        ],
        "bert-longest-checkpointed-h200": [
            (replace(TRY, seq_len=4 * length, checkpointed=True), [bert_results.Row(name, 9.0, 70.0)])
            for name, length in longest.items()
        ],
    }
    about = {"machine": "a GPU", "torch": "", "commit": "", "date": "", "ceilings": {}, "operation": "bert"}
    for name, results in runs.items():
        rows = [row for result in results for row in bert_results.record(result)]
        arguments = shlex.split(gains.command(name))[3:]
        (tmp_path / f"{name}.json").write_text(json.dumps(about | {"arguments": arguments, "rows": rows}))
    monkeypatch.setattr(gains, "RESULTS", tmp_path)


def test_runs_that_are_there_take_the_place_of_commands(all_measured):
    page = gains.with_gains(gains.PAGE.read_text())
    assert "ot measured yet" not in page
    assert "| 10 times | 50 times, 512,000 tokens (activations kept); 50 times, 2,048,000 tokens (act" in page
    assert "| up to 6.3 times faster | 13 times, `bigbird-64` at 65,536 tokens | `bert-lengths-h200` |" in page
    assert "| 1.5 times faster | 10 times, `bigbird-64` at " in page


def test_pictures_have_what_was_measured(all_measured):
    (plot,) = gains.draw_speed().axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in plot.get_lines()}
    assert lines["bigbird-64"] == [[4096, pytest.approx(8 * 4096 / 0.05)], [65536, pytest.approx(65536 / 0.05)]]
    assert lines.keys() == {"no attention", "floor", "transformers-longformer", "bigbird-64", "sdpa"}
    (plot,) = gains.draw_longest().axes
    assert [bar.get_width() for bar in plot.patches] == [10_240, 512_000, 40_960, 2_048_000]
    assert plot.get_yticklabels()[3].get_text() == "bigbird-64, checkpointed"
