"""Takes the rates of an H200 from benchmarks/results, and compares plans with measured steps:

    .venv/bin/python website/plan_table.py

It writes ds_sparse/plan/h200.json, and the tables of docs/plan.md between the comments `<!-- measured -->` or
`<!-- measured on several -->` and `<!-- end -->`.
"""

from pathlib import Path

from benchmarks.plan.committed import (
    ATTENTION,
    BERT,
    SEQUENCE,
    TRAINING,
    TrainingStep,
    committed,
    committed_rates,
    training_steps,
    written,
)
from benchmarks.plan.proof import Compared, compared, compared_on_several
from ds_sparse.bench.machine import in_three_digits
from ds_sparse.bench.markdown import Table
from ds_sparse.plan.fitting import Results
from ds_sparse.plan.limits import TOKENS_OF_A_RANK
from ds_sparse.plan.rates import FILE, Rates

PAGE = Path(__file__).resolve().parent.parent / "docs" / "plan.md"

HEADING = ["model", "tokens", "attention", "measured, ms", "predicted, ms", "", "measured, GiB", "predicted, GiB", ""]


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


def said(rows: list[Compared]) -> str:
    """Two sentences about all."""
    time, memory = (max(map(abs, errors)) for errors in zip(*((row.error, row.memory_error) for row in rows)))
    said = f"{len(rows)} steps. Times differ by at most {time:.1%}, memory by at most {memory:.1%}."
    return said.replace("%", " %")


def on_several(rows: list[Compared]) -> str:
    """The steps of several GPUs, and a sentence about those in which ranks have many tokens."""
    many = [row for row in rows if row.tokens >= TOKENS_OF_A_RANK]
    return f"{table(rows)}\n\nWhere a rank has {TOKENS_OF_A_RANK:,} tokens of a pass or more: {said(many)}"


def sources(results: Results) -> str:
    """Where the figures are from."""
    named = {name: source for source in results.sources for name in [source.partition(":")[0]]}
    lists = [", ".join(f"`{name}`" for name in names) for names in (ATTENTION, BERT, (TRAINING,), SEQUENCE)]
    commits = sorted({source.partition("commit ")[2] for source in named.values()})
    return (
        f"{results.machine}, results in `benchmarks/results`, commits {'; '.join(commits)}. Attention's rates: "
        f"{lists[0]}. The model's, and measured steps: {lists[1]}. Training: {lists[2]}. Several GPUs: "
        f"{lists[3]}."
    )


def with_table(page: str, results: Results, steps: list[TrainingStep], rates: Rates) -> str:
    rows = list(compared(results, steps, rates))
    made = {
        "measured": f"{table(rows)}\n\n{said(rows)}\n\n{sources(results)}",
        "measured on several": on_several(list(compared_on_several(results, rates))),
    }
    for name, text in made.items():
        start, rest = page.split(f"<!-- {name} -->")
        page = f"{start}<!-- {name} -->\n\n{text}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return page


def main() -> None:
    results, steps = committed(), training_steps()
    rates = committed_rates(results, steps)
    FILE.write_text(written(rates))
    PAGE.write_text(with_table(PAGE.read_text(), results, steps, rates))


if __name__ == "__main__":
    main()
