import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.program import main
from benchmarks.train import documents, documents_data, documents_texts
from benchmarks.train.documents_data import Documents
from benchmarks.train.documents_texts import Removal, Sources, Text, Wanted
from benchmarks.train.models import Attention, make_bert
from benchmarks.train.neighbours import REACH
from benchmarks.train.settings import Settings
from ds_sparse.bench.show import load

SOURCE = '''#!/usr/bin/env python
# Copyright the Abacus authors

"""Sums for abacus users.

>>> import abacus.beads as beads
>>> from abacus import (
...     wire,
... )
"""
from __future__ import annotations

import os, abacus
from .beads import (
    Bead,  # of ABACUS
    red,
)
from numpy import \\
    array

# Released under the MIT License.
def total(values, beads=None):
    import abacus
    return abacus.beads.add(values, AbacusError, numpy.sum, my_abacus2, beadsless) or "abacus-py"
'''

CLEANED = '''

"""Sums for NAME users.



"""







def total(values, NAME=None):


    return NAME.NAME.add(values, NAMEError, NAME.sum, my_NAME2, beadsless) or "NAME"
'''


def removal(monkeypatch):
    monkeypatch.setattr(documents_texts.metadata, "packages_distributions", lambda: {"abacus": ["Abacus.Py"]})
    return Removal.of(["abacus"], frozenset({"abacus", "beads", "numpy"}))


def test_imports_header_licences_and_names_are_taken_out(monkeypatch):
    assert without_blank(removal(monkeypatch).cleaned(SOURCE)) == without_blank(CLEANED)


def without_blank(text):
    return [line.rstrip() for line in text.split("\n") if line.strip()]


@pytest.fixture
def sources(tmp_path):
    """Two packages of three files and one of two; a copy, a file that is too short, and one that is no UTF-8."""
    files = {}

    def add(package, name, text):
        path = tmp_path / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
        files.setdefault(package, {})[f"{package}/{name}"] = path

    for package, number in (("abacus", 3), ("slide_rule", 3), ("log", 2)):
        for i in range(number):
            line = f"{package}.turn_{package.upper()}_{i}(slide_rule.scale{i}, SlideRule.abacus, log)\n"
            add(package, f"module{i}.py", line.encode() * 20)
    add("slide_rule", "copied.py", files["abacus"]["abacus/module0.py"].read_bytes())
    add("abacus", "short.py", b"abacus")
    add("abacus", "other.py", b"\xff" * 1000)
    return Sources(files)


WANTED = Wanted(least_files=3, least_characters=500, most_characters=900)


def test_no_name_of_a_package_is_left(sources):
    texts = documents_texts.texts_of(sources, WANTED)
    assert [text.package for text in texts] == ["abacus"] * 3 + ["slide_rule"] * 3
    for text in texts:
        assert not [name for name in ("abacus", "slide", "module") if name in text.text.lower()]
        assert "log" not in text.text.replace("(", " ").replace(")", " ").split()
        assert 500 <= len(text.text) <= 900


@pytest.mark.slow("reads files of installed packages")
def test_no_class_of_installed_packages_can_be_read_from_a_text():
    """Of what is installed here, a few files of each package."""
    sources = documents_texts.installed_sources()
    few = {
        package: dict(sorted(files.items(), key=documents_texts.drawn)[:60])
        for package, files in sources.files.items()
        if package in ("torch", "numpy", "transformers")
    }
    texts = documents_texts.texts_of(Sources(few), Wanted(2, 4000, 6000))
    assert {text.package for text in texts} == set(few)
    for text in texts:
        lines = text.text.lower().split("\n")
        assert not [line for line in lines for name in few if name in line or line.lstrip().startswith("import ")]


def test_the_same_files_are_held_out_whatever_else_is_there(sources):
    texts = documents_texts.texts_of(sources, WANTED)
    more = {**sources.files, "fourth": sources.files["log"]}
    assert [text.sha256 for text in documents_texts.texts_of(Sources(more), WANTED)] == [text.sha256 for text in texts]
    shares = [Text("a", str(number)).is_held_out for number in range(1000)]
    assert 150 < sum(shares) < 250


def test_too_few_packages_say_what_to_do(sources):
    with pytest.raises(ValueError, match=r"0 have 4 files of 500 characters, and it takes two .* install some large"):
        documents_texts.texts_of(sources, Wanted(4, 500, 900))


def test_tokens_are_those_of_the_texts_and_packages_their_numbers(tmp_path):
    texts = [Text("ab"[number % 2], f"word{number % 3} NAME + other " * number) for number in range(1, 60)]
    documents_data.write(texts, tmp_path, size=300, length=64)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert documents_data.names(tmp_path) == ["a", "b"]
    for side, is_held_out in (("training", False), ("held_out", True)):
        documents = documents_data.read(tmp_path, side)
        of_side = [text for text in texts if text.is_held_out == is_held_out]
        assert documents.tokens.shape == (len(of_side), 64)
        for text, tokens, length, package in zip(of_side, documents.tokens, documents.lengths, documents.packages):
            whole = tokenizer.encode(text.text).ids
            assert length == min(64, len(whole)) and tokens[:length].tolist() == whole[:64]
            assert not tokens[length:].any()
            assert "ab"[package] == text.package
        rows = documents_data.rows_of(documents, 50)
        ends = [row[:length] for row, length in zip(documents.tokens, documents.lengths)]
        assert rows.flatten().tolist() == np.concatenate(ends)[: rows.size].tolist()
        assert rows.size > documents.lengths.sum() - 50


class PackageOfFirstToken(torch.nn.Module):
    """Says package n of a file that begins with token n, and keeps what it is given."""

    def forward(self, input_ids, lengths):
        self.lengths = lengths
        return torch.nn.functional.one_hot(input_ids[:, 0], 3).float()


def test_accuracy_is_that_of_files_and_of_their_first_tokens():
    tokens = np.zeros((4, 64), np.uint16)
    tokens[:, 0] = 0, 1, 2, 2
    held_out = Documents(tokens, np.array([64, 20, 40, 10]), np.array([0, 1, 2, 0]))
    model = PackageOfFirstToken()
    shares = torch.tensor([0.5, 0.25, 0.25])
    task = documents.Packages(model, 32, held_out, held_out, shares.log(), 64, 0, torch.device("cpu"))
    assert task.unigram() == pytest.approx(1.5 * math.log(2))
    assert task.measures() == pytest.approx({"accuracy": 3 / 4, "macro_f1": (2 / 3 + 1 + 2 / 3) / 3})
    assert model.lengths.tolist() == [32, 10]
    assert task.tokens_per_step == 64


def test_padding_says_nothing_of_a_package(tmp_path):
    attention, settings = Attention("bigbird", 512), settings_of()
    bert = make_bert(attention, settings, torch.zeros(300), 0, torch.device("cpu"))
    model = documents.PackageModel(bert.base_model, torch.zeros(3)).eval()
    tokens = torch.randint(300, (2, 512), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[0, 100 + REACH :] = 7  # the embeddings of the last tokens know their neighbours
    lengths = torch.tensor([100, 512])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, lengths), model(other, lengths))
        assert not torch.allclose(model(tokens, lengths + 100), model(other, lengths + 100), atol=1e-4)


def settings_of():
    return Settings("documents", "tiny", "fp32", "cpu", True, 2048, 1e-3, 512)


def test_copies_of_other_packages_are_no_sources():
    paths = [path for files in documents_texts.installed_sources().files.values() for path in files]
    assert paths and not [path for path in paths if documents_texts.COPIED & set(Path(path).parts)]


@pytest.mark.slow("trains every arm")
def test_a_quick_run_says_accuracy_of_each_arm(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(documents_texts, "MOST_FILES", 12)
    arms = ["dense-64", "bslongformer-512"]
    command = ["train", "--experiment", "documents", "--quick", "--arms", ",".join(arms), "--tokens", "4096"]
    assert main([*command, "--json", str(tmp_path / "out.json")]) == 0
    cases, rows = zip(*load(str(tmp_path / "out.json"))[2])
    assert [case.arm for case in cases] == arms
    for row in rows:
        assert set(row.measures) == {"accuracy", "macro_f1"}
        assert 0 <= row.measures["macro_f1"] <= 1 and row.held_out < 3
        assert list(dict.fromkeys(point.asked for point in row.curve)) == ["masked tokens", "packages"]
    assert main([*command, "--tokens-per-step", "8388608"]) == 1
    assert "a step takes 16384: give fewer --tokens-per-step" in capsys.readouterr().err
    assert main([*command, "--arms", "bigbird"]) == 1
    assert "--arms bigbird: is no arm of documents" in capsys.readouterr().err
