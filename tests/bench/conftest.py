import argparse

import pytest
import torch

from ds_sparse.bench.run import run_case
from ds_sparse.cli import main


@pytest.fixture(autouse=True)
def installed_alone(without_a_clone):
    """What the installed package measures, in all tests of this folder."""


@pytest.fixture
def measure():
    """measure(operation, case, names): a case on the CPU, in three rounds."""

    def measured(operation, case, names, **options):
        args = argparse.Namespace(**{"repeats": 3, "seconds": 60, "profile": 0} | options)
        return run_case(operation, case, names, torch.device("cpu"), args)

    return measured


@pytest.fixture
def printed_again(capsys):
    """printed_again(path): what a run printed until now, which `show` prints again from its file."""

    def compare(path):
        printed = capsys.readouterr().out
        assert main(["bench", "show", str(path)]) == 0
        assert capsys.readouterr().out == printed
        return printed

    return compare
