from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..sparsity import ChosenSparsityConfig, SparsityConfig
from ..sparsity.declarations import declared_value
from ..tools.arguments import UsageError, positive
from ..tools.block_sizes import rounded_up
from ..tools.files import add_force, require_writable
from ..tools.terminal import Terminal, width, wrong
from ..tools.wording import listed

if TYPE_CHECKING:
    from ..config import LayerStructures
    from ..drawing import Sheet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", metavar="file", help="DeepSpeed JSON with a sparse_attention block")
    parser.add_argument(
        "--model",
        help="folder of a checkpoint of Transformers, or its name in the hub's cache: draw what its layers choose for "
        "--text, by the block of the file, or without one by its own",
    )
    parser.add_argument("--text", metavar="FILE", help="a text, of which --seq tokens at most are taken")
    parser.add_argument("--seq", type=positive, default=2048, help="sequence length in tokens (default: 2048)")
    parser.add_argument(
        "--heads", type=positive, help="attention heads of the model (default: 12; --model has its own)"
    )
    parser.add_argument("--head", type=number, metavar="N", help="draw head N alone, counted from 0")
    parser.add_argument("--layer", type=number, metavar="N", help="draw the layout of layer N alone, counted from 0")
    parser.add_argument("--width", type=positive, help="width in characters (default: the terminal's; 64 in a pipe)")
    parser.add_argument(
        "--out",
        help="write a picture instead, .png or .svg (needs matplotlib), of one file; where layers have structures of "
        "their own, a picture for each, named after the layers. Or a page for a browser, .html, of any files: to zoom "
        "into, to compare, with the tiles that kernels walk",
    )
    add_force(parser)


def run(args: argparse.Namespace) -> int:
    from ..config import ANY_NUM_HEADS
    from ..drawing import PAGES, PICTURES, require_drawable

    of_model = args.model is not None
    if of_model != (args.text is not None) or not (of_model or args.files):
        return wrong(
            "ds_sparse draw: give a DeepSpeed JSON for its layout, or --model and --text for what it chose.", 2
        )
    if of_model and args.heads is not None:
        return wrong(
            f"ds_sparse draw: --heads {args.heads} beside --model, which says its heads; leave --heads out.", 2
        )
    args.heads = args.heads or ANY_NUM_HEADS
    try:
        is_page = args.out is not None and args.out.lower().endswith(PAGES)
        if args.out is not None:
            # Without --layer the names of pictures are known when their layers are, and are looked at then.
            is_one = is_page or args.layer is not None
            require_drawable(args.out, PICTURES if of_model else (*PICTURES, *PAGES), args.force or not is_one)
        if len(args.files) > 1 and (of_model or (args.out is not None and not is_page)):
            raise UsageError(f"{args.out or args.model}: a picture is of one file; a page, .html, has several.")
        read = {} if of_model else {file: _read(args, file) for file in args.files}
        sheets = [sheet for file in read for sheet in _sheets(args, file, read[file])]
        sheets += _chosen(args) if of_model else []
        if is_page:
            _save_page(args, sheets, read)
        elif args.out is not None:
            _save_pictures(args, sheets)
        else:
            _print(args, sheets)
    except (ValueError, ImportError, MemoryError) as error:
        return wrong(error)
    return 0


def _chosen(args: argparse.Namespace) -> Iterator[Sheet]:
    """What the layers of a model have chosen for a text."""
    from ..config import load_config, read_block
    from ..drawing import Sheet
    from ..integrations.transformers.checkpoint import choices_of, quiet

    try:
        text = Path(args.text).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{args.text} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{args.text} cannot be read: it is no text in UTF-8.") from error
    block = load_config(args.files[0]).block if args.files else None
    if args.files and block is None:
        raise ValueError(f"{args.files[0]}: no sparse_attention block; leave it out for the checkpoint's own.")
    if block is not None:
        structures = read_block(block, source=args.files[0], whole=False).all()
        if not any(isinstance(structure, ChosenSparsityConfig) for structure in structures):
            raise ValueError(
                f"{args.files[0]}: its layers choose no blocks. Give a file with mode moba, nsa or indexer; a layout "
                "is drawn without --model and --text."
            )
    with quiet(), Terminal().progress(None, f"run {args.model}"):
        choices = choices_of(args.model, text, args.seq, block)
    if args.layer is not None and args.layer not in choices:
        raise UsageError(f"--layer {args.layer}: layers that choose are {listed(choices, 'and')}.")
    for number, choice in choices.items():
        _check_head(args, choice.heads)
        if args.layer in (None, number):
            name = "" if args.layer is not None else f"layer {number}"
            yield Sheet(args.model, name, choice.rows(), 1, choice.heads, choice.causal, args.head)


def _check_head(args: argparse.Namespace, heads: int) -> None:
    if args.head is not None and args.head >= heads:
        more = "" if args.model is not None else "; --heads says how many the model has"
        raise UsageError(f"--head {args.head}: there are {heads} heads, from 0 to {heads - 1}{more}.")


def _read(args: argparse.Namespace, file: str) -> LayerStructures:
    from ..config import SparseAttentionConfigError, load_config, read_block

    _check_head(args, args.heads)
    _, block = load_config(file)
    if block is None:
        raise SparseAttentionConfigError([f"{file}: no sparse_attention block, so there is no layout to draw."])
    return read_block(block, args.heads, source=file, seq_len=args.seq, whole=False)


def _sheets(args: argparse.Namespace, file: str, read: LayerStructures) -> Iterator[Sheet]:
    """Layouts of a file, named by the layers that have them; "" for all, or for the one that was asked for."""
    if args.layer is not None:
        of_layer = read.of(args.layer)
        if of_layer is None:
            raise ValueError(f"{file}: layer {args.layer} is null, dense without blocks; there is no layout.")
        yield _sheet(args, file, "", of_layer)
        return
    yield _sheet(args, file, "other layers" if read.entries else "", read.others)
    for key, structure in read.entries.items():
        if structure is not None:
            yield _sheet(args, file, f"layers {key}", structure)


def _sheet(args: argparse.Namespace, file: str, name: str, structure: SparsityConfig) -> Sheet:
    from ..config import mode_of, sparse_attention_block
    from ..drawing import Sheet

    about: dict[str, Any] = {"mode": mode_of(type(structure)), "block": structure.block}
    if isinstance(structure, ChosenSparsityConfig):
        raise ValueError(
            f"{file}: mode {about['mode']} has no layout: each call chooses its blocks; give --model and --text to "
            "draw what a model chooses."
        )
    with suppress(ValueError):  # a class of a user's that does not keep what it was made from
        about = sparse_attention_block(structure)
    rows = structure.make_rows(rounded_up(args.seq, structure.block))
    causal = declared_value(structure, "causal")
    return Sheet(file, name, rows, structure.block, args.heads, causal, args.head, about)


def _print(args: argparse.Namespace, sheets: list[Sheet]) -> None:
    from ..drawing import draw

    terminal, of_terminal = Terminal(), width(0)
    for sheet in sheets:
        heading = [sheet.file] if len(args.files) > 1 else []
        if sheet.name:
            heading.append(sheet.name)
        if heading:
            terminal.line(f"{', '.join(heading)}:{_mode(sheet)}", "bold")
        columns = args.width or of_terminal or 64
        text = draw(sheet.rows, sheet.block, columns, args.head, stretch=of_terminal > 0)
        first, *picture, legend = text.splitlines()
        terminal.line(_wrapped(first, of_terminal), "bold")
        for line in picture:
            terminal.line(line, "blue")
        terminal.line(_wrapped(legend, of_terminal), "dim")


def _wrapped(text: str, columns: int) -> str:
    """Lines as wide as the terminal; of 0 columns, where there is none, the text."""
    return textwrap.fill(text, columns) if columns else text


def _mode(sheet: Sheet) -> str:
    return f" mode {sheet.about['mode']}" if sheet.about else ""


def _save_pictures(args: argparse.Namespace, sheets: list[Sheet]) -> None:
    from ..drawing import save_drawing

    outs = [_named(args.out, sheet.name) for sheet in sheets]
    for out in outs:
        require_writable(out, args.force)
    for sheet, out in zip(sheets, outs, strict=True):
        title = ", ".join(filter(None, [os.path.basename(sheet.file), sheet.name, _mode(sheet).strip()]))
        save_drawing(sheet.rows, sheet.block, out, title, args.head)
        print(f"{sheet.file}: drawn to {out}.")


def _save_page(args: argparse.Namespace, sheets: list[Sheet], read: dict[str, LayerStructures]) -> None:
    from ..drawing import save_page

    short = {file: os.path.basename(file) for file in args.files}
    dense = [
        f"{short[file]}: layers {key} are null, the model's own dense attention, and have no layout."
        for file, structures in read.items()
        for key, structure in structures.entries.items()
        if structure is None and args.layer is None
    ]
    if len({*short.values()}) == len(args.files):
        sheets = [replace(sheet, file=short[sheet.file]) for sheet in sheets]
    save_page(sheets, args.out, f"{listed(short.values(), 'and')} at {args.seq:,} tokens", dense)
    print(f"{listed(args.files, 'and')}: drawn to {args.out}.")


def _named(path: str, layers: str) -> str:
    """The file of a picture: of several each has its layers in its name, as in layout.layers-0-5.png."""
    stem, ending = os.path.splitext(path)
    return f"{stem}.{layers.replace(' ', '-')}{ending}" if layers else path


def number(text: str) -> int:
    """argparse type: an integer of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return int(text)
