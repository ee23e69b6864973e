"""Recall by distance: sequences that are made up, the model, a run, its tables and its picture."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.pages import recall as page
from benchmarks.pages import tables
from benchmarks.program import main
from benchmarks.train import recall
from benchmarks.train.recall_texts import (
    CELL,
    FIRST_NAME,
    FIRST_VALUE,
    MARK,
    MASK,
    PASSKEY,
    distances_of,
    renamed,
    sequences,
)
from benchmarks.train.results import Answered, Case, Row
from benchmarks.train.tasks import IGNORED
from ds_sparse.bench.show import load

CPU = torch.device("cpu")
CASE = Case("recall", "tiny", "fp32", "cpu", True, 2048, 2e-3, 512)


def told(tokens, at, causal):
    """The value that a question at a place is answered by, its hops, and the distances of the way."""
    if tokens[at - 1] == MARK or tokens[at - 2] == MARK:
        offset = 1 if tokens[at - 1] == MARK else 2
        (there,) = [place for place in np.flatnonzero(tokens == MARK) if tokens[place + 1] != MASK]
        assert not causal or there < at
        return tokens[there + offset], PASSKEY, [abs(at - offset - there)]
    name, here, ways = tokens[at - 1], at - 1, []
    while name >= FIRST_NAME:
        places = np.flatnonzero((tokens == name) & (np.arange(len(tokens)) % CELL == 0))
        (there,) = places[tokens[places + 1] != MASK]
        assert not causal or there < here
        ways.append(abs(there - here))
        name, here = tokens[there + 1], there
    return name, len(ways), ways


@pytest.mark.parametrize("causal", [False, True])
def test_each_question_has_one_answer_as_far_away_as_it_says(causal):
    made = sequences(4, 1024, 128, causal, 7)
    asked = made.labels != IGNORED
    assert 1 / 20 < asked.mean() < 1 / 10 and (made.tokens[asked] == MASK).all()
    assert set(made.hops[asked]) == {0, 1, 2, 3, 4} and set(made.distances[asked]) == set(distances_of(1024))
    for row, at in np.argwhere(asked):
        value, hops, ways = told(made.tokens[row], at, causal)
        assert value == FIRST_VALUE + made.labels[row, at] and hops == made.hops[row, at]
        assert all(made.distances[row, at] <= way < 2 * made.distances[row, at] for way in ways)
    again = sequences(4, 1024, 128, causal, 7)
    assert all((x == y).all() for x, y in zip(vars(made).values(), vars(again).values(), strict=True))


def test_other_names_and_values_keep_what_is_asked_for():
    made = sequences(2, 512, 64, False, 1)
    tokens, labels = renamed(made.tokens, made.labels, 64, np.random.default_rng(2))
    assert ((tokens == MASK) == (made.tokens == MASK)).all() and ((labels == IGNORED) == (made.labels == IGNORED)).all()
    assert (tokens != made.tokens).mean() > 0.1 and tokens.max() < FIRST_NAME + 64
    for row, at in np.argwhere(labels != IGNORED):
        assert told(tokens[row], at, False)[0] == FIRST_VALUE + labels[row, at]


def test_no_token_of_a_causal_arm_sees_one_after_it():
    made = sequences(1, 512, 64, True, 3)
    tokens = torch.from_numpy(made.tokens)
    changed = tokens.clone()
    changed[:, 300:] = MARK
    for kind, block in recall.blocks_of(CASE).items():
        torch.manual_seed(0)
        model = recall.Recaller(recall.MODELS["tiny"], FIRST_NAME + 64, block, kind.startswith("causal-"), 64).eval()
        with torch.no_grad():
            one, other = (model(some).last_hidden_state[:, :300] for some in (tokens, changed))
        assert torch.allclose(one, other, atol=1e-5) == kind.startswith("causal-"), kind


def test_lengths_are_short_first_and_then_each_in_turn():
    lengths = recall.lengths_of(CASE, 512)
    assert lengths == [64, 128, 256, 512] and recall.lengths_of(CASE, 64) == [64]
    assert [recall.length_at(step, lengths, CASE) for step in range(10)] == [64] * 5 + [128, 256, 512, 64, 128]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--arms nsa-512", "--arms nsa-512: is no arm of recall; give ATTENTION-LENGTH of dense, local_sliding_window"),
        ("--minutes 1", "--minutes: steps of recall take times as different as their lengths; give --tokens."),
        ("--document-tokens 384 --tokens-per-step 384", "--document-tokens 384: give recall a power of two"),
    ],
)
def test_what_cannot_be_is_refused(options, sentence, capsys):
    assert main(["train", "--experiment", "recall", "--quick", *options.split()]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_a_quick_run_goes_on_and_gives_the_same(tmp_path, printed_again, monkeypatch):
    arms = ["--arms", "dense-64,causal-moba-512", "--tokens", "4096"]
    runs = [tmp_path / name for name in ("whole", "cut", "on")]
    command = ["train", "--experiment", "recall", "--quick", *arms]
    for path, folder, more in (
        (runs[0], "one", []),
        (runs[1], "two", ["--arms", "dense-64"]),
        (runs[2], "two", []),
    ):
        assert main([*command, *more, "--folder", str(tmp_path / folder), "--json", f"{path}.json"]) == 0
        if path == runs[0]:
            assert "1 hop: percent of values told" in printed_again(f"{path}.json")
    whole, cut, on = ({case.arm: row for case, (row,) in load(f"{path}.json")[2]} for path in runs)
    assert on["dense-64"] == cut["dense-64"]
    for arm, row in whole.items():
        assert row.weights == on[arm].weights and row.answered == on[arm].answered
    asked = {(one.hops, one.distance): one.asked for one in whole["dense-64"].answered}
    assert {hops for hops, _ in asked} == {0, 1, 2, 3, 4} and {at for _, at in asked} == set(distances_of(512))


def made_up(arm, right, seed=0):
    """A job that told so many of ten values of one hop, by distance, and half of those of the passkey."""
    answered = [Answered(1, 64 << number, 10, count) for number, count in enumerate(right)]
    row = Row(1.0, 1.0, 4.0, tokens_per_second=7.0 / (1 + seed), answered=[*answered, Answered(0, 64, 4, 2)])
    curve = [{"seconds": 1.0, "tokens": 2048, "held_out": 1.0, "asked": "values"}]
    return replace(CASE, arm=arm, seed=seed, tokens=2048), row, curve


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The name of a committed run of three arms."""
    jobs = [
        made_up("dense-512", [10, 10, 9]),
        made_up("bigbird-512", [10, 6, 1]),
        made_up("bigbird-512", [10, 8, 3], seed=1),
        made_up("causal-dense-512", [9, 9, 9]),
    ]
    rows = [vars(case) | vars(row) | {"curve": curve} for case, row, curve in jobs]
    for row in rows:
        row["answered"] = [vars(one) for one in row["answered"]]
    about = {
        "operation": "train",
        "arguments": ["--experiment", "recall"],
        "machine": "a GPU",
        "torch": "2",
        "commit": "c",
        "ceilings": {},
    }
    (tmp_path / "made-up.json").write_text(json.dumps(about | {"date": "2026-11-28", "rows": rows}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    return "made-up"


def test_tables_and_the_picture_have_the_part_that_was_told(run):
    text = page.recall_tables([run])
    assert "| `bigbird-512` | 100 | 70 | 20 |" in text and "| `causal-dense-512` | 50 |" in text
    assert "| `bigbird-512` | 2 | 1.0000 ± 0.0000 | 1.000 | 0.02 | 0.0 | 7 |" in text, "the first seed's time"
    passkey, _, hop, causal_hop = page.draw_recall([run]).axes
    assert [plot.get_title() for plot in (passkey, causal_hop)] == ["passkey", "1 hop, causal"]
    lines = {line.get_label(): line.get_xydata().tolist() for line in hop.get_lines()}
    assert lines["bigbird-512"] == [[64, 100], [128, 70], [256, 20]]
    band = hop.collections[1].get_paths()[0].vertices.tolist()
    assert all(end in band for end in ([128, 60], [128, 80], [256, 10], [256, 30])), "from one seed to the other"
    (line,) = causal_hop.get_lines()
    assert line.get_label() == "dense-512"
    assert line.get_color() == hop.get_lines()[0].get_color()


def test_the_way_is_as_long_as_windows_and_global_blocks_make_it():
    case = replace(CASE, model="narrow", quick=False, document_tokens=8192)
    table = page.ways_table(case)
    rows = {row[0].strip("`"): dict(zip(table.heading, row, strict=True)) for row in table.rows}
    window, bigbird, fixed = (rows[kind] for kind in ("local_sliding_window", "bigbird", "fixed"))
    # Seven blocks of 64: three on each side in a layer, twelve in four.
    assert (window["128"], window["256"], window["512"]) == ("1", "3", "")
    assert bigbird["64"] == "1" and bigbird["4,096"] == fixed["4,096"] == "2"
    # One global block, and the last of each of eight windows beside it; the far ends' own windows are not between.
    assert rows["bslongformer"]["between"] == "1.0" and fixed["between"] == "9.0" and "moba" not in rows


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_quick_runs_on_a_gpu(tmp_path):
    path = tmp_path / "rows.json"
    command = "train --experiment recall --quick --device cuda --tokens 20480"
    assert main([*command.split(), "--json", str(path)]) == 0
    results = load(str(path))[2]
    assert [row.reason for _, (row,) in results if row.reason] == []
    assert [case.arm for case, _ in results] == recall.default_arms(CASE)
