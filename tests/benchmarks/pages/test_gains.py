"""Figures and pictures of gains are those of committed results."""

import json
import re

import pytest

from benchmarks.pages import claims, gains, tables
from benchmarks.pages.documents import draw_shown

SAID = [
    "22 times, 428,032 tokens (activations kept; SDPA: at least 262,144, where the search's time was over); at least "
    "32 times, 1,048,576 tokens (activations checkpointed; SDPA: at least 65,536, where the search's time was over)",
    "0.99 times, 94,208 tokens (activations kept; SDPA: 95,232)",
    "1.00 times: 81.4 GiB, SDPA 81.3, at 262,144 tokens",
    "25 times, `longformer-64` at 131,072 tokens",
    "5.1 times, `bigbird-16` at 32,768 tokens",
    "2.8 times, `bslongformer` at 8,192 tokens",
    "2.4 times, rows of 8,192 tokens",
    "7.9 times, `bigbird-64` at 1,024 tokens (SDPA takes 1.10 times as long)",
    "7 to 11 % lower at equal tokens (`dense-512`: 12 %); 6 to 7 % lower at equal minutes (`dense-512`: 11 %)",
]
"""Cells of the table of claims, of the committed runs."""


def rows(run):
    return json.loads((tables.RESULTS / f"{run}.json").read_text())["rows"]


def test_claims_are_those_of_the_runs():
    assert [claim.said() for claim in claims.CLAIMS] == SAID
    assert "| up to 6.3 times faster | 25 times, `longformer-64` at 131,072 tokens | H200 | `bert-le" in claims.claims()


def test_speed_is_tokens_a_second():
    (plot,) = gains.draw_speed(gains.LENGTHS).axes
    lines = {line.get_label(): dict(line.get_xydata().tolist()) for line in plot.get_lines()}
    (row,) = (r for r in rows(*gains.LENGTHS) if r["attention"] == "bigbird-64" and r["seq_len"] == 512)
    assert lines["bigbird-64"][512] == pytest.approx(32768 / row["milliseconds"] * 1e3)
    assert lines["bigbird-64"][131072] > 20 * lines["sdpa"][131072] and "no attention" in lines


def test_searches_that_ended_by_their_time_are_dashed():
    (plot,) = gains.draw_longest(gains.LONGEST).axes
    bars = {label.get_text(): bar for label, bar in zip(plot.get_yticklabels(), plot.patches)}
    assert bars["bigbird-64"].get_width() == 428_032 and bars["bigbird-64"].get_fill()
    assert bars["sdpa"].get_width() == 262_144 and not bars["sdpa"].get_fill()
    assert bars["bigbird-64, checkpointed"].get_width() == 1_048_576
    assert "at least 262,144" in [text.get_text() for text in plot.texts]


def test_curves_end_at_the_means_that_the_table_has():
    of_tokens, of_minutes, ends, _ = gains.draw_curves(gains.QUALITY).axes
    table = gains.train_tables(gains.QUALITY)
    for line in of_tokens.get_lines():
        end = line.get_ydata()[-1]
        assert re.search(rf"^\| `{line.get_label()}` \| 3 \| {end:.4f} ±", table, re.MULTILINE)
    assert len(of_minutes.get_lines()) == len(of_tokens.get_lines()) == len(ends.get_yticklabels()) == 4
    masked, genes, *_ = gains.draw_curves(gains.DNA).axes
    assert (masked.get_ylabel(), genes.get_ylabel()) == ("held-out loss of masked bases", "held-out loss of genes")
    (plot,) = gains.GAINS["dna"].draw(gains.DNA).axes
    assert [round(bar.get_width(), 1) for bar in plot.patches] == [85.4, 87.2, 87.4, 87.9, 89.5, 82.5]


def test_copies_are_a_line_over_distance_and_one_for_bases_without_a_copy():
    (plot,) = gains.draw_copies(gains.COPIES).axes
    lines = {line.get_label(): line.get_ydata() for line in plot.get_lines()}
    windows, elsewhere = lines["bslongformer-16384"], plot.get_lines()[2].get_ydata()
    assert len(windows) == 7 and windows[0] > 80 and max(lines["dense-16384"]) < 45
    assert [round(part, 1) for part in elsewhere] == [44.0, 44.0]


def test_files_told_have_a_mark_for_what_is_shown(monkeypatch, tmp_path):
    (run,) = gains.DOCUMENTS
    data = json.loads((tables.RESULTS / f"{run}.json").read_text())
    kinds = {"whole": 80, "far part removed": 50, "far pieces shuffled": 70, "far tokens shuffled": 60}
    answered = [{"hops": 0, "distance": 4096, "asked": 100, "right": n, "shown": kind} for kind, n in kinds.items()]
    for row in data["rows"]:
        row["answered"] = answered
    (tmp_path / f"{run}.json").write_text(json.dumps(data))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (plot,) = draw_shown([run]).axes
    assert [label.get_text() for label in plot.get_yticklabels()] == ["dense-512", "bigbird-8192"]
    assert {x for line in plot.get_lines() for x in line.get_xdata()} == set(kinds.values())
    assert "| `bigbird-8192` | 1 | 80.0 | 50.0 | 70.0 | 60.0 | +0.0 |" in gains.train_tables([run])


def test_jobs_that_learned_nothing_are_not_shown(monkeypatch, tmp_path):
    (run,) = gains.QUALITY
    data = json.loads((tables.RESULTS / f"{run}.json").read_text())
    row = data["rows"][1]
    for point in (row, *row["curve"]):
        point["held_out"] = row["unigram"]
    (tmp_path / f"{run}.json").write_text(json.dumps(data))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    for make in (claims.quality_gain, lambda: gains.train_tables([run]), lambda: gains.draw_curves([run])):
        with pytest.raises(ValueError, match=f"{run}.json, .*: this job did not leave the unigram cross-entropy"):
            make()


def test_a_picture_stands_in_the_page_with_its_runs():
    made = gains.shown("packed")
    assert (
        made.startswith('<img src="data:image/svg+xml;base64,') and "(benchmark-runs-models.md#modernbert-h200)" in made
    )
