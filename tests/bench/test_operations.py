import pytest
import torch

from ds_sparse.bench import operations
from ds_sparse.bench.floors import Ceilings, Size
from ds_sparse.bench.machine import BACKWARD, DIRECTIONS, FORWARD, TRAIN
from ds_sparse.bench.operations import Row, competitor, find, measure, without_time

CPU = torch.device("cpu")
SIZE = Size(batch=1, heads=1, seq_len=64, head_dim=16, density=0.25, itemsize=4)


@pytest.fixture
def competitors():
    x = torch.randn(64, 64, requires_grad=False)
    return [
        competitor("half", "dense", lambda x: x.softmax(-1), (x,)),
        competitor("dense", "dense", lambda x: x.softmax(-1), (x,)),
        competitor("kernel", "dense", lambda x: x.softmax(-1), (x,), "it is forward only"),
    ]


def test_each_is_timed_in_the_directions_it_has(competitors):
    rows = measure(competitors, SIZE, torch.float32, CPU, repeats=2, seconds=60, title="")
    assert [(row.name, row.direction) for row in rows] == [(x.name, d) for x in competitors for d in DIRECTIONS]
    assert [row.direction for row in rows if row.reason] == [BACKWARD, TRAIN]
    for row in rows:
        if not row.reason:
            dense = find(rows, "dense", row.direction).milliseconds
            assert row.to_dense == pytest.approx(row.milliseconds / dense)
            assert (row.floor_ms, row.to_floor, row.bound) == (None, None, "")
    assert find(rows, "kernel", BACKWARD) is None
    assert list(without_time(rows)) == [f"kernel: no {BACKWARD} or {TRAIN}: it is forward only"]


def test_floor_of_a_gpu_is_that_of_its_rates(competitors, monkeypatch):
    rates = Ceilings(bytes_per_ms=1e6, flops_per_ms=1e9, l2_bytes_per_ms=1e7)
    monkeypatch.setattr(operations.Ceilings, "measure", lambda device, dtype: rates)
    monkeypatch.setattr(operations, "time_of", lambda call, inputs, grad, direction, device: 0.5)
    of_softmax = [competitor("dense softmax", "dense softmax", c.call, c.inputs) for c in competitors[:1]]
    rows = measure(of_softmax, SIZE, torch.float32, torch.device("cuda"), repeats=1, seconds=60, title="")
    sparse_ms = 64 * 64 / 4 * 4 / 1e6
    assert [row.floor_ms for row in rows] == pytest.approx([2 * sparse_ms, 3 * sparse_ms, 5 * sparse_ms])
    assert [row.to_floor for row in rows] == pytest.approx([0.5 / row.floor_ms for row in rows])
    assert {row.bound for row in rows} == {"copy"}


def test_one_line_a_reason():
    rows = [
        *(Row(name, direction, "dense", reason="needs a GPU") for name in ("a", "b") for direction in DIRECTIONS),
        Row("c", FORWARD, "dense", 1.0),
        *(Row("c", direction, "dense", reason="forward only") for direction in (BACKWARD, TRAIN)),
    ]
    assert list(without_time(rows)) == [
        "a, b: no time: needs a GPU",
        "c: no backward or forward+backward: forward only",
    ]
