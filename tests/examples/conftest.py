"""Texts, models, DeepSpeed's JSON and runs of the examples, all of them small."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import without_launcher

MODEL = {
    "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "position_convolution": 3,
}  # fmt: skip
JSON = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 1000000,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "gradient_clipping": 1.0,
    "sparse_attention": {"mode": "bigbird", "block": 16, "num_random_blocks": 1, "seed": 5},
}


class Workplace:
    """A folder with a corpus, models with and without dropout, and runs of the pretraining script."""

    script = Path(__file__).parents[2] / "examples" / "bing_bert" / "deepspeed_train.py"

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "corpus").mkdir()
        words = (Path(os.__file__).parent / "argparse.py").read_text().split()
        for number in range(60):
            start = random.Random(number).randrange(len(words) - 900)
            (folder / "corpus" / f"{number}.txt").write_text(" ".join(words[start : start + 800]))
        for name, dropout in (("model", 0.0), ("dropout", 0.1)):
            model = MODEL | {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
            (folder / f"{name}.json").write_text(json.dumps({"name": name, "bert_model_config": model}))

    def config(self, name: str = "ds", **changes: Any) -> Path:
        """Writes DeepSpeed's JSON."""
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(JSON | changes))
        return path

    def options(self, output: str | Path, *more: str, config: Path | None = None, model: str = "model") -> list[str]:
        """Options of a run of six steps that keeps each, in a folder for `output`; later ones win."""
        return [
            "--cf", str(self.folder / f"{model}.json"), "--corpus", str(self.folder / "corpus"), "--max_seq_length",
            "256", "--max_steps", "6", "--eval_sequences", "2", "--save_steps", "1", "--deepspeed_config",
            str(config or self.config()), "--output_dir", str(self.folder / output), *more,
        ]  # fmt: skip

    def environment(self, device: str = "cpu") -> dict[str, str]:
        """No launcher's variables, no compiler, no ninja: runs must not need them."""
        cpu = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if device == "cpu" else {}
        return without_launcher() | cpu | {
            "DS_SPARSE_CACHE": str(self.folder / "cache"), "CXX": "/nonexistent", "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }  # fmt: skip

    def execute(self, command: list[Any], device: str = "cpu", **settings: Any) -> subprocess.CompletedProcess:
        settings = {"env": self.environment(device), "timeout": 400} | settings
        return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **settings)

    def succeed(self, *arguments: Any, launcher: tuple[str, ...] = (sys.executable,), **settings: Any) -> str:
        """Starts the script with `options` of these arguments; its output."""
        done = self.execute([*launcher, self.script, *self.options(*arguments, **settings)])
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run(
        self, runs: list[list[str]], ranks: list[int] | None = None, program: str = "deepspeed_train",
        device: str = "cpu",
    ) -> list[list[Any]]:  # fmt: skip
        """Runs options one after the other, as starting a process takes far longer than they do: for each, how its
        ranks ended, 0, a sentence or a status, and what the first printed."""
        listed = [[number, program, options] for number, options in zip(ranks or [1] * len(runs), runs, strict=True)]
        runner = Path(__file__).with_name("run_examples.py")
        done = self.execute([sys.executable, runner, self.folder / "ranks", json.dumps(listed)], device)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def losses(self, output: str | Path, name: str = "sparse") -> list[tuple[Any, ...]]:
        """Step, losses of training and the held-out loss of each record."""
        lines = (self.folder / output / "0001" / name / "metrics.jsonl").read_text().splitlines()
        keys = ("step", "mlm_loss", "nsp_loss", "held_out_mlm_loss")
        return [tuple(record.get(key) for key in keys) for record in map(json.loads, lines)]

    def training_losses(self, output: str | Path, name: str = "sparse") -> list[tuple[Any, ...]]:
        return [record[:3] for record in self.losses(output, name) if record[1] is not None]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("workplace"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what can be made again, which is not there yet."""
    monkeypatch.setenv("DS_SPARSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def invented() -> Callable[[int, int], str]:
    """Makes a text of a seed and a number of words."""

    def text(seed: int, words: int) -> str:
        draw = random.Random(seed)
        return " ".join(
            draw.choice(("alpha", "beta", "gamma", "delta")) + str(draw.randrange(60)) for _ in range(words)
        )

    return text


@pytest.fixture(scope="session")
def texts(invented: Callable[[int, int], str]) -> list[str]:
    """40 short documents, then 120 long ones."""
    return [invented(number, 8 if number < 40 else 150) for number in range(160)]
