"""Recall by distance, from runs of `python -m benchmarks train --experiment recall`, and why it is as it is."""

from collections.abc import Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.train import recall
from benchmarks.train import results as train_results
from benchmarks.train.recall_texts import distances_of
from benchmarks.train.results import CAUSAL, MODELS, Arm, Case
from ds_sparse.bench import markdown
from ds_sparse.config import parse_sparse_attention
from ds_sparse.plan.reach import reach_of
from ds_sparse.sparsity import ChosenSparsityConfig

from .axes import OURS, PLAIN, TEXT, THEIRS, legend_below, several_axes
from .tables import trained

CONNECTED = 0.9
"""Least share of the blocks at a distance that a way connects."""


def draw_recall(runs: Sequence[str], hops: Sequence[int] = (), sides: Sequence[bool] = (False, True)) -> Figure:
    """Percent of values that were told against distance, of all seeds, and as a band from the seed that told least to
    the one that told most.

    Args:
        hops: a row for each of these numbers; by itself for all.
        sides: a column for tokens that see both ways (False), and for causal ones (True).
    """
    ((_, arms),) = train_results.arms_by_case(trained(runs)).items()
    told = {arm.name: train_results.accuracies(arm) for arm in arms}
    kinds = sorted(hops or {of for of_arm in told.values() for of, _ in of_arm})
    # THEIRS goes on with one that is near to one of OURS.
    colour_of = dict(zip(dict.fromkeys(map(label_of, arms)), (*OURS, *THEIRS[:4], PLAIN), strict=False))
    figure, plots = several_axes(len(sides), [2.2] * len(kinds))
    for kind, row in zip(kinds, plots, strict=True):
        for plot, is_causal in zip(row, sides, strict=True):
            for arm in (arm for arm in arms if arm.is_causal == is_causal):
                points = [(at, 100 * part) for (of, at), part in told[arm.name].items() if of == kind]
                places = [at for at, _ in points]
                by_seed = [[100 * of_seed[kind, at] for at in places] for of_seed in seeds_told(arm)]
                name = label_of(arm)
                # Others lie on dense attention's line.
                width = 5 if arm.is_dense else 1.5
                plot.plot(*zip(*points), marker="o", markersize=3, linewidth=width, color=colour_of[name], label=name)
                least, most = ([end(parts) for parts in zip(*by_seed)] for end in (min, max))
                plot.fill_between(places, least, most, color=colour_of[name], alpha=0.2, linewidth=0)
            plot.set_xscale("log", base=2)
            plot.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            plot.tick_params(axis="x", labelsize=8)
            plot.set_ylim(-3, 103)
            plot.set_title(
                ", ".join([train_results.asked_in_words(kind), *["causal"] * is_causal]), color=TEXT, fontsize=9
            )
        row[0].set_ylabel("percent told", color=TEXT)
    for plot in plots[-1]:
        plot.set_xlabel("distance, tokens", color=TEXT)
    legend_below(figure)
    return figure


def seeds_told(arm: Arm) -> list[dict[tuple[int, int], float]]:
    return [train_results.accuracies(Arm(arm.name, {seed: row})) for seed, row in arm.by_seed.items()]


def label_of(arm: Arm) -> str:
    return arm.name.removeprefix(CAUSAL)


def recall_tables(runs: Sequence[str]) -> str:
    """Tables of losses and by distance, and the way that there is."""
    results = trained(runs)
    tables = [
        *train_results.tables_of(results).values(),
        *(ways_table(case) for case in train_results.arms_by_case(results)),
    ]
    return "\n\n".join(table.in_markdown() for table in tables)


def ways_table(case: Case) -> markdown.Table:
    """A line a static structure: the fewest layers that connect tokens at a distance, and how wide the way is."""
    length, layers = case.document_tokens, MODELS[case.model]["num_hidden_layers"]
    lines, distances = [], distances_of(length)
    for kind, block in recall.blocks_of(case).items():
        structures = [parse_sparse_attention(recall.of_layer(block, layer), 1) for layer in range(layers) if block]
        if not structures or isinstance(structures[0], ChosenSparsityConfig):
            continue
        layouts, size = [structure.make_bool_layout(length) for structure in structures], structures[0].block
        seen = [layout[0].float() for layout in layouts]
        distances = [distance for distance in distances if distance >= size]
        between = reach_of(layouts[-1], size).between
        least = [fewest_layers(seen, pairs_at(distance, size, len(seen[0]))) for distance in distances]
        keys = seen[0].sum(1).mean().item() * size
        lines.append([f"`{kind}`", f"{keys:,.0f}", f"{between:,.1f}", *(str(number or "") for number in least)])
    note = (
        f"of {length:,} tokens: keys that a token sees, the mean; blocks between two far ones, in two layers; the "
        f"fewest of {layers} layers that connect {100 * CONNECTED:.0f} % of blocks at a distance"
    )
    return markdown.Table(["structure", "keys", "between", *(f"{at:,}" for at in distances)], lines, notes=[note])


def pairs_at(distance: int, block: int, blocks: int) -> Tensor:
    """bool (blocks, blocks): rows and columns before them, from a distance in tokens to below twice that."""
    place = torch.arange(blocks)
    far = place[:, None] - place
    return (far >= distance // block) & (far < 2 * distance // block)


def fewest_layers(seen: Sequence[Tensor], pairs: Tensor) -> int | None:
    """How many of the last layers bring what columns know to rows; None where all of them do not.

    Args:
        seen: (blocks, blocks) of each layer, 1 where a row sees a column.
    """
    reached = torch.eye(len(pairs))
    for number, of_layer in enumerate(reversed(seen), 1):
        reached = (reached @ of_layer).clamp(max=1)
        if reached[pairs].mean() >= CONNECTED:
            return number
    return None
