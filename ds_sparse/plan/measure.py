"""The rates of this machine, measured on the spot by short runs: of attention, and of steps of BERT."""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..bench import command
from ..bench.cases import IN_BERT
from ..bench.machine import DTYPES, conditions, in_turns, timed
from ..models.sparsify import sparsify
from ..tools.extras import optional_imports
from .fitting import DENSE_IN_BERT, LABELLED, NO_ATTENTION, BertStep, bert_model, from_files, rates_of
from .limits import TOKENS_MEASURED
from .operations import FP32, ITEM
from .rates import Rates

CASES = {
    "cuda": "fixed-16,longformer-16,bigbird-16,bigbird-32,bigbird-64,longformer-64,longformer-128,random-64,"
    "bigbird-64-d128,longformer-64-d128,longformer-128-d128",
    "cpu": "fixed-16,longformer-16,longformer-128",
}
"""Cases of `ds_sparse bench attention`: small and large blocks, few and many of them."""

SHORT = {
    "cuda": ["--repeats", "3", "--seconds", "1", "--peers", "ds_sparse,cudnn"],
    "cpu": ["--repeats", "1", "--seconds", "1", "--peers", "ds_sparse,sdpa"],
}

LENGTHS = {"cuda": (8192, 16384), "cpu": (1024,)}
"""Tokens of a sequence in steps of BERT."""

SPARSE = "longformer-64"
"""The structure of sparse steps of BERT."""

_VALUE = "ds_sparse_plan_value"


def measured_rates(device: str) -> Rates:
    """Measures attention, and steps of BERT, on a CPU those of a small one; some minutes. Progress and tables go to
    standard error.

    Args:
        device: 'cuda' or 'cpu'.

    Raises:
        ValueError: a run failed; its sentence is on standard error.
        ImportError: Transformers is not installed.
    """
    with optional_imports():
        import transformers  # noqa: F401  # before the minutes that attention takes
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        file = Path(folder) / "attention.json"
        arguments = [*SHORT[device], "--cases", CASES[device], "--device", device, "--json", str(file)]
        if command.measure("attention", arguments) or not file.exists():
            raise ValueError("ds_sparse bench attention failed here, so that there are no rates for a plan.")
        results = from_files([file])
        for seq_len in LENGTHS[device]:
            results.bert.extend(_timed(steps_of_bert(device, seq_len)))
        for step in results.bert:
            logits = "all tokens" if step.predicts_all else "labelled tokens"
            said = f"{step.seq_len:,} tokens, dropout {step.dropout:g}, logits of {logits}, attention {step.attention}"
            print(f"a step of BERT, {said}: {step.milliseconds:.1f} ms")
    now = conditions(torch.device(device))
    sources = [*results.sources, f"steps of BERT: commit {now['commit']}, {now['date']}"]
    return replace(rates_of(results), sources=tuple(f"measured here: {source}" for source in sources))


def steps_of_bert(device: str, seq_len: int) -> list[BertStep]:
    """Steps without attention, with dense and with sparse: as they are, with logits of labelled tokens alone, with
    dropout."""
    dtype, tokens = ("bf16", TOKENS_MEASURED[ITEM]) if device == "cuda" else ("fp32", TOKENS_MEASURED[FP32])
    kinds, attentions = ((0.0, True), (0.0, False), (0.1, True)), (NO_ATTENTION, DENSE_IN_BERT, SPARSE)
    return [
        BertStep(seq_len, dropout, dtype, device, max(1, tokens // seq_len), attention, predicts_all=predicts_all)
        for (dropout, predicts_all), attention in product(kinds, attentions)
    ]


def _timed(steps: list[BertStep]) -> list[BertStep]:
    """The steps that fit the GPU, each with the median of a few rounds in turns."""
    runs = {}
    for step in steps:
        call = call_of(step)
        with contextlib.suppress(torch.OutOfMemoryError):
            call()
            runs[step] = partial(timed, call, torch.device(step.device), 1)
    times = in_turns(runs, 3, 1, f"{steps[0].seq_len} tokens")
    return [replace(step, milliseconds=statistics.median(samples)) for step, samples in times.items()]


def call_of(step: BertStep) -> Callable[[], None]:
    """Forward and backward of Transformers' BERT, with parameters in the dtype of the step."""
    from transformers import AttentionInterface, BertConfig, BertForMaskedLM

    AttentionInterface.register(_VALUE, _value)
    own = bert_model(step.device, step.dropout)
    config = BertConfig(
        vocab_size=own.vocabulary,
        hidden_size=own.hidden,
        num_hidden_layers=own.layers,
        num_attention_heads=own.heads,
        intermediate_size=own.intermediate,
        max_position_embeddings=step.seq_len,
        hidden_dropout_prob=own.dropout,
        attention_probs_dropout_prob=own.attention_dropout,
        attn_implementation=_VALUE if step.attention == NO_ATTENTION else "sdpa",
    )
    with torch.device(step.device):
        model = BertForMaskedLM(config).to(DTYPES[step.dtype]).train()
        tokens = torch.randint(own.vocabulary, (step.batch, step.seq_len))
        labels = tokens.masked_fill(torch.rand(tokens.shape) >= LABELLED, -100)
    if step.attention == SPARSE:
        sparsify(model, IN_BERT[SPARSE](own.heads))
    labelled = (labels >= 0).flatten().nonzero()[:, 0]

    def call() -> None:
        if step.predicts_all:
            loss = model(input_ids=tokens, labels=labels).loss
        else:
            hidden = model.base_model(input_ids=tokens).last_hidden_state.flatten(0, 1)[labelled]
            loss = torch.nn.functional.cross_entropy(model.cls(hidden), labels.flatten()[labelled])
        loss.backward()
        model.zero_grad(set_to_none=True)

    return call


def _value(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Attention that returns the value, so that a step takes what it takes without."""
    return value.transpose(1, 2).contiguous(), None
