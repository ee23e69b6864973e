"""The folder of a run: its data, checkpoints of jobs and rows of finished ones. Several processes may work in one."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ds_sparse.bench.runs import restored

from .results import Row
from .settings import Job, Settings


class Folder:
    """Files are written whole or not at all.

    Args:
        path: new, or of the same settings.

    Raises:
        ValueError: it belongs to a run with other settings, or to something else.
    """

    def __init__(self, path: Path, settings: Settings) -> None:
        self.path = path
        wanted, file = asdict(settings), path / "settings.json"
        try:
            path.mkdir(parents=True, exist_ok=True)
            # Looked for in this order, as another process may begin the same run now.
            holds_more = any(not there.name.startswith("settings.") for there in path.iterdir())
            if holds_more and not file.exists():
                raise ValueError(f"--folder {path}: holds something else; name a new folder.")
            with locked(path / "settings.lock"):
                if not file.exists():
                    write(file, lambda new: new.write_text(json.dumps(wanted, indent=1)))
            there = json.loads(file.read_text())
        except OSError as error:
            raise ValueError(f"--folder {path}: {error.strerror}.") from None
        except json.JSONDecodeError:
            raise ValueError(f"--folder {path}: {file.name} is damaged; name a new folder.") from None
        differ = [name for name in wanted if there.get(name) != wanted[name]]
        if differ:
            have = ", ".join(f"{name} {there.get(name)}" for name in differ)
            want = ", ".join(f"{name} {wanted[name]}" for name in differ)
            raise ValueError(f"--folder {path}: holds a run with {have}, not {want}; give its options or a new folder.")

    def data(self, prepare: Callable[[Path], None]) -> Path:
        """Where the data is, which the first process prepares and the others wait for."""
        data, done = self.path / "data", self.path / "data" / "prepared"
        data.mkdir(exist_ok=True)
        with locked(self.path / "data.lock"):
            if not done.exists():
                prepare(data)
                done.touch()
        return data

    @contextmanager
    def claimed(self, job: Job) -> Iterator[bool]:
        """Whether the job is this process's own for the time; else another has it."""
        with open(self.file(job, "lock"), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def file(self, job: Job, kind: str) -> Path:
        return self.path / f"{job.name}.{kind}"

    def row(self, job: Job) -> Row | None:
        """What a finished job gave."""
        file = self.file(job, "json")
        return restored(Row, json.loads(file.read_text())) if file.exists() else None

    def finish(self, job: Job, row: Row) -> None:
        """Keeps the row; the checkpoint is needed no more."""
        write(self.file(job, "json"), lambda new: new.write_text(json.dumps(asdict(row), indent=1)))
        self.file(job, "checkpoint").unlink(missing_ok=True)

    def save(self, job: Job, state: dict[str, Any]) -> None:
        write(self.file(job, "checkpoint"), lambda new: torch.save(state, new))

    def saved(self, job: Job) -> dict[str, Any] | None:
        """The last state of a job that has begun, on the CPU."""
        file = self.file(job, "checkpoint")
        return torch.load(file, map_location="cpu", weights_only=True) if file.exists() else None


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Waits until no other process is in here."""
    with open(file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write(file: Path, to: Callable[[Path], object]) -> None:
    """A file that is there when it is whole."""
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    to(unfinished)
    os.replace(unfinished, file)
