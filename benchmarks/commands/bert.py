"""`python -m benchmarks bert`: a training step of BERT, and the longest sequence that fits."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.models import attentions, bert_results, longest_sequence
from benchmarks.models.reasons import NOT_TRIED
from benchmarks.running import Entry, add_labelled_only, probability
from ds_sparse.bench.command import add_shared, listed, one_of
from ds_sparse.bench.registry import BF16_ON_A_GPU
from ds_sparse.tools.arguments import positive


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Masked-language modelling, forward and backward, by Transformers' BERT with up to 32,768 tokens a step, or "
        "one sequence where that is longer; on a CPU a small model and 2,048. Before that each sparse structure is "
        "verified in a model of two layers, 1,024 tokens, without dropout: the gradient of the first layer's query "
        "weight. 'of ceiling' is the time without any attention, whose output is the value, over the time with it; 'of "
        "floor' the same where the projections of query and key keep their backward; 'x dense' the time over that of "
        "sdpa. What takes longer than --seconds for a step is timed once, and not at longer lengths. With --longest "
        "nothing is verified or timed in turns: each attention is tried with longer and longer sequences."
    )
    add_shared(parser, BF16_ON_A_GPU)
    parser.add_argument(
        "--seq-len",
        type=listed(positive),
        help="tokens of a sequence (default: on a CPU 1024, on a GPU 4096,8192,16384,32768)",
    )
    parser.add_argument(
        "--peers",
        type=listed(one_of((*attentions.BERT_ATTENTIONS, *attentions.MODES_IN_BERT))),
        default=list(attentions.BERT_ATTENTIONS),
        help=f"{', '.join(attentions.BERT_ATTENTIONS)} (default: these); modes at their defaults, with blocks of 16 or "
        f"64: {', '.join(attentions.MODES_IN_BERT)}",
    )
    parser.add_argument(
        "--model",
        choices=list(bert_results.MODELS),
        default=bert_results.BASE,
        help="sizes of BERT-base or BERT-large (default: base)",
    )
    parser.add_argument(
        "--dropout", type=probability, default=0.0, help="in attention and everywhere else (default: 0)"
    )
    add_labelled_only(parser)
    parser.add_argument(
        "--whole-step", action="store_true", help="with AdamW, and with the batch copied from the CPU's memory"
    )
    parser.add_argument(
        "--activation-checkpointing",
        action="store_true",
        help="keep the inputs of layers alone, and compute the rest again in backward",
    )
    parser.add_argument(
        "--longest",
        type=positive,
        default=0,
        metavar="SECONDS",
        help="on a GPU, look for the longest sequence that fits instead, for so long for each attention",
    )


def measure(args: argparse.Namespace, device: torch.device) -> int:
    try:
        from benchmarks.models import bert
    except ImportError as error:
        print(f"bench bert measures Transformers' BERT. {error}", file=sys.stderr)
        return 1
    results = measured(args, device)
    if args.longest:
        try:
            longest_sequence.require_gpu(device)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 1
        cases_of_any_length = (case_of(args, dtype, 0, True) for dtype in args.dtype)
        tried = (bert.longest_tries(case, args.peers, args.longest, device) for case in cases_of_any_length)
        results = ((result, False) for results in tried for result in results)
    return OPERATION.run(args, device, results, transformers=bert.transformers.__version__)


def measured(args: argparse.Namespace, device: torch.device) -> Iterator[tuple[bert_results.Result, bool]]:
    from benchmarks.models import bert

    for dtype in args.dtype:
        ours = [name for name in args.peers if name in attentions.STRUCTURES_IN_BERT]
        wrong = bert.wrong_ones(ours, partial(bert.verify, dtype=dtype, device=device))
        grid = [case_of(args, dtype, seq_len) for seq_len in lengths_of(args)]
        for case, rows in bert.results(grid, args.peers, wrong, device, args.repeats, args.seconds):
            yield (case, rows), any(map(is_failure, rows))


def lengths_of(args: argparse.Namespace) -> list[int]:
    """Lengths to measure, ascending."""
    return sorted(args.seq_len or ([4096, 8192, 16384, 32768] if args.device == "cuda" else [1024]))


def case_of(args: argparse.Namespace, dtype: str, seq_len: int, is_try: bool = False) -> bert_results.Case:
    settings = args.model, args.whole_step, args.activation_checkpointing, is_try
    return bert_results.Case(seq_len, args.dropout, dtype, args.device, not args.labelled_only, *settings)


def is_failure(row: bert_results.Row) -> bool:
    """True if one of ours was wrong or failed."""
    ours = row.attention in attentions.STRUCTURES_IN_BERT
    return ours and bool(row.reason) and not row.reason.startswith(NOT_TRIED)


OPERATION = Entry(
    add,
    measure,
    bert_results.Case,
    bert_results.Row,
    bert_results.report,
    bert_results.of_bert,
    more=lambda case: {"batch": case.batch},
)
