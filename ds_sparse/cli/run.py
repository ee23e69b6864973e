from __future__ import annotations

import argparse
import sys

from ..integrations.flag import FLAG


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"%(prog)s [deepspeed launcher options] [--{FLAG}] train.py [its arguments]"
    parser.description = (
        "Runs an unchanged training script through DeepSpeed's launcher. With the flag, before the script or after it, "
        'deepspeed.initialize makes attention block-sparse as the "sparse_attention" block of the DeepSpeed JSON says; '
        "without it the block is taken out and training is dense."
    )
    # No word is an option of ours: DeepSpeed's own parser reads them, and the script's arguments are the script's.
    parser.prefix_chars = ""
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(describe=parser.format_help)


def run(args: argparse.Namespace) -> int:
    from ds_sparse.launcher import command

    try:
        asked = command.read(args.words)
        if asked is not None:
            command.check(asked)
    except ValueError as error:
        print(f"ds_sparse run: {error}", file=sys.stderr)
        return 2
    if asked is None:
        print(args.describe(), command.describe_options(), sep="\n")
    else:
        command.start(asked)
    return 0
