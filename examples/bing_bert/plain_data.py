"""What a run reads back of what it wrote: tensors and plain values. A pickle that asks for more is refused, not run."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from files import reason

# What DeepSpeed's files hold beside tensors and plain values, whatever the ZeRO stage and the precision.
_DEEPSPEED = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]

LOADING_ERRORS = (
    AssertionError, AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError,
    pickle.UnpicklingError,
)  # fmt: skip
"""What stops DeepSpeed from reading a file that is not as it wrote it."""


@contextmanager
def plain_data_only() -> Iterator[None]:
    """Lets torch.load make tensors, plain values and what DeepSpeed keeps, and nothing else that a pickle asks for.

    The variable of PyTorch's holds for DeepSpeed's calls of torch.load too, which ask for whole pickles.
    """
    names = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ[names[0]] = "1"
    try:
        with torch.serialization.safe_globals(_DEEPSPEED):
            yield
    finally:
        del os.environ[names[0]]
        os.environ.update(before)


def refusal(file: Path) -> str | None:
    """Why torch.load refuses a file, None if it does not. Tensors are mapped, not read, so it takes a millisecond."""
    try:
        with plain_data_only():
            torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # noqa: BLE001 - a damaged file stops its reader in any way
        return why(error)
    return None


def why(error: BaseException) -> str:
    """Why torch.load stopped, in one line."""
    asked = re.search(r"GLOBAL (\S+)", str(error))
    if asked:
        return f"it asks for {asked[1]}, which is no plain data"
    detail = re.search(r"WeightsUnpickler error: (.+)", str(error))
    return detail[1] if detail else reason(error)
