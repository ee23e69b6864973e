"""Jobs of `python -m benchmarks train`, what each gave, and their tables. Reading them takes no Transformers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from benchmarks.running import in_columns, without_empty_columns
from ds_sparse.bench.markdown import Table

Kind = TypeVar("Kind")

TINY, NARROW, SMALL, BASE = "tiny", "narrow", "small", "base"

MODELS: dict[str, dict[str, int]] = {
    TINY: {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512},
    NARROW: {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512},
    SMALL: {"num_hidden_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048},
    BASE: {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
}
"""Sizes, by the names of `BertConfig`."""

LEARNING_RATES = {TINY: 2e-3, NARROW: 2e-3, SMALL: 4e-4, BASE: 2e-4}
"""Highest rates of AdamW, about 0.2 over the hidden size: a step of Adam changes each weight by as much as the rate,
and a sum over the hidden size so many times. What is too high makes the vectors of all tokens one before a model has
learned more than the frequencies of tokens."""

CONTINUED = "continued"

DOCUMENT_TOKENS = {
    "quality": 4096,
    "dna": 65536,
    "copies": 65536,
    "documents": 16384,
    "decoder": 8192,
    "encoder": 4096,
    "recall": 65536,
    CONTINUED: 16384,
}
"""Experiments, a module of this package each, with what `Case.document_tokens` is by itself."""

GENOMIC = "dna", "copies"
"""Experiments that read genomes."""

BASE_ARM = "base-"
"""Beginning of the name of the arm that others go on from."""

SHORT, QUICK_SHORT = 512, 64
"""Tokens of the dense sequences that longer ones are compared with, or are continued from."""


@dataclass(frozen=True)
class Case:
    """A job: one arm with one seed, trained for so many minutes of steps, or tokens; the other is 0.

    Attributes:
        model: of `MODELS`.
        dtype: what products are computed in; weights are fp32.
        quick: less data, and shorter documents.
        tokens_per_step: of all sequences of a step together.
        document_tokens: tokens of the pieces of documents that are trained on; the longest sequence.
        genomes: the folder that those of `GENOMIC` are in; "" for installed ones.
        base: how many times as long as an arm the base is trained that arms go on from; 0 without one.
    """

    experiment: str
    model: str
    dtype: str
    device: str
    quick: bool
    tokens_per_step: int
    learning_rate: float
    document_tokens: int
    genomes: str = ""
    base: float = 0.0
    arm: str = ""
    seed: int = 0
    minutes: float = 0.0
    tokens: int = 0

    @property
    def shared(self) -> Case:
        """The settings that all jobs of a folder share."""
        return replace(self, arm="", seed=0, minutes=0.0, tokens=0)

    @property
    def budget(self) -> str:
        return f"{self.tokens:,} tokens" if self.tokens else f"{self.minutes:g} minute{'s' * (self.minutes != 1)}"

    @property
    def is_base(self) -> bool:
        return self.base > 0 and self.arm.startswith(BASE_ARM)

    @property
    def times(self) -> float:
        """Times the budget that the job is trained for."""
        return self.base if self.is_base else 1.0

    @property
    def job(self) -> str:
        times = f"{self.base:g} times " if self.is_base else ""
        return f"{self.arm}, seed {self.seed}, {times}{self.budget}"

    @property
    def file(self) -> str:
        """Name of its files."""
        budget = f"{self.tokens}-tokens" if self.tokens else f"{self.minutes:g}-minutes"
        return f"{self.arm}-seed{self.seed}-{budget}"

    def settings(self) -> str:
        kind = {"decoder": "decoder", "recall": "recall", CONTINUED: "decoder"}.get(self.experiment, "BERT")
        return (
            f"{kind}-{self.model}, {self.dtype}, {self.tokens_per_step:,} tokens a step, documents of "
            f"{self.document_tokens:,} tokens"
        )


def short_of(case: Case) -> int:
    return QUICK_SHORT if case.quick else SHORT


DENSE, CAUSAL = "dense", "causal-"
"""Beginning of names of arms with dense attention, and of those whose tokens see none after them, before that; all
names end with the length of their sequences."""

LEAST_GAIN = 0.05
"""Minimum relative gain on the unigram cross-entropy to count as trained. Models that learned nothing but frequencies
came to 1 %, the first that learned more to 23 %."""


@dataclass(frozen=True)
class Point:
    """The held-out loss after so much training.

    Attributes:
        asked: what the loss is of, which differs between the phases of an arm; "" in runs that do not say it.
    """

    seconds: float
    tokens: int
    held_out: float
    asked: str = ""


@dataclass(frozen=True)
class Answered:
    """How many values, or packages of files, of a kind were asked for, and how many a trained model told.

    Attributes:
        hops: names from the question to the value; 0 is the passkey.
        distance: the least of those from each to the next, which are below twice that; of a file its tokens, likewise.
        shown: what of a file; "" of `recall`.
    """

    hops: int
    distance: int
    asked: int
    right: int
    shown: str = ""


@dataclass(frozen=True)
class Row:
    """Result of a job; numbers are None where it gave none, and `reason` says why.

    Attributes:
        milliseconds: of a training step, the mean of all.
        held_out: the held-out loss at the end, nats.
        unigram: the same of what knows nothing but the frequencies of labels in training.
        curve: on the way there; seconds are those of training steps alone, without what is compiled before the first,
            and without evaluation.
        wall_seconds: with all of that, of each process that trained it.
        measures: what else the experiment says of the trained model.
        weights: SHA-256 of the trained weights.
        commits: of ds_sparse, in the order in which they trained it.
        answered: by hops and distance, of `recall`; of `documents` by what is shown of files, and by their tokens.
        data: what it learned from, where the experiment says it.
    """

    milliseconds: float | None = None
    held_out: float | None = None
    unigram: float | None = None
    curve: list[Point] = field(default_factory=list)
    wall_seconds: float = 0.0
    tokens_per_second: float | None = None
    measures: dict[str, float] = field(default_factory=dict)
    parameters: int = 0
    weights: str = ""
    machine: str = ""
    commits: list[str] = field(default_factory=list)
    date: str = ""
    reason: str = ""
    answered: list[Answered] = field(default_factory=list)
    data: str = ""

    @property
    def lowest(self) -> float:
        """The lowest held-out loss of the last phase."""
        return min(point.held_out for point in self.curve if point.asked == self.curve[-1].asked)

    @property
    def warning(self) -> str:
        """The reason why there is nothing to compare; "" where there is. A loss that rose again is compared: so it does
        on sequences longer than those of training."""
        if self.reason or self.lowest < (1 - LEAST_GAIN) * self.unigram:
            return ""
        return (
            f"this job did not leave the unigram cross-entropy of {self.unigram:.4f}: its comparison says nothing; "
            "train it for longer, or with another --learning-rate"
        )


Result = tuple[Case, list[Row]]
"""A job, trained: it has one row."""


@dataclass(frozen=True)
class Arm:
    """The rows of an arm by seed, for one budget."""

    name: str
    by_seed: Mapping[int, Row]

    @property
    def rows(self) -> list[Row]:
        return list(self.by_seed.values())

    @property
    def is_dense(self) -> bool:
        return self.name.removeprefix(CAUSAL).startswith(f"{DENSE}-")

    @property
    def is_causal(self) -> bool:
        return self.name.startswith(CAUSAL)

    @property
    def length(self) -> int:
        """Tokens of its sequences."""
        return int(self.name.rpartition("-")[2])

    @property
    def held_out(self) -> float:
        return statistics.mean(row.held_out for row in self.rows)

    def over(self, other: Arm | None) -> float | None:
        """The held-out loss over another arm's, of the seeds that both have; None without any."""
        seeds = self.by_seed.keys() & other.by_seed.keys() if other else ()
        if not seeds:
            return None
        ours, theirs = (sum(arm.by_seed[seed].held_out for seed in seeds) for arm in (self, other))
        return ours / theirs

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds."""
        return statistics.stdev(row.held_out for row in self.rows) if len(self.rows) > 1 else None

    @property
    def first(self) -> Arm:
        """With its first seed alone."""
        return Arm(self.name, dict([*self.by_seed.items()][:1]))

    @property
    def tokens_per_second(self) -> float:
        return statistics.mean(row.tokens_per_second for row in self.rows)

    @property
    def tokens(self) -> int:
        return round(statistics.mean(row.curve[-1].tokens for row in self.rows))

    @property
    def seconds(self) -> float:
        return statistics.mean(row.curve[-1].seconds for row in self.rows)

    @property
    def measures(self) -> dict[str, float]:
        return {name: statistics.mean(row.measures[name] for row in self.rows) for name in self.rows[0].measures}


def arms_by_case(results: Iterable[Result]) -> dict[Case, list[Arm]]:
    """Arms that can be compared: jobs that differ in arm and seed alone."""
    groups: dict[Case, dict[str, dict[int, Row]]] = {}
    for case, (row,) in results:
        if not row.reason:
            groups.setdefault(replace(case, arm="", seed=0), {}).setdefault(case.arm, {})[case.seed] = row
    return {case: [Arm(name, rows) for name, rows in arms.items()] for case, arms in groups.items()}


def dense_for(arm: Arm, arms: Sequence[Arm]) -> Arm | None:
    """The arm to compare with: for a structure dense attention at its length, for all else that at the greatest
    there is."""
    dense = [other for other in arms if other.is_dense and other.is_causal == arm.is_causal]
    same = [other for other in dense if other.length == arm.length and not arm.is_dense]
    return same[0] if same else max(dense, key=lambda other: other.length, default=None)


def asked_in_words(hops: int) -> str:
    return f"{hops} hop{'s' * (hops != 1)}" if hops else "passkey"


def shares(rows: Iterable[Row], kind_of: Callable[[Answered], Kind]) -> dict[Kind, float]:
    """The part of what was asked for that was told, by kind."""
    counts: dict[Kind, list[int]] = {}
    for one in (one for row in rows for one in row.answered):
        of_kind = counts.setdefault(kind_of(one), [0, 0])
        of_kind[0] += one.right
        of_kind[1] += one.asked
    return {kind: right / asked for kind, (right, asked) in counts.items()}


def accuracies(arm: Arm) -> dict[tuple[int, int], float]:
    """The part of what is asked for that an arm's seeds told, by hops and distance."""
    return dict(sorted(shares(arm.rows, lambda one: (one.hops, one.distance)).items()))


def distance_tables(case: Case, arms: Sequence[Arm]) -> dict[str, Table]:
    """A table for each number of hops: a line an arm, a column a distance, percent of the values that were told."""
    found = {arm.name: accuracies(arm) for arm in arms}
    kinds = sorted({kind for of_arm in found.values() for kind in of_arm})
    tables: dict[str, Table] = {}
    for hops in dict.fromkeys(hops for hops, _ in kinds):
        distances = [distance for of, distance in kinds if of == hops]
        lines = [
            [
                f"`{name}`",
                *(f"{100 * of_arm[key]:.0f}" if (key := (hops, distance)) in of_arm else "" for distance in distances),
            ]
            for name, of_arm in found.items()
        ]
        asked = asked_in_words(hops)
        note = f"{asked}: percent of values told, by distance, from so many tokens to below twice as many"
        tables[f"{case.experiment}, {case.budget}, {asked}"] = Table(
            ["arm", *(f"{distance:,}" for distance in distances)], lines, notes=[note]
        )
    return tables


def percents_shown(arm: Arm) -> dict[str, dict[int, float]]:
    """Percent of files whose package an arm names, by what of them is shown, and by seed."""
    by_seed = {seed: shares([row], lambda one: one.shown) for seed, row in arm.by_seed.items()}
    shown = dict.fromkeys(name for of_seed in by_seed.values() for name in of_seed)
    return {name: {seed: 100 * of_seed[name] for seed, of_seed in by_seed.items()} for name in shown}


def with_spread(numbers: Collection[float], sign: str = "") -> str:
    """Their mean and standard deviation."""
    spread = f" ± {statistics.stdev(numbers):.1f}" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):{sign}.1f}{spread}"


def shown_tables(case: Case, arms: Sequence[Arm]) -> dict[str, Table]:
    """A line an arm: percent of files whose package it names, by what of them is shown, and how many points more that
    is, of whole files, than the shortest dense arm names with the same seeds."""
    found = {arm.name: percents_shown(arm) for arm in arms}
    shown = list(next(iter(found.values())))
    short = min((arm for arm in arms if arm.is_dense), key=lambda arm: arm.length, default=None)
    least = found[short.name][shown[0]] if short else {}
    lines = []
    for arm in arms:
        whole, *others = (found[arm.name][name] for name in shown)
        over = [whole[seed] - least[seed] for seed in whole if seed in least] if arm is not short else []
        numbers = (with_spread(list(one.values())) for one in (whole, *others))
        lines.append([f"`{arm.name}`", str(len(whole)), *numbers, with_spread(over, "+") if over else ""])
    of_whole = [one for one in arms[0].rows[0].answered if one.shown == shown[0]]
    files = ", ".join(f"{one.asked} of {one.distance:,}" for one in of_whole)
    compared = f", and points over {short.name}" if short and any(line[-1] for line in lines) else ""
    note = (
        f"percent of {sum(one.asked for one in of_whole)} held-out files whose package is named, by what of them is "
        f"shown{compared}; files by tokens, to below twice as many, or cut there: {files}"
    )
    heading = ["arm", "seeds", *shown, "points"]
    return {f"{case.experiment}, {case.budget}, shown": Table(heading, lines, notes=[note])}


def answered_tables(case: Case, arms: Sequence[Arm]) -> dict[str, Table]:
    """Tables of what was told, of arms that say it."""
    of_files = [arm for arm in arms if any(one.shown for row in arm.rows for one in row.answered)]
    return shown_tables(case, of_files) if of_files else distance_tables(case, arms)


BY_COPY, WITHOUT_COPY = "copied_", "copied_none"
"""The beginning of measures by the distance of a copy, and that of what has none."""

LOSSES = {
    "place_": "held-out loss by place in the document, from so many tokens on to the next column's",
    "name_": "held-out loss of names, the sum over their tokens, by how many tokens ago they were seen, likewise; new: "
    "not in the document before",
    BY_COPY: "part of masked bases that is named, by how far away the same bases stand, likewise; none: not copied",
}
"""Beginnings of measures that have a table of their own, and what it says."""

FAR = "name_far"


def decision(case: Case) -> str:
    """What decides whether a structure is worth it; "" where nothing was named."""
    if case.experiment != CONTINUED:
        return ""
    short = short_of(case)
    return (
        f"A structure is worth it if its loss of names that were last seen {short} tokens ago or more (far) is lower "
        f"than that of {DENSE}-{short}, which goes on at {short}, after the same budget from the same base, by more "
        "than the standard deviation of the difference over seeds."
    )


def loss_tables(case: Case, arms: Sequence[Arm]) -> dict[str, Table]:
    """A table for each of `LOSSES` that was measured, a line an arm; that of names says what is decided."""
    tables: dict[str, Table] = {}
    for first, note in LOSSES.items():
        names = dict.fromkeys(name for arm in arms for name in arm.measures if name.startswith(first))
        if not names:
            continue
        words = [name.removeprefix(first) for name in names]
        heading = ["arm", *(f"{int(word):,}" if word.isdecimal() else word for word in words)]
        lines = [[f"`{arm.name}`", *(f"{arm.measures[name]:.4f}" for name in names)] for arm in arms]
        notes, short = [note], goes_on_short(case, arms)
        if FAR in names and short:
            notes.append(decision(case))
            heading += [f"over {short.name}", "worth it"]
            lines = [[*line, *verdict(more_loss(arm, short, FAR))] for line, arm in zip(lines, arms, strict=True)]
        tables[f"{case.experiment}, {case.budget}, {first[:-1]}"] = Table(heading, lines, notes=notes)
    return tables


def goes_on_short(case: Case, arms: Iterable[Arm]) -> Arm | None:
    """The arm that others have to be better than, where a decision was named."""
    name = f"{DENSE}-{short_of(case)}"
    return next((arm for arm in arms if arm.name == name), None) if decision(case) else None


def more_loss(arm: Arm, other: Arm, measure: str) -> list[float]:
    """By how much an arm's loss is above another's, of each seed that both have."""
    seeds = sorted(arm.by_seed.keys() & other.by_seed.keys())
    return [arm.by_seed[seed].measures[measure] - other.by_seed[seed].measures[measure] for seed in seeds]


def verdict(more: Sequence[float]) -> tuple[str, str]:
    """Cells of the difference over seeds, and whether it decides."""
    if len(more) < 2 or not any(more):
        return "".join(f"{one:+.4f}" for one in more if one), "one seed" if any(more) else ""
    mean, spread = statistics.mean(more), statistics.stdev(more)
    return f"{mean:+.4f} ± {spread:.4f}", "yes" if mean < -spread else "no"


OF_ALL = 7
"""Columns of the table that all experiments have."""


def report(results: Iterable[Result]) -> Iterator[Iterable[str]]:
    """Lines to print: one a job, as they come, and a table of what can be compared at the end."""
    seen = []
    for case, (row,) in results:
        seen.append((case, [row]))
        yield [line_of(case, row)]
    for case, arms in arms_by_case(seen).items():
        table = table_of(case, arms)
        stayed = {arm.name: sum(bool(row.warning) for row in arm.rows) for arm in arms}
        warnings = (
            f"{arm.name}: {stayed[arm.name]} of {len(arm.rows)} jobs did not leave the unigram cross-entropy"
            for arm in arms
            if stayed[arm.name]
        )
        measures = (
            f"{name}: {', '.join(f'{row[0]} {row[place]}' for row in table.rows if row[place])}"
            for place, name in enumerate(table.heading[OF_ALL:], OF_ALL)
        )
        short = Table(table.heading[:OF_ALL], [row[:OF_ALL] for row in table.rows])
        yield [*table.notes, *in_columns(without_empty_columns(short)), *measures, *warnings]
        for more in (answered_tables(case, arms) | loss_tables(case, arms)).values():
            yield [*more.notes, *in_columns(without_empty_columns(more))]


def line_of(case: Case, row: Row) -> str:
    if row.reason:
        return f"{case.job}: {row.reason}"
    last = row.curve[-1]
    return (
        f"{case.job}: held-out loss {row.held_out:.4f} after {last.seconds:.1f} s and {last.tokens:,} tokens, "
        f"{row.milliseconds:.1f} ms a step{''.join(f', {name} {value:.4g}' for name, value in row.measures.items())}"
        f"{row.warning and f'; {row.warning}'}"
    )


def tables_of(results: list[Result]) -> dict[str, Table]:
    """A table for each budget, and those of what was told."""
    tables: dict[str, Table] = {}
    for case, arms in arms_by_case(results).items():
        tables |= {f"{case.experiment}, {case.budget}": table_of(case, arms)}
        tables |= answered_tables(case, arms) | loss_tables(case, arms)
    return {name: without_empty_columns(table) for name, table in tables.items()}


def table_of(case: Case, arms: Sequence[Arm]) -> Table:
    """A line an arm: its held-out loss, the mean over its seeds, over that of dense attention with the same ones, and
    what else was measured."""
    measured = dict.fromkeys(name for arm in arms for name in arm.measures)
    measures = [name for name in measured if not name.startswith(tuple(LOSSES))]
    lines = []
    for arm in arms:
        over = arm.over(dense_for(arm, arms))
        # Later seeds of recall are run for what they tell: processes shared the GPU.
        timed = arm.first if case.experiment == "recall" else arm
        lines.append(
            [
                f"`{arm.name}`",
                str(len(arm.rows)),
                f"{arm.held_out:.4f}" + ("" if arm.spread is None else f" ± {arm.spread:.4f}"),
                "" if over is None else f"{over:.3f}",
                f"{timed.seconds / 60:.2f}",
                f"{timed.tokens / 1e6:.1f}",
                f"{timed.tokens_per_second:,.0f}",
                *(f"{arm.measures[name]:.4g}" if name in arm.measures else "" for name in measures),
            ]
        )
    heading = ["arm", "seeds", "held-out loss", "of dense", "minutes", "million tokens", "tokens/s"]
    base = f", {case.base:g} times as much for the base" if case.base else ""
    about = f"{case.experiment}, {case.budget} an arm{base}, {case.settings()}"
    if case.experiment == "recall":
        about += "; minutes and tokens/s are the first seed's"
    data = dict.fromkeys(row.data for arm in arms for row in arm.rows if row.data)
    return Table([*heading, *(name.replace("_", " ") for name in measures)], lines, notes=[about, *data])
