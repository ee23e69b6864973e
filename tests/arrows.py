"""Counts the arrows between the rooms of the package: `python tests/arrows.py`.

A room is a folder or a file right below ds_sparse; an arrow is one room that imports another, wherever in its code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "ds_sparse"


def room_of(module: tuple[str, ...]) -> str:
    return module[1] if len(module) > 1 else "__init__"


def imported_by(file: Path, module: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The modules, and names in them, that a file imports."""
    package = module if file.name == "__init__.py" else module[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (tuple(each.name.split(".")) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            yield from ((*base, each.name) for each in node.names)


def arrows() -> set[tuple[str, str]]:
    """Pairs of a room and another that it imports."""
    files = {}
    for file in PACKAGE.rglob("*.py"):
        parts = ("ds_sparse", *file.relative_to(PACKAGE).with_suffix("").parts)
        if parts[1] != "launcher":
            files[parts[:-1] if parts[-1] == "__init__" else parts] = file
    found = set()
    for module, file in files.items():
        for imported in imported_by(file, module):
            while imported and imported not in files:
                imported = imported[:-1]
            if imported and room_of(imported) != room_of(module):
                found.add((room_of(module), room_of(imported)))
    return found


if __name__ == "__main__":
    pairs = sorted(arrows())
    for room in dict.fromkeys(room for room, _ in pairs):
        print(room, "->", ", ".join(other for one, other in pairs if one == room))
    print(f"{len({room for pair in pairs for room in pair})} rooms, {len(pairs)} arrows")
