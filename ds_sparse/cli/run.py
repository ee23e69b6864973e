from __future__ import annotations

import argparse

from ..integrations.flag import FLAG
from ..tools.terminal import wrong


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"%(prog)s [deepspeed launcher options] [--{FLAG}] train.py [its arguments]"
    parser.description = (
        "Runs an unchanged training script through DeepSpeed's launcher. With the flag, before the script or after it, "
        'deepspeed.initialize makes attention block-sparse as the "sparse_attention" block of the DeepSpeed JSON says; '
        "without it the block is taken out and training is dense."
    )
    parser.epilog = (
        "The options before the script are those of DeepSpeed's launcher; deepspeed --help lists them. "
        "exit status: that of the script; 2 for what is wrong before a rank is started."
    )
    # No word is an option of ours: DeepSpeed's own parser reads them, and the script's arguments are the script's.
    parser.prefix_chars = ""
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(describe=parser.format_help)


def run(args: argparse.Namespace) -> int:
    if args.words[:1] in (["-h"], ["--help"]):
        print(args.describe(), end="")  # without DeepSpeed, which takes seconds to import
        return 0
    try:
        from ds_sparse.launcher import command

        asked = command.read(args.words)
        if asked is not None:
            command.check(asked)
    except (ValueError, ImportError) as error:
        return wrong(f"ds_sparse run: {error}", 2)
    if asked is None:
        print(args.describe(), end="")
    else:
        command.start(asked)
    return 0
