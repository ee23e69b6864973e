from __future__ import annotations

from dataclasses import replace

from ds_sparse.plan.memory import GIB, LEFT_FREE, longest, memory_of
from ds_sparse.plan.model import NAMED
from ds_sparse.plan.settings import Settings

MODEL = NAMED["bert-base"]
SETTINGS = Settings(4, zero_stage=1)


def test_the_longest_sequence_is_the_last_that_fits():
    tokens = longest(MODEL, SETTINGS, 64, 80)
    room = 80 * GIB * (1 - LEFT_FREE)
    assert tokens % 64 == 0
    assert memory_of(MODEL, SETTINGS, tokens).total <= room < memory_of(MODEL, SETTINGS, tokens + 64).total


def test_where_the_optimizer_alone_is_too_large_nothing_fits():
    assert longest(MODEL, SETTINGS, 64, 1) == 0


def test_zero_divides_what_it_partitions_among_gpus():
    sizes = {stage: memory_of(MODEL, Settings(1, accumulation=2, gpus=8, zero_stage=stage), 8192) for stage in range(4)}
    assert sizes[1].optimizer == sizes[0].optimizer / 8
    assert sizes[2].gradients == sizes[1].gradients / 8
    assert sizes[3].weights == sizes[2].weights / 8


def test_a_rank_keeps_its_part_of_a_sequence_and_the_output_once_more():
    alone = memory_of(MODEL, Settings(1), 8192)
    shared = memory_of(MODEL, Settings(1, gpus=4, ranks=4), 8192)
    assert shared.attention == alone.attention / 4
    assert shared.activations - alone.activations / 4 == MODEL.layers * 2 * MODEL.hidden * 8192 / 4
    assert shared.logits == alone.logits / 4 and shared.weights == alone.weights


def test_the_rank_with_most_heads_keeps_those():
    one, two = (memory_of(MODEL, Settings(1, gpus=n, ranks=n), 65536 * 3).attention for n in (12, 8))
    assert two == 2 * one


def test_ranks_hold_longer_sequences():
    alone, shared = (longest(MODEL, Settings(1, gpus=4, ranks=ranks, zero_stage=2), 64, 80) for ranks in (1, 4))
    assert 3 < shared / alone < 4


def test_checkpoints_leave_the_input_of_each_layer():
    kept, again = (memory_of(MODEL, replace(SETTINGS, checkpoints=on), 8192) for on in (False, True))
    assert again.attention == 0 and again.activations < kept.activations / 5
    assert again.total < kept.total / 2


def test_a_short_sequence_needs_most_while_the_optimizer_steps():
    assert memory_of(MODEL, Settings(1), 128).at == "while the optimizer steps"
    assert memory_of(MODEL, SETTINGS, 8192).at == "while the loss is computed"


def test_an_optimizer_on_the_cpu_takes_nothing():
    assert memory_of(MODEL, replace(SETTINGS, offloads=True), 8192).optimizer == 0


def test_longer_sequences_make_the_table_of_positions_longer():
    grown = memory_of(MODEL, SETTINGS, 8192).weights - memory_of(MODEL, SETTINGS, 512).weights
    assert grown == 2 * (8192 - 512) * MODEL.hidden
