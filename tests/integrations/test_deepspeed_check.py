"""What DeepSpeed's own classes say about a JSON, under the name that it has in the file."""

from __future__ import annotations

import copy

import deepspeed
import pytest
import torch
from deepspeed.utils import logger

import ds_sparse
from ds_sparse.integrations.deepspeed_check import check_deepspeed_config

BATCH = {"train_batch_size": 8}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}


def adam(**params):
    return {"optimizer": {"type": "Adam", "params": {"torch_adam": True, **params}}}


def scheduler(kind, **params):
    return adam(lr=1e-3) | {"scheduler": {"type": kind, "params": params}}


@pytest.mark.parametrize(
    "config, begin, end",
    [
        ({"train_batch_size": "abc"}, 'train_batch_size: got "abc"; wanted a number. DeepSpeed says: TypeError: ', ""),
        ({"train_batch_size": 0}, "train_batch_size: got 0; DeepSpeed refuses it: ", "has to be greater than 0."),
        ({"train_batch_size": "8,"}, 'train_batch_size: got "8,"; wanted a number. It stands there without quotes', ""),
        ({}, "DeepSpeed refuses it: Either train_batch_size or train_micro_batch_size_per_gpu needs", ""),
        (
            {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 8},
            "train_batch_size, train_micro_batch_size_per_gpu: DeepSpeed refuses it: Check batch related parameters.",
            "30 != 8 * 3 * 1.",
        ),
        (
            BATCH | {"zero_optimization": {"stag": 1}},
            'zero_optimization.stag: DeepSpeed has no such key (given 1). Did you mean "stage"?',
            "",
        ),
        (
            BATCH | {"zero_optimization": {"offload_optimizer": {"devic": "cpu"}}},
            "zero_optimization.offload_optimizer.devic: DeepSpeed has no such key",
            'Did you mean "device"?',
        ),
        (BATCH | {"zero_optimization": {"stage": 5}}, "zero_optimization.stage: got 5; wanted 0 or 1 or 2 or 3.", ""),
        (BATCH | {"tensorboard": {"enabled": "yesx"}}, 'tensorboard.enabled: got "yesx"; DeepSpeed says: ', ""),
        (BATCH | {"timers": {"throughput": {"x": 1}}}, "timers.throughput.x: DeepSpeed has no such key (given 1).", ""),
        (
            BATCH | {"wall_clock_breakdown": "yes"},
            'wall_clock_breakdown: got "yes"; wanted true or false. DeepSpeed',
            "",
        ),
        (BATCH | {"gradient_clipping": "1.0"}, 'gradient_clipping: got "1.0"; wanted a number.', ""),
        (
            {"train_batch_size": "auto"},
            'zero_optimization: missing; Transformers\' Trainer and accelerate, which fill in "auto", refuse a file ',
            'Add "zero_optimization": {"stage": 0}, or another stage.',
        ),
        (BATCH | {"fp16": True}, "fp16: got true; wanted an object {...}. DeepSpeed says: TypeError: ", ""),
        (BATCH | {"optimizer": {"type": 3}}, 'optimizer: got {"type": 3}; DeepSpeed says: AttributeError: ', ""),
        (BATCH | {"optimizer": {"type": "AdmW"}}, 'optimizer.type: got "AdmW"; ', 'Did you mean "AdamW"?'),
        (BATCH | {"scheduler": {"type": "WarmupLr"}}, 'scheduler.type: got "WarmupLr"; ', 'Did you mean "WarmupLR"?'),
        (
            BATCH | {"compile": {"deepcompile": True, "passes": ["autosp"]}, "sequence_parallel_size": 2},
            'compile.passes: got "autosp", DeepSpeed\'s AutoSP, which cuts sequences',
            'set "sequence_parallel_size" to the number of ranks that hold a sequence.',
        ),
        (BATCH | {"amp": {}}, "amp: got {}; DeepSpeed refuses it: NVIDIA Apex AMP", ""),
        (
            BATCH | {"fp16": {"enabled": True}, "bf16": {"enabled": True}, "gradient_clipping": 1.0},
            "fp16, bf16: DeepSpeed refuses it: ",
            "cannot be simultaneously enabled.",
        ),
    ],
)
def test_a_mistake_has_its_name_in_the_file(config, begin, end):
    _, mistakes, _ = check_deepspeed_config(config)
    assert len(mistakes) == 1 and mistakes[0].startswith(begin) and mistakes[0].endswith(end)


def test_all_mistakes_come_at_once():
    config = {"train_batch_size": "x", "zero_optimization": {"a": 1, "b": 2}, "fp16": 3, "optimizer": {"type": "y"}}
    _, mistakes, _ = check_deepspeed_config(config)
    assert [mistake.partition(":")[0] for mistake in mistakes] == [
        "train_batch_size", "zero_optimization.a", "zero_optimization.b", "fp16", "optimizer.type",
    ]  # fmt: skip


def test_a_key_that_needs_another_is_no_mistake_beside_it():
    config = BATCH | {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
    assert check_deepspeed_config(config | {"zero_optimization": {"stage": 1}}).mistakes == []
    assert [mistake.partition(":")[0] for mistake in check_deepspeed_config(config).mistakes] == ["bf16"]


def test_keys_that_deepspeed_ignores_get_a_notice():
    config = BATCH | {
        "gradient_acumulation_steps": 2,
        "optimizer": {"type": "Adam", "parms": {}},
        "activation_checkpointing": {"cpu_chekpointing": True},
        "pipeline": {"stages": 2},
        "data_efficiency": {"data_sampling": {"what_a_sampler_reads_later": 24}},
        "": 1,
        "hidden_size": 768,
    }
    _, mistakes, notices = check_deepspeed_config(config)
    ignored = "DeepSpeed reads no such key, and ignores it."
    assert mistakes == [] and notices == [
        f'gradient_acumulation_steps: {ignored} Did you mean "gradient_accumulation_steps"?',
        f'optimizer.parms: {ignored} Did you mean "params"?',
        f'activation_checkpointing.cpu_chekpointing: {ignored} Did you mean "cpu_checkpointing"?',
        f'"", hidden_size: {ignored}',
    ]


def test_three_batch_sizes_say_how_many_ranks_there_are_of_which_those_of_a_sequence_count_once():
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    _, mistakes, (notice,) = check_deepspeed_config(sizes)
    assert mistakes == [] and "64 = 4 x 2 accumulation steps x 8 ranks" in notice
    assert check_deepspeed_config(sizes | {"train_batch_size": 60}).mistakes
    _, mistakes, (notice,) = check_deepspeed_config(sizes | {"train_batch_size": 8, "sequence_parallel_size": 2})
    assert mistakes == [] and "8 = 4 x 2 accumulation steps x (2 ranks / sequence_parallel_size 2)" in notice
    said = 'sequence_parallel_size: got "two"; wanted the number of ranks that hold a sequence, 1 or more.'
    assert check_deepspeed_config(sizes | {"sequence_parallel_size": "two"}).mistakes == [said]


def test_what_the_trainer_fills_in_is_no_mistake_and_nothing_is_initialised_or_changed():
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }
    before, running = copy.deepcopy(config), (torch.distributed.is_initialized(), torch.cuda.is_initialized())
    _, mistakes, (notice,) = check_deepspeed_config(config)
    assert mistakes == [] and notice.startswith(
        "train_batch_size, train_micro_batch_size_per_gpu, optimizer.params.lr, zero_optimization.reduce_bucket_size: "
    )
    assert (torch.distributed.is_initialized(), torch.cuda.is_initialized()) == running and config == before
    config = BATCH | scheduler("WarmupDecayLR", warmup_num_steps="auto", total_num_steps="auto")
    assert check_deepspeed_config(config | {"zero_optimization": {"stage": 2}}).mistakes == []


def test_what_deepspeed_logs_is_a_notice_and_its_logger_stays_as_it_was(capfd):
    handlers = list(logger.handlers)
    _, mistakes, notices = check_deepspeed_config(BATCH | {"zero_optimization": {"stage": 2, "cpu_offload": True}})
    assert mistakes == [] and len(notices) == 1
    assert notices[0].startswith("DeepSpeed warns: Config parameter cpu_offload is deprecated")
    assert logger.handlers == handlers and capfd.readouterr() == ("", "")


def test_what_training_refuses_is_refused_in_the_same_words():
    config = {"train_batch_size": 2} | adam(lr=1e-3, weight_decay=0.01, max_grad_norm=1.0)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError) as training:
        ds_sparse.initialize(config=config, model=model, model_parameters=model.parameters())
    start = "optimizer.params.max_grad_norm: got 1.0; DeepSpeed refuses it: "
    assert check_deepspeed_config(config)[1:] == ([f"{start}{training.value}."], [])


@pytest.mark.parametrize(
    "config, sentence",
    [
        (
            adam(weight_decy=0.01),
            'optimizer.params.weight_decy: AdamW takes no such key (given 0.01). Did you mean "weight_decay"?',
        ),
        (adam(lr=-1), "optimizer.params.lr: got -1; AdamW refuses it: Invalid learning rate: -1."),
        (
            {"optimizer": {"type": "AdamW", "params": {"learning_rate": 1e-3}}},
            "optimizer.params.learning_rate: FusedAdam takes no such key (given 0.001).",
        ),
        (
            {"optimizer": {"type": "Lamb", "params": {"max_coef": 0.3}}},
            'optimizer.params.max_coef: FusedLamb takes no such key (given 0.3). Did you mean "max_coeff"?',
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 1}},
            'optimizer.type: got "SGD"; DeepSpeed takes it with ZeRO only beside '
            '"zero_allow_untested_optimizer": true.',
        ),
        (
            scheduler("WarmupLR", warmup_steps=10),
            'scheduler.params.warmup_steps: WarmupLR takes no such key (given 10). Did you mean "warmup_num_steps"?',
        ),
        (
            scheduler("WarmupDecayLR", warmup_num_steps=10),
            "scheduler.params.total_num_steps: missing; WarmupDecayLR needs it.",
        ),
        (
            scheduler("WarmupLR", warmup_num_steps=0),
            "scheduler.params.warmup_num_steps: got 0; WarmupLR refuses it: warmup_num_steps must be a positive "
            "integer, got 0.",
        ),
        (
            {"scheduler": {"type": "WarmupLR"}},
            "scheduler.params: missing; wanted an object {...}, which may be empty.",
        ),
    ],
)
def test_what_cannot_be_made_has_its_name_in_the_file(config, sentence):
    assert check_deepspeed_config(BATCH | config)[1:] == ([sentence], [])


ALL_KINDS = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}, "scheduler": WARMUP,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True},
    "activation_checkpointing": {"partition_activations": False}, "gradient_clipping": 1.0,
}  # fmt: skip
STATES = {"type": "Adam", "params": {"fp32_optimizer_states": False}}


@pytest.mark.parametrize(
    "config",
    [
        ALL_KINDS,
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "scheduler": WARMUP},
        {"optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True},
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "adam_w_mode": False, "bias_correction": False}}},
        {"optimizer": STATES, "zero_optimization": ALL_KINDS["zero_optimization"]},
        {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3, "max_coeff": 0.3}}},
        {"optimizer": {"type": "Muon", "params": {"muon_lr": 1e-3, "adam_lr": 1e-3}}},
        scheduler("OneCycle", cycle_min_lr=1e-4, cycle_max_lr=1e-3),
        scheduler("StepLR", step_size=3),
    ],
)
def test_what_is_right_is_taken_without_a_word(config):
    assert check_deepspeed_config(BATCH | config) == (deepspeed.__version__, [], [])


def test_the_old_way_to_ask_for_zero_is_no_mistake():
    for zero in (True, False):
        _, mistakes, warned = check_deepspeed_config(BATCH | adam(lr=1e-3) | {"zero_optimization": zero})
        assert mistakes == [] and "deprecated" in warned[0]
