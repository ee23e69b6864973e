"""Random calls of every public operation, compared with an independent dense reference in float64.

    python -m tests.fuzz --seconds 600 --seed 7                  random cases until the time is over
    python -m tests.fuzz --device cuda --cases 10000             so many, on a GPU
    python -m tests.fuzz --operation Softmax --seconds 60        of one operation
    python -m tests.fuzz --case 7/1234                           one case again
    python -m tests.fuzz --skew 2e-5 --cases 200                 with a fault that has to be found
    python -m tests.fuzz --device cuda --soak --steps 10000      training steps that must not take more and more memory

The status is 1 where something failed.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings

import torch

from . import attack, soak


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which it ends")
    parser.add_argument("--cases", type=float, default=math.inf, help="after which it ends")
    parser.add_argument("--operation", choices=attack.OPERATIONS, help="this one alone")
    parser.add_argument("--case", metavar="SEED/NUMBER", help="run this case alone, and print what it is")
    parser.add_argument(
        "--skew", type=float, default=0.0, help="multiply the scale that operations are given by 1 + this: a fault"
    )
    parser.add_argument("--soak", action="store_true", help="run training steps and watch memory")
    parser.add_argument("--steps", type=int, default=10000, help="of a soak")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here; leave --device out")
    if not (args.case or args.soak) and math.isinf(min(args.seconds, args.cases)):
        parser.error("give --seconds or --cases, after which it ends")
    return args


def main() -> int:
    args = arguments()
    warnings.filterwarnings("ignore", category=UserWarning)
    if args.case:
        seed, number = map(int, args.case.split("/"))
        return 0 if attack.repeat(seed, number, args.device, args.skew) else 1
    if args.soak:
        return soak.main(args.device, args.steps, args.seed)
    report = attack.run(args.seed, args.device, args.cases, args.seconds, args.operation, args.skew)
    print("\n".join([*report.lines(), f"seed {args.seed}"]))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
