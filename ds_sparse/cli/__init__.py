"""The `ds_sparse` command. A subcommand is a module with `add_arguments(parser)` and `run(args) -> int`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "bench": "time the operations beside dense PyTorch, after verifying them",
    "check": "say whether the sparse_attention block of a DeepSpeed JSON is right, without training",
    "draw": "draw the layout that a DeepSpeed JSON gives, in the terminal or as a picture",
    "run": "start a training script that knows nothing of ds_sparse, through DeepSpeed's launcher",
    "schema": "print the JSON schema of the sparse_attention block",
}
"""Subcommand to its line of help; the module of the same name is imported only when it is called."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit status: 0, 1 for what it found wrong, 2 for wrong usage."""
    width = max(len(name) for name in COMMANDS)
    parser = argparse.ArgumentParser(
        prog="ds_sparse",
        description="Block-sparse attention for DeepSpeed.",
        epilog="commands:\n" + "\n".join(f"  {name:{width}}  {line}" for name, line in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command", help=", ".join(COMMANDS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see: ds_sparse command --help")
    args = parser.parse_args(argv)

    module = importlib.import_module(f"{__name__}.{args.command}")
    subparser = argparse.ArgumentParser(prog=f"ds_sparse {args.command}", description=COMMANDS[args.command])
    module.add_arguments(subparser)
    for stream in (sys.stdout, sys.stderr):
        # A picture or a key from the file may hold what the terminal's encoding cannot.
        stream.reconfigure(errors="replace")
    return module.run(subparser.parse_args(args.arguments))


def positive(text: str) -> int:
    """argparse type: an integer of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return number
