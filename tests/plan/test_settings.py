from __future__ import annotations

import pytest

from ds_sparse.plan.settings import Settings, read_settings, unknown_optimizer


def read(config, **options):
    return read_settings(config, "ds.json", **options)


def test_what_the_json_says():
    found = read(
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000, "overlap_comm": True},
            "optimizer": {"type": "SGD"},
            "activation_checkpointing": {"partition_activations": False},
        },
        gpus=2,
    )
    assert found == Settings(4, 8, 2, "bf16", 2, "SGD", 0, False, 4000, True)


def test_a_batch_counts_sequences_which_ranks_may_share():
    found = read({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 4}, gpus=16)
    assert (found.ranks, found.gpus, found.accumulation, found.sequences) == (4, 16, 2, 8)
    assert found.tokens(1001) == 251


def test_as_many_gpus_as_share_a_sequence_if_not_given():
    assert read({"train_batch_size": 1, "sequence_parallel_size": 4}).gpus == 4
    assert read({"train_batch_size": 1}).gpus == 1


def test_what_is_given_counts_for_what_it_says():
    config = {"train_micro_batch_size_per_gpu": 4, "activation_checkpointing": {}}
    found = read(config, micro_batch=2, dtype="bf16", checkpoints=False)
    assert (found.micro_batch, found.dtype, found.checkpoints) == (2, "bf16", False)
    assert read(config).dtype == "fp32"


def test_what_the_trainer_fills_in_has_to_be_given():
    config = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "fp16": {"enabled": "auto"}}
    with pytest.raises(ValueError, match="neither train_micro_batch_size_per_gpu nor train_batch_size gives a number"):
        read(config)
    assert read(config, micro_batch=3).micro_batch == 3


@pytest.mark.parametrize(
    "config, sentence",
    [
        ({"train_batch_size": 7}, "train_batch_size 7 is no multiple of 2 GPUs x 1 gradient_accumulation_steps"),
        (
            {"train_batch_size": 8, "sequence_parallel_size": 4},
            "sequence_parallel_size is 4, and --gpus 2 is no",
        ),
        ({"train_batch_size": 8, "sequence_parallel_size": 0}, "sequence_parallel_size: got 0; wanted the number of"),
        ({"train_batch_size": 0}, "train_batch_size: got 0; wanted an integer of at least 1."),
        ({"train_batch_size": 8, "zero_optimization": {"stage": 4}}, "zero_optimization.stage: got 4; wanted 0, 1, 2"),
        ({"train_batch_size": 8, "zero_optimization": True}, "zero_optimization: got true; wanted an object"),
        ({"train_batch_size": 8, "optimizer": {"type": 3}}, "optimizer.type: got 3; wanted a name."),
    ],
)
def test_a_mistake_is_a_sentence_with_the_file(config, sentence):
    with pytest.raises(ValueError) as raised:
        read(config, gpus=2)
    assert str(raised.value).startswith(f"ds.json: {sentence}")


def test_a_batch_that_groups_of_ranks_do_not_divide_is_a_sentence():
    with pytest.raises(ValueError, match="train_batch_size 3 is no multiple of 2 groups of 4 GPUs x 1 gradient"):
        read({"train_batch_size": 3, "sequence_parallel_size": 4}, gpus=8)


def test_an_optimizer_that_is_counted_as_another_is_named():
    assert unknown_optimizer(Settings(1, optimizer="AdamW")) is None
    assert unknown_optimizer(Settings(1, optimizer="Sophia")).startswith("optimizer Sophia is counted as Adam")
