"""`ds_sparse bench attention`: fused attention on live blocks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import product

import torch

from .. import attention, cases, machine, peers
from .options import BF16_ON_A_GPU, add_cases, add_shared, listed, one_of
from .running import begin, choose, keep, show_report, status_of

RESULTS = attention


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Verifies fused attention and its peers against float64, outputs and gradients, then times them in turns. A "
        "peer that does not take a case is named with the reason. TFLOP/s count live blocks alone. 'x floor' is the "
        "ratio to the larger of those FLOPs at the best dense attention's rate and of the bytes of all operands at a "
        "copy's rate, on a CPU to density times the dense time; 'x ours' to ds_sparse's time. On a CPU the cases are "
        "cut to one sequence, four heads and 2,048 tokens, which their names say (-2k), those of --growth to one head."
    )
    add_shared(parser, BF16_ON_A_GPU)
    grids = parser.add_mutually_exclusive_group()
    grids.add_argument(
        "--break-even",
        action="store_true",
        help="random blocks at densities of 10 to 90 %% in place of the table: from which on is dense faster?",
    )
    grids.add_argument(
        "--growth",
        action="store_true",
        help="a window and one global block over 8k to 128k tokens, and one head of 1M, in place of the table",
    )
    add_cases(parser, cases.TABLE, "fixed-*,random-64")
    parser.add_argument(
        "--peers",
        type=listed(one_of(peers.PEERS)),
        help=f"{', '.join(peers.PEERS)} (default: on a CPU {','.join(peers.ON_CPU)}; on a GPU "
        f"{','.join(peers.ON_CUDA)}, for --break-even ds_sparse,cudnn, for --growth ds_sparse; flex-max and "
        "flex-blocks are autotuned for a minute a case)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a first look: at most 3 rounds, and no peer that has to be compiled"
    )


def measure(args: argparse.Namespace, device: torch.device) -> int:
    on_cuda = args.device == "cuda"
    if on_cuda and "fp32" in args.dtype:
        print("--dtype fp32: on a GPU the peers and the floors are those of bf16 and fp16.", file=sys.stderr)
        return 1
    grid = cases.BREAK_EVEN if args.break_even else cases.GROWTH if args.growth else cases.TABLE
    try:
        chosen = choose(grid, args.cases)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if not on_cuda:
        small = [case.small(heads=1, seq_len=case.seq_len) if args.growth else case.small() for case in chosen]
        # Cases that differ in what was cut away are one.
        chosen = list({case.name: case for case in small}.values())
    names = args.peers or default_peers(args)
    repeats = min(args.repeats, 3) if args.quick else args.repeats
    run = begin(args, device, args.dtype, **attention.versions())
    failed = False

    def results() -> Iterator[attention.Result]:
        nonlocal failed
        for dtype, case in product(args.dtype, chosen):
            result = attention.run_case(case, names, device, dtype, repeats, args.seconds)
            failed |= peers.OURS in names and result.row(peers.OURS, machine.TRAIN) is None
            yield keep(args, run, result)

    show_report(args, results())
    return status_of(peers.OURS, failed)


def default_peers(args: argparse.Namespace) -> list[str]:
    if args.growth:
        return [peers.OURS]
    if args.break_even:
        return [peers.OURS, peers.DENSE[args.device]]
    if args.quick:
        return peers.QUICK[args.device]
    return peers.ON_CPU if args.device == "cpu" else peers.ON_CUDA
