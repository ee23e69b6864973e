"""Checkpoints that a kill, a full disk or a damaged file cannot spoil, and resume that continues exactly.

A checkpoint is a folder, `step40`, or `step40.1` where that name is taken: nothing is written over. Its last file is
`state.json`, which lists the size and the checksum of all others; then `latest` is moved to it. `find` verifies what
`latest` names, and takes the newest whole checkpoint beside it where that is damaged. `load` takes it on any number of
ranks.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ds_sparse.ranks import from_rank_0

import universal
from damage import read_state, sealed, wrong_with
from files import checksum, flush, reason, write_atomically
from plain_data import LOADING_ERRORS, plain_data_only, why
from report import say

KEPT = 2
STATE = "state.json"
_TAG = re.compile(r"step(\d+)(?:\.(\d+))?")
_OWNER = re.compile(r"zero_pp_rank_(\d+)")
_WAY_OUT = "put back a copy, or start a new run without --resume."


class Checkpoint(NamedTuple):
    folder: Path
    """The folder of all checkpoints of the run."""
    tag: str
    position: dict[str, Any]
    """As it was given to `save`."""
    ranks: int
    """The number of ranks that wrote it."""
    damaged: list[str]
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
        ValueError: a file cannot be written, on all ranks; the checkpoint before it stays in force.
    """
    tag = _at_rank_0(lambda: _begin(folder, step))
    files, failure = _write(engine, folder, tag)
    written = _from_all((files, failure))
    failure = next((failure for _, failure in written if failure), None)
    if failure is None:
        files = {name: facts for files, _ in written for name, facts in files.items()}
        state = {"terms": terms, "position": position, "ranks": dist.get_world_size(), "files": files}
        failure = from_rank_0(_put_in_force(folder, tag, state) if dist.get_rank() == 0 else None)
    if failure is not None:
        raise ValueError(_at_rank_0(lambda: _give_up(folder, tag, failure)))
    _at_rank_0(lambda: _remove(folder / tag for tag in _tags(folder)[:-KEPT]))


def _begin(folder: Path, step: int) -> str:
    """Makes the folder of a new checkpoint, after removing what a kill left unfinished; its name."""
    in_force, _ = _latest(folder)
    universal.remove_left_over(folder)
    _remove(folder / tag for tag in _tags(folder) if in_force is None or _order(tag) > _order(in_force))
    taken = {path.name.removesuffix(".damaged") for path in folder.iterdir()}
    tag, again = f"step{step}", 0
    while tag in taken:
        again += 1
        tag = f"step{step}.{again}"
    (folder / tag).mkdir()
    return tag


def _write(engine: Any, folder: Path, tag: str) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Writes all but state.json; the size and checksum of this rank's files, by name, or why they cannot be written."""
    files = {}
    try:
        with _failures_kept(engine) as failures:
            engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
        if failures:
            raise failures[0]
        for path in sorted((folder / tag).rglob("*")):
            name = path.relative_to(folder / tag).as_posix()
            if path.is_file() and _owner(name) == dist.get_rank():
                files[name] = {"bytes": path.stat().st_size, "checksum": checksum(path)}
                flush(path)
    except OSError as error:
        return {}, reason(error)
    except RuntimeError as error:  # what torch.save raises where the disk is full
        return {}, f"PyTorch could not write a file ({reason(error)})"
    return files, None


@contextmanager
def _failures_kept(engine: Any) -> Iterator[list[OSError | RuntimeError]]:
    """Keeps what stops DeepSpeed from writing until all ranks are through: those that go on would wait for one that
    stops. Beside what its writer writes, rank 0 copies scripts."""
    failures: list[OSError | RuntimeError] = []

    def kept(write: Callable[..., Any]) -> Callable[..., None]:
        def attempt(*args: Any, **kwargs: Any) -> None:
            try:
                write(*args, **kwargs)
            except (OSError, RuntimeError) as error:
                failures.append(error)

        return attempt

    writers = [(engine.checkpoint_engine, "save"), (engine, "_copy_recovery_script")]
    writers = [(owner, name) for owner, name in writers if hasattr(owner, name)]
    for owner, name in writers:
        setattr(owner, name, kept(getattr(owner, name)))
    try:
        yield failures
    finally:
        for owner, name in writers:
            delattr(owner, name)


def _put_in_force(folder: Path, tag: str, state: dict[str, Any]) -> str | None:
    """Writes state.json and moves `latest`; why that cannot be done."""
    try:
        write_atomically(folder / tag / STATE, sealed(state))
        flush(folder)
        write_atomically(folder / "latest", tag)
    except OSError as error:
        return reason(error)
    return None


def _give_up(folder: Path, tag: str, failure: str) -> str:
    """Removes what there is of a checkpoint that cannot be written, and says so."""
    free = shutil.disk_usage(folder).free / 2**30
    in_force, _ = _latest(folder)
    if in_force != tag:
        shutil.rmtree(folder / tag, ignore_errors=True)
    left = f"{in_force} stays in force" if in_force else "there is none before it"
    return (
        f"The checkpoint {folder / tag} cannot be written: {failure} ({free:.2f} GiB were free there); {left}. Make "
        "room, then continue with --resume."
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
    tags, remarks = _at_rank_0(lambda: _candidates(folder))
    for tried, tag in enumerate(tags):
        state, damage = _examine(folder / tag, terms)
        if damage is not None:
            remarks.append(damage)
            continue
        for remark in remarks:
            say(f"{remark}.")
        if remarks and tag != from_rank_0(_latest(folder)[0]):
            lost = _order(tags[0])[0] - _order(tag)[0]
            again = f"; the {lost} steps after it are trained again" if lost > 0 else ""
            say(f"{folder / tag} is whole and is taken instead{again}.")
        return Checkpoint(folder, tag, state["position"], state["ranks"], tags[:tried])
    if remarks:
        raise ValueError(f"{'. '.join(remarks)}. No checkpoint in {folder} is whole; {_WAY_OUT}")
    return None


def _candidates(folder: Path) -> tuple[list[str], list[str]]:
    """The checkpoints to try, the one in force first and then the newest, and what there is to say before."""
    in_force, wrong = _latest(folder)
    finished = [tag for tag in reversed(_tags(folder)) if (folder / tag / STATE).exists()]
    remarks = [wrong] if wrong and (finished or (folder / "latest").exists()) else []
    if in_force is None:
        return finished, remarks
    newer = [tag for tag in finished if _order(tag) > _order(in_force)]
    if newer:
        remarks.append(
            f"{folder / 'latest'} names {in_force}; {newer[0]} is newer, and goes when the next checkpoint is written"
        )
    return [in_force, *(tag for tag in finished if tag != in_force)], remarks


def _latest(folder: Path) -> tuple[str | None, str | None]:
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
    return (tag, None) if (folder / tag).is_dir() else (None, f"{file} names {tag}, which is not there")


def _examine(path: Path, terms: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """What state.json of a checkpoint holds, and what is damaged in the checkpoint, the same on every rank."""
    state, damage = from_rank_0(read_state(path / STATE) if dist.get_rank() == 0 else None)
    if damage is None:
        _check_terms(path, state["terms"], terms)
        damage = next(filter(None, _from_all(_damage(path, state))), None)
    return state, damage


def _check_terms(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    differing = [f"{name} was {old.get(name)!r} and is {new[name]!r}" for name in new if old.get(name) != new[name]]
    if differing:
        raise ValueError(
            f"The checkpoint {path} cannot be continued exactly: {'; '.join(differing)}. Give the old values, or start "
            "a new run without --resume."
        )


def _damage(path: Path, state: dict[str, Any]) -> str | None:
    """What is wrong with the first damaged file of this rank."""
    for name, written in state["files"].items():
        if _owner(name) == dist.get_rank():
            wrong = wrong_with(path / name, written)
            if wrong is not None:
                return f"{path / name} {wrong}"
    return None


def kept(folder: Path) -> dict[str, int]:
    """The bytes of each finished checkpoint, by its name, the newest last."""
    finished = [tag for tag in _tags(folder) if (folder / tag / STATE).exists()]
    return {tag: sum(path.stat().st_size for path in (folder / tag).rglob("*") if path.is_file()) for tag in finished}


def load(engine: Any, checkpoint: Checkpoint) -> None:
    """Loads what `find` found: weights, layouts, optimizer and schedule.

    Then it is the latest checkpoint; damaged ones that `latest` would have come to first are renamed to `.damaged`.

    Raises:
        ValueError: DeepSpeed cannot load it.
    """
    folder, tag, _, ranks, damaged = checkpoint
    try:
        with plain_data_only():
            if ranks != dist.get_world_size() and engine.zero_optimization():
                path = universal.load(engine, folder, tag, _at_rank_0, wait=dist.barrier)
            else:
                path, _ = engine.load_checkpoint(str(folder), tag=tag)
        if path is None:
            raise ValueError("DeepSpeed finds no files of its own there")
    except LOADING_ERRORS as error:
        raise ValueError(
            f"The checkpoint {folder / tag} cannot be loaded: {why(error)}. Write the name of an older one beside "
            f"it into {folder / 'latest'}, or {_WAY_OUT}"
        ) from error
    _at_rank_0(lambda: _set_aside(folder, tag, damaged))


def _set_aside(folder: Path, tag: str, damaged: list[str]) -> None:
    if _latest(folder)[0] != tag:
        write_atomically(folder / "latest", tag)
    for name in damaged:
        os.replace(folder / name, folder / f"{name}.damaged")


def _tags(folder: Path) -> list[str]:
    """The names of all checkpoints, finished or not, the newest last."""
    return sorted((path.name for path in folder.glob("step*/") if _TAG.fullmatch(path.name)), key=_order)


def _order(tag: str) -> tuple[int, int]:
    """The step of a checkpoint, and how many of that step were there before it."""
    step, again = _TAG.fullmatch(tag).groups(default="0")
    return int(step), int(again)


def _owner(name: str) -> int:
    """The rank that a file of a checkpoint is verified by: on as many ranks as wrote it, the one whose states it holds,
    or rank 0."""
    rank = _OWNER.search(name)
    return int(rank[1]) % dist.get_world_size() if rank else 0


def _remove(folders: Iterable[Path]) -> None:
    for path in folders:
        shutil.rmtree(path)


def _at_rank_0(do: Callable[[], Any]) -> Any:
    """What `do` returns on rank 0, on every rank; a failure of it ends all ranks in the same sentence."""
    outcome = None, None
    if dist.get_rank() == 0:
        try:
            outcome = do(), None
        except OSError as error:
            outcome = None, f"{error.filename}: {reason(error)}; mend that, then continue with --resume."
    value, failure = from_rank_0(outcome)
    if failure is not None:
        raise ValueError(failure)
    return value


def _from_all(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
