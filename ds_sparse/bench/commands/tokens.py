"""`ds_sparse bench tokens`: attention over token pairs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from ...arguments import positive
from .. import machine, tokens
from .options import add_shared, add_sizes, listed, one_of, percent
from .running import begin, keep, show_report, status_of

RESULTS = tokens


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "The steps from dense attention to sparse_attn over token pairs, which all heads share: each is verified "
        "against float64, output and gradients, then all are timed in turns. Says from which sparsity on a step beats "
        "dense attention. A step that does not take a case is named with the reason."
    )
    add_shared(parser, {"cpu": ["fp32"], "cuda": ["fp32"]})
    add_sizes(parser, seq_len="512,1024,2048", heads="1,12")
    parser.add_argument(
        "--sparsity",
        type=listed(percent),
        default=[0.5, 0.75, 0.9, 0.95, 0.99],
        help="percent of the scores that are not computed (default: 50,75,90,95,99)",
    )
    parser.add_argument(
        "--pairs",
        type=listed(one_of(tokens.PATTERNS)),
        default=["random"],
        help=f"{', '.join(tokens.PATTERNS)}: how they lie (default: random)",
    )
    parser.add_argument(
        "--peers",
        type=listed(one_of(tokens.STEPS)),
        default=list(tokens.STEPS),
        help=f"{', '.join(tokens.STEPS)} (default: all)",
    )
    parser.add_argument(
        "--profile", type=positive, default=0, metavar="N", help="also name the N operators that take a step's time"
    )


def measure(args: argparse.Namespace, device: torch.device) -> int:
    run = begin(args, device)
    failed = False

    def results(shape: tuple[Any, ...]) -> Iterator[tokens.Result]:
        nonlocal failed
        dtype, pattern, seq_len, heads, head_dim, batch = shape
        for sparsity in args.sparsity:
            case = tokens.Case(seq_len, heads * head_dim, heads, sparsity, pattern, dtype, batch)
            result = tokens.run_case(case, args.peers, device, args.repeats, args.seconds, args.profile)
            failed |= tokens.OURS in args.peers and result.row(tokens.OURS, machine.TRAIN) is None
            yield keep(args, run, result)

    shapes = product(args.dtype, args.pairs, args.seq_len, args.heads, args.head_dim, args.batch)
    show_report(args, map(results, shapes))
    return status_of(tokens.OURS, failed)
