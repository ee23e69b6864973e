from pathlib import Path

import pytest

from ds_sparse.cli import main

CONFIGS = Path(__file__).parents[2] / "configs"


def test_a_layout_in_the_terminal(capsys):
    assert main(["draw", str(CONFIGS / "local_sliding_window.json"), "--seq", "320", "--heads", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "all heads: 20 x 20 blocks of 16 tokens, density 67.0%"
    assert lines[1].startswith("█" * 9) and len(lines) == 12


def test_each_distinct_head_is_drawn(capsys):
    assert main(["draw", str(CONFIGS / "fixed.json"), "--heads", "5", "--width", "40"]) == 0
    out = capsys.readouterr().out
    assert "heads 0, 4: 128 x 128" in out and "head 3: 128 x 128" in out
    assert max(len(line) for line in out.splitlines() if set(line) <= set(" ░▒▓█")) <= 40


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
        ("bigbird.json", ["--out", "no_such_directory/a.png"], "No such file or directory"),
        ("sparse_attention.schema.json", [], "no sparse_attention block"),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence(capsys, file, options, sentence):
    assert main(["draw", str(CONFIGS / file), *options]) == 1
    out, err = capsys.readouterr()
    assert out == "" and sentence in err
