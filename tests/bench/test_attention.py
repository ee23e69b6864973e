import dataclasses
from argparse import Namespace

import pytest
import torch

from ds_sparse.bench import attention, run
from ds_sparse.bench.cases import Case
from ds_sparse.bench.floors import Ceilings
from ds_sparse.bench.machine import BACKWARD, DIRECTIONS, FORWARD, TRAIN
from ds_sparse.bench.reasons import Unsupported
from ds_sparse.bench.runs import Density, Result, Row
from ds_sparse.cli import main

CPU = torch.device("cpu")
CASE = Case("toy", "random", 16, 2, 2, 128, 16, {"density": 0.4}, "fp32")


def result(times, case=CASE, floor=1.0):
    """A result with these milliseconds forward of each peer, twice as many backward, and one floor for each way."""
    rows = [
        Row(peer, way, ms * factor, to_ours=ms / times["ds_sparse"], to_floor=ms * factor / floor, floor_ms=floor,
            tflops=100 / factor, rounds=3)
        for peer, ms in times.items()
        for way, factor in ((FORWARD, 1), (BACKWARD, 2), (TRAIN, 3))
    ]  # fmt: skip
    return Result(case, Density(case.options["density"]), rows)


def test_flops_and_floors_of_a_cpu_are_those_of_live_blocks(measure):
    found = measure(attention.OPERATION, CASE, ["ds_sparse", "sdpa"])
    density = found.about.density
    assert density == pytest.approx(0.4, abs=0.1)
    for row in found.rows:
        flops = {FORWARD: 4, BACKWARD: 10, TRAIN: 14}[row.direction] * 16 * 2 * 2 * 128 * 128 * density
        assert row.tflops == pytest.approx(flops / row.milliseconds / 1e9)
        dense = found.row("sdpa", row.direction).milliseconds
        assert row.to_floor == pytest.approx(row.milliseconds / (density * dense))
    alone = measure(attention.OPERATION, CASE, ["ds_sparse"])
    assert all(row.to_floor is None for row in alone.rows)
    assert not any(line.startswith("floor") for line in attention.lines([alone]))


def test_floors_of_a_gpu_come_from_its_ceilings(monkeypatch):
    """At 1 byte a millisecond: four operands forward, eight backward; L2 is as fast and brings keys and values."""
    problem = attention.Problem(dataclasses.replace(CASE, options={"density": 1.1}), CPU, Namespace())
    problem.device, operand = torch.device("cuda"), 2 * 2 * 128 * 16 * 4

    def floors(l2_rate):
        ceilings = Ceilings(bytes_per_ms=1, flops_per_ms=1e12, l2_bytes_per_ms=l2_rate)
        monkeypatch.setattr(Ceilings, "measure", lambda *_: ceilings)
        numbers = (attention.numbers_of(problem, None, Row("", way), {}) for way in DIRECTIONS)
        return zip(*((found["floor_ms"], found["l2_floor_ms"]) for found in numbers))

    by_memory, by_l2 = floors(l2_rate=1)
    assert by_memory == (4 * operand, 8 * operand, 12 * operand)
    assert by_l2 == (2 * operand, 2 * operand, None)
    assert list(floors(l2_rate=None)) == [by_memory, (None,) * 3]


def test_break_even_is_where_the_lines_cross():
    def crossed(block, density, dense):
        case = Case("", "random", block, 1, 1, 128, 16, {"density": density})
        return result({"ds_sparse": 1.0, "cudnn": dense}, case)

    results = [crossed(16, tenths / 10, 2.0 ** (4 - tenths)) for tenths in (1, 3, 5, 7)]
    results += [crossed(128, tenths / 10, 0.5) for tenths in (1, 9)]
    assert attention.crossings(results, "cudnn") == {16: ["0.40"] * 3, 128: ["below 0.10"] * 3}


def test_break_even_and_growth_print_their_own_summary(tmp_path, printed_again, monkeypatch):
    def run_case(entry, case, names, *_):
        return result(dict.fromkeys(names, 1.0), dataclasses.replace(case, options={"density": 0.5}))

    monkeypatch.setattr(run, "run_case", run_case)
    path = str(tmp_path / "rows.json")
    assert main(["bench", "attention", "--break-even", "--cases", "random-64-[19]0%", "--json", path]) == 0
    assert "density at which sdpa is as fast" in printed_again(path)
    assert main(["bench", "attention", "--growth", "--cases", "8k,16k", "--json", path, "--force"]) == 0
    assert "x half" in printed_again(path)


def test_a_name_says_what_a_cpu_runs_and_what_is_cut_to_one_case_runs_once(capsys, monkeypatch):
    ran = []

    def run_case(entry, case, *_):
        ran.append(case)
        return result({"ds_sparse": 1.0}, dataclasses.replace(case, options={"density": 0.5}))

    monkeypatch.setattr(run, "run_case", run_case)
    assert main("bench attention --cases fixed-16,fixed-16-16k,longformer-128-d128-2k".split()) == 0
    assert [(case.name, case.seq_len) for case in ran] == [("fixed-16-2k", 2048), ("longformer-128-d128-2k", 2048)]
    _, command, *printed = capsys.readouterr().out.splitlines()
    assert "16k" in command and "16k" not in "\n".join(printed)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ("", attention.DEFAULTS["cpu"]),
        ("--quick", ["ds_sparse", "composition", "sdpa", "sdpa-mask"]),
        ("--break-even", ["ds_sparse", "sdpa"]),
        ("--growth", ["ds_sparse"]),
        ("--growth --peers sdpa", ["sdpa"]),
        ("--options", ["ds_sparse", *attention.OPTIONS]),
    ],
)
def test_the_peers_that_are_measured_by_default(options, names):
    chosen = Namespace(
        peers=["sdpa"] if "sdpa" in options else None, growth="--growth" in options, options="--options" in options,
        break_even="--break-even" in options, quick="--quick" in options, device="cpu",
    )  # fmt: skip
    assert attention.names(chosen) == names


@pytest.mark.parametrize(("block", "reason"), [(128, "the same as flex-max"), (16, "no tiles below 32")])
def test_blocks_that_flex_attention_has_no_tiles_for(block, reason):
    case = Case("toy", "random", block, 1, 1, 256, 16, {"density": 0.5}, "fp32")
    problem = attention.Problem(case, torch.device("cpu"), Namespace())
    with pytest.raises(Unsupported, match=reason):
        attention.OPERATION.peers["flex-blocks"](problem)


@pytest.mark.slow("compiles FlexAttention for half a minute")
def test_flex_attention_is_timed_forward_on_a_cpu(measure):
    case = Case("toy", "random", 16, 1, 2, 256, 16, {"density": 0.4}, "fp32")
    found = measure(attention.OPERATION, case, ["ds_sparse", "flex"], repeats=2, seconds=1)
    assert found.row("flex", FORWARD).milliseconds > 0
    assert [row.reason for row in found.rows if row.name == "flex"][1:] == ["on a CPU it is forward only"] * 2


def test_a_gpu_measures_no_fp32(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for operation in ("attention", "packed", "selected"):
        assert main(["bench", operation, "--device", "cuda", "--dtype", "fp32"]) == 2
        assert "--dtype fp32: on a GPU the peers" in capsys.readouterr().err
