"""The DeepSpeed JSON of a run: adapted to the device, and refused with sentences before anything is built from it."""

import argparse
import importlib.util
import json
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.ops.lamb import FusedLamb

import deepspeed_json
from deepspeed_json import adapt_to_device, check_for_deepspeed, load_kernels, read_deepspeed_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TORCH_ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


@pytest.fixture(autouse=True)
def nvcc(monkeypatch, tmp_path_factory):
    """There is one, as DeepSpeed sees it."""
    home = tmp_path_factory.mktemp("cuda")
    (home / "bin").mkdir()
    (home / "bin" / "nvcc").touch()
    monkeypatch.setattr(deepspeed_json, "CUDA_HOME", str(home))


@pytest.fixture
def read(tmp_path):
    """Writes a JSON and takes it as far as a run does before its model exists; its path is in every sentence."""

    def read(device=CPU, **changes):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({"train_batch_size": 4, "optimizer": TORCH_ADAM} | changes))
        return read_file(path, device)

    return read


def read_file(path, device):
    args = argparse.Namespace(deepspeed_config=str(path), max_seq_length=512, deepspeed_sparse_attention=False)
    config = adapt_to_device(read_deepspeed_config(args, num_heads=4, num_layers=2), device)
    check_for_deepspeed(config, str(path))
    return config


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_every_shipped_json_is_accepted(device):
    for path in CONFIGS.glob("*.json"):
        if "schema" not in path.name:
            assert read_file(path, device)["optimizer"]["type"] in ("AdamW", "Lamb")


def test_lamb_is_replaced_where_deepspeed_has_none(read, capsys, monkeypatch):
    lamb = {"type": "Lamb", "params": {"lr": 11e-3, "weight_decay": 0.02, "max_coeff": 0.3, "min_coeff": 0.01}}
    assert read(CUDA, optimizer=lamb)["optimizer"] == lamb
    assert "Lamb" not in capsys.readouterr().out
    replaced = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.02, "torch_adam": True}}
    assert read(CPU, optimizer=lamb)["optimizer"] == replaced
    assert "AdamW with lr 1e-3 is used on the CPU" in capsys.readouterr().out
    monkeypatch.setattr(deepspeed_json, "CUDA_HOME", None)
    assert read(CUDA, optimizer=lamb)["optimizer"] == replaced
    assert "compiles with nvcc, which is not here: AdamW with lr 1e-3 is used on the GPU" in capsys.readouterr().out


@pytest.mark.parametrize("key, package", [("wandb", "wandb"), ("comet", "comet_ml"), ("tensorboard", "tensorboard")])
def test_a_monitor_whose_package_is_missing_is_a_sentence(read, monkeypatch, key, package):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(ValueError, match=rf"{key}.enabled is true, .* package {package} .* pip install {package}, or"):
        read(**{key: {"enabled": True}})
    read(**{key: {"enabled": False}})


@pytest.mark.parametrize("named", ["fp16 off", "bf16 off", "bf16 on"])
def test_a_precision_that_the_json_names_is_kept(read, named):
    key, _, value = named.partition(" ")
    config = read(CUDA, **{key: {"enabled": value == "on"}})
    assert {name: config[name] for name in ("fp16", "bf16") if name in config} == {key: {"enabled": value == "on"}}


def test_bf16_is_used_on_a_gpu_where_the_json_names_no_precision(read, capsys):
    assert read(CUDA)["bf16"] == {"enabled": True}
    assert "names no precision: bf16 is used on the GPU" in capsys.readouterr().out
    assert "bf16" not in read(CPU)


def test_fp16_is_replaced_where_deepspeed_does_not_have_it(read, monkeypatch):
    for supported in (True, False):
        monkeypatch.setattr(deepspeed.get_accelerator(), "is_fp16_supported", lambda answer=supported: answer)
        assert ("fp16" in read(fp16={"enabled": True})) == supported


@pytest.mark.parametrize(
    "changes, sentences",
    [
        ({"fp16": True, "optimizer": {"params": {}}}, ["fp16: ", "(given true)", "optimizer.type: Field required"]),
        ({"optimizer": {"type": "AdamX"}}, ["optimizer.type: DeepSpeed and torch.optim have no AdamX"]),
        ({"train_batch_size": 5, "train_micro_batch_size_per_gpu": 2}, ["it has to be a multiple of 2: 1 ranks x"]),
        (
            {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3},
            ["DeepSpeed refuses it: ", "12 != 2 * 3 * 1"],
        ),
        ({"zero_optimization": {"stagee": 2}}, ["stagee: Extra inputs are not permitted (given 2)"]),
        ({"data_types": True}, ["DeepSpeed refuses it: "]),
        ({"sparse_attention": {"mode": "bslongformer", "num_sliding_window_blocks": 63}}, ["63", "length of 512"]),
        (
            {"zero_optimization": {"stage": 2}, "optimizer": {"type": "SGD"}},
            ["zero_optimization.stage is 2, and DeepSpeed has ZeRO for Adam, AdamW, Adagrad and Lion, not for SGD"],
        ),
        ({"checkpoint": {"writer": {"decoupled": True}}}, ["checkpoint.writer.decoupled", "Leave them out."]),
        ({"optimizer": {"type": "lr_scheduler"}}, ["optimizer.type: DeepSpeed and torch.optim have no lr_scheduler"]),
        ({"scheduler": {"type": "WarmupLr"}}, ["scheduler.type: ", "have no WarmupLr; DeepSpeed has LRRangeTest, "]),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_steps": 5}}},
            [
                'warmup_steps: deepspeed\'s WarmupDecayLR has no such parameter. Did you mean "warmup_num_steps"?',
                "scheduler.params.total_num_steps is missing; deepspeed's WarmupDecayLR needs it.",
            ],
        ),
    ],
)
def test_a_wrong_json_is_refused_with_the_file_and_the_key(read, tmp_path, changes, sentences):
    with pytest.raises(ValueError) as caught:
        read(**changes)
    refusal = str(caught.value)
    assert refusal.startswith(f"{tmp_path / 'ds.json'}: ") and "http" not in refusal
    for sentence in sentences:
        assert sentence in refusal


@pytest.mark.parametrize(
    "device, kind, params, sentence",
    [
        (CPU, "AdamW", {"lrr": 1e-3}, 'optimizer.params.lrr: torch\'s AdamW has no such parameter. Did you mean "lr"?'),
        (CUDA, "AdamW", {"epss": 0}, 'epss: deepspeed\'s FusedAdam has no such parameter. Did you mean "eps"?'),
        (CUDA, "Lamb", {"max_coef": 1}, 'deepspeed\'s FusedLamb has no such parameter. Did you mean "max_coeff"?'),
        (CPU, "SGD", {"zzz": 1}, "params.zzz: torch's SGD has no such parameter. It has dampening, "),
        (CPU, "AdamW", {"lr": -1}, "optimizer.params: AdamW refuses them: Invalid learning rate: -1."),
        (CPU, "AdamW", {"lr": "fast"}, "optimizer.params: AdamW refuses them: "),
        (CPU, "AdamW", {"betas": [0.9]}, "optimizer.params: AdamW refuses them: "),
    ],
)
def test_optimizer_params_that_the_optimizer_would_refuse_end_in_a_sentence(read, device, kind, params, sentence):
    with pytest.raises(ValueError) as caught:
        read(device, optimizer={"type": kind, "params": params})
    assert sentence in str(caught.value)


def test_ranks_of_a_sequence_are_refused_before_anything_is_made(read):
    with pytest.raises(
        ValueError, match="ds.json: sequence_parallel_size is 2; the layers of this example do not share"
    ):
        read(CPU, sequence_parallel_size=2)


@pytest.mark.parametrize("stage, device, chosen", [(0, "none", "FusedAdam"), (2, "cpu", "DeepSpeedCPUAdam")])
def test_adams_params_are_those_of_the_one_that_deepspeed_takes(read, stage, device, chosen):
    zero = {"stage": stage, "offload_optimizer": {"device": device}}
    with pytest.raises(ValueError, match=f"deepspeed's {chosen} has no such parameter"):
        read(CUDA, optimizer={"type": "Adam", "params": {"fused": True}}, zero_optimization=zero)
    read(CUDA, optimizer={"type": "Adam", "params": {"bias_correction": True}}, zero_optimization=zero)


@pytest.mark.parametrize(
    ("architectures", "advice"),
    [
        ("9.0", 'take PyTorch\'s, "type": "AdamW" with "torch_adam": true, or install nvcc'),
        ("9.0a 8.0", "TORCH_CUDA_ARCH_LIST is 9.0a 8.0, of which DeepSpeed reads numbers alone: set it to 9.0 8.0"),
    ],
)
def test_an_optimizer_that_cannot_be_compiled_ends_in_a_sentence(monkeypatch, architectures, advice):
    class Builder:
        def load(self, verbose):
            raise RuntimeError("Error building extension\nlamb.cu:10: fatal error: cusparse.h\nstopped")

    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", architectures)
    monkeypatch.setattr(deepspeed.get_accelerator(), "create_op_builder", lambda name: Builder())
    error = rf"^ds.json: .* FusedLamb here \(lamb.cu:10: fatal error: cusparse.h\); {advice}"
    with pytest.raises(ValueError, match=error):
        load_kernels(FusedLamb, "ds.json")
    load_kernels(torch.optim.AdamW, "ds.json")
