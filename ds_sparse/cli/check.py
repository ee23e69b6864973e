from __future__ import annotations

import argparse
import sys

from ..config import (
    DEFAULT_MODE,
    STRUCTURE_ERRORS,
    SparseAttentionConfigError,
    load_config,
    parse_sparse_attention,
    reason,
)
from ..layout import density
from . import positive

_USUAL_LENGTH = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="DeepSpeed JSON (comments allowed, as DeepSpeed reads it)")
    parser.add_argument("--seq", type=positive, help="sequence length in tokens that the layout must exist at")
    parser.add_argument("--heads", type=positive, default=12, help="attention heads of the model (default: 12)")


def run(args: argparse.Namespace) -> int:
    notices: list[str] = []
    try:
        _, block = load_config(args.file)
        if block is None:
            print(
                f"{args.file}: no sparse_attention block: it trains dense, or {DEFAULT_MODE} at its defaults if "
                "switched on."
            )
            return 0
        structure = parse_sparse_attention(block, args.heads, source=args.file, seq_len=args.seq, notices=notices)
    except SparseAttentionConfigError as error:
        print(error, file=sys.stderr)
        return 1
    summary = f"mode {block.get('mode', DEFAULT_MODE)}, block {structure.block}"
    seq_len = args.seq or _USUAL_LENGTH
    try:
        summary += f", density {density(structure.make_bool_layout(seq_len)):.1%} at {seq_len} tokens"
    except STRUCTURE_ERRORS as error:
        # Only at the length that nobody asked for: parse_sparse_attention has tried the other.
        summary += f", no layout at {seq_len} tokens ({reason(error)})"
    print(f"{args.file}: {summary}.")
    for notice in notices:
        print(notice)
    return 0
