"""The DeepSpeed JSON of a run: adapted to the device, and refused with sentences before anything is built from it."""

import argparse
import json
from pathlib import Path

import deepspeed
import pytest
import torch

import deepspeed_json

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TORCH_ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


def read_file(path, device):
    args = argparse.Namespace(deepspeed_config=str(path), max_seq_length=512, deepspeed_sparse_attention=False)
    return deepspeed_json.read_deepspeed_config(args, num_heads=4, num_layers=2, device=device)


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Writes a JSON and reads it as a run does where there is an nvcc; its path is in every sentence."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setattr(deepspeed_json, "CUDA_HOME", str(tmp_path))

    def read(device=CPU, **changes):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({"train_batch_size": 4, "optimizer": TORCH_ADAM} | changes))
        return read_file(path, device)

    return read


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_every_shipped_json_is_accepted(device):
    for path in CONFIGS.glob("*.json"):
        if "schema" not in path.name:
            assert read_file(path, device)["optimizer"]["type"] in ("AdamW", "Lamb")


def test_an_optimizer_that_the_device_does_not_have_or_the_json_does_not_name_is_adamw(read, capsys, monkeypatch):
    lamb = {"type": "Lamb", "params": {"lr": 11e-3, "weight_decay": 0.02, "max_coeff": 0.3, "min_coeff": 0.01}}
    assert read(CUDA, optimizer=lamb)["optimizer"] == lamb
    assert "Lamb" not in capsys.readouterr().out
    replaced = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.02, "torch_adam": True}}
    assert read(CPU, optimizer=lamb)["optimizer"] == replaced
    assert "AdamW with lr 1e-3 is used on the CPU" in capsys.readouterr().out
    monkeypatch.setattr(deepspeed_json, "CUDA_HOME", None)
    assert read(CUDA, optimizer=lamb)["optimizer"] == replaced
    assert "compiles with nvcc, which is not here: AdamW with lr 1e-3 is used on the GPU" in capsys.readouterr().out
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
    monkeypatch.setattr(deepspeed.get_accelerator(), "is_fp16_supported", lambda: False)
    assert "fp16" not in read(fp16={"enabled": True})


REFUSED = [  # by the package's checker
    ({"fp16": True, "optimizer": {"params": {}}}, ["optimizer.type: missing", "fp16: got true; wanted an object"]),
    ({"optimizer": [1]}, ["optimizer: got [1]; wanted an object"]),
    ({"optimizer": {"type": "AdamW", "params": {"lrr": 1}}}, ["params.lrr: AdamW takes no such key", '"lr"?']),
    ({"train_batch_size": 5, "train_micro_batch_size_per_gpu": 2}, ["DeepSpeed refuses it: ", "5 != 2 * 2 * 1"]),
    # By this example.
    ({"train_batch_size": "auto"}, ['"auto" is for Transformers\' Trainer or accelerate to fill in; give a value.']),
    (
        {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3},
        ["train_batch_size is 12; it has to be a multiple of 6: 1 ranks x ", "equal to it where all are given"],
    ),
    ({"sparse_attention": {"mode": "bslongformer", "num_sliding_window_blocks": 63}}, ["63", "length of 512"]),
    ({"sequence_parallel_size": 2}, ["sequence_parallel_size is 2; the layers of this example do not share"]),
]


@pytest.mark.parametrize("changes, sentences", REFUSED)
def test_a_wrong_json_is_refused_with_the_file_and_the_key(read, tmp_path, changes, sentences):
    with pytest.raises(ValueError) as caught:
        read(**changes)
    refusal = str(caught.value)
    assert all(line.startswith(f"{tmp_path / 'ds.json'}: ") for line in refusal.splitlines()) and "http" not in refusal
    assert all(sentence in refusal for sentence in sentences)


def test_a_batch_has_to_be_dealt_to_all_ranks(read, monkeypatch):
    monkeypatch.setattr(deepspeed_json, "world_size", lambda: 2)
    read(train_batch_size=8, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="train_batch_size is 6; it has to be a multiple of 4: 2 ranks x"):
        read(train_batch_size=6, train_micro_batch_size_per_gpu=2)
