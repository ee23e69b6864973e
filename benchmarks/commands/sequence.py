"""`python -m benchmarks sequence`: a training step of BERT on several ranks."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from itertools import product

import torch

from benchmarks.commands import bert as of_bert
from benchmarks.models import results
from ds_sparse.bench import cases
from ds_sparse.bench.command import add_shared, listed, one_of
from ds_sparse.bench.registry import BF16_ON_A_GPU
from ds_sparse.tools.arguments import positive
from ds_sparse.tools.terminal import wrong
from ds_sparse.tools.torch_settings import cpu_threads


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "A training step of Transformers' BERT-base through ds_sparse.initialize and DeepSpeed: forward, backward and "
        "AdamW, one sequence or as many as --tokens says, logits of labelled tokens alone; on a CPU a small model. On "
        "one rank, then on several of this machine, which have as many each, or share them. Before that loss and "
        "gradient norm of the first step are held to those of the one rank. 'efficiency' is tokens a second over those "
        "of as many ranks as fast as the one. 'time' says where a step's time goes on rank 0; on a GPU communication "
        "counts where nothing else runs. 'GiB' says what memory is for on rank 0: at rest, kept for backward, and what "
        "each part takes besides."
    )
    add_shared(parser, BF16_ON_A_GPU, {"cpu": 10, "cuda": 10})
    parser.add_argument(
        "--seq-len",
        type=listed(positive),
        help="tokens of a sequence (default: on a CPU 512,1024, on a GPU 16384,65536,262144)",
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        default=0,
        help="of a pass: as many sequences as fit in, or one where that is longer (default: one sequence)",
    )
    parser.add_argument(
        "--ranks",
        type=listed(positive),
        help="numbers of ranks; one is always measured (default: on a CPU 2, on a GPU as many as there are)",
    )
    parser.add_argument(
        "--parallel",
        type=listed(one_of((results.DATA, results.SEQUENCE))),
        default=[results.DATA, results.SEQUENCE],
        help="what several ranks do: data (sequences each), sequence (they share them) (default: both)",
    )
    parser.add_argument(
        "--structure",
        type=one_of(cases.IN_BERT),
        default="bigbird-64",
        help=f"{', '.join(cases.IN_BERT)} (default: bigbird-64)",
    )
    parser.add_argument("--zero-stage", type=int, choices=range(1, 4), default=2, help="(default: 2)")
    parser.add_argument(
        "--activations",
        choices=[results.KEPT, results.CHECKPOINTED, results.OFFLOADED],
        default=results.KEPT,
        help="kept until backward; checkpointed: inputs of layers alone; offloaded: those on the CPU (default: kept)",
    )
    parser.add_argument(
        "--tiles",
        type=positive,
        default=1,
        help="parts of a rank's tokens that MLPs (DeepSpeed's TiledMLP) and the loss take in turns (default: 1)",
    )
    parser.add_argument(
        "--micro-batches",
        type=positive,
        default=1,
        help="passes of a step, whose gradients are added up before the optimizer's (default: 1)",
    )
    parser.add_argument(
        "--longest",
        type=positive,
        default=0,
        metavar="SECONDS",
        help="on a GPU, also look for the longest sequence that fits, for so long on each number of ranks",
    )


def measure(args: argparse.Namespace, device: torch.device) -> int:
    try:
        from benchmarks.models import sequence, sequence_rank, steps
    except ImportError as error:
        print(f"bench sequence measures Transformers' BERT under DeepSpeed. {error}", file=sys.stderr)
        return 1
    if args.longest and args.tokens:
        print("--longest looks for one sequence, and --tokens wants several; leave one of them out.", file=sys.stderr)
        return 2
    if args.longest and args.device == "cpu":
        print(results.ON_CPU, file=sys.stderr)
        return 2
    seq_lens = args.seq_len or ([16384, 65536, 262144] if args.device == "cuda" else [512, 1024])
    ranks = args.ranks or [torch.cuda.device_count() if args.device == "cuda" else 2]
    try:
        sequence.require_gpus(max(ranks), device)
        if results.SEQUENCE in args.parallel:
            sequence_rank.require_heads(max(ranks), args.device)
        for seq_len in seq_lens:
            steps.require_layout(args.structure, seq_len)
    except ValueError as error:
        return wrong(error)
    if "fp16" in args.dtype:
        print("--dtype fp16: DeepSpeed leaves steps out while it looks for a loss scale; give bf16.", file=sys.stderr)
        return 2
    settings = {
        name: getattr(args, name)
        for name in ("structure", "zero_stage", "activations", "tiles", "micro_batches", "tokens")
    }
    grid = [
        results.Case(seq_len, dtype, args.device, **settings)
        for dtype, seq_len in product(args.dtype, sorted(seq_lens))
    ]
    with cpu_threads(max(1, torch.get_num_threads() // max(ranks))):
        found = sequence.results(grid, ranks, args.parallel, args.repeats, args.seconds, args.longest, device)
        told = (((case, rows), any(sequence.is_failure(case, row) for row in rows)) for case, rows in found)
        return OPERATION.run(args, device, told, **sequence_rank.versions())


OPERATION = replace(of_bert.OPERATION, add=add, measure=measure, more=lambda case: {})
