from __future__ import annotations

import json

import pytest

from ds_sparse.bench.machine import BACKWARD, FORWARD
from ds_sparse.plan.results import ATTENTION, BERT, COMMITTED, SEQUENCE, TRAINING, from_files


def test_kernels_and_steps_are_the_rows_of_the_files(results):
    rows = json.loads((COMMITTED / "bert-h200.json").read_text())["rows"]
    steps = [step for step in results.bert if step.case.predicts_all and not step.case.dropout]
    assert [step.milliseconds for step in steps][: len(rows)] == [row["milliseconds"] for row in rows]
    assert {kernel.direction for kernel in results.kernels} == {FORWARD, BACKWARD}
    assert {kernel.sparse for kernel in results.kernels} == {True, False}
    assert len(results.training) == 4 and results.machine == "NVIDIA H200"


def test_each_file_is_named_with_its_commit(results):
    named = {source.partition(":")[0] for source in results.sources}
    assert named == {*ATTENTION, *BERT, *SEQUENCE, TRAINING}
    assert all("commit " in source for source in results.sources)


def test_peers_beside_dense_attention_are_left_out(tmp_path):
    data = json.loads((COMMITTED / "attention-peers-h200.json").read_text())
    peers = {row["peer"] for row in data["rows"]}
    assert len(peers) > 2
    found = from_files([COMMITTED / "attention-peers-h200.json"])
    wanted = [r for r in data["rows"] if r["peer"] in ("ds_sparse", "cudnn") and r["direction"] in (FORWARD, BACKWARD)]
    assert len(found.kernels) == len(wanted)


def test_files_of_two_machines_and_of_other_operations_are_refused(tmp_path):
    other = json.loads((COMMITTED / "bert-h200.json").read_text()) | {"machine": "NVIDIA B200"}
    (tmp_path / "b200.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="is of NVIDIA B200, and the files before it of NVIDIA H200; give one"):
        from_files([COMMITTED / "bert-h200.json", tmp_path / "b200.json"])
    with pytest.raises(ValueError, match=r"window-h200.json: is of `ds_sparse bench window`; rates come from"):
        from_files([COMMITTED / "window-h200.json"])


def test_one_run_can_be_left_out(results):
    run = results.training[1]
    others = results.without(run).training
    assert len(others) == 3 and run not in others
