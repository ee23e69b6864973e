"""Changes of `ds_sparse run` in DeepSpeed, in a process whose program has just imported it."""

from __future__ import annotations

import functools
import importlib
import sys
import time
from types import ModuleType, TracebackType
from typing import Any

from ds_sparse.config import SparseAttentionConfigError
from ds_sparse.integrations.cpu_communication import leave_out_compiled_all_reduce, let_gloo_finish_at_exit
from ds_sparse.integrations.trainer import share_batches
from ds_sparse.tools.on_import import after_import
from ds_sparse.tools.ranks import rank

HEAD_START = 10
"""Seconds that a rank waits before it ends with an error that rank 0 says: DeepSpeed's launcher ends all ranks when the
first one fails, and rank 0 may be the slower one."""


def install(deepspeed: ModuleType) -> None:
    """Makes `deepspeed.initialize` that of ds_sparse, JSON files with the block accepted everywhere, old imports work,
    a wrong block a sentence, and a compiler unnecessary on the CPU. Transformers and accelerate look `initialize` up
    when they call it, and the Trainer deals batches to the ranks of a sequence."""
    importlib.import_module("ds_sparse.integrations.deepspeed_ops")
    leave_out_compiled_all_reduce(deepspeed)
    let_gloo_finish_at_exit()
    below = deepspeed.initialize

    @functools.wraps(below)
    def initialize(*positional: Any, **keywords: Any) -> Any:
        from ds_sparse.integrations.deepspeed import initialize_program

        return initialize_program(positional, keywords, launcher_decides=True)

    initialize.below = below  # type: ignore[attr-defined]
    deepspeed.initialize = initialize  # type: ignore[attr-defined]
    after_import("transformers.trainer", "Trainer", share_batches)
    sys.excepthook = _say_wrong_blocks(sys.excepthook)


def _say_wrong_blocks(below: Any) -> Any:
    """An excepthook by which a program that ends with a wrong block (a mode that it has not registered, after all), or
    with a model that is not as the block says, says so on rank 0 alone, in sentences. Its exit status is 1, as after
    any exception."""

    @functools.wraps(below)
    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not isinstance(error, SparseAttentionConfigError):
            below(kind, error, traceback)
            return
        if rank() != 0:
            # The launcher ends the others when rank 0 fails. One that is there still has a file of its own.
            time.sleep(HEAD_START)
        print(*(f"ds_sparse: {mistake}" for mistake in error.mistakes), sep="\n", file=sys.stderr, flush=True)

    return excepthook
