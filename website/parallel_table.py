"""Predicts tokens a second of BERT-base on 8 GPUs and on two nodes of 8, from the rates of an H200:

    .venv/bin/python website/parallel_table.py

It writes the table of docs/sequence-parallel.md between the comments `<!-- predicted -->` and `<!-- end -->`. The
layout of a million tokens takes half a minute and 3 GB.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ds_sparse.bench.markdown import Table
from ds_sparse.plan.advice import advise, largest_batch
from ds_sparse.plan.communication import NODE
from ds_sparse.plan.fitting import walk_in_bert
from ds_sparse.plan.layers import Walk
from ds_sparse.plan.model import NAMED
from ds_sparse.plan.rates import MEMORY_GIB, Rates, committed_rates
from ds_sparse.plan.settings import BUCKET, Settings
from ds_sparse.plan.step import step_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "sequence-parallel.md"

LENGTHS = (2**14, 2**16, 2**18, 2**20)
RANKS = (1, 2, 4, 8)
STRUCTURE = "bigbird-64"
MODEL = replace(NAMED["bert-base"], family="bing_bert", dropout=0.0, attention_dropout=0.0)

TOKENS = 131072
"""Of a rank in a forward pass, at least: it has several sequences where they are short."""

GPUS = {NODE: f"{NODE} GPUs", 2 * NODE: "two nodes"}
HEADING = ["tokens", *(f"{where}, N = {ranks}" for where in GPUS.values() for ranks in RANKS)]


def row(rates: Rates, seq_len: int, walk: Walk) -> list[str]:
    """The cells of a length. walk: what each layer attends to."""
    return [f"{seq_len:,}", *(cell(rates, seq_len, walk, gpus, ranks) for gpus in GPUS for ranks in RANKS)]


def cell(rates: Rates, seq_len: int, walk: Walk, gpus: int, ranks: int) -> str:
    """Million tokens a second, with "c" for checkpoints, where nothing else fits; bold where it is advised."""
    kept = Settings(max(1, TOKENS * ranks // seq_len), gpus=gpus, ranks=ranks, zero_stage=2, bucket_bytes=2 * BUCKET)
    memory, walks = MEMORY_GIB[rates.machine], [walk] * MODEL.layers
    tried = (largest_batch(MODEL, settings, seq_len, memory) for settings in (kept, replace(kept, checkpoints=True)))
    found = next((settings for settings in tried if settings is not None), None)
    if found is None:
        return "-"
    milliseconds = step_of(rates, MODEL, found, seq_len, walks).total
    text = f"{found.sequences * seq_len / milliseconds / 1e3:.2f}{' c' if found.checkpoints else ''}"
    return f"**{text}**" if advise(rates, MODEL, kept, seq_len, walks, memory, MODEL.heads).settings == found else text


def with_table(page: str, rows: Iterable[list[str]]) -> str:
    made = f"<!-- predicted -->\n\n{Table(HEADING, list(rows)).in_markdown()}\n\n<!-- end -->"
    return re.sub(r"<!-- predicted -->\n.*?<!-- end -->", lambda _: made, page, flags=re.DOTALL)


def main() -> None:
    rates = committed_rates()
    rows = [row(rates, seq_len, walk_in_bert(STRUCTURE, MODEL.heads, seq_len)) for seq_len in LENGTHS]
    PAGE.write_text(with_table(PAGE.read_text(), rows))


if __name__ == "__main__":
    main()
