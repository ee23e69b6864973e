"""`ds_sparse bench show`; that it prints what a run printed is in the tests of the operations."""

import json

import pytest

from ds_sparse.bench import window
from ds_sparse.bench.machine import FORWARD, TRAIN
from ds_sparse.bench.operations import Row
from ds_sparse.bench.runs import Run
from ds_sparse.cli import main

CONDITIONS = {"machine": "a machine", "torch": "2.13", "commit": "abc", "date": "2026-11-23"}


@pytest.fixture
def written(tmp_path):
    """written(name): the file of a run with one case of windows."""

    def write(name):
        rows = [Row("window_attention", direction, "SDPA dense", 1.0, 0.5, rounds=3) for direction in (FORWARD, TRAIN)]
        run = Run("window", ["--window", name], CONDITIONS)
        run.add(window.record((window.Case(64, 8, "fp32"), rows)), str(tmp_path / f"{name}.json"))
        return tmp_path / f"{name}.json"

    return write


def test_several_runs_are_printed_one_after_the_other(written, capsys):
    assert main(["bench", "show", str(written("8")), str(written("16"))]) == 0
    printed = capsys.readouterr().out
    assert printed.index("ds_sparse bench window --window 8\n") < printed.index("ds_sparse bench window --window 16\n")
    assert printed.count("window_attention         1.00    0.500") == 2


def changed(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda run: run.pop("operation"),
            " has no operation; give what this version of ds_sparse bench has written with --json.",
        ),
        (lambda run: run.update(operation="show"), ": operation 'show' is not one of matmul, attention, window"),
        (lambda run: run["rows"][0].pop("window"), ": window of a case: Field required."),
        (lambda run: run["rows"][1].pop("milliseconds"), ": row 2 has neither milliseconds nor a reason."),
        (
            lambda run: run.update(arguments=["--speed", "3"]),
            ": ds_sparse bench window does not take the options of this run: unrecognized arguments: --speed 3.",
        ),
        (lambda run: run.update(arguments=["--help"]), ": ds_sparse bench window does not take the options of this"),
    ],
)
def test_a_file_that_lacks_something_ends_in_a_sentence_before_anything_is_printed(written, capsys, change, sentence):
    good, path = written("8"), changed(written("16"), change)
    assert main(["bench", "show", str(good), str(path)]) == 1
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.startswith(f"{path}{sentence}")


def test_a_cpus_and_a_gpus_runs_are_tables_of_their_own(written, capsys):
    on_cpu, on_gpu = written("8"), written("16")
    changed(on_gpu, lambda run: run.update(arguments=["--device", "cuda"], note="cut off"))
    assert main(["bench", "show", "--markdown", str(on_cpu), str(on_gpu), str(on_cpu)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("| window, each side |") == 4  # attention and products, of each device
    assert "2026-11-23 (cut off): `ds_sparse bench window --device cuda`" in printed
