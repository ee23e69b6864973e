"""Pretrains as bing_bert did, from short sequences to long ones: each phase begins with the weights of the one before.

    phases.py --phase 128:900 --phase 512:100 --phase 4096:100:sparse --output-dir runs/phases [options]

A phase is TOKENS:STEPS, or TOKENS:STEPS:sparse, which has the attention of the JSON's block; the others are dense. The
options are those of deepspeed_train.py, but for the flag of sparse attention, and for ZeRO 3. Given again, the command
goes on where it was cut off.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import ds_sparse

import deepspeed_train
from report import run_folder
from training_run import DENSE, SPARSE

CONFIG = deepspeed_train.HERE.parents[1] / "configs" / "deepspeed_bsz64k_lamb_config_seq128.json"


class Phase(NamedTuple):
    tokens: int
    steps: int
    attention: str = DENSE


def phase(text: str) -> Phase:
    """argparse type."""
    tokens, steps, attention = [*text.split(":"), DENSE][:3] if text.count(":") in (1, 2) else ("", "", "")
    if not (tokens.isdecimal() and steps.isdecimal() and int(tokens) and int(steps) and attention in (DENSE, SPARSE)):
        raise argparse.ArgumentTypeError(f"{text!r} is not TOKENS:STEPS or TOKENS:STEPS:{SPARSE}")
    return Phase(int(tokens), int(steps), attention)


DEFAULT = [Phase(128, 900), Phase(512, 100), Phase(4096, 100, SPARSE)]


def main() -> int:
    parser = argparse.ArgumentParser("phases.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--phase", type=phase, action="append", help="one of the phases, in their order")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/phases"), help="a folder of runs for each phase")
    args, others = parser.parse_known_args()
    shared = ["deepspeed_train.py", "--deepspeed_config", str(CONFIG), "--max-minutes", "inf", *others]
    sys.argv = shared
    options = deepspeed_train.parse_arguments()
    refuse(options)
    before: list[str] = []
    for number, of in enumerate(args.phase or DEFAULT, 1):
        runs = args.output_dir / f"{number}-{of.tokens}-{of.attention}"
        sys.argv = [
            *shared, "--max-seq-length", str(of.tokens), "--max-steps", str(of.steps), "--output-dir", str(runs),
            "--resume-or-start", *(["--deepspeed_sparse_attention"] if of.attention == SPARSE else []), *before,
        ]  # fmt: skip
        if status := deepspeed_train.main():
            return status
        if not options.dry_run:
            before = ["--weights-from", str(run_folder(runs, resume=True) / of.attention)]
    return 0


def refuse(options: argparse.Namespace) -> None:
    """Raises ValueError for what the second phase would end in."""
    if options.deepspeed_sparse_attention:
        raise ValueError(
            f"--deepspeed_sparse_attention: each phase says whether it is sparse, as in 4096:100:{SPARSE}; leave it "
            "out."
        )
    config, _ = ds_sparse.load_config(options.deepspeed_config)
    if dict(config.get("zero_optimization") or {}).get("stage") == 3:
        raise ValueError(
            f"{options.deepspeed_config}: has ZeRO 3, which deals weights to ranks, and a phase takes them whole from "
            "the one before; give stage 2."
        )


if __name__ == "__main__":
    sys.exit(deepspeed_train.exit_status(main))
