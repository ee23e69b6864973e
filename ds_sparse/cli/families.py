from __future__ import annotations

import argparse
import textwrap

from ..tools.terminal import wrong


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Says what sparsify makes of families of Transformers models, and why: of the models themselves, tiny ones "
        "without weights, of the Transformers that is installed."
    )
    parser.add_argument(
        "families", nargs="*", metavar="family", help="such as BERT or T5 (default: all that are known)"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table of the documentation")


def run(args: argparse.Namespace) -> int:
    try:
        from ..integrations.transformers.family_table import FAMILIES, markdown, rows
    except ImportError as error:
        return wrong(f"ds_sparse families: {error}")
    unknown = [family for family in args.families if family not in FAMILIES]
    if unknown:
        return wrong(f"ds_sparse families: {unknown[0]!r} is none of {', '.join(FAMILIES)}.", 2)
    table = rows(args.families or FAMILIES)
    if args.markdown:
        print(markdown(table))
        return 0
    for row in table:
        print(textwrap.fill(f"{row.family}: {row.what}; {row.why}.", 100, subsequent_indent="  "), flush=True)
    return 0
