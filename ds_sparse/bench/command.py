"""The command line of `ds_sparse bench`: what runs, and the options that operations share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatch
from itertools import product
from typing import Any, NoReturn

import torch

from ..tools.arguments import UsageError, positive
from ..tools.files import add_force, require_writable
from ..tools.terminal import wrong
from . import command_of
from .machine import DTYPES
from .registry import operation as entry
from .runs import without_json

SECONDS = {"cpu": 60, "cuda": 60}
"""The time after which no new round of a case begins, if an operation has no other."""

NO_FLOOR = (
    "A CPU has no floor: dense results of hundreds of megabytes get new memory at every call, which takes longer than "
    "computing them, so that density times the dense time bounds nothing."
)


def measure(operation: str, arguments: list[str]) -> int:
    """Runs `ds_sparse bench OPERATION ARGUMENTS` and returns its exit status."""
    args = parse(operation, arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        return wrong("--device cuda: torch finds no CUDA GPU; leave it out to measure the CPU.")
    if args.json is not None:
        try:
            require_writable(args.json, args.force)
        except ValueError as error:
            return wrong(error)
    return entry(operation).measure(args, torch.device(args.device))


class Recorded(argparse.ArgumentParser):
    """Raises ValueError where argparse ends the program: these options are a file's, not the user's."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog} does not take the options of this run: {message}.")

    def print_help(self, file: Any = None) -> NoReturn:
        self.error("--help measures nothing")


def parse(operation: str, arguments: list[str], is_recorded: bool = False) -> argparse.Namespace:
    """The options of an operation, and as `arguments` those that say what is measured.

    Args:
        is_recorded: they are a file's: a mistake raises ValueError, and peers may be unknown here.
    """
    parser = (Recorded if is_recorded else argparse.ArgumentParser)(prog=command_of(operation))
    parser.set_defaults(operation=operation, arguments=without_json(arguments), by_device={}, known_peers=())
    entry(operation).add(parser)
    args = parser.parse_args(arguments)
    for name, defaults in args.by_device.items():
        if getattr(args, name) is None:
            setattr(args, name, defaults[args.device])
    for name in getattr(args, "peers", None) or ():
        if args.known_peers and name not in args.known_peers and not is_recorded:
            parser.error(
                f"argument --peers: {name!r} is not one of {', '.join(args.known_peers)}; in a clone of ds_sparse "
                "`python -m benchmarks` has those of other packages"
            )
    return args


def add_shared(
    parser: argparse.ArgumentParser, dtypes: Mapping[str, list[str]], seconds: Mapping[str, int] = SECONDS
) -> None:
    """Adds the options of operations that time rounds, with the defaults of a device."""
    add_by_device(parser, "--dtype", listed(one_of(DTYPES)), ", ".join(DTYPES), dtypes)
    parser.add_argument("--repeats", type=positive, default=20, help="rounds; times are their medians (default: 20)")
    add_by_device(parser, "--seconds", positive, "no new round of a case after this long", seconds)
    add_device_and_json(parser)


def add_device_and_json(parser: argparse.ArgumentParser) -> None:
    """Adds the options that all operations have."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: cpu)")
    parser.add_argument("--json", metavar="OUT", help="write the rows to this file")
    add_force(parser)


def add_by_device(
    parser: argparse.ArgumentParser,
    option: str,
    parse: Callable[[str], Any],
    help: str,
    defaults: Any,
    in_words: str = "",
) -> None:
    """Adds an option with a default, or one for each device. in_words: of the defaults, if not as they would be
    written."""
    name = option.removeprefix("--").replace("-", "_")
    if not isinstance(defaults, Mapping):
        defaults = dict.fromkeys(("cpu", "cuda"), defaults)
    parser.set_defaults(by_device={**parser.get_default("by_device"), name: defaults})
    on_cpu, on_gpu = in_option(defaults["cpu"]), in_option(defaults["cuda"])
    said = in_words or (on_cpu if on_cpu == on_gpu else f"{on_cpu}; on a GPU {on_gpu}")
    parser.add_argument(option, type=parse, help=f"{help} (default: {said})")


def add_peers(
    parser: argparse.ArgumentParser, names: Collection[str], defaults: Any, help: str = "", in_words: str = ""
) -> None:
    """Adds the choice of peers; a file may name one of another program."""
    parser.set_defaults(known_peers=tuple(names))
    add_by_device(parser, "--peers", lambda text: text.split(","), f"{', '.join(names)}{help}", defaults, in_words)


def add_sizes(parser: argparse.ArgumentParser, seq_len: Any, heads: Any, batch: Any = (1,), **in_words: str) -> None:
    """Adds sizes that are varied, with their defaults: each option takes a list."""
    add_by_device(parser, "--seq-len", listed(positive), "tokens", seq_len)
    add_by_device(parser, "--heads", listed(positive), "of each sequence", heads)
    add_by_device(parser, "--head-dim", listed(positive), "numbers in a head's vector", [64])
    add_by_device(parser, "--batch", listed(positive), "sequences", batch, **in_words)


def add_cases(parser: argparse.ArgumentParser, grid: Iterable[Any], such_as: str) -> None:
    """Adds the choice of a grid's cases, by name."""
    parser.add_argument(
        "--cases",
        metavar="NAMES",
        type=lambda text: text.split(","),
        default=["*"],
        help=f"patterns, such as {such_as}: {', '.join(case.name for case in grid)} (default: all)",
    )


def cases_of(
    args: argparse.Namespace, grid: Iterable[Any], whose: str, small: Callable[[Any], Any] = lambda case: case.small()
) -> list[Any]:
    """The cases whose name, or the name of what a CPU runs of them, matches a pattern, in each dtype; on a CPU cut by
    `small`.

    Raises:
        UsageError: a pattern that no case matches; fp32 on a GPU, which what is `whose` of them does not have.
    """
    if args.device == "cuda" and "fp32" in args.dtype:
        raise UsageError(f"--dtype fp32: on a GPU the {whose} are those of bf16 and fp16.")
    found: dict[str, set[str]] = {pattern: set() for pattern in args.cases}
    for case, pattern in product(grid, args.cases):
        if fnmatch(case.name, pattern) or fnmatch(case.small().name, pattern):
            found[pattern].add(case.name)
    for pattern, names in found.items():
        if not names:
            raise UsageError(f"--cases {pattern}: none of {', '.join(case.name for case in grid)}.")
    chosen = [case for case in grid if any(case.name in names for names in found.values())]
    if args.device == "cpu":
        # Cases that differ in what was cut away are one.
        chosen = list({case.name: case for case in map(small, chosen)}.values())
    return [replace(case, dtype=dtype) for dtype, case in product(args.dtype, chosen)]


def in_option(value: object) -> str:
    """Writes a default as a user would."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def listed(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """argparse type: comma-separated values of another type."""
    return lambda text: [parse(part) for part in text.split(",")]


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """argparse type: one of some names."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return parse
