from __future__ import annotations

import argparse

from . import _checkpoint

_EXAMPLES = """\
  ds_sparse convert allenai/longformer-base-4096 roberta-4096
  ds_sparse convert ./bigbird-roberta-base ./bert-4096
  ds_sparse convert ./led-base-16384 ./bart-16384"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    description = (
        "Writes a checkpoint of RoBERTa, made of one of Longformer, of BERT, made of one of BigBird, or of BART, made "
        "of one of LED: with the same weights and tokenizer, and the sparse structure nearest to the model's own. "
        "Nothing is downloaded, trained or overwritten."
    )
    _checkpoint.add_places(parser, description, _EXAMPLES)
    parser.add_argument(
        "--config", metavar="FILE", help="DeepSpeed JSON with another structure (default: the model's own)"
    )


def run(args: argparse.Namespace) -> int:
    return _checkpoint.write(args, "convert")
