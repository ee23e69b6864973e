from __future__ import annotations

import json
import re
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
RATES = [str(COMMITTED / f"{name}.json") for name in ("attention-flex-h200", "bert-h200")]


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


@pytest.mark.parametrize(
    "name, words, devices, gib, said",
    [
        ("NVIDIA H200", [], [], 80, ""),
        (
            "NVIDIA B200",
            [],
            ["cuda"],
            80,
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
    found = planned(capsys, "--rates", *RATES)
    of_runs = "commit 22f85d14b497, 2026-11-30", "commit d3d85796e0cd, 2026-11-30"
    assert found["rates_from"] == [f"{Path(file).stem}: {run}" for file, run in zip(RATES, of_runs, strict=True)]
    assert found["step"]["training"] == 0 and found["memory_gib"] == 139


def test_a_family_that_plan_does_not_know_or_does_not_need_is_wrong_usage(capsys, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "t5"}))
    old = tmp_path / "bing_bert.json"
    old.write_text(json.dumps({"bert_model_config": {}}))
    for status, words, sentence in [
        (2, ["--model-type", "t6"], "--model-type t6: plan knows bert, "),
        (2, ["--model", str(config), "--model-type", "t6"], "--model-type t6: plan knows bert, "),
        (2, ["--model-type", "bert"], "--model-type bert beside --model bing_bert-base, which has one; leave "),
        (2, ["--model", str(old), "--model-type", "bert"], f"--model-type bert beside --model {old}, a model of bing_"),
        (1, ["--model", str(config)], f'--model {config}: model_type is "t5"; plan knows bert, '),
    ]:
        assert main([*WORDS, *words]) == status
        assert capsys.readouterr().err.startswith(sentence)


def test_what_is_wrong_is_said_before_anything_is_measured(capsys, gpu, measured):
    gpu("NVIDIA B200")
    for wrong in (["--dtype", "fp32"], ["--document-tokens", "9000"], ["--model", "bart"]):
        assert main([*WORDS, *wrong]) == 2
    for wrong in (["--memory", "-1"], ["--dropout", "1.5"]):
        with pytest.raises(SystemExit, match="2"):
            main([*WORDS, *wrong])
    assert measured == []


@pytest.mark.parametrize("words", [[], ["--details"], ["--memory", "8"]])
def test_lines_are_no_longer_than_a_terminal_is_wide_and_in_a_pipe_as_ever(monkeypatch, capsys, words):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.chdir(Path(TRAINED).parent)
    words = ["plan", Path(TRAINED).name, *WORDS[2:], *words]
    status = main(words)
    piped = "".join(capsys.readouterr())
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(words) == status
    shown = re.sub(r"\x1b\[[0-9;]*m", "", "".join(capsys.readouterr()))
    assert max(map(len, shown.splitlines())) <= 60 < max(map(len, piped.splitlines()))
    assert shown.split() == piped.split()


def test_nothing_is_measured_for_blocks_that_are_chosen(capsys, gpu, measured, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 4, "sparse_attention": {"mode": "moba"}}))
    gpu("NVIDIA B200")
    for words, gib in (([], 80), (["--on", "here"], 80), (["--on", "h200"], 139), (["--rates", *RATES], 139)):
        assert planned(capsys, *words, file=str(file))["memory_gib"] == gib
    assert main(["plan", str(file), *WORDS[2:], "--memory", "4"]) == 1
    assert capsys.readouterr().out.startswith("does not fit: ")
    assert measured == []


def test_a_dtype_without_rates_is_wrong_usage_as_an_option_and_a_mistake_in_the_json(capsys, tmp_path, measured):
    of_bf16 = "the rates of NVIDIA H200 are of bf16;"
    for words, sentence in [
        (["--dtype", "fp32"], f"--dtype fp32: {of_bf16} give --dtype bf16."),
        (["--dtype", "fp32", "--rates", *RATES], f"--dtype fp32: {of_bf16} give --dtype bf16."),
        (["--dtype", "fp16", "--on", "here"], "--dtype fp16: the rates of this CPU are of fp32; give --dtype fp32."),
    ]:
        assert main([*WORDS, *words]) == 2
        assert capsys.readouterr().err == f"{sentence}\n"
    config = json.loads(Path(TRAINED).read_text())
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({key: value for key, value in config.items() if key != "bf16"}))
    assert main(["plan", str(file), *WORDS[2:]]) == 1
    assert f"The training is in fp32, and {of_bf16} turn on bf16 in the JSON, or pass --" in capsys.readouterr().err
    assert measured == []
