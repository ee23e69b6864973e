import re
import zlib
from base64 import b64decode

import pytest
import torch
from layout_pages import data_of, layout_of

from ds_sparse.drawing import Sheet, page, save_page
from ds_sparse.layout import LayoutRows
from ds_sparse.sparsity import BigBirdSparsityConfig, FixedSparsityConfig, LocalSlidingWindowSparsityConfig


def sheet_of(structure, seq_len=512, **more):
    rows = structure.make_rows(seq_len)
    return Sheet("ds.json", "", rows, structure.block, structure.num_heads, causal=structure.causal, **more)


def layouts(sheet):
    size = sheet["blocks"]
    return [layout_of(zlib.decompress(b64decode(head["changes"])), size, size) for head in sheet["heads"]]


@pytest.mark.parametrize("heads", [1, 5])
def test_the_page_holds_the_layout_of_every_head_once(tmp_path, heads):
    patterns = min(heads, 2)
    structure = FixedSparsityConfig(heads, different_layout_per_head=heads > 1, num_different_global_patterns=patterns)
    save_page([sheet_of(structure)], tmp_path / "a.html", "a title")
    (sheet,) = data_of(tmp_path / "a.html")["sheets"]
    whole = structure.make_layout(512).bool().numpy()
    assert sorted(number for head in sheet["heads"] for number in head["numbers"]) == list(range(heads))
    assert len(sheet["heads"]) == patterns
    for head, layout in zip(sheet["heads"], layouts(sheet), strict=True):
        assert all((whole[number] == layout).all() for number in head["numbers"])
        assert head["live"] == layout.sum()
    assert sheet["heads"][0]["name"] == ("all heads" if heads == 1 else "heads 0, 2, 4")


def test_random_blocks_are_drawn_once_for_picture_and_tiles(tmp_path):
    save_page([sheet_of(BigBirdSparsityConfig(2, num_random_blocks=3))], tmp_path / "a.html", "no seed")
    (sheet,) = data_of(tmp_path / "a.html")["sheets"]
    (layout,) = layouts(sheet)
    assert [walk["live"] for walk in sheet["heads"][0]["walks"]] == [layout.sum()] * 4


def test_tiles_are_those_of_what_causal_attention_keeps(tmp_path):
    structure = LocalSlidingWindowSparsityConfig(1, attention="bidirectional", causal=True)
    save_page([sheet_of(structure)], tmp_path / "a.html", "causal")
    (sheet,) = data_of(tmp_path / "a.html")["sheets"]
    assert sheet["causal"] and sheet["heads"][0]["live"] == 3 * 32 - 2
    assert {walk["live"] for walk in sheet["heads"][0]["walks"]} == {2 * 32 - 1}


def test_one_head_alone(tmp_path):
    structure = BigBirdSparsityConfig(3, num_random_blocks=2, different_layout_per_head=True, seed=0)
    save_page([sheet_of(structure, head=2)], tmp_path / "a.html", "one head")
    (sheet,) = data_of(tmp_path / "a.html")["sheets"]
    assert [(head["name"], head["numbers"]) for head in sheet["heads"]] == [("head 2", [2])]
    assert (layouts(sheet)[0] == structure.make_layout(512)[2].bool().numpy()).all()


def test_the_file_asks_for_nothing_and_names_end_nothing(tmp_path):
    out = tmp_path / "a.html"
    evil = "</script><script>alert(1)</script>{data}"
    save_page([Sheet(evil, evil, LayoutRows.of(torch.eye(4)), 16, 2, about={"key": evil})], out, evil, [evil])
    text = out.read_text()
    assert data_of(out)["notes"] == [evil] and data_of(out)["sheets"][0]["about"] == {"key": evil}
    assert text.count("</script>") == 2 and "<script>alert" not in text
    assert not re.search(r"https?:|@import|url\(|fetch\(|\bsrc=", text)
    assert "default-src 'none'" in text


def test_a_million_tokens_are_a_small_page_that_says_why_it_has_no_tiles(tmp_path):
    sheet = sheet_of(BigBirdSparsityConfig(1, 128, seed=1), 1 << 21)
    save_page([sheet], tmp_path / "a.html", "long")
    assert (tmp_path / "a.html").stat().st_size < 1 << 20
    (found,) = data_of(tmp_path / "a.html")["sheets"]
    assert found["heads"][0]["walks"] == []
    assert found["noTiles"] == "Tiles are shown for up to 8,192 blocks a side: use a larger block."


def test_the_same_layout_gives_the_same_file(tmp_path):
    for name in ("a.html", "b.html"):
        save_page([sheet_of(BigBirdSparsityConfig(2, seed=1))], tmp_path / name, "a title")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_what_a_page_cannot_show_is_a_sentence_and_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "_MOST", 100)
    with pytest.raises(ValueError, match="too much for a browser. Draw one head"):
        save_page([sheet_of(BigBirdSparsityConfig(2, seed=1))], tmp_path / "a.html", "a title")
    sequences = Sheet("", "", LayoutRows.of(torch.eye(4).expand(2, 3, 4, 4)), 16, 3)
    with pytest.raises(ValueError, match="layouts of 2; give each sequence a sheet of its own"):
        save_page([sequences], tmp_path / "a.html", "a title")
    assert not list(tmp_path.iterdir())
