"""What notebooks show: pictures of structures, indices and reports, in HTML."""

import base64
import random
import re
import struct
import zlib
from functools import partial

import numpy as np
import pytest
import torch

import ds_sparse

STRUCTURE = ds_sparse.BSLongformerSparsityConfig(num_heads=2, block=16)


def images(html):
    """The images in a page, as shares that are dark, row by row."""
    found = []
    for text in re.findall(r"data:image/png;base64,([^\"]+)", html):
        data = base64.b64decode(text)
        width, height = struct.unpack(">II", data[16:24])
        start = data.index(b"IDAT")
        (size,) = struct.unpack(">I", data[start - 4 : start])
        rows = np.frombuffer(zlib.decompress(data[start + 4 : start + 4 + size]), np.uint8).reshape(height, width + 1)
        assert not rows[:, 0].any(), "lines without a filter"
        found.append(torch.from_numpy(1 - rows[:, 1:] / 255))
    return found


def test_a_drawing_is_text_in_a_terminal_and_an_image_in_a_notebook():
    drawn = ds_sparse.draw(STRUCTURE, tokens=256)
    assert repr(drawn) == str(drawn) and drawn.startswith("all heads: 16 x 16 blocks of 16 tokens, density")
    (image,) = images(drawn._repr_html_())
    assert torch.equal(image.bool(), STRUCTURE.make_bool_layout(256)[0])
    assert drawn == ds_sparse.draw(STRUCTURE.make_layout(256), 16)


def test_a_structure_shows_itself_and_draws_nothing_from_others():
    state = random.getstate()
    unseeded = ds_sparse.BigBirdSparsityConfig(num_heads=1, block=64)
    assert "BigBirdSparsityConfig(" in unseeded._repr_html_() and random.getstate() == state
    drawn = ds_sparse.draw(unseeded, columns=8)._repr_html_()
    assert images(drawn) and random.getstate() == state, "neither the structure nor its rows"
    (image,) = images(STRUCTURE._repr_html_())
    assert image.shape == (128, 128)
    too_wide = ds_sparse.BSLongformerSparsityConfig(num_heads=1, block=128, num_sliding_window_blocks=99)
    assert too_wide._repr_html_() is None, "a notebook takes the text"
    assert ds_sparse.MobaSparsityConfig(num_heads=2)._repr_html_() is None
    with pytest.raises(ValueError, match="each call chooses its blocks"):
        ds_sparse.draw(ds_sparse.MobaSparsityConfig(num_heads=2))


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_is_drawn_in_the_order_of_the_sequence(causal):
    window = {"window_size": 4, "global_tokens": [0, 7], "dilation": 2, "causal": causal}
    (image,) = images(ds_sparse.WindowIndex.build(40, **window)._repr_html_())
    places = torch.arange(40)
    apart = places[:, None] - places
    wanted = (apart.abs() <= 8) & (apart % 2 == 0)
    wanted[:, [0, 7]] = wanted[[0, 7]] = True
    assert torch.equal(image.bool(), wanted & (apart >= 0) if causal else wanted)


def test_of_a_long_window_the_blocks_are_drawn():
    rows, block = ds_sparse.WindowIndex.build(2**14, 64).rows_to_draw()
    assert block > 1 and rows.density() < 3 * 64 / 2**14


def test_other_indices_are_drawn_as_what_they_hold():
    layout = torch.rand(3, 5, 5) < 0.5
    index = ds_sparse.BlockIndex.build(layout, 16)
    assert [image.bool().tolist() for image in images(index._repr_html_())] == layout.tolist()
    assert "BlockIndex(5 x 5 blocks of 16" in index._repr_html_()
    mask = torch.rand(20, 30) < 0.3
    (image,) = images(ds_sparse.TokenIndex.from_mask(mask)._repr_html_())
    assert torch.equal(image.bool(), mask)
    packed = ds_sparse.PackedIndex.build(STRUCTURE.make_layout(96), torch.tensor([0, 64, 160]), block=16)
    (image,) = images(packed._repr_html_())
    assert not image[:4, 4:].any() and not image[4:, :4].any() and image[:4, :4].any()


@pytest.mark.parametrize("make", [partial(ds_sparse.BlockIndex.build, block=16), ds_sparse.TokenIndex.from_mask])
def test_indices_of_sequences_say_which_is_which(make):
    layout = torch.eye(5, dtype=torch.bool).repeat(2, 3, 1, 1)
    layout[1] = True
    shown = make(layout)._repr_html_()
    assert [image.bool().tolist() for image in images(shown)] == layout[:, 0].tolist()
    assert re.findall("<figcaption>(.*?), density", shown) == ["sequence 0, heads 0-2", "sequence 1, heads 0-2"]
    assert "<figcaption>all heads," in make(layout[[0, 0]])._repr_html_()


def test_of_many_layouts_the_first_are_shown():
    eye = torch.eye(20, dtype=torch.bool)
    layout = torch.stack([eye.roll(head, 0) for head in range(20)])
    shown = ds_sparse.draw(layout)._repr_html_()
    assert len(images(shown)) == 12 and "and 8 other layouts" in shown


def test_a_report_has_its_table_and_a_picture_of_each_layout():
    model = torch.nn.ModuleDict({"self": torch.nn.MultiheadAttention(32, 2, batch_first=True)})
    report = ds_sparse.sparsify(model, {"mode": "bslongformer", "block": 16}, max_seq_length=128)
    shown = report._repr_html_()
    (image,) = images(shown)
    assert image.shape == (8, 8) and "1 attention layer made sparse" in shown and "-&gt;" in shown
