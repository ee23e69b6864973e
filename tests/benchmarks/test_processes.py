"""Work in processes: apart from other tests, as each process imports what its work is in."""

import queue
from types import SimpleNamespace

import pytest

from benchmarks.models.processes import FORKSERVER, Failure, next_result, results_of
from benchmarks.models.reasons import took_too_long


def count(number):
    """Work in a process: counts up, and fails at 2."""
    for i in range(number):
        if i == 2:
            raise RuntimeError("two is too many")
        print("not among the results")
        yield i


def test_results_come_one_by_one_until_one_fails():
    found = list(results_of(count, [(3,), (1,)], [60] * 5, FORKSERVER))
    assert found == [0, 1, Failure("RuntimeError: two is too many")]


def test_no_more_results_are_waited_for_than_asked_for():
    assert list(results_of(count, [(2,)], [60], FORKSERVER)) == [0]


@pytest.mark.slow("starts a process with torch")
def test_a_process_that_ends_without_a_word_is_named():
    broken, done = SimpleNamespace(exitcode=-9), SimpleNamespace(exitcode=0)
    assert next_result(queue.Queue(), [done, broken], 60) == Failure("a process ended with status -9")
    # One that is done has nothing more to say than the first, which may still be at work.
    assert took_too_long(next_result(queue.Queue(), [done], 0.1).reason)
