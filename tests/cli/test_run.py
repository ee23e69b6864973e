"""The `ds_sparse run` command as its users type it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from ds_sparse.cli import main

PROGRAMS = Path(__file__).parents[1] / "launcher" / "programs"
WORKER = str(PROGRAMS / "worker.py")
FLAG = "--deepspeed_sparse_attention"
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "sparse_attention": {"mode": "bigbird", "block": 16, "num_random_blocks": 1, "num_sliding_window_blocks": 1},
}
UNREGISTERED = """
import sys
import deepspeed, torch
deepspeed.initialize(model=torch.nn.Linear(2, 2), config=sys.argv[-1])
"""
DRAWS = """
import json, os, sys
import deepspeed, ds_sparse, torch
from transformers import BertConfig, BertModel
@ds_sparse.register_sparsity("scatter")
class Scatter(ds_sparse.SparsityConfig):
    def make_layout(self, seq_len):
        layout = self.setup_layout(seq_len)
        for row in range(layout.shape[1]):
            layout[:, row, self.sampler(row)(range(layout.shape[2]), 2)] = 1
        return layout
sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
model = BertModel(BertConfig(**sizes, vocab_size=9, max_position_embeddings=256))
deepspeed.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[-1])
attention = model.encoder.layer[0].attention.self._ds_sparse.attention
with open(f"{os.path.dirname(sys.argv[-1])}/draws.{os.environ['RANK']}", "w") as file:
    json.dump({"layout": attention.layout.tolist(), "block": model.config.sparse_attention}, file)
"""
# What DeepSpeed's runner reaches other nodes with; here a node is a shell on this machine, in an empty environment.
PDSH = """#!/usr/bin/env bash
shift 5
words="$*"
exec env -i PATH="$PATH" HOME="$HOME" DS_ACCELERATOR=cpu bash -c "${words//%n/0}"
"""


class Run:
    """`ds_sparse run` in a process of its own."""

    def __init__(self, out: Path, words: list[str], device: str, **environment: str):
        self.out = out
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ds_sparse", "run", f"--master_port={port}", *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": device} | environment,
        )  # fmt: skip

    def finish(self) -> tuple[int, str]:
        printed, _ = self.process.communicate(timeout=180)
        return self.process.returncode, printed

    def seen(self, rank: int) -> dict:
        """What a rank wrote; waits for it."""
        path = Path(f"{self.out}.{rank}")
        until = time.monotonic() + 120
        while not (path.exists() and path.read_text().endswith("}")) and time.monotonic() < until:
            assert self.process.poll() is None or path.exists(), self.process.communicate()[0]
            time.sleep(0.05)
        return json.loads(path.read_text())


@pytest.fixture(scope="module")
def training(tmp_path_factory, device):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("training")
    ranks = 2 if device == "cpu" else min(2, torch.cuda.device_count())
    words = ["--num_gpus", str(ranks), FLAG, str(PROGRAMS / "plain.py"), "--h", "3", "--out", str(folder / "out")]
    (folder / "ds.json").write_text(json.dumps(CONFIG))
    run = Run(folder / "out", [*words, "--deepspeed_config", str(folder / "ds.json")], device)
    yield run
    run.process.terminate()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Started together, since most of each is the start of Python with torch."""
    pytest.importorskip("transformers")
    folder, started = tmp_path_factory.mktemp("run"), {}
    (folder / "unregistered.py").write_text(UNREGISTERED)
    (folder / "stripes.json").write_text(json.dumps(CONFIG | {"sparse_attention": {"mode": "stripes"}}))
    words = ["--num_gpus", "2", FLAG, str(folder / "unregistered.py"), str(folder / "stripes.json")]
    started["unregistered"] = Run(folder / "unregistered", words, "cpu")
    (folder / "draws.py").write_text(DRAWS)
    (folder / "scatter.json").write_text(json.dumps(CONFIG | {"sparse_attention": {"mode": "scatter"}}))
    words = ["--num_gpus", "2", FLAG, "--no_local_rank", str(folder / "draws.py"), str(folder / "scatter.json")]
    started["draws"] = Run(folder / "draws", words, "cpu")
    (folder / "pdsh").write_text(PDSH)
    (folder / "pdsh").chmod(0o755)
    (folder / "hosts").write_text("worker-0 slots=2\n")
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    node = ["--hostfile", str(folder / "hosts"), "--force_multi", "--master_addr=127.0.0.1", "--no_ssh_check", FLAG]
    words = [*node, WORKER, "--h", "128", "two words", str(folder / "node"), "fail"]
    started["node"] = Run(folder / "node", words, "cpu", PATH=path)
    words = ["--num_gpus", "2", "--no_local_rank", WORKER, str(folder / "waiting"), "wait"]
    started["waiting"] = Run(folder / "waiting", words, "cpu")
    yield started
    for run in started.values():
        run.process.terminate()


def test_a_script_that_only_knows_deepspeed_initialize_trains_sparse_on_all_ranks(training):
    status, printed = training.finish()
    assert status == 0, printed
    count, seed = training.seen(0)["ranks"][1], training.seen(0)["block"]["seed"]
    for number, rank in enumerate(map(training.seen, range(count))):
        assert rank["ranks"] == [number, count] and rank["attention"] == "ds_sparse"
        assert rank["block"]["mode"] == "bigbird" and rank["block"]["seed"] == seed is not None
        assert rank["losses"][1] < rank["losses"][0]
        assert rank["config"]["num_random_blocks"] == 1 and rank["class"].startswith("ds_sparse.")
    assert printed.count("ds_sparse: sparse attention is on in 2 of 2 attention layers.") == 1


@pytest.mark.slow("starts four jobs of two ranks each")
def test_a_node_is_told_in_arguments_and_the_status_of_a_rank_that_fails_comes_back(runs):
    run = runs["node"]
    ranks = [run.seen(0), run.seen(1)]
    for number, rank in enumerate(ranks):
        assert (rank["RANK"], rank["WORLD_SIZE"], rank["DS_SPARSE_RUN"]) == (str(number), "2", "sparse")
        assert rank["argv"][1:] == [f"--local_rank={number}", "--h", "128", "two words", str(run.out), "fail"]
    status, printed = run.finish()
    assert status == 3, printed
    assert not psutil.pid_exists(ranks[0]["pid"])


@pytest.mark.slow("starts four jobs of two ranks each")
def test_sigterm_ends_the_ranks(runs):
    run = runs["waiting"]
    ranks = [run.seen(0), run.seen(1)]
    assert ranks[1]["argv"] == [WORKER, str(run.out), "wait"] and ranks[1]["DS_SPARSE_RUN"] == "dense"
    run.process.send_signal(signal.SIGTERM)
    status, printed = run.finish()
    assert status == 1, printed
    assert not any(psutil.pid_exists(rank["pid"]) for rank in ranks)


@pytest.mark.slow("starts four jobs of two ranks each")
def test_a_mode_that_stays_unknown_is_one_sentence_of_rank_0(runs):
    status, printed = runs["unregistered"].finish()
    assert status == 1, printed
    assert printed.count('sparse_attention.mode: got "stripes"; wanted "bigbird", ') == 1
    assert "Traceback" not in printed and "SparseAttentionConfigError" not in printed


@pytest.mark.slow("starts four jobs of two ranks each")
def test_all_ranks_draw_the_blocks_of_a_users_structure_by_one_seed(runs):
    status, printed = runs["draws"].finish()
    assert status == 0, printed
    first, second = map(runs["draws"].seen, range(2))
    assert first == second and first["block"]["seed"] is not None
    assert printed.count(f"drawn with seed {first['block']['seed']}") == 1


@pytest.mark.parametrize(
    "words, sentence",
    [
        ([], "no training script is given; see ds_sparse run --help."),
        (["--num_gpus", "2", FLAG], "no training script is given"),
        (["--num_gpu"], "--num_gpus/--num_accelerators: expected one argument"),
        (["--nonsense", "train.py"], "unrecognized arguments: --nonsense"),
        (["no_train.py"], "no_train.py: no such script"),
    ],
)
def test_what_is_wrong_is_one_line(capsys, words, sentence):
    assert main(["run", *words]) == 2
    printed = capsys.readouterr().err
    assert sentence in printed and printed.startswith("ds_sparse run: ") and printed.count("\n") == 1


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--num_gpus", "2", "--help"]])
def test_help_has_our_flag_and_says_where_deepspeeds_options_are(capsys, words):
    assert main(["run", *words]) == 0
    printed = capsys.readouterr().out
    assert FLAG in printed and "deepspeed --help lists them" in " ".join(printed.split())


def test_without_deepspeed_it_is_a_sentence():
    code = (
        "import sys; sys.modules['deepspeed'] = None; from ds_sparse.cli import main; sys.exit(main(['run', 'x.py']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert done.stderr.startswith("ds_sparse run: ") and "pip install 'ds_sparse[deepspeed]'" in done.stderr


@pytest.mark.slow("makes a virtual environment, and starts a rank in it")
@pytest.mark.parametrize("found_by", ["path", "folder"])
def test_a_checkout_that_is_not_installed_runs(tmp_path: Path, found_by: str):
    checkout, python = Path(__file__).parents[2], tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    script = tmp_path / "train.py"
    script.write_text("import deepspeed\nprint('ours' if hasattr(deepspeed.initialize, 'below') else 'theirs')\n")
    # Folders of PYTHONPATH are no site folders: what is installed from elsewhere, as this checkout may be, is not
    # found.
    folders = [folder for folder in sys.path if folder.endswith("site-packages")]
    folders[:0] = [str(checkout)] if found_by == "path" else []
    ended = subprocess.run(
        [str(python), "-m", "ds_sparse", "run", "--num_gpus", "1", str(script)],
        cwd=checkout if found_by == "folder" else tmp_path, capture_output=True, text=True, check=False, timeout=180,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders), "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    assert ended.returncode == 0 and "ours\n" in ended.stdout, ended.stderr
