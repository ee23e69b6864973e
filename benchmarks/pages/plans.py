"""Tables of plans: measured steps beside what `ds_sparse plan` predicts, and predictions for several GPUs.

    .venv/bin/python -m benchmarks.pages.plans

writes ds_sparse/plan/h200.json, the rates of an H200, from committed results.
"""

from dataclasses import replace
from functools import cache

from benchmarks.plan.committed import (
    ATTENTION,
    BERT,
    SEQUENCE,
    TRAINING,
    TrainingStep,
    committed,
    training_steps,
    written,
)
from benchmarks.plan.committed import committed_rates as rates_of
from benchmarks.plan.proof import Compared, compared, compared_on_several
from ds_sparse.bench.machine import in_three_digits
from ds_sparse.bench.markdown import Table
from ds_sparse.plan.advice import advise, largest_batch
from ds_sparse.plan.communication import NODE
from ds_sparse.plan.fitting import Results, walk_in_bert
from ds_sparse.plan.layers import Walk
from ds_sparse.plan.limits import TOKENS_OF_A_RANK
from ds_sparse.plan.model import NAMED
from ds_sparse.plan.rates import FILE, MEMORY_GIB, Rates, committed_rates
from ds_sparse.plan.settings import BUCKET, Settings
from ds_sparse.plan.step import step_of

HEADING = ["model", "tokens", "attention", "measured, ms", "predicted, ms", "", "measured, GiB", "predicted, GiB", ""]


@cache
def measurements() -> tuple[Results, list[TrainingStep], Rates]:
    """Committed results and training runs, and the rates that they give."""
    results, steps = committed(), training_steps()
    return results, steps, rates_of(results, steps)


def measured() -> str:
    """Steps of one GPU, measured and predicted."""
    rows = list(compared(*measurements()))
    return f"{table(rows)}\n\n{summary(rows)}\n\n{sources(measurements()[0])}"


def measured_on_several() -> str:
    """Steps of several GPUs, and a sentence about those in which ranks have many tokens."""
    results, _, rates = measurements()
    rows = list(compared_on_several(results, rates))
    many = [row for row in rows if row.tokens >= TOKENS_OF_A_RANK]
    return f"{table(rows)}\n\nWhere a rank has {TOKENS_OF_A_RANK:,} tokens of a pass or more: {summary(many)}"


def table(rows: list[Compared]) -> str:
    """A line a step."""
    cells = [
        [
            row.what,
            f"{row.seq_len:,}",
            row.attention if "`" in row.attention else f"`{row.attention}`",
            in_three_digits(row.measured),
            in_three_digits(row.predicted),
            f"{row.error:+.1%}".replace("%", " %"),
            f"{row.measured_gib:.1f}",
            f"{row.predicted_gib:.1f}",
            f"{row.memory_error:+.1%}".replace("%", " %"),
        ]
        for row in rows
    ]
    return Table(HEADING, cells).in_markdown()


def summary(rows: list[Compared]) -> str:
    """The largest errors of all steps."""
    time, memory = (max(map(abs, errors)) for errors in zip(*((row.error, row.memory_error) for row in rows)))
    said = f"{len(rows)} steps. Times differ by at most {time:.1%}, memory by at most {memory:.1%}."
    return said.replace("%", " %")


def sources(results: Results) -> str:
    """The results that the figures are from."""
    named = {name: source for source in results.sources for name in [source.partition(":")[0]]}
    lists = [", ".join(f"`{name}`" for name in names) for names in (ATTENTION, BERT, (TRAINING,), SEQUENCE)]
    commits = sorted({source.partition("commit ")[2] for source in named.values()})
    return (
        f"{results.machine}, commits {'; '.join(commits)}. Attention's rates: {lists[0]}. The model's, and measured "
        f"steps: {lists[1]}. Training: {lists[2]}. Several GPUs: {lists[3]}."
    )


LENGTHS = (2**14, 2**16, 2**18, 2**20)
RANKS = (1, 2, 4, 8)
STRUCTURE = "bigbird-64"
MODEL = replace(NAMED["bert-base"], family="bing_bert", dropout=0.0, attention_dropout=0.0)

TOKENS = 131072
"""Least tokens of a rank in a forward pass: several sequences where they are short."""

GPUS = {NODE: f"{NODE} GPUs", 2 * NODE: "two nodes"}


def predicted() -> str:
    """Million tokens a second of BERT-base on a node and on two, by `sequence_parallel_size`."""
    heading = ["tokens", *(f"{where}, N = {ranks}" for where in GPUS.values() for ranks in RANKS)]
    return Table(heading, [row(committed_rates(), seq_len) for seq_len in LENGTHS]).in_markdown()


def row(rates: Rates, seq_len: int) -> list[str]:
    """The cells of a length."""
    walk = walk_of(seq_len)
    return [f"{seq_len:,}", *(cell(rates, seq_len, walk, gpus, ranks) for gpus in GPUS for ranks in RANKS)]


def walk_of(seq_len: int) -> Walk:
    """The walk over a layout; of a million tokens four times that of a quarter, as laying them out takes 3 GB."""
    times = 4 if seq_len > 2**18 else 1
    walk = walk_in_bert(STRUCTURE, MODEL.heads, seq_len // times)
    forward, backward = (
        replace(side, **{name: times * value for name, value in vars(side).items()})
        for side in (walk.forward, walk.backward)
    )
    return replace(walk, seq_len=seq_len, live=times * walk.live, forward=forward, backward=backward)


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
    return (
        f"**{text}**"
        if advise(rates, MODEL, kept, seq_len, lambda _: walks, memory, MODEL.heads).settings == found
        else text
    )


if __name__ == "__main__":
    FILE.write_text(written(measurements()[2]))
