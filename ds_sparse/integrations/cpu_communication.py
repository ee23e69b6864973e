"""DeepSpeed's communication between processes on the CPU."""

from __future__ import annotations

import atexit
import time
from functools import cache
from types import ModuleType

from torch import distributed

from ..tools.ranks import can_talk

PAUSE = 0.1
"""Seconds. A free core needs microseconds; ranks may share one."""


def leave_out_compiled_all_reduce(deepspeed: ModuleType) -> None:
    """On the CPU DeepSpeed would compile a shared-memory all-reduce when it first runs; without it gloo does that
    work, and no compiler is needed."""
    if deepspeed.get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


@cache
def let_gloo_finish_at_exit() -> None:
    """A pause at the end of the program, in which gloo's threads let go of the last tensors. Asked for twice, one.

    A thread that does so when the interpreter has ended aborts the process after its last line ("terminate called
    without an active exception"), and a program that ended well looks as if it had failed. Gloo has no call that waits
    for them; those of a group that was ended, and that nothing refers to, have ended with it.
    """
    atexit.register(_pause)


def _pause() -> None:
    if can_talk() and distributed.get_backend() == "gloo":
        time.sleep(PAUSE)
