from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ..config import DEFAULT_MODE, STRUCTURE_ERRORS, describe, example_block, parse_sparse_attention, summary
from ..sparsity import ChosenSparsityConfig, sparsity_class, sparsity_modes
from ..sparsity._fields import json_fields, json_model
from ..tools.terminal import wrong
from ..tools.wording import did_you_mean, one_of, reason

_BLOCKS = 24
"""Blocks in a row of a picture: few, and enough for the random blocks of every mode."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Shows the structures that a sparse_attention block may name as its mode: a picture of each, its keys, what "
        "they take, their defaults. Read from the classes, those of your own packages too."
    )
    parser.add_argument("modes", nargs="*", metavar="mode", help="such as bigbird (default: all that are known)")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a list with an object for each mode, without its picture: mode, default (whether a block without a "
        "mode has it), about, keys (of each: takes, required, default, about, schema)",
    )


@dataclass
class Key:
    """A key of a mode, in words and as JSON schema has it."""

    takes: str | None
    required: bool
    default: Any
    about: str
    schema: dict[str, Any]


@dataclass
class Mode:
    """A mode as it is described."""

    mode: str
    default: bool
    about: str
    keys: dict[str, Key]


def run(args: argparse.Namespace) -> int:
    known = sparsity_modes()
    for mode in args.modes:
        if mode not in known:
            hint = did_you_mean(mode, known)
            return wrong(f"ds_sparse modes: {mode!r} is no mode; wanted {one_of(known)}.{hint}", 2)
    try:
        found = [read_mode(mode) for mode in args.modes or known]
    except STRUCTURE_ERRORS as error:  # an entry point of a package, which is loaded here
        return wrong(f"ds_sparse modes: a mode's class does not load: {reason(error)}")
    if args.json:
        print(json.dumps([asdict(mode) for mode in found], indent=2, default=repr))
    else:
        _say(found, alone=bool(args.modes))
    return 0


def read_mode(mode: str) -> Mode:
    """A mode and its keys, from its class."""
    cls = sparsity_class(mode)
    fields = json_fields(cls)
    schemas = json_model(mode, fields).model_json_schema()["properties"]
    keys = {}
    for name, field in fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        about = field.description or ""
        keys[name] = Key(describe(schemas[name]), field.is_required(), default, about, schemas[name])
    return Mode(mode, mode == DEFAULT_MODE, summary(cls), keys)


def _say(modes: list[Mode], alone: bool) -> None:
    """Keys that all modes have, or all with a layout, stand once, at the end, unless modes were asked for by name."""
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    of_layouts = [] if alone else [mode for mode in modes if not _chooses(mode)]
    common = [key for key in modes[0].keys if of_layouts and all(_same(modes[0], mode, key) for mode in of_layouts)]
    legends: dict[str, None] = {}
    for mode in modes:
        print(mode.mode)
        print(textwrap.fill(mode.about, width, initial_indent="  ", subsequent_indent="  "))
        print()
        picture, legend = _picture(mode)
        print(textwrap.indent(picture, "  "))
        print()
        own = {name: key for name, key in mode.keys.items() if name not in common or not _same(modes[0], mode, name)}
        _say_keys(own.items(), width)
        legends |= {legend: None} if legend else {}
    of_all = [name for name in common if all(_same(modes[0], mode, name) for mode in modes)]
    rest = [name for name in common if name not in of_all]
    for title, names in (("keys of every mode with a layout", rest), ("keys of every mode", of_all)):
        if names:
            print(title)
            _say_keys(((name, modes[0].keys[name]) for name in names), width)
    for legend in legends:
        print(f"pictures: {legend}")


def _say_keys(keys: Iterable[tuple[str, Key]], width: int) -> None:
    for name, key in keys:
        default = "required" if key.required else f"default {json.dumps(key.default, default=repr)}"
        takes = f"; {key.takes}" if key.takes else ""
        print(textwrap.fill(f"{name}: {default}{takes}", width, initial_indent="  ", subsequent_indent=" " * 6))
        if key.about:
            print(textwrap.fill(key.about, width, initial_indent=" " * 6, subsequent_indent=" " * 6))
    print()


def _chooses(mode: Mode) -> bool:
    return issubclass(sparsity_class(mode.mode), ChosenSparsityConfig)


def _same(mode: Mode, other: Mode, key: str) -> bool:
    return key in other.keys and asdict(mode.keys[key]) == asdict(other.keys[key])


def _picture(mode: Mode) -> tuple[str, str]:
    """The layout of an example, and what its characters are; or why there is none."""
    from ..drawing import draw

    if _chooses(mode):
        return "No picture: each call chooses its blocks.", ""
    try:
        block = example_block(mode.mode)
        structure = parse_sparse_attention(block, 1)
        picture = draw(structure, columns=_BLOCKS, tokens=_BLOCKS * structure.block)
    except STRUCTURE_ERRORS as error:
        return f"no picture: {reason(error)}", ""
    usual = {name: key.default for name, key in mode.keys.items()}
    other = [f", {name} {json.dumps(value)}" for name, value in block.items() if value != usual.get(name, value)]
    *lines, legend = picture.splitlines()[1:]
    return "\n".join([f"{_BLOCKS} x {_BLOCKS} blocks{''.join(other)}", *lines]), legend
