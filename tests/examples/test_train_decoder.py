"""The decoder's run as its users start it: sparse and dense, its losses, what it writes, and its saved models."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import ds_sparse

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "gpt_neox" / "train.py"
JSON = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 1000000,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "sparse_attention": {"mode": "bslongformer", "block": 16, "num_sliding_window_blocks": 3},
}


def start(workplace, config: dict, *options: str) -> subprocess.CompletedProcess:
    folder, tiny = workplace.folder, json.loads((SCRIPT.parent / "neox_tiny.json").read_text())
    tiny |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    (folder / "tiny.json").write_text(json.dumps(tiny))
    (folder / "ds.json").write_text(json.dumps(config))
    command = [sys.executable, SCRIPT, "--deepspeed_config", "ds.json", "--corpus", "corpus", "--output-dir", "runs"]
    command += ["--config-file", "tiny.json", "--max-seq-length", "128", *options]
    return workplace.execute(command, cwd=folder)


@pytest.mark.slow("trains two decoders")
def test_sparse_and_dense_learn_write_and_are_saved(workplace):
    options = ("--compare-dense", "--max-steps", "40", "--warmup-steps", "10", "--generate", "40")
    ended = start(workplace, JSON, "--deepspeed_sparse_attention", *options)
    assert ended.returncode == 0, ended.stderr
    assert "sparse attention is on in 2 of 2 attention layers" in ended.stdout
    assert ended.stdout.count("The run ends after step 40 or 5 minutes at most; ") == 1
    found = re.findall(r"(sparse|dense): held-out loss ([\d.]+) nats a byte after 40 steps", ended.stdout)
    unigram = float(re.search(r"the unigram cross-entropy is ([\d.]+)", ended.stdout)[1])
    assert [name for name, _ in found] == ["sparse", "dense"]
    assert all(float(loss) < unigram for _, loss in found)
    written = re.search(r"What sparse writes after it:\n(.*?)\nWhat dense writes", ended.stdout, re.DOTALL)[1]
    assert len(written) >= 20
    models = workplace.folder / "runs" / "0001"
    tokens = torch.randint(1, 256, (1, 100))
    sparse = transformers.AutoModelForCausalLM.from_pretrained(models / "sparse", attn_implementation="ds_sparse")
    dense = transformers.AutoModelForCausalLM.from_pretrained(models / "sparse")
    assert sparse.config.sparse_attention["mode"] == "bslongformer"
    assert not torch.equal(sparse(tokens).logits, dense(tokens).logits)
    ds_sparse.sparsify(dense)
    assert torch.equal(sparse(tokens).logits, dense(tokens).logits)


@pytest.mark.slow("trains two decoders")
@pytest.mark.parametrize("mode", ["nsa", "indexer"])
def test_a_shipped_json_trains_what_learns_to_choose_and_the_model_generates(workplace, mode):
    config = json.loads((SCRIPT.parents[2] / "configs" / f"{mode}.json").read_text())
    config["sparse_attention"]["block"] = 16
    options = ("--max-steps", "5", "--generate", "40", "--output-dir", f"runs/{mode}")
    ended = start(workplace, config, "--deepspeed_sparse_attention", *options)
    assert ended.returncode == 0, ended.stderr
    assert "sparse attention is on in 2 of 2 attention layers" in ended.stdout
    assert re.search(r"held-out loss [\d.]+ nats a byte after 5 steps", ended.stdout)
    assert len(re.search(r"What sparse writes after it:\n(.*?)\nModels", ended.stdout, re.DOTALL)[1]) >= 20


@pytest.mark.slow("starts the script for five seconds")
def test_what_it_does_not_train_with_ends_in_a_sentence(workplace):
    ended = start(workplace, JSON | {"fp16": {"enabled": True}}, "--generate", "0")
    assert ended.returncode == 1
    assert ended.stderr.strip().splitlines()[-1] == "train.py: ds.json: fp16 is not for this example; take bf16."
