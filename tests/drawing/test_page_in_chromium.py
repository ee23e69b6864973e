"""The page as a person operates it, in headless Chromium: what its program draws and says."""

import json

import numpy as np
import pytest
import torch
from browser import chromium

from ds_sparse.cli import main
from ds_sparse.config import parse_sparse_attention
from ds_sparse.drawing.walk import walks

BIGBIRD = {
    "mode": "bigbird", "block": 16, "num_random_blocks": 2, "seed": 3, "different_layout_per_head": True,
}  # fmt: skip
FIXED = {"mode": "fixed", "block": 32}
LIGHT = {(255, 255, 255): "none", (31, 58, 95): "live", (232, 135, 58): "waste", (244, 217, 189): "passed"}
TOKENS = 512


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture
def page(tmp_path, capsys):
    """Writes a page of blocks, and gives its address."""

    def write(*blocks, seq=TOKENS, heads=3):
        files = []
        for number, block in enumerate(blocks):
            files.append(tmp_path / f"{number}.json")
            files[-1].write_text(json.dumps({"sparse_attention": block}))
        out = tmp_path / "layout.html"
        assert main(["draw", *map(str, files), "--seq", str(seq), "--heads", str(heads), "--out", str(out)]) == 0
        return out.as_uri()

    return write


def layout_of(block, heads=3):
    return parse_sparse_attention(block, heads).make_layout(TOKENS).bool()


def box(browser, number=0):
    """Left, top and side of a picture."""
    return browser.value(
        f"(() => {{ const box = document.querySelectorAll('.square')[{number}].getBoundingClientRect(); "
        "return [box.left, box.top, box.width]; })()"
    )


def colours(browser, blocks, number=0):
    """The colour in the middle of each block of a picture that shows the whole layout."""
    seen = browser.value(
        f"(() => {{ const canvas = document.querySelectorAll('.square')[{number}].firstChild, n = {blocks}; "
        "const context = canvas.getContext('2d'), all = []; "
        "for (let row = 0; row < n; row++) for (let column = 0; column < n; column++) { "
        "const at = (block) => Math.floor((block + 0.5) / n * canvas.width); "
        "all.push(Array.from(context.getImageData(at(column), at(row), 1, 1).data.slice(0, 3))); } return all; })()"
    )
    return np.array([LIGHT.get(tuple(colour), str(colour)) for colour in seen]).reshape(blocks, blocks)


def point_at(browser, row, column, blocks, number=0):
    left, top, side = box(browser, number)
    browser.mouse("mouseMoved", left + (column + 0.5) / blocks * side, top + (row + 0.5) / blocks * side)


def said(browser, number=0):
    """What is said about the place under the pointer."""
    return browser.value(
        f"Object.fromEntries(Array.from(document.querySelectorAll('.pointer')[{number}].querySelectorAll('dt'), "
        "(term) => [term.textContent, term.nextSibling.textContent]))"
    )


def seen(browser):
    return browser.value("document.querySelector('.range').textContent")


def test_every_head_is_drawn_as_it_is_and_nothing_is_asked_of_a_network(browser, page):
    address = page(BIGBIRD)
    browser.requests.clear()
    browser.open(address)
    layout = layout_of(BIGBIRD)
    assert browser.value("document.querySelectorAll('.square').length") == 3
    for head in range(3):
        assert (colours(browser, 32, head) == np.where(layout[head], "live", "none")).all()
    caption = browser.value("document.querySelectorAll('figcaption')[1].textContent")
    assert caption == f"head 1: density {layout[1].double().mean():.1%}"
    assert browser.requests == [address] and browser.errors == []


def test_a_head_is_chosen_and_what_is_under_the_pointer_is_said(browser, page):
    browser.open(page(BIGBIRD))
    browser.choose("head", "2")
    assert browser.value("document.querySelectorAll('.square').length") == 1
    layout = layout_of(BIGBIRD)[2]
    for row, column in [(0, 31), (5, 9), (17, 17), (31, 1), (20, 3)]:
        point_at(browser, row, column, 32)
        assert said(browser) == {
            "head": f"head 2, density {layout.double().mean():.1%}",
            "queries": f"block row {row}, tokens {row * 16}-{row * 16 + 15}: density {layout[row].double().mean():.1%}",
            "keys": f"block column {column}, tokens {column * 16}-{column * 16 + 15}: "
            f"density {layout[:, column].double().mean():.1%}",
            "block": "live" if layout[row, column] else "not live",
        }


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_tiles_show_what_is_walked_and_what_of_it_is_waste(browser, page, side, tile):
    browser.open(page(BIGBIRD))
    browser.choose("head", "0")
    browser.choose("tiles", f"{side} {tile}")
    live = layout_of(BIGBIRD)[0]
    walk = next(walk for walk in walks(live, 16) if (walk.side, walk.tile) == (side, tile))
    lines = torch.from_numpy(walk.lines.copy()).view(-1, walk.height)
    of_side = live if side == "rows" else live.T
    expected = np.where(of_side, "live", "none").astype(object)
    for tile_lines in lines.tolist():
        halves = np.array_split(tile_lines, walk.parts)
        for line in tile_lines:
            own = next(half for half in halves if line in half)
            walked, listed = (of_side[list(of)].any(0) for of in (own, tile_lines))
            dead = ~of_side[line]
            expected[line][(dead & listed).numpy()] = "passed"
            expected[line][(dead & walked).numpy()] = "waste"
    expected = expected if side == "rows" else expected.T
    assert (colours(browser, 32) == expected).all()
    assert (expected == "waste").sum() == walk.walked - walk.live

    row, column = np.argwhere(expected == "waste")[3]
    point_at(browser, row, column, 32)
    line, other = (row, column) if side == "rows" else (column, row)
    (number,) = (lines == line).any(1).nonzero().flatten().tolist()
    bits = "".join(str(int(of_side[at, other])) for at in lines[number].tolist())
    entries = of_side[lines[number]].any(0).sum()
    found = said(browser)
    assert found["tile"] == f"{number} of {len(lines)}, block {side} {', '.join(map(str, lines[number].tolist()))}"
    assert found["owner bits"] == f"{bits}: waste: walked for another row of the tile"
    assert found["its list"].startswith(f"{entries} entries, {of_side[lines[number]].sum()} of ")
    table = browser.value("Array.from(document.querySelectorAll('td'), (cell) => cell.textContent)")
    waste = f"{1 - walk.live / walk.walked:.1%}"
    place = table.index(f"{side}, {tile} tokens ({', '.join(walk.by)})")
    assert table[place + 1 : place + 4] == [f"{walk.entries:,}", f"{walk.walked:,}", waste]


def test_a_place_stays_under_the_pointer_while_it_is_zoomed_into_and_moves_with_it(browser, page):
    browser.open(page(FIXED))
    left, top, side = box(browser)
    point_at(browser, 11, 7, 16)
    before = said(browser)
    browser.wheel(left + 7.5 / 16 * side, top + 11.5 / 16 * side, -5)
    point_at(browser, 11, 7, 16)
    assert said(browser) == before and seen(browser) != "Seen: queries 0-511, keys 0-511"
    zoomed = seen(browser)

    x, y = left + side / 2, top + side / 2
    browser.mouse("mouseMoved", x, y)
    under = said(browser)
    browser.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    browser.mouse("mouseMoved", x - side / 4, y - side / 8, button="left", buttons=1)
    browser.mouse("mouseReleased", x - side / 4, y - side / 8, button="left", clickCount=1)
    assert said(browser) == under
    browser.after("document.getElementById('out').click()", "document.getElementById('in').click()")
    assert seen(browser) != zoomed
    browser.after("document.getElementById('whole').click()")
    assert seen(browser) == "Seen: queries 0-511, keys 0-511"


def test_the_keyboard_zooms_and_moves(browser, page):
    browser.open(page(FIXED))

    def press(key):
        event = f"new KeyboardEvent('keydown', {{key: {json.dumps(key)}}})"
        return f"document.querySelector('.square').dispatchEvent({event})"

    browser.after(press("+"), press("+"), press("ArrowRight"), press("ArrowDown"), press("ArrowDown"))
    assert seen(browser) == "Seen: queries 199-426, keys 170-398"
    browser.after(press("0"))
    assert seen(browser) == "Seen: queries 0-511, keys 0-511"


def test_two_files_stand_side_by_side_and_show_the_same_tokens(browser, page):
    browser.open(page(BIGBIRD, FIXED))
    browser.choose("head", "1")
    (first, _, side), (second, _, _) = box(browser, 0), box(browser, 1)
    assert second >= first + side
    assert (colours(browser, 16, 1) == np.where(layout_of(FIXED)[0], "live", "none")).all()
    point_at(browser, 13, 21, 32)
    assert said(browser, 0)["queries"].startswith("block row 13, tokens 208-223")
    assert said(browser, 1)["queries"].startswith("block row 6, tokens 192-223")
    browser.choose("right", "")
    assert browser.value("document.querySelectorAll('.pane').length") == 1


def test_what_is_seen_stands_in_the_address_and_a_reload_shows_it_again(browser, page):
    browser.open(page(BIGBIRD, FIXED))
    browser.choose("right", "")
    browser.choose("head", "2")
    browser.choose("tiles", "columns 64")
    browser.after("document.getElementById('in').click()")
    shown = seen(browser), browser.value("location.href")
    assert "head=2&tiles=columns+64" in shown[1]
    browser.open(shown[1])
    assert (seen(browser), browser.value("location.href")) == shown
    assert browser.value("['left', 'right', 'head', 'tiles'].map((id) => document.getElementById(id).value)") == [
        "0", "", "2", "columns 64",
    ]  # fmt: skip


def test_an_address_that_says_nonsense_shows_the_whole(browser, page):
    browser.open(f"{page(FIXED)}#left=9&right=-1&head=x&tiles=y&x=a&y=2&size=-3")
    assert seen(browser) == "Seen: queries 0-511, keys 0-511" and browser.errors == []


def test_structures_of_layers_are_chosen_by_name(browser, page):
    browser.open(page(FIXED | {"layers": {"0-1": {"mode": "dense"}, "4": None}}))
    names = browser.value("Array.from(document.getElementById('left').options, (option) => option.text)")
    assert names == ["0.json: other layers", "0.json: layers 0-1"]
    assert "layers 4 are null" in browser.value("document.getElementById('notes').textContent")
    browser.choose("left", "1")
    assert (colours(browser, 16) == "live").all()


def test_blocks_that_causal_attention_leaves_out_are_shown_as_such(browser, page):
    block = {"mode": "local_sliding_window", "attention": "bidirectional", "causal": True}
    browser.open(page(block))
    point_at(browser, 4, 5, 32)
    assert said(browser)["block"] == "live, after the diagonal: causal attention leaves it out"
    found = colours(browser, 32)
    assert (found.diagonal(-1) == "live").all() and set(found.diagonal(1)) == {"[185, 194, 205]"}
    assert "left out by causal attention" in browser.value("document.getElementById('legend').textContent")


@pytest.mark.parametrize("width", [500, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_narrow_and_wide_windows_in_light_and_dark(browser, page, width, scheme):
    browser.open(page(BIGBIRD, FIXED), width=width, scheme=scheme)
    browser.choose("tiles", "rows 128")
    assert browser.value("document.documentElement.scrollWidth") <= width
    ground = browser.value("getComputedStyle(document.querySelector('.square')).backgroundColor")
    assert ground == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(18, 22, 28)")
    assert browser.errors == []


def test_a_million_tokens_are_zoomed_into_down_to_single_blocks(browser, page):
    browser.open(page(BIGBIRD | {"block": 64}, seq=1 << 20, heads=1))
    left, top, side = box(browser)
    browser.mouse("mouseMoved", left + side / 2, top + side / 2)
    assert said(browser)["queries"].startswith("block row 8,192, tokens 524,288-524,351")
    assert "blocks a cell" in said(browser)["under the pointer"]
    assert browser.value("document.getElementById('tiles').disabled")
    browser.after(*["document.getElementById('in').click()"] * 12)
    first, last = seen(browser).split("queries ")[1].split(", keys")[0].replace(",", "").split("-")
    assert int(last) - int(first) + 1 <= 5 * 64, "four blocks, and parts of two"
    rows = parse_sparse_attention(BIGBIRD | {"block": 64}, 1).make_rows(1 << 20).maker(0)
    states = set()
    for x, y in [(0.2, 0.2), (0.8, 0.2), (0.5, 0.4), (0.2, 0.8)]:
        browser.mouse("mouseMoved", left + x * side, top + y * side)
        found = said(browser)
        row, column = (int(found[name].split(", ")[0].split()[-1].replace(",", "")) for name in ("queries", "keys"))
        assert found["block"] == ("live" if rows(range(row, row + 1))[0, column] else "not live")
        assert "under the pointer" not in found
        states.add(found["block"])
    assert len(states) == 2
