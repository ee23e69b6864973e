from __future__ import annotations

from dataclasses import replace

import pytest

from ds_sparse.plan.communication import exchanged
from ds_sparse.plan.results import Results
from ds_sparse.plan.sequence_cases import DATA, SEQUENCE, Case, Row
from ds_sparse.plan.sequence_steps import model_of, settings_of, with_communication

CASE = Case(8192, "bigbird-64", "bf16", "cuda", 2, "checkpointed", micro_batches=3)


def row(milliseconds, parallel=SEQUENCE, part="all-to-all"):
    return Row(2, parallel, milliseconds=100.0, profile={part: milliseconds})


def test_settings_are_those_of_the_bench():
    found = settings_of(CASE, row(1))
    assert (found.micro_batch, found.accumulation, found.gpus, found.ranks) == (1, 3, 2, 2)
    assert (found.dtype, found.zero_stage, found.checkpoints) == ("bf16", 2, True)
    alone = settings_of(replace(CASE, activations="kept", zero_stage=0), row(1, DATA))
    assert (alone.ranks, alone.checkpoints, alone.bucket_bytes) == (1, False, 0)


def test_the_rate_is_that_of_the_step_in_which_a_byte_took_least(rates):
    longer = replace(CASE, seq_len=16384)
    found = with_communication(rates, Results("", sequence=[(CASE, row(30.0)), (longer, row(40.0))]))
    sent = exchanged(model_of(CASE), settings_of(longer, row(1)), 16384)
    assert found.exchange == pytest.approx(40.0 / sent)
    assert found.reduction is None


@pytest.mark.parametrize("structure", ["longformer-64", "bigbird-16"])
def test_ranks_that_send_keys_in_the_place_of_heads_say_no_rate(structure, rates):
    keys = replace(CASE, structure=structure)
    found = with_communication(rates, Results("", sequence=[(CASE, row(30.0)), (keys, row(0.1))]))
    assert found.exchange == with_communication(rates, Results("", sequence=[(CASE, row(30.0))])).exchange


def test_what_no_rank_sends_has_no_rate(rates):
    found = with_communication(rates, Results("", sequence=[(CASE, row(30.0, DATA))]))
    assert found.exchange is found.reduction is None


def test_committed_rates_are_below_what_links_and_adapters_can_do(rates):
    """NVLink of an H200 has 450 GB/s each way."""
    assert 50 < 1e-6 / rates.exchange < 450 and 20 < 1e-6 / rates.reduction < 450
