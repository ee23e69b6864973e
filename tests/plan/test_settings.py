from __future__ import annotations

import pytest

from ds_sparse.plan.settings import Settings, read_settings

MICRO = "train_micro_batch_size_per_gpu"
SHARED = {"train_batch_size": 8, MICRO: 1, "sequence_parallel_size": 4}


@pytest.mark.parametrize(
    "config, options, settings",
    [
        (
            {
                "train_batch_size": 64, MICRO: 4, "bf16": {"enabled": True}, "optimizer": {"type": "SGD"},
                "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000, "overlap_comm": True},
                "activation_checkpointing": {"partition_activations": False},
            },
            {"gpus": 2},
            Settings(4, 8, 2, "bf16", 2, "SGD", 0, False, 4000, True, checks=True),
        ),
        (SHARED, {"gpus": 16}, Settings(1, 2, 16, "fp32", ranks=4)),
        (SHARED, {"micro_batch": 4}, Settings(4, 2, 4, "fp32", ranks=4)),
        (
            {MICRO: 4, "activation_checkpointing": {}},
            {"micro_batch": 2, "dtype": "bf16", "checkpoints": False},
            Settings(2),
        ),
        ({"train_batch_size": "auto", "fp16": {"enabled": "auto"}}, {"micro_batch": 3}, Settings(3, dtype="fp32")),
    ],
)  # fmt: skip
def test_settings_are_those_of_the_json_but_for_what_is_given(config, options, settings):
    assert read_settings(config, "ds.json", **options) == settings


@pytest.mark.parametrize(
    "stage, precision, checks",
    [
        (1, {"bf16": {"enabled": True}}, True),
        (2, {"bfloat16": {"enabled": True, "check_grad_overflow": False}}, False),
        (3, {"bf16": {"enabled": True}}, False),
        (1, {"fp16": {"enabled": True}, "bf16": {"enabled": False, "check_grad_overflow": False}}, True),
        (0, {"bf16": {"enabled": True}}, False),
        (1, {}, False),
    ],
)
def test_zero_1_and_2_check_gradients_where_the_json_does_not_leave_it_out(stage, precision, checks):
    config = {MICRO: 4, "zero_optimization": {"stage": stage}, **precision}
    assert read_settings(config, "ds.json").checks == checks


def test_a_batch_counts_sequences_which_ranks_may_share():
    shared = Settings(1, 2, gpus=16, ranks=4)
    assert (shared.sequences, shared.tokens(1001)) == (8, 251)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"sequence_parallel_size": 0}, "sequence_parallel_size: got 0; wanted the number"),
        ({"train_batch_size": 0}, "train_batch_size: got 0; wanted an integer of at least 1."),
        ({"zero_optimization": True}, "zero_optimization: got true; wanted an object"),
        ({"optimizer": {"type": 3}}, "optimizer.type: got 3; wanted a name."),
        (
            {"zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}},
            'zero_optimization.reduce_bucket_size: got "auto"; give a number',
        ),
    ],
)
def test_a_mistake_is_a_sentence_with_the_file(changes, sentence):
    with pytest.raises(ValueError) as raised:
        read_settings({"train_batch_size": 8} | changes, "ds.json")
    assert str(raised.value).startswith(f"ds.json: {sentence}")
