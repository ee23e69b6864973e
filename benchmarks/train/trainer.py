"""Training of jobs: what an experiment gives to it, its steps and evaluations, and the folder that keeps its rows."""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_sparse.bench.machine import DTYPES, conditions
from ds_sparse.bench.runs import restored

from .results import Answered, Case, Point, Row

WARM_UP = 0.1
"""Part of a phase's steps until the learning rate is at its highest; it decays to nothing after."""

BETAS, WEIGHT_DECAY, LARGEST_NORM = (0.9, 0.98), 0.01, 1.0

TRIED_SECONDS = 2.0
"""Seconds of tried steps, to see what one takes, where that matters; else two steps."""


class Waits(RuntimeError):
    """A job cannot begin before another is finished."""


class Task(ABC):
    """A model and what it learns.

    Attributes:
        model: on its device, with weights in fp32.
        tokens_per_step: of the batch that `loss` takes.
        asked: what the loss is of, such as "masked tokens".
        evaluations: in all of the budget.
        about: what it learns from, where the experiment says it.
    """

    model: nn.Module
    tokens_per_step: int
    asked: str
    evaluations = 10
    about = ""

    @abstractmethod
    def loss(self, step: int) -> Tensor:
        """The loss of the training batch of that number, which depends on the number and the seed alone."""

    @abstractmethod
    def evaluate(self) -> float:
        """The held-out loss. The model is in evaluation mode, without gradients."""

    @abstractmethod
    def unigram(self) -> float:
        """The held-out loss of what knows nothing but the frequencies of labels in training."""

    def measures(self) -> dict[str, float]:
        """Says by name what else is known of the trained model, at the end of the phase, as `evaluate` does."""
        return {}

    def answered(self) -> list[Answered]:
        """Says what of it depends on distances, likewise."""
        return []

    def keep(self) -> None:
        """Keeps what other jobs take of the trained model, at the end of the phase."""


Phase = Callable[[Any], Task]
"""Makes the task of a part of an arm's training, given the model of the part before, which it may change, or None. Each
part has an optimizer and a schedule of its own, and as much of the budget as every other."""


def load(experiment: str) -> Any:
    """The module of an experiment, which has the data and tasks of its arms:

    - `default_arms(case)`: arms that decide most.
    - `require(case)`: raises UsageError where options are none of the experiment, ValueError where what the data is
      made of is not there.
    - `prepare(case, folder)`: writes the data to a folder, once; several processes read it then.
    - `phases(case, folder, device)`: the phases of an arm with a seed.

    Raises:
        ImportError: it needs a package that is not installed; the sentence says which.
    """
    return importlib.import_module(f".{experiment}", __package__)


class Training:
    """A job on its way: the steps, tokens and seconds of all phases until now, and what was measured."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.steps, self.tokens, self.seconds = 0, 0, 0.0
        self.curve: list[Point] = []
        self.began = time.perf_counter()

    def run(self, phases: Sequence[Phase]) -> Row:
        """Raises ArithmeticError where the loss is no number."""
        measures: dict[str, float] = {}
        answered: list[Answered] = []
        task: Task | None = None
        for phase in phases:
            torch.manual_seed(self.case.seed)
            task = phase(None if task is None else task.model)
            self.train(self.case.times / len(phases), task)
            with self.evaluating(task):
                measures |= task.measures()
                answered = task.answered()
            task.keep()
        about = conditions(self.device)
        return Row(
            self.seconds / self.steps * 1e3,
            self.curve[-1].held_out,
            task.unigram(),
            self.curve,
            tokens_per_second=self.tokens / self.seconds,
            measures=measures,
            answered=answered,
            data=task.about,
            parameters=sum(x.numel() for x in task.model.parameters()),
            weights=digest(task.model),
            machine=about["machine"],
            commits=[about["commit"]],
            date=about["date"],
            wall_seconds=time.perf_counter() - self.began,
        )

    def train(self, share: float, task: Task) -> None:
        """All steps of a phase."""
        steps = steps_of(self.case, share, task.tokens_per_step, self.try_steps(task))
        torch.manual_seed(self.case.seed)
        optimizer = self.optimizer(task.model)
        first = 0
        for stop in stops(steps, max(1, round(task.evaluations * share))):
            began = self.now()
            for step in range(first, stop):
                for group in optimizer.param_groups:
                    group["lr"] = self.case.learning_rate * schedule(step, steps, decays=not self.case.is_base)
                self.step(task, optimizer, step)
            self.seconds += self.now() - began
            self.tokens += (stop - first) * task.tokens_per_step
            self.steps += stop - first
            first = stop
            with self.evaluating(task):
                held_out = task.evaluate()
            if not held_out < float("inf"):
                raise ArithmeticError(f"the held-out loss is {held_out} after {self.tokens:,} tokens")
            self.curve.append(Point(self.seconds, self.tokens, held_out, task.asked))

    def step(self, task: Task, optimizer: torch.optim.Optimizer, step: int) -> None:
        task.model.train()
        with self.autocast():
            loss = task.loss(step)
        loss.backward()
        nn.utils.clip_grad_norm_(task.model.parameters(), LARGEST_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def try_steps(self, task: Task) -> float:
        """Seconds that a step takes once everything is compiled, and the weights as they were."""
        before = deepcopy(task.model.state_dict())
        optimizer = self.optimizer(task.model)
        took: list[float] = []
        seconds = TRIED_SECONDS if self.case.minutes else 0.0
        while len(took) < 2 or sum(took[1:]) < seconds:
            began = self.now()
            self.step(task, optimizer, len(took))
            took.append(self.now() - began)
        task.model.load_state_dict(before)
        return sum(took[1:]) / len(took[1:])

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        fused = self.device.type == "cuda"
        rate = self.case.learning_rate
        return torch.optim.AdamW(model.parameters(), rate, BETAS, weight_decay=WEIGHT_DECAY, fused=fused)

    def autocast(self) -> torch.autocast:
        is_bf16 = DTYPES[self.case.dtype] == torch.bfloat16
        return torch.autocast(self.device.type, torch.bfloat16, enabled=is_bf16)

    @contextmanager
    def evaluating(self, task: Task) -> Iterator[None]:
        task.model.eval()
        with torch.no_grad(), self.autocast():
            yield

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def steps_of(case: Case, share: float, tokens_per_step: int, step_seconds: float) -> int:
    """Number of a phase's steps; in a budget of minutes as many as fit, at the speed that was measured before."""
    steps = case.tokens / tokens_per_step if case.tokens else case.minutes * 60 / step_seconds
    return max(1, round(share * steps))


def stops(steps: int, evaluations: int) -> list[int]:
    """Numbers of steps after which a phase is evaluated, the last after all."""
    return sorted({max(1, round(steps * number / evaluations)) for number in range(1, evaluations + 1)})


def schedule(step: int, steps: int, decays: bool = True) -> float:
    """The part of the highest learning rate that a step has. For a base it does not decay: what goes on from a decayed
    one loses what the decay gained before it learns more."""
    rising = max(1, round(WARM_UP * steps))
    if step < rising:
        return (step + 1) / rising
    return (steps - step) / (steps - rising + 1) if decays else 1.0


def digest(model: nn.Module) -> str:
    """SHA-256 of the bits of all weights."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Folder:
    """The data of a run, and rows of finished jobs. Several processes may work in one.

    Args:
        path: new, or of the same settings.

    Raises:
        ValueError: it belongs to a run with other settings, or to something else.
    """

    def __init__(self, path: Path, case: Case) -> None:
        self.path = path
        wanted, file = asdict(case.shared), path / "settings.json"
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not file.exists() and any(not there.name.startswith("settings.") for there in path.iterdir()):
                raise ValueError(f"--folder {path}: holds something else; name a new folder.")
            with locked(path / "settings.lock"):
                if not file.exists():
                    write(file, wanted)
            there = json.loads(file.read_text())
        except OSError as error:
            raise ValueError(f"--folder {path}: {error.strerror}.") from None
        if differ := [name for name in wanted if there.get(name, wanted[name]) != wanted[name]]:
            have, want = (", ".join(f"{name} {of[name]}" for name in differ) for of in (there, wanted))
            raise ValueError(f"--folder {path}: holds a run with {have}, not {want}; give its options or a new folder.")

    def data(self, prepare: Callable[[Path], None]) -> Path:
        """The folder of the data, which the first process prepares and the others wait for."""
        data, done = self.path / "data", self.path / "data" / "prepared"
        data.mkdir(exist_ok=True)
        with locked(self.path / "data.lock"):
            if not done.exists():
                prepare(data)
                done.touch()
        return data

    @contextmanager
    def claimed(self, case: Case) -> Iterator[bool]:
        """True if the job is this process's own for the time; else another has it."""
        try:
            with locked(self.path / f"{case.file}.lock", fcntl.LOCK_NB):
                yield True
        except BlockingIOError:
            yield False

    def row(self, case: Case) -> Row | None:
        """The row of a finished job; None of another."""
        file = self.path / f"{case.file}.json"
        return restored(Row, json.loads(file.read_text())) if file.exists() else None

    def finish(self, case: Case, row: Row) -> None:
        write(self.path / f"{case.file}.json", asdict(row))


@contextmanager
def locked(file: Path, how: int = 0) -> Iterator[None]:
    """Waits until no other process is in here, or raises BlockingIOError."""
    with open(file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | how)
        yield


def write(file: Path, what: object) -> None:
    """A file that is there when it is whole."""
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(what, indent=1))
    os.replace(unfinished, file)
