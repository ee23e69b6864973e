"""A plan as it is printed, and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from ..bench.machine import in_three_digits
from ..bench.runs import WIDTH
from ..tools.wording import counted, in_ranges, listed
from .advice import edits
from .limits import UNMEASURED
from .memory import GIB, MOST_TOKENS
from .plan import Plan
from .settings import Settings
from .untimed import Known, Untimed

UNCERTAIN = 0.05
"""Steps nearer to each other than this are not told apart: predictions of measured steps are off by as much."""


def lines_of(plan: Plan | Untimed, details: bool = False, width: int = WIDTH) -> Iterator[str]:
    """Yields what is printed, sentence by sentence and row by row; sentences that are too long are wrapped.

    Args:
        details: all numbers and assumptions, in the place of the main numbers.
        width: columns of a line.
    """
    if isinstance(plan, Untimed):
        lines = _untimed(plan)
    else:
        lines = chain(_verdict(plan), [""], _details(plan) if details else _main_numbers(plan))
    for line in lines:
        if len(line) <= width:
            yield line
        else:
            yield textwrap.fill(line, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def _verdict(plan: Plan) -> Iterator[str]:
    """Yields two sentences: whether it fits and what it gains, and what to do in its place."""
    yield f"{_fits(plan)}; {_gain(plan)}."
    if plan.memory_gib is not None and plan.advice is None:
        yield (
            f"best alternative: more than {_gpus(plan.settings)}, as it does not fit with activation checkpointing "
            f"either (with {plan.model.heads} heads at most as many can share a sequence); docs/a-million-tokens.md "
            "says what else there is."
        )
        return
    others = _alternatives(plan)
    if not others:
        yield "best alternative: not known; give a JSON with a sparse_attention block."
        return
    ours, (best, speed) = plan.tokens / plan.step.total * 1e3, max(others.items(), key=lambda other: other[1])
    if plan.fits is False or speed > (1 + UNCERTAIN) * ours:
        times = "" if plan.fits is False else f", {speed / ours:.2f} times as fast"
        yield f"best alternative: {best}; {speed:,.0f} tokens a second{times}."
    else:
        yield f"best alternative: none is faster; compared with {'; with '.join(others)}."


def _fits(plan: Known) -> str:
    needs = f"{plan.memory.total / GIB:.1f}"
    if plan.fits is None:
        return f"needs {needs} GiB (give the GPU's with --memory)"
    if plan.fits:
        return f"fits: {needs} of {plan.memory_gib:.3g} GiB"
    return f"does not fit: a step needs {needs} GiB, the GPU has {plan.memory_gib:.3g}, 5% of which is left free"


def _gain(plan: Plan) -> str:
    if plan.is_dense:
        return "it is dense"
    if abs(plan.gain - 1) < UNCERTAIN:
        return f"as fast as dense, as far as rates tell ({plan.gain:.2f} times)"
    if plan.gain > 1:
        return f"{plan.gain:.2f} times as fast as dense"
    return f"takes {1 / plan.gain:.2f} times as long as dense"


def _alternatives(plan: Plan) -> dict[str, float]:
    """Tokens a second of what else could be trained and fits, by name."""
    found = {}
    if plan.advice is not None and plan.advice.settings != plan.settings:
        found[edits(plan.settings, plan.advice.settings)] = plan.advice.tokens_per_second(plan.seq_len)
    if plan.fits is not False and not plan.is_dense:  # dense attention needs the same memory
        ranks = plan.settings.ranks
        if ranks == 1:
            found["dense attention, without the flag"] = plan.tokens / plan.dense_step.total * 1e3
        elif ranks <= plan.model.heads:  # without the block nothing shares a sequence
            found['"mode": "dense"'] = plan.tokens / plan.dense_step.total * 1e3
        if plan.null_step is not None:
            slow = ",".join(of.layers for of in plan.layers if of.is_faster_dense)
            found[f'null in "layers" for {slow}'] = plan.tokens / plan.null_step.total * 1e3
    return found


def _untimed(plan: Untimed) -> Iterator[str]:
    yield f"{_fits(plan)}; its speed is not known."
    yield ""
    yield f"{plan.file}: {_sizes(plan)}"
    yield f"{plan.why}."
    yield (
        f"{listed([f'{share:.1%}' for share in plan.shares], 'and')} of the scores are computed; a GPU computes "
        f"{plan.flops / 1e12:.1f} TFLOP a step, {plan.dense_flops / 1e12:.1f} if dense."
    )
    yield from _memory(plan)
    yield "memory of what learns to choose, and of the choices, is not counted."
    yield from _padding(plan).values()


def _main_numbers(plan: Plan) -> Iterator[str]:
    yield f"{plan.file}: {_sizes(plan)}; {plan.machine}"
    yield f"{'':24} {'sparse':>10} {'dense':>10}"
    sparse, dense = plan.step.total, plan.dense_step.total
    yield f"{'ms a step':24} {sparse:10.1f} {dense:10.1f}"
    yield f"{'ms of it in attention':24} {plan.step.attention:10.1f} {plan.dense_step.attention:10.1f}"
    yield _tokens_a_second(plan)
    kinds = "; ".join(f"{of.layers} {of.attention} ({of.density:.1%} of the scores)" for of in plan.layers)
    yield textwrap.shorten(f"layers {kinds}", WIDTH, placeholder=" ...")
    yield _longest(plan)
    if not plan.is_dense:
        yield f"{_recall(plan)}."
    if plan.dense_is_faster_to is not None and plan.gain >= 1:
        yield _dense_is_faster(plan)
    unmeasured = sum(remark.startswith(UNMEASURED) for remark in plan.remarks)
    more = [f"time lost to {listed(wasted, 'and')}"] if (wasted := _wasted(plan)) else []
    more += [f"{counted(unmeasured, 'thing')} not measured"] if unmeasured else []
    yield f"--details: {', '.join([*more, 'layers', 'other lengths', 'assumptions'])}. --json: numbers."


def _sizes(plan: Known) -> str:
    settings = plan.settings
    return (
        f"{plan.model.name}, {settings.micro_batch} x {plan.seq_len:,} tokens a pass"
        + (f", {settings.accumulation} passes a step" if settings.accumulation > 1 else "")
        + f", {_gpus(settings)}"
        + (f", {settings.ranks} to a sequence" if settings.ranks > 1 else "")
    )


def _details(plan: Plan) -> Iterator[str]:
    settings = plan.settings
    yield (
        f"{plan.file}: {_sizes(plan)}, {settings.dtype}, ZeRO {settings.zero_stage}, "
        f"{plan.model.parameters(plan.padded) / 1e6:,.0f} million parameters"
    )
    yield f"rates: {plan.machine}, from {_sources(plan.rates_from)}"
    yield ""
    yield from _layers(plan)
    yield ""
    yield from _time(plan)
    yield ""
    yield from _memory(plan)
    yield ""
    if len(plan.lengths) > 1:
        yield from _lengths(plan)
    yield from _wasted(plan).values()
    if not plan.is_dense:
        yield f"{_recall(plan)}: a rule of thumb (docs/structures.md#which-structure)."
    yield ""
    for remark in plan.remarks:
        yield f"- {remark}"
    fits = "; ".join(f"{name} {median:.1%}, at most {most:.1%}" for name, (median, most) in plan.errors.items())
    yield f"- the rates meet what they were taken from, in the median, within: {fits}."


def _gpus(settings: Settings) -> str:
    return counted(settings.gpus, "GPU")


def as_json(plan: Plan | Untimed) -> dict[str, Any]:
    """Every number: milliseconds, bytes, tokens, FLOPs as the fields of `Plan` say; times and memory with sums."""
    found = asdict(plan) | {"fits": plan.fits}
    found["memory"]["total"] = plan.memory.total
    if isinstance(plan, Untimed):
        return found
    for step in filter(None, (found["step"], found["dense_step"], found["null_step"])):
        step["total"] = sum(step.values())
    if plan.advice is not None:
        found["advice"]["step"]["total"] = plan.advice.step.total
        found["advice"]["tokens_per_second"] = plan.advice.tokens_per_second(plan.seq_len)
    return found | {
        "tokens": plan.tokens,
        "tokens_per_second": plan.tokens / plan.step.total * 1e3,
        "gain": plan.gain,
        "dense_is_faster_to": plan.dense_is_faster_to,
    }


def _sources(sources: Sequence[str]) -> str:
    """Names the sources of one commit together."""
    together: dict[str, list[str]] = {}
    for source in sources:
        name, _, commit = source.rpartition(": ")
        together.setdefault(commit, []).append(name)
    return "; ".join(f"{', '.join(names)} ({commit})" for commit, names in together.items())


def _layers(plan: Plan) -> Iterator[str]:
    width = max(len(of.attention) for of in plan.layers)
    numbers = max(10, *(len(of.layers) for of in plan.layers))
    names = f"{'layers':{numbers}} {'attention':{width}}"
    yield f"{names} {'density':>8} {'computed':>9} {'loaded':>8} {'ms':>7} {'dense ms':>9}"
    for of in plan.layers:
        yield (
            f"{of.layers:{numbers}} {of.attention:{width}} {of.density:8.1%} {of.computed:9.1%} {of.loaded:8.1%} "
            f"{in_three_digits(of.milliseconds):>7} {in_three_digits(of.dense_milliseconds):>9}"
        )
    yield "density: share of all scores in live blocks; ms: attention of one layer, forward and backward"
    yield "computed: share that tiles multiply; beyond the density it is waste"
    yield "loaded: share in whole tiles, whose keys are loaded"


def _recall(plan: Plan) -> str:
    """What a token finds, by the layers that see most."""
    recall = plan.recall
    if recall.everywhere:
        layers = listed(in_ranges(recall.everywhere, between=",").split(","), "and")
        return f"a token finds anything, in layer{'s' if len(recall.everywhere) > 1 else ''} {layers}"
    found = f"what is up to {recall.near:,} tokens away" if recall.near else "what is in its block"
    if recall.between >= 0.5:
        found += f", and farther what {counted(max(1, round(recall.between)), 'block')} in between can pass on"
    return f"a token finds {found}"


def _time(plan: Plan) -> Iterator[str]:
    yield f"{'a step':24} {'sparse ms':>10} {'dense ms':>10}"
    names = {
        "products": "matrix products",
        "kernels": "norms, sums, loss, ...",
        "attention": "attention",
        "checkpoints": "activations once more",
        "optimizer": "optimizer",
        "training": "DeepSpeed and loop",
        "check": "check of gradients",
        "exchange": "sent between ranks",
        "reduction": "gradients and weights",
    }
    for name, words in names.items():
        sparse, dense = getattr(plan.step, name), getattr(plan.dense_step, name)
        if sparse or dense:
            yield f"{words:24} {sparse:10.1f} {dense:10.1f}"
    sparse, dense = plan.step.total, plan.dense_step.total
    yield f"{'together':24} {sparse:10.1f} {dense:10.1f}"
    yield _tokens_a_second(plan)
    of_sparse, of_dense = (plan.model_flops + of for of in (plan.attention_flops, plan.dense_attention_flops))
    yield f"{'TFLOP':24} {of_sparse / 1e12:10.1f} {of_dense / 1e12:10.1f}"
    yield f"{'TFLOP/s':24} {of_sparse / sparse / 1e9:10.0f} {of_dense / dense / 1e9:10.0f}"


def _tokens_a_second(plan: Plan) -> str:
    sparse, dense = (plan.tokens / step.total * 1e3 for step in (plan.step, plan.dense_step))
    return f"{'tokens a second':24} {sparse:10,.0f} {dense:10,.0f}"


def _memory(plan: Known) -> Iterator[str]:
    each = ", ".join(f"{name} {size / GIB:.1f}" for name, size in plan.memory.parts().items() if size)
    yield f"memory: {plan.memory.total / GIB:.1f} GiB {plan.memory.at}: {each}"
    yield _longest(plan)


def _longest(plan: Known) -> str:
    if plan.memory_gib is None or plan.longest is None:
        return "the longest sequence: the GPU's memory is not known; give it with --memory GIB."
    if plan.longest == 0:
        return f"no sequence fits into {plan.memory_gib:.0f} GiB: the model and its optimizer alone need more."
    more = " and more" if plan.longest >= MOST_TOKENS else ""
    return (
        f"the longest sequence that fits into {plan.memory_gib:.0f} GiB, {plan.settings.micro_batch} at a time: "
        f"{plan.longest:,} tokens{more}"
    )


def _lengths(plan: Plan) -> Iterator[str]:
    at = ", ".join(f"{of.seq_len:,}: {of.dense / of.sparse:.2f}" for of in plan.lengths)
    shortest = plan.measured_tokens[0]
    unmeasured = f" (shorter than {shortest:,}: not measured)" if plan.lengths[0].seq_len < shortest else ""
    yield f"speed-up over dense at other lengths, same tokens per step: {at}{unmeasured}."
    if plan.dense_is_faster_to is not None and plan.gain >= 1:
        yield _dense_is_faster(plan)
    for of in plan.layers:
        if of.is_faster_dense:
            layers, them = ("layer", "it") if of.layers.isdecimal() else ("layers", "them")
            yield f'{layers} {of.layers}: dense attention is faster; give {them} null in "layers".'


def _dense_is_faster(plan: Plan) -> str:
    return f"dense is faster at {plan.dense_is_faster_to:,} tokens and fewer."


def _wasted(plan: Plan) -> dict[str, str]:
    """Sentences on time that could be saved, by what takes it."""
    found = _padding(plan)
    if plan.odd_vocabulary:
        wanted = -(-plan.model.vocabulary // 8) * 8
        found["an odd vocabulary"] = (
            f"a vocabulary of {plan.model.vocabulary:,} is no multiple of 8: its products take "
            f"{plan.odd_vocabulary:.1f} ms a step more than with {wanted:,}."
        )
    return found


def _padding(plan: Known) -> dict[str, str]:
    found = {}
    if plan.padded > plan.seq_len:
        share = 1 - plan.seq_len / plan.padded
        found["whole blocks"] = (
            f"padding: {plan.seq_len:,} tokens are {plan.padded:,} in whole blocks; {share:.1%} of the step is padding."
        )
    if plan.document_tokens is not None:
        share = 1 - plan.document_tokens / plan.padded
        found["padding"] = (
            f"padding: documents of {plan.document_tokens:,} tokens leave {share:.0%} of each step to padding; "
            "packed documents would not (docs/packed-documents.md)."
        )
    return found
