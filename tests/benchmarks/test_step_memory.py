"""What memory is for, with an allocator of ours in the place of a GPU's."""

import pytest
import torch

from benchmarks.models import sequence_model, sequence_rank
from benchmarks.models.bert import batch
from benchmarks.models.sequence_results import Case
from benchmarks.models.step_memory import MemoryMeter
from ds_sparse.bench.machine import GIB

CPU = torch.device("cpu")


class Allocator:
    """Counts GiB as torch.cuda does."""

    def __init__(self):
        self.now = self.highest = 0.0

    def hold(self, gib):
        self.now += gib
        self.highest = max(self.highest, self.now)

    def touch(self, gib):
        self.hold(gib)
        self.now -= gib


@pytest.fixture
def allocator(monkeypatch):
    made = Allocator()
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: int(made.now * GIB))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: int(made.highest * GIB))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(made, "highest", made.now))
    return made


def test_spans_inside_of_others_count_for_both(allocator):
    meter = MemoryMeter(CPU)
    allocator.hold(2)
    meter.open("outer")
    allocator.touch(1)
    meter.open("inner")
    allocator.touch(3)
    meter.close("inner")
    meter.open("inner")
    allocator.touch(2)
    meter.close("inner")
    meter.close("outer")
    assert meter.gib == {"inner": 3, "outer": 3}


def test_memory_of_a_step_is_named_by_what_takes_it(allocator):
    case = Case(512, "bigbird-64", "fp32", "cpu", 2)
    model = sequence_model.make_model(case, CPU)
    allocator.hold(4)

    class Engine:
        module = model
        __call__ = model.__call__

        def backward(self, loss):
            allocator.touch(5)

        def step(self):
            allocator.touch(0.5)

    for layer in model.bert.encoder.layer:
        layer.attention.self.register_forward_hook(lambda *_: allocator.touch(0.25))
        layer.register_forward_hook(lambda *_: allocator.hold(1))
    model.cls.register_forward_hook(lambda *_: allocator.touch(2))
    data = batch(1, 512, model.config.vocab_size, CPU)
    found = sequence_rank.memory_of(Engine(), data, case, CPU)
    assert found.pop("parameters") + found.pop("optimizer states and buffers") == pytest.approx(4)
    assert found == {"activations kept": 2, "attention": 0.25, "loss": 2, "backward": 5, "step": 0.5}
    model(input_ids=data.tokens, labels=data.labels)  # its hooks are gone
