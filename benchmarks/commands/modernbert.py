"""`python -m benchmarks modernbert`: a training step of ModernBERT on packed documents."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.models import modernbert_results
from benchmarks.peers import PACKAGES
from benchmarks.running import Entry, add_labelled_only
from ds_sparse.bench.attention import OURS
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
        "value, and the projections of query and key keep their backward; 'of floor' is its time over that with "
        "attention."
    )
    add_shared(parser, BF16_ON_A_GPU)
    parser.add_argument(
        "--seq-len", type=listed(positive), help="tokens of a row (default: on a CPU 1024, on a GPU 8192)"
    )
    parser.add_argument(
        "--peers",
        type=listed(one_of(modernbert_results.ATTENTIONS)),
        default=list(modernbert_results.ATTENTIONS),
        help=f"{', '.join(modernbert_results.ATTENTIONS)} (default: all)",
    )
    add_labelled_only(parser)


def measure(args: argparse.Namespace, device: torch.device) -> int:
    try:
        from benchmarks.models import bert, modernbert
    except ImportError as error:
        print(f"bench modernbert measures Transformers' ModernBERT. {error}", file=sys.stderr)
        return 1
    seq_lens = args.seq_len or ([8192] if args.device == "cuda" else [1024])
    try:
        for seq_len in seq_lens:
            bert.require_layout(modernbert.STRUCTURE, seq_len)
    except ValueError as error:
        print(f"--seq-len: {error} Give longer rows.", file=sys.stderr)
        return 1

    def results() -> Iterator[tuple[modernbert_results.Result, bool]]:
        for dtype in args.dtype:
            wrong = bert.wrong_ones(args.peers, partial(modernbert.verify, dtype=dtype, device=device))
            for seq_len in seq_lens:
                case = modernbert_results.Case(seq_len, dtype, args.device, not args.labelled_only)
                rows = modernbert.run_case(case, args.peers, wrong, device, args.repeats, args.seconds)
                yield (case, rows), any(row.reason for row in rows if row.attention.startswith(OURS))

    return OPERATION.run(args, device, results(), **versions(PACKAGES), transformers=bert.transformers.__version__)


OPERATION = Entry(
    add,
    measure,
    modernbert_results.Case,
    modernbert_results.Row,
    modernbert_results.report,
    modernbert_results.of_modernbert,
    more=lambda case: {"rows": len(case.lengths)},
)
