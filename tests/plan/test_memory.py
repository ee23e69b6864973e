"""What a step needs of a GPU, and which parallelism makes it fit."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ds_sparse.plan.advice import advise, edits
from ds_sparse.plan.fitting import walk_in_bert
from ds_sparse.plan.memory import GIB, LEFT_FREE, longest, memory_of
from ds_sparse.plan.model import NAMED
from ds_sparse.plan.settings import Settings, read_settings
from ds_sparse.plan.step import step_of

MODEL = NAMED["bert-base"]
SETTINGS = Settings(4, zero_stage=1)
WALKS = [walk_in_bert("longformer-64", 12, 8192)] * 12


def test_the_longest_sequence_is_the_last_that_fits():
    tokens = longest(MODEL, SETTINGS, 64, 80)
    room = 80 * GIB * (1 - LEFT_FREE)
    assert tokens % 64 == 0
    assert memory_of(MODEL, SETTINGS, tokens).total <= room < memory_of(MODEL, SETTINGS, tokens + 64).total
    assert longest(MODEL, SETTINGS, 64, 1) == 0, "the optimizer alone is too large"
    alone, shared = (longest(MODEL, Settings(1, gpus=4, ranks=ranks, zero_stage=2), 64, 80) for ranks in (1, 4))
    assert 3 < shared / alone < 4


def test_zero_divides_what_it_partitions_among_gpus():
    sizes = {stage: memory_of(MODEL, Settings(1, accumulation=2, gpus=8, zero_stage=stage), 8192) for stage in range(4)}
    for stage, part in ((1, "optimizer"), (2, "gradients"), (3, "weights")):
        assert getattr(sizes[stage], part) == getattr(sizes[stage - 1], part) / 8


def test_a_rank_keeps_its_part_of_a_sequence_and_the_output_once_more():
    alone = memory_of(MODEL, Settings(1), 8192)
    shared = memory_of(MODEL, Settings(1, gpus=4, ranks=4), 8192)
    assert shared.attention == alone.attention / 4
    assert shared.activations - alone.activations / 4 == MODEL.layers * 2 * MODEL.hidden * 8192 / 4
    assert shared.logits == alone.logits / 4 and shared.weights == alone.weights
    one, two = (memory_of(MODEL, Settings(1, gpus=n, ranks=n), 65536 * 3).attention for n in (12, 8))
    assert two == 2 * one, "of the rank with most heads"


def advised(rates, settings, gib, most_ranks=MODEL.heads):
    return advise(rates, MODEL, settings, 8192, lambda _: WALKS, gib, most_ranks)


def gib_of(settings, **changes):
    """The memory of a step, and a little more."""
    return 1.001 * memory_of(MODEL, replace(settings, **changes), 8192).total / GIB / (1 - LEFT_FREE)


@pytest.mark.parametrize("ranks, checkpoints", [(1, False), (1, True), (2, True), (4, True), (8, True), (12, True)])
def test_the_first_that_fits_is_advised(rates, ranks, checkpoints):
    settings = Settings(1, gpus=24, zero_stage=2, ranks=4)
    wanted = replace(settings, ranks=ranks, checkpoints=checkpoints)
    found = advised(rates, settings, gib_of(wanted))
    assert found.settings == wanted and found.step == step_of(rates, MODEL, wanted, 8192, WALKS)


def test_ranks_within_a_node_and_fewer_sequences_a_pass_come_first(rates):
    settings = Settings(1, gpus=24, zero_stage=2)
    assert advised(rates, settings, gib_of(settings, ranks=3, checkpoints=True)).settings.ranks == 4
    fewer = Settings(2, gpus=8)
    assert advised(rates, replace(fewer, micro_batch=4), gib_of(fewer)).settings == fewer, "before checkpoints"


def test_where_nothing_fits_there_is_no_advice(rates):
    assert advised(rates, Settings(1, gpus=64), 1) is None
    settings = Settings(1, gpus=16, zero_stage=3)
    gib = gib_of(settings, ranks=8, checkpoints=True)
    assert advised(rates, settings, gib).settings.ranks == 8
    assert advised(rates, settings, 0.99 * gib) is None, "no more ranks than heads"
    assert advised(rates, settings, gib, most_ranks=1) is None, "without a block no ranks share a sequence"


MICRO, TRAIN, CHECKPOINTS = "train_micro_batch_size_per_gpu", "train_batch_size", "activation_checkpointing"
RANKS = {"sequence_parallel_size": 4}


@pytest.mark.parametrize(
    "config, changes, said",
    [
        ({MICRO: 4}, {"micro_batch": 1}, f'"{MICRO}": 1 (8 sequences a step, not 32)'),
        ({TRAIN: 32}, {"micro_batch": 1}, f'"{TRAIN}": 8'),
        ({MICRO: 4, TRAIN: 64}, {"micro_batch": 2}, f'"{MICRO}": 2, "{TRAIN}": 32'),
        ({MICRO: 4}, {"ranks": 2, "micro_batch": 8}, f'"sequence_parallel_size": 2, "{MICRO}": 8'),
        (RANKS | {MICRO: 4, TRAIN: 8}, {"ranks": 1, "micro_batch": 1}, f'no "sequence_parallel_size", "{MICRO}": 1'),
        (RANKS | {TRAIN: 8}, {"ranks": 1}, f'no "sequence_parallel_size", "{TRAIN}": 32'),
        (RANKS | {MICRO: 1}, {"ranks": 1}, 'no "sequence_parallel_size" (8 sequences a step, not 2)'),
        ({MICRO: 4}, {"checkpoints": True}, f'"{CHECKPOINTS}": {{}}'),
        ({MICRO: 4, CHECKPOINTS: {}}, {"checkpoints": False}, f'no "{CHECKPOINTS}"'),
    ],
)
def test_a_json_changed_as_advised_has_the_settings_that_are_advised(config, changes, said):
    planned = read_settings(config, "ds.json", gpus=8)
    advised = replace(planned, **changes)
    assert edits(planned, advised) == said
    changed = dict(config)
    for edit in said.partition(" (")[0].split(", "):
        if edit.startswith("no "):
            del changed[json.loads(edit[3:])]
        else:
            changed |= json.loads(f"{{{edit}}}")
    assert read_settings(changed, "ds.json", gpus=8) == advised


def test_what_an_option_set_is_changed_by_the_option_or_by_a_key_that_is_new():
    automatic = {MICRO: "auto", TRAIN: "auto"}
    planned = read_settings(automatic, "ds.json", micro_batch=4, checkpoints=True)
    assert edits(planned, replace(planned, micro_batch=2)) == f'"{MICRO}": 2 (2 sequences a step, not 4)'
    assert edits(planned, replace(planned, checkpoints=False)) == "no --checkpoint-activations"
    planned = read_settings({MICRO: 4, CHECKPOINTS: {}}, "ds.json", checkpoints=False)
    assert edits(planned, replace(planned, checkpoints=True)) == "no --no-checkpoint-activations"
