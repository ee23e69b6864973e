"""The command lines of `ds_sparse bench`: options, and what is run and printed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..arguments import positive
from ..block_sizes import BLOCK_SIZES
from . import (
    attention,
    bert_results,
    cases,
    floors,
    layouts,
    machine,
    matmul,
    modernbert_results,
    packed,
    packed_cases,
    packed_peers,
    peers,
    sequence_results,
    tokens,
    window,
)
from .runs import Run, show, without_json
from .torch_settings import cpu_threads

Case = TypeVar("Case")
Named = TypeVar("Named", cases.Case, packed_cases.Case)

RESULTS: dict[str, Any] = {
    "matmul": matmul,
    "attention": attention,
    "window": window,
    "packed": packed,
    "tokens": tokens,
    "bert": bert_results,
    "modernbert": modernbert_results,
    "sequence": sequence_results,
}
"""Operation to the module that makes rows of its results (`record`), results of rows (`restore`), and lines to print
(`report`)."""

BF16_ON_A_GPU = {"cpu": ["fp32"], "cuda": ["bf16"]}

NO_FLOOR = (
    "A CPU has no floor: dense results of hundreds of megabytes get new memory at every call, which takes longer than "
    "computing them, so that density times the dense time bounds nothing."
)


def measure(operation: str, arguments: list[str]) -> int:
    """Runs `ds_sparse bench OPERATION ARGUMENTS` and returns its exit status."""
    args = parse(operation, arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch finds no CUDA GPU; leave it out to measure the CPU.", file=sys.stderr)
        return 1
    if args.json is not None and (wrong := unwritable(args.json)):
        print(f"--json {args.json}: {wrong}", file=sys.stderr)
        return 1
    args.dtype = args.dtype or args.dtype_of[args.device]
    return args.measure(args, torch.device(args.device))


def parse(
    operation: str, arguments: list[str], parser_type: type[argparse.ArgumentParser] = argparse.ArgumentParser
) -> argparse.Namespace:
    """The options of an operation; with it as `operation`, and as `arguments` those that say what is measured."""
    parser = parser_type(prog=f"ds_sparse bench {operation}")
    add = {
        "matmul": add_matmul,
        "attention": add_attention,
        "window": add_window,
        "packed": add_packed,
        "tokens": add_tokens,
        "bert": add_bert,
        "modernbert": add_modernbert,
        "sequence": add_sequence,
    }
    add[operation](parser)
    parser.set_defaults(operation=operation, arguments=without_json(arguments))
    return parser.parse_args(arguments)


def show_report(args: argparse.Namespace, results: Iterable[Any]) -> None:
    """Prints an operation's results, as they come."""
    options: dict[str, Any] = {}
    if args.operation == "attention":
        options = {"break_even_with": peers.DENSE[args.device] if args.break_even else "", "grows": args.growth}
    for lines in RESULTS[args.operation].report(results, **options):
        show(*lines)


def unwritable(path: str) -> str:
    """Why no file can be written there; empty if one can."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        return f"there is no folder {Path(path).parent}; make it first."
    if Path(path).is_dir():
        return f"is a folder; name a file to write, such as {Path(path) / 'rows.json'}."
    if not os.access(path if Path(path).exists() else folder, os.W_OK):
        return "cannot be written: permission denied."
    return ""


def add_shared(parser: argparse.ArgumentParser, dtype_of: dict[str, list[str]], seconds: int | None = 60) -> None:
    """The options that all operations have; `dtype_of` are the dtypes that a device measures by itself."""
    parser.set_defaults(dtype_of=dtype_of)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: cpu)")
    parser.add_argument(
        "--dtype",
        type=listed(one_of(machine.DTYPES)),
        help=f"{', '.join(machine.DTYPES)} (default: {by_device(dtype_of)})",
    )
    parser.add_argument("--repeats", type=positive, default=20, help="rounds; times are their medians (default: 20)")
    if seconds is not None:
        help = f"no new round of a case after this long (default: {seconds})"
        parser.add_argument("--seconds", type=positive, default=seconds, help=help)
    parser.add_argument("--json", metavar="OUT", help="write the rows to this file")


def add_sizes(parser: argparse.ArgumentParser, seq_len: str, heads: str) -> None:
    """Sizes that are varied: each option takes a list."""
    lists = {
        "--seq-len": (seq_len, "tokens"),
        "--heads": (heads, "of each sequence"),
        "--head-dim": ("64", "numbers in a head's vector"),
        "--batch": ("1", "sequences"),
    }
    for option, (default, help) in lists.items():
        type = listed(positive)
        parser.add_argument(option, type=type, default=type(default), help=f"{help} (default: {default})")


def add_cases(parser: argparse.ArgumentParser, grid: Iterable[Any], such_as: str) -> None:
    """Which cases of a grid, by name."""
    parser.add_argument(
        "--cases",
        metavar="NAMES",
        type=lambda text: text.split(","),
        default=["*"],
        help=f"patterns, such as {such_as}: {', '.join(case.name for case in grid)} (default: all)",
    )


def add_labelled_only(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--labelled-only",
        action="store_true",
        help="logits of tokens with a label alone, as bing_bert computes them (default: of all, as Transformers does)",
    )


def add_matmul(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Verifies the operations against float64, then times them in turns beside dense PyTorch and, on a GPU, "
        "torch.sparse's block-sparse operations. 'x dense' is the ratio to the dense counterpart. 'of floor', on a "
        "GPU, is the share of what perfect sparsity allows: the largest of the bytes of live blocks and operands at "
        "the rate of a copy, of FLOPs at that of a matrix product, and of the bytes from L2 that tiles of 128 rows ask "
        "for at that of reads from L2, all measured here, with the name of the one that binds. "
        f"{NO_FLOOR} 'break-even' is the density from which on dense would be faster. A peer that does not take a case "
        "is named with the reason."
    )

    def add(option: str, parse: Callable[[str], Any], help: str) -> None:
        """With one default for each device."""
        name = option.removeprefix("--").replace("-", "_")
        default = by_device({device: matmul.DEFAULTS[device][name] for device in matmul.DEFAULTS})
        parser.add_argument(option, type=parse, help=f"{help} (default: {default})")

    add_shared(parser, {device: defaults["dtype"] for device, defaults in matmul.DEFAULTS.items()}, seconds=None)
    add("--seconds", positive, "no new round of a case after this long")
    add("--operations", listed(one_of(matmul.DENSE)), ", ".join(matmul.DENSE))
    add("--layout", listed(one_of(layouts.LAYOUTS)), f"{', '.join(layouts.LAYOUTS)}, with the density in percent")
    add("--block", listed(block), f"block sizes: {', '.join(map(str, BLOCK_SIZES))}")
    add("--seq-len", listed(positive), "tokens")
    add("--head-dim", listed(positive), "numbers in a head's vector")
    add("--heads", listed(positive), "of each sequence")
    add("--batch", listed(positive), "sequences")
    parser.set_defaults(measure=run_matmul)


def add_attention(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Verifies fused attention and its peers against float64, outputs and gradients, then times them in turns. A "
        "peer that does not take a case is named with the reason. TFLOP/s count live blocks alone. 'x floor' is the "
        "ratio to the larger of those FLOPs at the best dense attention's rate and of the bytes of all operands at a "
        "copy's rate, on a CPU to density times the dense time; 'x ours' to ds_sparse's time. On a CPU the cases are "
        "cut to one sequence, four heads and 2,048 tokens, which their names say (-2k), those of --growth to one head."
    )
    add_shared(parser, BF16_ON_A_GPU)
    grids = parser.add_mutually_exclusive_group()
    grids.add_argument(
        "--break-even",
        action="store_true",
        help="random blocks at densities of 10 to 90 %% in place of the table: from which on is dense faster?",
    )
    grids.add_argument(
        "--growth",
        action="store_true",
        help="a window and one global block over 8k to 128k tokens, and one head of 1M, in place of the table",
    )
    add_cases(parser, cases.TABLE, "fixed-*,random-64")
    parser.add_argument(
        "--peers",
        type=listed(one_of(peers.PEERS)),
        help=f"{', '.join(peers.PEERS)} (default: on a CPU {','.join(peers.ON_CPU)}; on a GPU "
        f"{','.join(peers.ON_CUDA)}, for --break-even ds_sparse,cudnn, for --growth ds_sparse; flex-max and "
        "flex-blocks are autotuned for a minute a case)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a first look: at most 3 rounds, and no peer that has to be compiled"
    )
    parser.set_defaults(measure=run_attention)


def add_window(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Verifies the operations of windows against float64, then times them in turns beside dense PyTorch and other "
        "ways to windowed attention. 'x dense' is the ratio to the dense counterpart; 'x floor', on a GPU, that to "
        "what perfect sparsity costs: bytes and FLOPs of the windows at the rates of a copy and of a matrix product "
        f"measured here. {NO_FLOOR}"
    )
    add_shared(parser, {"cpu": ["fp32", "bf16"], "cuda": ["fp32", "bf16"]})
    add_sizes(parser, seq_len="1024,4096", heads="4")
    parser.add_argument(
        "--window", type=listed(positive), default=[64, 256], help="tokens seen on each side (default: 64,256)"
    )
    parser.add_argument(
        "--peers",
        type=listed(one_of(window.PEERS)),
        default=list(window.PEERS),
        help=f"{', '.join(window.PEERS)}; flex is compiled for each case (default: all)",
    )
    parser.set_defaults(measure=run_window)


def add_packed(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Attention over documents packed in one row: ours, beside ours on a plain batch of sequences ('unpacked'), on "
        "the same documents padded to the longest, and beside its peers. Outputs and gradients are verified against "
        "float64, then all are timed in turns. 'of unpacked' is the live scores computed a second over those of the "
        "plain batch; 'of what is left' the same over the part that blocks leave which are not full; 'x ours' the "
        "ratio to ds_sparse's time. Names end with the documents' length; 'corpus' draws lengths around a median of "
        "400, up to 8,192. varlen and fa4-varlen are dense in each document where there is no window. A peer that does "
        "not take a case is named with the reason. On a CPU the cases are cut to two heads and 4,096 tokens, which "
        "their names say (-4k)."
    )
    add_shared(parser, BF16_ON_A_GPU)
    add_cases(parser, packed_cases.TABLE, "window-*,bigbird-512")
    parser.add_argument(
        "--peers",
        type=listed(one_of(packed_peers.OTHERS)),
        help=f"{', '.join(packed_peers.OTHERS)}, besides {' and '.join(packed_peers.ALWAYS)} (default: on a CPU "
        f"{','.join(packed_peers.ON_CPU)}; on a GPU {','.join(packed_peers.ON_CUDA)})",
    )
    parser.set_defaults(measure=run_packed)


def add_tokens(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "The steps from dense attention to sparse_attn over token pairs, which all heads share: each is verified "
        "against float64, output and gradients, then all are timed in turns. Says from which sparsity on a step beats "
        "dense attention. A step that does not take a case is named with the reason."
    )
    add_shared(parser, {"cpu": ["fp32"], "cuda": ["fp32"]})
    add_sizes(parser, seq_len="512,1024,2048", heads="1,12")
    parser.add_argument(
        "--sparsity",
        type=listed(percent),
        default=[0.5, 0.75, 0.9, 0.95, 0.99],
        help="percent of the scores that are not computed (default: 50,75,90,95,99)",
    )
    parser.add_argument(
        "--pairs",
        type=listed(one_of(tokens.PATTERNS)),
        default=["random"],
        help=f"{', '.join(tokens.PATTERNS)}: how they lie (default: random)",
    )
    parser.add_argument(
        "--peers",
        type=listed(one_of(tokens.STEPS)),
        default=list(tokens.STEPS),
        help=f"{', '.join(tokens.STEPS)} (default: all)",
    )
    parser.add_argument(
        "--profile", type=positive, default=0, metavar="N", help="also name the N operators that take a step's time"
    )
    parser.set_defaults(measure=run_tokens)


def add_bert(parser: argparse.ArgumentParser) -> None:
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
    parser.set_defaults(measure=run_bert)


def add_modernbert(parser: argparse.ArgumentParser) -> None:
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
    parser.set_defaults(measure=run_modernbert)


def add_sequence(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "A training step of Transformers' BERT-base through ds_sparse.initialize and DeepSpeed: forward, backward and "
        "AdamW, one sequence, logits of labelled tokens alone; on a CPU a small model. On one rank, then on several "
        "of this machine, which have a sequence each, or share one. Before that loss and gradient norm of the first "
        "step are held to those of the one rank. 'efficiency' is tokens a second over those of as many ranks as fast "
        "as the one. 'time' says where a step's time goes on rank 0; on a GPU communication counts where nothing else "
        "runs. 'GiB' says what memory is for on rank 0: at rest, kept for backward, and what each part takes besides."
    )
    add_shared(parser, BF16_ON_A_GPU, seconds=10)
    parser.add_argument(
        "--seq-len",
        type=listed(positive),
        help="tokens of a sequence (default: on a CPU 512,1024, on a GPU 16384,65536,262144)",
    )
    parser.add_argument(
        "--ranks",
        type=listed(positive),
        help="numbers of ranks; one is always measured (default: on a CPU 2, on a GPU as many as there are)",
    )
    parser.add_argument(
        "--parallel",
        type=listed(one_of(sequence_results.SEVERAL)),
        default=list(sequence_results.SEVERAL),
        help="what several ranks do: data (a sequence each), sequence (they share one) (default: both)",
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
        choices=sequence_results.ACTIVATIONS,
        default=sequence_results.KEPT,
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
    parser.set_defaults(measure=run_sequence)


def run_matmul(args: argparse.Namespace, device: torch.device) -> int:
    for name, default in matmul.DEFAULTS[device.type].items():
        if getattr(args, name) is None:
            setattr(args, name, default)

    def measured(case: matmul.Case) -> matmul.Result:
        return matmul.run_case(case, args.operations, device, args.repeats, args.seconds)

    grid = [
        case
        for heads, batch in product(args.heads, args.batch or [None])
        for case in matmul.grid(args.layout, args.block, args.dtype, args.seq_len, args.head_dim, heads, batch)
    ]
    return run_grid(args, device, grid, measured)


def run_window(args: argparse.Namespace, device: torch.device) -> int:
    def measured(case: window.Case) -> window.Result:
        return case, window.run_case(case, args.peers, device, args.repeats, args.seconds)

    grid = [
        case
        for sizes in product(args.batch, args.heads, args.head_dim)
        for case in window.grid(args.seq_len, args.window, args.dtype, *sizes)
    ]
    return run_grid(args, device, grid, measured)


def run_grid(
    args: argparse.Namespace, device: torch.device, grid: Iterable[Case], measured: Callable[[Case], Any]
) -> int:
    """Prints and writes case after case; one that is wrong or fails is the last."""
    failures: list[Exception] = []

    def results() -> Iterator[Any]:
        try:
            run = begin(args, device, args.dtype)
            for case in grid:
                yield keep(args, run, measured(case))
        except (ValueError, ArithmeticError, RuntimeError) as error:
            print(error, file=sys.stderr)
            failures.append(error)

    show_report(args, results())
    return int(bool(failures))


def run_attention(args: argparse.Namespace, device: torch.device) -> int:
    on_cuda = args.device == "cuda"
    if on_cuda and "fp32" in args.dtype:
        print("--dtype fp32: on a GPU the peers and the floors are those of bf16 and fp16.", file=sys.stderr)
        return 1
    grid = cases.BREAK_EVEN if args.break_even else cases.GROWTH if args.growth else cases.TABLE
    try:
        chosen = choose(grid, args.cases)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if not on_cuda:
        small = [case.small(heads=1, seq_len=case.seq_len) if args.growth else case.small() for case in chosen]
        # Cases that differ in what was cut away are one.
        chosen = list({case.name: case for case in small}.values())
    names = args.peers or default_peers(args)
    repeats = min(args.repeats, 3) if args.quick else args.repeats
    run = begin(args, device, args.dtype, **attention.versions())
    failed = False

    def results() -> Iterator[attention.Result]:
        nonlocal failed
        for dtype, case in product(args.dtype, chosen):
            result = attention.run_case(case, names, device, dtype, repeats, args.seconds)
            failed |= peers.OURS in names and result.row(peers.OURS, machine.TRAIN) is None
            yield keep(args, run, result)

    show_report(args, results())
    return status_of(peers.OURS, failed)


def choose(grid: list[Named], patterns: list[str]) -> list[Named]:
    """The cases whose name, or the name of what a CPU runs of them, matches a pattern.

    Raises:
        ValueError: a pattern that no case matches.
    """

    def matches(case: Named, pattern: str) -> bool:
        return fnmatch(case.name, pattern) or fnmatch(case.small().name, pattern)

    for pattern in patterns:
        if not any(matches(case, pattern) for case in grid):
            raise ValueError(f"--cases {pattern}: none of {', '.join(case.name for case in grid)}.")
    return [case for case in grid if any(matches(case, pattern) for pattern in patterns)]


def run_packed(args: argparse.Namespace, device: torch.device) -> int:
    if args.device == "cuda" and "fp32" in args.dtype:
        print("--dtype fp32: on a GPU the peers are those of bf16 and fp16.", file=sys.stderr)
        return 1
    try:
        chosen = choose(packed_cases.TABLE, args.cases)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    chosen = chosen if args.device == "cuda" else [case.small() for case in chosen]
    names = args.peers or (packed_peers.ON_CUDA if args.device == "cuda" else packed_peers.ON_CPU)
    run = begin(args, device, **attention.versions())
    failed = False

    def results() -> Iterator[packed.Result]:
        nonlocal failed
        for dtype, case in product(args.dtype, chosen):
            result = packed.run_case(case, names, device, dtype, args.repeats, args.seconds)
            failed |= result.row(packed_peers.OURS, machine.TRAIN) is None
            yield keep(args, run, result)

    show_report(args, results())
    return status_of(packed_peers.OURS, failed)


def run_tokens(args: argparse.Namespace, device: torch.device) -> int:
    run = begin(args, device)
    failed = False

    def results(shape: tuple[Any, ...]) -> Iterator[tokens.Result]:
        nonlocal failed
        dtype, pattern, seq_len, heads, head_dim, batch = shape
        for sparsity in args.sparsity:
            case = tokens.Case(seq_len, heads * head_dim, heads, sparsity, pattern, dtype, batch)
            result = tokens.run_case(case, args.peers, device, args.repeats, args.seconds, args.profile)
            failed |= tokens.OURS in args.peers and result.row(tokens.OURS, machine.TRAIN) is None
            yield keep(args, run, result)

    shapes = product(args.dtype, args.pairs, args.seq_len, args.heads, args.head_dim, args.batch)
    show_report(args, map(results, shapes))
    return status_of(tokens.OURS, failed)


def run_bert(args: argparse.Namespace, device: torch.device) -> int:
    try:
        from . import bert
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


def run_modernbert(args: argparse.Namespace, device: torch.device) -> int:
    try:
        from . import bert, modernbert
    except ImportError as error:
        print(f"bench modernbert measures Transformers' ModernBERT. {error}", file=sys.stderr)
        return 1
    seq_lens = args.seq_len or ([8192] if args.device == "cuda" else [1024])
    try:
        bert.require_layouts([modernbert.STRUCTURE], seq_lens)
    except ValueError as error:
        print(f"--seq-len: {error}", file=sys.stderr)
        return 1
    run = begin(args, device, **attention.versions(), **modernbert.versions())
    failed = False

    def results() -> Iterator[modernbert_results.Result]:
        nonlocal failed
        for dtype in args.dtype:
            wrong = modernbert.wrong_ones(args.peers, dtype, device)
            for seq_len in seq_lens:
                case = modernbert_results.Case(seq_len, dtype, args.device, not args.labelled_only)
                rows = modernbert.run_case(case, args.peers, wrong, device, args.repeats, args.seconds)
                failed |= any(row.reason for row in rows if row.attention.startswith(peers.OURS))
                yield keep(args, run, (case, rows))

    show_report(args, results())
    return status_of(peers.OURS, failed)


def run_sequence(args: argparse.Namespace, device: torch.device) -> int:
    try:
        from . import bert, sequence, sequence_model
    except ImportError as error:
        print(f"bench sequence measures Transformers' BERT under DeepSpeed. {error}", file=sys.stderr)
        return 1
    seq_lens = args.seq_len or ([16384, 65536, 262144] if args.device == "cuda" else [512, 1024])
    ranks = args.ranks or [torch.cuda.device_count() if args.device == "cuda" else 2]
    try:
        sequence.require_gpus(max(ranks), args.longest, device)
        if sequence_results.SEQUENCE in args.parallel:
            sequence_model.require_heads(max(ranks), args.device)
        bert.require_layouts([args.structure], seq_lens)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if "fp16" in args.dtype:
        print("--dtype fp16: DeepSpeed leaves steps out while it looks for a loss scale; give bf16.", file=sys.stderr)
        return 1
    settings = args.zero_stage, args.activations, args.tiles, args.micro_batches
    grid = [
        sequence_results.Case(seq_len, args.structure, dtype, args.device, *settings)
        for dtype, seq_len in product(args.dtype, sorted(seq_lens))
    ]
    failed = False

    def results(run: Run) -> Iterator[sequence_results.Result]:
        nonlocal failed
        comparison = sequence.Comparison(grid, ranks, args.parallel, args.repeats, args.seconds, args.longest)
        for case, row in comparison.results(device):
            failed |= bool(row.reason) and not row.is_try
            yield keep(args, run, (case, [row]))

    with cpu_threads(max(1, torch.get_num_threads() // max(ranks))):
        show_report(args, results(begin(args, device, **sequence_model.versions())))
    return status_of(peers.OURS, failed)


def status_of(ours: str, failed: bool) -> int:
    """The exit status, and on failure a line about what is ours in the table."""
    if failed:
        print(f"{ours} itself was wrong or failed in a case; its line says how.", file=sys.stderr)
    return int(failed)


def default_peers(args: argparse.Namespace) -> list[str]:
    if args.growth:
        return [peers.OURS]
    if args.break_even:
        return [peers.OURS, peers.DENSE[args.device]]
    if args.quick:
        return peers.QUICK[args.device]
    return peers.ON_CPU if args.device == "cpu" else peers.ON_CUDA


def begin(args: argparse.Namespace, device: torch.device, dtypes: Iterable[str] = (), **versions: str) -> Run:
    """Prints what the numbers depend on, and the rates that a GPU has in these dtypes."""
    on_cuda = device.type == "cuda"
    ceilings = {name: floors.Ceilings.measure(device, machine.DTYPES[name]) for name in dtypes if on_cuda}
    run = Run(args.operation, args.arguments, machine.conditions(device) | versions, ceilings)
    show(*run.heading())
    return run


def keep(args: argparse.Namespace, run: Run, result: Case) -> Case:
    """The result, when its rows are written."""
    run.add(RESULTS[args.operation].record(result), args.json)
    return result


def by_device(values: Mapping[str, object]) -> str:
    """Defaults as help says them."""
    on_cpu, on_gpu = in_option(values["cpu"]), in_option(values["cuda"])
    return on_cpu if on_cpu == on_gpu else f"{on_cpu}; on a GPU {on_gpu}"


def in_option(value: object) -> str:
    """A default as it would be written."""
    if value is None:
        return "as many as have 48 x 4096 x 4096 scores"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def listed(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """argparse type: comma-separated values of another type."""
    return lambda text: [parse(part) for part in text.split(",")]


def block(text: str) -> int:
    """argparse type: a block size that layouts can have."""
    return int(one_of(list(map(str, BLOCK_SIZES)))(text))


def percent(text: str) -> float:
    """argparse type: a part of 1, from 0 to below 100 %."""
    return number_below(100, "a percentage", text) / 100


def probability(text: str) -> float:
    """argparse type: from 0 to below 1."""
    return number_below(1, "a probability", text)


def number_below(end: int, what: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < end:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what} from 0 to below {end}")
    return number


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """argparse type: one of some names."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return parse
