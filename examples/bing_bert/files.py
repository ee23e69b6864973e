"""Files that a run reads back: replaced whole, known by a checksum, and read as tensors and plain values alone."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

PIECE = 16 * 2**20

LOADING_ERRORS = (
    AssertionError, AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError,
    pickle.UnpicklingError,
)  # fmt: skip
"""Errors by which DeepSpeed stops at a file that is not as it wrote it."""


def write_atomically(path: Path, text: str) -> None:
    """Replaces a small file in one move, on the disk when this returns."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    flush(temporary)
    os.replace(temporary, path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """The SHA-256 of the SHA-256s of a file's pieces of 16 MiB, which threads take at the same time."""

    def digest(start: int) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            return hashlib.sha256(file.read(PIECE)).digest()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = pool.map(digest, range(0, path.stat().st_size, PIECE))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def wrong_with(file: Path, written: dict[str, Any]) -> str | None:
    """Says how a file differs from what was written (its `bytes` and `checksum`), or why it is not loaded; None where
    it is whole."""
    try:
        size = file.stat().st_size
        if not size and written["bytes"]:
            return "is empty"
        if size != written["bytes"]:
            return f"is damaged: it has {size:,} bytes of the {written['bytes']:,} that were written"
        if checksum(file) != written["checksum"]:
            return "is damaged: its checksum is not that of what was written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {reason(error)}"
    refused = refusal(file) if file.suffix == ".pt" else None
    return f"is not loaded: {refused}" if refused else None


@contextmanager
def plain_data_only() -> Iterator[None]:
    """Lets torch.load make tensors, plain values and what DeepSpeed keeps, and nothing else that a pickle asks for.

    PyTorch's variable holds for DeepSpeed's calls of torch.load too, which ask for whole pickles.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    of_deepspeed = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    with mock.patch.dict(os.environ), torch.serialization.safe_globals(of_deepspeed):
        os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
        os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
        yield


def refusal(file: Path) -> str | None:
    """Says why torch.load refuses a file; None if it does not. Tensors are mapped, not read: it takes a millisecond."""
    try:
        with plain_data_only():
            torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # noqa: BLE001 - a damaged file stops its reader in any way
        return why(error)
    return None


def why(error: BaseException) -> str:
    """Says in one line why torch.load stopped."""
    asked = re.search(r"GLOBAL (\S+)", str(error))
    if asked:
        return f"it asks for {asked[1]}, which is no plain data"
    detail = re.search(r"WeightsUnpickler error: (.+)", str(error))
    return detail[1] if detail else reason(error)


def reason(error: BaseException) -> str:
    """Says in one line why something failed."""
    words = str(getattr(error, "strerror", None) or error).strip()
    return words.splitlines()[0].rstrip(".") if words else type(error).__name__
