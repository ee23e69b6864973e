"""`python -m benchmarks modernbert`: a training step of ModernBERT on packed documents."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import torch

from benchmarks.commands import bert as of_bert
from benchmarks.models import attentions, results
from benchmarks.peers import PACKAGES
from ds_sparse.bench.command import add_shared, listed, one_of
from ds_sparse.bench.machine import versions
from ds_sparse.bench.registry import BF16_ON_A_GPU
from ds_sparse.tools.arguments import positive


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "A training step of Transformers' ModernBERT-base on packed documents, whose lengths are drawn around a median "
        "of 400: masked-language modelling, forward, backward and AdamW, up to 32,768 tokens a step, or one row where "
        "that is longer; on a CPU a small model and 2,048. Global layers are BigBird's with blocks of 64, local ones "
        "have the model's window; peers are dense in each document's global layers. Before that each is verified in a "
        "model of four layers: the gradient of the first layer's query weight. The floor's attention returns the "
        "value, and the projections of query and key keep their backward; 'of the floor' is its time over that "
        "with attention."
    )
    add_shared(parser, BF16_ON_A_GPU)
    parser.add_argument(
        "--seq-len", type=listed(positive), help="tokens of a row (default: on a CPU 1024, on a GPU 8192)"
    )
    parser.add_argument(
        "--peers",
        type=listed(one_of(attentions.MODERNBERT_ATTENTIONS)),
        default=list(attentions.MODERNBERT_ATTENTIONS),
        help=f"{', '.join(attentions.MODERNBERT_ATTENTIONS)} (default: all)",
    )
    of_bert.add_labelled_only(parser)


def measure(args: argparse.Namespace, device: torch.device) -> int:
    try:
        from benchmarks.models import modernbert, steps
    except ImportError as error:
        print(f"bench modernbert measures Transformers' ModernBERT. {error}", file=sys.stderr)
        return 1
    lengths = sorted(args.seq_len or ([8192] if args.device == "cuda" else [1024]))
    try:
        for seq_len in lengths:
            steps.require_layout(modernbert.STRUCTURE, seq_len)
    except ValueError as error:
        print(f"--seq-len: {error} Give longer rows.", file=sys.stderr)
        return 2
    cases = [
        results.Case(seq_len, dtype, args.device, predicts_all=not args.labelled_only, whole_step=True)
        for dtype in args.dtype
        for seq_len in lengths
    ]
    found = steps.results(modernbert, cases, args.peers, device, args.repeats, args.seconds)
    told = ((one, any(map(of_bert.is_failure, one[1]))) for one in found)
    return OPERATION.run(args, device, told, **versions(PACKAGES), transformers=modernbert.transformers.__version__)


OPERATION = replace(of_bert.OPERATION, add=add, measure=measure, more=lambda case: {"rows": case.batch})
