"""Tables for pages: they are well-formed, and say what the rows say."""

import argparse

import pytest
from helpers import cells

from ds_sparse.bench import markdown, matmul, packed, tokens, window
from ds_sparse.bench.cases import Case
from ds_sparse.bench.machine import BACKWARD, DIRECTIONS, FORWARD, TRAIN
from ds_sparse.bench.registry import operation
from ds_sparse.bench.runs import Density, Result, Row, Run
from ds_sparse.cli import main

CONDITIONS = {"machine": "a GPU", "driver": "580", "torch": "2.13", "commit": "abc", "date": "2026-11-23"}
ALONE = argparse.Namespace(break_even=False, growth=False)


def attention_result(block, density, dense, seq_len=1024, ms=1.0):
    """Forward in `ms`, backward in twice that, the dense peer in `dense` times that."""
    times = {FORWARD: ms, BACKWARD: 2 * ms, TRAIN: 3 * ms}
    rows = [
        Row(peer, way, factor * time, to_ours=factor, tflops=100 / time, rounds=3)
        for peer, factor in (("ds_sparse", 1), ("cudnn", dense))
        for way, time in times.items()
    ]
    rows.append(Row("vsa", FORWARD, reason="blocks of 64 only"))
    return Result(Case("", "random", block, 2, 4, seq_len, 64, {"density": density}, "bf16"), Density(density), rows)


def operation_rows(names, ours, dense, to_floor=None, ways=DIRECTIONS):
    """Ours in 1 ms, each dense one in `dense`, in all directions."""
    rows = [Row(ours, way, 1.0, names[0], 1 / dense, to_floor=to_floor, bound="copy", rounds=3) for way in ways]
    return rows + [Row(name, way, dense, names[0], 1.0, rounds=3) for name in names for way in ways]


def packed_result(name, length, ms, others):
    """Ours in `ms`, at 90 % of the rate without documents, of which partial blocks leave 96 %."""
    about = packed.About(40, 7, length or 5000, 16, 2048, 0.72, 0.75, 0.5, 0.96)
    rows = [
        Row(peer, way, ms * factor, to_ours=factor, tokens_per_second=2e7, of_unpacked=0.9 / factor, rounds=3)
        for peer, factor in {"ds_sparse": 1, "unpacked": 0.9, **others}.items()
        for way in packed.DIRECTIONS
    ]
    rows += [Row("fa4-varlen", way, reason="not installed") for way in packed.DIRECTIONS]
    return Result(packed.Case(name, length, "bigbird", 64, True, 32768, 12, 64, "bf16"), about, rows)


RESULTS = {
    "packed": [
        packed_result("equal", 512, 0.5, {"flex": 4.0}),
        packed_result("corpus", None, 1.0, {"padded": 2.0, "flex": 6.0}),
    ],
    "attention": [attention_result(16, 0.05, 3.5), attention_result(64, 0.25, 1.25)],
    "matmul": [
        Result(
            matmul.Case("fixed", 16, "bf16"),
            Density(0.25),
            [
                *operation_rows(["dense q @ k^T"], "sdd", 2.5, to_floor=1.25),
                *operation_rows(["SDPA dense", "SDPA bool mask"], "attention", 4.0),
            ],
        )
    ],
    "window": [
        Result(
            window.Case(4096, 64, "bf16"),
            Density(0.03),
            [
                *operation_rows(["SDPA dense", "FlexAttention"], "window_attention", 8.0, ways=window.DIRECTIONS),
                *operation_rows(["dense q @ k^T"], "window_matmul", 20.0, 1.6, window.DIRECTIONS),
            ],
        )
    ],
    "tokens": [
        Result(
            tokens.Case(1000, 128, 2, sparsity),
            tokens.Pairs(pairs),
            [
                Row(step, way, ms)
                for step, ms in (("sparse_attn", 1.0), ("sdpa", ms), ("gather", 9.0))
                for way in tokens.DIRECTIONS
            ],
        )
        for sparsity, pairs, ms in ((0.9, 100_000, 2.0), (0.99, 10_000, 0.5))
    ],
}


@pytest.mark.parametrize(
    ("name", "rows", "note"),
    [
        (
            "attention",
            [
                ["random, block 16, 5.0 %", "1.00 / 2.00", "100 / 50", "3.5 / 3.5", ""],
                ["random, block 64, 25 %", "1.00 / 2.00", "100 / 50", "1.25 / 1.25", ""],
            ],
            "- `cudnn` takes 1.25 to 3.5 times as long forward, 1.25 to 3.5 times as long backward as `ds_sparse`.",
        ),
        (
            "matmul",
            [
                ["fixed, block 16, 25 %", "1, 12, 2048, 64", "1.00 / 1.00 (80 / 80 %)"],
                ["fixed, block 16, 25 %", "1, 12, 2048, 64", "1.00 / 1.00", "4.0 / 4.0", "4.0 / 4.0", ""],
            ],
            "- `dense q @ k^T` takes 2.5 times as long forward, 2.5 times as long backward as `sdd`.",
        ),
        (
            "window",
            [
                ["64", "1, 4, 4096, 64", "1.00 / 1.00", "8.0 / 8.0", "8.0 / 8.0"],
                ["64", "1, 4, 4096, 64", "1.00 / 1.00 (62 / 62 %)", "", ""],
            ],
            "- `dense q @ k^T` takes 20 times as long forward, 20 times as long forward+backward as `window_matmul`.",
        ),
        (
            "tokens",
            [
                ["90 %", "1.00 / 1.00", "2.00 / 2.00"],
                ["99 %", "1.00 / 1.00", "0.500 / 0.500"],
            ],
            "- `sdpa` takes 0.50 to 2.0 times as long forward, 0.50 to 2.0 times as long forward+backward as "
            "`sparse_attn`.",
        ),
        (
            "packed",
            [
                [
                    *("bigbird, block 64, causal", "40 of 7 to 512", "12, 32,768, 64", "0.500 / 0.500", "20.0 / 20.0"),
                    *("16 x 2,048", "90 % / 90 %", "96 %", "94 % / 94 %", "", "0.500"),
                ],
                [
                    *("bigbird, block 64, causal", "40 of 7 to 5,000", "12, 32,768, 64", "1.00 / 1.00", "20.0 / 20.0"),
                    *("16 x 2,048", "90 % / 90 %", "96 %", "94 % / 94 %", "2.0 / 2.0", "0.500"),
                ],
                ["bigbird, block 64, causal", "40 of 7 to 512", "12, 32,768, 64", "0.500 / 0.500", "4.0 / 4.0"],
                ["bigbird, block 64, causal", "40 of 7 to 5,000", "12, 32,768, 64", "1.00 / 1.00", "6.0 / 6.0"],
            ],
            "- `flex` takes 4.0 to 6.0 times as long forward, 4.0 to 6.0 times as long forward+backward as "
            "`ds_sparse`.",
        ),
    ],
)  # fmt: skip
def test_tables_say_what_the_rows_say(name, rows, note):
    tables = operation(name).tables(RESULTS[name], ALONE)
    text = "\n\n".join(table.in_markdown() for table in tables.values())
    assert cells(text) == rows
    assert note in text.splitlines() or not note


def test_a_shape_that_all_rows_have_is_said_once():
    same, other = RESULTS["attention"], attention_result(16, 0.05, 3.5, 2048)
    texts = [operation("attention").tables(results, ALONE)["cases"].in_markdown() for results in (same, [*same, other])]
    assert texts[0].startswith("| layout, density | ms |")
    assert "Numbers with a slash are forward / backward. B, H, T, D are 2, 4, 1024, 64." in texts[0].splitlines()
    assert texts[1].startswith("| layout, density | B, H, T, D | ms |") and "are 2, 4" not in texts[1]


def test_break_even_and_growth_have_tables_of_their_own():
    crossed = [attention_result(16, density, dense) for density, dense in ((0.1, 4.0), (0.5, 0.25))]
    options = argparse.Namespace(break_even=True, growth=False, device="cuda")
    (table,) = operation("attention").tables(crossed, options).values()
    assert cells(table.in_markdown()) == [["16", "0.30", "0.30", "0.30"]]
    longer = [attention_result(16, 0.1, 1.0, tokens, ms) for tokens, ms in ((1024, 1.0), (2048, 2.1))]
    (table,) = operation("attention").tables(longer, argparse.Namespace(break_even=False, growth=True)).values()
    assert cells(table.in_markdown()) == [
        ["1,024", "2, 4, 64", "1.00 / 2.00 / 3.00", ""],
        ["2,048", "2, 4, 64", "2.10 / 4.20 / 6.30", "2.10 / 2.10 / 2.10"],
    ]


def test_sources_name_machine_commit_day_and_commands():
    runs = [Run("window", ["--window", "64"], CONDITIONS), Run("window", [], CONDITIONS | {"commit": "def"})]
    runs.append(Run("tokens", [], CONDITIONS))
    assert markdown.sources(runs, ["a", "b", "c"]).split("\n\n") == [
        "a GPU, driver 580, torch 2.13, commit abc, 2026-11-23: `ds_sparse bench window --window 64` ([printed](a)), "
        "`ds_sparse bench tokens` ([printed](c))",
        "a GPU, driver 580, torch 2.13, commit def, 2026-11-23: `ds_sparse bench window` ([printed](b))",
    ]


def test_show_puts_runs_of_an_operation_into_one_table(tmp_path, capsys):
    paths = []
    for i, result in enumerate(RESULTS["tokens"]):
        paths.append(str(tmp_path / f"{i}.json"))
        Run("tokens", ["--repeats", str(i + 1)], CONDITIONS).add(tokens.OPERATION.record(result), paths[-1])
    assert main(["bench", "show", "--markdown", *paths]) == 0
    printed = capsys.readouterr().out
    assert [row[0] for row in cells(printed)] == ["90 %", "99 %"]
    assert printed.splitlines()[-1] == (
        "a GPU, driver 580, torch 2.13, commit abc, 2026-11-23: `ds_sparse bench tokens --repeats 1`, "
        "`ds_sparse bench tokens --repeats 2`"
    )
