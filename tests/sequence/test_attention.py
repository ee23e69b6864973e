import pytest
import torch
from sequence.ranks import assert_passed, cases_of, reports

from ds_sparse import FixedSparsityConfig, SequenceParallelAttention


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", cases_of("core.py"))
def test_sequence_parallel_attention_is_that_of_one_rank(case, ranks):
    assert_passed("core.py", ranks, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases_of("core.py", "cuda"))
def test_sequence_parallel_attention_of_two_gpus_is_that_of_one(case):
    assert_passed("core.py", 2, case, "cuda")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", cases_of("halo.py"))
def test_sequence_parallel_attention_that_exchanges_keys_is_that_of_one_rank(case, ranks):
    assert_passed("halo.py", ranks, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases_of("halo.py", "cuda"))
def test_sequence_parallel_attention_of_two_gpus_that_exchange_keys_is_that_of_one(case):
    assert_passed("halo.py", 2, case, "cuda")


def test_sequence_parallel_ranks_say_once_that_they_exchange_keys():
    line = "ds_sparse: the 2 ranks of a sequence send each other the keys that their own queries see."
    printed = reports("halo.py", 2, "cpu")[""]
    assert printed.count(line) == 1 and "do not deal evenly" not in printed


def test_sequence_parallel_a_deal_that_is_not_even_is_printed_once():
    printed = reports("core.py", 4, "cpu")[""]
    line = "do not deal evenly to 4 ranks: they have 2, 1, 1, 1 heads with 126, 63, 63, 63 live blocks"
    assert printed.count(line) == 1, printed


def test_sequence_parallel_attention_without_other_ranks_says_what_to_call(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # tests before may leave a group of one
    with pytest.raises(RuntimeError, match="torch.distributed does not run.*init_process_group"):
        SequenceParallelAttention(FixedSparsityConfig(num_heads=4))
