"""What `ds_sparse run` makes of its words before anything is started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ds_sparse.launcher import child, command
from ds_sparse.launcher.command import Invocation, read

FLAG = "--deepspeed_sparse_attention"


@pytest.mark.parametrize(
    "words, options, kind, sparse, program, arguments",
    [
        ("train.py", [], "script", False, "train.py", []),
        (f"{FLAG} train.py --lr 1", [], "script", True, "train.py", ["--lr", "1"]),
        (f"train.py --x {FLAG}", [], "script", True, "train.py", ["--x", FLAG]),
        (f"--num_gpus 2 {FLAG} train.py {FLAG}", ["--num_gpus", "2"], "script", True, "train.py", [FLAG]),
        ("--num_gpus=2 -H hosts train.py", ["--num_gpus=2", "-H", "hosts"], "script", False, "train.py", []),
        ("--module --no_local_rank a.b --h 1", ["--no_local_rank"], "module", False, "a.b", ["--h", "1"]),
        ("--num_gpus 2 --no_python ./job.sh -x", ["--num_gpus", "2"], "program", False, "./job.sh", ["-x"]),
        ("--mod a.b --module", [], "module", False, "a.b", ["--module"]),
        ("--no_py job", [], "program", False, "job", []),
        ("-q -- train.py -- x", ["-q"], "script", False, "train.py", ["--", "x"]),
        ("-i localhost:0 train.py --num_gpus", ["-i", "localhost:0"], "script", False, "train.py", ["--num_gpus"]),
    ],
)  # fmt: skip
def test_options_program_and_arguments(words, options, kind, sparse, program, arguments):
    assert read(words.split()) == Invocation(options, kind, sparse, program, arguments)


def test_an_empty_option_stays_and_help_before_the_program_is_ours():
    assert read(["--launcher_args", "", "train.py"]).options == ["--launcher_args", ""]
    assert read(["--num_gpus", "1", "-h"]) is None
    assert read(["train.py", "--help"]).arguments == ["--help"]


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Checks and starts words in tmp_path; returns what DeepSpeed's launcher is called with."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.sh").write_text("")
    calls = []
    monkeypatch.setattr(command.runner, "main", calls.append)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)

    def start(words):
        asked = read(words.split())
        command.check(asked)
        command.start(asked)
        return calls.pop()

    return start


def test_each_worker_is_a_child(start):
    words = start(f"--num_gpus 2 --module --no_local_rank {FLAG} a.b --h 1")
    assert words == ["--num_gpus", "2", "--no_local_rank", child.__file__, FLAG, "module", "--", "a.b", "--h", "1"]
    assert os.path.isabs(child.__file__)


def test_sigterm_before_there_are_workers_is_no_success(monkeypatch):
    """DeepSpeed's runner returns as after a success where what it started was ended by a signal."""

    def main(words):
        started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        itself = SimpleNamespace(children=lambda: [started])
        monkeypatch.setattr(command.psutil, "Process", lambda: itself)
        os.kill(os.getpid(), signal.SIGTERM)
        assert started.wait() == -signal.SIGTERM

    monkeypatch.setattr(command.runner, "main", main)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as left:
            command.start(read(["train.py"]))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert left.value.code == 143


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("no_train.py", r"no_train.py: no such script; give its path, or --module"),
        ("--no_python ./job.sh", r"\./job.sh: no such program, or not executable"),
        ("--no_python --module x", "--module and --no_python are both given"),
        (f"{FLAG} train.py --deepspeed_transformer_kernel", "--deepspeed_transformer_kernel are both on"),
        (f"train.py {FLAG} --deepspeed_transformer_kernel", "--deepspeed_transformer_kernel are both on"),
        ("train.py --deepspeed_config no.json", "no.json: no such file"),
        ("train.py --deepspeed --deepspeed_config=no.json", "no.json: no such file"),
        ("train.py --deepspeed no.json", "no.json: no such file"),
    ],
)
def test_what_would_fail_on_every_rank_fails_before_one_is_started(start, words, sentence):
    with pytest.raises(ValueError, match=sentence):
        start(words)


def test_a_wrong_block_fails_there_too_if_it_is_to_be_used(start, tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"sparse_attention": {"mode": "fixed", "num_local_block": 8}}))
    with pytest.raises(ValueError, match=r"ds\.json: sparse_attention\.num_local_block: unknown key"):
        start(f"{FLAG} train.py --deepspeed_config ds.json")
    assert start("train.py --deepspeed_config ds.json")[-1] == "ds.json"
    (tmp_path / "ds.json").write_text(json.dumps({"sparse_attention": {"mode": "fixed", "layers": {"0": None}}}))
    assert start(f"{FLAG} train.py --deepspeed_config ds.json")[-1] == "ds.json"


@pytest.mark.parametrize("mode", ["stripes", "fixed_2", "my_bigbird", "local"])
def test_a_mode_that_the_program_may_register_is_left_to_it(start, tmp_path, mode):
    (tmp_path / "ds.json").write_text(json.dumps({"sparse_attention": {"mode": mode, "every": 4}}))
    assert start(f"{FLAG} train.py --deepspeed --deepspeed_config ds.json")


@pytest.mark.parametrize(
    "mode, known",
    [("fixd", "fixed"), ("Fixed", "fixed"), ("big_bird", "bigbird"), ("BigBird", "bigbird"),
     ("longformer", "bslongformer"), ("sliding_window", "local_sliding_window"), (["fixed"], None)],
)  # fmt: skip
def test_a_mode_with_a_typo_and_one_that_is_no_name_start_nothing(start, tmp_path, mode, known):
    (tmp_path / "ds.json").write_text(json.dumps({"sparse_attention": {"mode": mode}}))
    with pytest.raises(ValueError) as caught:
        start(f"{FLAG} train.py --deepspeed_config ds.json")
    first, *second = str(caught.value).splitlines()
    assert first.startswith(f"ds.json: sparse_attention.mode: got {json.dumps(mode)}; wanted ")
    assert len(second) == (known is not None)
    if known is not None:
        assert first.endswith(f'Did you mean "{known}"?') and "rename it if your program registers it" in second[0]
    assert start("train.py --deepspeed_config ds.json")


def test_arguments_that_are_no_configuration_are_left_alone(start):
    assert start("train.py")
    assert start(f"{FLAG} train.py --deepspeed --lr 1e-3 --deepspeed_config")
    assert start(f"{FLAG} train.py --deepspeed checkpoint --x=--deepspeed_config")
