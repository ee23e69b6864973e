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
