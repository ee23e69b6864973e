"""`ds_sparse bench bert`: a training step of BERT."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch

from ...arguments import positive
from .. import bert_results, cases, peers
from .options import BF16_ON_A_GPU, add_labelled_only, add_shared, listed, one_of, probability
from .running import begin, keep, show_report, status_of


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Forward and backward of masked-language modelling, without an optimizer, by Transformers' BERT-base with up "
        "to 32,768 tokens a step, or one sequence where that is longer; on a CPU a small model and 2,048. Before that "
        "each sparse structure is verified in a model of two layers, 1,024 tokens, without dropout: the gradient of "
        "the first layer's query weight. 'of ceiling' is the time without any attention, whose output is the value, "
        "over the time with it."
    )
    add_shared(parser, BF16_ON_A_GPU)
    parser.add_argument(
        "--seq-len",
        type=listed(positive),
        help="tokens of a sequence (default: on a CPU 1024, on a GPU 4096,8192,16384,32768)",
    )
    parser.add_argument(
        "--peers",
        type=listed(one_of(cases.BERT_ATTENTIONS)),
        default=list(cases.BERT_ATTENTIONS),
        help=f"{', '.join(cases.BERT_ATTENTIONS)} (default: all)",
    )
    parser.add_argument(
        "--dropout", type=probability, default=0.0, help="in attention and everywhere else (default: 0)"
    )
    add_labelled_only(parser)


def measure(args: argparse.Namespace, device: torch.device) -> int:
    try:
        from .. import bert
    except ImportError as error:
        print(f"bench bert measures Transformers' BERT. {error}", file=sys.stderr)
        return 1
    seq_lens = args.seq_len or ([4096, 8192, 16384, 32768] if args.device == "cuda" else [1024])
    try:
        bert.require_layouts(args.peers, seq_lens)
    except ValueError as error:
        print(f"--seq-len: {error}", file=sys.stderr)
        return 1
    run = begin(args, device, **bert.versions())
    failed = False

    def results() -> Iterator[bert_results.Result]:
        nonlocal failed
        for dtype in args.dtype:
            wrong = bert.wrong_ones(args.peers, dtype, device)
            for seq_len in seq_lens:
                case = bert_results.Case(seq_len, args.dropout, dtype, args.device, not args.labelled_only)
                rows = bert.run_case(case, args.peers, wrong, device, args.repeats, args.seconds)
                failed |= any(row.reason for row in rows if row.attention in cases.IN_BERT)
                yield keep(args, run, (case, rows))

    show_report(args, results())
    return status_of(peers.OURS, failed)
