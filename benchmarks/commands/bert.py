"""`python -m benchmarks bert`: a training step of BERT, and the longest sequence that fits."""

from __future__ import annotations

import argparse
import sys
from itertools import chain

import torch

from benchmarks.models import attentions, results
from benchmarks.running import NOT_TRIED, Entry, probability
from ds_sparse.bench.command import add_shared, listed, one_of
from ds_sparse.bench.registry import BF16_ON_A_GPU
from ds_sparse.tools.arguments import positive


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Masked-language modelling, forward and backward, by Transformers' BERT with up to 32,768 tokens a step, or "
        "one sequence where that is longer; on a CPU a small model and 2,048. Before that each sparse structure is "
        "verified in a model of two layers, 1,024 tokens, without dropout: the gradient of the first layer's query "
        "weight. 'of no attention' is the time without any, whose output is the value, over the time with it; 'of the "
        "floor' the same where the projections of query and key keep their backward; 'times sdpa' the time over its. "
        "What takes longer than --seconds for a step is timed once, and not at longer lengths. With --longest "
        "nothing is verified or timed in turns: each attention is tried with longer and longer sequences. With "
        "--packed the losses of 20 steps in a CUDA graph are held to those of eager steps, to a thousandth or three "
        "times what eager steps repeated differ by, and steps of up to 16,384 tokens are timed on the clock."
    )
    add_shared(parser, BF16_ON_A_GPU)
    parser.add_argument(
        "--seq-len",
        type=listed(positive),
        help="tokens of a sequence (default: on a CPU 1024, on a GPU 4096,8192,16384,32768)",
    )
    parser.add_argument(
        "--peers",
        type=listed(one_of((*attentions.BERT_ATTENTIONS, *attentions.MODES_IN_BERT, *attentions.GRAPH_IN_BERT))),
        help=f"{', '.join(attentions.BERT_ATTENTIONS)} (default: these); modes at their defaults, with blocks of 16 or "
        f"64: {', '.join(attentions.MODES_IN_BERT)}; with --packed {', '.join(attentions.PACKED_ATTENTIONS)} (default: "
        "these)",
    )
    parser.add_argument(
        "--model",
        choices=[results.BASE, results.LARGE],
        default=results.BASE,
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
        "--packed",
        action="store_true",
        help="whole steps on packed documents, whose borders are others in each step: structures eager, and as graph-* "
        "captured in a CUDA graph",
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


def add_labelled_only(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--labelled-only",
        action="store_true",
        help="logits of tokens with a label alone, as bing_bert computes them (default: of all, as Transformers does)",
    )


def measure(args: argparse.Namespace, device: torch.device) -> int:
    try:
        from benchmarks.models import bert, packed_bert, steps
    except ImportError as error:
        print(f"bench bert measures Transformers' BERT. {error}", file=sys.stderr)
        return 1
    if args.longest and args.device == "cpu":
        print(results.ON_CPU, file=sys.stderr)
        return 2
    if wrong := misplaced(args):
        print(wrong, file=sys.stderr)
        return 2
    names = args.peers or (attentions.PACKED_ATTENTIONS if args.packed else attentions.BERT_ATTENTIONS)
    on_gpu = [4096] if args.packed else [4096, 8192, 16384, 32768]
    lengths = sorted(args.seq_len or (on_gpu if args.device == "cuda" else [1024]))
    cases = [
        results.Case(
            seq_len, dtype, args.device, args.dropout, not args.labelled_only, args.model,
            args.whole_step or args.packed, args.activation_checkpointing, bool(args.longest),
            tokens=results.PACKED_TOKENS[args.device] if args.packed else 0, packed=args.packed,
        )
        for dtype in args.dtype
        for seq_len in (lengths if not args.longest else [0])
    ]  # fmt: skip
    family = packed_bert if args.packed else bert
    found = steps.results(family, cases, names, device, args.repeats, args.seconds)
    if args.longest:
        searches = (steps.longest(bert, case, names, args.longest, device) for case in cases)
        found = chain.from_iterable(searches)
    told = ((one, not args.longest and any(map(is_failure, one[1]))) for one in found)
    return OPERATION.run(args, device, told, transformers=bert.transformers.__version__)


def misplaced(args: argparse.Namespace) -> str:
    """Says which option does not go with --packed, or only with it; empty if all do."""
    if args.packed and args.longest:
        return "--packed --longest: the longest sequence is looked for without documents; leave one of them out."
    for name in args.peers or ():
        if args.packed and name not in attentions.PACKED_ATTENTIONS:
            return f"--packed --peers {name}: it is not one of {', '.join(attentions.PACKED_ATTENTIONS)}; leave it out."
        if not args.packed and name in attentions.GRAPH_IN_BERT:
            return f"--peers {name}: steps in CUDA graphs are those of --packed; add it."
    return ""


def is_failure(row: results.Row) -> bool:
    """True if one of ours was wrong or failed."""
    ours = (*attentions.STRUCTURES_IN_BERT, *attentions.GRAPH_IN_BERT)
    is_ours = row.attention in ours or row.attention.startswith(attentions.OURS)
    return is_ours and bool(row.reason) and not row.reason.startswith(NOT_TRIED)


OPERATION = Entry(
    add,
    measure,
    results.Case,
    results.Row,
    results.report,
    results.tables_of,
    more=lambda case: {"batch": case.batch},
)
