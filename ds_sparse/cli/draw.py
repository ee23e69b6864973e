from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..arguments import positive
from ..block_sizes import rounded_up
from ..sparsity import SparsityConfig
from ..sparsity.declarations import declared_value

if TYPE_CHECKING:
    from ..config import LayerStructures
    from ..drawing import Sheet
    from ..layout_rows import LayoutRows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="file", help="DeepSpeed JSON with a sparse_attention block")
    parser.add_argument("--seq", type=positive, default=2048, help="sequence length in tokens (default: 2048)")
    parser.add_argument("--heads", type=positive, default=12, help="attention heads of the model (default: 12)")
    parser.add_argument("--head", type=number, metavar="N", help="draw head N alone, counted from 0")
    parser.add_argument("--layer", type=number, metavar="N", help="draw the layout of layer N alone, counted from 0")
    parser.add_argument("--width", type=positive, default=64, help="width in characters (default: 64)")
    parser.add_argument(
        "--out",
        help="write a picture instead, .png or .svg (needs matplotlib), of one file; where layers have structures of "
        "their own, a picture for each, named after the layers. Or a page for a browser, .html, of any files: to zoom "
        "into, to compare, with the tiles that kernels walk",
    )


@dataclass(frozen=True)
class Structure:
    """A structure to draw.

    Attributes:
        file: that has it.
        name: the layers that have it; "" for all, or for the one that was asked for.
    """

    file: str
    name: str
    structure: SparsityConfig

    @property
    def mode(self) -> str:
        from ..config import mode_of

        return f"mode {mode_of(type(self.structure))}"

    def rows(self, seq_len: int) -> LayoutRows:
        return self.structure.make_rows(rounded_up(seq_len, self.structure.block))


def run(args: argparse.Namespace) -> int:
    from ..drawing import PAGES, PICTURES, require_writable

    try:
        if args.head is not None and args.head >= args.heads:
            raise ValueError(f"--head {args.head}: there are {args.heads} heads, from 0 to {args.heads - 1}.")
        is_page = args.out is not None and args.out.lower().endswith(PAGES)
        if args.out is not None:
            require_writable(args.out, (*PICTURES, *PAGES))
        if args.out is not None and not is_page and len(args.files) > 1:
            raise ValueError(f"{args.out}: a picture is of one file; a page, .html, has several.")
        read = {file: _read(args, file) for file in args.files}
        structures = [found for file in read for found in _structures(args, file, read[file])]
        if is_page:
            _save_page(args, structures, read)
        elif args.out is not None:
            _save_pictures(args, structures)
        else:
            _print(args, structures)
    except (ValueError, ImportError, MemoryError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _read(args: argparse.Namespace, file: str) -> LayerStructures:
    from ..config import SparseAttentionConfigError, load_config, read_block

    _, block = load_config(file)
    if block is None:
        raise SparseAttentionConfigError([f"{file}: no sparse_attention block, so there is no layout to draw."])
    return read_block(block, args.heads, source=file, seq_len=args.seq, whole=False)


def _structures(args: argparse.Namespace, file: str, read: LayerStructures) -> Iterator[Structure]:
    """What to draw of a file."""
    if args.layer is not None:
        of_layer = read.of(args.layer)
        if of_layer is None:
            raise ValueError(f"{file}: layer {args.layer} is null, dense without blocks; there is no layout.")
        yield Structure(file, "", of_layer)
        return
    yield Structure(file, "other layers" if read.entries else "", read.others)
    for key, structure in read.entries.items():
        if structure is not None:
            yield Structure(file, f"layers {key}", structure)


def _print(args: argparse.Namespace, structures: list[Structure]) -> None:
    from ..drawing import draw

    for one in structures:
        heading = [one.file] if len(args.files) > 1 else []
        if one.name:
            heading.append(one.name)
        if heading:
            print(f"{', '.join(heading)}: {one.mode}")
        print(draw(one.rows(args.seq), one.structure.block, args.width, args.head))


def _save_pictures(args: argparse.Namespace, structures: list[Structure]) -> None:
    from ..drawing import save_drawing

    for one in structures:
        out = _named(args.out, one.name)
        title = ", ".join(filter(None, [os.path.basename(one.file), one.name, one.mode]))
        save_drawing(one.rows(args.seq), one.structure.block, out, title, args.head)
        print(f"{one.file}: drawn to {out}.")


def _save_page(args: argparse.Namespace, structures: list[Structure], read: dict[str, LayerStructures]) -> None:
    from ..drawing import save_page
    from ..wording import listed

    names = listed((os.path.basename(file) for file in args.files), "and")
    dense = (
        []
        if args.layer is not None
        else [
            f"{os.path.basename(file)}: layers {key} are null, the model's own dense attention, and have no layout."
            for file, structures_of in read.items()
            for key, structure in structures_of.entries.items()
            if structure is None
        ]
    )
    save_page([_sheet(args, one) for one in structures], args.out, f"{names} at {args.seq:,} tokens", dense)
    print(f"{listed(args.files, 'and')}: drawn to {args.out}.")


def _sheet(args: argparse.Namespace, one: Structure) -> Sheet:
    from ..config import sparse_attention_block
    from ..drawing import Sheet

    structure = one.structure
    about: dict[str, Any]
    try:
        about = sparse_attention_block(structure)
    except ValueError:  # a class of a user's that does not keep what it was made from
        about = {"mode": one.mode.removeprefix("mode "), "block": structure.block}
    rows = one.rows(args.seq)
    name = os.path.basename(one.file) if len({*map(os.path.basename, args.files)}) == len(args.files) else one.file
    causal = declared_value(structure, "causal")
    return Sheet(name, one.name, rows, structure.block, args.heads, causal, args.head, about)


def _named(path: str, layers: str) -> str:
    """The file of a picture: of several each has its layers in its name, as in layout.layers-0-5.png."""
    stem, ending = os.path.splitext(path)
    return f"{stem}.{layers.replace(' ', '-')}{ending}" if layers else path


def number(text: str) -> int:
    """argparse type: an integer of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return int(text)
