import pytest
import torch

from ds_sparse.bench import machine
from ds_sparse.tools import hardware


def test_rounds_are_in_turns_and_the_first_does_not_count():
    order = []

    def run(name):
        order.append(name)
        return len(order)

    times = machine.in_turns({"a": lambda: run("a"), "b": lambda: run("b")}, repeats=2, seconds=60, title="")
    assert order == ["a", "b"] * 3
    assert times == {"a": [3, 5], "b": [4, 6]}


@pytest.mark.parametrize(("repeats", "rounds"), [(2, 2), (9, 3)])
def test_out_of_time_there_are_three_rounds_at_least(repeats, rounds):
    times = machine.in_turns({"a": lambda: 1.0}, repeats=repeats, seconds=0, title="")
    assert times == {"a": [1.0] * rounds}


@pytest.mark.parametrize(
    ("direction", "forwards", "backwards"),
    [(machine.FORWARD, 2, 0), (machine.BACKWARD, 1, 2), (machine.TRAIN, 2, 2)],
)
def test_what_is_called_in_a_direction(direction, forwards, backwards):
    called = []

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            called.append("forward")
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            called.append("backward")
            return grad

    x = torch.ones(3)
    assert machine.time_of(Step.apply, [x], x, direction, torch.device("cpu")) > 0
    assert (called.count("forward"), called.count("backward")) == (forwards, backwards)


def test_conditions_name_the_machine():
    conditions = machine.conditions(torch.device("cpu"))
    assert set(conditions) == {"machine", "torch", "commit", "date"}
    assert f"{torch.get_num_threads()} thread" in conditions["machine"]


def test_the_machine_is_named_with_what_it_has_for_16_bits(monkeypatch):
    flags = "model name\t: Some CPU\nflags\t\t: fpu avx512f avx512_bf16 amx_bf16 amx_tile\n"
    monkeypatch.setattr(hardware.Path, "exists", lambda path: True)
    monkeypatch.setattr(hardware.Path, "read_text", lambda path: flags + flags)
    described = machine.conditions(torch.device("cpu"))["machine"]
    assert described.startswith("Some CPU, ") and ", amx_bf16, avx512_bf16, " in described


def test_without_nvidias_program_the_driver_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert machine.driver() == "unknown"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_time_of_a_short_kernel_is_the_devices_not_pythons():
    x = torch.zeros(16, device="cuda")
    assert machine.timed(lambda: [x.add_(1) for _ in range(4)], torch.device("cuda")) < 4 * 0.005


@pytest.mark.parametrize(
    "number, text", [(0.01234, "0.0123"), (0.5, "0.500"), (123.4, "123"), (999.7, "1000"), (23456.7, "23457")]
)
def test_numbers_are_written_out(number: float, text: str):
    assert machine.in_three_digits(number) == text
