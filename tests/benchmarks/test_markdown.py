"""Tables for pages, of models: they say what the rows say."""

import argparse
import re

import pytest

from benchmarks.models import bert_results, modernbert_results, sequence_results
from benchmarks.program import register
from ds_sparse.bench.registry import operation

register()
ALONE = argparse.Namespace()

RESULTS = {
    "modernbert": [
        (
            modernbert_results.Case(8192, "bf16", "cuda"),
            [
                modernbert_results.Row("floor", 100.0, 1.0, 3.2e5, 20.1, 3),
                modernbert_results.Row("ds_sparse", 110.0, 0.91, 3e5, 21.2, 3),
                modernbert_results.Row("flash_attention_4", reason="not installed"),
            ],
        )
    ],
    "sequence": [
        (
            sequence_results.Case(16384, "bigbird-64", "bf16", "cuda", 2),
            [
                sequence_results.Row(1, "alone", 40.0, 4e5, None, 5.25, 10.5, 1.5, rounds=3),
                sequence_results.Row(
                    2, "sequence", 25.0, 6.5e5, 0.8, 3.25, 10.5, 1.5, 10.5001, 1.5, {"attention": 10.0}, {"loss": 0.125}
                ),
                sequence_results.Row(2, "data", reason="out of memory"),
            ],
        )
    ],
    "bert": [
        (
            bert_results.Case(8192, 0.1, "bf16", "cuda", predicts_all=False),
            [
                bert_results.Row("none", 60.0, 15.1, 3),
                bert_results.Row("floor", 66.0, 15.1, 3),
                bert_results.Row("sdpa", 150.0, 15.2, 3),
                bert_results.Row("flex-bigbird-64", 225.0, 15.2, 3),
                bert_results.Row("bigbird-64", 75.0, 15.3, 3),
                bert_results.Row("longformer-64", reason="out of memory"),
            ],
        ),
        *(
            (
                bert_results.Case(seq_len, 0.0, "bf16", "cuda", checkpointed=checkpointed, is_try=True),
                [bert_results.Row(name, 9.0, gib, 1, reason="" if gib else "out of memory")],
            )
            for name, seq_len, gib, checkpointed in (
                ("eager", 8192, 70.0, False), ("eager", 9216, None, False), ("eager", 16384, 70.0, True),
                ("eager", 17408, None, True), ("bigbird-64", 2**20, 70.0, True),
            )
        ),
    ],
}  # fmt: skip


def cells(text):
    """The rows of the tables of a text, after it was seen that each is as wide as its heading."""
    tables = re.findall(r"(?:^\|.*\|\n)+", f"{text}\n", re.MULTILINE)
    rows = []
    for table in tables:
        heading, line, *body = [[cell.strip() for cell in row[1:-1].split("|")] for row in table.splitlines()]
        assert line == ["---"] * len(heading)
        assert body and all(len(row) == len(heading) for row in body)
        rows += body
    return rows


@pytest.mark.parametrize(
    ("name", "rows", "note"),
    [
        (
            "modernbert",
            [
                ["floor", "100", "", "320,000", "20.1"],
                ["`ds_sparse`", "110", "91 %", "300,000", "21.2"],
            ],
            "",
        ),
        (
            "sequence",
            [
                ["16,384", "1", "40.0", "400,000", "", "5.2", "10.5000", ""],
                ["16,384", "2, one sequence", "25.0", "650,000", "80 %", "3.2", "10.5000", "10.5001"],
                ["16,384", "2, one sequence", "10.0"],
                ["16,384", "2, one sequence", "0.12"],
            ],
            "- bigbird-64, bf16, ZeRO 2, activations kept",
        ),
        (
            "bert",
            [
                ["8,192", "60.0", "66.0 (91 %)", "150 (40 %)", "225 (27 %)", "75.0 (80 %)"],
                ["8,192", "`bigbird-64`", "75.0", "80 %", "88 %", "2.0", "3.0"],
                ["8,192", "15.1", "15.1", "15.2", "15.2", "15.3"],
                ["`eager`", "", "8,192", "1.00", "16,384", "1.00"],
                ["`bigbird-64`", "", "", "", "at least 1,048,576", "at least 64"],
            ],
            "- All steps: dropout 0.1, logits of labelled tokens alone.",
        ),
    ],
)  # fmt: skip
def test_tables_say_what_the_rows_say(name, rows, note):
    tables = operation(name).tables(RESULTS[name], ALONE)
    text = "\n\n".join(table.in_markdown() for table in tables.values())
    assert cells(text) == rows
    assert note in text.splitlines() or not note


def test_steps_of_bert_say_in_their_row_what_not_all_of_them_share():
    rows = [bert_results.Row("sdpa", 2.0, 1.0, 3)]
    cases = [bert_results.Case(512, dropout, "bf16", "cuda", predicts_all=False) for dropout in (0.0, 0.1)]
    text = operation("bert").tables([(case, rows) for case in cases], ALONE)["steps"].in_markdown()
    assert [row[0] for row in cells(text)] == ["512", "512, dropout 0.1"]
    assert "- All steps: logits of labelled tokens alone." in text.splitlines()


def test_the_longest_sequence_is_said_to_be_the_least_where_longer_ones_were_left_to_try():
    def search(*failed):
        tries = [
            bert_results.Row("eager", 1.0, 1.0, 1),
            *(bert_results.Row("eager", reason="does not fit") for _ in failed),
        ]
        lengths = [8192, *failed]
        return [
            (bert_results.Case(length, 0.0, "bf16", "cuda", is_try=True), [row])
            for length, row in zip(lengths, tries, strict=True)
        ]

    def said(results):
        """Tokens, and how many times as many as eager attention's."""
        return cells(operation("bert").tables(results, ALONE)["longest"].in_markdown())[0][2:]

    assert said(search()) == said(search(16384)) == ["at least 8,192", ""]
    assert said(search(16384, 9216)) == ["8,192", "1.00"]
