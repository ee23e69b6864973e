import json
from pathlib import Path

import pytest
from layout_pages import data_of

from ds_sparse.cli import main

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def terminal_of_today(monkeypatch):
    monkeypatch.setenv("LC_ALL", "en_US.UTF-8")


def test_a_layout_in_the_terminal(capsys):
    assert main(["draw", str(CONFIGS / "local_sliding_window.json"), "--seq", "320", "--heads", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "all heads: 20 x 20 blocks of 16 tokens, density 67.0%"
    assert lines[1].startswith("█" * 9) and len(lines) == 12


def test_the_last_block_may_be_short(capsys):
    assert main(["draw", str(CONFIGS / "fixed.json"), "--seq", "1000", "--heads", "1"]) == 0
    assert capsys.readouterr().out.startswith("all heads: 63 x 63 blocks of 16 tokens, density ")


def test_distinct_heads_are_drawn_beside_each_other_and_one_alone(capsys):
    fixed = str(CONFIGS / "fixed.json")
    assert main(["draw", fixed, "--heads", "5", "--width", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "128 x 128 blocks of 16 tokens"
    assert lines[1].split() == ["heads", "0,", "4", "head", "1", "head", "2", "head", "3"]
    assert max(map(len, lines[:-1])) <= 64
    assert main(["draw", fixed, "--heads", "5", "--width", "40", "--head", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("head 3: 128 x 128")
    assert max(map(len, lines[1:-1])) <= 40


def test_a_layout_that_no_memory_holds_is_drawn(monkeypatch, capsys):
    def refuse(*_):
        raise MemoryError("half a byte")

    monkeypatch.setattr("ds_sparse.sparsity._base.need_memory", refuse)
    assert main(["draw", str(CONFIGS / "bslongformer.json"), "--seq", str(1 << 18), "--heads", "64"]) == 0
    assert capsys.readouterr().out.startswith("all heads: 4096 x 4096 blocks of 64 tokens, density 0.2%")


@pytest.mark.parametrize("name", ["layout.png", "layout.svg"])
def test_a_layout_as_a_picture(tmp_path, capsys, name):
    assert (
        main(["draw", str(CONFIGS / "bigbird.json"), "--seq", "512", "--heads", "2", "--out", str(tmp_path / name)])
        == 0
    )
    assert (tmp_path / name).stat().st_size > 1000
    assert capsys.readouterr().out.endswith(f"drawn to {tmp_path / name}.\n")


BY_LAYER = {"mode": "dense", "layers": {"0-1,4": {"mode": "bslongformer"}, "2": {"block": 32}, "3": None}}


def test_there_is_a_picture_of_every_structure_that_layers_have(tmp_path, capsys):
    file, out = tmp_path / "ds.json", tmp_path / "layout.svg"
    file.write_text(json.dumps({"sparse_attention": BY_LAYER}))
    assert main(["draw", str(file), "--seq", "128"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if ":" in line and "live block" not in line]
    assert lines == [
        "other layers: mode dense",
        "all heads: 8 x 8 blocks of 16 tokens, density 100.0%",
        "layers 0-1,4: mode bslongformer",
        "all heads: 8 x 8 blocks of 16 tokens, density 53.1%",
        "layers 2: mode dense",
        "all heads: 4 x 4 blocks of 32 tokens, density 100.0%",
    ]
    assert main(["draw", str(file), "--seq", "128", "--out", str(out)]) == 0
    names = [f"layout.{layers}.svg" for layers in ("layers-0-1,4", "layers-2", "other-layers")]
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == names
    capsys.readouterr()
    assert main(["draw", str(file), "--seq", "128", "--layer", "4"]) == 0
    assert capsys.readouterr().out.startswith("all heads: 8 x 8 blocks of 16 tokens, density 53.1%")
    assert main(["draw", str(file), "--seq", "128", "--layer", "3"]) == 1
    assert "layer 3 is null, dense without blocks" in capsys.readouterr().err


def test_files_are_drawn_one_after_the_other_under_their_names(capsys):
    dense, fixed = str(CONFIGS / "dense.json"), str(CONFIGS / "fixed.json")
    assert main(["draw", dense, fixed, "--seq", "64", "--heads", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{dense}: mode dense" and f"{fixed}: mode fixed" in lines


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


def test_a_picture_is_of_one_file(tmp_path, capsys):
    files = [str(CONFIGS / "dense.json"), str(CONFIGS / "fixed.json")]
    assert main(["draw", *files, "--out", str(tmp_path / "a.png")]) == 1
    assert "a picture is of one file; a page, .html, has several." in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("file", "options", "sentence"),
    [
        ("bigbird.json", ["--out", "a.jpg"], "drawn as .png, .svg or .html, got 'a.jpg'"),
        ("bigbird.json", ["--out", "no_such_directory/a.png"], "there is no folder no_such_directory. Make it first."),
        ("bigbird.json", ["--head", "12"], "--head 12: there are 12 heads, from 0 to 11."),
        ("bigbird.json", ["--seq", "16"], "must be smaller than overall number of blocks"),
        ("sparse_attention.schema.json", [], "the block is nested, where nothing reads it"),
        ("../examples/bing_bert/bert_tiny.json", [], "no sparse_attention block"),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence(capsys, file, options, sentence):
    assert main(["draw", str(CONFIGS / file), *options]) == 1
    out, err = capsys.readouterr()
    assert out == "" and sentence in err
