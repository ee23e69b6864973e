"""`python -m benchmarks train`: the quality that models reach."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.running import NOT_TRIED, Entry, natural, release_memory
from benchmarks.train import results as train_results
from benchmarks.train.results import (
    BASE_ARM,
    CONTINUED,
    DOCUMENT_TOKENS,
    GENOMIC,
    LEARNING_RATES,
    MODELS,
    NARROW,
    SMALL,
    TINY,
    Case,
    Result,
    Row,
    decision,
)
from benchmarks.train.trainer import Folder, Training, Waits, load
from ds_sparse.bench.command import add_device_and_json, listed
from ds_sparse.bench.reasons import in_short
from ds_sparse.bench.runs import show
from ds_sparse.tools.arguments import UsageError, positive, positive_number
from ds_sparse.tools.terminal import wrong

OWN_MODEL = {"recall": NARROW}
MODEL, TOKENS_PER_STEP = {"cpu": TINY, "cuda": SMALL}, {"cpu": 4096, "cuda": 32768}

QUICK_TOKENS_PER_STEP, QUICK_DOCUMENT_TOKENS, QUICK_STEPS = 2048, 512, 10

BASE_TIMES, QUICK_BASE_TIMES = 5.0, 2.0

TAKEN = f"{NOT_TRIED}another process trains it; give the command again for its row"
STOPPED = f"{NOT_TRIED}stopped; give the command again to go on"


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains each arm, a model with an attention and a length, with each seed: all see the same tokens in the same "
        "order, but for --experiment documents, where a step has as many files as fit into its tokens, and continued, "
        "where its sequences are from anywhere. "
        "Reports the held-out loss on the way and at the end, and what else the experiment measures. Minutes "
        "and seconds are those of training steps alone: before the first a few steps are tried, which compiles what "
        "is compiled, and evaluation is not counted. What is finished is not trained again when the command is given "
        "again. Processes that are given the same command, one a GPU, share its jobs."
    )
    parser.add_argument("--experiment", choices=list(DOCUMENT_TOKENS), default="quality", help="(default: quality)")
    parser.add_argument("--arms", type=lambda text: text.split(","), help="such as dense-512,bigbird-4096")
    parser.add_argument("--seeds", type=listed(natural), default=[0], help="(default: 0)")
    parser.add_argument(
        "--minutes",
        type=positive_number,
        default=0.0,
        help="of training for each arm and seed: as many steps as fit, at the speed of some that are tried before",
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        default=0,
        help="of training for each arm and seed; with --minutes too each is trained twice, once for each budget, at "
        "whose end the learning rate has decayed to nothing",
    )
    parser.add_argument(
        "--model", choices=list(MODELS), help="its size (default: tiny; on a GPU small; of recall narrow)"
    )
    rates = ", ".join(f"{name} {rate:g}" for name, rate in LEARNING_RATES.items())
    parser.add_argument("--learning-rate", type=positive_number, help=f"at its highest (default: {rates})")
    parser.add_argument(
        "--tokens-per-step", type=positive, help="(default: 4096, on a GPU 32768, or one document; quick: 2048)"
    )
    parser.add_argument(
        "--document-tokens",
        type=positive,
        help="of the pieces of documents that are trained on, and of the longest sequence (default: "
        f"{', '.join(f'{name} {tokens}' for name, tokens in DOCUMENT_TOKENS.items())}; quick: 512)",
    )
    parser.add_argument(
        "--dtype", choices=["fp32", "bf16"], help="of products; weights are fp32 (default: fp32; on a GPU bf16)"
    )
    parser.add_argument(
        "--genomes",
        default="",
        metavar="FOLDER",
        help=f"of {' and '.join(GENOMIC)}: FASTA files and GFF3 files of the same names, also as .gz and .xz "
        "(default: those of Debian's packages maffilter-examples and smalt-examples)",
    )
    parser.add_argument(
        "--base",
        type=positive_number,
        metavar="TIMES",
        help="of continued: how many times the budget of an arm the base is trained, once a seed and budget, that all "
        f"arms go on from (default: {BASE_TIMES:g}; quick: {QUICK_BASE_TIMES:g})",
    )
    parser.add_argument("--folder", type=Path, help="for data and rows; --quick does without")
    parser.add_argument(
        "--stop-after",
        type=natural,
        metavar="SECONDS",
        help="begin no job after so long; 0 prints what is finished",
    )
    parser.add_argument("--quick", action="store_true", help="everything small, which takes some seconds on a CPU")
    parser.set_defaults(by_device={"dtype": {"cpu": "fp32", "cuda": "bf16"}})
    add_device_and_json(parser)


def measure(args: argparse.Namespace, device: torch.device) -> int:
    with ExitStack() as stack:
        try:
            cases, experiment = cases_of(args)
            if args.folder is None and not args.quick:
                raise UsageError("--folder: name a folder for data and rows, from which a run can go on.")
            if args.folder is None and args.stop_after is not None:
                raise UsageError("--stop-after: the rest is trained later; name a folder for rows with --folder.")
            folder = Folder(args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory())), cases[0])
            data = folder.data(partial(experiment.prepare, cases[0]))
        except (ImportError, ValueError) as error:
            return wrong(error)
        if decides := decision(cases[0]):
            show(decides)
        deadline = float("inf") if args.stop_after is None else time.perf_counter() + args.stop_after

        def results() -> Iterator[tuple[Result, bool]]:
            for case in cases:
                row = row_of(case, experiment, folder, data, device, deadline)
                yield (case, [row]), bool(row.reason) and not row.reason.startswith(NOT_TRIED)

        return OPERATION.run(args, device, results())


def row_of(case: Case, experiment: Any, folder: Folder, data: Path, device: torch.device, deadline: float) -> Row:
    """The row of a job, which is trained unless it is finished."""
    with folder.claimed(case) as mine:
        if row := folder.row(case):
            return row
        if not mine:
            return Row(reason=TAKEN)
        if time.perf_counter() >= deadline:
            return Row(reason=STOPPED)
        try:
            row = Training(case, device).run(experiment.phases(case, data, device))
        except Waits as error:
            return Row(reason=f"{NOT_TRIED}{error}")
        except (ArithmeticError, RuntimeError) as error:
            return Row(reason=in_short(error))
        finally:
            release_memory(device)
        folder.finish(case, row)
        return row


def cases_of(args: argparse.Namespace) -> tuple[list[Case], Any]:
    """The jobs, and their experiment. All arms with the first seed come first: what is cut off then has something to
    compare.

    Raises:
        UsageError: a step has no whole number of documents, genomes or a base are given for none, an arm cannot be
            trained, or nothing says how long.
        ValueError: what the data is made of is not there.
    """
    if args.genomes and args.experiment not in GENOMIC:
        raise UsageError(
            f"--genomes: {args.experiment} reads none; leave it out, or give --experiment {' or '.join(GENOMIC)}."
        )
    if args.base and args.experiment != CONTINUED:
        raise UsageError(f"--base: {args.experiment} has none; leave it out, or give --experiment {CONTINUED}.")
    document = args.document_tokens or (QUICK_DOCUMENT_TOKENS if args.quick else DOCUMENT_TOKENS[args.experiment])
    usual = QUICK_TOKENS_PER_STEP if args.quick else TOKENS_PER_STEP[args.device]
    per_step = args.tokens_per_step or max(usual, document)
    if per_step % document:
        raise UsageError(
            f"--tokens-per-step {per_step}: is no multiple of the {document} tokens of a document's piece; give one."
        )
    model = args.model or (TINY if args.quick else OWN_MODEL.get(args.experiment, MODEL[args.device]))
    rate = args.learning_rate or LEARNING_RATES[model]
    times = args.base or (QUICK_BASE_TIMES if args.quick else BASE_TIMES) if args.experiment == CONTINUED else 0.0
    case = Case(
        args.experiment, model, args.dtype, args.device, args.quick, per_step, rate, document, args.genomes, times
    )
    budgets = [{"tokens": args.tokens}] if args.tokens else []
    budgets += [{"minutes": args.minutes}] if args.minutes else []
    if not budgets and not args.quick:
        raise UsageError("give --tokens or --minutes: how much each arm trains.")
    budgets = budgets or [{"tokens": QUICK_STEPS * per_step}]
    experiment = load(args.experiment)
    usual_arms = experiment.default_arms(case)
    # What others go on from comes first.
    bases = [arm for arm in usual_arms if arm.startswith(BASE_ARM)]
    arms = dict.fromkeys([*bases, *(args.arms or usual_arms)])
    jobs = product(dict.fromkeys(args.seeds), budgets, arms)
    cases = [replace(case, arm=arm, seed=seed, **budget) for seed, budget, arm in jobs]
    for one in cases:
        experiment.require(one)
    return cases, experiment


OPERATION = Entry(add, measure, Case, Row, train_results.report, train_results.tables_of)
