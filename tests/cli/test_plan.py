from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.plan.committed import COMMITTED
from ds_sparse.cli import main
from ds_sparse.plan import measure
from ds_sparse.plan.rates import committed_rates

TRAINED = str(Path(__file__).parents[2] / "configs" / "bert_base_8192.json")
WORDS = ["plan", TRAINED, "--model", "bing_bert-base", "--seq", "8192"]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def gpu(monkeypatch):
    """gpu(name): this machine has one."""

    def put(name):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        properties = SimpleNamespace(name=name, total_memory=80 * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    return put


@pytest.fixture
def measured(monkeypatch):
    """The devices that were measured, in the place of a measurement."""
    devices = []

    def rates(device):
        devices.append(device)
        return committed_rates()

    monkeypatch.setattr(measure, "measured_rates", rates)
    return devices


def planned(capsys, *words, file=TRAINED):
    assert main(["plan", file, *WORDS[2:], "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_plan_of_a_json(capsys):
    assert main(WORDS) == 0
    out, err = capsys.readouterr()
    told = f"{TRAINED}: bing_bert-base (115 million parameters), 4 x 8,192 tokens a pass, bf16, ZeRO 1, 1 GPU"
    assert " ".join(out.split()).startswith(told)  # a long path wraps it
    assert "gain: a dense step takes 2." in out
    assert err == "No GPU here: planned for an NVIDIA H200. --on here measures this CPU.\n"


def test_the_status_says_that_a_step_does_not_fit(capsys):
    assert main([*WORDS, "--memory", "8"]) == 1
    assert capsys.readouterr().out.startswith("does not fit: a step needs 13.")
    assert main([*WORDS, "--memory", "80"]) == 0


def test_options_count_for_what_the_json_says(capsys):
    words = ["--micro-batch", "2", "--gpus", "4", "--dropout", "0", "--checkpoint-activations", "--memory", "40"]
    found = planned(capsys, *words)
    settings, model = found["settings"], found["model"]
    assert (settings["micro_batch"], settings["gpus"], settings["checkpoints"]) == (2, 4, True)
    assert (model["dropout"], model["attention_dropout"], found["memory_gib"]) == (0, 0, 40)
    assert found["step"]["checkpoints"] > 0


def test_ranks_share_a_sequence_as_the_json_says(capsys, tmp_path):
    shared = tmp_path / "ds.json"
    shared.write_text(json.dumps(json.loads(Path(TRAINED).read_text()) | {"sequence_parallel_size": 4}))
    alone, found = planned(capsys, "--gpus", "4"), planned(capsys, file=str(shared))
    assert (found["settings"]["ranks"], found["settings"]["gpus"], found["tokens"]) == (4, 4, alone["tokens"] / 4)
    assert found["memory"]["logits"] == alone["memory"]["logits"] / 4
    assert alone["step"]["exchange"] == 0 < found["step"]["exchange"]
    assert found["advice"]["settings"]["ranks"] == 1


@pytest.mark.parametrize(
    "name, words, devices, gib, said",
    [
        ("NVIDIA H200", [], [], 80, ""),
        (
            "NVIDIA B200",
            [],
            ["cuda"],
            139,  # the rates that stand in for those of a B200 are of an H200
            "Rates of NVIDIA B200 do not come with ds_sparse. Measuring those of NVIDIA B200, which takes some minutes",
        ),
        ("NVIDIA B200", ["--on", "h200"], [], 139, ""),
        ("NVIDIA H200", ["--on", "here"], ["cuda"], 80, "Measuring those of NVIDIA H200, which takes some minutes"),
    ],
)
def test_an_h200_takes_the_committed_rates_and_another_gpu_is_measured(
    capsys, gpu, measured, name, words, devices, gib, said
):
    gpu(name)
    assert main([*WORDS, "--json", *words]) == 0
    out, err = capsys.readouterr()
    assert measured == devices and json.loads(out)["memory_gib"] == gib
    assert err.startswith(said) and bool(err) == bool(said)


def test_rates_come_from_files_of_bench(capsys):
    names = "attention-flex-h200", "bert-h200"
    found = planned(capsys, "--rates", *(str(COMMITTED / f"{name}.json") for name in names))
    assert found["rates_from"] == [f"{name}: commit 1c5bfb93e7a7, 2026-11-23" for name in names]
    assert found["step"]["training"] == 0 and found["memory_gib"] == 139


def test_what_is_wrong_is_said_before_anything_is_measured(capsys, gpu, measured):
    gpu("NVIDIA B200")
    for wrong in (["--dtype", "fp32"], ["--document-tokens", "9000"], ["--memory", "-1"]):
        assert main([*WORDS, *wrong]) == 1
    assert measured == [] and "rates of NVIDIA B200 are of bf16; turn on bf16" in capsys.readouterr().err


@pytest.mark.parametrize(
    "file, words, sentence",
    [
        ("no.json", [], "no.json: no such file"),
        (TRAINED, ["--model", "bart"], "--model bart: no such file, and not one of bert-base"),
        (TRAINED, ["--dtype", "fp32"], "The training is in fp32, and the"),
        (TRAINED, ["--rates", "no.json"], "no.json cannot be read"),
        (TRAINED, ["--dropout", "1.5"], "--dropout 1.5: wanted a number"),
    ],
)
def test_a_mistake_is_a_sentence_and_status_1(file, words, sentence, capsys):
    assert main(["plan", file, *WORDS[2:], *words]) == 1
    out, err = capsys.readouterr()
    assert out == "" and sentence in err


def test_without_a_block_a_line_says_that_the_plan_is_of_dense_training(capsys, tmp_path):
    file = tmp_path / "dense.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}}')
    assert main(["plan", str(file), *WORDS[2:]]) == 0
    assert "no sparse_attention block; this is the plan of dense training." in capsys.readouterr().err
