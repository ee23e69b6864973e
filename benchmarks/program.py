"""`python -m benchmarks`: `ds_sparse bench` with the operations and peers of a clone."""

from __future__ import annotations

import argparse

from benchmarks import markdown, peers
from ds_sparse.bench import commands
from ds_sparse.bench import markdown as markdown_of_bench
from ds_sparse.cli import bench


def register() -> None:
    """Adds the operations, tables and peers of a clone to those of `ds_sparse bench`, once."""
    if not commands.MODULES:
        commands.OPERATIONS |= commands.IN_A_CLONE
        commands.MODULES |= {name: f"benchmarks.commands.{name}" for name in commands.IN_A_CLONE}
        markdown_of_bench.TABLES |= markdown.TABLES
        peers.register()


def main(arguments: list[str] | None = None) -> int:
    """Runs `python -m benchmarks ARGUMENTS` and returns its exit status."""
    register()
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(arguments))
