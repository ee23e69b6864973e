"""Numbered folders of runs."""

from __future__ import annotations

from pathlib import Path


def new_run_folder(output_dir: Path) -> Path:
    """Makes the next numbered folder of `output_dir`; runs that start together each get one of their own."""
    number = max(_numbers(output_dir), default=0) + 1
    while True:
        folder = output_dir / f"{number:04d}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder


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


def _numbers(output_dir: Path) -> list[int]:
    return [int(path.name) for path in output_dir.glob("[0-9]*") if path.name.isdigit()]
