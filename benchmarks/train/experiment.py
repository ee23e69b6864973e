"""What an experiment gives to training: data, arms, and the tasks of each."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from .settings import Settings


class Task(ABC):
    """A model and what it learns.

    Attributes:
        model: on its device, with weights in fp32.
        tokens_per_step: of the batch that `loss` takes.
        asked: what the loss is of, such as "masked tokens".
    """

    model: nn.Module
    tokens_per_step: int
    asked: str

    @abstractmethod
    def loss(self, step: int) -> Tensor:
        """Of the training batch of that number, which depends on the number and the seed alone."""

    @abstractmethod
    def evaluate(self) -> float:
        """The held-out loss. The model is in evaluation mode, without gradients."""

    @abstractmethod
    def unigram(self) -> float:
        """The held-out loss of what knows nothing but the frequencies of labels in training."""

    def measures(self) -> dict[str, float]:
        """What else is said of the trained model, by name. Called once at the end of the phase, as `evaluate` is."""
        return {}


@dataclass(frozen=True)
class Phase:
    """Of an arm's training, with an optimizer and a schedule of its own.

    Attributes:
        share: of the budget; those of an arm add up to 1.
        make: the task, given the model of the phase before, which it may change; the same one at each call.
    """

    share: float
    make: Callable[[nn.Module | None], Task]


def in_halves(make: Callable[[nn.Module | None], Task]) -> list[Phase]:
    """Two phases with half of the budget each: what is masked, then what the experiment is about."""
    return [Phase(0.5, make), Phase(0.5, make)]


@dataclass(frozen=True)
class Experiment:
    """What is compared.

    Attributes:
        arms: which there are, in words.
        default_arms: of settings.
        require: raises ValueError where an arm, or what the data is made of, is not there.
        prepare: writes the data to a folder, once; several processes read it then.
        phases: of an arm and a seed, given the folder of the data.
    """

    arms: str
    default_arms: Callable[[Settings], list[str]]
    require: Callable[[Settings, list[str]], None]
    prepare: Callable[[Settings, Path], None]
    phases: Callable[[Settings, Path, str, int, torch.device], list[Phase]]


def load(name: str) -> Experiment:
    """One of `EXPERIMENTS`.

    Raises:
        ImportError: it needs a package that is not installed; the sentence says which.
    """
    return importlib.import_module(f".{name}", __package__).EXPERIMENT
