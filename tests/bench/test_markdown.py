"""Tables for pages, of committed results; what is printed of these, tests/benchmarks holds."""

from pathlib import Path

import pytest

from ds_sparse.bench import markdown
from ds_sparse.bench.runs import Run
from ds_sparse.cli import main

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CONDITIONS = {"machine": "a GPU", "driver": "580", "torch": "2.13", "commit": "abc", "date": "2026-11-23"}

RUNS = {
    "attention-cpu": [
        "| fixed, block 16, 27 % | 1, 4, 2048, 64, bf16 | 4.51 / 15.3 | 0.26 / 0.192 | 6.2 / 3.5 | 22 / - |",
        "- `flex` takes 1.60 to 34 times as long forward as `ds_sparse`.",
    ],
    "attention-break-even-h200": [
        "| 16 | 0.44 | above 0.90 | above 0.90 |",
    ],
    "attention-growth-h200": [
        "| 16,384 | 4, 16, 64 | 0.444 / 1.22 / 1.66 | 1.89 / 1.97 / 1.95 |",
        (
            "- Twice the tokens take 1.89 to 2.2 times as long forward, 1.97 to 2.2 times as long backward, "
            "1.95 to 2.1 times as long forward+backward as half of them."
        ),
    ],
    "matmul-h200": [
        (
            "| bslongformer-9, block 16, 4.3 % | 0.0375 / 0.0824 (74 / 67 %) | 0.0405 / 0.0557 (79 / 86 %) "
            "| 0.0419 / 0.0808 (66 / 69 %) | 0.0422 / 0.0973 (66 / 57 %) |"
        ),
        "- `torch.sparse sdd` takes 1.18 to 14 times as long forward as `sdd`.",
    ],
    "matmul-cpu": [
        "| fixed, block 64, 34 %, fp32 | 12.0 / 27.8 | 7.51 / 13.2 | 14.1 / 24.3 | 14.4 / 26.9 |",
        (
            "- SDPA bool mask takes 1.81 to 22 times as long forward, 1.81 to 28 times as long "
            "forward+backward as `attention`."
        ),
    ],
    "window-cpu": [
        "| 64, fp32 | 1, 4, 1024, 64 | 1.59 / 4.52 | 4.3 / 5.8 | 7.9 / 9.1 | 1.68 / 1.98 | 2.5 / - |",
        (
            "- sliding chunks takes 1.68 to 6.8 times as long forward, 1.98 to 4.7 times as long "
            "forward+backward as `window_attention`."
        ),
        "| 64, fp32 | 1, 4, 4096, 64 | 2.52 / 6.42 | 2.45 / 6.50 | 1.09 / 2.08 |",
    ],
    "packed-h200": [
        (
            "| bigbird, block 64 | 9 of 24 to 4,093 | 12, 32,768, 64 | 0.179 / 0.647 | 183 / 50.7 | 8 x "
            "4,093 | 98 % / 98 % | 100 % | 98 % / 98 % | 1.07 / 1.09 | 2.44 |"
        ),
        (
            "- The padded batch takes 1.07 to 6.1 times as long forward, 1.09 to 5.6 times as long "
            "forward+backward as packed documents."
        ),
        ("- `flex` takes 1.82 to 20 times as long forward, 1.74 to 13 times as long forward+backward as `ds_sparse`."),
        (
            "| window 128, causal | 54 of 28 to 4,725 | 12, 32,768, 64 | 0.0914 / 0.371 | 2.5 / 2.8 | 1.83 "
            "/ 1.98 | 2.9 / 2.1 |"
        ),
    ],
    "tokens-4k-cpu": [
        "| 1, 1, 4096, 64, random | 90 % | 10.1 / 42.1 | 55.5 / 500 | 33.9 / 187 | 98.8 / - |",
        "- `C++ loop` takes 7.8 to 12 times as long forward as `sparse_attn`.",
    ],
}
"""Some lines of the tables of a run: a case of each, and notes."""


@pytest.fixture
def shown(capsys):
    """shown(*names): the tables of committed runs."""

    def show(*names):
        assert main(["bench", "show", "--markdown", *(str(RESULTS / f"{name}.json") for name in names)]) == 0
        return capsys.readouterr().out

    return show


@pytest.mark.parametrize("name", RUNS)
def test_tables_say_what_the_rows_say(shown, name):
    assert set(RUNS[name]) <= set(shown(name).splitlines())


def test_a_shape_that_all_rows_have_is_said_once(shown):
    one, several = shown("window-16k-h200"), shown("window-16k-h200", "window-h200")
    assert "Numbers with a slash are forward / forward+backward. B, H, T, D are 1, 12, 16384, 64." in one.splitlines()
    assert "| B, H, T, D |" in several and "B, H, T, D are" not in several


def test_sources_name_machine_commit_day_and_commands():
    runs = [Run("window", ["--window", "64"], CONDITIONS), Run("window", [], CONDITIONS | {"commit": "def"})]
    runs.append(Run("tokens", [], CONDITIONS))
    assert markdown.sources(runs, ["a", "b", "c"]).split("\n\n") == [
        "a GPU, driver 580, torch 2.13, commit abc, 2026-11-23: `ds_sparse bench window --window 64` ([printed](a)), "
        "`ds_sparse bench tokens` ([printed](c))",
        "a GPU, driver 580, torch 2.13, commit def, 2026-11-23: `ds_sparse bench window` ([printed](b))",
    ]
