"""The rates of this machine, measured on the spot by short runs."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from ..bench.cases import DENSE_IN_BERT, NO_ATTENTION
from ..bench.command import measure
from ..bench.machine import in_three_digits
from ..bench.runs import show
from .bert_cases import Case, Row
from .rates import Rates
from .results import BertStep, from_files, steps_of
from .training import complete_rates

CASES = {
    "cuda": "fixed-16,longformer-16,bigbird-16,bigbird-32,bigbird-64,longformer-64,longformer-128,random-64,"
    "bigbird-64-d128,longformer-64-d128,longformer-128-d128",
    "cpu": "fixed-16,longformer-16,longformer-128",
}
"""Of the table of `ds_sparse bench attention`: small and large blocks, few and many of them."""

BERT_LENGTHS = {"cuda": (8192, 16384), "cpu": (1024,)}
BERT_DTYPE = {"cuda": "bf16", "cpu": "fp32"}
BERT_ATTENTIONS = NO_ATTENTION, DENSE_IN_BERT, "longformer-64"
BERT = {"bert": (0.0, True), "bert with labelled tokens": (0.0, False), "bert with dropout": (0.1, True)}
"""Dropout, and whether logits of all tokens are computed."""

PEERS = {"cuda": "ds_sparse,cudnn", "cpu": "ds_sparse,sdpa"}
REPEATS, SECONDS = {"cuda": 3, "cpu": 1}, 1


def measured_rates(device: str) -> Rates:
    """Measures attention, and steps of BERT, on a CPU those of a small one; some minutes. Progress and tables go to
    standard error.

    Args:
        device: 'cuda' or 'cpu'.

    Raises:
        ValueError: a run failed; its sentence is on standard error.
    """
    short = ["--repeats", str(REPEATS[device]), "--seconds", str(SECONDS), "--device", device]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        file = Path(folder) / "attention.json"
        arguments = ["--cases", CASES[device], "--peers", PEERS[device], "--json", str(file)]
        if measure("attention", [*short, *arguments]) or not file.exists():
            raise ValueError("ds_sparse bench attention failed here, so that there are no rates for a plan.")
        found = from_files([file])
        for name, (dropout, predicts_all) in BERT.items():
            found.bert.extend(measured_bert(name, dropout, predicts_all, device))
            found.sources.append(f"{name}: {found.sources[0].partition(': ')[2]}")
        return here(complete_rates(found))


def measured_bert(name: str, dropout: float, predicts_all: bool, device: str) -> list[BertStep]:
    from .bert_steps import measured  # takes Transformers

    cases = [Case(seq_len, dropout, BERT_DTYPE[device], device, predicts_all) for seq_len in BERT_LENGTHS[device]]
    try:
        found = measured(cases, BERT_ATTENTIONS, torch.device(device), REPEATS[device], SECONDS)
    except ArithmeticError as error:
        raise ValueError(f"A step of BERT is wrong here, so that there are no rates for a plan: {error}") from None
    for case, rows in found:
        show(f"{name}, {case.seq_len} tokens", *(f"{row.attention}: {said(row)}" for row in rows))
    return steps_of(found)


def said(row: Row) -> str:
    return f"no time: {row.reason}" if row.milliseconds is None else f"{in_three_digits(row.milliseconds)} ms"


def here(rates: Rates) -> Rates:
    return replace(rates, sources=tuple(f"measured here: {source}" for source in rates.sources))
