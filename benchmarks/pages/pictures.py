"""Draws the pictures of docs/structures.md and of the README's results into docs/pictures, and, where Chromium is
installed, that of the page in docs/json-and-flag.md: .venv/bin/python -m benchmarks.pages.pictures"""

import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

import ds_sparse
from ds_sparse.drawing import Sheet, save_drawing, save_page

from .axes import legend_below
from .claims import LENGTHS, RECALL
from .gains import draw_speed
from .recall import draw_recall

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"

TOKENS = 1024

BLOCKS = {
    "fixed": {"mode": "fixed", "block": 32},
    "fixed-unidirectional": {"mode": "fixed", "block": 32, "attention": "unidirectional"},
    "variable": {
        "mode": "variable", "block": 32, "local_window_blocks": [2, 4, 8], "global_block_indices": [0, 17],
        "num_random_blocks": 1, "seed": 1,
    },
    "bigbird": {"mode": "bigbird", "block": 32, "num_random_blocks": 2, "seed": 1},
    "bslongformer": {
        "mode": "bslongformer", "block": 32, "num_sliding_window_blocks": 5, "global_block_indices": [0, 16],
    },
    "local_sliding_window": {"mode": "local_sliding_window", "block": 32, "num_sliding_window_blocks": 7},
    "transformers_bigbird": {"mode": "transformers_bigbird", "block": 32, "num_random_blocks": 3, "seed": 1},
}  # fmt: skip
"""The block of the JSON for each picture."""

RESULTS: dict[str, Callable[[], Figure]] = {
    "found-by-distance": partial(draw_recall, RECALL, hops=(0, 1), sides=(False,)),
    "tokens-a-second": partial(draw_speed, LENGTHS),
}
"""Pictures of committed results, which stand in the README side by side."""


def main() -> None:
    for name, block in BLOCKS.items():
        structure = ds_sparse.parse_sparse_attention(block, num_heads=1, seq_len=TOKENS)
        save_drawing(structure.make_rows(TOKENS), structure.block, PICTURES / f"{name}.png", name)
    save_results()
    browser = shutil.which("chromium")
    if browser is not None:
        picture_of_page(browser)


def save_results() -> None:
    """Each half as wide as the README."""
    for name, draw in RESULTS.items():
        figure = draw()
        figure.set_size_inches(4.8, 5.2)
        legend_below(figure, columns=2)
        for plot in figure.axes:
            plot.tick_params(axis="x", labelsize=8, rotation=30)
        figure.savefig(PICTURES / f"{name}.png", dpi=120)


def picture_of_page(browser: str) -> None:
    """Two structures with their tiles, as the browser shows them."""
    sheets = []
    for name in ("bigbird", "bslongformer"):
        block = BLOCKS[name] | {"block": 16}
        structure = ds_sparse.parse_sparse_attention(block, num_heads=1)
        sheets.append(Sheet(f"{name}.json", "", structure.make_rows(TOKENS), structure.block, 1, about=block))
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "layout.html"
        save_page(sheets, page, f"bigbird.json and bslongformer.json at {TOKENS:,} tokens")
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1100,1000"]
        picture = f"--screenshot={PICTURES / 'layout-page.png'}"
        address = f"{page.as_uri()}#left=0&right=1&tiles=rows+64"
        command = [browser, *options, "--virtual-time-budget=5000", picture, address]
        subprocess.run(command, check=True, capture_output=True)


if __name__ == "__main__":
    main()
