"""The flag `--deepspeed_sparse_attention`: where it can stand, and whether it is on. Imports no DeepSpeed."""

from __future__ import annotations

import os
from typing import Any

FLAG = "deepspeed_sparse_attention"

RUN_VARIABLE = "DS_SPARSE_RUN"
"""Set in what `ds_sparse run` starts on a node, to "sparse" or "dense": whether it was given the flag."""

WORKER_VARIABLE = "DS_SPARSE_WORKER"
"""Set there, too: the id of the process that is the worker, which its subprocesses are not."""

TRANSFORMER_KERNEL = "deepspeed_transformer_kernel"
KERNEL_EXCLUDED = (
    f"--{FLAG} and --{TRANSFORMER_KERNEL} are both on; DeepSpeed's transformer kernel has its own dense attention. "
    "Leave one of them away."
)


def is_on(args: Any = None, *, launcher_decides: bool = False) -> bool:
    """Tells whether the flag was given.

    Args:
        args: parsed arguments of the script. Where its parser knows the flag, they say so; where it does not, what was
            given to `ds_sparse run` counts.
        launcher_decides: the flag of `ds_sparse run` counts although the script's parser knows it and did not get it.

    Raises:
        ValueError: it is on together with `--deepspeed_transformer_kernel`.
    """
    own, launcher = getattr(args, FLAG, None), os.environ.get(RUN_VARIABLE) == "sparse"
    on = launcher if own is None else own or (launcher and launcher_decides)
    if on and getattr(args, TRANSFORMER_KERNEL, False):
        raise ValueError(KERNEL_EXCLUDED)
    return on
