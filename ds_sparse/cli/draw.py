from __future__ import annotations

import argparse
import os
import sys

from ..config import DEFAULT_MODE, SparseAttentionConfigError, load_config, parse_sparse_attention
from . import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="DeepSpeed JSON with a sparse_attention block")
    parser.add_argument("--seq", type=positive, default=2048, help="sequence length in tokens (default: 2048)")
    parser.add_argument("--heads", type=positive, default=12, help="attention heads of the model (default: 12)")
    parser.add_argument("--width", type=positive, default=64, help="widest picture in characters (default: 64)")
    parser.add_argument("--out", help="write a picture instead, .png or .svg (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    from ..drawing import draw, save_drawing

    try:
        _, block = load_config(args.file)
        if block is None:
            raise SparseAttentionConfigError(
                [f"{args.file}: no sparse_attention block, so there is no layout to draw."]
            )
        structure = parse_sparse_attention(block, args.heads, source=args.file, seq_len=args.seq)
        layout = structure.make_bool_layout(args.seq)
        if args.out is None:
            print(draw(layout, structure.block, args.width))
        else:
            title = f"{os.path.basename(args.file)}, mode {block.get('mode', DEFAULT_MODE)}"
            save_drawing(layout, structure.block, args.out, title)
            print(f"{args.file}: drawn to {args.out}.")
    except (ValueError, ImportError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
