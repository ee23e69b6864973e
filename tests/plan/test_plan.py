from __future__ import annotations

from dataclasses import replace

import pytest

from ds_sparse import SparseAttentionConfigError
from ds_sparse.plan.model import NAMED
from ds_sparse.plan.plan import make_plan
from ds_sparse.plan.settings import Settings

MODEL, SETTINGS = NAMED["bert-base"], Settings(4, zero_stage=1)
WINDOW = {"mode": "bslongformer", "block": 64, "num_sliding_window_blocks": 5}


def planned(rates, block=WINDOW, seq_len=8192, settings=SETTINGS, **options):
    return make_plan(block, "ds.json", MODEL, settings, rates, seq_len, **options)


def test_a_sparse_layout_gains_more_the_longer_sequences_are(rates):
    plan = planned(rates, seq_len=16384)
    gains = [at.dense / at.sparse for at in plan.lengths]
    assert [at.seq_len for at in plan.lengths] == [512, 1024, 2048, 4096, 8192, 16384]
    assert gains == sorted(gains) and plan.gain == pytest.approx(gains[-1])
    assert plan.attention_flops < plan.dense_attention_flops / 10


def test_where_dense_attention_is_quick_dense_is_faster(rates):
    quick = replace(rates, dense={way: [c / 4 for c in coefficients] for way, coefficients in rates.dense.items()})
    plan = planned(quick, {"mode": "dense", "block": 16})
    assert plan.gain < 1 and plan.dense_is_faster_to == 8192
    (layers,) = plan.layers
    assert layers.milliseconds > layers.dense_milliseconds and layers.density == 1


def test_without_a_block_it_is_dense(rates):
    plan = planned(rates, None)
    assert plan.gain == 1 and plan.step == plan.dense_step


def test_a_length_that_ends_inside_a_block_is_computed_in_whole_ones(rates):
    plan, whole = planned(rates, seq_len=8200), planned(rates, seq_len=8256)
    assert plan.padded == 8256 and plan.step == whole.step
    assert plan.tokens == 4 * 8200


def test_the_longest_sequence_is_that_of_the_memory(rates):
    small, large = (planned(rates, memory_gib=gib).longest for gib in (40, 80))
    assert 0 < small < large and planned(rates).longest is None


def test_tokens_are_those_of_all_gpus_and_passes(rates):
    assert planned(rates, settings=replace(SETTINGS, accumulation=2, gpus=8)).tokens == 4 * 2 * 8 * 8192


def test_tokens_are_those_of_sequences_that_ranks_share(rates):
    plan = planned(rates, settings=replace(SETTINGS, gpus=8, ranks=4))
    assert plan.tokens == 4 * 2 * 8192
    (layers,), (alone,) = plan.layers, planned(rates).layers
    assert plan.attention_flops == planned(rates).attention_flops / 4
    assert layers.milliseconds < alone.milliseconds / 2


def test_advice_needs_the_memory(rates):
    assert planned(rates).advice is None
    assert planned(rates, memory_gib=139).advice.settings == SETTINGS


def test_what_cannot_be_is_a_sentence(rates):
    with pytest.raises(ValueError, match="--document-tokens 9000 is more than --seq 8192; give their mean length."):
        planned(rates, document_tokens=9000)
    with pytest.raises(SparseAttentionConfigError, match="sparse_attention.blok: unknown key"):
        planned(rates, WINDOW | {"blok": 16})
    with pytest.raises(ValueError, match="Attention has 12 heads, and 16 ranks are to share them"):
        planned(rates, settings=replace(SETTINGS, gpus=16, ranks=16))
    with pytest.raises(ValueError, match="size is 2, and there is no sparse_attention block, without which"):
        planned(rates, None, settings=replace(SETTINGS, gpus=2, ranks=2))
    with pytest.raises(ValueError, match=r"bslongformer, block 64: no layout of 64 tokens \(.*\); give a longer --seq"):
        planned(rates, seq_len=64)
