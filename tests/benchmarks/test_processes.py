"""Work in processes: apart from other tests, as each process imports what its work is in."""

import os
import time

import pytest

from benchmarks.models.processes import Failure, result_of


def work(number):
    """Work in a process: 0 comes late, 2 fails, 3 ends without a word."""
    print("not the result")
    if number == 2:
        raise RuntimeError("two is too many")
    if number == 3:
        os._exit(9)
    time.sleep(0 if number else 60)
    return number


@pytest.mark.slow("starts processes with torch")
@pytest.mark.parametrize(
    ("numbers", "seconds", "found"),
    [
        ([1, 4], 60, 1),
        ([2], 60, Failure("RuntimeError: two is too many")),
        ([0, 2], 60, Failure("RuntimeError: two is too many")),
        ([0, 3], 60, Failure("a process ended with status 9")),
        ([0], 2, Failure("no result within 2 seconds")),
    ],
)
def test_a_result_is_that_of_the_first_or_says_why_there_is_none(numbers, seconds, found):
    assert result_of(work, [(number,) for number in numbers], seconds, __name__) == found
