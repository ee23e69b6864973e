"""What can never fit is refused in words."""

import pytest
import torch

from ds_sparse.tools import memory
from ds_sparse.tools.memory import machine_memory, refuse_too_large

CPU = torch.device("cpu")


def test_what_is_larger_than_all_memory_is_refused(monkeypatch: pytest.MonkeyPatch):
    refuse_too_large(lambda: "It", machine_memory(), CPU, "take less")
    monkeypatch.setattr(memory, "machine_memory", lambda: 8 << 30)
    with pytest.raises(MemoryError, match="^It takes 2,048 GiB, and this machine has 8 GiB; take less.$"):
        refuse_too_large(lambda: "It", 2 << 40, CPU, "take less")
    refuse_too_large(lambda: "It", 2 << 40, torch.device("meta"), "take less")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_on_a_gpu_it_is_the_gpus_memory_that_counts():
    with pytest.raises(MemoryError, match="^It takes 1,048,576 GiB, and cuda:0 has .* GiB; take less.$"):
        refuse_too_large(lambda: "It", 1 << 50, torch.device("cuda:0"), "take less")
