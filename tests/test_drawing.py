import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sparse.drawing import draw, save_drawing

modest = settings(deadline=None, derandomize=True, max_examples=60)
LIVE = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]])


def test_a_small_layout_is_drawn_exactly():
    assert draw(LIVE, 16).splitlines() == [
        "all heads: 3 x 3 blocks of 16 tokens, density 55.6%",
        "█▄",
        " ▀▀",
        "█ live block, blank: no block; rows are queries, columns keys",
    ]


def test_each_distinct_head_is_drawn_once():
    text = draw(torch.stack([LIVE, LIVE.T, LIVE]), 16)
    assert "heads 0, 2: 3 x 3" in text
    assert "head 1: 3 x 3" in text
    assert text.count("density") == 2


def test_a_large_layout_is_scaled_down_and_single_blocks_still_show():
    layout = torch.zeros(100, 100, dtype=torch.bool)
    layout[:50, :50] = True
    layout[99, 99] = True
    picture = draw(layout, 64, columns=10).splitlines()
    assert picture[1:6] == ["█████", "█████", "▒▒▒▒▒", "", "         ░"]
    assert picture[6].startswith("one character = 20 x 10 blocks")
    assert all(len(line) <= 10 for line in picture[1:6])


@modest
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 40))
def test_no_picture_is_wider_than_asked_for_and_dense_is_full(rows, columns, width):
    picture = draw(torch.ones(rows, columns, dtype=torch.bool), 16, columns=width).splitlines()[1:-1]
    assert all(0 < len(line) <= width for line in picture)
    assert set("".join(picture[:-1])) <= {"█"}


@pytest.mark.parametrize(("name", "magic"), [("layout.png", b"\x89PNG"), ("layout.svg", b"<?xml")])
def test_pictures_are_files_of_their_kind_and_reproducible(tmp_path, name, magic):
    layout = torch.stack([LIVE, LIVE.T])
    save_drawing(layout, 16, tmp_path / name, "a title")
    save_drawing(layout, 16, tmp_path / f"again_{name}", "a title")
    assert (tmp_path / name).read_bytes().startswith(magic)
    assert (tmp_path / name).read_bytes() == (tmp_path / f"again_{name}").read_bytes()


def test_other_endings_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=".png or .svg"):
        save_drawing(LIVE, 16, tmp_path / "layout.jpg")
    assert not list(tmp_path.iterdir())


def test_a_missing_matplotlib_is_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        save_drawing(LIVE, 16, tmp_path / "layout.png")
