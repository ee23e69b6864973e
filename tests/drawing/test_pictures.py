import io
import re
import sys

import matplotlib.image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sparse import BlockIndex, picture
from ds_sparse.drawing import Sheet, draw, pictures, save_drawing, save_page, takes_ascii_only
from ds_sparse.layout import LayoutRows
from ds_sparse.sparsity import BigBirdSparsityConfig, FixedSparsityConfig

modest = settings(deadline=None, derandomize=True, max_examples=60)
LIVE = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]])


@pytest.fixture(autouse=True)
def terminal_of_today(monkeypatch):
    monkeypatch.setenv("LC_ALL", "en_US.UTF-8")


def test_a_small_layout_is_drawn_exactly():
    assert draw(LIVE, 16).splitlines() == [
        "all heads: 3 x 3 blocks of 16 tokens, density 55.6%",
        "█▄",
        " ▀▀",
        "█ live block, blank: no block; rows are queries, columns keys",
    ]


def test_single_tokens_are_named_so():
    assert draw(LIVE, 1).splitlines()[0::3] == [
        "all heads: 3 x 3 tokens, density 55.6%",
        "█ live pair, blank: no pair; rows are queries, columns keys",
    ]
    assert "one character = 4 x 2 pairs; ░ ▒ ▓ █ share of live pairs" in draw(LIVE, 1, columns=2)


def test_long_names_of_equal_heads_fit_over_their_picture():
    odd = torch.stack([LIVE if head % 2 else LIVE.T for head in range(24)])
    odd[-4:] = LIVE
    lines = draw(odd, 16, columns=32).splitlines()
    assert max(map(len, lines[:-1])) <= 32
    assert "19-23" in " ".join(lines)


def test_one_head_is_drawn_alone():
    assert draw(torch.stack([LIVE, LIVE.T, LIVE]), 16, head=1).splitlines()[1:3] == ["▀█▄", "  ▀"]
    assert draw(LIVE, 16, head=5).startswith("head 5: 3 x 3 blocks"), "all heads share this layout"


STRUCTURE, INDEX = FixedSparsityConfig(num_heads=4), BlockIndex.build(LIVE, 16)


@pytest.mark.parametrize(
    ("what", "arguments", "sentence"),
    [
        (STRUCTURE, {"block": 64}, "block is 64 beside a structure, which has its own; for 64 tokens give tokens=64."),
        (INDEX, {"block": 16}, "block is 16 beside an index, which has its own; leave block out."),
        (INDEX, {"tokens": 64}, "tokens is 64 beside an index, which has its length; leave tokens out."),
        (LIVE, {"tokens": 64}, "tokens is 64 beside a layout, which has its length; leave tokens out."),
        (STRUCTURE, {"tokens": 0}, "A layout needs a sequence length of at least 1, got 0."),
        (STRUCTURE, {"head": 4}, "head is 4; it has to be from 0 to 3."),
        (BlockIndex.build(LIVE.expand(4, 3, 3), 16), {"head": 7}, "head is 7; it has to be from 0 to 3."),
        (torch.stack([LIVE, LIVE.T]), {"head": 2}, "head is 2; it has to be from 0 to 1."),
        (LIVE, {"head": -1}, "head is -1; it has to be 0 or more."),
    ],
)
def test_arguments_that_would_be_ignored_are_refused(what, arguments, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        draw(what, **arguments)


def test_no_file_is_of_a_head_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="head is 3; it has to be from 0 to 1"):
        save_drawing(torch.stack([LIVE, LIVE.T]), 16, tmp_path / "layout.png", head=3)
    with pytest.raises(ValueError, match="head is 4; it has to be from 0 to 3"):
        save_page([Sheet("", "", STRUCTURE.make_rows(256), 16, 4, head=4)], tmp_path / "layout.html", "a title")
    assert not list(tmp_path.iterdir())


OF_SEQUENCES = torch.stack([torch.stack([LIVE, LIVE.T, LIVE.T]), LIVE.expand(3, 3, 3)])


@pytest.mark.parametrize(
    ("layout", "head", "names"),
    [
        (OF_SEQUENCES, None, {"sequence 0, head 0; sequence 1, heads 0-2", "sequence 0, heads 1, 2"}),
        (OF_SEQUENCES, 1, {"sequence 0, head 1", "sequence 1, head 1"}),
        (OF_SEQUENCES[:, :, :1], 0, {"head 0: 1 x 3 tokens, density 33.3%"}),
        (OF_SEQUENCES[:, 1:2], None, {"sequence 0", "sequence 1"}),
        (OF_SEQUENCES[:, 1:2], 5, {"sequence 0, head 5", "sequence 1, head 5"}),
        (OF_SEQUENCES[[1, 0, 1], :2], None, {"sequences 0, 2, heads 0, 1; sequence 1, head 0", "sequence 1, head 1"}),
        (OF_SEQUENCES[1:], None, {"all heads: 3 x 3 tokens, density 55.6%"}),
    ],
)
def test_heads_of_sequences_are_named_by_both(layout, head, names):
    lines = draw(layout, columns=100, head=head).splitlines()
    assert names <= {name.strip() for line in lines[:2] for name in line.split("  ")}


def test_a_large_layout_is_scaled_down_and_single_blocks_still_show():
    layout = torch.zeros(100, 100, dtype=torch.bool)
    layout[:50, :50] = True
    layout[99, 99] = True
    picture = draw(layout, 64, columns=10).splitlines()
    assert picture[1:6] == ["█████", "█████", "▒▒▒▒▒", "", "         ░"]
    assert picture[6].startswith("one character = 20 x 10 blocks")
    assert all(len(line) <= 10 for line in picture[1:6])


@pytest.mark.parametrize("options", [{}, {"horizontal_global_attention": True}, {"num_local_blocks": 6}], ids=str)
@pytest.mark.parametrize("blocks", [384, 1002, 6252])
def test_a_pattern_that_repeats_itself_within_a_character_makes_no_stripes(blocks, options):
    """Of windows of four blocks a character of 98 has 24 or 25 last ones, less than a quarter or more."""
    structure = FixedSparsityConfig(num_heads=1, block=16, **options)
    blocks -= blocks % structure.num_local_blocks
    picture = draw(structure.make_rows(16 * blocks), 16).splitlines()[1:-1]
    assert max(map(len, picture)) > 32
    assert {len(set(line[len(line) // 2 : -1])) for line in picture[:8]} == {1}


@pytest.mark.parametrize("columns", [22, 36, 50, 64, 80, 100, 120])
@pytest.mark.parametrize(("blocks", "period"), [(32, 4), (125, 5), (128, 4)])
def test_stripes_of_short_sequences_are_those_of_the_layout(blocks, period, columns):
    structure = FixedSparsityConfig(
        4, 16, num_local_blocks=period, different_layout_per_head=True, num_different_global_patterns=4
    )
    cell = picture.cell_of(structure.make_rows(16 * blocks), columns)
    for head in range(4):
        line = draw(structure, columns=columns, head=head, tokens=16 * blocks).splitlines()[1]
        far, after = line[len(line) // 2 : -1], max(1, period // cell)
        assert len(far) > after and far[after:] == far[:-after]


def test_a_period_that_no_character_near_the_width_divides_makes_no_stripes():
    layout = torch.zeros(140, 140, dtype=torch.bool)
    layout[:, 5::7] = layout[:, 6::7] = True
    (*_, picture, _) = draw(layout, 16, columns=70, ascii=False).splitlines()
    assert len(set(picture)) == 1, "characters of two columns would have none, one or both"


@modest
@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 40))
def test_no_picture_is_wider_than_asked_for_and_dense_is_full(rows, columns, width):
    picture = draw(torch.ones(rows, columns, dtype=torch.bool), 16, columns=width, ascii=False).splitlines()[1:-1]
    assert all(0 < len(line) <= width for line in picture)
    assert set("".join(picture[:-1])) <= {"█"}


@modest
@given(st.integers(1, 400), st.integers(1, 60), st.integers(1, 300), st.integers(1, 9), st.integers(0, 99))
def test_a_cell_is_the_share_of_its_live_blocks(rows, columns, cell_rows, cell_columns, seed):
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.rand(2, rows, columns, generator=generator) < 0.5
    layout = kinds[torch.randint(0, 2, (4,), generator=generator)]
    panels = picture.panels_of(LayoutRows.of(layout), (cell_rows, cell_columns))
    assert sorted(head for panel in panels for head in panel.heads) == [0, 1, 2, 3]
    assert len(panels) == len({head.numpy().tobytes() for head in layout})
    for panel in panels:
        assert all(torch.equal(layout[head], layout[panel.heads[0]]) for head in panel.heads)
        live = layout[panel.heads[0]]
        expected = [
            [part.double().mean().item() for part in strip.split(cell_columns, 1)] for strip in live.split(cell_rows)
        ]
        assert torch.allclose(panel.shares.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-6)
        assert panel.density == pytest.approx(live.double().mean().item())


@pytest.mark.parametrize("layout", [LIVE, torch.rand(2, 90, 90) < 0.5])
def test_ascii_pictures_say_the_same_in_other_characters(layout):
    text, plain = draw(layout, 16, columns=40, ascii=False), draw(layout, 16, columns=40, ascii=True)
    assert plain.isascii()
    names = str.maketrans("▀▄█░▒▓", "'.#.:+") if "▀" in text else str.maketrans("░▒▓█", ".:+#")
    assert text.translate(names).splitlines()[:-1] == plain.splitlines()[:-1]


@pytest.mark.parametrize(
    ("encoding", "environment", "ascii"),
    [
        ("utf-8", {}, False),
        ("utf-8", {"LANG": "de_DE.UTF-8"}, False),
        ("utf-8", {"LANG": "C", "LC_CTYPE": "C.UTF-8"}, True),
        ("utf-8", {"LANG": "C", "LC_CTYPE": "en_US.UTF-8"}, False),
        ("utf-8", {"LC_ALL": "POSIX", "LANG": "en_US.UTF-8"}, True),
        ("utf-8", {"LANG": "C", "PYTHONIOENCODING": "utf-8"}, False),
        ("utf-8", {"LANG": "C", "PYTHONUTF8": "1"}, False),
        ("ascii", {"LANG": "en_US.UTF-8"}, True),
        ("latin-1", {}, True),
        ("cp437", {}, False),
    ],
)
def test_terminals_that_take_ascii_only(monkeypatch, encoding, environment, ascii):
    for name in ("LC_ALL", "LC_CTYPE", "LANG", "PYTHONIOENCODING", "PYTHONUTF8"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    assert takes_ascii_only(stream) is ascii
    monkeypatch.setattr(sys, "stdout", stream)
    assert draw(LIVE, 16).isascii() is ascii


@pytest.mark.parametrize(
    "structure",
    [
        FixedSparsityConfig(4, different_layout_per_head=True, num_different_global_patterns=2),
        BigBirdSparsityConfig(2, seed=3, different_layout_per_head=True),
    ],
)
def test_a_structure_is_drawn_as_its_layout(structure):
    layout, rows = structure.make_bool_layout(16 * 200), structure.make_rows(16 * 200)
    assert draw(rows, 16, columns=40) == draw(layout, 16, columns=40)


def test_a_million_tokens_are_drawn_without_the_layout():
    structure = BigBirdSparsityConfig(12, 64, seed=1, different_layout_per_head=True)
    made = structure.make_rows(1 << 20)
    most = []

    def maker(h):
        make = made.maker(h)

        def measured(rows):
            live = make(rows)
            most.append(live.numel())
            return live

        return measured

    text = draw(LayoutRows(made.heads, made.rows, made.columns, maker), 64, head=7)
    assert text.startswith("head 7: 16384 x 16384 blocks of 64 tokens")
    assert max(most) <= 128 * 16384 and sum(most) <= (16384 + 128) * 16384


@pytest.mark.parametrize(("name", "magic"), [("layout.png", b"\x89PNG"), ("layout.svg", b"<?xml")])
def test_pictures_are_files_of_their_kind_and_reproducible(tmp_path, name, magic):
    files = tmp_path / name, tmp_path / f"again_{name}"
    for file in files:
        save_drawing(torch.stack([LIVE, LIVE.T]), 16, file, "a title")
    first, again = (file.read_bytes() for file in files)
    assert first.startswith(magic) and first == again


@pytest.mark.parametrize(("heads", "tokens"), [(1, 2048), (4, 1 << 20), (8, 2048)])
def test_titles_are_whole_and_nothing_is_empty_above_them(tmp_path, heads, tokens):
    layout = torch.stack([LIVE.roll(head % 3, 0) ^ (head // 3 % 2) for head in range(heads)])
    save_drawing(layout, tokens // 3, tmp_path / "layout.png", "a_file_with_a_rather_long_name.json, mode so_and_so")
    picture = matplotlib.image.imread(tmp_path / "layout.png")[:, :, :3].min(2)
    for edge in (picture, picture[::-1], picture.T, picture.T[::-1]):
        ink = (edge < 0.9).any(1).argmax()
        assert 2 <= ink <= 40, "white around, but no more than a line of text"


def test_the_title_is_above_the_panels_and_not_over_them():
    layout = torch.stack([LIVE.roll(head, 0) for head in range(3)])
    figure = pictures._figure(LayoutRows.of(layout), 350_000, "a title", None)
    figure.canvas.draw()
    title = figure._suptitle.get_window_extent()
    assert all(axes.get_tightbbox().y1 <= title.y0 for axes in figure.axes)


def save(rows, path):
    """As a page or a picture, by the ending."""
    if path.suffix.startswith(".htm"):
        save_page([Sheet("", "", rows, 16, 1)], path, "a title")
    else:
        save_drawing(rows, 16, path)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("layout", ".png or .svg, got"),
        ("layout.htm", "drawn as .html, got"),
        ("missing/layout.html", "there is no folder .*missing. Make it first"),
        ("folder.png", "it is a folder"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_drawn(tmp_path, name, sentence):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ValueError, match=sentence):
        save(LayoutRows(1, 9, 9, None), tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


@pytest.mark.parametrize(
    ("name", "called"), [("layout.png", "matplotlib.figure.Figure.savefig"), ("layout.html", "builtins.open")]
)
def test_a_write_that_fails_is_a_sentence(monkeypatch, tmp_path, name, called):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(called, full)
    with pytest.raises(ValueError, match=f"{name} cannot be written: No space left on device"):
        save(LayoutRows.of(LIVE), tmp_path / name)


def test_a_missing_matplotlib_is_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'ds_sparse\[plot\]'"):
        save_drawing(LIVE, 16, tmp_path / "layout.png")
