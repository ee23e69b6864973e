"""`python -m benchmarks`: `ds_sparse bench` with the operations and peers of a clone."""

from __future__ import annotations

import argparse

from benchmarks import peers
from ds_sparse.bench import IN_A_CLONE, OPERATIONS
from ds_sparse.bench.registry import MODULES
from ds_sparse.cli import bench


def register() -> None:
    """Adds the operations and peers of a clone to those of `ds_sparse bench`, once."""
    if not MODULES:
        OPERATIONS.update(IN_A_CLONE)
        MODULES.update({name: f"benchmarks.commands.{name}" for name in IN_A_CLONE})
        peers.register()


def main(arguments: list[str] | None = None) -> int:
    """Runs `python -m benchmarks ARGUMENTS` and returns its exit status."""
    register()
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(arguments))
