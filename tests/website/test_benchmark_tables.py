"""Pages say of measurements what the runs' files say."""

import re

import benchmark_tables
import gains
import pytest
from benchmark_tables import PAGES, RESULTS, ROOT, RUNS, TRAINING, names

MADE = "run website/benchmark_tables.py"


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_those_of_the_runs(page):
    text = (ROOT / page).read_text()
    assert "<!-- table: " in text
    assert text == benchmark_tables.with_tables(text, PAGES[page]), MADE


def test_no_table_of_the_benchmarks_is_typed():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    left = re.sub(r"<!-- table: .*?<!-- end -->", "", text, flags=re.DOTALL)
    assert not [line for line in left.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("name", names())
def test_texts_are_what_the_runs_printed(name):
    text = (RESULTS / f"{name}.txt").read_text()
    assert text == benchmark_tables.text(name), MADE


def test_each_run_is_shown_and_each_text_is_of_a_run():
    assert RUNS.read_text() == benchmark_tables.with_runs(RUNS.read_text()), MADE
    assert sorted(path.stem for path in RESULTS.glob("*.txt")) == names()
    pages = "".join((ROOT / page).read_text() for page in PAGES)
    pictured = {run for picture in gains.GAINS.values() for run in picture.runs()}
    tabled = {name for name in (*names(), TRAINING) if re.search(rf"<!-- table: \S*\b{name}\b", pages)}
    assert {*names(), TRAINING} - tabled - pictured == set()


def test_one_of_several_tables_has_to_be_named():
    with pytest.raises(ValueError, match="window-h200: name one of the tables attention, products."):
        benchmark_tables.table(["window-h200"], None, "{}")


def test_the_place_of_runs_to_come_stays_empty():
    to_come = "<!-- table: not-measured peers -->\n<!-- end -->"
    assert benchmark_tables.with_tables(to_come, "{}") == to_come
    with pytest.raises(ValueError, match="not-measured.json cannot be read: No such file"):
        benchmark_tables.with_tables(to_come.replace("\n", "\n| a table |\n"), "{}")
    with pytest.raises(ValueError, match="not-measured.json cannot be read: No such file"):
        benchmark_tables.with_tables(to_come.replace("not-measured", "bert-h200,not-measured"), "{}")
