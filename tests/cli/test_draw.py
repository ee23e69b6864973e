import json
from pathlib import Path

import pytest
from layout_pages import data_of

from ds_sparse.cli import main

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def terminal_of_today(monkeypatch):
    monkeypatch.setenv("LC_ALL", "en_US.UTF-8")


def test_a_layout_that_no_memory_holds_is_drawn(monkeypatch, capsys):
    def refuse(*_):
        raise MemoryError("half a byte")

    monkeypatch.setattr("ds_sparse.sparsity._base.need_memory", refuse)
    assert main(["draw", str(CONFIGS / "bslongformer.json"), "--seq", str(1 << 18), "--heads", "64"]) == 0
    assert capsys.readouterr().out.startswith("all heads: 4096 x 4096 blocks of 64 tokens, density 0.2%")


def test_a_layout_as_a_picture(tmp_path, capsys):
    out = tmp_path / "layout.png"
    assert main(["draw", str(CONFIGS / "bigbird.json"), "--seq", "512", "--heads", "2", "--out", str(out)]) == 0
    assert out.stat().st_size > 1000 and capsys.readouterr().out.endswith(f"drawn to {out}.\n")


BY_LAYER = {"mode": "dense", "layers": {"0-1,4": {"mode": "bslongformer"}, "2": {"block": 32}, "3": None}}


def test_there_is_a_picture_of_every_structure_that_layers_have(tmp_path):
    file, out = tmp_path / "ds.json", tmp_path / "layout.svg"
    file.write_text(json.dumps({"sparse_attention": BY_LAYER}))
    assert main(["draw", str(file), "--seq", "128", "--out", str(out)]) == 0
    names = [f"layout.{layers}.svg" for layers in ("layers-0-1,4", "layers-2", "other-layers")]
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == names


def test_a_page_has_every_structure_of_every_file(tmp_path, capsys):
    file, out = tmp_path / "ds.json", tmp_path / "layout.html"
    file.write_text(json.dumps({"sparse_attention": BY_LAYER}))
    assert main(["draw", str(file), str(CONFIGS / "fixed.json"), "--seq", "128", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{file} and {CONFIGS / 'fixed.json'}: drawn to {out}.\n"
    data = data_of(out)
    assert [(sheet["file"], sheet["name"], sheet["block"]) for sheet in data["sheets"]] == [
        ("ds.json", "other layers", 16), ("ds.json", "layers 0-1,4", 16), ("ds.json", "layers 2", 32),
        ("fixed.json", "", 16),
    ]  # fmt: skip
    assert data["sheets"][0]["about"]["mode"] == "dense"
    assert data["notes"] == ["ds.json: layers 3 are null, the model's own dense attention, and have no layout."]
    assert "<h1>ds.json and fixed.json at 128 tokens</h1>" in out.read_text()


def test_a_page_of_one_head_and_one_layer_has_these_alone(tmp_path):
    file, out = tmp_path / "ds.json", tmp_path / "layout.html"
    file.write_text(json.dumps({"sparse_attention": BY_LAYER}))
    assert main(["draw", str(file), "--seq", "128", "--layer", "4", "--head", "3", "--out", str(out)]) == 0
    (sheet,) = data_of(out)["sheets"]
    assert [head["name"] for head in sheet["heads"]] == ["head 3"] and sheet["about"]["mode"] == "bslongformer"
