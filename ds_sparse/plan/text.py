"""A plan as it is printed, and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ..bench.machine import in_three_digits
from ..bench.runs import WIDTH
from ..tools.wording import listed
from .memory import GIB, LEFT_FREE, MOST_TOKENS
from .plan import Plan
from .settings import RANKS, Settings

UNCERTAIN = 0.05
"""Steps nearer to each other than this are not told apart: predictions of measured steps are off by as much."""


def lines_of(plan: Plan) -> Iterator[str]:
    """Yields what is printed, line by line."""
    model, settings = plan.model, plan.settings
    if plan.fits is False:
        yield (
            f"does not fit: a step needs {plan.memory.total / GIB:.1f} GiB, and the GPU has {plan.memory_gib:g}, "
            f"{LEFT_FREE:.0%} of which is not counted on. Times are those of such a GPU with more."
        )
    yield (
        f"{plan.file}: {model.name} ({model.parameters(plan.padded) / 1e6:,.0f} million parameters), "
        f"{settings.micro_batch} x {plan.seq_len:,} tokens a pass"
        + (f", {settings.accumulation} passes a step" if settings.accumulation > 1 else "")
        + f", {settings.dtype}, ZeRO {settings.zero_stage}, {_gpus(settings)}"
        + (f", {settings.ranks} to a sequence" if settings.ranks > 1 else "")
    )
    yield f"rates: {plan.machine}, from {_sources(plan.rates_from)}"
    yield ""
    yield from _layers(plan)
    yield ""
    yield from _time(plan)
    yield ""
    yield from _memory(plan)
    yield from _advice(plan)
    yield ""
    yield from _dense(plan)
    yield from _wasted(plan)
    yield ""
    for remark in plan.remarks:
        yield f"- {remark}"
    fits = "; ".join(f"{name} {median:.1%}, at most {most:.1%}" for name, (median, most) in plan.errors.items())
    yield f"- the rates meet what they were taken from, in the median, within: {fits}."


def _gpus(settings: Settings) -> str:
    return f"{settings.gpus} GPU{'s' if settings.gpus > 1 else ''}"


def printed(plan: Plan) -> str:
    """The lines; sentences that are too long are wrapped."""
    wrapped = (
        textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
        if len(line) > WIDTH
        else line
        for line in lines_of(plan)
    )
    return "\n".join(wrapped)


def as_json(plan: Plan) -> dict[str, Any]:
    """Every number: milliseconds, bytes, tokens, FLOPs as the fields of `Plan` say; times and memory with sums."""
    found = asdict(plan)
    found["step"]["total"], found["dense_step"]["total"] = plan.step.total, plan.dense_step.total
    found["memory"]["total"] = plan.memory.total
    if plan.advice is not None:
        found["advice"]["step"]["total"] = plan.advice.step.total
        found["advice"]["tokens_per_second"] = plan.advice.tokens_per_second(plan.seq_len)
    return found | {
        "fits": plan.fits,
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
    yield (
        "Parts of all scores: in live blocks, multiplied in tiles, in whole tiles, for which keys are loaded; what is "
        "beyond the density is waste. ms: attention of one layer, forward and backward."
    )


def _time(plan: Plan) -> Iterator[str]:
    yield f"{'a step':24} {'sparse ms':>10} {'dense ms':>10}"
    names = {
        "products": "matrix products",
        "kernels": "norms, sums, loss, ...",
        "attention": "attention",
        "checkpoints": "activations once more",
        "optimizer": "optimizer",
        "training": "DeepSpeed and loop",
        "exchange": "heads between ranks",
        "reduction": "gradients and weights",
    }
    for name, words in names.items():
        sparse, dense = getattr(plan.step, name), getattr(plan.dense_step, name)
        if sparse or dense:
            yield f"{words:24} {sparse:10.1f} {dense:10.1f}"
    sparse, dense = plan.step.total, plan.dense_step.total
    yield f"{'together':24} {sparse:10.1f} {dense:10.1f}"
    yield f"{'tokens a second':24} {plan.tokens / sparse * 1e3:10,.0f} {plan.tokens / dense * 1e3:10,.0f}"
    of_sparse, of_dense = (plan.model_flops + of for of in (plan.attention_flops, plan.dense_attention_flops))
    yield f"{'TFLOP':24} {of_sparse / 1e12:10.1f} {of_dense / 1e12:10.1f}"
    yield f"{'TFLOP/s':24} {of_sparse / sparse / 1e9:10.0f} {of_dense / dense / 1e9:10.0f}"


def _memory(plan: Plan) -> Iterator[str]:
    each = ", ".join(f"{name} {size / GIB:.1f}" for name, size in plan.memory.parts().items() if size)
    yield f"memory: {plan.memory.total / GIB:.1f} GiB {plan.memory.at}: {each}"
    if plan.memory_gib is None or plan.longest is None:
        yield "the longest sequence: the GPU's memory is not known; give it with --memory GIB."
    elif plan.longest == 0:
        yield f"no sequence fits into {plan.memory_gib:.0f} GiB: the model and its optimizer alone need more."
    else:
        more = " and more" if plan.longest >= MOST_TOKENS else ""
        yield (
            f"the longest sequence that fits into {plan.memory_gib:.0f} GiB, {plan.settings.micro_batch} at a time: "
            f"{plan.longest:,} tokens{more}"
        )


def _advice(plan: Plan) -> Iterator[str]:
    """Nothing where there is nothing to choose: one GPU, which a sequence fits."""
    if plan.memory_gib is None:
        return
    if plan.advice is None:
        yield (
            f"advice: with activation checkpointing, too, nothing makes it fit {_gpus(plan.settings)}; take more "
            f"(as there are {plan.model.heads} heads, at most as many can share a sequence), or do what "
            "docs/a-million-tokens.md says."
        )
        return
    settings = plan.advice.settings
    if settings.gpus == 1 and not settings.checkpoints:
        return
    parts = [f'"{RANKS}": {settings.ranks}'] if settings.ranks > 1 else []
    if settings.ranks < settings.gpus:
        parts.append("data parallelism")
    if settings.checkpoints:
        parts.append("activation checkpointing")
    yield (
        f"advice for {_gpus(settings)}: {listed(parts, 'and')}, "
        f"{settings.micro_batch} x {plan.seq_len:,} tokens a pass: "
        f"{plan.advice.tokens_per_second(plan.seq_len):,.0f} tokens a second."
    )
    if settings.sequences != plan.settings.sequences:
        yield (
            f'  a step of it has {settings.sequences:,} sequences ("train_batch_size"), and the JSON\'s has '
            f"{plan.settings.sequences:,}."
        )


def _dense(plan: Plan) -> Iterator[str]:
    if abs(plan.gain - 1) < UNCERTAIN:
        yield f"gain: none that the rates can tell: a dense step takes {plan.gain:.2f} times as long."
    elif plan.gain > 1:
        yield f"gain: a dense step takes {plan.gain:.2f} times as long."
    else:
        yield (
            f"dense is faster: its step takes {plan.gain:.2f} times as long. Train without the flag, or with a layout "
            "of fewer blocks."
        )
    if len(plan.lengths) > 1:
        at = ", ".join(f"{of.seq_len:,}: {of.dense / of.sparse:.2f}" for of in plan.lengths)
        shortest = plan.measured_tokens[0]
        unmeasured = f" (shorter than {shortest:,}: not measured)" if plan.lengths[0].seq_len < shortest else ""
        yield f"with as many tokens in sequences of other lengths, dense over sparse: {at}{unmeasured}."
    if plan.dense_is_faster_to is not None and plan.gain >= 1:
        yield f"dense is faster at {plan.dense_is_faster_to:,} tokens and fewer."
    for of in plan.layers:
        if of.milliseconds > of.dense_milliseconds:
            yield f'layers {of.layers}: dense attention is faster; give them null in "layers".'


def _wasted(plan: Plan) -> Iterator[str]:
    if plan.padded > plan.seq_len:
        share = 1 - plan.seq_len / plan.padded
        yield (
            f"padding: {plan.seq_len:,} tokens are {plan.padded:,} in whole blocks; {share:.1%} of the step is padding."
        )
    if plan.document_tokens is not None:
        share = 1 - plan.document_tokens / plan.padded
        yield (
            f"padding: documents of {plan.document_tokens:,} tokens leave {share:.0%} of each step to padding; "
            "packed documents would not (docs/packed-documents.md)."
        )
    if plan.odd_vocabulary:
        wanted = -(-plan.model.vocabulary // 8) * 8
        yield (
            f"a vocabulary of {plan.model.vocabulary:,} is no multiple of 8: its products take "
            f"{plan.odd_vocabulary:.1f} ms a step more than with {wanted:,}."
        )
