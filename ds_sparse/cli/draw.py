from __future__ import annotations

import argparse
import os
import sys

from ..arguments import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="DeepSpeed JSON with a sparse_attention block")
    parser.add_argument("--seq", type=positive, default=2048, help="sequence length in tokens (default: 2048)")
    parser.add_argument("--heads", type=positive, default=12, help="attention heads of the model (default: 12)")
    parser.add_argument("--head", type=head, metavar="N", help="draw head N alone, counted from 0")
    parser.add_argument("--width", type=positive, default=64, help="width in characters (default: 64)")
    parser.add_argument("--out", help="write a picture instead, .png or .svg (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    from ..config import DEFAULT_MODE, SparseAttentionConfigError, load_config, parse_sparse_attention
    from ..drawing import draw, require_writable, save_drawing

    try:
        if args.head is not None and args.head >= args.heads:
            raise ValueError(f"--head {args.head}: there are {args.heads} heads, from 0 to {args.heads - 1}.")
        if args.out is not None:
            require_writable(args.out)
        _, block = load_config(args.file)
        if block is None:
            raise SparseAttentionConfigError(
                [f"{args.file}: no sparse_attention block, so there is no layout to draw."]
            )
        structure = parse_sparse_attention(block, args.heads, source=args.file, seq_len=args.seq, whole=False)
        layout = structure.make_rows(args.seq)
        if args.out is None:
            print(draw(layout, structure.block, args.width, args.head))
        else:
            title = f"{os.path.basename(args.file)}, mode {block.get('mode', DEFAULT_MODE)}"
            save_drawing(layout, structure.block, args.out, title, args.head)
            print(f"{args.file}: drawn to {args.out}.")
    except (ValueError, ImportError, MemoryError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def head(text: str) -> int:
    """argparse type: an integer of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a head, an integer of at least 0")
    return int(text)
