import pytest
from sequence.ranks import assert_passed, cases_of


@pytest.mark.parametrize("case", cases_of("tensor_parallel.py"))
def test_models_that_ranks_share(case):
    assert_passed("tensor_parallel.py", 2, case)
