"""Advice on a parallelism for a length, a model and a number of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .communication import crosses_nodes
from .layers import Walked
from .memory import fits
from .model import Model
from .rates import Rates
from .settings import CHECKPOINTS, MICRO, RANKS, TRAIN, Settings
from .step import Step, step_of


@dataclass(frozen=True)
class Advice:
    """Attributes:
    settings: of the plan, but for ranks of a sequence, checkpoints and the micro batch.
    step: predicted.
    """

    settings: Settings
    step: Step

    def tokens_per_second(self, seq_len: int) -> float:
        """Tokens a second on all GPUs, of sequences of so many."""
        return self.settings.sequences * seq_len / self.step.total * 1e3


def advise(
    rates: Rates,
    model: Model,
    settings: Settings,
    seq_len: int,
    walks_of: Callable[[Settings], Sequence[Walked]],
    memory_gib: float,
    most_ranks: int,
) -> Advice | None:
    """The first of these that fits: a sequence a GPU, the same with activation checkpointing, and the fewest ranks of a
    sequence, within a node if that can be. None where nothing does."""
    shared = [
        replace(settings, ranks=ranks, checkpoints=True)
        for ranks in range(1, min(most_ranks, settings.gpus) + 1)
        if settings.gpus % ranks == 0
    ]
    for wanted in (replace(settings, ranks=1, checkpoints=False), *sorted(shared, key=crosses_nodes)):
        if (found := largest_batch(model, wanted, seq_len, memory_gib)) is not None:
            return Advice(found, step_of(rates, model, found, seq_len, walks_of(found)))
    return None


def edits(planned: Settings, advised: Settings) -> str:
    """What to change in the JSON, key by key, and the sequences of a step where no key says that they change."""
    found, batch = [], ""
    if advised.ranks != planned.ranks:
        found.append(f'"{RANKS}": {advised.ranks}' if advised.ranks > 1 else f'no "{RANKS}"')
    if advised.micro_batch != planned.micro_batch and (MICRO in planned.keys or TRAIN not in planned.keys):
        found.append(f'"{MICRO}": {advised.micro_batch}')
    if advised.sequences != planned.sequences:
        if TRAIN in planned.keys:
            found.append(f'"{TRAIN}": {advised.sequences}')
        else:
            batch = f" ({advised.sequences:,} sequences a step, not {planned.sequences:,})"
    if advised.checkpoints != planned.checkpoints:
        if planned.checkpoints != (CHECKPOINTS in planned.keys):  # by an option
            found.append(f"no --{'' if planned.checkpoints else 'no-'}checkpoint-activations")
        else:
            found.append(f'"{CHECKPOINTS}": {{}}' if advised.checkpoints else f'no "{CHECKPOINTS}"')
    return f"{', '.join(found)}{batch}"


def largest_batch(model: Model, settings: Settings, seq_len: int, memory_gib: float) -> Settings | None:
    """The settings with the micro batch, or half of it, a quarter and so on, as fits; None where none does."""
    batch = settings.micro_batch
    while batch:
        found = replace(settings, micro_batch=batch)
        if fits(model, found, seq_len, memory_gib):
            return found
        batch //= 2
    return None
