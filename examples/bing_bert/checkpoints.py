"""Folders of runs, checkpoints that a kill cannot spoil, and resume that continues exactly."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

KEPT = 2
STATE = "state.json"
_OLDER = "write the name of an older checkpoint beside it into {}."


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


def newest_run_folder(output_dir: Path) -> Path:
    """The numbered folder of `output_dir` with the highest number.

    Raises:
        ValueError: there is none.
    """
    numbers = _numbers(output_dir)
    if not numbers:
        raise ValueError(f"There is no run in {output_dir} to resume; start one without --resume.")
    return output_dir / f"{max(numbers):04d}"


def _numbers(output_dir: Path) -> list[int]:
    return [int(path.name) for path in output_dir.glob("[0-9]*") if path.name.isdigit()]


def save(engine: Any, folder: Path, step: int, terms: dict[str, Any], position: dict[str, Any]) -> None:
    """Writes checkpoint `step{step}` under `folder` on all ranks and then makes it the latest one.

    The name of the latest checkpoint is replaced in one move after everything else is on disk, so a kill at any moment
    leaves the one before it in force. The last two are kept; what a kill left unfinished is removed.

    Args:
        engine: the DeepSpeed engine.
        terms: what has to be equal for the run to continue; plain JSON values, the same on every rank.
        position: where the run is; plain JSON values.
    """
    tag = f"step{step}"
    if dist.get_rank() == 0:
        in_force = latest(folder)
        _remove(path for number, path in _checkpoints(folder) if in_force is None or number > _number(in_force))
    dist.barrier()
    engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
    torch.save(_random_states(), folder / tag / f"random_states_rank{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / tag / STATE).write_text(json.dumps({"terms": terms, "position": position}))
        for path in (folder / tag).iterdir():
            _flush(path)
        write_atomically(folder / "latest", tag)
        _remove(path for _, path in _checkpoints(folder)[:-KEPT])
    dist.barrier()


def latest(folder: Path) -> str | None:
    """The tag of the newest complete checkpoint, None where there is none."""
    file = folder / "latest"
    return file.read_text().strip() if file.exists() else None


def read_position(folder: Path, terms: dict[str, Any]) -> dict[str, Any] | None:
    """The position given to `save` with the latest checkpoint; None where there is no checkpoint.

    Args:
        terms: those of this run; a run only continues under the terms it was started with.

    Raises:
        ValueError: the checkpoint was made under other terms, or its files are gone.
    """
    tag = latest(folder)
    if tag is None:
        return None
    try:
        state = json.loads((folder / tag / STATE).read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename} is missing; {_OLDER.format(folder / 'latest')}") from error
    old = state["terms"]
    differing = [
        f"{name} was {old.get(name)!r} and is {terms[name]!r}" for name in terms if old.get(name) != terms[name]
    ]
    if differing:
        raise ValueError(
            f"The checkpoint {folder / tag} cannot be continued exactly: {'; '.join(differing)}. Give the old "
            "values, or start a new run without --resume."
        )
    return state["position"]


def load(engine: Any, folder: Path) -> None:
    """Loads the latest checkpoint: weights, layouts, optimizer, schedule, and the random states of this rank.

    Raises:
        ValueError: DeepSpeed finds nothing to load under its name.
    """
    tag = latest(folder)
    path, _ = engine.load_checkpoint(str(folder), tag=tag)
    if path is None:
        raise ValueError(f"DeepSpeed found no checkpoint {folder / tag}; {_OLDER.format(folder / 'latest')}")
    _restore_random_states(torch.load(folder / tag / f"random_states_rank{dist.get_rank()}.pt", weights_only=False))


def write_atomically(path: Path, text: str) -> None:
    """Replaces a small file in one move."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    _flush(temporary)
    os.replace(temporary, path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Steps and folders of all checkpoints, finished or not, the newest last."""
    tags = [path for path in folder.glob("step*") if path.name.removeprefix("step").isdigit()]
    return sorted((_number(path.name), path) for path in tags)


def _number(tag: str) -> int:
    return int(tag.removeprefix("step"))


def _remove(folders: Iterable[Path]) -> None:
    for path in folders:
        shutil.rmtree(path)


def _random_states() -> dict[str, Any]:
    states = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
