"""The DeepSpeed JSON of a run: adapted to the device, and refused with sentences before anything is built from it."""

import argparse
import importlib.util
import json
from pathlib import Path

import deepspeed
import pytest
import torch

import deepspeed_json
from deepspeed_json import load_kernels, read_deepspeed_config

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
    """Writes a JSON and reads it as a run does; its path is in every sentence."""

    def read(device=CPU, **changes):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({"train_batch_size": 4, "optimizer": TORCH_ADAM} | changes))
        return read_file(path, device)

    return read


def read_file(path, device):
    args = argparse.Namespace(deepspeed_config=str(path), max_seq_length=512, deepspeed_sparse_attention=False)
    return read_deepspeed_config(args, num_heads=4, num_layers=2, device=device)


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


def test_the_optimizer_of_a_json_without_one_is_adamw(read, capsys):
    assert read(optimizer=None)["optimizer"]["params"] == {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}
    assert read(optimizer={"type": "AdamW"})["optimizer"]["params"] == {"torch_adam": True}
    said = capsys.readouterr().out
    assert "The JSON has no optimizer: AdamW with lr 1e-3" in said and "runs as PyTorch's own on the CPU" in said


@pytest.mark.parametrize("key", ["fp16", "bf16", None])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_precision_that_the_json_names_is_kept_and_bf16_is_that_of_a_gpu(read, capsys, monkeypatch, key, enabled):
    monkeypatch.setattr(deepspeed.get_accelerator(), "is_fp16_supported", lambda: True)
    config = read(CUDA, **({key: {"enabled": enabled}} if key else {}))
    expected = {key: {"enabled": enabled}} if key else {"bf16": {"enabled": True}}
    assert {name: config[name] for name in ("fp16", "bf16") if name in config} == expected
    assert ("names no precision: bf16 is used on the GPU" in capsys.readouterr().out) == (key is None)
    assert "bf16" not in read(CPU)


def test_fp16_is_replaced_where_deepspeed_does_not_have_it(read, monkeypatch):
    for supported in (True, False):
        monkeypatch.setattr(deepspeed.get_accelerator(), "is_fp16_supported", lambda answer=supported: answer)
        assert ("fp16" in read(fp16={"enabled": True})) == supported


REFUSED = [  # by the package's checker, of which one of each kind is here
    ({"fp16": True, "optimizer": {"params": {}}}, ["optimizer.type: missing", "fp16: got true; wanted an object"]),
    ({"optimizer": {"type": "AdamX"}}, ['optimizer.type: got "AdamX"; neither DeepSpeed nor torch.optim has it.']),
    ({"optimizer": [1]}, ["optimizer: got [1]; wanted an object"]),
    ({"optimizer": {"type": "AdamW", "params": {"lrr": 1}}}, ["params.lrr: AdamW takes no such key", '"lr"?']),
    ({"zero_optimization": {"stagee": 2}}, ["zero_optimization.stagee: DeepSpeed has no such key (given 2). Did you"]),
    ({"train_batch_size": 5, "train_micro_batch_size_per_gpu": 2}, ["DeepSpeed refuses it: ", "5 != 2 * 2 * 1"]),
    ({"scheduler": {"type": "WarmupLr"}}, ['neither DeepSpeed nor torch.optim.lr_scheduler has it. Did you mean "Wa']),
    # By this example.
    ({"train_batch_size": "auto"}, ['"auto" is for Transformers\' Trainer or accelerate to fill in; give a value.']),
    (
        {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3},
        ["train_batch_size is 12; it has to be a multiple of 6: 1 ranks x ", "equal to it where all are given"],
    ),
    ({"sparse_attention": {"mode": "bslongformer", "num_sliding_window_blocks": 63}}, ["63", "length of 512"]),
    ({"checkpoint": {"writer": {"decoupled": True}}}, ["checkpoint.writer.decoupled", "Leave them out."]),
    ({"sequence_parallel_size": 2}, ["sequence_parallel_size is 2; the layers of this example do not share"]),
]


@pytest.mark.parametrize("changes, sentences", REFUSED)
def test_a_wrong_json_is_refused_with_the_file_and_the_key(read, tmp_path, changes, sentences):
    with pytest.raises(ValueError) as caught:
        read(**changes)
    refusal = str(caught.value)
    assert all(line.startswith(f"{tmp_path / 'ds.json'}: ") for line in refusal.splitlines()) and "http" not in refusal
    for sentence in sentences:
        assert sentence in refusal


def test_a_batch_has_to_be_dealt_to_all_ranks(read, monkeypatch):
    monkeypatch.setattr(deepspeed_json, "world_size", lambda: 2)
    read(train_batch_size=8, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="train_batch_size is 6; it has to be a multiple of 4: 2 ranks x"):
        read(train_batch_size=6, train_micro_batch_size_per_gpu=2)


@pytest.mark.parametrize("key, package", [("wandb", "wandb"), ("comet", "comet_ml"), ("tensorboard", "tensorboard")])
def test_a_monitor_whose_package_is_missing_is_a_sentence(read, monkeypatch, key, package):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(ValueError, match=rf"{key}.enabled is true, .* package {package} .* pip install {package}, or"):
        read(**{key: {"enabled": True}})
    read(**{key: {"enabled": False}})


LAMB = {"optimizer": {"type": "Lamb", "params": {}}}
ADAM = {"optimizer": {"type": "Adam", "params": {}}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize("config, made", [(LAMB, "FusedLamb"), (ADAM, "DeepSpeedCPUAdam")])
@pytest.mark.parametrize(
    ("architectures", "advice"),
    [
        ("9.0", 'take PyTorch\'s, "type": "AdamW" with "torch_adam": true, or install nvcc'),
        ("9.0a 8.0", "TORCH_CUDA_ARCH_LIST is 9.0a 8.0, of which DeepSpeed reads numbers alone: set it to 9.0 8.0"),
    ],
)
def test_an_optimizer_that_cannot_be_compiled_ends_in_a_sentence(monkeypatch, config, made, architectures, advice):
    class Builder:
        def load(self, verbose):
            raise RuntimeError("Error building extension\nlamb.cu:10: fatal error: cusparse.h\nstopped")

    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", architectures)
    monkeypatch.setattr(deepspeed.get_accelerator(), "create_op_builder", lambda name: Builder())
    error = rf"^ds.json: .* {made} here \(lamb.cu:10: fatal error: cusparse.h\); {advice}"
    with pytest.raises(ValueError, match=error):
        load_kernels(config, "ds.json")
    load_kernels({"optimizer": TORCH_ADAM}, "ds.json")


def test_each_optimizer_that_deepspeed_compiles_has_a_builder_of_that_name():
    for name in {name for names in deepspeed_json.KERNELS.values() for name in names if name}:
        assert deepspeed.get_accelerator().get_op_builder(f"{name}Builder") is not None
