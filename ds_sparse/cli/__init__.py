"""The `ds_sparse` command. A subcommand is a module with `add_arguments(parser)` and `run(args) -> int`."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import TextIO

COMMANDS = {
    "adapt": "continue a dense checkpoint of Transformers at longer lengths, with block-sparse attention",
    "bench": "time the operations beside dense PyTorch, after verifying them",
    "check": "say what is wrong with a DeepSpeed JSON and its sparse_attention block, without training",
    "completion": "print a script with which bash, zsh or fish completes this command",
    "convert": "make a checkpoint of Longformer, BigBird or LED one of RoBERTa, BERT or BART, block-sparse",
    "draw": "draw the layout that a DeepSpeed JSON gives, or what a model chooses, in the terminal or as a picture",
    "families": "say which Transformers models become sparse, which do not, and why",
    "modes": "show the structures a sparse_attention block may have: a picture, keys, bounds, defaults",
    "new": "write a commented DeepSpeed JSON with a sparse_attention block, from a few options",
    "plan": "say what a training run will cost, in time and memory, and what it gains over dense attention",
    "report": "say what serves this machine, why not something faster, and what to do about each problem",
    "run": "start a training script that knows nothing of ds_sparse, through DeepSpeed's launcher",
    "schema": "print the JSON schema of the sparse_attention block",
    "verify": "check every kernel of this machine against float64, forward and backward, and look for races",
}
"""Subcommand to its line of help; the module of the same name is imported only when it is called."""

EXIT_STATUS = (
    "exit status: 0 if all is right, and after help; 1 for what a command found wrong or could not write; 2 for wrong "
    "usage."
)
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a write to standard output when the disk behind it is full."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit status, or raises SystemExit with it, as argparse does.

    0, 1 for what it found wrong or could not write, 2 for wrong usage. As of a program that the signal ended: 141 when
    the reader of a pipe has left, 130 after Ctrl-C.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        # A picture or a key from the file may hold what the terminal's encoding cannot.
        stream.reconfigure(errors="replace")
    try:
        try:
            return _run(argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout, sys.stderr)
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in _NOT_WRITTEN or error.filename is not None:
            raise
        _discard(sys.stdout)
        with contextlib.suppress(OSError):
            print(f"ds_sparse: the output cannot be written: {error.strerror}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(argv: Sequence[str] | None) -> int:
    from .. import __version__

    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:{width}}  {line}" for name, line in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="ds_sparse",
        description="Block-sparse attention for DeepSpeed.",
        epilog="\n".join(["commands:", *lines, "", EXIT_STATUS]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ds_sparse {__version__}")
    parser.add_argument("command", nargs="?", choices=COMMANDS, metavar="command", help=", ".join(COMMANDS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="ds_sparse COMMAND --help lists them")
    args = parser.parse_args(argv)
    if args.command is None:
        print(parser.format_help(), end="")
        return 0

    module = importlib.import_module(f"{__name__}.{args.command}")
    subparser = argparse.ArgumentParser(prog=f"ds_sparse {args.command}", description=COMMANDS[args.command])
    module.add_arguments(subparser)
    return module.run(subparser.parse_args(args.arguments))


def _discard(*streams: TextIO) -> None:
    """Drops what streams still have to write: at its end Python would try again, and complain."""
    for stream in streams:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
