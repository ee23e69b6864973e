from __future__ import annotations

from dataclasses import replace

import pytest

from ds_sparse.bench.cases import NO_ATTENTION
from ds_sparse.bench.machine import BACKWARD, FORWARD
from ds_sparse.plan.model import NAMED
from ds_sparse.plan.operations import Work
from ds_sparse.plan.rates import rates_of, walk_in_bert
from ds_sparse.plan.results import COMMITTED, Results, from_files

MODEL = replace(NAMED["bert-base"], attention_dropout=0.0)


def attention(rates, walked, seq_len, model=MODEL):
    return sum(rates.attention(walked, 1, model, seq_len, way) for way in (FORWARD, BACKWARD))


def test_no_rate_is_faster_than_what_was_measured_of_the_hardware(rates):
    """`ceilings` of attention-h200: a copy, and a product of large matrices."""
    assert 1 / rates.moved < 4.3e9 and 1 / rates.odd_products < 1 / rates.products < 801e9


def test_dense_attention_grows_with_the_square_and_a_window_with_the_length(rates):
    assert attention(rates, None, 65536) / attention(rates, None, 32768) == pytest.approx(4, rel=0.01)
    longer, shorter = (attention(rates, walk_in_bert("longformer-64", 12, n), n) for n in (65536, 32768))
    assert longer / shorter == pytest.approx(2, rel=0.05)


def test_dense_attention_that_masks_later_tokens_takes_half(rates):
    causal = replace(MODEL, family="gpt_neox")
    assert attention(rates, None, 65536, causal) == pytest.approx(attention(rates, None, 65536) / 2, rel=0.01)


def test_dropout_costs_by_the_score(rates):
    dropped = replace(MODEL, attention_dropout=0.1)
    more = {name: rates.dropout[name] for name in ("dense", "sparse")}
    assert min(more.values()) > 0
    extra = attention(rates, None, 8192, dropped) - attention(rates, None, 8192)
    assert extra == pytest.approx(more["dense"] * 12 * 8192**2)


@pytest.mark.parametrize("head_dim, taken", [(32, 64), (64, 64), (80, 128), (128, 128), (256, 128)])
def test_a_head_size_takes_the_rates_of_the_next_one_measured(rates, head_dim, taken):
    this, that = (attention(rates, None, 8192, replace(MODEL, head_dim=size)) for size in (head_dim, taken))
    assert this == that


def test_numbers_of_32_bits_take_twice_the_bytes(rates):
    assert replace(rates, itemsize=4).work(Work(moved=1e9)) == 2 * rates.work(Work(moved=1e9))


def test_steps_of_a_cpu_are_those_of_its_small_model_in_32_bits(results):
    none = [step for step in results.bert if step.attention == NO_ATTENTION and not step.case.dropout]
    on_cpu = [replace(step, case=replace(step.case, device="cpu", dtype="fp32", seq_len=1024)) for step in none]
    found = rates_of(replace(results, kernels=results.kernels[:8], bert=on_cpu))
    assert (found.itemsize, found.measured.hidden, found.measured.layers) == (4, 128, 2)


def test_what_is_missing_is_said(results):
    with pytest.raises(ValueError, match="one of them gave no times"):
        rates_of(Results("a GPU", bert=results.bert))
    with pytest.raises(ValueError, match="one of them gave no times"):
        rates_of(from_files([COMMITTED / "attention-flex-h200.json"]))
