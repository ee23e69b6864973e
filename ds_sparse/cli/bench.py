from __future__ import annotations

import argparse

from ..bench import IN_A_CLONE, OPERATIONS, sentence_of_clone
from ..tools.terminal import wrong

SHOW = "show"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    width = max(map(len, OPERATIONS))
    parser.description = "Verifies an operation against float64, then times it beside its peers in the same process."
    operations = "\n".join(f"  {name:{width}}  {line}" for name, line in OPERATIONS.items())
    parser.epilog = f"operations:\n{operations}\n\n{SHOW} FILE...: prints runs again, from what --json FILE has written"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    # Optional for argparse, whose sentence would ask for `arguments` too.
    parser.add_argument(
        "operation",
        nargs="?",
        choices=list(dict.fromkeys([*OPERATIONS, SHOW, *IN_A_CLONE])),
        metavar="operation",
        help=", ".join([*OPERATIONS, SHOW]),
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="ds_sparse bench OPERATION --help lists them")


def run(args: argparse.Namespace) -> int:
    if args.operation is None:
        return wrong(f"ds_sparse bench: name what to time: {', '.join(OPERATIONS)}. See ds_sparse bench --help", 2)
    if args.operation not in (*OPERATIONS, SHOW):
        return wrong(f"ds_sparse bench: {sentence_of_clone(args.operation)}", 2)
    # Here and not above: they import torch, which help does without.
    if args.operation == SHOW:
        from ..bench.show import main

        return main(args.arguments)
    from ..bench.command import measure

    return measure(args.operation, args.arguments)
