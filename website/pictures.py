"""Draws the pictures of docs/structures.md into docs/pictures: .venv/bin/python website/pictures.py"""

from pathlib import Path

import ds_sparse
from ds_sparse.drawing import save_drawing

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"

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


def main() -> None:
    for name, block in BLOCKS.items():
        structure = ds_sparse.parse_sparse_attention(block, num_heads=1, seq_len=TOKENS)
        save_drawing(structure.make_rows(TOKENS), structure.block, PICTURES / f"{name}.png", name)


if __name__ == "__main__":
    main()
