"""What users do from the beginning, as `.ci/walks` does it; the script says of each step what is expected."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import without_launcher

ROOT = Path(__file__).parents[1]


def walk(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The script with this checkout in the environment that runs the tests."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = without_launcher() | {"PATH": path, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [ROOT / ".ci" / "walks", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, check=False,
    )  # fmt: skip


@pytest.mark.slow("walks through DeepSpeed, Transformers and masks for two minutes")
def test_each_step_of_the_walks_ends_as_expected():
    pytest.importorskip("deepspeed")
    pytest.importorskip("transformers")
    walked = walk()
    assert walked.returncode == 0, walked.stdout
    assert walked.stdout.endswith("walks: all steps ended as expected.\n")


def test_a_word_that_the_walks_do_not_know_is_refused():
    walked = walk("--frsh")
    assert (walked.returncode, walked.stdout) == (2, "walks: --frsh was given; only --fresh is known.\n")
