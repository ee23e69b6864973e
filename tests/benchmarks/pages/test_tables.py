"""Pages show of committed results what these say."""

import pytest

from benchmarks.pages import keys, plans, tables
from benchmarks.pages.gains import GAINS
from benchmarks.pages.includes import MARK, expanded
from benchmarks.pages.tables import RESULTS, ROOT, names
from benchmarks.plan.committed import SEQUENCE, written
from ds_sparse.plan.rates import FILE

PAGES = {page.name: page.read_text() for page in (ROOT / "docs").glob("*.md")}


@pytest.mark.parametrize("name", names())
def test_texts_are_what_the_runs_printed(name):
    text = (RESULTS / f"{name}.txt").read_text()
    assert text == tables.text(name), f"run `ds_sparse bench show {name}.json`, and keep what it prints"


def test_each_run_is_shown_and_each_text_is_of_a_run():
    assert sorted(path.stem for path in RESULTS.glob("*.txt")) == names()
    marks = [MARK.fullmatch(line) for page in PAGES.values() for line in page.splitlines()]
    words = [(found[1], *found[2].split()) for found in marks if found]
    shown = {run for maker, *rest in words if maker == "table" for run in rest[0].split(",")}
    shown |= {run for maker, *rest in words if maker == "gain" for run in GAINS[rest[0]].runs}
    shown |= {run for maker, *_ in words if maker == "measured_on_several" for run in SEQUENCE}
    committed = {name for name, gain in GAINS.items() if set(gain.runs) <= set(names())}
    assert {name for maker, *rest in words if maker == "gain" for name in rest} == committed
    assert shown == set(names()) and {
        ("training",),
        *(("texts", kind) for kind in tables.RUN_PAGES),
        ("claims",),
    } <= set(words)


def test_the_readme_has_the_table_of_training():
    assert tables.training() in (ROOT / "README.md").read_text()


def test_a_table_is_made_in_the_place_of_its_mark():
    made = expanded("<!-- made: table window-h200 products -->")
    assert made.startswith("| window, each side | `window_matmul`, ms (of the floor) | ")
    assert "NVIDIA H200" in made and "([printed](benchmark-runs.md#window-h200))" in made
    assert expanded("| a table |") == "| a table |"
    with pytest.raises(ValueError, match="window-h200: name one of the tables attention, products."):
        expanded("<!-- made: table window-h200 -->")
    with pytest.raises(KeyError, match="tabel"):
        expanded("<!-- made: tabel window-h200 -->")


def test_keys_are_those_that_a_mode_adds():
    assert "| `num_local_blocks` | `4` | Size" in keys.table("fixed") and "`block`" not in keys.table("fixed")
    assert "| `block` | `16` |" in keys.table("dense")


def close(text, other):
    """Equal but for the last digits, in which machines differ."""
    words, others = text.split(), other.split()
    assert len(words) == len(others)
    return all(
        a == b or float(a.strip(",")) == pytest.approx(float(b.strip(",")), rel=1e-3) for a, b in zip(words, others)
    )


def test_committed_rates_are_those_of_the_results():
    again = "run `python -m benchmarks.pages.plans`"
    assert close(FILE.read_text(), written(plans.measurements()[2])), again


def test_measured_steps_stand_beside_predicted_ones():
    made = plans.measured_on_several()
    assert "| 1 rank, activations kept, 4 micro batches | 262,144 | `bigbird-64` | 1778 | 17" in made
    assert "Where a rank has 65,536 tokens of a pass or more: 5 steps. Times differ by at most 6." in made


def test_what_is_advised_is_bold_and_fits():
    cells = plans.row(plans.committed_rates(), plans.LENGTHS[-1])
    advised = [cell for cell in cells if cell.startswith("**")]
    assert len(advised) == len(plans.GPUS) and "-" not in advised and all("c" in cell for cell in advised)
