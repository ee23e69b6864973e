"""An optimizer and a scheduler that DeepSpeed will not make are mistakes before anything is made."""

import pytest
import torch

import ds_sparse
from ds_sparse.integrations.deepspeed_check import check_deepspeed_config

BATCH = {"train_batch_size": 2}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}


def adam(**params):
    return {"optimizer": {"type": "Adam", "params": {"torch_adam": True, **params}}}


def scheduler(kind, **params):
    return adam(lr=1e-3) | {"scheduler": {"type": kind, "params": params}}


def test_what_training_refuses_is_refused_in_the_same_words():
    config = BATCH | adam(lr=1e-3, weight_decay=0.01, max_grad_norm=1.0)
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


@pytest.mark.parametrize(
    "config",
    [
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "scheduler": WARMUP},
        {"optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True},
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "adam_w_mode": False, "bias_correction": False}}},
        {
            "optimizer": {"type": "Adam", "params": {"fp32_optimizer_states": False}},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
        {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3, "max_coeff": 0.3}}},
        {"optimizer": {"type": "Muon", "params": {"muon_lr": 1e-3, "adam_lr": 1e-3}}},
        scheduler("OneCycle", cycle_min_lr=1e-4, cycle_max_lr=1e-3),
        scheduler("StepLR", step_size=3),
    ],
)
def test_what_can_be_made_is_taken_without_a_word(config):
    assert check_deepspeed_config(BATCH | config)[1:] == ([], [])


def test_the_old_way_to_ask_for_zero_is_no_mistake():
    for zero in (True, False):
        _, mistakes, warned = check_deepspeed_config(BATCH | adam(lr=1e-3) | {"zero_optimization": zero})
        assert mistakes == [] and "deprecated" in warned[0]


def test_a_required_parameter_that_the_trainer_fills_in_is_not_missing():
    config = scheduler("WarmupDecayLR", warmup_num_steps="auto", total_num_steps="auto")
    _, mistakes, _ = check_deepspeed_config(BATCH | config | {"zero_optimization": {"stage": 2}})
    assert mistakes == []
