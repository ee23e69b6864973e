"""The experiment on packages that source files belong to."""

import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.program import main
from benchmarks.train import documents, documents_texts
from benchmarks.train.documents_texts import Removal, Text, Wanted, texts_of
from benchmarks.train.models import REACH, Attention, Classifier, make_bert
from benchmarks.train.results import Case
from ds_sparse.bench.show import load

CASE = Case("documents", "tiny", "fp32", "cpu", True, 64, 1e-3, 512)
SOURCE = '''#!/usr/bin/env python
# Copyright the Abacus authors

"""Sums for abacus users.

>>> import abacus.beads as beads
>>> from abacus import (
...     wire,
... )
"""
import os, abacus
from .beads import (
    Bead,  # of ABACUS
)
from numpy import \\
    array

# Released under the MIT License.
def total(values, beads=None):
    import abacus
    return abacus.beads.add(values, AbacusError, numpy.sum, my_abacus2, beadsless) or "abacus-py"
'''

CLEANED = '''"""Sums for NAME users.
"""
def total(values, NAME=None):
    return NAME.NAME.add(values, NAMEError, NAME.sum, my_NAME2, beadsless) or "NAME"
'''


def test_imports_header_licences_and_names_are_taken_out(monkeypatch):
    monkeypatch.setattr(documents_texts.metadata, "packages_distributions", lambda: {"abacus": ["Abacus.Py"]})
    removal = Removal.of(["abacus"], {"abacus": {"abacus/beads.py": None}, "numpy": {"numpy/__init__.py": None}})
    cleaned = removal.cleaned(SOURCE).split("\n")
    assert [line.rstrip() for line in cleaned if line.strip()] == CLEANED.splitlines()


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
    return files


def test_no_name_of_a_package_is_left_and_too_few_packages_say_what_to_do(sources):
    texts = texts_of(sources, Wanted(least_files=3, least_characters=500, most_characters=900))
    assert [text.package for text in texts] == ["abacus"] * 3 + ["slide_rule"] * 3
    for text in texts:
        assert not [name for name in ("abacus", "slide", "module") if name in text.text.lower()]
        assert 500 <= len(text.text) <= 900
    with pytest.raises(ValueError, match=r"0 have 4 files of 500 characters, and it takes two .* install some large"):
        texts_of(sources, Wanted(4, 500, 900))


def test_tokens_are_those_of_the_texts_and_packages_their_numbers(tmp_path):
    texts = [Text("ab"[number % 2], f"word{number % 3} NAME + other " * number) for number in range(1, 60)]
    documents.write(texts, tmp_path, size=300, length=64)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for side, is_held_out in (("training", False), ("held_out", True)):
        found = documents.read(tmp_path, side)
        of_side = [text for text in texts if text.is_held_out == is_held_out]
        for text, tokens, length, package in zip(of_side, found.tokens, found.lengths, found.packages, strict=True):
            whole = tokenizer.encode(text.text).ids
            assert length == min(64, len(whole)) and tokens[:length].tolist() == whole[:64]
            assert not tokens[length:].any() and "ab"[package] == text.package
        ends = np.concatenate([row[:length] for row, length in zip(found.tokens, found.lengths)])
        rows = found.rows(50)
        assert rows.flatten().tolist() == ends[: rows.size].tolist() and rows.size > len(ends) - 50


class PackageOfFirstToken(torch.nn.Module):
    """Says package n of a file that begins with token n, and keeps what it is given."""

    def of_sequences(self, input_ids, lengths):
        self.lengths = lengths
        return torch.nn.functional.one_hot(input_ids[:, 0], 3).float()


def test_accuracy_is_that_of_files_and_of_their_first_tokens():
    tokens = np.zeros((4, 64), np.uint16)
    tokens[:, 0] = 0, 1, 2, 2
    held_out = documents.Documents(tokens, np.array([64, 20, 40, 10]), np.array([0, 1, 2, 0]))
    model, shares = PackageOfFirstToken(), torch.tensor([0.5, 0.25, 0.25])
    task = documents.Packages(model, 32, held_out, held_out, shares.log(), CASE, torch.device("cpu"))
    assert task.unigram() == pytest.approx(1.5 * math.log(2))
    assert task.measures() == pytest.approx({"accuracy": 3 / 4, "macro_f1": (2 / 3 + 1 + 2 / 3) / 3})
    assert model.lengths.tolist() == [32, 10] and task.tokens_per_step == 64


def test_padding_says_nothing_of_a_package():
    bert = make_bert(Attention("bigbird", 512), CASE, torch.zeros(300), torch.device("cpu"))
    model = Classifier(bert.base_model, torch.zeros(3)).eval()
    tokens = torch.randint(300, (2, 512), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[0, 100 + REACH :] = 7  # the embeddings of the last tokens know their neighbours
    lengths = torch.tensor([100, 512])
    with torch.no_grad():
        said, same = (model.of_sequences(x, lengths) for x in (tokens, other))
        torch.testing.assert_close(said, same)
        assert not torch.allclose(model.of_sequences(other, lengths + 100)[0], said[0], atol=1e-4)


@pytest.mark.slow("trains every arm")
def test_a_quick_run_says_accuracy_of_each_arm(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(documents_texts, "MOST_FILES", 12)
    arms = ["dense-64", "bslongformer-512"]
    command = ["train", "--experiment", "documents", "--quick", "--arms", ",".join(arms), "--tokens", "4096"]
    assert main([*command, "--json", str(tmp_path / "out.json")]) == 0
    cases, rows = zip(*load(str(tmp_path / "out.json"))[2])
    assert [case.arm for case in cases] == arms
    for (row,) in rows:
        assert set(row.measures) == {"accuracy", "macro_f1"} and row.held_out < 3
        assert list(dict.fromkeys(point.asked for point in row.curve)) == ["masked tokens", "packages"]
    assert main([*command, "--tokens-per-step", "8388608"]) == 1
    assert "a step takes 16384: give fewer --tokens-per-step" in capsys.readouterr().err
