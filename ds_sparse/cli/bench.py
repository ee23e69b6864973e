from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..bench import machine, matmul
from . import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Verifies the operations against float64, then times them beside dense PyTorch in the same process. 'x dense' "
        "is the ratio to the dense counterpart, 'x floor' that to what perfect sparsity costs: on a GPU the bytes and "
        "FLOPs of the live blocks at the rates of a copy and of a matrix product measured here, on a CPU density times "
        "the dense time."
    )
    parser.add_argument(
        "operation", choices=["matmul"], help="what to measure: matmul (MatMul, Softmax, attention of both)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: cpu)")
    parser.add_argument("--seq-len", type=positive, default=2048, help="tokens (default: 2048)")
    parser.add_argument("--heads", type=positive, default=12, help="(default: 12)")
    parser.add_argument("--batch", type=positive, default=1, help="sequences (default: 1)")
    parser.add_argument("--head-dim", type=positive, default=64, help="numbers in a head's vector (default: 64)")
    parser.add_argument("--block", type=listed(positive), default=[64, 16], help="block sizes (default: 64,16)")
    parser.add_argument(
        "--dtype",
        type=listed(one_of(matmul.DTYPES)),
        default=["fp32", "bf16"],
        help="fp32, bf16, fp16 (default: fp32,bf16)",
    )
    layouts = list(matmul.LAYOUTS)
    parser.add_argument(
        "--layout",
        type=listed(one_of(layouts)),
        default=layouts[:3],
        help=f"{', '.join(layouts)} (default: {','.join(layouts[:3])})",
    )
    parser.add_argument("--repeats", type=positive, default=20, help="rounds; times are their medians (default: 20)")
    parser.add_argument(
        "--seconds", type=positive, default=60, help="no new round of a case after this long (default: 60)"
    )
    parser.add_argument("--json", metavar="OUT", help="write the rows to this file")


def run(args: argparse.Namespace) -> int:
    if args.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch finds no CUDA GPU; leave it out to measure the CPU.", file=sys.stderr)
        return 1
    device = torch.device(args.device)
    conditions = machine.conditions(device)
    print(", ".join(f"{name} {value}" for name, value in conditions.items()), flush=True)
    records = []
    cases = matmul.grid(args.layout, args.block, args.dtype, args.batch, args.heads, args.seq_len, args.head_dim)
    for case in cases:
        try:
            live, rows = matmul.run_case(case, device, args.repeats, args.seconds)
        except (ValueError, ArithmeticError, RuntimeError) as error:
            print(error, file=sys.stderr)
            return 1
        print("", *matmul.table(case, live, rows), sep="\n", flush=True)
        records += matmul.record(case, live, rows)
    if args.json is not None:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({**conditions, "rows": records}, file, indent=1)
        print(f"\nRows written to {args.json}.")
    return 0


def listed(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """argparse type: comma-separated values of another type."""
    return lambda text: [parse(part) for part in text.split(",")]


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """argparse type: one of some names."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return parse
