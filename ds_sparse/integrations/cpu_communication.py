"""DeepSpeed's communication between processes on the CPU."""

from __future__ import annotations

from types import ModuleType


def leave_out_compiled_all_reduce(deepspeed: ModuleType) -> None:
    """On the CPU DeepSpeed would compile a shared-memory all-reduce when it first runs; without it gloo does that
    work, and no compiler is needed."""
    if deepspeed.get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
