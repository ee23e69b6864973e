import time

import pytest
import torch

from benchmarks.models import step_times
from benchmarks.models.step_times import measure_steps

CPU = torch.device("cpu")


def measured(seconds=60, wrong=(), **steps):
    return measure_steps(
        {name: lambda step=step: step for name, step in steps.items()}, dict(wrong), CPU, 3, seconds, ""
    )


def test_steps_are_timed_in_turns():
    calls = []
    found = measured(first=lambda: calls.append("first"), second=lambda: calls.append("second"))
    assert list(found) == ["first", "second"] and all(one.rounds == 3 for one in found.values())
    # Two each to prepare them, then two a round, one round more than counts.
    assert calls == (["first"] * 2 + ["second"] * 2) * 5


def test_a_step_that_takes_too_long_is_timed_once():
    calls = []
    found = measured(seconds=0.01, slow=lambda: calls.append(time.sleep(0.03)), fast=lambda: None)
    assert len(calls) == 2 and found["slow"].milliseconds >= 30 and found["slow"].rounds == 1
    assert found["fast"].rounds == 3


@pytest.mark.slow("trains steps of several models")
def test_what_fails_at_once_or_later_is_named_and_the_others_are_timed():
    calls = []

    def fails():
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("out of memory\nin many lines")

    def never():
        raise RuntimeError("not made")

    found = measure_steps(
        {"late": lambda: fails, "early": never, "wrong": never, "right": lambda: lambda: None},
        {"wrong": "it is wrong"}, CPU, 3, 60, "",
    )  # fmt: skip
    reasons = {name: one.reason for name, one in found.items()}
    assert reasons == {
        "late": "RuntimeError: out of memory", "early": "RuntimeError: not made", "wrong": "it is wrong", "right": "",
    }  # fmt: skip
    assert found["late"].milliseconds is None and len(calls) == 4


@pytest.mark.parametrize("milliseconds, calls", [(1, 8), (30, 3), (900, 1)])
def test_a_round_has_more_calls_of_what_is_short(monkeypatch, milliseconds, calls):
    monkeypatch.setattr(step_times, "wall_ms", lambda step, device: milliseconds)
    monkeypatch.setattr(step_times, "timed", lambda step, device, calls: calls)
    assert measured(step=lambda: None)["step"].milliseconds == calls
