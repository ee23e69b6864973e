"""The command line of `ds_sparse bench`."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from .commands import MODULES
from .runs import without_json


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
    return module_of(operation).measure(args, torch.device(args.device))


def parse(
    operation: str, arguments: list[str], parser_type: type[argparse.ArgumentParser] = argparse.ArgumentParser
) -> argparse.Namespace:
    """The options of an operation; with it as `operation`, its module of results as `results`, and as `arguments` those
    that say what is measured."""
    module = module_of(operation)
    parser = parser_type(prog=program_of(operation))
    module.add(parser)
    parser.set_defaults(operation=operation, results=module.RESULTS, arguments=without_json(arguments))
    return parser.parse_args(arguments)


def module_of(operation: str) -> Any:
    """One of `OPERATIONS` in `commands`."""
    return import_module(MODULES.get(operation, f"{__package__}.commands.{operation}"))


def program_of(operation: str) -> str:
    return f"{'python -m benchmarks' if operation in MODULES else 'ds_sparse bench'} {operation}"


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
