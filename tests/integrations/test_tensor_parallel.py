import pytest
from sequence.ranks import assert_passed, quick_and_slow_cases_of


@pytest.mark.parametrize("program, case, part", quick_and_slow_cases_of("tensor_parallel.py"))
def test_models_that_ranks_share(program, case, part):
    assert_passed(program, 2, case, part=part)
