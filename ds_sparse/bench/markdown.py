"""Results of `ds_sparse bench` as tables for a page, in GitHub's Markdown.

Times are milliseconds. What another takes is how many times as long as ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Any

from . import attention, matmul, packed, tokens, window
from .machine import BACKWARD, DIRECTIONS, FORWARD, TRAIN, in_three_digits
from .operations import Row, find
from .packed_peers import ALWAYS, PADDED
from .peers import DENSE, OURS
from .runs import Run

STEPS = (tokens.OURS, tokens.TORCH_SPARSE, tokens.SDPA, tokens.FLEX, "C++ loop")
"""What a table of token pairs has a column of, as far as it was measured."""

SHAPE = "B, H, T, D"
"""A column that is left out where all rows have the same."""

Pair = tuple[float | None, ...]
"""A number for each direction; None where there is none."""


@dataclass(frozen=True)
class Table:
    """Attributes:
    ways: what numbers with a slash between them are of.
    notes: sentences of numbers of the whole table.
    """

    heading: Sequence[str]
    rows: list[list[str]]
    ways: Sequence[str] = ()
    notes: list[str] = field(default_factory=list)

    def in_markdown(self) -> str:
        shapes = {row[self.heading.index(SHAPE)] for row in self.rows} if SHAPE in self.heading else set()
        shown = [name != SHAPE or len(shapes) > 1 or len(self.rows) == 1 for name in self.heading]
        lines = [list(compress(row, shown)) for row in (self.heading, ["---"] * len(self.heading), *self.rows)]
        table = "\n".join("".join(f"| {cell} ".replace("  ", " ") for cell in cells) + "|" for cells in lines)
        ways = [f"Numbers with a slash are {' / '.join(self.ways)}."] if self.ways else []
        if not all(shown):
            ways = [" ".join([*ways, f"{SHAPE} are {shapes.pop()}."])]
        notes = ["\n".join(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n\n".join([table, *ways, *notes])


def sources(runs: Sequence[Run], links: Sequence[str] = ()) -> str:
    """Where and when runs were measured, a line each place, with their commands; links come after these."""
    commands: dict[str, list[str]] = {}
    for run, link in zip(runs, links or [""] * len(runs)):
        about = run.conditions
        driver = f", driver {about['driver']}" if "driver" in about else ""
        where = f"{about['machine']}{driver}, torch {about['torch']}, commit {about['commit']}, {about['date']}"
        where += f" ({about['note']})" if "note" in about else ""
        printed = f" ([printed]({link}))" if link else ""
        commands.setdefault(where, []).append(f"`{run.command}`{printed}")
    return "\n\n".join(f"{where}: {', '.join(said)}" for where, said in commands.items())


def pair(numbers: Iterable[float | None], write: Callable[[float], str] = in_three_digits) -> str:
    """`0.32 / 0.98`; nothing where there is no number at all."""
    texts = ["-" if number is None else write(number) for number in numbers]
    return " / ".join(texts) if set(texts) != {"-"} else ""


def ratio(number: float) -> str:
    return f"{number:.2f}" if number < 1.995 else f"{number:.1f}" if number < 9.95 else f"{number:.0f}"


def percent(part: float) -> str:
    return f"{part:.1%}".replace("%", " %") if part < 0.0995 else f"{part:.0%}".replace("%", " %")


def span(ratios: Iterable[float | None]) -> str:
    """`1.2 to 9.5`; nothing where there is none."""
    known = [number for number in ratios if number is not None]
    if not known:
        return ""
    ends = ratio(min(known)), ratio(max(known))
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def spans(who: str, ours: str, pairs: Sequence[Pair], directions: Sequence[str]) -> Iterator[str]:
    """A sentence of all rows, which begins with who takes how many times as long as ours."""
    said = [f"{text} times as long {way}" for text, way in zip(map(span, zip(*pairs)), directions) if text]
    if said:
        yield f"{who} {', '.join(said)} as {ours}."


def milliseconds(rows: Iterable[Any]) -> Pair:
    return tuple(None if row is None else row.milliseconds for row in rows)


def over(theirs: Pair, ours: Pair) -> Pair:
    return tuple(x / y if x is not None and y is not None else None for x, y in zip(theirs, ours))


def tables(operation: str, options: Any, results: list[Any]) -> dict[str, Table]:
    """The tables of an operation's results, by name; `options` are those that they were measured with."""
    if operation == "attention" and options.break_even:
        return {"break-even": break_even(results, DENSE[options.device])}
    if operation == "attention" and options.growth:
        return {"growth": growth(results)}
    return {name: table for name, table in TABLES[operation](results).items() if table.rows}


def attention_cases(results: list[attention.Result]) -> Table:
    """A line a case: ours, and what each peer takes, forward / backward."""
    ways = (FORWARD, BACKWARD)
    peers = [name for name in dict.fromkeys(row.peer for result in results for row in result.rows) if name != OURS]
    ratios: dict[str, list[Pair]] = {peer: [] for peer in peers}
    lines = []
    for result in results:
        ours = [result.row(OURS, way) for way in ways]
        for peer in peers:
            ratios[peer].append(over(milliseconds(result.row(peer, way) for way in ways), milliseconds(ours)))
        case = result.case
        rates = pair((None if row is None else row.tflops for row in ours), lambda tflops: f"{tflops:.3g}")
        lines.append(
            [
                f"{case.structure}, block {case.block}, {percent(result.density)}",
                f"{case.batch}, {case.heads}, {case.seq_len}, {case.head_dim}{dtype_of(result.dtype, results)}",
                pair(milliseconds(ours)),
                rates,
                *(pair(ratios[peer][-1], ratio) for peer in peers),
            ]
        )
    heading = ["layout, density", SHAPE, "ms", "TFLOP/s", *(f"`{peer}` takes" for peer in peers)]
    notes = [line for peer in peers for line in spans(f"`{peer}` takes", f"`{OURS}`", ratios[peer], ways)]
    return Table(heading, lines, ways, notes)


def dtype_of(dtype: str, results: Iterable[Any]) -> str:
    """The dtype of a case, where others have another."""
    return f", {dtype}" if len({getattr(result, "dtype", None) for result in results}) > 1 else ""


def break_even(results: list[attention.Result], dense: str) -> Table:
    """A line a block size: from which density on the dense peer is as fast."""
    lines = []
    for block in sorted({result.case.block for result in results}):
        of_block = sorted((r for r in results if r.case.block == block), key=lambda result: result.density)
        lines.append([str(block), *(attention.crossing(of_block, dense, way) for way in DIRECTIONS)])
    return Table(["block", *(f"{way}, `{dense}` as fast at" for way in DIRECTIONS)], lines)


def growth(results: list[attention.Result]) -> Table:
    """A line a length: ours, and how many times as long as half of it takes."""
    lines, ratios = [], []
    for before, result in zip([None, *results], results):
        case, now = result.case, milliseconds(result.row(OURS, way) for way in DIRECTIONS)
        doubled = before is not None and attention.doubles(before.case, case)
        half = milliseconds(before.row(OURS, way) for way in DIRECTIONS) if doubled else (None,) * len(now)
        ratios.append(over(now, half))
        shape = f"{case.batch}, {case.heads}, {case.head_dim}"
        lines.append([f"{case.seq_len:,}", shape, pair(now), pair(ratios[-1], lambda number: f"{number:.2f}")])
    notes = list(spans("Twice the tokens take", "half of them", ratios, DIRECTIONS))
    return Table(["tokens", "B, H, D", "ms", "times those of half the tokens"], lines, DIRECTIONS, notes)


def of_matmul(results: list[matmul.Result]) -> dict[str, Table]:
    names = [name for name in matmul.DENSE if any(find(result.rows, name, FORWARD) for result in results)]
    products = [name for name in names if name != "attention"]
    found = {"operations": operations(results, products)} if products else {}
    if "attention" in names:
        layouts = [[*about(result, results), result.rows] for result in results]
        others = ["SDPA dense", "SDPA bool mask", "loop over block rows"]
        found["attention"] = beside(("layout, density", SHAPE), layouts, "attention", others)
    return found


def about(result: matmul.Result, results: list[matmul.Result]) -> list[Any]:
    case = result.case
    dtype = f", {case.dtype}" if len({result.case.dtype for result in results}) > 1 else ""
    shape = f"{case.batch}, {case.heads}, {case.seq_len}, {case.head_dim}"
    return [f"{case.layout}, block {case.block}, {percent(result.density)}{dtype}", shape]


def operations(results: list[matmul.Result], names: list[str]) -> Table:
    """A line a case: each operation, and the part of its floor that it reaches; notes on who else computes it."""
    ways = (FORWARD, BACKWARD)
    lines: list[list[str]] = []
    notes: list[str] = []
    for result in results:
        cells = [with_floor([find(result.rows, name, way) for way in ways]) for name in names]
        lines.append([*about(result, results), *cells])
    for name in names:
        for other in (matmul.DENSE[name], f"{matmul.BSR} {name}"):
            times = [[milliseconds(find(r.rows, who, way) for way in ways) for r in results] for who in (other, name)]
            notes += spans(f"`{other}` takes", f"`{name}`", [over(*both) for both in zip(*times)], ways)
    beside = " (of the floor)" if any(map(matmul.has_floors, results)) else ""
    return Table(["layout, density", SHAPE, *(f"`{name}`, ms{beside}" for name in names)], lines, ways, notes)


def with_floor(rows: list[Row | None]) -> str:
    """Times, and in brackets the parts of the floor that they reach."""
    parts = [None if row is None or not row.to_floor else 1 / row.to_floor for row in rows]
    reached = pair(parts, lambda part: f"{part:.0%}".removesuffix("%"))
    return pair(milliseconds(rows)) + (f" ({reached} %)" if reached else "")


def of_window(results: list[window.Result]) -> dict[str, Table]:
    several = len({case.dtype for case, _ in results}) > 1
    cases = [
        [
            f"{case.window}{f', {case.dtype}' if several else ''}",
            f"{case.batch}, {case.heads}, {case.seq_len}, {case.head_dim}",
            rows,
        ]
        for case, rows in results
    ]
    names = dict.fromkeys(row.name for _, rows in results for row in rows if row.dense == window.DENSE_ATTENTION)
    others = [name for name in names if name not in ("window_attention", "attention in parts")]
    start = ("window, each side", SHAPE)
    return {
        "attention": beside(start, cases, "window_attention", others, window.DIRECTIONS),
        "products": window_products(start, cases),
    }


def beside(
    start: Sequence[str], cases: list[list[Any]], ours: str, others: list[str], ways: Sequence[str] = (FORWARD, TRAIN)
) -> Table:
    """A line a case: the time of ours, and what others take. cases: cells, and at the end the rows."""
    lines = []
    ratios: dict[str, list[Pair]] = {other: [] for other in others}
    for *cells, rows in cases:
        mine = milliseconds(find(rows, ours, way) for way in ways)
        for other in others:
            ratios[other].append(over(milliseconds(find(rows, other, way) for way in ways), mine))
        lines.append([*cells, pair(mine), *(pair(ratios[other][-1], ratio) for other in others)])
    notes = [line for other in others for line in spans(f"{other} takes", f"`{ours}`", ratios[other], ways)]
    return Table([*start, f"`{ours}`, ms", *(f"{other} takes" for other in others)], lines, ways, notes)


def window_products(start: Sequence[str], cases: list[list[Any]]) -> Table:
    """A line a case: each product and the softmax, on a GPU the part of the floor; notes on dense ones."""
    names, ways = ("window_matmul", "unwindow_matmul", "window_softmax"), window.DIRECTIONS
    lines = []
    for *cells, rows in cases:
        lines.append([*cells, *(with_floor([find(rows, name, way) for way in ways]) for name in names)])
    notes: list[str] = []
    for name in names:
        found = [[find(rows, name, way) for way in ways] for *_, rows in cases]
        ratios = [tuple(None if row is None else 1 / row.to_dense for row in rows) for rows in found]
        dense = next((row.dense for rows in found for row in rows if row is not None), "")
        notes += spans(f"`{dense}` takes", f"`{name}`", ratios, ways)
    floors = any(row.to_floor for *_, rows in cases for row in rows)
    return Table(
        [*start, *(f"`{name}`, ms{' (of the floor)' if floors else ''}" for name in names)], lines, ways, notes
    )


def of_packed(results: list[packed.Result]) -> dict[str, Table]:
    return {"documents": packed_documents(results), "peers": packed_peers(results)}


def packed_start(result: packed.Result, results: list[packed.Result]) -> list[str]:
    case, about = result.case, result.about
    documents = f"{about.documents} of {packed.lengths_of(about)}"
    return [
        f"{packed.structure_of(case)}{dtype_of(about.dtype, [other.about for other in results])}",
        documents,
        f"{case.heads}, {case.tokens:,}, {case.head_dim}",
    ]


PACKED_START = ("structure", "documents, tokens", "H, T, D")


def packed_documents(results: list[packed.Result]) -> Table:
    """A line a case: ours, its rates over those without documents, tokens a second over those with padding, and what
    the index costs."""
    ways = packed.DIRECTIONS
    lines, reached, paddings = [], [], []
    for result in results:
        about, ours = result.about, [result.row(OURS, way) for way in ways]
        paddings.append(over(milliseconds(result.row(PADDED, way) for way in ways), milliseconds(ours)))
        reached.append(tuple(packed.of_left(result, way) for way in ways))
        rates = pair((None if row is None else row.of_unpacked for row in ours), lambda part: f"{part:.0%}")
        lines.append(
            [
                *packed_start(result, results),
                pair(milliseconds(ours)),
                pair((None if row is None else row.tokens_per_second for row in ours), in_millions),
                f"{about.batch} x {about.sequence:,}",
                rates.replace("%", " %"),
                "" if about.left is None else percent(about.left),
                pair(reached[-1], lambda part: f"{part:.0%}").replace("%", " %"),
                pair(paddings[-1], ratio),
                "" if about.index_ms is None else in_three_digits(about.index_ms),
            ]
        )
    heading = [
        *PACKED_START, "ms", "million tokens/s", "unpacked batch", "of its rate", "partial blocks leave",
        "of what they leave", "padded takes", "index, ms",
    ]  # fmt: skip
    notes = list(spans("The padded batch takes", "packed documents", paddings, ways))
    return Table(heading, lines, ways, notes)


def packed_peers(results: list[packed.Result]) -> Table:
    """A line a case: ours, and what each peer takes."""
    ways, ours_too = packed.DIRECTIONS, (*ALWAYS, PADDED)
    seen = dict.fromkeys(row.peer for result in results for row in result.rows if not row.reason)
    peers = [name for name in seen if name not in ours_too]
    ratios: dict[str, list[Pair]] = {peer: [] for peer in peers}
    lines = []
    for result in results:
        ours = milliseconds(result.row(OURS, way) for way in ways)
        for peer in peers:
            ratios[peer].append(over(milliseconds(result.row(peer, way) for way in ways), ours))
        lines.append([*packed_start(result, results), pair(ours), *(pair(ratios[peer][-1], ratio) for peer in peers)])
    notes = [line for peer in peers for line in spans(f"`{peer}` takes", f"`{OURS}`", ratios[peer], ways)]
    return Table([*PACKED_START, "ms", *(f"`{peer}` takes" for peer in peers)], lines, ways, notes)


def in_millions(number: float) -> str:
    return in_three_digits(number / 1e6)


def token_pairs(results: list[tokens.Result]) -> Table:
    """A line a case: ours and others, forward / forward and backward."""
    steps = [step for step in STEPS if any(result.row(step, FORWARD) for result in results)]
    several = {name for name in ("dtype", "pattern") if len({getattr(r.case, name) for r in results}) > 1}
    times = {step: [milliseconds(r.row(step, way) for way in tokens.DIRECTIONS) for r in results] for step in steps}
    lines = []
    for i, result in enumerate(results):
        case = result.case
        shape = f"{case.batch}, {case.heads}, {case.seq_len}, {case.head_dim}"
        also = "".join(f", {getattr(case, name)}" for name in sorted(several))
        lines.append(
            [f"{shape}{also}", percent(1 - result.pairs / case.seq_len**2), *(pair(times[s][i]) for s in steps)]
        )
    notes: list[str] = []
    for step in steps[1:] if tokens.OURS in steps else ():
        ratios = [over(*both) for both in zip(times[step], times[tokens.OURS])]
        notes += spans(f"`{step}` takes", f"`{tokens.OURS}`", ratios, tokens.DIRECTIONS)
    return Table([SHAPE, "sparsity", *(f"`{step}`, ms" for step in steps)], lines, tokens.DIRECTIONS, notes)


TABLES: dict[str, Callable[[list[Any]], dict[str, Table]]] = {
    "attention": lambda results: {"cases": attention_cases(results)},
    "matmul": of_matmul,
    "window": of_window,
    "packed": of_packed,
    "tokens": lambda results: {"pairs": token_pairs(list(chain.from_iterable(results)))},
}
"""Tables of results, by operation."""
