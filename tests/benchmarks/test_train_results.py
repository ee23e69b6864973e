"""Results of training: what can be compared, lines, rows of the JSON, and tables for pages."""

from dataclasses import replace

import pytest

from benchmarks.commands.train import OPERATION
from benchmarks.train.results import (
    Answered,
    Arm,
    Case,
    Point,
    Row,
    arms_by_case,
    dense_for,
    report,
    tables_of,
)
from ds_sparse.bench.runs import WIDTH

CASE = Case("quality", "small", "bf16", "cuda", False, 32768, 7e-4, 4096)


def result(arm, seed, held_out, measures=None, **budget):
    curve = [Point(6.0, 10**6, held_out + 1), Point(12.0, 2 * 10**6, held_out)]
    row = Row(20.0, held_out, 6.0, curve, 15.0, 1.6e6, measures or {}, 9, "00", "a GPU", ["abc"], "2026-11-25")
    return replace(CASE, arm=arm, seed=seed, **(budget or {"tokens": 2 * 10**6})), [row]


JOBS = [
    result("dense-512", 0, 2.5, {"far_loss": 4.0}),
    result("dense-4096", 0, 2.0, {"far_loss": 3.0}),
    result("bigbird-4096", 0, 2.1, {"far_loss": 3.5}),
    result("bigbird-4096", 1, 2.3, {"far_loss": 3.0}),
    result("bigbird-16384", 0, 1.9),
    result("bigbird-4096", 0, 1.5, minutes=0.2),
    (replace(CASE, arm="fixed-4096", tokens=2 * 10**6), [Row(reason="out of memory")]),
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
    assert Arm("dense-4096", {7: JOBS[1][1][0]}).over(bigbird) is None


def test_a_table_says_what_jobs_came_to():
    *lines, by_tokens, by_minutes = map(list, report(JOBS))
    assert lines[0][0].startswith("dense-512, seed 0, 2,000,000 tokens: held-out loss 2.5000 after 12.0 s")
    assert lines[-1] == ["fixed-4096, seed 0, 2,000,000 tokens: out of memory"]
    (line,) = (line.split() for line in by_tokens if line.startswith("`bigbird-4096`"))
    assert line == ["`bigbird-4096`", "2", "2.2000", "±", "0.1414", "1.050", "0.20", "2.0", "1,600,000"]
    assert by_tokens[-1] == "far loss: `dense-512` 4, `dense-4096` 3, `bigbird-4096` 3.25"
    assert "0.2 minutes an arm" in by_minutes[0] and "of dense" in by_tokens[1] and "of dense" not in by_minutes[1]
    measures = dict.fromkeys(("accuracy", "far_tokens", "far_loss"), 0.1234)
    long = [result("continued-bslongformer-16384", seed, 12.3456, measures, tokens=10**12) for seed in (0, 1)]
    *_, lines = map(list, report(long))
    assert max(map(len, lines[1:])) <= WIDTH


def test_a_job_that_learned_nothing_but_frequencies_says_so():
    (line,), (other,), *_, last = map(list, report([result("dense-4096", 0, 5.8), result("dense-4096", 1, 5.6)]))
    assert line.endswith(
        "; this job did not leave the unigram cross-entropy of 6.0000: its comparison says nothing; train it for "
        "longer, or with another --learning-rate"
    )
    assert "unigram" not in other
    assert last[-1] == "dense-4096: 1 of 2 jobs did not leave the unigram cross-entropy"
    assert not Row(reason="out of memory").warning
    _, (row,) = result("dense-4096", 0, 6.5)
    assert row.warning and not replace(row, curve=[Point(3.0, 5 * 10**5, 5.0), *row.curve]).warning, "it rose again"
    assert replace(row, curve=[Point(3.0, 5 * 10**5, 1.0, "other labels"), *row.curve]).warning


def test_rows_of_the_json_give_the_results_again():
    rows = [row for one in JOBS for row in OPERATION.record(one)]
    assert OPERATION.restore(rows) == JOBS
    with pytest.raises(ValueError, match="arm of a case"):
        OPERATION.restore([{name: value for name, value in rows[0].items() if name != "arm"} | {"arm": None}])


def shown(arm, seed, whole, removed):
    case, (row,) = result(arm, seed, 2.0)
    answered = [Answered(0, 4096, 50, whole - 50, "whole"), Answered(0, 8192, 50, 50, "whole")]
    answered += [Answered(0, 4096, 50, 0, "far part removed"), Answered(0, 8192, 50, removed, "far part removed")]
    return replace(case, experiment="documents"), [replace(row, answered=answered)]


def test_files_told_are_compared_with_the_shortest_dense_arm():
    jobs = [shown("dense-512", 0, 60, 50), shown("dense-8192", 0, 80, 40)]
    jobs += [shown("dense-512", 1, 64, 50), shown("dense-8192", 1, 90, 44), shown("dense-8192", 2, 70, 30)]
    _, table = tables_of(jobs).values()
    assert table.heading == ["arm", "seeds", "whole", "far part removed", "points"]
    assert table.rows == [
        ["`dense-512`", "2", "62.0 ± 2.8", "50.0 ± 0.0", ""],
        ["`dense-8192`", "3", "80.0 ± 10.0", "38.0 ± 7.2", "+23.0 ± 4.2"],
    ]
    (note,) = table.notes
    assert note.startswith("percent of 100 held-out files") and note.endswith("50 of 8,192")
    assert "is shown, and points over dense-512; files" in note
    *_, last = map(list, report(jobs))
    assert last[-1].split() == "`dense-8192` 3 80.0 ± 10.0 38.0 ± 7.2 +23.0 ± 4.2".split()


@pytest.mark.parametrize("arm", ["dense-512", "bigbird-8192"])
def test_files_told_have_no_points_without_two_arms_to_compare(arm):
    *_, table = tables_of([shown(arm, 0, 60, 50)]).values()
    assert (table.heading, table.rows) == (
        ["arm", "seeds", "whole", "far part removed"],
        [[f"`{arm}`", "1", "60.0", "50.0"]],
    )
    assert "is shown; files by tokens" in table.notes[0]
    *_, last = map(list, report([shown(arm, 0, 60, 50)]))
    assert last[-2].split()[-3:] == ["far", "part", "removed"]


def test_a_table_for_a_page():
    by_tokens, by_minutes = tables_of(JOBS).values()
    assert by_tokens.rows[2] == ["`bigbird-4096`", "2", "2.2000 ± 0.1414", "1.050", "0.20", "2.0", "1,600,000", "3.25"]
    assert by_minutes.heading == ["arm", "seeds", "held-out loss", "minutes", "million tokens", "tokens/s"]
    assert by_minutes.rows == [["`bigbird-4096`", "1", "1.5000", "0.20", "2.0", "1,600,000"]], "no dense arm"
    assert "quality, 2,000,000 tokens an arm, BERT-small, bf16" in by_tokens.in_markdown()
