"""Counts the arrows between the rooms of the package: `python tests/arrows.py`.

A room is a folder or a file right below ds_sparse; an arrow is one room that imports another, wherever in its code.
"""

from __future__ import annotations

import grimp


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def arrows() -> set[tuple[str, str]]:
    """Pairs of a room and another that it imports; the launcher, which lies beside the package, is no room."""
    graph = grimp.build_graph("ds_sparse", cache_dir=None)
    imports = ((one, other) for one in graph.modules for other in graph.find_modules_directly_imported_by(one))
    pairs = {(room_of(one), room_of(other)) for one, other in imports}
    return {(one, other) for one, other in pairs if one != other and "launcher" not in (one, other)}


if __name__ == "__main__":
    pairs = sorted(arrows())
    for room in dict.fromkeys(room for room, _ in pairs):
        print(room, "->", ", ".join(other for one, other in pairs if one == room))
    print(f"{len({room for pair in pairs for room in pair})} rooms, {len(pairs)} arrows")
