"""Arguments and errors of the commands that write a checkpoint of Transformers."""

from __future__ import annotations

import argparse
from textwrap import fill
from typing import Any

from ..tools.terminal import Terminal, wrong


def add_places(parser: argparse.ArgumentParser, description: str, examples: str) -> None:
    """MODEL and OUT, and the text of the help around the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # for the examples
    parser.description = fill(description, 100)
    exit_status = (
        "exit status: 0 if the checkpoint is written, 1 if the model, the config or OUT do not allow it, 2 for wrong "
        "usage."
    )
    parser.epilog = (
        f"examples:\n{examples}\nthen, in Python, after import ds_sparse:\n"
        f'  AutoModel.from_pretrained(OUT, attn_implementation="ds_sparse")\n\n{fill(exit_status, 100)}'
    )
    parser.add_argument("model", metavar="MODEL", help="folder of the checkpoint, or its name in the hub's cache")
    parser.add_argument("out", metavar="OUT", help="folder of the new checkpoint; it is new or empty")


def write(args: argparse.Namespace, how: str, **options: Any) -> int:
    """Writes to OUT, with the block of the file --config, and returns the exit status. Mistakes of a block are those of
    its file, or of the checkpoint that it was made of where there is none.

    Args:
        how: the function of integrations/transformers/checkpoint.py that writes.
        options: its others.
    """
    from ..config import SparseAttentionConfigError, load_config
    from ..config.file import name_of

    block: dict[str, Any] | None = None
    try:
        from ..integrations.transformers import checkpoint

        if args.config is not None:
            block = load_config(args.config).block
            if block is None:
                raise ValueError(f"{args.config}: no sparse_attention block, so there is no structure.")
        with checkpoint.quiet(), Terminal().progress(None, f"{how} {args.model}"):
            report = getattr(checkpoint, how)(args.model, args.out, sparsity_config=block, **options)
    except SparseAttentionConfigError as error:
        of_block = name_of(block or {})  # what a mistake in it names, which is read without its file
        source = args.model if args.config is None else args.config
        return wrong("\n".join(mistake.replace(of_block, source, 1) for mistake in error.mistakes))
    except (ValueError, ImportError, MemoryError) as error:
        return wrong(error)
    terminal = Terminal()
    terminal.line(str(report))
    terminal.line(f'{args.out}: saved. Load it with attn_implementation="ds_sparse".', "green")
    return 0
