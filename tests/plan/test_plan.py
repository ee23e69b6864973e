"""A plan, what it says of itself, and how it is printed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ds_sparse import SparseAttentionConfigError
from ds_sparse.plan.model import NAMED
from ds_sparse.plan.plan import make_plan
from ds_sparse.plan.settings import Settings
from ds_sparse.plan.text import as_json, printed

MODEL, SETTINGS = NAMED["bert-base"], Settings(4, zero_stage=1)
WINDOW = {"mode": "bslongformer", "block": 64}
DENSE = {"mode": "dense", "block": 16}


@pytest.fixture
def planned(rates):
    """The plan of a block, with changes of the settings."""

    def made(block=WINDOW, seq_len=8192, model=MODEL, rates=rates, document_tokens=None, memory_gib=None, **changes):
        settings = replace(SETTINGS, **changes)
        return make_plan(block, "ds.json", model, settings, rates, seq_len, document_tokens, memory_gib)

    return made


@pytest.fixture
def in_words(planned):
    """What is printed, in one line."""
    return lambda *args, **more: " ".join(printed(planned(*args, **more)).split())


@pytest.fixture
def quick(rates):
    """Rates of which dense attention takes a quarter."""
    return replace(rates, dense={way: [c / 4 for c in coefficients] for way, coefficients in rates.dense.items()})


def test_a_sparse_layout_gains_more_the_longer_sequences_are(planned):
    plan = planned(seq_len=16384)
    gains = [at.dense / at.sparse for at in plan.lengths]
    assert [at.seq_len for at in plan.lengths] == [512, 1024, 2048, 4096, 8192, 16384]
    assert gains == sorted(gains) and plan.gain == pytest.approx(gains[-1])
    assert plan.attention_flops < plan.dense_attention_flops / 10


def test_where_dense_attention_is_quick_dense_is_faster_and_that_is_what_is_said(planned, quick):
    plan = planned(DENSE, rates=quick)
    assert plan.gain < 1 and plan.dense_is_faster_to == 8192
    (layers,) = plan.layers
    assert layers.milliseconds > layers.dense_milliseconds and layers.density == 1
    text = printed(plan)
    assert "dense is faster: its step takes 0." in text and "gain:" not in text
    assert 'layers 0-11: dense attention is faster; give them null in "layers".' in text


def test_without_a_block_it_is_dense(planned):
    plan = planned(None)
    assert plan.gain == 1 and plan.step == plan.dense_step


def test_a_length_that_ends_inside_a_block_is_computed_in_whole_ones(planned):
    plan, whole = planned(seq_len=8200), planned(seq_len=8256)
    assert plan.padded == 8256 and plan.step == whole.step and plan.tokens == 4 * 8200


def test_tokens_are_those_of_all_gpus_and_passes_and_of_sequences_that_ranks_share(planned):
    assert planned(accumulation=2, gpus=8).tokens == 4 * 2 * 8 * 8192
    plan, alone = planned(gpus=8, ranks=4), planned()
    assert plan.tokens == 4 * 2 * 8192 and plan.attention_flops == alone.attention_flops / 4
    assert plan.layers[0].milliseconds < alone.layers[0].milliseconds / 2


def test_the_longest_sequence_and_advice_need_the_memory(planned):
    small, large = (planned(memory_gib=gib) for gib in (40, 80))
    assert 0 < small.longest < large.longest and large.advice.settings == SETTINGS
    assert planned().longest is planned().advice is planned().fits is None


@pytest.mark.parametrize(
    "changes, error, sentence",
    [
        ({"document_tokens": 9000}, ValueError, "--document-tokens 9000 is more than --seq 8192; give"),
        ({"block": WINDOW | {"blok": 16}}, SparseAttentionConfigError, "sparse_attention.blok: unknown key"),
        ({"gpus": 16, "ranks": 16}, ValueError, "Attention has 12 heads, and 16 ranks are to share them"),
        ({"block": None, "gpus": 2, "ranks": 2}, ValueError, "size is 2, and there is no sparse_attention block, with"),
        ({"seq_len": 64}, ValueError, r"bslongformer, block 64: no layout of 64 tokens \(.*\); give a longer --seq"),
    ],
)
def test_what_cannot_be_is_a_sentence(planned, changes, error, sentence):
    with pytest.raises(error, match=sentence):
        planned(**changes)


def test_within_what_was_measured_nothing_is_extrapolated(planned):
    assert not [remark for remark in planned().remarks if remark.startswith("not measured")]


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"seq_len": 262144}, "not measured: attention over 262,144 tokens; measured are 4,096 to 131,072."),
        ({"seq_len": 65536}, "not measured: dense attention over 65,536 tokens; measured are up to 16,384."),
        ({"block": WINDOW | {"block": 8}}, "not measured: blocks of 8; measured are 16, 32, 64 and 128."),
        ({"block": WINDOW | {"causal": True}}, "not measured: attention that masks later tokens"),
        ({"model": replace(MODEL, head_dim=32)}, "not measured: heads of 32 numbers; measured are 64 and 128."),
        ({"model": NAMED["bert-large"]}, "not measured: 24 layers of 1024; rates of products and kernels are those of"),
        ({"model": NAMED["neox-small"]}, "not measured: a step of gpt_neox; what it computes is counted, at the rates"),
        ({"micro_batch": 1}, "not measured: a pass of 8,192 tokens: with fewer than 32,768 a GPU may wait"),
        ({"micro_batch": 8, "gpus": 2, "ranks": 2}, "not measured: a pass of 32,768 tokens: with fewer than 65,536 a"),
        ({"gpus": 16, "ranks": 8}, "not measured: what nodes of 8 GPUs send each other: gradients and weights by"),
        ({"gpus": 12, "ranks": 12}, "not measured: what nodes of 8 GPUs send each other: all by the 400 Gb/s"),
        ({"gpus": 8}, "each GPU of a node sends gradients and weights at "),
        ({"gpus": 8, "ranks": 2}, "each GPU of a node sends heads of a sequence at "),
        ({"dtype": "fp16"}, "fp16 is counted as bf16, whose rates were measured."),
        ({"offloads": True}, "what an optimizer on the CPU takes is not counted."),
        ({"optimizer": "Sophia"}, "optimizer Sophia is counted as Adam; known are sgd, "),
    ],
)
def test_what_is_assumed_and_what_lies_beyond_the_rates_is_said(planned, changes, sentence):
    assert any(remark.startswith(sentence) for remark in planned(**changes).remarks)
    assert not any(remark.startswith(sentence) for remark in planned().remarks)


def test_what_was_not_measured_is_not_counted_and_that_is_said(planned, rates):
    bare = replace(rates, exchange=None, reduction=None, training=None)
    said = [remark for remark in planned(rates=bare, gpus=8, ranks=2).remarks if "measured here" in remark]
    assert [sentence[: sentence.index(" not counted")] for sentence in said] == [
        "time that GPUs take to send gradients and weights is",
        "time that GPUs take to send heads of a sequence is",
        "what DeepSpeed and the program's loop take besides is",
    ]


def test_what_is_printed_has_the_numbers_of_the_plan(planned):
    plan = planned(memory_gib=80.0)
    text = printed(plan)
    assert f"{plan.step.total:10.1f} {plan.dense_step.total:10.1f}" in text
    assert f"gain: a dense step takes {plan.gain:.2f} times as long." in text
    assert f"the longest sequence that fits into 80 GiB, 4 at a time: {plan.longest:,} tokens" in text
    assert "a vocabulary of 30,522 is no multiple of 8" in text and "shorter than 4,096: not measured" in text
    assert max(map(len, text.splitlines())) <= 120 and "advice" not in text
    assert all(f"- {remark}"[:60] in text for remark in plan.remarks)
    shared = planned(gpus=8, ranks=2)
    text = printed(shared)
    assert "ZeRO 1, 8 GPUs, 2 to a sequence" in text
    assert f"{'heads between ranks':24} {shared.step.exchange:10.1f}" in text
    assert f"{'gradients and weights':24} {shared.step.reduction:10.1f}" in text


def test_what_does_not_fit_is_said_first(planned):
    plan = planned(memory_gib=8.0)
    start = f"does not fit: a step needs {plan.memory.total / 2**30:.1f} GiB, and the GPU has 8, 5% of which"
    assert printed(plan).startswith(start) and as_json(plan)["fits"] is False
    plan = planned(memory_gib=80.0)
    assert printed(plan).startswith("ds.json: bert-base") and as_json(plan)["fits"] is True


@pytest.mark.parametrize(
    "gpus, gib, advice",
    [
        (8, 80, "advice for 8 GPUs: data parallelism, 4 x 8,192 tokens a pass: "),
        (8, 4, "advice for 8 GPUs: data parallelism and activation checkpointing, 2 x 8,192 tokens a pass: "),
        (8, 4, 'a step of it has 16 sequences ("train_batch_size"), and the JSON\'s has 32.'),
        (8, 0.9, 'advice for 8 GPUs: "sequence_parallel_size": 4, data parallelism and activation checkpointing, 1 x'),
        (8, 0.5, "advice: with activation checkpointing, too, nothing makes it fit 8 GPUs;"),
        (1, 5, "advice for 1 GPU: activation checkpointing, 2 x"),
    ],
)
def test_a_parallelism_is_advised(in_words, gpus, gib, advice):
    found = in_words(gpus=gpus, zero_stage=2, memory_gib=gib)
    assert advice in found and ("a step of it" in found) == (gib not in (80, 0.5))


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"block": DENSE}, "gain: none that the rates can tell: a dense"),
        ({"seq_len": 8200}, "padding: 8,200 tokens are 8,256 in whole blocks; 0.7% of the step is padding."),
        (
            {"document_tokens": 4096},
            "padding: documents of 4,096 tokens leave 50% of each step to padding",
        ),
        ({}, "the GPU's memory is not known; give it with --memory GIB."),
        ({"memory_gib": 1.0}, "no sequence fits into 1 GiB"),
    ],
)
def test_sentences_that_depend_on_the_plan(in_words, options, sentence):
    assert sentence in in_words(**options)
    assert sentence not in in_words(memory_gib=80.0)


def test_the_json_has_all_numbers_with_their_sums(planned):
    plan = planned(memory_gib=80)
    found = json.loads(json.dumps(as_json(plan)))
    assert found["step"]["total"] == plan.step.total == sum(v for k, v in found["step"].items() if k != "total")
    assert found["memory"]["total"] == plan.memory.total
    assert found["gain"] == plan.gain and found["tokens_per_second"] == plan.tokens / plan.step.total * 1e3
    assert found["layers"][0]["density"] == plan.layers[0].density
    assert found["advice"]["tokens_per_second"] == found["tokens_per_second"]
    assert found["advice"]["step"]["total"] == plan.step.total and found["advice"]["settings"]["ranks"] == 1
    assert len(found["lengths"]) == len(plan.lengths) and found["remarks"] == plan.remarks
