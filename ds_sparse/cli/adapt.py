from __future__ import annotations

import argparse
import sys

from ..arguments import positive

_EXAMPLES = """examples:
  ds_sparse adapt roberta-base roberta-4096 --max-position 4096 --config ds.json
  ds_sparse adapt ./all-MiniLM-L6-v2 ./minilm-4096 --max-position 4096 --config ds.json
then, in Python, after import ds_sparse:
  AutoModel.from_pretrained("./minilm-4096", attn_implementation="ds_sparse")"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes a checkpoint for longer sequences, made of a dense one of Transformers: its learned positions are "
        "repeated, and its config gets the sparse_attention block. Model, tokenizer and files of sentence-transformers "
        "are saved. Nothing is downloaded, trained or overwritten."
    )
    parser.epilog = (
        f"{_EXAMPLES}\n\nexit status: 0 if the checkpoint is written, 1 if the model, the config or OUT do not allow "
        "it, 2 for wrong usage."
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", metavar="MODEL", help="folder of the dense checkpoint, or its name in the hub's cache")
    parser.add_argument("out", metavar="OUT", help="folder of the new checkpoint; it is new or empty")
    parser.add_argument(
        "--max-position", type=positive, required=True, metavar="N", help="tokens that there shall be room for"
    )
    parser.add_argument(
        "--config", required=True, metavar="FILE", help="DeepSpeed JSON with the sparse_attention block"
    )


def run(args: argparse.Namespace) -> int:
    from ..config import SparseAttentionConfigError, load_config
    from ..integrations.transformers.adapt import adapt
    from ..integrations.transformers.checkpoint import quiet

    try:
        _, block = load_config(args.config)
        if block is None:
            raise SparseAttentionConfigError([f"{args.config}: no sparse_attention block, so there is no structure."])
        with quiet():
            report = adapt(args.model, args.out, max_position=args.max_position, sparsity_config=block)
    except (ValueError, ImportError, MemoryError) as error:
        print(error, file=sys.stderr)
        return 1
    print(report)
    print(f'{args.out}: saved. Load it with attn_implementation="ds_sparse".')
    return 0
