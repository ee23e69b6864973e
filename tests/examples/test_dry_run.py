"""A dry run's lines about a GPU, where there is none."""

import argparse
from types import SimpleNamespace

import pytest
import torch

import dry_run
from modeling import BertConfig
from training_run import SPARSE, TrainingRun

MODEL = {"hidden_size": 768, "num_hidden_layers": 2, "num_attention_heads": 12, "intermediate_size": 3072}


@pytest.fixture
def run(tmp_path):
    args = argparse.Namespace(
        deepspeed_config="ds.json", config_file="model.json", max_seq_length=8192, checkpoint_activations=False
    )
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "sparse_attention": {"mode": "bslongformer", "block": 64},
    }
    data = SimpleNamespace(max_predictions_per_seq=1229)
    return TrainingRun(SPARSE, args, config, BertConfig(**MODEL), data, tmp_path)


@pytest.mark.parametrize("gpu, timed", [("NVIDIA H200", True), ("NVIDIA A100-SXM4-80GB", False)])
def test_memory_is_planned_on_any_gpu_and_time_where_rates_were_measured(monkeypatch, run, gpu, timed):
    monkeypatch.setattr(dry_run, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(dry_run, "device_name", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 2**30))
    flops, memory, time = dry_run.cost(run)
    assert flops == f"{run.work().flops / 1e12:,.3g} TFLOP a step and rank"
    assert memory.endswith(" GiB of the GPU's 80.0 while the loss is computed, as planned")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**30))
    _, memory, _ = dry_run.cost(run)
    assert memory.endswith(" GiB of the GPU's 1.0 while the loss is computed, as planned: it does not fit")
    assert ("ms a step and" in time) == timed and ("--on here measures this machine" in time) != timed
