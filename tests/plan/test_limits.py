from __future__ import annotations

from dataclasses import replace

import pytest

from ds_sparse.plan.layers import kinds_of
from ds_sparse.plan.limits import said_of
from ds_sparse.plan.model import NAMED
from ds_sparse.plan.settings import Settings

MODEL, SETTINGS = NAMED["bert-base"], Settings(4)


def said(rates, model=MODEL, settings=SETTINGS, seq_len=8192, **block):
    kinds = kinds_of({"mode": "bslongformer", "block": 64} | block, model, "ds.json")
    return said_of(rates, model, settings, kinds, seq_len)


def test_within_what_was_measured_nothing_is_extrapolated(rates):
    assert not [sentence for sentence in said(rates) if sentence.startswith("not measured")]


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"seq_len": 262144}, "attention over 262,144 tokens; measured are 4,096 to 131,072."),
        ({"seq_len": 65536}, "dense attention over 65,536 tokens; measured are up to 16,384."),
        ({"block": 8}, "blocks of 8; measured are 16, 32, 64 and 128."),
        ({"causal": True}, "attention that masks later tokens"),
        ({"model": replace(MODEL, head_dim=32)}, "heads of 32 numbers; measured are 64 and 128."),
        (
            {"model": NAMED["bert-large"]},
            "24 layers of 1024; rates of products and kernels are those of",
        ),
        ({"model": NAMED["neox-small"]}, "a step of gpt_neox; what it computes is counted, at the rates of BERT."),
        ({"settings": Settings(1)}, "a pass of 8,192 tokens: with fewer than 32,768 a GPU may wait"),
        ({"settings": Settings(8, gpus=2, ranks=2)}, "a pass of 32,768 tokens: with fewer than 65,536 a GPU may wait"),
        ({"settings": Settings(8, gpus=16, ranks=8)}, "what nodes of 8 GPUs send each other: gradients and weights by"),
        ({"settings": Settings(8, gpus=12, ranks=12)}, "what nodes of 8 GPUs send each other: all by the 400 Gb/s"),
    ],
)
def test_what_lies_beyond_is_said(rates, changes, sentence):
    assert any(line.startswith(f"not measured: {sentence}") for line in said(rates, **changes))


@pytest.mark.parametrize(
    "settings, sentence",
    [
        (Settings(4, gpus=8), "each GPU of a node sends gradients and weights at "),
        (Settings(4, gpus=8, ranks=2), "each GPU of a node sends heads of a sequence at "),
        (Settings(4, dtype="fp16"), "fp16 is counted as bf16, whose rates were measured."),
        (Settings(4, offloads=True), "what an optimizer on the CPU takes is not counted."),
        (Settings(4, optimizer="Sophia"), "optimizer Sophia is counted as Adam"),
    ],
)
def test_what_is_assumed_is_said(rates, settings, sentence):
    assert any(line.startswith(sentence) for line in said(rates, settings=settings))


def test_without_measured_communication_it_is_not_counted_and_that_is_said(rates):
    alone = replace(rates, exchange=None, reduction=None)
    lines = [line for line in said(alone, settings=Settings(4, gpus=8, ranks=2)) if "none was measured here" in line]
    assert [line[: line.index(" is")] for line in lines] == [
        "time that GPUs take to send gradients and weights",
        "time that GPUs take to send heads of a sequence",
    ]


def test_without_measured_training_the_loop_is_not_counted_and_that_is_said(rates):
    assert any("no training was measured here" in line for line in said(replace(rates, training=None)))
