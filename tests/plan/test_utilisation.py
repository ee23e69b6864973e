from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ds_sparse
from ds_sparse.plan.layers import kinds_of, live_scores, walk_of
from ds_sparse.plan.model import NAMED
from ds_sparse.plan.settings import Settings
from ds_sparse.plan.utilisation import StepWork, in_words

BASE = NAMED["bert-base"]
MODEL = replace(BASE, layers=2, hidden=64, heads=4, key_heads=4, head_dim=16, intermediate=128, vocabulary=128)
SETTINGS = Settings(2)
BLOCK = {"mode": "bslongformer", "block": 16, "num_sliding_window_blocks": 3, "layers": {"1": None}}


def work(block=BLOCK, settings=SETTINGS, chip=""):
    return StepWork.of(block, "ds.json", MODEL, settings, 256, chip)


def test_flops_are_those_that_pytorch_counts_of_the_same_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config)
    sparse = dict(BLOCK, layers={})
    ds_sparse.sparsify(model, sparse)
    tokens = torch.randint(128, (2, 256))
    with FlopCounterMode(display=False) as counter:
        model(tokens, labels=tokens).loss.backward()
    assert work(sparse).flops == counter.get_total_flops()


def test_a_null_layer_counts_as_dense_and_no_block_too():
    sparse, mixed, dense = (work(block) for block in (dict(BLOCK, layers={}), BLOCK, None))
    assert sparse.flops < mixed.flops == pytest.approx((sparse.flops + dense.flops) / 2)


@pytest.mark.parametrize("mode", ["fixed", "bigbird", "bslongformer"])
@pytest.mark.parametrize("family", ["bert", "gpt_neox"])
def test_live_scores_are_those_of_the_layout_that_is_walked(mode, family):
    model = replace(BASE, family=family)
    (kind,) = kinds_of({"mode": mode, "block": 32, "different_layout_per_head": False}, model, "ds.json")
    assert live_scores(kind, model, 8192) == walk_of(kind, model, 8192).live


def test_a_layout_too_large_to_exist_whole_is_counted():
    (kind,) = kinds_of({"mode": "bslongformer", "block": 16, "num_sliding_window_blocks": 3}, BASE, "ds.json")
    with pytest.raises(ValueError, match="too large"):
        walk_of(kind, BASE, 2**19)
    assert live_scores(kind, BASE, 2**19) < 2**38 / 1000


def test_utilisation_is_a_part_of_the_peak_of_16_bits_where_the_chip_is_known():
    known = work(settings=replace(SETTINGS, accumulation=3, gpus=4), chip="NVIDIA H200")
    figures = known.figures(0.5)
    assert figures["tokens_per_second"] == 2 * 3 * 4 * 256 / 0.5
    assert figures["model_tflops"] == pytest.approx(known.flops / 0.5 / 1e12)
    assert figures["mfu"] == pytest.approx(known.flops / 0.5 / 989e12)
    assert known.flops == 3 * work().flops
    assert in_words({"tokens_per_second": 1234.5, "model_tflops": 212.3, "mfu": 0.2146}) == (
        "1,234 tokens/s  212 TFLOP/s a rank (21.5% MFU)"
    )
    for unknown in (work(settings=replace(SETTINGS, dtype="fp32"), chip="NVIDIA H200"), work(chip="CPU")):
        assert set(unknown.figures(1.0)) == {"tokens_per_second", "model_tflops"}
        assert in_words(unknown.figures(1.0)).endswith(" TFLOP/s a rank")
