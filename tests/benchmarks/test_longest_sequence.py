from dataclasses import replace

import pytest

from benchmarks.models import longest_sequence, sequence_results
from benchmarks.models.longest_sequence import Bracket
from benchmarks.models.sequence_results import ALONE, Case, Row
from ds_sparse.bench.reasons import no_result_within

CASE = Case(2**18, "bigbird-64", "bf16", "cuda", 2)
ROOM = 139.0


@pytest.fixture
def looked_for():
    """looked_for(peak_of): the lengths that were tried, those that did not fit negative."""

    def look(peak_of, measured=(2**18, 2**19), seconds=60, first=None):
        bracket = Bracket(
            ROOM, {length: peak_of(length) for length in measured if peak_of(length) <= ROOM}, first=first
        )

        def attempt(seq_len, left):
            assert 0 < left <= seconds
            peak = peak_of(seq_len)
            reason = "" if peak <= ROOM else "OutOfMemoryError: CUDA out of memory."
            fitted = {} if reason else {"milliseconds": 1.0, "peak_gib": peak}
            return replace(CASE, seq_len=seq_len), Row(1, ALONE, reason=reason, is_try=True, **fitted)

        tried = longest_sequence.tries(bracket, attempt, seconds)
        return [case.seq_len if row.milliseconds else -case.seq_len for case, row in tried]

    return look


def vars_of(case):
    return list(vars(case).values())[1:]


@pytest.mark.parametrize("most", [2**19 + 1024, 700_000, 3_000_000, 9_000_000])
@pytest.mark.parametrize("constant", [0.0, 5.0])
def test_the_longest_is_found_to_about_a_sixteenth(looked_for, most, constant):
    tried = looked_for(lambda length: constant + (ROOM - constant) * length / most)
    longest = max([2**19, *(length for length in tried if length > 0)])
    assert longest <= most <= min(-length for length in tried if length < 0)
    assert min(-length for length in tried if length < 0) <= longest * 1.07
    assert len(tried) <= 4 and len(set(tried)) == len(tried)


def test_memory_that_grows_in_another_way_takes_more_tries(looked_for):
    tried = looked_for(lambda length: ROOM * (length / 2_000_000) ** 2)
    fitted, failed = [x for x in tried if x > 0], [-x for x in tried if x < 0]
    assert max(fitted) <= 2_000_000 <= min(failed) <= max(fitted) * 1.07 and len(tried) <= 10


def test_where_nothing_fits_or_time_is_over_nothing_is_tried(looked_for):
    assert looked_for(lambda length: 1e3) == []
    assert looked_for(lambda length: length / 1e6, seconds=0) == []


def test_where_nothing_is_known_it_begins_with_a_length_and_halves_what_does_not_fit(looked_for):
    tried = looked_for(lambda length: ROOM * length / 10_000, measured=(), first=2**15)
    assert tried[:3] == [-(2**15), -(2**14), 2**13] and max(tried) <= 10_000 <= min(-x for x in tried if x < 0)
    assert looked_for(lambda length: 1e3, measured=(), first=4096) == [-4096, -2048, -1024]


def test_what_takes_too_long_ends_the_search_and_is_not_too_long_a_sequence():
    slow = Row(1, ALONE, reason=no_result_within(20), is_try=True)
    bracket = Bracket(ROOM, {2**18: 10.0})
    tried = list(longest_sequence.tries(bracket, lambda seq_len, left: (replace(CASE, seq_len=seq_len), slow), 60))
    assert [case.seq_len for case, _ in tried] == [2**19]
    fitted = CASE, Row(1, ALONE, 10.0, peak_gib=10.0)
    assert longest_sequence.longest([fitted, *tried]) == (*fitted, None)


def test_the_longest_is_said_with_the_shortest_that_did_not_fit():
    rows = [
        (CASE, Row(1, ALONE, 10.0, 1.0, loss=1.0, peak_gib=9.0)),
        (Case(2**20, *vars_of(CASE)), Row(1, ALONE, 40.0, 1.0, loss=1.0, is_try=True)),
        (Case(2**21, *vars_of(CASE)), Row(1, ALONE, reason="out of memory", is_try=True)),
        (CASE, Row(2, "sequence", 5.0, 2.0, loss=1.0)),
    ]
    ((case, row, failed),) = sequence_results.longest_of(rows)
    assert (case.seq_len, row.milliseconds, failed) == (2**20, 40.0, 2**21)
    printed = [list(lines) for lines in sequence_results.report((case, [row]) for case, row in rows)]
    assert printed[-1] == [
        "the longest that fits, 1 rank, bigbird-64, bf16, ZeRO 2, activations kept: at least 1,048,576 tokens, where "
        "the search's time was over; 2,097,152 do not fit"
    ]
    assert len(printed[-2]) == 3  # a heading, and what was no try


def test_a_bracket_of_one_length_doubles_and_halves():
    bracket = Bracket(ROOM, {1 << 20: 10.0})
    assert bracket.next_length() == 1 << 21
    bracket.failed.append(1 << 21)
    assert bracket.next_length() == 3 << 19
