"""Results of models: options that operations share, lines that fit, rows of the JSON, and tables for pages."""

import argparse
from dataclasses import replace

import pytest
from helpers import cells

from benchmarks.models import attentions
from benchmarks.models import results as models
from benchmarks.models.results import Row
from benchmarks.program import main, register
from ds_sparse.bench.registry import operation
from ds_sparse.bench.runs import WIDTH

register()
ALONE = argparse.Namespace()
WIDEST = (1.23e-5, 0.123, 123.4, 98765.4)


@pytest.mark.parametrize("name", ["bert", "modernbert", "sequence", "train", "attention"])
def test_the_same_thing_has_the_same_name_in_all_operations(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    options = {word.strip(",") for word in capsys.readouterr().out.split() if word.startswith("--")}
    rounds = set() if name == "train" else {"--repeats", "--seconds"}
    assert {"--device", "--dtype", "--json"} | rounds <= options


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("attention --peers none", "fa4"),
        ("packed --peers none", "fa4-varlen"),
        ("tokens --peers none", "C++ loop"),
        ("bert --dropout=1", "'1' is not a probability from 0 to below 1"),
        ("bert --dropout=much", "is not a probability from 0 to below 1"),
        ("train --tokens=0", "'0' is not an integer of at least 1"),
        ("train --minutes=-1", "'-1' is not a number above 0"),
        ("train --seeds=0,x", "'x' is not an integer of at least 0"),
        ("train --experiment=chess", "invalid choice: 'chess'"),
    ],
)
def test_a_wrong_value_is_told_what_there_is(arguments, said, capsys):
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("number", WIDEST)
def test_tables_fit(number):
    rows = [
        Row(name, milliseconds=number, tokens_per_second=1e3 * number, peak_gib=number, rounds=20)
        for name in (*attentions.BERT_ATTENTIONS, max(attentions.MODES_IN_BERT, key=len))
    ]
    case = models.Case(1 << 20, "bf16", "cuda", 0.125, predicts_all=False)
    assert max(map(len, models.lines_of_case(case, rows))) <= WIDTH
    case = models.Case(1 << 20, "bf16", "cuda", structure="longformer-64", activations="checkpointed", tiles=64)
    row = Row("", 8, "data", number, 1e3 * number, 0.987, number, number, loss_alone=number, rounds=20)
    assert max(map(len, models.lines_of_case(case, [row]))) <= WIDTH


def timed(name, milliseconds, peak_gib=None, **more):
    return Row(name, milliseconds=milliseconds, peak_gib=peak_gib, rounds=3, **more)


PACKED = models.Case(8192, "bf16", "cuda")
SHARED = models.Case(16384, "bf16", "cuda", structure="bigbird-64", zero_stage=2)
OF_TWO = {"ranks": 2, "parallel": "sequence", "loss": 10.5, "loss_alone": 10.5001}
STEP = models.Case(8192, "bf16", "cuda", 0.1, predicts_all=False)
TRIED = models.Case(0, "bf16", "cuda", is_try=True)
RESULTS = {
    "modernbert": [
        (
            PACKED,
            [
                timed("floor", 100.0, 20.1, tokens_per_second=3.2e5),
                timed("ds_sparse", 110.0, 21.2, tokens_per_second=3e5),
                Row("flash_attention_4", reason="not installed"),
            ],
        )
    ],
    "sequence": [
        (
            SHARED,
            [
                timed("", 40.0, 5.25, tokens_per_second=4e5, loss=10.5),
                timed("", 25.0, 3.25, efficiency=0.8, profile={"attention": 10.0}, memory={"loss": 0.125}, **OF_TWO),
                Row(ranks=2, parallel="data", reason="out of memory"),
            ],
        )
    ],
    "bert": [
        *(
            (
                case,
                [
                    timed("none", 60.0, 15.1),
                    timed("sdpa", 150.0, 15.2),
                    timed("flex-bigbird-64", 225.0, 15.2),
                    timed("bigbird-64", 75.0, 15.3),
                    Row("longformer-64", reason="out of memory"),
                ],
            )
            for case in (STEP, replace(STEP, dropout=0.0))
        ),
        *(
            (replace(TRIED, seq_len=seq_len, checkpointed=checkpointed), [timed(name, 9.0, gib, reason=reason)])
            for name, seq_len, gib, checkpointed, reason in (
                ("eager", 8192, 70.0, False, ""), ("eager", 9216, None, False, "out of memory"),
                ("sdpa", 8192, 70.0, True, ""), ("bigbird-64", 2**20, 70.0, False, ""),
            )
        ),
    ],
}  # fmt: skip
NOTES = {
    "modernbert": "- All steps: bf16.",
    "sequence": "- All steps: bigbird-64, bf16, ZeRO 2, activations kept.",
    "bert": "- All steps: bf16, logits of labelled tokens alone.",
}
TABLES = {
    "modernbert": [
        ["8,192", "floor", "100", "100 %", "320,000", "20.1"],
        ["8,192", "ds_sparse", "110", "91 %", "300,000", "21.2"],
    ],
    "sequence": [
        ["16,384", "1 rank", "40.0", "400,000", "", "5.2", "10.5000", ""],
        ["16,384", "2 ranks, one sequence", "25.0", "", "80 %", "3.2", "10.5000", "10.5001"],
        ["16,384", "2 ranks, one sequence", "0.12"],
        ["16,384", "2 ranks, one sequence", "10.0"],
    ],
    "bert": [
        ["8,192, dropout 0.1", "60.0", "150 (40 %)", "225 (27 %)", "75.0 (80 %)"],
        ["8,192", "60.0", "150 (40 %)", "225 (27 %)", "75.0 (80 %)"],
        ["8,192, dropout 0.1", "`bigbird-64`", "75.0", "80 %", "2.0", "3.0"],
        ["8,192", "`bigbird-64`", "75.0", "80 %", "2.0", "3.0"],
        ["8,192, dropout 0.1", "15.1", "15.2", "15.2", "15.3"],
        ["8,192", "15.1", "15.2", "15.2", "15.3"],
        ["`eager`", "bf16", "8,192", "1.00", "9,216", "9.00", "70.0"],
        ["`sdpa`", "bf16, activations checkpointed", "at least 8,192", "", "", "9.00", "70.0"],
        ["`bigbird-64`", "bf16", "at least 1,048,576", "at least 128", "", "9.00", "70.0"],
    ],
}


@pytest.mark.parametrize("name", RESULTS)
def test_tables_say_what_the_rows_say(name):
    tables = operation(name).tables(RESULTS[name], ALONE)
    text = "\n\n".join(table.in_markdown() for table in tables.values())
    assert cells(text) == TABLES[name]
    assert NOTES[name] in text.splitlines()
    rows = [row for one in RESULTS[name] for row in operation(name).record(one)]
    assert operation(name).restore(rows) == RESULTS[name]
