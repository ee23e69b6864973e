"""Describes a run without doing it: for --dry-run."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from ds_sparse.plan.layers import in_whole_blocks, kinds_of, layers_in_words, live_scores
from ds_sparse.plan.memory import GIB, fits, memory_of
from ds_sparse.plan.plan import make_plan
from ds_sparse.plan.rates import committed_rates
from ds_sparse.tools.wording import counted

from device import DEVICE, device_name
from report import end_in_words
from training_run import Position, TrainingRun


def description(run: TrainingRun, model: nn.Module, position: Position) -> Iterator[str]:
    """Lines on a run that starts at or continues from a position, whose model may be without storage.

    Raises:
        ValueError: the batch is one that cannot be dealt, as the run would say.
    """
    settings, args, step = run.settings(), run.args, position.step
    tokens, batch, sequences = args.max_seq_length, settings.sequences, len(run.data.training.sequences)
    run.data.batches(batch, settings.micro_batch, 0, dist.get_rank(), dist.get_world_size())
    yield f"{sum(weight.numel() for weight in model.parameters()):,} parameters, trained in {settings.dtype}"
    kinds = kinds_of(run.block, run.model(), args.deepspeed_config)
    padded = in_whole_blocks(kinds, tokens)
    for kind in kinds:
        live = live_scores(kind, run.model(), padded)
        density = "" if live is None else f", density {live / padded**2:.1%}"
        yield f"layers {layers_in_words(kind.layers)}: {kind.in_words()}{density}"
    yield (
        f"a step has {batch} sequences, {batch * tokens:,} tokens, micro-batch {settings.micro_batch} x accumulation "
        f"{settings.accumulation}, on {counted(settings.gpus, 'rank')}, "
        f"ZeRO {settings.zero_stage}; an epoch has {sequences / batch:,.1f} steps"
    )
    yield from cost(run)
    if position.is_end(run, args.max_steps):
        yield f"nothing left to train, {step} steps are done"
        return
    start = f"continues after step {step}" if step else "starts at step 0"
    yield f"{start}, and ends {end_in_words(args.max_steps, args.max_minutes)}"
    yield f"checkpoints every {args.save_steps} steps in {run.checkpoints}"


def cost(run: TrainingRun) -> Iterator[str]:
    """Lines of `ds_sparse plan` about it, as far as this machine was measured."""
    settings, tokens = run.settings(), run.args.max_seq_length
    yield f"{run.work().flops / 1e12:,.3g} TFLOP a step and rank"
    if DEVICE.type == "cuda":
        needed, there = memory_of(run.model(), settings, tokens), torch.cuda.get_device_properties(DEVICE).total_memory
        of_gpu = f"{needed.total / GIB:.1f} GiB of the GPU's {there / GIB:.1f} {needed.at}, as planned"
        yield of_gpu if fits(run.model(), settings, tokens, there / GIB) else f"{of_gpu}: it does not fit"
    rates = committed_rates()
    if device_name() != rates.machine or settings.dtype == "fp32":
        yield (
            f"the time of a step is not known: ds_sparse plan has rates of an {rates.machine} in 16 bits; its "
            "option --on here measures this machine"
        )
    else:
        try:
            plan = make_plan(run.block, run.args.deepspeed_config, run.model(), settings, rates, tokens)
        except ValueError as error:
            yield f"the time of a step is not known: {error}"
            return
        milliseconds = plan.step.total
        yield f"{milliseconds:,.0f} ms a step and {plan.tokens / milliseconds * 1e3:,.0f} tokens/s, as planned"
