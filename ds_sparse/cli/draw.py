from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any

from ..arguments import positive
from ..sparsity import SparsityConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="DeepSpeed JSON with a sparse_attention block")
    parser.add_argument("--seq", type=positive, default=2048, help="sequence length in tokens (default: 2048)")
    parser.add_argument("--heads", type=positive, default=12, help="attention heads of the model (default: 12)")
    parser.add_argument("--head", type=number, metavar="N", help="draw head N alone, counted from 0")
    parser.add_argument("--layer", type=number, metavar="N", help="draw the layout of layer N alone, counted from 0")
    parser.add_argument("--width", type=positive, default=64, help="width in characters (default: 64)")
    parser.add_argument(
        "--out",
        help="write a picture instead, .png or .svg (needs matplotlib); where layers have structures of their own, a "
        "file for each, named after the layers",
    )


def run(args: argparse.Namespace) -> int:
    from ..config import SparseAttentionConfigError, load_config, mode_of
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
        for name, structure in _structures(args, block).items():
            layout = structure.make_rows(args.seq)
            if args.out is None:
                if name:
                    print(f"{name}: mode {mode_of(type(structure))}")
                print(draw(layout, structure.block, args.width, args.head))
                continue
            out = _named(args.out, name)
            title = ", ".join(filter(None, [os.path.basename(args.file), name, f"mode {mode_of(type(structure))}"]))
            save_drawing(layout, structure.block, out, title, args.head)
            print(f"{args.file}: drawn to {out}.")
    except (ValueError, ImportError, MemoryError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _structures(args: argparse.Namespace, block: Mapping[str, Any]) -> dict[str, SparsityConfig]:
    """What to draw, by the layers that have it; "" is all layers, or the one that was asked for."""
    from ..config import read_block

    structures = read_block(block, args.heads, source=args.file, seq_len=args.seq, whole=False)
    if args.layer is not None:
        of_layer = structures.of(args.layer)
        if of_layer is None:
            raise ValueError(f"{args.file}: layer {args.layer} is null, dense without blocks; there is no layout.")
        return {"": of_layer}
    if not structures.entries:
        return {"": structures.others}
    named = {f"layers {key}": structure for key, structure in structures.entries.items() if structure is not None}
    return {"other layers": structures.others, **named}


def _named(path: str, layers: str) -> str:
    """The file of a picture: of several each has its layers in its name, as in layout.layers-0-5.png."""
    stem, ending = os.path.splitext(path)
    return f"{stem}.{layers.replace(' ', '-')}{ending}" if layers else path


def number(text: str) -> int:
    """argparse type: an integer of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return int(text)
