"""The table of docs/what-it-gives-you.md: what was said in 2020, and what committed runs measured."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from benchmarks.models.attentions import DENSE_IN_BERT, EAGER, LONGFORMER_MODEL, OURS, STRUCTURES_IN_BERT
from benchmarks.models.results import Longest, longest_of, over
from benchmarks.train import results as train_results
from ds_sparse.bench import markdown

from .tables import RESULTS, TRAINING, results_of, trained

LENGTHS, ALL_LOGITS = ("bert-lengths-h200",), ("bert-h200", "bert-long-h200")
LONGEST = ("bert-longest-h200", "bert-longest-checkpointed-h200")
LARGE_LONGEST = ("bert-large-longest-h100",)
"""A search that came to an end for dense attention, too."""
QUALITY, STRUCTURES, LONGER = ("train-quality-h100",), ("train-structures-h100",), ("train-quality-16k-h100",)
DNA, COPIES, DOCUMENTS = ("train-dna-h200",), ("train-copies-h200",), ("train-documents-h100",)
DOCUMENTS_IN_A_MINUTE, DOCUMENTS_FAR = ("train-documents-minute-h100",), ("train-documents-h200",)
RECALL = ("train-recall-h200",)
CONTINUED, CONTINUED_LONGER = ("train-continued-h200",), ("train-continued-16k-h200",)
DECODER, ENCODER = ("train-decoder-h200",), ("train-encoder-h200",)
MODERNBERT = "modernbert-h200"


def best(runs: Iterable[str], peer: str) -> str:
    """How many times as long a peer takes as a structure: the largest of some runs, where, and dense attention's."""
    found = [
        (times, row.attention, case.seq_len, over(rows, DENSE_IN_BERT, row))
        for case, rows in results_of(runs)
        for row in rows
        if row.attention in STRUCTURES_IN_BERT and (times := over(rows, peer, row)) is not None
    ]
    times, structure, seq_len, dense = max(found)
    beside = "" if peer == DENSE_IN_BERT or dense is None else f" (SDPA takes {markdown.ratio(dense)} times as long)"
    return f"{markdown.ratio(times)} times, `{structure}` at {seq_len:,} tokens{beside}"


def longest_gain(runs: Iterable[str], peer: str) -> str:
    """How many times as long as a peer's the longest sequence of ours is, and what is known of dense attention's."""
    by_way: dict[bool, dict[str, Longest]] = {}
    for one in longest_of(results_of(runs)):
        by_way.setdefault(one.case.checkpointed, {})[one.row.attention] = one
    said = []
    for checkpointed, found in by_way.items():
        ours = max((one for name, one in found.items() if name in STRUCTURES_IN_BERT), key=lambda one: one.case.seq_len)
        times = markdown.ratio(ours.case.seq_len / found[peer].case.seq_len)
        way = "activations checkpointed" if checkpointed else "activations kept"
        dense = found[DENSE_IN_BERT]
        ended = "" if dense.is_known else ", where the search's time was over"
        said.append(f"{ours.at_least}{times} times, {ours.case.seq_len:,} tokens ({way}; SDPA: {dense.tokens}{ended})")
    return "; ".join(said)


def memory_gain() -> str:
    """Memory of a step over that of dense attention, at the longest sequence that both were tried at and fitted."""
    fitted = [(case.seq_len, row) for case, rows in results_of(LONGEST[:1]) for row in rows if not row.reason]
    dense_at = {length: row.peak_gib for length, row in fitted if row.attention == DENSE_IN_BERT}
    ours_at = {length: row.peak_gib for length, row in fitted if row.attention in STRUCTURES_IN_BERT}
    seq_len = max(dense_at.keys() & ours_at.keys())
    ours, dense = ours_at[seq_len], dense_at[seq_len]
    return f"{markdown.ratio(ours / dense)} times: {ours:.1f} GiB, SDPA {dense:.1f}, at {seq_len:,} tokens"


def training_gain() -> str:
    runs = json.loads((RESULTS / f"{TRAINING}.json").read_text())["runs"]
    dense = next(run for run in runs if run["density"] == 1)
    fastest = max(runs, key=lambda run: run["tokens_per_second"])
    times = markdown.ratio(fastest["tokens_per_second"] / dense["tokens_per_second"])
    return f"{times} times, {fastest['name'].partition(',')[0]} at {dense['seq_len']:,} tokens"


def packed_gain() -> str:
    ((case, rows),) = results_of([MODERNBERT])
    ms = {row.attention: row.milliseconds for row in rows}
    times = markdown.ratio(ms[DENSE_IN_BERT] / ms[OURS])
    return f"{times} times, rows of {case.seq_len:,} tokens"


def quality_gain() -> str:
    """By how much the held-out losses of structures are below that of dense attention of their length, and those of
    shorter dense attention below that of the longest."""
    said = []
    for case, arms in train_results.arms_by_case(trained(QUALITY)).items():
        lower = {arm.name: 100 - 100 * arm.over(train_results.dense_for(arm, arms)) for arm in arms}
        longest = max(arm.length for arm in arms)
        shorter = [f" (`{arm.name}`: {lower[arm.name]:.0f} %)" for arm in arms if arm.is_dense and arm.length < longest]
        sparse = [lower[arm.name] for arm in arms if not arm.is_dense]
        equal = "tokens" if case.tokens else "minutes"
        said.append(f"{min(sparse):.0f} to {max(sparse):.0f} % lower at equal {equal}{''.join(shorter)}")
    return "; ".join(said)


class Claim(NamedTuple):
    """A line of the table."""

    what: str
    then: str
    runs: Sequence[str]
    said: Callable[[], str]


CLAIMS = (
    Claim("longest sequence, over eager attention", "10 times", LONGEST, lambda: longest_gain(LONGEST, EAGER)),
    Claim(
        "longest sequence of BERT-large, over dense (SDPA)",
        "",
        LARGE_LONGEST,
        lambda: longest_gain(LARGE_LONGEST, DENSE_IN_BERT),
    ),
    Claim("memory of a step of BERT-base, over dense (SDPA)", "", LONGEST[:1], memory_gain),
    Claim("step of BERT-base, over dense (SDPA)", "up to 6.3 times faster", LENGTHS, lambda: best(LENGTHS, "sdpa")),
    Claim("the same, logits of all tokens", "", ALL_LOGITS, lambda: best(ALL_LOGITS, "sdpa")),
    Claim("training by DeepSpeed, over dense (SDPA)", "", [TRAINING], training_gain),
    Claim("step of ModernBERT on packed documents, over SDPA", "", [MODERNBERT], packed_gain),
    Claim("step of BERT-base, over Longformer", "1.5 times faster", LENGTHS, lambda: best(LENGTHS, LONGFORMER_MODEL)),
    Claim("held-out loss, beside dense of the same length", "as good", QUALITY, quality_gain),
)


def claims() -> str:
    """The table of what was said in 2020 and what runs measured."""
    lines = [
        [claim.what, claim.then, claim.said(), machines(claim.runs), ", ".join(f"`{name}`" for name in claim.runs)]
        for claim in CLAIMS
    ]
    return markdown.Table(["what", "said in 2020, on V100", "here", "GPU", "run"], lines).in_markdown()


def machines(runs: Sequence[str]) -> str:
    found = dict.fromkeys(json.loads((RESULTS / f"{name}.json").read_text())["machine"] for name in runs)
    return ", ".join(name.removeprefix("NVIDIA ") for name in found)
