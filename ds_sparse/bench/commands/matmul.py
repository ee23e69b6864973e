"""`ds_sparse bench matmul`: MatMul, Softmax, and attention of both."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from ...arguments import positive
from ...block_sizes import BLOCK_SIZES
from .. import layouts, matmul
from .options import NO_FLOOR, add_shared, block, by_device, listed, one_of
from .running import run_grid

RESULTS = matmul


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Verifies the operations against float64, then times them in turns beside dense PyTorch and, on a GPU, "
        "torch.sparse's block-sparse operations. 'x dense' is the ratio to the dense counterpart. 'of floor', on a "
        "GPU, is the share of what perfect sparsity allows: the largest of the bytes of live blocks and operands at "
        "the rate of a copy, of FLOPs at that of a matrix product, and of the bytes from L2 that tiles of 128 rows ask "
        "for at that of reads from L2, all measured here, with the name of the one that binds. "
        f"{NO_FLOOR} 'break-even' is the density from which on dense would be faster. A peer that does not take a case "
        "is named with the reason."
    )

    def add(option: str, parse: Callable[[str], Any], help: str) -> None:
        """With one default for each device."""
        name = option.removeprefix("--").replace("-", "_")
        default = by_device({device: matmul.DEFAULTS[device][name] for device in matmul.DEFAULTS})
        parser.add_argument(option, type=parse, help=f"{help} (default: {default})")

    add_shared(parser, {device: defaults["dtype"] for device, defaults in matmul.DEFAULTS.items()}, seconds=None)
    add("--seconds", positive, "no new round of a case after this long")
    add("--operations", listed(one_of(matmul.DENSE)), ", ".join(matmul.DENSE))
    add("--layout", listed(one_of(layouts.LAYOUTS)), f"{', '.join(layouts.LAYOUTS)}, with the density in percent")
    add("--block", listed(block), f"block sizes: {', '.join(map(str, BLOCK_SIZES))}")
    add("--seq-len", listed(positive), "tokens")
    add("--head-dim", listed(positive), "numbers in a head's vector")
    add("--heads", listed(positive), "of each sequence")
    add("--batch", listed(positive), "sequences")


def measure(args: argparse.Namespace, device: torch.device) -> int:
    for name, default in matmul.DEFAULTS[device.type].items():
        if getattr(args, name) is None:
            setattr(args, name, default)

    def measured(case: matmul.Case) -> matmul.Result:
        return matmul.run_case(case, args.operations, device, args.repeats, args.seconds)

    grid = [
        case
        for heads, batch in product(args.heads, args.batch or [None])
        for case in matmul.grid(args.layout, args.block, args.dtype, args.seq_len, args.head_dim, heads, batch)
    ]
    return run_grid(args, device, grid, measured)
