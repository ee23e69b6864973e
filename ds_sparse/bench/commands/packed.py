"""`ds_sparse bench packed`: attention over packed documents."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import product

import torch

from .. import attention, machine, packed, packed_cases, packed_peers
from .options import BF16_ON_A_GPU, add_cases, add_shared, listed, one_of
from .running import begin, choose, keep, show_report, status_of

RESULTS = packed


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Attention over documents packed in one row: ours, beside ours on a plain batch of sequences ('unpacked'), on "
        "the same documents padded to the longest, and beside its peers. Outputs and gradients are verified against "
        "float64, then all are timed in turns. 'of unpacked' is the live scores computed a second over those of the "
        "plain batch; 'of what is left' the same over the part that blocks leave which are not full; 'x ours' the "
        "ratio to ds_sparse's time. Names end with the documents' length; 'corpus' draws lengths around a median of "
        "400, up to 8,192. varlen and fa4-varlen are dense in each document where there is no window. A peer that does "
        "not take a case is named with the reason. On a CPU the cases are cut to two heads and 4,096 tokens, which "
        "their names say (-4k)."
    )
    add_shared(parser, BF16_ON_A_GPU)
    add_cases(parser, packed_cases.TABLE, "window-*,bigbird-512")
    parser.add_argument(
        "--peers",
        type=listed(one_of(packed_peers.others())),
        help=f"{', '.join(packed_peers.others())}, besides {' and '.join(packed_peers.ALWAYS)} (default: on a CPU "
        f"{','.join(packed_peers.ON_CPU)}; on a GPU {','.join(packed_peers.ON_CUDA)})",
    )


def measure(args: argparse.Namespace, device: torch.device) -> int:
    if args.device == "cuda" and "fp32" in args.dtype:
        print("--dtype fp32: on a GPU the peers are those of bf16 and fp16.", file=sys.stderr)
        return 1
    try:
        chosen = choose(packed_cases.TABLE, args.cases)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    chosen = chosen if args.device == "cuda" else [case.small() for case in chosen]
    names = args.peers or (packed_peers.ON_CUDA if args.device == "cuda" else packed_peers.ON_CPU)
    run = begin(args, device, **attention.versions())
    failed = False

    def results() -> Iterator[packed.Result]:
        nonlocal failed
        for dtype, case in product(args.dtype, chosen):
            result = packed.run_case(case, names, device, dtype, args.repeats, args.seconds)
            failed |= result.row(packed_peers.OURS, machine.TRAIN) is None
            yield keep(args, run, result)

    show_report(args, results())
    return status_of(packed_peers.OURS, failed)
