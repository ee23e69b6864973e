"""The page of gains says what committed runs say, and how to make those that are not there."""

import json
import shlex
from dataclasses import replace

import gains
import pytest

from benchmarks.models import bert_results
from benchmarks.train.results import Case, Point, Row
from ds_sparse.bench.command import parse
from ds_sparse.bench.registry import operation as operation_named

CASE = bert_results.Case(512, 0.0, "bf16", "cuda", predicts_all=False)
QUALITY = Case("quality", "small", "bf16", "cuda", False, 32768, 7e-4, 4096)


def trained(arm, seed, held_out, **budget):
    curve = [Point(30.0, 10**6, held_out + 1, "masked tokens"), Point(60.0, 2 * 10**6, held_out, "masked tokens")]
    return replace(QUALITY, arm=arm, seed=seed, **budget), Row(20.0, held_out, 6.0, curve, tokens_per_second=1e6)


TRAINED = [
    *(trained("dense-4096", seed, 2.0, **budget) for budget in ({"tokens": 9}, {"minutes": 9.0}) for seed in (0, 1)),
    *(trained("bigbird-4096", seed, 2.1, tokens=9) for seed in (0, 1)),
    *(trained("dense-512", seed, 1.7 + seed / 5, tokens=9) for seed in (0, 1)),
    *(trained("bigbird-4096", seed, 1.9, minutes=9.0) for seed in (0, 1)),
]
GENES = [Point(90.0, 3 * 10**6, 0.9, "genes"), Point(120.0, 4 * 10**6, 0.8, "genes")]
MEASURED = [
    (case, replace(row, curve=row.curve + GENES, measures={"gene_f1": 0.5 + case.seed / 10, "macro_f1": 0.75}))
    for case, row in TRAINED
    if case.minutes
]
TRY = replace(CASE, whole_step=True, is_try=True)
LONGEST = {"eager": 10_240, "sdpa": 262_144, "bigbird-64": 512_000, "longformer-64": 262_144}


def test_figures_are_those_of_the_runs():
    text = gains.PAGE.read_text()
    assert text == gains.with_gains(text), "run website/gains.py"


@pytest.mark.parametrize("name", gains.GAINS)
def test_each_picture_that_can_be_drawn_is_there(name):
    assert (gains.PICTURES / f"gain-{name}.svg").exists() == gains.is_there(gains.GAINS[name].runs())


@pytest.mark.parametrize("run", gains.TO_MEASURE)
def test_commands_of_runs_to_come_can_be_given(run):
    words = shlex.split(gains.command(run))
    assert words[:2] == ["ds_sparse", "bench"] and words[2] in ("bert", "train")
    assert parse(words[2], words[3:]).json == f"{run}.json"


@pytest.fixture
def all_measured(monkeypatch, tmp_path):
    """All runs are there, those to come with times of our own."""
    for path in gains.RESULTS.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    times = {"none": 40.0, "floor": 45.0, "transformers-longformer": 500.0, "bigbird-64": 50.0}
    peaks = {"sdpa": 70.0, "longformer-64": 77.0}
    ended = {"eager": 10_240 + 1_024, "bigbird-64": 512_000 + 1_024}
    runs = {
        "bert-lengths-h200": [
            (
                replace(CASE, seq_len=length),
                [bert_results.Row(name, ms) for name, ms in (times | {"sdpa": length / 100}).items()],
            )
            for length in (4096, 65536)
        ],
        "bert-longest-h200": [
            *(
                (replace(TRY, seq_len=length), [bert_results.Row(name, 9.0, peaks.get(name, 140.0))])
                for name, length in LONGEST.items()
            ),
            *(
                (replace(TRY, seq_len=length), [bert_results.Row(name, reason="out of memory")])
                for name, length in ended.items()
            ),
        ],
        "bert-longest-checkpointed-h200": [
            (replace(TRY, seq_len=4 * length, checkpointed=True), [bert_results.Row(name, 9.0, 70.0)])
            for name, length in LONGEST.items()
        ],
        **{name: TRAINED for name in gains.TO_MEASURE if name.startswith("train-")},
        **dict.fromkeys((*gains.DNA, *gains.DOCUMENTS), MEASURED),
    }
    about = {"machine": "a GPU", "torch": "", "commit": "", "date": "", "ceilings": {}}
    for name, results in runs.items():
        operation = gains.TO_MEASURE[name].split()[0]
        arguments = shlex.split(gains.command(name))[3:]
        rows = [row for result in results for row in operation_named(operation).results.record(result)]
        about["operation"] = operation
        (tmp_path / f"{name}.json").write_text(json.dumps(about | {"arguments": arguments, "rows": rows}))
    monkeypatch.setattr(gains, "RESULTS", tmp_path)


def test_runs_that_are_there_take_the_place_of_commands(all_measured):
    page = gains.with_gains(gains.PAGE.read_text())
    assert "ot measured yet" not in page
    assert (
        "| 10 times | 50 times, 512,000 tokens (activations kept; SDPA: at least 262,144, where the search's time was "
        "over); at least 50 times, 2,048,000 tokens (act"
    ) in page
    assert "| | 1.10 times: 77.0 GiB, SDPA 70.0, at 262,144 tokens | a GPU |" in page
    assert "| up to 6.3 times faster | 13 times, `bigbird-64` at 65,536 tokens | a GPU | `bert-le" in page
    assert "| 1.5 times faster | 10 times, `bigbird-64` at 65,536 tokens (SDPA takes 13 times as long) |" in page
    assert "| as good | 1.05 times at equal tokens (`dense-512` 0.90); 0.95 times at equal minutes | a GPU |" in page
    assert "| `bigbird-4096` | 2 | 2.1000 ± 0.0000 | 1.050 |" in page


def test_jobs_that_learned_nothing_are_not_shown(all_measured):
    path = gains.RESULTS / f"{gains.QUALITY[0]}.json"
    run = json.loads(path.read_text())
    run["rows"][1]["held_out"] = 5.9
    path.write_text(json.dumps(run))
    sentence = "train-quality-h100.json, dense-4096, seed 1, 9 tokens: this job did not leave the unigram cross-entropy"
    for make in (lambda: gains.with_gains(gains.PAGE.read_text()), lambda: gains.draw_curves(gains.QUALITY)):
        with pytest.raises(ValueError, match=sentence):
            make()


def test_pictures_have_what_was_measured(all_measured):
    (plot,) = gains.draw_speed().axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in plot.get_lines()}
    assert lines["bigbird-64"] == [[4096, pytest.approx(8 * 4096 / 0.05)], [65536, pytest.approx(65536 / 0.05)]]
    assert lines.keys() == {"no attention", "floor", "transformers-longformer", "bigbird-64", "sdpa"}
    of_tokens, of_minutes, ends, _ = gains.GAINS["quality"].draw().axes
    lines = [
        {line.get_label(): line.get_xydata().tolist() for line in plot.get_lines()} for plot in (of_tokens, of_minutes)
    ]
    assert lines[0]["bigbird-4096"] == [[1.0, 3.1], [2.0, 2.1]]
    assert lines[1] == {"dense-4096": [[30.0, 3.0], [60.0, 2.0]], "bigbird-4096": [[30.0, 2.9], [60.0, 1.9]]}
    assert [label.get_text() for label in ends.get_yticklabels()] == ["dense-4096", "bigbird-4096", "dense-512"]
    *_, seeds, mean = (line.get_xydata().tolist() for line in ends.get_lines())
    assert (seeds, mean) == ([[1.7, 2], [1.9, 2]], [[pytest.approx(1.8), 2]])
    (plot,) = gains.GAINS["dna"].draw().axes
    assert [bar.get_width() for bar in plot.patches] == pytest.approx([55, 55])
    assert [label.get_text() for label in plot.get_yticklabels()] == ["dense-4096", "bigbird-4096"]
    masked, genes, _, ends = gains.GAINS["dna_losses"].draw().axes
    assert masked.get_lines()[0].get_xydata().tolist() == [[30.0, 3.0], [60.0, 2.0]]
    assert genes.get_lines()[0].get_xydata().tolist() == [[90.0, 0.9], [120.0, 0.8]]
    assert ends.get_lines()[1].get_xydata().tolist() == [[0.8, 0]]
    assert (masked.get_ylabel(), genes.get_ylabel()) == ("held-out loss of masked tokens", "held-out loss of genes")
    (plot,) = gains.GAINS["longest"].draw().axes
    lengths = [*LONGEST.values(), *(4 * length for length in LONGEST.values())]
    assert [bar.get_width() for bar in plot.patches] == lengths
    assert plot.get_yticklabels()[6].get_text() == "bigbird-64, checkpointed"
    assert [bar.get_fill() for bar in plot.patches] == [True, False, True, False, *[False] * 4]
    assert [text.get_text() for text in plot.texts[:3]] == ["10,240", "at least 262,144", "512,000"]
