"""Files that commands write: refused at the door, before anything is computed for them."""

from __future__ import annotations

import argparse
import os

from .wording import printable


def add_force(parser: argparse.ArgumentParser) -> None:
    """Adds the option without which no command overwrites a file."""
    parser.add_argument("--force", action="store_true", help="overwrite a file that exists")


def require_writable(path: str | os.PathLike[str], force: bool = True) -> None:
    """Raises ValueError where no file can be written to the path, or, without `force`, where there is one."""
    name, folder = printable(os.fspath(path)), os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise ValueError(f"{name} cannot be written: there is no folder {printable(folder)}. Make it first.")
    if os.path.isdir(path):
        raise ValueError(f"{name} cannot be written: it is a folder.")
    if os.path.lexists(path) and not force:
        raise ValueError(f"{name} is there already, and stays as it is. Choose another name, or add --force.")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ValueError(f"{name} cannot be written: permission denied.")
