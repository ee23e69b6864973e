"""A run in its file, on the screen, and printed again by `ds_sparse bench show`."""

import dataclasses
import json

import pytest

from ds_sparse.bench import runs, window
from ds_sparse.bench.floors import Ceilings
from ds_sparse.bench.machine import FORWARD, TRAIN
from ds_sparse.bench.runs import WIDTH, Density, Result, Row, Run
from ds_sparse.cli import main

CONDITIONS = {"machine": "a GPU", "driver": "580", "torch": "2.13", "commit": "abc", "date": "2026-11-23"}
ROW = Row("window_attention", FORWARD, 1.0, "SDPA dense", 0.5, rounds=3)


@pytest.fixture
def run():
    ceilings = {"bf16": Ceilings(bytes_per_ms=4.3e9, flops_per_ms=790e9)}
    return Run("attention", ["--cases", "random-64 1"], CONDITIONS, ceilings)


def test_a_run_comes_back_from_its_file_as_far_as_it_has_come(tmp_path, run):
    path = str(tmp_path / "rows.json")
    for name in ("a", "b"):
        run.add([{"name": name, "milliseconds": 1 / 3}], path)
        assert runs.read(path) == run
    assert [row["name"] for row in run.rows] == ["a", "b"]


def test_without_a_file_rows_are_kept_alone(run):
    run.add([{"name": "a"}], None)
    assert run.rows == [{"name": "a"}]


def test_the_heading_has_the_command_the_conditions_and_the_rates(run):
    assert list(run.heading()) == [
        "ds_sparse bench attention --cases 'random-64 1'",
        "machine a GPU, driver 580, torch 2.13, commit abc, date 2026-11-23",
        "measured here in bf16: copy 4.30 TB/s, matrix product 790 TFLOP/s, L2 to SMs not measured, which takes Triton",
    ]


@pytest.mark.parametrize("written", [["--json", "a.json"], ["--json=a.json"], ["--js", "a.json", "--force"]])
def test_the_file_is_no_part_of_the_command(written):
    assert runs.without_json(["--cases", "*", *written, "--growth"]) == ["--cases", "*", "--growth"]


def test_results_come_back_from_their_rows():
    rows = [ROW, dataclasses.replace(ROW, direction=TRAIN, milliseconds=None, reason="forward only")]
    results = [Result(window.Case(64, reach, "fp32"), Density(0.2), rows) for reach in (8, 16)]
    written = [row for result in results for row in window.OPERATION.record(result)]
    assert window.OPERATION.restore(json.loads(json.dumps(written))) == results


def test_long_sentences_are_wrapped_and_tables_stand(capsys):
    runs.show("a sentence " * 20, f"{'':30}heading")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "" and lines[-1] == f"{'':30}heading"
    assert max(map(len, lines)) <= WIDTH and lines[2].startswith("    a sentence")


@pytest.fixture
def written(tmp_path):
    """written(name): the file of a run with one case of windows."""

    def write(name):
        rows = [ROW, dataclasses.replace(ROW, direction=TRAIN)]
        run = Run("window", ["--window", name], CONDITIONS)
        result = Result(window.Case(64, 8, "fp32"), Density(0.2), rows)
        run.add(window.OPERATION.record(result), str(tmp_path / f"{name}.json"))
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


LACKING = [
    (lambda run: run.pop("operation"), " has no operation; give what this version of ds_sparse bench has written with"),
    (lambda run: run.clear(), " has no operation, arguments, machine, torch, commit, date, ceilings, rows; give what"),
    (lambda run: run.update(ceilings={"bf16": {}}), ": ceilings.bf16.bytes_per_ms of a run: Field required."),
    (lambda run: run.update(operation="show"), ": operation 'show' is not one of matmul, attention, window"),
    (lambda run: run.update(operation="bert"), ": bert compares models, by a program that is not installed"),
    (lambda run: run["rows"][0].pop("window"), ": window of a case: Field required."),
    (lambda run: run["rows"][0].update(window=None), ": window of a case: Input should be a valid integer"),
    (lambda run: run["rows"][0].pop("name"), ": name of a row: Field required."),
    (lambda run: run["rows"][0].update(milliseconds="long"), ": milliseconds of a row: Input should be a valid number"),
    (lambda run: run["rows"][1].pop("milliseconds"), ": row 2 has neither milliseconds nor a reason."),
    (
        lambda run: run.update(arguments=["--speed", "3"]),
        ": ds_sparse bench window does not take the options of this run: unrecognized arguments: --speed 3.",
    ),
    (lambda run: run.update(arguments=["--help"]), ": ds_sparse bench window does not take the options of this"),
]


@pytest.mark.parametrize(("change", "sentence"), LACKING)
def test_a_file_that_lacks_something_ends_in_a_sentence_before_anything_is_printed(written, capsys, change, sentence):
    good, path = written("8"), changed(written("16"), change)
    assert main(["bench", "show", str(good), str(path)]) == 1
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.startswith(f"{path}{sentence}")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "cannot be read: No such file or directory"),
        ("garbage", "is not JSON; give what ds_sparse bench OPERATION --json has written."),
        ("[]", "has no operation, arguments, machine, torch, commit, date, ceilings, rows; give what this "),
    ],
)
def test_what_is_no_run_is_refused_in_a_sentence(tmp_path, capsys, text, sentence):
    path = tmp_path / "rows.json"
    if text is not None:
        path.write_text(text)
    assert main(["bench", "show", str(path)]) == 1
    assert capsys.readouterr().err.startswith(f"{path} {sentence}")


def test_peers_of_another_program_are_shown(written, capsys):
    path = changed(written("8"), lambda run: run.update(arguments=["--peers", "somebody"]))
    assert main(["bench", "show", str(path)]) == 0
    assert "--peers somebody" in capsys.readouterr().out


def test_a_cpus_and_a_gpus_runs_are_tables_of_their_own(written, capsys):
    on_cpu, on_gpu = written("8"), written("16")
    changed(on_gpu, lambda run: run.update(arguments=["--device", "cuda"], note="cut off"))
    assert main(["bench", "show", "--markdown", str(on_cpu), str(on_gpu), str(on_cpu)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("| window, each side |") == 4  # attention and products, of each device
    assert "2026-11-23 (cut off): `ds_sparse bench window --device cuda`" in printed
