from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..bench import attention, cases, floors, layouts, machine, matmul, peers, tokens, window
from ..sparsity._base import BLOCK_SIZES
from . import positive

Case = TypeVar("Case")
Measured = tuple[Iterable[str], list[dict[str, Any]]]
"""A case's table, and its rows for the JSON."""

NO_FLOOR = (
    "A CPU has no floor: dense results of hundreds of megabytes get new memory at every call, which takes longer than "
    "computing them, so that density times the dense time bounds nothing."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Verifies an operation against float64, then times it beside its peers in the same process."
    operations = parser.add_subparsers(dest="operation", required=True, metavar="operation")
    add_matmul(operations.add_parser("matmul", help="MatMul, Softmax, and attention of both"))
    add_attention(operations.add_parser("attention", help="fused attention on live blocks"))
    add_window(operations.add_parser("window", help="products, softmax and attention of windows"))
    add_tokens(operations.add_parser("tokens", help="attention over token pairs, step by step"))
    add_bert(operations.add_parser("bert", help="a training step of BERT with sparse, dense and no attention"))


def add_shared(parser: argparse.ArgumentParser, seconds: int | None = 60) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: cpu)")
    parser.add_argument("--repeats", type=positive, default=20, help="rounds; times are their medians (default: 20)")
    if seconds is not None:
        help = f"no new round of a case after this long (default: {seconds})"
        parser.add_argument("--seconds", type=positive, default=seconds, help=help)
    parser.add_argument("--json", metavar="OUT", help="write the rows to this file")


def add_sizes(parser: argparse.ArgumentParser, heads: int) -> None:
    parser.add_argument("--heads", type=positive, default=heads, help=f"(default: {heads})")
    parser.add_argument("--batch", type=positive, default=1, help="sequences (default: 1)")
    parser.add_argument("--head-dim", type=positive, default=64, help="numbers in a head's vector (default: 64)")
    parser.add_argument(
        "--dtype",
        type=listed(one_of(machine.DTYPES)),
        default=["fp32", "bf16"],
        help="fp32, bf16, fp16 (default: fp32,bf16)",
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
        on_cpu, on_gpu = (in_option(matmul.DEFAULTS[device][name]) for device in ("cpu", "cuda"))
        default = on_cpu if on_cpu == on_gpu else f"{on_cpu}; on a GPU {on_gpu}"
        parser.add_argument(option, type=parse, help=f"{help} (default: {default})")

    add_shared(parser, seconds=None)
    add("--seconds", positive, "no new round of a case after this long")
    add("--operations", listed(one_of(matmul.DENSE)), ", ".join(matmul.DENSE))
    add("--layout", listed(one_of(layouts.LAYOUTS)), f"{', '.join(layouts.LAYOUTS)}, with the density in percent")
    add("--block", listed(block), f"block sizes: {', '.join(map(str, BLOCK_SIZES))}")
    add("--dtype", listed(one_of(machine.DTYPES)), ", ".join(machine.DTYPES))
    add("--seq-len", listed(positive), "tokens")
    add("--head-dim", listed(positive), "numbers in a head's vector")
    add("--heads", positive, "of each sequence")
    add("--batch", positive, "sequences")
    parser.set_defaults(measure=run_matmul)


def add_attention(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Verifies fused attention and its peers against float64, outputs and gradients, then times them in turns. A peer "
        "that does not take a case is named with the reason. TFLOP/s count live blocks alone. 'x floor' is the ratio to "
        "the larger of those FLOPs at the best dense attention's rate and of the bytes of all operands at a copy's rate, "
        "on a CPU to density times the dense time; 'x ours' to ds_sparse's time. On a CPU the cases are cut to one "
        "sequence, four heads and 2,048 tokens, those of --growth to one head."
    )
    add_shared(parser)
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
    parser.add_argument(
        "--cases",
        metavar="NAMES",
        type=lambda text: text.split(","),
        default=["*"],
        help=f"patterns, such as fixed-*,random-64: {', '.join(case.name for case in cases.TABLE)} (default: all)",
    )
    parser.add_argument(
        "--peers",
        type=listed(one_of(peers.PEERS)),
        help=f"{', '.join(peers.PEERS)} (default: on a CPU {','.join(peers.ON_CPU)}; on a GPU {','.join(peers.ON_CUDA)}, "
        "for --break-even ds_sparse,cudnn, for --growth ds_sparse; flex-max and flex-blocks are autotuned for a minute "
        "a case)",
    )
    parser.add_argument("--dtype", choices=list(machine.DTYPES), help="(default: bf16 on a GPU, fp32 on a CPU)")
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
    add_shared(parser)
    parser.add_argument("--seq-len", type=listed(positive), default=[1024, 4096], help="tokens (default: 1024,4096)")
    parser.add_argument(
        "--window", type=listed(positive), default=[64, 256], help="tokens seen on each side (default: 64,256)"
    )
    add_sizes(parser, heads=4)
    parser.add_argument(
        "--peers",
        type=listed(one_of(window.PEERS)),
        default=list(window.PEERS),
        help=f"{', '.join(window.PEERS)}; flex is compiled for each case (default: all)",
    )
    parser.set_defaults(measure=run_window)


def add_tokens(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "The steps from dense attention to sparse_attn over token pairs, which all heads share: each is verified "
        "against float64, output and gradients, then all are timed in turns. Says from which sparsity on a step beats "
        "dense attention. A step that does not take a case is named with the reason."
    )
    add_shared(parser)
    parser.add_argument(
        "--seq-len", type=listed(positive), default=[512, 1024, 2048], help="tokens (default: 512,1024,2048)"
    )
    parser.add_argument(
        "--models",
        type=listed(model),
        default=[(64, 1), (768, 12)],
        metavar="D_MODELxHEADS",
        help="d_model and its number of heads (default: 64x1,768x12)",
    )
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
        "--steps",
        type=listed(one_of(tokens.STEPS)),
        default=list(tokens.STEPS),
        help=f"{', '.join(tokens.STEPS)} (default: all)",
    )
    parser.add_argument("--batch", type=positive, default=1, help="sequences (default: 1)")
    parser.add_argument("--dtype", choices=list(machine.DTYPES), default="fp32", help="(default: fp32)")
    parser.add_argument(
        "--profile", type=positive, default=0, metavar="N", help="also name the N operators that take a step's time"
    )
    parser.set_defaults(measure=run_tokens)


def add_bert(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Forward and backward of masked-language modelling, without an optimizer, by Transformers' BERT-base with up "
        "to 32,768 tokens a step, or one sequence where that is longer; on a CPU a small model and 2,048. Before that "
        "each sparse structure is verified in a model of two layers, 1,024 tokens, without dropout: the gradient of the "
        "first layer's query weight. 'of ceiling' is the time without any attention, whose output is the value, over "
        "the time with it."
    )
    add_shared(parser)
    parser.add_argument(
        "--seq-len",
        type=listed(positive),
        help="tokens of a sequence (default: on a CPU 1024, on a GPU 4096,8192,16384,32768)",
    )
    parser.add_argument(
        "--attentions",
        type=listed(one_of(cases.BERT_ATTENTIONS)),
        default=list(cases.BERT_ATTENTIONS),
        help=f"{', '.join(cases.BERT_ATTENTIONS)} (default: all)",
    )
    parser.add_argument(
        "--dropout", type=probability, default=0.0, help="in attention and everywhere else (default: 0)"
    )
    parser.add_argument(
        "--labelled-only",
        action="store_true",
        help="logits of tokens with a label alone, as bing_bert computes them (default: of all, as Transformers does)",
    )
    parser.add_argument("--dtype", choices=list(machine.DTYPES), help="(default: bf16 on a GPU, fp32 on a CPU)")
    parser.set_defaults(measure=run_bert)


def run(args: argparse.Namespace) -> int:
    if args.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch finds no CUDA GPU; leave it out to measure the CPU.", file=sys.stderr)
        return 1
    if args.json is not None and not Path(args.json).absolute().parent.is_dir():
        print(f"--json {args.json}: there is no folder {Path(args.json).parent}; make it first.", file=sys.stderr)
        return 1
    if args.json is not None and Path(args.json).is_dir():
        example = Path(args.json) / "rows.json"
        print(f"--json {args.json}: is a folder; name a file to write, such as {example}.", file=sys.stderr)
        return 1
    return args.measure(args, torch.device(args.device))


def run_matmul(args: argparse.Namespace, device: torch.device) -> int:
    for name, default in matmul.DEFAULTS[device.type].items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    results: list[matmul.Result] = []

    def measured(case: matmul.Case) -> Measured:
        results.append(matmul.run_case(case, args.operations, device, args.repeats, args.seconds))
        return matmul.table(results[-1]), matmul.record(results[-1])

    grid = matmul.grid(args.layout, args.block, args.dtype, args.seq_len, args.head_dim, args.heads, args.batch)
    status = run_grid(args, device, grid, measured)
    if results:
        print("", *matmul.summary(results), "", *matmul.verdicts(results), sep="\n")
    return status


def run_window(args: argparse.Namespace, device: torch.device) -> int:
    def measured(case: window.Case) -> Measured:
        rows = window.run_case(case, args.peers, device, args.repeats, args.seconds)
        return window.table(case, rows), window.record(case, rows)

    grid = window.grid(args.seq_len, args.window, args.dtype, args.batch, args.heads, args.head_dim)
    return run_grid(args, device, grid, measured)


def run_grid(
    args: argparse.Namespace, device: torch.device, grid: Iterable[Case], measured: Callable[[Case], Measured]
) -> int:
    """Prints and writes case after case; one that is wrong or fails is the last."""
    records: list[dict[str, Any]] = []
    try:
        conditions = say_conditions(device, args.dtype)
        for case in grid:
            lines, rows = measured(case)
            print("", *lines, sep="\n", flush=True)
            records += rows
            write(args.json, conditions, records)
    except (ValueError, ArithmeticError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def run_attention(args: argparse.Namespace, device: torch.device) -> int:
    on_cuda = args.device == "cuda"
    dtype = args.dtype or ("bf16" if on_cuda else "fp32")
    if on_cuda and dtype == "fp32":
        print("--dtype fp32: on a GPU the peers and the floors are those of bf16 and fp16.", file=sys.stderr)
        return 1
    grid = cases.BREAK_EVEN if args.break_even else cases.GROWTH if args.growth else cases.TABLE
    for pattern in args.cases:
        if not any(fnmatch(case.name, pattern) for case in grid):
            print(f"--cases {pattern}: none of {', '.join(case.name for case in grid)}.", file=sys.stderr)
            return 1
    chosen = [case for case in grid if any(fnmatch(case.name, pattern) for pattern in args.cases)]
    if not on_cuda:
        chosen = [case.small(heads=1, seq_len=case.seq_len) if args.growth else case.small() for case in chosen]
    names = args.peers or default_peers(args)
    conditions = say_conditions(device, [dtype], **attention.versions())
    results: list[attention.Result] = []
    failed = False
    for case in chosen:
        result = attention.run_case(
            case, names, device, dtype, min(args.repeats, 3) if args.quick else args.repeats, args.seconds
        )
        results.append(result)
        print("", *attention.table(result), sep="\n", flush=True)
        write(args.json, conditions, [row for result in results for row in attention.record(result)])
        if peers.OURS in names and result.row(peers.OURS, machine.TRAIN) is None:
            failed = True
    print("", *attention.summary(results), sep="\n")
    if args.break_even:
        print("", *attention.break_even(results, peers.DENSE[args.device]), sep="\n")
    if args.growth:
        print("", *attention.growth(results), sep="\n")
    return status_of(peers.OURS, failed)


def run_tokens(args: argparse.Namespace, device: torch.device) -> int:
    conditions = say_conditions(device)
    results: list[tokens.Result] = []
    for pattern, seq_len, (d_model, heads) in product(args.pairs, args.seq_len, args.models):
        of_shape = []
        for sparsity in args.sparsity:
            case = tokens.Case(seq_len, d_model, heads, sparsity, pattern, args.dtype, args.batch)
            of_shape.append(tokens.run_case(case, args.steps, device, args.repeats, args.seconds, args.profile))
            rows = [row for result in (*results, *of_shape) for row in tokens.record(result)]
            write(args.json, conditions, rows)
        print("", *tokens.table(of_shape), sep="\n", flush=True)
        results += of_shape
    if args.device == "cpu":
        print("", *tokens.goals(results), sep="\n")
    failed = tokens.OURS in args.steps and any(result.row(tokens.OURS, machine.TRAIN) is None for result in results)
    return status_of(tokens.OURS, failed)


def run_bert(args: argparse.Namespace, device: torch.device) -> int:
    try:
        from ..bench import bert
    except ImportError as error:
        print(f"bench bert measures Transformers' BERT. {error}", file=sys.stderr)
        return 1
    dtype = args.dtype or ("bf16" if args.device == "cuda" else "fp32")
    seq_lens = args.seq_len or ([4096, 8192, 16384, 32768] if args.device == "cuda" else [1024])
    try:
        bert.require_layouts(args.attentions, seq_lens)
    except ValueError as error:
        print(f"--seq-len: {error}", file=sys.stderr)
        return 1
    conditions = say_conditions(device, **bert.versions())
    records: list[dict[str, Any]] = []
    failed = False
    wrong = bert.wrong_ones(args.attentions, dtype, device)
    for seq_len in seq_lens:
        case = bert.Case(seq_len, args.dropout, dtype, args.device, not args.labelled_only)
        rows = bert.run_case(case, args.attentions, wrong, device, args.repeats, args.seconds)
        print("", *bert.table(case, rows), sep="\n", flush=True)
        records += bert.record(case, rows)
        write(args.json, conditions, records)
        failed |= any(row.reason for row in rows if row.attention in cases.IN_BERT)
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
    if args.device == "cpu":
        return peers.ON_CPU
    return [peers.OURS, "composition", "cudnn", "flash"] if args.quick else peers.ON_CUDA


def say_conditions(device: torch.device, dtypes: Iterable[str] = (), **versions: str) -> dict[str, Any]:
    """Prints what the numbers depend on, and the rates that a GPU has in these dtypes; returns it for the JSON."""
    conditions: dict[str, Any] = machine.conditions(device) | versions
    print(", ".join(f"{name} {value}" for name, value in conditions.items()), flush=True)
    for name in dtypes if device.type == "cuda" else ():
        ceilings = floors.Ceilings.measure(device, machine.DTYPES[name])
        print(f"measured here in {name}: {ceilings.in_words()}", flush=True)
        conditions.setdefault("ceilings", {})[name] = asdict(ceilings)
    return conditions


def in_option(value: object) -> str:
    """A default as it would be written."""
    if value is None:
        return "as many as have 48 x 4096 x 4096 scores"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def write(path: str | None, conditions: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """After every case, so that what was measured outlives what interrupts the rest."""
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({**conditions, "rows": rows}, file, indent=1)


def listed(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """argparse type: comma-separated values of another type."""
    return lambda text: [parse(part) for part in text.split(",")]


def block(text: str) -> int:
    """argparse type: a block size that layouts can have."""
    return int(one_of(list(map(str, BLOCK_SIZES)))(text))


def model(text: str) -> tuple[int, int]:
    """argparse type: d_model and heads, such as 768x12."""
    d_model, _, heads = text.partition("x")
    try:
        sizes = positive(d_model), positive(heads)
    except (argparse.ArgumentTypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a d_model and a number of heads, such as 768x12") from None
    if sizes[0] % sizes[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: {sizes[1]} heads do not divide a d_model of {sizes[0]}")
    return sizes


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
