"""`python -m benchmarks`: `ds_sparse bench` with the operations and peers of a clone."""

from __future__ import annotations

import argparse

from benchmarks import peers
from benchmarks.models import bert_results, modernbert_results, sequence_results
from benchmarks.train import results as train_results
from ds_sparse.bench import commands, markdown
from ds_sparse.cli import bench


def register() -> None:
    """Adds the operations, tables and peers of a clone to those of `ds_sparse bench`, once."""
    if not commands.MODULES:
        commands.OPERATIONS |= commands.IN_A_CLONE
        commands.MODULES |= {name: f"benchmarks.commands.{name}" for name in commands.IN_A_CLONE}
        markdown.TABLES |= {
            "bert": bert_results.of_bert,
            "modernbert": modernbert_results.of_modernbert,
            "sequence": sequence_results.of_sequence,
            "train": train_results.of_train,
        }
        peers.register()


def main(arguments: list[str] | None = None) -> int:
    """Runs `python -m benchmarks ARGUMENTS` and returns its exit status."""
    register()
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(arguments))
