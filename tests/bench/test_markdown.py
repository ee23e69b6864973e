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
        "| fixed, block 16, 27 % | 1, 4, 2048, 64, bf16 | 4.22 / 12.6 | 0.279 / 0.233 | 6.6 / 4.3 | 24 / - |",
        "- `flex` takes 1.80 to 67 times as long forward as `ds_sparse`.",
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
        "| fixed, block 64, 34 %, fp32 | 16.6 / 26.9 | 7.49 / 11.4 | 13.2 / 24.6 | 13.6 / 25.7 |",
        (
            "- SDPA bool mask takes 2.6 to 47 times as long forward, 3.2 to 43 times as long forward+backward as "
            "`attention`."
        ),
    ],
    "window-cpu": [
        "| 64, fp32 | 1, 4, 1024, 64 | 1.03 / 4.19 | 6.6 / 6.5 | 14 / 9.6 | 3.6 / 2.6 | 4.0 / - |",
        (
            "- sliding chunks takes 2.9 to 7.0 times as long forward, 2.6 to 5.6 times as long forward+backward "
            "as `window_attention`."
        ),
        "| 64, fp32 | 1, 4, 4096, 64 | 2.42 / 10.5 | 2.57 / 7.75 | 1.17 / 2.27 |",
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
        "| 1, 1, 4096, 64, random | 90 % | 8.00 / 44.8 | 38.2 / 392 | 27.6 / 107 | 90.3 / - |",
        "- `C++ loop` takes 9.5 to 15 times as long forward as `sparse_attn`.",
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
