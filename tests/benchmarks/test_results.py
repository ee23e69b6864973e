"""Results of models and of training: options that operations share, lines that fit, rows of the JSON, and tables for
pages."""

import argparse

import pytest
from helpers import cells

from benchmarks.commands.train import OPERATION
from benchmarks.models import attentions, bert_results, modernbert_results, sequence_results
from benchmarks.program import main, register
from benchmarks.train.results import (
    Arm,
    Case,
    Point,
    Row,
    Settings,
    arms_by_case,
    dense_for,
    of_train,
    report,
    table,
)
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
    of_bert = [bert_results.Row(name, number, number, rounds=20) for name in attentions.BERT_ATTENTIONS]
    of_bert.append(bert_results.Row(max(attentions.MODES_IN_BERT, key=len), number, number, rounds=1))
    of_packed = [
        modernbert_results.Row(name, number, 1, 1e3 * number, number, 20) for name in modernbert_results.ATTENTIONS
    ]
    case = sequence_results.Case(1 << 20, "longformer-64", "bf16", "cuda", 2, sequence_results.CHECKPOINTED, 64)
    row = sequence_results.Row(
        8, sequence_results.DATA, number, 1e3 * number, 0.987, number, number, loss_alone=number, rounds=20
    )
    for lines in (
        bert_results.table(bert_results.Case(1 << 20, 0.125, "bf16", "cuda", predicts_all=False), of_bert),
        modernbert_results.table(modernbert_results.Case(8192, "bf16", "cuda"), of_packed),
        [*sequence_results.table([(case, row)]), next(sequence_results.lines(case, row))],
    ):
        assert max(map(len, lines)) <= WIDTH


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


SETTINGS = Settings("quality", "small", "bf16", "cuda", False, 32768, 7e-4, 4096)
ABOUT = dict(SETTINGS.__dict__)


def result(arm, seed, held_out, measures=None, **budget):
    curve = [Point(6.0, 10**6, held_out + 1), Point(12.0, 2 * 10**6, held_out)]
    row = Row(20.0, held_out, 6.0, curve, 15.0, 1.6e6, measures or {}, 9, "00", "a GPU", ["abc"], "2026-11-25")
    return Case(**ABOUT, arm=arm, seed=seed, **(budget or {"tokens": 2 * 10**6})), row


JOBS = [
    result("dense-512", 0, 2.5, {"far_loss": 4.0}),
    result("dense-4096", 0, 2.0, {"far_loss": 3.0}),
    result("bigbird-4096", 0, 2.1, {"far_loss": 3.5}),
    result("bigbird-4096", 1, 2.3, {"far_loss": 3.0}),
    result("bigbird-16384", 0, 1.9),
    result("bigbird-4096", 0, 1.5, minutes=0.2),
    (Case(**ABOUT, arm="fixed-4096", tokens=2 * 10**6), Row(reason="out of memory")),
]


def test_arms_are_compared_with_dense_attention_of_their_length_within_a_budget():
    (by_tokens, arms), (by_minutes, alone) = arms_by_case(JOBS).items()
    assert (by_tokens.tokens, by_minutes.minutes) == (2 * 10**6, 0.2)
    names = {arm.name: arm for arm in arms}
    assert list(names) == ["dense-512", "dense-4096", "bigbird-4096", "bigbird-16384"]
    bigbird = names["bigbird-4096"]
    assert bigbird.held_out == pytest.approx(2.2) and bigbird.spread == pytest.approx(0.02**0.5)
    assert bigbird.measures == {"far_loss": 3.25}
    assert dense_for(bigbird, arms).name == "dense-4096" and dense_for(names["dense-512"], arms).name == "dense-4096"
    assert dense_for(names["bigbird-16384"], arms).name == "dense-4096", "the longest there is"
    assert dense_for(alone[0], alone) is None and alone[0].over(None) is None
    assert bigbird.over(names["dense-4096"]) == pytest.approx(2.1 / 2.0), "of the seed that both have"
    assert Arm("dense-4096", {7: JOBS[1][1]}).over(bigbird) is None


def test_a_table_says_what_jobs_came_to():
    *lines, by_tokens, by_minutes = map(list, report(JOBS))
    assert lines[0][0].startswith("dense-512, seed 0, 2,000,000 tokens: held-out loss 2.5000 after 12.0 s")
    assert lines[-1] == ["fixed-4096, seed 0, 2,000,000 tokens: out of memory"]
    (line,) = (line.split() for line in by_tokens if line.startswith("bigbird-4096"))
    assert line == ["bigbird-4096", "2", "2.2000", "0.1414", "1.0500", "12.0", "2,000,000", "1,600,000"]
    assert by_tokens[-1] == "far_loss: dense-512 4, dense-4096 3, bigbird-4096 3.25"
    assert "0.2 minutes an arm" in by_minutes[0] and by_minutes[2].split()[3:5] == ["-", "-"]
    case = Case(**ABOUT, tokens=10**12)
    arms = arms_by_case([result("continued-bslongformer-16384", 0, 12.3456, tokens=10**12)])[case]
    assert max(map(len, list(table(case, arms))[1:])) <= WIDTH


def test_a_job_that_learned_nothing_but_frequencies_says_so():
    (line,), (other,), *_, last = map(list, report([result("dense-4096", 0, 5.8), result("dense-4096", 1, 5.6)]))
    assert line.endswith(
        "; this job did not leave the unigram cross-entropy of 6.0000: its comparison says nothing; train it for "
        "longer, or with another --learning-rate"
    )
    assert "unigram" not in other
    assert last[-1] == "dense-4096: 1 of 2 jobs did not leave the unigram cross-entropy"
    assert not Row(reason="out of memory").warning


def test_rows_of_the_json_give_the_results_again():
    rows = [row for one in JOBS for row in OPERATION.record(one)]
    assert OPERATION.restore(rows) == JOBS
    with pytest.raises(ValueError, match="arm of a case"):
        OPERATION.restore([{name: value for name, value in rows[0].items() if name != "arm"} | {"arm": None}])


def test_a_table_for_a_page():
    by_tokens, by_minutes = of_train(JOBS).values()
    assert by_tokens.rows[2] == ["`bigbird-4096`", "2", "2.2000 ± 0.1414", "1.050", "0.20", "2.0", "1,600,000", "3.25"]
    assert by_minutes.rows == [["`bigbird-4096`", "1", "1.5000", "", "0.20", "2.0", "1,600,000"]]
    assert "quality, 2,000,000 tokens an arm, BERT-small, bf16" in by_tokens.in_markdown()
