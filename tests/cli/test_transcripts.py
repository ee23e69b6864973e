"""What commands print, word for word. Each file of `transcripts` is a terminal: a line with "$" is typed, and below it
stand the lines of standard output, of standard error, and the exit status if it is not 0."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from ds_sparse.cli import main
from ds_sparse.plan import rates

FOLDER = Path(__file__).parent / "transcripts"


@pytest.fixture(autouse=True)
def machine(monkeypatch, without_a_clone):
    """No GPU, a terminal of 100 columns, the files beside the transcripts, no operation that a clone adds to the bench,
    and rates that no measurement changes."""
    kept = TypeAdapter(rates.Rates).validate_json((FOLDER / "rates.json").read_bytes())
    monkeypatch.setattr(rates, "committed_rates", lambda: kept)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("LC_ALL", "en_US.UTF-8")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(FOLDER)


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.txt")), ids=lambda file: file.stem)
def test_commands_print_what_they_printed(file, capsys, tmp_path):
    wanted, made = file.read_text(encoding="utf-8"), ""
    for typed in (line for line in wanted.splitlines() if line.startswith("$ ")):
        status = main(shlex.split(typed)[2:])
        made += "".join([f"{typed}\n", *capsys.readouterr(), f"[{status}]\n" if status else "", "\n"])
    (tmp_path / file.name).write_text(made, encoding="utf-8")
    assert made == wanted, f"If this is meant: cp {tmp_path / file.name} {file}"
