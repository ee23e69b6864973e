"""Where a step's time goes, of a trace as torch.profiler writes it on a GPU."""

import pytest
import torch

from benchmarks.models import step_profile
from benchmarks.models.step_profile import ATTENTION, EXCHANGE, IDLE, OPTIMIZER, OTHER, REDUCTION


def event(name, start, duration, category="kernel"):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}


TRACE = [
    event("void ds_sparse::(anonymous namespace)::forward<64>", 0, 1000),
    event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 1000, 500),
    event("ampere_bf16_gemm", 1400, 1000),
    event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 2000, 2000),
    event("ds_sparse bench: optimizer", 4000, 1000, "gpu_user_annotation"),
    event("multi_tensor_apply_kernel", 4000, 600),
    event("ncclDevKernel_AllGather_RING_LL", 4600, 400),
    event("aten::mm", 0, 9000, "cpu_op"),
    {"ph": "M", "name": "process_name"},
]


def test_each_moment_of_a_gpu_counts_once_and_communication_where_it_is_alone():
    parts = step_profile.shares(step_profile.intervals(TRACE, "cuda"), step_profile.COUNTED_FIRST["cuda"])
    assert parts == pytest.approx({ATTENTION: 1.0, OPTIMIZER: 1.0, OTHER: 1.0, EXCHANGE: 0.4, REDUCTION: 1.6})


def test_what_a_profile_does_not_fill_of_a_step_is_idle():
    parameter = torch.nn.Parameter(torch.randn(300, 300))
    optimizer = torch.optim.AdamW([parameter])

    def step():
        (parameter @ parameter).sum().backward()
        with step_profile.optimizer_range():
            optimizer.step()

    step()
    parts = step_profile.profile_of(step, 1e4, torch.device("cpu"))
    assert parts[OPTIMIZER] > 0 and parts[OTHER] > 0 and parts[ATTENTION] == parts[EXCHANGE] == 0
    assert sum(parts.values()) == pytest.approx(1e4) and parts[IDLE] > 9e3
