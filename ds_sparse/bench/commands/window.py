"""`ds_sparse bench window`: products, softmax and attention of windows."""

from __future__ import annotations

import argparse
from itertools import product

import torch

from ...arguments import positive
from .. import window
from .options import NO_FLOOR, add_shared, add_sizes, listed, one_of
from .running import run_grid

RESULTS = window


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Verifies the operations of windows against float64, then times them in turns beside dense PyTorch and other "
        "ways to windowed attention. 'x dense' is the ratio to the dense counterpart; 'x floor', on a GPU, that to "
        "what perfect sparsity costs: bytes and FLOPs of the windows at the rates of a copy and of a matrix product "
        f"measured here. {NO_FLOOR}"
    )
    add_shared(parser, {"cpu": ["fp32", "bf16"], "cuda": ["fp32", "bf16"]})
    add_sizes(parser, seq_len="1024,4096", heads="4")
    parser.add_argument(
        "--window", type=listed(positive), default=[64, 256], help="tokens seen on each side (default: 64,256)"
    )
    parser.add_argument(
        "--peers",
        type=listed(one_of(window.PEERS)),
        default=list(window.PEERS),
        help=f"{', '.join(window.PEERS)}; flex is compiled for each case (default: all)",
    )


def measure(args: argparse.Namespace, device: torch.device) -> int:
    def measured(case: window.Case) -> window.Result:
        return case, window.run_case(case, args.peers, device, args.repeats, args.seconds)

    grid = [
        case
        for sizes in product(args.batch, args.heads, args.head_dim)
        for case in window.grid(args.seq_len, args.window, args.dtype, *sizes)
    ]
    return run_grid(args, device, grid, measured)
