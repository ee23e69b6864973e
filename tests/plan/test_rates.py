from __future__ import annotations

from dataclasses import replace

import pytest

from ds_sparse.plan.fitting import walk_in_bert
from ds_sparse.plan.layers import BACKWARD, FORWARD
from ds_sparse.plan.model import NAMED
from ds_sparse.plan.operations import Work

MODEL = replace(NAMED["bert-base"], attention_dropout=0.0)


def attention(rates, walked, seq_len, **changes):
    model = replace(MODEL, **changes)
    return sum(rates.attention(walked, 1, model, seq_len, way) for way in (FORWARD, BACKWARD))


def test_no_committed_rate_is_faster_than_the_hardware(rates):
    """A copy and a product of large matrices, as attention-h200 has them; NVLink has 450 GB/s each way."""
    assert 1 / rates.moved < 4.3e9 and 1 / rates.odd_products < 1 / rates.products < 801e9
    assert 50 < 1e-6 / rates.exchange < 450 and 20 < 1e-6 / rates.reduction < 450
    assert len(rates.sources) == 10 and rates.machine == "NVIDIA H200"


def test_dense_attention_grows_with_the_square_and_a_window_with_the_length(rates):
    long = attention(rates, None, 65536)
    assert long / attention(rates, None, 32768) == pytest.approx(4, rel=0.01)
    assert attention(rates, None, 65536, family="gpt_neox") == pytest.approx(long / 2, rel=0.01), "no later tokens"
    longer, shorter = (attention(rates, walk_in_bert("longformer-64", 12, n), n) for n in (262144, 131072))
    assert longer / shorter == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_dropout_costs_by_the_score(kind, rates):
    walked = walk_in_bert("longformer-64", 12, 8192) if kind == "sparse" else None
    extra = attention(rates, walked, 8192, attention_dropout=0.1) - attention(rates, walked, 8192)
    scores = 8192**2 if walked is None else (walked.forward.computed + walked.backward.computed) / 2
    assert extra == pytest.approx(rates.dropout[kind] * 12 * scores) and extra > 0


@pytest.mark.parametrize("head_dim, taken", [(32, 64), (80, 128), (256, 128)])
def test_a_head_size_takes_the_rates_of_the_next_one_measured(rates, head_dim, taken):
    assert attention(rates, None, 8192, head_dim=head_dim) == attention(rates, None, 8192, head_dim=taken)


def test_numbers_of_32_bits_take_twice_the_bytes(rates):
    assert replace(rates, itemsize=4).work(Work(moved=1e9)) == 2 * rates.work(Work(moved=1e9))
