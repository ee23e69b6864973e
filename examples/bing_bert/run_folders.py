"""Numbered folders of runs."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from report import on_rank_0


def run_folder(output_dir: Path, resume: bool = False, or_start: bool = False, makes: bool = True) -> Path:
    """The newest run of `output_dir` to resume, or the next folder, the same on every rank.

    Args:
        resume: take the newest run.
        or_start: with `resume`, take the next folder where there is no run.
        makes: make the next folder; runs that start together each get one of their own.

    Raises:
        ValueError: there is nothing to resume, or the folder cannot be made.
    """

    def chosen() -> Path:
        numbers = [int(path.name) for path in output_dir.glob("[0-9]*") if path.name.isdigit()]
        if resume and numbers:
            return output_dir / f"{max(numbers):04d}"
        if resume and not or_start:
            raise ValueError(
                f"There is no run in {output_dir} to resume; start one without --resume, or with --resume-or-start."
            )
        folder = output_dir / f"{max(numbers, default=0) + 1:04d}"
        if not makes:
            _check_can_be_made(output_dir)
            return folder
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            return chosen()
        return folder

    try:
        return on_rank_0(chosen)
    except OSError as error:
        raise ValueError(f"--output-dir {output_dir} cannot be used: {error.strerror}; give another folder.") from error


def _check_can_be_made(output_dir: Path) -> None:
    there = next(path for path in (output_dir, *output_dir.absolute().parents) if path.exists())
    wrong = errno.ENOTDIR if not there.is_dir() else 0 if os.access(there, os.W_OK | os.X_OK) else errno.EACCES
    if wrong:
        raise OSError(wrong, os.strerror(wrong), str(there))
