from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from ..arguments import positive
from ..config import (
    BLOCK_KEY,
    DEFAULT_MODE,
    STRUCTURE_ERRORS,
    LoadedConfig,
    SparseAttentionConfigError,
    load_config,
    parse_config,
    parse_sparse_attention,
)
from ..sparsity import SparsityConfig
from ..sparsity.draws import Draws, draws, why_unrepeatable
from ..wording import printable, reason

_USUAL_LENGTH = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Says everything that is wrong with DeepSpeed JSONs: with the sparse_attention block, and, from DeepSpeed's "
        "own configuration classes, with the rest. Nothing is trained, and no device is used."
    )
    parser.epilog = (
        "exit status: 0 if every file is right (notices leave it 0), 1 if one is not or cannot be read, 2 for wrong "
        "usage. Mistakes go to standard error, the rest to standard output."
    )
    parser.add_argument(
        "files",
        nargs="+",
        metavar="file",
        help="DeepSpeed JSON (comments allowed, as DeepSpeed reads it); - is standard input",
    )
    parser.add_argument("--seq", type=positive, help="sequence length in tokens that the layout must exist at")
    parser.add_argument("--heads", type=positive, default=12, help="attention heads of the model (default: 12)")
    parser.add_argument(
        "--block-only", action="store_true", help="the block alone, without DeepSpeed; without --seq no density: 0.3 s"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a list with an object for each file: file, ok, mode, block, density, seq_len, deepspeed (its "
        "version; null: not asked), mistakes, notices",
    )


@dataclass
class Result:
    """What is said about a file."""

    file: str
    ok: bool = False
    mode: str | None = None
    block: int | None = None
    density: float | None = None
    """Share of live blocks at `seq_len` tokens; None where no layout was made."""
    seq_len: int | None = None
    deepspeed: str | None = None
    """The version of the DeepSpeed that read the rest; None where it was not asked."""
    mistakes: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    results = [_check(file, args) for file in args.files]
    if args.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        for result in results:
            _say(result)
    return 0 if all(result.ok for result in results) else 1


def _say(result: Result) -> None:
    if result.mistakes:
        for mistake in result.mistakes:
            print(f"{result.file}: {mistake}", file=sys.stderr)
    else:
        print(f"{result.file}: {_summary(result)}.")
    for notice in result.notices:
        print(f"{result.file}: {notice}")


def _summary(result: Result) -> str:
    if result.mode is None:
        summary = f"no {BLOCK_KEY} block: it trains dense, or {DEFAULT_MODE} at its defaults if switched on"
    else:
        summary = f"mode {result.mode}, block {result.block}"
    if result.density is not None:
        summary += f", density {result.density:.1%} at {result.seq_len} tokens"
    if result.deepspeed is not None:
        summary += f"; DeepSpeed {result.deepspeed} takes the rest"
    return summary


def _check(file: str, args: argparse.Namespace) -> Result:
    name = "standard input" if file == "-" else printable(file)
    result = Result(name)
    try:
        loaded = parse_config(sys.stdin.buffer.read(), name) if file == "-" else load_config(file)
    except SparseAttentionConfigError as error:
        result.mistakes += _without_name(error.mistakes, name)
        return result
    try:
        if loaded.block is not None:
            _check_block(loaded.block, result, args)
        if not args.block_only:
            _check_rest(loaded, result)
    except RecursionError:
        result.mistakes.append("not a DeepSpeed config: nested too deeply to read.")
    result.ok = not result.mistakes
    return result


def _check_block(block: dict[str, Any], result: Result, args: argparse.Namespace) -> None:
    notices: list[str] = []
    try:
        structure = parse_sparse_attention(block, args.heads, source=result.file, seq_len=args.seq, notices=notices)
    except SparseAttentionConfigError as error:
        result.mistakes += _without_name(error.mistakes, result.file)
        return
    result.mode, result.block = block.get("mode", DEFAULT_MODE), structure.block
    result.notices += _without_name(notices, result.file)
    how = draws(structure, args.seq)
    if how is Draws.UNREPEATABLY:
        result.notices.append(f"{BLOCK_KEY}.mode: {why_unrepeatable(structure)}")
    if how is Draws.BY_SEED and structure.seed is None:
        result.notices.append(
            f"{BLOCK_KEY}.seed: not given: each run draws random blocks of its own, one layout on all its ranks. Set "
            '"seed" to have the same layout in every run.'
        )
    if args.seq is not None or not args.block_only:
        _measure(structure, args.seq or _USUAL_LENGTH, result)


def _measure(structure: SparsityConfig, seq_len: int, result: Result) -> None:
    from ..layout import density

    try:
        result.density, result.seq_len = density(structure.make_bool_layout(seq_len)), seq_len
    except STRUCTURE_ERRORS as error:
        # Only at the length that nobody asked for: parse_sparse_attention has tried the other.
        result.notices.append(f"{BLOCK_KEY}: no layout at {seq_len} tokens ({reason(error)}).")


def _check_rest(loaded: LoadedConfig, result: Result) -> None:
    from ..integrations.deepspeed_check import check_deepspeed_config

    try:
        verdict = check_deepspeed_config(loaded.deepspeed)
    except ImportError as error:
        result.notices.append(f"the rest of the file was not checked: {error}")
        return
    result.deepspeed = verdict.version
    result.mistakes += verdict.mistakes
    result.notices += verdict.notices


def _without_name(sentences: list[str], name: str) -> list[str]:
    return [sentence.removeprefix(f"{name}: ") for sentence in sentences]
