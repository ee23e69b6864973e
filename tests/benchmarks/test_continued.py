"""A base that goes on: names by how long ago they were seen, evaluation, a run, its tables and its picture."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.commands.train import OPERATION
from benchmarks.pages import continued as page
from benchmarks.pages import gains, tables
from benchmarks.program import main
from benchmarks.train import continued, decoder, results
from benchmarks.train.models import Attention
from benchmarks.train.results import Case, Row
from benchmarks.train.trainer import Folder, Waits
from ds_sparse.bench.show import load

CPU = torch.device("cpu")
CASE = Case("continued", "tiny", "fp32", "cpu", True, 1024, 2e-3, 512, base=2.0, tokens=2048)
PIECES = [b" ", b" read", b"_", b"rows", b"(", b"RowReader"]


def test_names_are_told_apart_by_how_long_ago_they_were_seen():
    ids = np.array([5, 4, 1, 2, 3, 4, 5, 4, 4, 1, 2, 3, 0])
    # The first is not predicted; read_rows is three tokens, with the space before it.
    names = continued.names_seen([ids, ids[1:]], PIECES)
    assert names.tolist() == [[0, 2, 5, 0], [0, 6, 7, 6], [0, 9, 12, 7], [1, 1, 4, 0], [1, 5, 6, 0], [1, 8, 11, 7]]
    kinds = continued.kinds_of(names[:, 3], [0, 7, 9])
    assert {kind: np.flatnonzero(which).tolist() for kind, which in kinds.items()} == {
        "0": [1],
        "7": [2, 5],
        "new": [0, 3, 4],
        "far": [2, 5],
    }


@pytest.mark.parametrize(("length", "least"), [(64, 32), (256, 128), (512, 0)])
def test_a_token_is_predicted_once_with_half_a_sequence_before_it(length, least, monkeypatch):
    rows = np.arange(1024).reshape(2, 512)
    task = continued.Continued(None, length, rows, rows, replace(CASE, arm="x"), CPU, names=None, weights=None)
    seen = []

    def losses(self, tokens):
        seen.append(tokens)
        return tokens[:, 1:] + (tokens[:, 1:] - tokens[:, :1]) / length

    monkeypatch.setattr(decoder.Bytes, "losses", losses)
    found = task.held_out_losses()
    assert torch.equal(found.floor().long(), torch.from_numpy(rows)[:, 1:])
    before = ((found - found.floor()) * length).round()
    assert (before[:, length - 1 :] >= least).all() and before.max() == length - 1
    assert all(part.numel() <= CASE.tokens_per_step for part in seen)


def test_measures_are_of_places_and_of_whole_names():
    rows = np.zeros((2, 512), np.uint16)
    names = np.array([[0, 1, 3, 0], [1, 2, 3, 70], [1, 400, 402, 300], [0, 100, 101, 5]])
    task = continued.Continued(None, 64, rows, rows, CASE, CPU, names=names, weights=None)
    task.found = torch.arange(1, 512.0) + torch.tensor([[0.0], [1000.0]])  # a token's is its place, and 1000
    assert task.measures() == {
        "place_0": 532,
        "place_64": 500 + (64 + 255) / 2,
        "place_256": 500 + (256 + 511) / 2,
        "name_0": 100,
        "name_64": 1002,
        "name_256": 2801,
        "name_new": 3,
        "name_far": (1002 + 2801) / 2,
    }


def test_positions_are_stretched_by_as_much_farther_as_tokens_see():
    found = {
        (kind, length): continued.positions(continued.reach_of(Attention(kind, length), CASE), CASE)
        for kind, length in (("dense", 64), ("local_sliding_window", 512), ("indexer", 512))
    }
    factors = [found_of.get("rope_parameters", {}).get("factor") for found_of in found.values()]
    assert factors == [None, 80 / 64, 8]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--arms base-128", "--arms base-128: the base is base-64; it comes first by itself."),
        ("--arms fixed-512", "--arms fixed-512: is no arm of continued; give ATTENTION-LENGTH of dense, local_sliding"),
        ("--experiment decoder --base 2", "--base: decoder has none; leave it out, or give --experiment continued."),
    ],
)
def test_what_cannot_be_is_refused(options, sentence, capsys):
    assert main(["train", "--experiment", "continued", "--quick", *options.split()]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a run with its data, without rows."""
    path = tmp_path_factory.mktemp("continued") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continued, "QUICK_BYTES", 500_000)
        Folder(path, CASE).data(lambda data: continued.prepare(CASE, data))
    return path


def test_all_arms_go_on_from_one_base_and_finished_ones_are_not_trained_again(folder, capsys, monkeypatch):
    path = folder.parent / "rows.json"
    command = ["train", "--experiment", "continued", "--quick", "--tokens-per-step", "1024", "--tokens", "2048"]
    command += ["--folder", str(folder), "--json", str(path), "--arms"]
    assert main([*command, "dense-64,indexer-512"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("A structure is worth it if its loss of names that were last seen 64 tokens ago or more")
    rows = {case.arm: row for case, (row,) in load(str(path))[2]}
    assert [row.curve[-1].tokens for row in rows.values()] == [4096, 2048, 2048]
    assert "trained on" in rows["dense-64"].data and "held out 8 documents, in sequences" in printed
    base, short, long = (continued.phases(replace(CASE, arm=arm), folder / "data", CPU)[0] for arm in rows)
    losses = []
    for phase in (short, long):
        task = phase(None)
        with torch.no_grad():
            losses.append(task.evaluate())
    assert losses[0] == pytest.approx(rows["base-64"].held_out, abs=1e-5), "goes on from there"
    assert losses[1] == pytest.approx(losses[0], abs=0.2)
    assert base(None).length == 64
    monkeypatch.setattr(decoder.Bytes, "loss", lambda *_: pytest.fail("trains"))
    assert main([*command, "indexer-512", "--force"]) == 0
    assert {case.arm: row for case, (row,) in load(str(path))[2]} == {
        arm: rows[arm] for arm in ("base-64", "indexer-512")
    }


def test_an_arm_waits_for_its_base(folder):
    with pytest.raises(
        Waits, match="base-64, seed 9, 2 times 2,048 tokens, has left no weights here; give the command"
    ):
        continued.phases(replace(CASE, arm="dense-64", seed=9), folder / "data", CPU)


def made_up(arm, seed, far, seconds=1.0):
    """A job with losses of names."""
    measures = {"place_0": 2.0, "name_0": 1.0, "name_512": far, "name_new": 9.0, "name_far": far}
    curve = [results.Point(seconds, 2048, 1.0, "tokens")]
    row = Row(1.0, 1.0, 4.0, curve, 1.0, 1.0, measures, data="trained on little")
    return replace(CASE, quick=False, arm=arm, seed=seed), [row]


JOBS = [
    made_up("base-512", 0, 8.5),
    *(made_up("dense-512", seed, far) for seed, far in enumerate((8.0, 8.2))),
    *(made_up("indexer-4096", seed, far) for seed, far in enumerate((7.0, 7.1))),
    *(made_up("bigbird-4096", seed, far) for seed, far in enumerate((7.9, 8.2))),
    made_up("dense-4096", 1, 7.2),
]


def test_what_decides_is_said_with_the_losses():
    ((_, table),) = ((name, table) for name, table in results.tables_of(JOBS).items() if name.endswith(", name"))
    assert "512 tokens ago or more (far) is lower than that of dense-512" in table.notes[-1]
    assert table.heading == ["arm", "0", "512", "new", "far", "over dense-512", "worth it"]
    assert {row[0].strip("`"): row[-2:] for row in table.rows} == {
        "base-512": ["+0.5000", "one seed"],
        "dense-512": ["", ""],
        "indexer-4096": ["-1.0500 ± 0.0707", "yes"],
        "bigbird-4096": ["-0.0500 ± 0.0707", "no"],
        "dense-4096": ["-1.0000", "one seed"],
    }
    lines = [line for lines in results.report(JOBS) for line in lines]
    assert "trained on little" in lines and any("yes" in line.split() for line in lines)


def test_the_picture_has_a_line_an_arm(tmp_path, monkeypatch):
    path = tmp_path / "made-up.json"
    about = {
        "operation": "train",
        "arguments": [],
        "machine": "a GPU",
        "torch": "2",
        "commit": "c",
        "date": "2026-11-29",
    }
    rows = [row for job in JOBS for row in OPERATION.record(job)]
    path.write_text(json.dumps(about | {"ceilings": {}, "rows": rows}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    losses, more = page.draw_continued(["made-up"]).axes
    lines = {line.get_label(): line.get_ydata().tolist() for line in losses.get_lines()}
    assert lines["indexer-4096"] == pytest.approx([1, 7.05, 9]) and len(lines) == 5
    assert [label.get_text() for label in losses.get_xticklabels()] == ["0 on", "512 on", "new"]
    assert any(line.get_ydata()[1] == pytest.approx(-1.05) for line in more.get_lines() if len(line.get_ydata()) == 3)
    assert "| `indexer-4096` | " in gains.train_tables(["made-up"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_quick_runs_on_a_gpu(tmp_path):
    path = tmp_path / "rows.json"
    command = "train --experiment continued --quick --device cuda --minutes 0.02"
    assert main([*command.split(), "--json", str(path)]) == 0
    found = load(str(path))[2]
    assert [row.reason for _, (row,) in found if row.reason] == []
    assert [case.arm for case, _ in found] == continued.default_arms(replace(CASE, minutes=0.02))
