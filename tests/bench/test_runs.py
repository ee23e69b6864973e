"""A run in its file, and on the screen."""

import dataclasses
import json

import pytest

from ds_sparse.bench import runs
from ds_sparse.bench.floors import Ceilings
from ds_sparse.bench.machine import FORWARD
from ds_sparse.bench.operations import Row
from ds_sparse.bench.runs import WIDTH, Run

CONDITIONS = {"machine": "a GPU", "driver": "580", "torch": "2.13", "commit": "abc", "date": "2026-11-23"}
ROW = Row("sdd", FORWARD, "dense q @ k^T", 0.1, 0.5)


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


@pytest.mark.parametrize("written", [["--json", "a.json"], ["--json=a.json"], ["--js", "a.json"]])
def test_the_file_is_no_part_of_the_command(written):
    assert runs.without_json(["--cases", "*", *written, "--growth"]) == ["--cases", "*", "--growth"]


def test_a_row_gives_what_it_was_made_of():
    row = {"density": 0.1, **dataclasses.asdict(ROW)}
    assert runs.restored(Row, row) == ROW
    with pytest.raises(ValueError, match="dense of a row: Field required"):
        runs.restored(Row, {name: value for name, value in row.items() if name != "dense"})
    with pytest.raises(ValueError, match="milliseconds of a row: Input should be a valid number"):
        runs.restored(Row, row | {"milliseconds": "long"})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("garbage", "is not JSON; give what ds_sparse bench OPERATION --json has written."),
        (
            "[]",
            "has no operation, arguments, machine, torch, commit, date, ceilings, rows; give what this ",
        ),
        ('{"machine": "", "torch": "", "commit": "", "rows": []}', "has no operation, arguments, date, ceilings; "),
    ],
)
def test_what_is_no_run_is_refused_in_a_sentence(tmp_path, text, sentence):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        runs.read(str(path))
    assert str(caught.value).startswith(f"{path} {sentence}")


def test_fields_of_another_type_are_refused_in_a_sentence(tmp_path, run):
    path = tmp_path / "rows.json"
    run.add([], str(path))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"ceilings": {"bf16": {}}}))
    with pytest.raises(ValueError, match="ceilings.bf16.bytes_per_ms of a run: Field required"):
        runs.read(str(path))
    with pytest.raises(ValueError, match="cannot be read: No such file or directory"):
        runs.read(str(tmp_path / "nothing.json"))


def test_long_sentences_are_wrapped_and_tables_stand(capsys):
    runs.show("a sentence " * 20, f"{'':30}heading")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "" and lines[-1] == f"{'':30}heading"
    assert max(map(len, lines)) <= WIDTH and lines[2].startswith("    a sentence")
