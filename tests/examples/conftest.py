"""Texts, models and DeepSpeed's JSON for small runs of the examples."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

MODEL = {
    "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "position_convolution": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small corpus, and a model with and without dropout."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "corpus").mkdir()
    words = (Path(os.__file__).parent / "argparse.py").read_text().split()
    for number in range(60):
        start = random.Random(number).randrange(len(words) - 900)
        (folder / "corpus" / f"{number}.txt").write_text(" ".join(words[start : start + 800]))
    for name, dropout in (("model", 0.0), ("dropout", 0.1)):
        model = MODEL | {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        (folder / f"{name}.json").write_text(json.dumps({"name": name, "bert_model_config": model}))
    return folder


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
