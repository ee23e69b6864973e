from __future__ import annotations

import pytest

from ds_sparse.plan.settings import Settings, read_settings

MICRO = "train_micro_batch_size_per_gpu"


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
            Settings(4, 8, 2, "bf16", 2, "SGD", 0, False, 4000, True),
        ),
        (
            {"train_batch_size": 8, MICRO: 1, "sequence_parallel_size": 4},
            {"gpus": 16},
            Settings(1, 2, 16, "fp32", ranks=4),
        ),
        ({"train_batch_size": 1, "sequence_parallel_size": 4}, {}, Settings(1, 1, 4, "fp32", ranks=4)),
        ({"train_batch_size": 1}, {}, Settings(1, dtype="fp32")),
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


def test_a_batch_counts_sequences_which_ranks_may_share():
    shared = Settings(1, 2, gpus=16, ranks=4)
    assert (shared.sequences, shared.tokens(1001)) == (8, 251)


@pytest.mark.parametrize(
    "config, gpus, sentence",
    [
        ({"train_batch_size": "auto", MICRO: "auto"}, 1, f"neither {MICRO} nor train_batch_size gives a number"),
        ({"train_batch_size": 7}, 2, "train_batch_size 7 is no multiple of 2 GPUs x 1 gradient_accumulation_steps"),
        (
            {"train_batch_size": 3, "sequence_parallel_size": 4},
            8,
            "train_batch_size 3 is no multiple of 2 groups of 4 GPUs x 1 gradient_accumulation_steps",
        ),
        ({"train_batch_size": 8, "sequence_parallel_size": 4}, 2, "sequence_parallel_size is 4, and --gpus 2 is no"),
        ({"train_batch_size": 8, "sequence_parallel_size": 0}, 2, "sequence_parallel_size: got 0; wanted the number"),
        ({"train_batch_size": 0}, 2, "train_batch_size: got 0; wanted an integer of at least 1."),
        ({"train_batch_size": 8, "zero_optimization": {"stage": 4}}, 2, "zero_optimization.stage: got 4; wanted 0, 1,"),
        ({"train_batch_size": 8, "zero_optimization": True}, 2, "zero_optimization: got true; wanted an object"),
        ({"train_batch_size": 8, "optimizer": {"type": 3}}, 2, "optimizer.type: got 3; wanted a name."),
    ],
)
def test_a_mistake_is_a_sentence_with_the_file(config, gpus, sentence):
    with pytest.raises(ValueError) as raised:
        read_settings(config, "ds.json", gpus=gpus)
    assert str(raised.value).startswith(f"ds.json: {sentence}")
