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

CONFIGS = Path(__file__).parents[2] / "configs"
TRAINED = str(CONFIGS / "bert_base_8192.json")


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


def planned(capsys, *words, file=TRAINED, model="bing_bert-base", seq="8192"):
    assert main(["plan", file, "--model", model, "--seq", seq, "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_plan_of_a_json(capsys):
    assert main(["plan", TRAINED, "--model", "bing_bert-base", "--seq", "8192"]) == 0
    out, err = capsys.readouterr()
    told = f"{TRAINED}: bing_bert-base (115 million parameters), 4 x 8,192 tokens a pass, bf16, ZeRO 1, 1 GPU"
    assert " ".join(out.split()).startswith(told)  # a long path wraps it
    assert "gain: a dense step takes 2." in out
    assert err == "No GPU here: planned for an NVIDIA H200. --on here measures this CPU.\n"


def test_the_status_says_that_a_step_does_not_fit(capsys):
    words = ["plan", TRAINED, "--model", "bing_bert-base", "--seq", "8192", "--memory"]
    assert main([*words, "8"]) == 1 and capsys.readouterr().out.startswith("does not fit: a step needs 13.")
    assert main([*words, "80"]) == 0


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


def test_an_h200_takes_the_committed_rates_and_its_own_memory(capsys, gpu, measured):
    gpu("NVIDIA H200")
    assert planned(capsys)["memory_gib"] == 80
    assert measured == []


def test_another_gpu_is_measured_and_a_line_says_so(capsys, gpu, measured):
    gpu("NVIDIA B200")
    assert main(["plan", TRAINED, "--model", "bing_bert-base", "--seq", "8192"]) == 0
    assert measured == ["cuda"]
    assert capsys.readouterr().err.startswith(
        "Rates of NVIDIA B200 do not come with ds_sparse. Measuring those of NVIDIA B200, which takes some minutes"
    )


def test_there_rates_of_an_h200_can_be_asked_for(capsys, gpu, measured):
    gpu("NVIDIA B200")
    found = planned(capsys, "--on", "h200")
    assert (measured, found["machine"], found["memory_gib"]) == ([], "NVIDIA H200", 139)


def test_rates_come_from_files_of_bench(capsys):
    files = [str(COMMITTED / f"{name}.json") for name in ("attention-flex-h200", "bert-h200")]
    found = planned(capsys, "--rates", *files)
    assert found["rates_from"] == [
        "attention-flex-h200: commit 1c5bfb93e7a7, 2026-11-23",
        "bert-h200: commit 1c5bfb93e7a7, 2026-11-23",
    ]
    assert found["step"]["training"] == 0 and found["memory_gib"] == 139


def test_what_is_wrong_is_said_before_anything_is_measured(capsys, gpu, measured):
    gpu("NVIDIA B200")
    words = ["plan", TRAINED, "--model", "bing_bert-base", "--seq", "8192"]
    for wrong in (["--dtype", "fp32"], ["--document-tokens", "9000"], ["--memory", "-1"]):
        assert main([*words, *wrong]) == 1
    assert measured == [] and "rates of NVIDIA B200 are of bf16; turn on bf16" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["no.json", "--model", "bert-base", "--seq", "512"], "no.json: no such file"),
        ([TRAINED, "--model", "bart", "--seq", "512"], "--model bart: no such file, and not one of bert-base"),
        (
            [TRAINED, "--model", "bert-base", "--seq", "512", "--dtype", "fp32"],
            "The training is in fp32, and the",
        ),
        ([TRAINED, "--model", "bert-base", "--seq", "512", "--rates", "no.json"], "no.json cannot be read"),
        (
            [TRAINED, "--model", "bert-base", "--seq", "512", "--dropout", "1.5"],
            "--dropout 1.5: wanted a number",
        ),
    ],
)
def test_a_mistake_is_a_sentence_and_status_1(words, sentence, capsys):
    assert main(["plan", *words]) == 1
    out, err = capsys.readouterr()
    assert out == "" and sentence in err


def test_without_a_block_a_line_says_that_the_plan_is_of_dense_training(capsys, tmp_path):
    file = tmp_path / "dense.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}}')
    assert main(["plan", str(file), "--model", "bert-base", "--seq", "8192"]) == 0
    assert "no sparse_attention block; this is the plan of dense training." in capsys.readouterr().err
