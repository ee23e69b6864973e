"""Checkpoints that a kill cannot spoil, and resume that continues exactly."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

KEPT = 2
STATE = "state.json"


def save(engine: Any, folder: Path, step: int, state: dict[str, Any]) -> None:
    """Writes checkpoint `step{step}` under `folder` on all ranks and then makes it the latest one.

    The name of the latest checkpoint is replaced in one move after everything else is on disk, so a kill at any moment
    leaves the one before it in force. The last two are kept.

    Args:
        engine: the DeepSpeed engine.
        state: where the run is and the terms it runs under; plain JSON values, the same on every rank.
    """
    tag = f"step{step}"
    engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
    torch.save(_random_states(), folder / tag / f"random_states_rank{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / tag / STATE).write_text(json.dumps(state))
        for path in (folder / tag).iterdir():
            _flush(path)
        write_atomically(folder / "latest", tag)
        _drop_all_but_newest(folder, KEPT)
    dist.barrier()


def latest(folder: Path) -> str | None:
    """The tag of the newest complete checkpoint, None where there is none."""
    file = folder / "latest"
    return file.read_text().strip() if file.exists() else None


def read_state(folder: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """The state given to `save` with the latest checkpoint.

    Args:
        expected: the terms of this run; a run only continues under the terms it was started with.

    Raises:
        ValueError: there is no checkpoint, or it was made under other terms.
    """
    tag = latest(folder)
    if tag is None:
        raise ValueError(f"There is no complete checkpoint in {folder}; start a new run without --resume.")
    state = json.loads((folder / tag / STATE).read_text())
    differing = [
        f"{name} was {state.get(name)!r} and is {value!r}" for name, value in expected.items() if state.get(name) != value
    ]
    if differing:
        raise ValueError(
            f"The checkpoint {folder / tag} cannot be continued exactly: {'; '.join(differing)}. Give the old values, or start "
            "a new run without --resume."
        )
    return state


def load(engine: Any, folder: Path) -> None:
    """Loads the latest checkpoint: weights, layouts, optimizer, schedule, and the random states of this rank.

    Raises:
        ValueError: DeepSpeed finds nothing to load under its name.
    """
    tag = latest(folder)
    path, _ = engine.load_checkpoint(str(folder), tag=tag)
    if path is None:
        raise ValueError(f"DeepSpeed found no checkpoint {folder / tag}; write the name of an older one into {folder / 'latest'}.")
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


def _drop_all_but_newest(folder: Path, count: int) -> None:
    newest = int(latest(folder).removeprefix("step"))
    complete = sorted(
        (int(path.name.removeprefix("step")), path) for path in folder.glob("step*") if path.name.removeprefix("step").isdigit()
    )
    older = [path for step, path in complete if step <= newest]
    abandoned = [path for step, path in complete if step > newest]
    for path in older[:-count] + abandoned:
        shutil.rmtree(path)


def _random_states() -> dict[str, Any]:
    states = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
