"""Takes the rates of an H200 from ds_sparse/bench/results, and compares plans with measured steps:

    .venv/bin/python website/plan_table.py

It writes ds_sparse/plan/h200.json, and the table of docs/plan.md between the comments `<!-- measured -->` and
`<!-- end -->`.
"""

import re
from pathlib import Path

from ds_sparse.bench.machine import in_three_digits
from ds_sparse.bench.markdown import Table
from ds_sparse.plan.committed import FILE, written
from ds_sparse.plan.proof import Compared, compared
from ds_sparse.plan.rates import Rates
from ds_sparse.plan.results import ATTENTION, BERT, TRAINING, Results, committed
from ds_sparse.plan.training import complete_rates

PAGE = Path(__file__).resolve().parent.parent / "docs" / "plan.md"

HEADING = ["model", "tokens", "attention", "measured, ms", "predicted, ms", "", "measured, GiB", "predicted, GiB", ""]


def table(rows: list[Compared]) -> str:
    """A line a step, and a sentence about all."""
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
    time, memory = (max(map(abs, errors)) for errors in zip(*((row.error, row.memory_error) for row in rows)))
    said = f"{len(rows)} steps. Times differ by at most {time:.1%}, memory by at most {memory:.1%}.".replace("%", " %")
    return f"{Table(HEADING, cells).in_markdown()}\n\n{said}"


def sources(results: Results) -> str:
    """Where the figures are from."""
    named = {name: source for source in results.sources for name in [source.partition(":")[0]]}
    lists = [", ".join(f"`{name}`" for name in names) for names in (ATTENTION, BERT, (TRAINING,))]
    commits = sorted({source.partition("commit ")[2] for source in named.values()})
    return (
        f"{results.machine}, results in `ds_sparse/bench/results`, commits {'; '.join(commits)}. Attention's rates: "
        f"{lists[0]}. The model's, and measured steps: {lists[1]}. Training: {lists[2]}."
    )


def with_table(page: str, results: Results, rates: Rates) -> str:
    made = f"<!-- measured -->\n\n{table(list(compared(results, rates)))}\n\n{sources(results)}\n\n<!-- end -->"
    return re.sub(r"<!-- measured -->\n.*?<!-- end -->", lambda _: made, page, flags=re.DOTALL)


def main() -> None:
    results = committed()
    rates = complete_rates(results)
    FILE.write_text(written(rates))
    PAGE.write_text(with_table(PAGE.read_text(), results, rates))


if __name__ == "__main__":
    main()
