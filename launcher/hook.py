"""What `ds_sparse run` changes in DeepSpeed, in a process whose program has just imported it."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any


def install(deepspeed: ModuleType) -> None:
    """Makes `deepspeed.initialize` that of ds_sparse, JSON files with the block accepted everywhere, old imports work,
    and a compiler unnecessary on the CPU. Transformers and accelerate look `initialize` up when they call it."""
    importlib.import_module("ds_sparse.integrations.deepspeed_ops")
    if deepspeed.get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    below = deepspeed.initialize

    @functools.wraps(below)
    def initialize(*positional: Any, **keywords: Any):
        from ds_sparse.integrations.deepspeed import initialize_unchanged_program

        return initialize_unchanged_program(*positional, **keywords)

    initialize.below = below
    deepspeed.initialize = initialize
