"""The experiment on packages that source files belong to."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.program import main
from benchmarks.train import documents, documents_texts
from benchmarks.train.documents_texts import Removal, Text, Wanted, texts_of
from benchmarks.train.models import REACH, Attention, Classifier, make_bert
from benchmarks.train.results import Case, shares
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
    """Says package n of a sequence that begins with token n, and keeps what it is given."""

    def of_sequences(self, input_ids, lengths):
        self.tokens, self.lengths = input_ids, lengths
        return torch.nn.functional.one_hot(input_ids[:, 0], 3).float()


def test_accuracy_is_that_of_files_and_of_their_first_tokens():
    tokens = np.zeros((4, 64), np.uint16)
    tokens[:, 0] = 0, 1, 2, 2
    held_out = documents.Documents(tokens, np.array([64, 20, 40, 10]), np.array([0, 1, 2, 0]))
    model, shares = PackageOfFirstToken(), torch.tensor([0.5, 0.25, 0.25])
    task = documents.Packages(model, 32, 1, held_out, held_out, shares.log(), CASE, torch.device("cpu"))
    assert task.unigram() == pytest.approx(1.5 * math.log(2)) and task.evaluate() > 0
    assert task.measures() == pytest.approx({"accuracy": 3 / 4, "macro_f1": (2 / 3 + 1 + 2 / 3) / 3})
    assert model.lengths.tolist() == [32, 10] and task.tokens_per_step == 64


def test_pieces_of_a_file_together_tell_its_package():
    tokens = np.zeros((2, 64), np.uint16)
    tokens[:, ::16] = [0, 1, 1, 0], [2, 2, 0, 0]
    files = documents.Documents(tokens, np.array([48, 17]), np.array([1, 2]))
    task = documents.Packages(PackageOfFirstToken(), 16, 4, files, files, torch.zeros(3), CASE, torch.device("cpu"))
    torch.testing.assert_close(task.logits_of_files(files), torch.tensor([[1, 2, 0], [0, 0, 3.0]]) / 3)


def test_a_far_part_is_removed_or_comes_in_another_order():
    near, length = 64, 500
    tokens = np.zeros((3, 512), np.uint16)
    tokens[:, :length] = 1 + np.arange(length)
    files = documents.Documents(tokens, np.array([length, 300, 40]), np.array([1, 1, 0]))
    for size in (1, 8):
        shuffled = files.shuffled(near, size)
        for (first, second), end in zip(((tokens[i], shuffled.tokens[i]) for i in range(3)), files.lengths):
            far = (end - near) // size * size if end > near else 0
            assert (first != second).any() == (far > 0)
            assert second[:near].tolist() == first[:near].tolist()
            pieces = second[near : near + far].reshape(-1, size)
            assert sorted(pieces[:, 0]) == first[near : near + far : size].tolist()
            assert (np.diff(pieces.astype(int)) == 1).all()
            assert second[near + far :].tolist() == first[near + far :].tolist()
    case = replace(CASE, tokens_per_step=512)
    task = documents.Packages(PackageOfFirstToken(), 512, 1, files, files, torch.zeros(3), case, torch.device("cpu"))
    task.evaluate()
    found = {(one.shown, one.distance): (one.asked, one.right) for one in task.answered()}
    assert {key: of for key, of in found.items() if key[0] == documents.REMOVED} == {
        (documents.REMOVED, 32): (1, 0),
        (documents.REMOVED, 256): (2, 2),
    }
    assert list(dict.fromkeys(shown for shown, _ in found)) == [
        documents.WHOLE, documents.REMOVED, *documents.SHUFFLED
    ]  # fmt: skip
    model, case = PackageOfFirstToken(), replace(CASE, tokens_per_step=1024)
    task = documents.Packages(model, 256, 1, files, files, torch.zeros(3), case, torch.device("cpu"))
    task.evaluate()
    task.answered()
    seen = model.tokens[0].tolist()
    assert seen != sorted(seen) == list(range(1, 257)), "what the arm sees of the file, no more"


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
    arms = ["dense-64", "bslongformer-512", "pieces-64"]
    command = ["train", "--experiment", "documents", "--quick", "--arms", ",".join(arms), "--tokens", "4096"]
    assert main([*command, "--json", str(tmp_path / "out.json")]) == 0
    cases, rows = zip(*load(str(tmp_path / "out.json"))[2])
    assert [case.arm for case in cases] == arms
    for case, (row,) in zip(cases, rows):
        assert set(row.measures) == {"accuracy", "macro_f1"} and row.held_out < 3
        told = shares([row], lambda one: one.shown)
        assert told[documents.WHOLE] == pytest.approx(row.measures["accuracy"]) and len(told) == 4
        assert case.arm != "dense-64" or len(set(told.values())) == 1, "it sees no far part"
        assert list(dict.fromkeys(point.asked for point in row.curve)) == ["masked tokens", "packages"]
    assert main([*command, "--tokens-per-step", "8388608"]) == 1
    assert "a step takes 16384: give fewer --tokens-per-step" in capsys.readouterr().err
