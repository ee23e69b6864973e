"""A worker becomes the program: what that sees is what it would see by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from ds_sparse.launcher import child

PROGRAM = """
import os, sys
main = sys.modules["__main__"]
print(sys.argv, sys.path, main.__file__, __name__, main.__dict__ is globals(), sys.flags, __file__)
print(main.__spec__ and (main.__spec__.name, main.__spec__.origin), main.__package__)
print(sorted(name for name in sys.modules if name.startswith(("ds_sparse", "deepspeed", "torch"))))
import helper
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "helper.py").write_text("def fail():\n    raise LookupError('nothing here')\nfail()\n")
    return tmp_path


def as_child(kind, words, *options, **more):
    command = [sys.executable, child.__file__, *options, kind, "--", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **more)


@pytest.mark.parametrize(
    "kind, interpreter, name", [("script", ["-u"], "program.py"), ("module", ["-u", "-m"], "program")]
)
def test_a_script_and_a_module_run_as_by_themselves(folder, kind, interpreter, name):
    plain = subprocess.run(
        [sys.executable, *interpreter, name, "--local_rank=1", "--h", "two words"],
        capture_output=True, text=True, cwd=folder, check=False,
    )  # fmt: skip
    ours = as_child(kind, [name, "--h", "two words"], "--local_rank=1", cwd=folder)
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert ours.returncode == 1 and "LookupError: nothing here" in ours.stderr and "--local_rank=1" in ours.stdout


def test_a_program_of_another_kind_hands_it_on(folder):
    script = folder / "job.sh"
    script.write_text(
        f'#!/bin/sh\n{sys.executable} -c "import sys; print(sys.meta_path[0])"\necho "$@" $DS_SPARSE_RUN\nexit 7\n'
    )
    script.chmod(0o755)
    run = as_child("program", [str(script), "a", "b c"], "--deepspeed_sparse_attention")
    assert run.returncode == 7 and "AfterDeepSpeed" in run.stdout and "a b c sparse" in run.stdout


def test_a_sitecustomize_and_a_path_of_the_users_stay(folder):
    (folder / "sitecustomize.py").write_text("import sys\nsys.customized = True\n")
    (folder / "seen.py").write_text("import sys, sitecustomize\nprint(sys.customized, sitecustomize.__file__)\n")
    run = as_child("module", ["seen"], env=os.environ | {"PYTHONPATH": str(folder)}, cwd="/")
    assert run.stdout == f"True {folder / 'sitecustomize.py'}\n" and run.stderr == ""


def test_a_signal_ends_it_as_it_would_the_program(folder):
    (folder / "killed.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    assert as_child("script", ["killed.py"], cwd=folder).returncode == -signal.SIGTERM


def test_a_program_that_is_not_there_is_one_sentence():
    run = as_child("program", ["/no/such/program"])
    said = "ds_sparse run: /no/such/program cannot be started: No such file or directory.\n"
    assert (run.returncode, run.stderr) == (1, said)


def test_a_python_that_cannot_import_ds_sparse_does_not_go_on_without_deepspeed(folder):
    (folder / "deepspeed.py").write_text("")
    (folder / "ds_sparse.py").write_text("raise ImportError('it is not built')\n")
    (folder / "tries.py").write_text("try:\n    import deepspeed\nexcept ImportError:\n    print('without')\n")
    run = as_child("script", ["tries.py"], cwd=folder)
    assert run.returncode == 1 and run.stdout == ""
    said = f"RuntimeError: ds_sparse run: {sys.executable} cannot import ds_sparse: it is not built\n"
    assert run.stderr.endswith(said)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_flag_without_effect_is_said_once(folder, rank):
    (folder / "helper.py").write_text("")
    (folder / "no_deepspeed.py").write_text("import subprocess, sys\nsubprocess.run([sys.executable, 'helper.py'])\n")
    environment = os.environ | {"RANK": rank}
    run = as_child("script", ["no_deepspeed.py"], "--deepspeed_sparse_attention", cwd=folder, env=environment)
    assert run.stdout.count("--deepspeed_sparse_attention has had no effect") == run.stdout.count("\n") == (rank == "0")


@pytest.mark.parametrize("kind, word", [("script", "crash.py"), ("module", "crash")])
def test_a_program_that_crashes_first_is_not_told_of_the_flag(folder, kind, word):
    (folder / "crash.py").write_text("raise KeyError('mine')\n")
    run = as_child(kind, [word], "--deepspeed_sparse_attention", cwd=folder, env=os.environ | {"RANK": "0"})
    assert (run.returncode, run.stdout) == (1, "") and run.stderr.endswith("KeyError: 'mine'\n")


def test_the_words_that_deepspeeds_parsers_pass_on():
    """They take a -- for themselves that follows the child at once."""
    assert child.arguments("script", False, ["train.py", "--h"]) == ["script", "--", "train.py", "--h"]
    words, environment = child.command(["--local_rank=2", *child.arguments("module", True, ["a.b", "--", "c"])])
    assert words == [sys.executable, "-u", "-m", "a.b", "--local_rank=2", "--", "c"]
    assert environment["DS_SPARSE_RUN"] == "sparse"
