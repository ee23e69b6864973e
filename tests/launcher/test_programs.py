"""Programs that know nothing of ds_sparse, nor of deepspeed.initialize: Transformers' Trainer, accelerate."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ds_sparse
from ds_sparse.launcher import child

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

PROGRAMS = Path(__file__).with_name("programs")
BLOCK = {"mode": "bslongformer", "block": 16, "num_sliding_window_blocks": 1}
CONFIG = {
    "train_batch_size": 2,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "sparse_attention": BLOCK,
}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


def run(name, folder, device):
    """The process that ended, and the file that it writes."""
    (folder / "zero2.json").write_text(json.dumps(CONFIG | {"zero_optimization": {"stage": 2}}))
    (folder / "zero3.json").write_text(json.dumps(CONFIG | {"zero_optimization": {"stage": 3}, "optimizer": ADAMW}))
    trainer = "--max_steps 1 --per_device_train_batch_size 2 --logging_steps 1 --report_to none --save_strategy no "
    trainer += "--train_sampling_strategy sequential --learning_rate 1e-3" + " --use_cpu" * (device == "cpu")
    words = {
        "trainer": ["--deepspeed", str(folder / "zero3.json"), "--output_dir", str(folder), *trainer.split()],
        "accelerated": [str(folder / "zero2.json"), str(folder / "accelerated.out")],
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": device, "PATH": "/no/compiler",
    }  # fmt: skip
    before = [sys.executable, child.__file__, "--deepspeed_sparse_attention", "script", "--"]
    done = subprocess.run(
        [*before, str(PROGRAMS / f"{name}.py"), *words[name]],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, timeout=180, check=False,
    )  # fmt: skip
    return done, folder / f"{name}.out"


@pytest.fixture(scope="module")
def expected(device):
    """The first loss of the model, sparse and dense, computed here."""
    sys.path.insert(0, str(PROGRAMS))
    from model import make_model, make_samples

    sys.path.remove(str(PROGRAMS))
    batch = {name: x.to(device) for name, x in torch.utils.data.default_collate(make_samples(2)).items()}
    model = make_model().to(device)
    losses = {"dense": model(**batch).loss.item()}
    ds_sparse.sparsify(model, BLOCK)
    return losses | {"sparse": model(**batch).loss.item()}


@pytest.mark.parametrize(
    "name", ["trainer", pytest.param("accelerated", marks=pytest.mark.slow("a process; the Trainer's uses accelerate"))]
)
def test_it_trains_sparse(expected, name, tmp_path, device):
    done, output = run(name, tmp_path, device)
    printed = done.stdout
    assert done.returncode == 0, printed
    seen = json.loads(output.read_text())
    assert abs(expected["sparse"] - expected["dense"]) > 0.01
    assert seen["losses"][0] == pytest.approx(expected["sparse"], abs=2e-5)
    assert seen["attention"] == "ds_sparse"
    assert printed.count("ds_sparse: sparse attention is on in 2 of 2 attention layers.") == 1
    assert "no effect" not in printed
