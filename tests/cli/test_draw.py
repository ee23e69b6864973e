import json
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("file", "options", "sentence"),
    [
        ("bigbird.json", ["--seq", "40"], "the sequence length 40 is not a multiple"),
        ("bigbird.json", ["--out", "a.jpg"], ".png or .svg"),
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
