from __future__ import annotations

import argparse
import importlib
from typing import Any

from ..tools.terminal import wrong
from . import COMMANDS

SHELLS = {
    "bash": 'eval "$(ds_sparse completion bash)"        # in ~/.bashrc',
    "zsh": 'ds_sparse completion zsh > "${fpath[1]}/_ds_sparse"',
    "fish": "ds_sparse completion fish > ~/.config/fish/completions/ds_sparse.fish",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Prints a script with which a shell completes commands, their options and names of files."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(["once for each shell:", *(f"  {line}" for line in SHELLS.values())])
    parser.add_argument("shell", choices=list(SHELLS), help="for which shell")


def run(args: argparse.Namespace) -> int:
    from ..tools.extras import optional_imports

    try:
        with optional_imports():
            import shtab
    except ImportError as error:
        return wrong(f"ds_sparse completion: {error}")
    print(shtab.complete(_whole_parser(shtab.FILE), args.shell))
    return 0


def _whole_parser(file: dict[str, Any]) -> argparse.ArgumentParser:
    """Every command with its arguments. file: completes arguments that have no choices."""
    parser = argparse.ArgumentParser(prog="ds_sparse")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command")
    for name, line in COMMANDS.items():
        command = commands.add_parser(name, help=line)
        importlib.import_module(f"{__package__}.{name}").add_arguments(command)
        for action in command._actions:
            if action.option_strings:
                continue
            if action.choices is not None:
                action.choices = list(action.choices)  # shtab takes a dict of them for subcommands
            else:
                action.complete = file  # type: ignore[attr-defined]  # shtab reads it, argparse has none
    return parser
