import pytest
from sequence.ranks import assert_passed, quick_and_slow_cases_of


@pytest.mark.parametrize("case, part", quick_and_slow_cases_of("tensor_parallel.py"))
def test_models_that_ranks_share(case, part):
    assert_passed("tensor_parallel.py", 2, case, part=part)
