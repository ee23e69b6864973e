from __future__ import annotations

import argparse

from ..tools.arguments import positive
from . import _checkpoint

_EXAMPLES = """\
  ds_sparse adapt roberta-base roberta-4096 --max-position 4096
  ds_sparse adapt ./all-MiniLM-L6-v2 ./minilm-4096 --max-position 4096 --config ds.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    description = (
        "Writes a checkpoint for longer sequences, made of a dense one of Transformers: its learned positions are "
        "repeated, and its config gets the sparse_attention block. Model, tokenizer, if there is one, and files of "
        "sentence-transformers are saved. Nothing is downloaded, trained or overwritten."
    )
    _checkpoint.add_places(parser, description, _EXAMPLES)
    parser.add_argument(
        "--max-position", type=positive, required=True, metavar="N", help="maximum length of the new model, in tokens"
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="DeepSpeed JSON with the sparse_attention block (default: the checkpoint's own, else mode fixed)",
    )


def run(args: argparse.Namespace) -> int:
    return _checkpoint.write(args, "adapt", max_position=args.max_position)
