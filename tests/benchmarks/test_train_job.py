import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.train import job as jobs
from benchmarks.train.experiment import Phase, Task
from benchmarks.train.job import Stopped, Training, schedule, steps_of, stops
from benchmarks.train.settings import Budget, Job, Settings

CPU = torch.device("cpu")
SETTINGS = Settings("toy", "tiny", "fp32", "cpu", True, 10, 1e-2, 10)
JOB = Job("dense-10", 3, Budget(tokens=400))
FOREVER = float("inf")


class Toy(Task):
    """Learns a sum, with dropout."""

    tokens_per_step = 10
    asked = "sums"

    def __init__(self, before=None, fails_at=None):
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1)) if before is None else before
        self.fails_at = fails_at
        self.trained = []

    def error(self, seed):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
        return (self.model(x)[:, 0] - x.sum(1)).square().mean()

    def loss(self, step):
        assert self.model.training
        self.trained.append(step)
        if self.fails_at == len(self.trained):
            raise KeyboardInterrupt
        return self.error(step)

    def evaluate(self):
        assert not self.model.training and not torch.is_grad_enabled()
        return self.error(10**6).item()

    def unigram(self):
        return 4.0

    def measures(self):
        return {"steps": len(self.trained)}


ONE = [Phase(1.0, lambda before: Toy())]
TWO = [Phase(0.5, lambda before: Toy()), Phase(0.5, Toy)]


def training(saved=None, save=lambda state: None, job=JOB, save_seconds=0.0, deadline=FOREVER):
    return Training(SETTINGS, job, CPU, saved, save, save_seconds, deadline)


def through_disk(state, folder):
    """As the folder keeps it."""
    torch.save(state, folder / "state")
    return torch.load(folder / "state", weights_only=True)


def test_a_job_learns_and_says_how():
    row = training().run(ONE)
    assert [point.tokens for point in row.curve] == list(range(40, 401, 40))
    assert row.held_out == row.curve[-1].held_out < row.curve[0].held_out
    assert [a.seconds < b.seconds for a, b in itertools.pairwise(row.curve)] == [True] * 9
    assert row.tokens_per_second == pytest.approx(400 / row.curve[-1].seconds)
    assert row.milliseconds == pytest.approx(row.curve[-1].seconds / 40 * 1e3)
    assert row.wall_seconds > row.curve[-1].seconds and row.parameters == 49


@pytest.mark.parametrize("phases", [ONE, TWO], ids=["one phase", "two phases"])
@pytest.mark.parametrize("fails_at", [9, 21])
def test_what_is_cut_off_ends_with_the_same_bits(tmp_path, phases, fails_at):
    whole = training().run(phases)
    states = []
    number = itertools.count()
    cut = [Phase(phase.share, lambda before, make=phase.make: broken(make(before), next(number))) for phase in phases]

    def broken(task, number):
        if number == len(phases) - 1:
            task.fails_at = fails_at
        return task

    with pytest.raises(KeyboardInterrupt):
        training(save=lambda state: states.append(through_disk(state, tmp_path))).run(cut)
    rest = training(states[-1]).run(phases)
    assert rest.weights == whole.weights
    assert [(p.tokens, p.held_out) for p in rest.curve] == [(p.tokens, p.held_out) for p in whole.curve]


def test_at_the_deadline_it_saves_what_it_has(tmp_path, monkeypatch):
    whole = training().run(ONE)
    states = []
    clock = itertools.count()
    monkeypatch.setattr(jobs.time, "perf_counter", lambda: float(next(clock)))
    with pytest.raises(Stopped):
        training(save=states.append, save_seconds=FOREVER, deadline=30.0).run(ONE)
    monkeypatch.undo()
    (state,) = states
    state = through_disk(state, tmp_path)
    step = state["progress"]["step"]
    assert 0 < step < 40 and step % 4, "between two evaluations"
    rest = training(state).run(ONE)
    assert rest.weights == whole.weights and len(rest.curve) == 10
    assert rest.wall_seconds > state["progress"]["wall_seconds"]


def test_steps_that_are_tried_leave_no_trace(monkeypatch):
    """A budget of minutes tries more of them than one of tokens."""
    monkeypatch.setattr(jobs, "TRIED_SECONDS", 0.1)
    by_minutes = training(job=replace(JOB, budget=Budget(minutes=1.0)))
    task = Toy()
    before = {name: x.clone() for name, x in task.model.state_dict().items()}
    seconds = by_minutes.try_steps(task)
    assert seconds > 0 and len(task.trained) > 3
    assert all(torch.equal(x, before[name]) for name, x in task.model.state_dict().items())
    assert all(x.grad is None for x in task.model.parameters())


def test_a_second_phase_has_the_model_of_the_first():
    given = []
    phases = [Phase(0.5, lambda before: Toy()), Phase(0.5, lambda before: given.append(before) or Toy(before))]
    training().run(phases)
    assert isinstance(given[0], nn.Sequential)


def test_a_loss_that_is_no_number_is_an_error():
    class Lost(Toy):
        def evaluate(self):
            return math.nan

    with pytest.raises(ArithmeticError, match="the held-out loss is nan after 40 tokens"):
        training().run([Phase(1.0, lambda before: Lost())])


def test_budgets_are_numbers_of_steps():
    assert steps_of(Budget(tokens=1000), 0.5, 10, step_seconds=99.0) == 50
    assert steps_of(Budget(minutes=2.0), 0.5, 10, step_seconds=0.5) == 120
    assert steps_of(Budget(tokens=1), 1.0, 10, step_seconds=1.0) == 1


def test_the_last_evaluation_is_after_the_last_step():
    assert stops(40, 10) == list(range(4, 41, 4))
    assert stops(3, 10) == [1, 2, 3]


def test_the_learning_rate_rises_and_decays_to_nothing():
    rates = [schedule(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert max(rates) == rates[9] == 1.0
    assert all(a > b for a, b in itertools.pairwise(rates[9:])) and 0 < rates[-1] < 0.02
