from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from ..config import (
    BLOCK_KEY,
    DEFAULT_MODE,
    LAYERS_KEY,
    STRUCTURE_ERRORS,
    LoadedConfig,
    SparseAttentionConfigError,
    load_config,
    mode_of,
    parse_config,
    read_block,
)
from ..sparsity import SparsityConfig, adds_parameters
from ..sparsity.declarations import declared_value
from ..sparsity.draws import Draws, draws, why_unrepeatable
from ..tools.arguments import positive
from ..tools.block_sizes import rounded_up
from ..tools.terminal import Terminal, wrong
from ..tools.wording import printable, reason, show

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
    parser.add_argument(
        "--seq",
        type=positive,
        help="sequence length in tokens that the layout must exist at (default: any; the density is that at "
        f"{_USUAL_LENGTH}, in whole blocks)",
    )
    parser.add_argument("--heads", type=positive, default=12, help="attention heads of the model (default: 12)")
    parser.add_argument("--layers", type=positive, help="attention layers of the model, which no entry may go beyond")
    parser.add_argument(
        "--block-only", action="store_true", help="the block alone, without DeepSpeed; without --seq no density: 0.3 s"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a list with an object for each file: file, ok, mode, block, density, layers (mode, block and "
        "density of each entry, null: dense), seq_len, deepspeed (its version; null: not asked), mistakes, notices",
    )


@dataclass
class Result:
    """Everything that is said about a file."""

    file: str
    ok: bool = False
    mode: str | None = None
    block: int | None = None
    density: float | None = None
    """Share of live blocks at `seq_len` tokens; None where no layout was made."""
    layers: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    """Mode, block and density of the entries of `layers`; None for one that is dense by the model's own attention."""
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
    terminal = Terminal()
    if result.mistakes:
        for mistake in result.mistakes:
            wrong(f"{result.file}: {mistake}")
    else:
        terminal.line(f"{result.file}: {_summary(result)}.", "green")
    for notice in result.notices:
        terminal.line(f"{result.file}: {notice}", "yellow")


def _summary(result: Result) -> str:
    if result.mode is None:
        summary = f"no {BLOCK_KEY} block: it trains dense, or {DEFAULT_MODE} at its defaults if switched on"
    else:
        summary = _structure(result.mode, result.block, result.density)
        summary += f" at {result.seq_len} tokens" if result.density is not None else ""
    for key, entry in result.layers.items():
        summary += f"; layers {key}: {'dense, null' if entry is None else _structure(**entry)}"
    if result.deepspeed is not None:
        summary += f"; DeepSpeed {result.deepspeed} takes the rest"
    return summary


def _structure(mode: str | None, block: int | None, density: float | None) -> str:
    return f"mode {mode}, block {block}{'' if density is None else f', density {density:.1%}'}"


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
        structures = read_block(
            block, args.heads, source=result.file, seq_len=args.seq, notices=notices, num_layers=args.layers
        )
    except SparseAttentionConfigError as error:
        result.mistakes += _without_name(error.mistakes, result.file)
        return
    result.notices += _without_name(notices, result.file)
    others = _about(structures.others, BLOCK_KEY, result, args)
    result.mode, result.block, result.density = others["mode"], others["block"], others["density"]
    for key, structure in structures.entries.items():
        at = f"{BLOCK_KEY}.{LAYERS_KEY}.{show(key)}"
        result.layers[key] = None if structure is None else _about(structure, at, result, args)


def _about(structure: SparsityConfig, at: str, result: Result, args: argparse.Namespace) -> dict[str, Any]:
    """Mode, block and density of a structure; the result gets the notices about it, and the length."""
    how = draws(structure, None if args.seq is None else rounded_up(args.seq, structure.block))
    if how is Draws.UNREPEATABLY:
        result.notices.append(f"{at}.mode: {why_unrepeatable(structure)}")
    if how is Draws.BY_SEED and declared_value(structure, "seed") is None:
        result.notices.append(
            f"{at}.seed: not given: each run draws random blocks of its own, one layout on all its ranks. Set "
            '"seed" to have the same layout in every run.'
        )
    if adds_parameters(structure):
        result.notices.append(
            f"{at}.mode: adds parameters to each layer, which are trained and saved with the model; make the optimizer "
            "after them."
        )
    found: dict[str, Any] = {"mode": mode_of(type(structure)), "block": structure.block, "density": None}
    if args.seq is not None or not args.block_only:
        seq_len = args.seq or _USUAL_LENGTH
        try:
            found["density"] = structure.computed_share(rounded_up(seq_len, structure.block))
            result.seq_len = seq_len
        except STRUCTURE_ERRORS as error:
            # Only at the length that nobody asked for: the reader has tried the other.
            result.notices.append(f"{at}: no layout at {seq_len} tokens ({reason(error)}).")
    return found


def _check_rest(loaded: LoadedConfig, result: Result) -> None:
    from ..integrations.deepspeed_check import check_deepspeed_config

    try:
        verdict = check_deepspeed_config(loaded.deepspeed)
    except ImportError as error:
        result.notices.append(f"the rest of the file was not checked: {error}")
    else:
        result.deepspeed = verdict.version
        result.mistakes += verdict.mistakes
        result.notices += verdict.notices


def _without_name(sentences: list[str], name: str) -> list[str]:
    return [sentence.removeprefix(f"{name}: ") for sentence in sentences]
