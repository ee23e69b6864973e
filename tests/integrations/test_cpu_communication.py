"""Programs of ranks on the CPU, and how they end."""

import subprocess
import sys

import pytest
from helpers import without_launcher

LAST = """
import torch
import ds_sparse

ds_sparse.init_distributed(verbose=False)
attention = ds_sparse.SequenceParallelAttention(ds_sparse.FixedSparsityConfig(num_heads=1))  # holds the group
tensors = [torch.zeros({size}), torch.zeros({size})]
torch.distributed.all_to_all_single(*tensors, async_op=True)
del tensors
"""


SLEEP = """
import atexit, time
import ds_sparse

time.sleep = lambda seconds: print("pause of", seconds)
ds_sparse.init_distributed(verbose=False)
ds_sparse.init_distributed(verbose=False)
"""


def run(program):
    return subprocess.run(
        [sys.executable, "-c", program],
        env=without_launcher() | {"DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.parametrize("size", [pytest.param(100_000, marks=pytest.mark.slow("a process; as with more")), 1_000_000])
def test_a_program_may_end_while_gloo_still_works(size):
    done = run(LAST.format(size=size) + "print('the last line')")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("the last line\n")


@pytest.mark.slow("two processes; a quick test has a program that ends so")
def test_the_end_of_a_program_waits_once_and_not_without_a_group():
    printed = run(SLEEP).stdout
    assert printed.splitlines()[-1:] == ["pause of 0.1"] and printed.count("pause") == 1
    assert "pause" not in run(SLEEP + "import torch\ntorch.distributed.destroy_process_group()").stdout
