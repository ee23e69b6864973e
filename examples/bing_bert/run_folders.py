"""Numbered folders of runs."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def new_run_folder(output_dir: Path) -> Path:
    """Makes the next numbered folder of `output_dir`; runs that start together each get one of their own."""
    while True:
        folder = _next(output_dir)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder


def next_run_folder(output_dir: Path) -> Path:
    """The folder that `new_run_folder` would make.

    Raises:
        OSError: as it would.
    """
    there = next(path for path in (output_dir, *output_dir.absolute().parents) if path.exists())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))
    return _next(output_dir)


def has_runs(output_dir: Path) -> bool:
    """Whether there is a run in `output_dir` to resume."""
    return bool(_numbers(output_dir))


def newest_run_folder(output_dir: Path) -> Path:
    """The numbered folder of `output_dir` with the highest number.

    Raises:
        ValueError: there is none.
    """
    numbers = _numbers(output_dir)
    if not numbers:
        raise ValueError(
            f"There is no run in {output_dir} to resume; start one without --resume, or with --resume-or-start."
        )
    return output_dir / f"{max(numbers):04d}"


def _next(output_dir: Path) -> Path:
    return output_dir / f"{max(_numbers(output_dir), default=0) + 1:04d}"


def _numbers(output_dir: Path) -> list[int]:
    return [int(path.name) for path in output_dir.glob("[0-9]*") if path.name.isdigit()]
