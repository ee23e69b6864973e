"""Training of a job, which goes on where it was cut off as if it had not been."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from ds_sparse.bench.machine import DTYPES, conditions
from ds_sparse.bench.runs import restored

from .experiment import Phase, Task
from .results import Point, Row
from .settings import Budget, Job, Settings

WARM_UP = 0.1
"""Of a phase's steps, until the learning rate is at its highest; it decays to nothing after."""

EVALUATIONS = 10
"""In all of the budget."""

BETAS, WEIGHT_DECAY, LARGEST_NORM = (0.9, 0.98), 0.01, 1.0

TRIED_SECONDS = 2.0
"""Of steps, to see what one takes, where that matters; else two steps."""

Save = Callable[[dict[str, Any]], None]


class Stopped(Exception):
    """The time of this process is over; what is saved goes on in another."""


@dataclass
class Progress:
    """Where a job is.

    Attributes:
        phase, step, steps: which phase, how many of its steps are done, and how many it has.
        all_steps, tokens, seconds: of all phases until now.
        wall_seconds: of the processes before this one.
        measures: of the phases that are done.
    """

    phase: int = 0
    step: int = 0
    steps: int = 0
    all_steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    wall_seconds: float = 0.0
    curve: list[Point] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)
    measures: dict[str, float] = field(default_factory=dict)


class Training:
    """A job on its way.

    Args:
        saved: what `save` was given last, or None at the beginning.
        save: called after an evaluation, when the last call is `save_seconds` ago, and at `deadline`.
        deadline: when to stop, of `time.perf_counter`.
    """

    def __init__(
        self,
        settings: Settings,
        job: Job,
        device: torch.device,
        saved: dict[str, Any] | None,
        save: Save,
        save_seconds: float,
        deadline: float,
    ) -> None:
        self.settings, self.job, self.device = settings, job, device
        self.saved, self.save, self.save_seconds, self.deadline = saved, save, save_seconds, deadline
        self.progress = Progress() if saved is None else restored(Progress, saved["progress"])
        self.began = self.last_saved = time.perf_counter()
        self.conditions = conditions(device)
        if self.conditions["commit"] not in self.progress.commits:
            self.progress.commits.append(self.conditions["commit"])

    def run(self, phases: Sequence[Phase]) -> Row:
        """Raises ArithmeticError where the loss is no number, Stopped at the deadline."""
        task: Task | None = None
        for number, phase in enumerate(phases):
            torch.manual_seed(self.job.seed)
            task = phase.make(None if task is None else task.model)
            if number >= self.progress.phase:
                self.train(phase, task)
                with self.evaluating(task):
                    self.progress.measures |= task.measures()
                self.progress.phase, self.progress.step, self.progress.steps = number + 1, 0, 0
        return self.row(task)

    def train(self, phase: Phase, task: Task) -> None:
        """All steps of a phase that are not done."""
        progress = self.progress
        step_seconds = self.try_steps(task)
        optimizer = self.optimizer(task.model)
        if self.saved is not None:
            load_state(self.saved, task.model, optimizer)
            self.saved = None
        else:
            progress.steps = steps_of(self.job.budget, phase.share, task.tokens_per_step, step_seconds)
            torch.manual_seed(self.job.seed)
        for stop in stops(progress.steps, max(1, round(EVALUATIONS * phase.share))):
            if stop > progress.step:
                self.train_until(stop, task, optimizer)
                self.evaluate(task)
                if time.perf_counter() - self.last_saved >= self.save_seconds:
                    self.save_state(task.model, optimizer)

    def train_until(self, stop: int, task: Task, optimizer: torch.optim.Optimizer) -> None:
        progress = self.progress
        began, first = self.now(), progress.step
        while progress.step < stop and time.perf_counter() < self.deadline:
            for group in optimizer.param_groups:
                group["lr"] = self.settings.learning_rate * schedule(progress.step, progress.steps)
            self.step(task, optimizer, progress.step)
            progress.step += 1
        progress.seconds += self.now() - began
        progress.tokens += (progress.step - first) * task.tokens_per_step
        progress.all_steps += progress.step - first
        if progress.step < stop:
            self.save_state(task.model, optimizer)
            raise Stopped

    def step(self, task: Task, optimizer: torch.optim.Optimizer, step: int) -> None:
        task.model.train()
        with self.autocast():
            loss = task.loss(step)
        loss.backward()
        nn.utils.clip_grad_norm_(task.model.parameters(), LARGEST_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def evaluate(self, task: Task) -> None:
        with self.evaluating(task):
            held_out = task.evaluate()
        if not held_out < float("inf"):
            raise ArithmeticError(f"the held-out loss is {held_out} after {self.progress.tokens:,} tokens")
        self.progress.curve.append(Point(self.progress.seconds, self.progress.tokens, held_out, task.asked))

    def try_steps(self, task: Task) -> float:
        """Seconds that a step takes once everything is compiled, and the weights as they were."""
        before = deepcopy(task.model.state_dict())
        optimizer = self.optimizer(task.model)
        took: list[float] = []
        seconds = TRIED_SECONDS if self.job.budget.minutes else 0.0
        while len(took) < 2 or sum(took[1:]) < seconds:
            began = self.now()
            self.step(task, optimizer, len(took))
            took.append(self.now() - began)
        task.model.load_state_dict(before)
        return sum(took[1:]) / len(took[1:])

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        rate = self.settings.learning_rate
        on_cuda = self.device.type == "cuda"
        return torch.optim.AdamW(model.parameters(), rate, BETAS, weight_decay=WEIGHT_DECAY, fused=on_cuda)

    def autocast(self) -> torch.autocast:
        dtype = DTYPES[self.settings.dtype]
        return torch.autocast(self.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)

    @contextmanager
    def evaluating(self, task: Task) -> Iterator[None]:
        task.model.eval()
        with torch.no_grad(), self.autocast():
            yield

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def wall_seconds(self) -> float:
        return self.progress.wall_seconds + time.perf_counter() - self.began

    def save_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        progress = asdict(self.progress) | {"wall_seconds": self.wall_seconds()}
        self.save(
            {
                "progress": progress,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "random": random,
            }
        )
        self.last_saved = time.perf_counter()

    def row(self, task: Task) -> Row:
        progress, about = self.progress, self.conditions
        return Row(
            progress.seconds / progress.all_steps * 1e3,
            progress.curve[-1].held_out,
            task.unigram(),
            progress.curve,
            tokens_per_second=progress.tokens / progress.seconds,
            measures=progress.measures,
            parameters=sum(x.numel() for x in task.model.parameters()),
            weights=digest(task.model),
            machine=about["machine"],
            commits=progress.commits,
            date=about["date"],
            wall_seconds=self.wall_seconds(),
        )


def load_state(saved: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"]["cpu"])
    if "cuda" in saved["random"]:
        torch.cuda.set_rng_state(saved["random"]["cuda"])


def steps_of(budget: Budget, share: float, tokens_per_step: int, step_seconds: float) -> int:
    """How many steps a phase has; of a budget of minutes as many as fit, at the speed that was measured before the
    first: what is cut off has the same schedule after."""
    steps = budget.tokens / tokens_per_step if budget.tokens else budget.minutes * 60 / step_seconds
    return max(1, round(share * steps))


def stops(steps: int, evaluations: int) -> list[int]:
    """Numbers of steps after which a phase is evaluated, the last after all."""
    return sorted({max(1, round(steps * number / evaluations)) for number in range(1, evaluations + 1)})


def schedule(step: int, steps: int) -> float:
    """The part of the highest learning rate that a step has."""
    rising = max(1, round(WARM_UP * steps))
    return (step + 1) / rising if step < rising else (steps - step) / (steps - rising + 1)


def digest(model: nn.Module) -> str:
    """SHA-256 of the bits of all weights."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
