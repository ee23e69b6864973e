"""Checkpoints that a kill, a full disk or a damaged file cannot spoil, and resume that continues exactly.

A checkpoint is a folder, `step40`, or `step40.1` where that name is taken: nothing is written over. Its last file is
`state.json`, which lists the size and the checksum of all others; then `latest` is moved to it. `find` verifies what
`latest` names, and takes the newest whole checkpoint beside it where that is damaged. `load` takes it on any number of
ranks.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

import universal
from files import LOADING_ERRORS, checksum, flush, plain_data_only, reason, why, write_atomically, wrong_with
from report import on_rank_0, say

KEPT = 2
STATE = "state.json"
_TAG = re.compile(r"step(\d+)(?:\.(\d+))?")
_OWNER = re.compile(r"zero_pp_rank_(\d+)")
_WAY_OUT = "put back a copy, or start a new run without --resume."


class Checkpoint(NamedTuple):
    path: Path
    """Its folder, in that of all checkpoints of the run."""
    state: dict[str, Any]
    """The `terms` and the `position` that were given to `save`, and the number of `ranks` that wrote it."""
    damaged: list[Path]
    """Checkpoints that would have come before this one; `load` sets them aside."""


def save(engine: Any, folder: Path, step: int, terms: dict[str, Any], position: dict[str, Any]) -> None:
    """Writes a new checkpoint of `step` under `folder` on all ranks and then makes it the latest one.

    The name of the latest checkpoint is replaced in one move after everything else is on disk, so a kill at any moment
    leaves the one before it in force. The last two are kept; what a kill left unfinished is removed.

    Args:
        engine: the DeepSpeed engine.
        terms: what has to be equal for the run to continue; plain JSON values, the same on every rank.
        position: where the run is; plain JSON values.

    Raises:
        ValueError: a file cannot be written; the checkpoint before it stays in force.
    """
    path, files = folder / f"step{step}", {}
    try:
        path = on_rank_0(lambda: _begin(folder, step))
        engine.save_checkpoint(str(folder), tag=path.name, save_latest=False)
        mine = [file for file in sorted(path.rglob("*")) if file.is_file() and _is_mine(file.name)]
        sums = {}
        for file in mine:
            sums[file.relative_to(path).as_posix()] = {"bytes": file.stat().st_size, "checksum": checksum(file)}
            flush(file)
        for of_rank in _from_all(sums):
            files |= of_rank
        state = {"terms": terms, "position": position, "ranks": dist.get_world_size(), "files": files}
        on_rank_0(lambda: _put_in_force(path, state))
    except (OSError, RuntimeError) as error:  # the second: torch.save on a full disk, or another rank that ended
        words = reason(error)
        words = f"PyTorch stopped ({words})" if isinstance(error, RuntimeError) else words
        raise ValueError(_give_up(path, words)) from error


def _begin(folder: Path, step: int) -> Path:
    """Makes the folder of a new checkpoint, after removing what a kill left unfinished."""
    in_force, _ = _latest(folder)
    universal.remove_left_over(folder)
    for path in _all(folder):
        if in_force is None or _order(path) > _order(in_force):
            shutil.rmtree(path)
    names = itertools.chain([f"step{step}"], (f"step{step}.{again}" for again in itertools.count(1)))
    name = next(name for name in names if not any((folder / f"{name}{end}").exists() for end in ("", ".damaged")))
    (folder / name).mkdir()
    return folder / name


def _put_in_force(path: Path, state: dict[str, Any]) -> None:
    write_atomically(path / STATE, sealed(state))
    flush(path.parent)
    write_atomically(path.parent / "latest", path.name)
    for old in _all(path.parent)[:-KEPT]:
        shutil.rmtree(old)


def _give_up(path: Path, words: str) -> str:
    """Removes what there is of a checkpoint that cannot be written, and says so."""
    free = shutil.disk_usage(path.parent).free / 2**30
    in_force, _ = _latest(path.parent)
    if dist.get_rank() == 0 and in_force != path:
        shutil.rmtree(path, ignore_errors=True)
    left = f"{in_force.name} stays in force" if in_force else "there is none before it"
    return (
        f"The checkpoint {path} cannot be written: {words} ({free:.2f} GiB were free there); {left}. Make room, then "
        "continue with --resume."
    )


def find(folder: Path, terms: dict[str, Any]) -> Checkpoint | None:
    """The checkpoint to continue from, verified, the same on every rank; None where there is none yet.

    It is the one that `latest` names. Where that is damaged, it is the newest whole one, and lines say what is wrong
    with the others. Each rank verifies its own files.

    Args:
        terms: those of this run; a run only continues under the terms it was started with.

    Raises:
        ValueError: the checkpoint was made under other terms, or none is whole.
    """
    paths, remarks = on_rank_0(lambda: _candidates(folder))
    for tried, path in enumerate(paths):
        state, damage = on_rank_0(lambda file=path / STATE: read_state(file))
        if damage is None:
            _check_terms(path, state["terms"], terms)
            damage = next(filter(None, _from_all(_damage(path, state))), None)
        if damage is not None:
            remarks.append(damage)
            continue
        for remark in remarks:
            say(f"{remark}.")
        if remarks and path != on_rank_0(lambda: _latest(folder)[0]):
            lost = _order(paths[0])[0] - _order(path)[0]
            again = f"; the {lost} steps after it are trained again" if lost > 0 else ""
            say(f"{path} is whole and is taken instead{again}.")
        return Checkpoint(path, state, paths[:tried])
    if remarks:
        raise ValueError(f"{'. '.join(remarks)}. No checkpoint in {folder} is whole; {_WAY_OUT}")
    return None


def _candidates(folder: Path) -> tuple[list[Path], list[str]]:
    """The checkpoints to try, the one in force first and then the newest, and what there is to say before."""
    in_force, wrong = _latest(folder)
    finished = [path for path in reversed(_all(folder)) if (path / STATE).exists()]
    if in_force is None:
        return finished, [wrong] if finished or (folder / "latest").exists() else []
    newer = [path.name for path in finished if _order(path) > _order(in_force)]
    goes = f"names {in_force.name}; {newer[0]} is newer, and goes when the next checkpoint is written" if newer else ""
    others = [path for path in finished if path != in_force]
    return [in_force, *others], [f"{folder / 'latest'} {goes}"] if newer else []


def _latest(folder: Path) -> tuple[Path | None, str]:
    """The checkpoint that is in force, or what is wrong with the file that names it."""
    file = folder / "latest"
    try:
        tag = file.read_text(errors="replace").strip()
    except FileNotFoundError:
        return None, f"{file} is missing"
    except OSError as error:
        return None, f"{file} cannot be read ({reason(error)})"
    if not _TAG.fullmatch(tag):
        return None, f"{file} holds {tag[:40]!r}, which is no checkpoint's name" if tag else f"{file} is empty"
    return (folder / tag, "") if (folder / tag).is_dir() else (None, f"{file} names {tag}, which is not there")


def _check_terms(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    differing = [f"{name} was {old.get(name)!r} and is {new[name]!r}" for name in new if old.get(name) != new[name]]
    if differing:
        raise ValueError(
            f"The checkpoint {path} cannot be continued exactly: {'; '.join(differing)}. Give the old values, or start "
            "a new run without --resume."
        )


def _damage(path: Path, state: dict[str, Any]) -> str | None:
    """Names the first damaged file of this rank, and what is wrong with it."""
    found = ((path / name, wrong_with(path / name, facts)) for name, facts in state["files"].items() if _is_mine(name))
    return next((f"{file} {wrong}" for file, wrong in found if wrong), None)


def sealed(state: dict[str, Any]) -> str:
    """The text of a state.json, which ends in a checksum of its own."""
    return json.dumps({**state, "seal": hashlib.sha256(json.dumps(state).encode()).hexdigest()})


def read_state(file: Path) -> tuple[dict[str, Any], str | None]:
    """The content of a state.json, and what is wrong with it."""
    try:
        text = file.read_text()
        state = json.loads(text)
    except FileNotFoundError:
        return {}, f"{file} is missing"
    except (OSError, ValueError, RecursionError) as error:
        empty = file.is_file() and not file.stat().st_size
        return {}, f"{file} is empty" if empty else f"{file} is damaged: {reason(error)}"
    if not isinstance(state, dict) or not all(isinstance(state.get(k), dict) for k in ("terms", "position", "files")):
        return {}, f"{file} is damaged: it holds no terms, position and files"
    if text != sealed({key: value for key, value in state.items() if key != "seal"}):
        return {}, f"{file} is damaged: what it holds does not fit its own checksum"
    return state, None


def kept(folder: Path) -> dict[str, int]:
    """The bytes of each finished checkpoint, by its name, the newest last."""
    finished = [path for path in _all(folder) if (path / STATE).exists()]
    return {path.name: sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) for path in finished}


def load(engine: Any, checkpoint: Checkpoint) -> None:
    """Loads what `find` found: weights, layouts, optimizer and schedule.

    Then it is the latest checkpoint; damaged ones that `latest` would have come to first are renamed to `.damaged`.

    Raises:
        ValueError: DeepSpeed cannot load it.
    """
    path = checkpoint.path
    try:
        with plain_data_only():
            if checkpoint.state["ranks"] != dist.get_world_size() and engine.zero_optimization():
                loaded = universal.load(engine, path)
            else:
                loaded, _ = engine.load_checkpoint(str(path.parent), tag=path.name)
        if loaded is None:
            raise ValueError("DeepSpeed finds no files of its own there")
    except LOADING_ERRORS as error:
        raise ValueError(
            f"The checkpoint {path} cannot be loaded: {why(error)}. Write the name of an older one beside it into "
            f"{path.parent / 'latest'}, or {_WAY_OUT}"
        ) from error
    on_rank_0(lambda: _set_aside(checkpoint))


def _set_aside(checkpoint: Checkpoint) -> None:
    if _latest(checkpoint.path.parent)[0] != checkpoint.path:
        write_atomically(checkpoint.path.with_name("latest"), checkpoint.path.name)
    for path in checkpoint.damaged:
        os.replace(path, path.with_name(f"{path.name}.damaged"))


def _all(folder: Path) -> list[Path]:
    """All checkpoints, finished or not, the newest last."""
    return sorted((path for path in folder.glob("step*/") if _TAG.fullmatch(path.name)), key=_order)


def _order(path: Path) -> tuple[int, int]:
    """The step of a checkpoint, and how many of that step were there before it."""
    step, again = _TAG.fullmatch(path.name).groups(default="0")
    return int(step), int(again)


def _is_mine(name: str) -> bool:
    """Says whether this rank verifies a file: the one whose states it holds does, or rank 0."""
    owner = _OWNER.search(name)
    return (int(owner[1]) % dist.get_world_size() if owner else 0) == dist.get_rank()


def _from_all(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
