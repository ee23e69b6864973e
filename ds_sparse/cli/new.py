from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator
from typing import Any

from ..config import BLOCK_KEY, DEFAULT_MODE, STRUCTURE_ERRORS, example_block, parse_sparse_attention
from ..sparsity import sparsity_modes
from ..tools.arguments import positive, positive_number
from ..tools.block_sizes import rounded_up
from ..tools.files import add_force, require_writable
from ..tools.terminal import wrong
from ..tools.wording import did_you_mean, one_of, printable, show
from .modes import read_mode

_EXAMPLES = """\
examples:
  ds_sparse new ds.json --mode bslongformer --block 64 --seq 8192 --micro-batch 4
  ds_sparse new ds.json --mode bigbird --set num_random_blocks=3 --set num_sliding_window_blocks=7
  ds_sparse new - --mode variable --set local_window_blocks=[4,8,16] --plain > ds.json"""

_WIDTH = 100

Entry = tuple[str, str, Any]
"""A key, what its comment says, and its value: as JSON has it, or a tuple of entries."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # for the examples
    parser.description = textwrap.fill(
        "Writes a DeepSpeed JSON with every key of a sparse_attention block and what it means. The block is checked "
        "first, and a file that exists is not overwritten. ds_sparse modes shows the modes and their keys.",
        _WIDTH,
    )
    parser.epilog = _EXAMPLES
    parser.add_argument("file", help="the file to write; - is standard output")
    parser.add_argument("--mode", default=DEFAULT_MODE, help=f"the structure (default: {DEFAULT_MODE})")
    parser.add_argument("--block", type=positive, help="tokens in a block (default: that of the mode)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="another key of the mode, its value as in JSON"
    )
    parser.add_argument(
        "--seq", type=positive, default=2048, help="length in tokens that the layout must exist at (default: 2048)"
    )
    parser.add_argument("--heads", type=positive, default=12, help="attention heads of the model (default: 12)")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="precision (default: bf16)")
    parser.add_argument("--micro-batch", type=positive, default=1, help="sequences a GPU at a time (default: 1)")
    parser.add_argument("--accumulate", type=positive, default=1, help="micro batches a step (default: 1)")
    parser.add_argument("--lr", type=positive_number, default=1e-4, help="learning rate of AdamW (default: 1e-4)")
    parser.add_argument("--zero", type=int, choices=range(4), default=1, help="stage of ZeRO (default: 1)")
    parser.add_argument(
        "--plain",
        action="store_true",
        help="without comments, which Transformers' Trainer and accelerate do not read",
    )
    add_force(parser)


def run(args: argparse.Namespace) -> int:
    try:
        if args.file != "-":
            require_writable(args.file, args.force)
    except ValueError as error:
        return wrong(error)
    try:
        given = _given(args)
        block = example_block(args.mode, given, num_heads=args.heads, seq_len=args.seq, source="ds_sparse new")
        structure = parse_sparse_attention(block, args.heads, whole=False)
        density = structure.computed_share(rounded_up(args.seq, structure.block))
        said = f"mode {args.mode}, block {block['block']}, density {density:.1%} at {args.seq} tokens"
        about = (
            f"Which blocks of keys each block of queries sees: {said}. Training takes it with the flag "
            "--deepspeed_sparse_attention; without the flag it trains dense from the same file."
        )
        entries = (*_training(args), (BLOCK_KEY, about, tuple(_keys(args.mode, block))))
        text = "\n".join(["{", *_written(entries, not args.plain, "  "), "}"]) + "\n"
        if args.file == "-":
            print(text, end="")
            return 0
        with open(args.file, "w" if args.force else "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        return wrong(f"{printable(args.file)}: cannot be written: {error.strerror or error}.")
    except STRUCTURE_ERRORS as error:
        return wrong(error, 2)  # no file is read, so an option is wrong
    print(f"{printable(args.file)}: {said}.")
    return 0


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The keys of the block that options give.

    Raises:
        ValueError: an unknown mode; what is not KEY=VALUE; a key twice.
    """
    known = sparsity_modes()
    if args.mode not in known:
        raise ValueError(f"--mode {args.mode}: wanted {one_of(known)}.{did_you_mean(args.mode, known)}")
    given: dict[str, Any] = {} if args.block is None else {"block": args.block}
    for words in args.set:
        key, equals, value = words.partition("=")
        if not equals or not key or key == "mode":
            raise ValueError(f"--set {words}: wanted KEY=VALUE, with a key of the mode, such as --set seed=1.")
        if key in given:
            raise ValueError(f"--set {words}: {key} is given already, as {show(given[key])}.")
        given[key] = _value(value)
    return given


def _value(text: str) -> Any:
    """JSON, or text without the quotes that a shell takes away."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _training(args: argparse.Namespace) -> Iterator[Entry]:
    """Yields the entries beside the block."""
    yield "train_micro_batch_size_per_gpu", "Sequences that a GPU takes at a time.", args.micro_batch
    yield (
        "gradient_accumulation_steps",
        "Micro batches of a step: a step has this times the micro batch times the number of GPUs.",
        args.accumulate,
    )
    optimizer = {"type": "AdamW", "params": {"lr": args.lr, "weight_decay": 0.01, "torch_adam": True}}
    yield "optimizer", "torch_adam: the AdamW of PyTorch, for which DeepSpeed has nothing to compile.", optimizer
    yield "gradient_clipping", "Gradients of a larger norm are scaled down to this one.", 1.0
    if args.dtype == "bf16":
        yield "bf16", "Computes in bfloat16.", {"enabled": True}
    if args.dtype == "fp16":
        scale = {"enabled": True, "loss_scale": 0}
        yield "fp16", "Computes in float16; a loss_scale of 0 follows the gradients.", scale
    stages = "GPUs share the optimizer's state at stage 1, gradients too at 2, parameters too at 3, nothing at 0."
    yield "zero_optimization", f"ZeRO: {stages}", {"stage": args.zero}


def _keys(mode: str, block: dict[str, Any]) -> Iterator[Entry]:
    """The block, its comments from the fields of the mode's class."""
    about = read_mode(mode)
    yield "mode", about.about, mode
    for name, key in about.keys.items():
        said = "no default" if key.required else f"default {show(key.default)}"
        takes = f"{key.takes}; " if key.takes else ""
        yield name, f"{key.about} ({takes}{said})".lstrip(), block[name]


def _written(entries: tuple[Entry, ...], comments: bool, indent: str) -> Iterator[str]:
    """The lines of an object's entries."""
    for number, (key, comment, value) in enumerate(entries):
        if comments:
            yield from textwrap.wrap(comment, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        comma = "," if number + 1 < len(entries) else ""
        if isinstance(value, tuple):
            yield f"{indent}{json.dumps(key)}: {{"
            yield from _written(value, comments, f"{indent}  ")
            yield f"{indent}}}{comma}"
        else:
            yield f"{indent}{json.dumps(key)}: {json.dumps(value)}{comma}"
