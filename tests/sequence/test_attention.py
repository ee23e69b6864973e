import pytest
import torch
from sequence.ranks import assert_passed, cases_of, quick_and_slow_cases_of, reports

from ds_sparse import FixedSparsityConfig, SequenceParallelAttention

PROGRAMS = ("core.py", "halo.py")  # ranks exchange heads, and keys


@pytest.mark.parametrize("program, case, part", quick_and_slow_cases_of(*PROGRAMS))
def test_sequence_parallel_attention_is_that_of_one_rank(program, case, part):
    assert_passed(program, 2, case, part=part)


@pytest.mark.slow("the same with more ranks")
@pytest.mark.parametrize("program, case", [(x, case) for x in PROGRAMS for case in cases_of(x)])
def test_sequence_parallel_attention_of_four_ranks_is_that_of_one(program, case):
    assert_passed(program, 4, case)


@pytest.mark.gpu
@pytest.mark.parametrize("program, case", [(x, case) for x in PROGRAMS for case in cases_of(x, "cuda")])
def test_sequence_parallel_attention_of_two_gpus_is_that_of_one(program, case):
    assert_passed(program, 2, case, "cuda")


def test_sequence_parallel_ranks_say_once_that_they_exchange_keys():
    line = "ds_sparse: the 2 ranks of a sequence send each other the keys that their own queries see."
    printed = reports("halo.py", 2, "cpu", "quick")[""]
    assert printed.count(line) == 1 and "do not deal evenly" not in printed


@pytest.mark.slow("of four ranks")
def test_sequence_parallel_a_deal_that_is_not_even_is_printed_once():
    printed = reports("core.py", 4, "cpu")[""]
    line = "do not deal evenly to 4 ranks: they have 2, 1, 1, 1 heads with 126, 63, 63, 63 live blocks"
    assert printed.count(line) == 1, printed


def test_sequence_parallel_attention_without_other_ranks_says_what_to_call(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # tests before may leave a group of one
    with pytest.raises(RuntimeError, match="torch.distributed does not run.*init_process_group"):
        SequenceParallelAttention(FixedSparsityConfig(num_heads=4))
