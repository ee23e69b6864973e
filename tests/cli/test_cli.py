"""The `ds_sparse` command: without a subcommand, what it imports, what it writes to; and its shortest subcommands."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ds_sparse
from ds_sparse.cli import COMMANDS, main

CONFIGS = Path(__file__).parents[2] / "configs"
COMPUTES_NOTHING = [
    [],
    ["--version"],
    ["--help"],
    *([name, "--help"] for name in COMMANDS),
    ["schema"],
    ["modes", "--json"],
    ["check", "--block-only", str(CONFIGS / "bigbird.json")],
]
IMPORTS = """
import json, sys
from ds_sparse.cli import main
for words in json.loads(sys.argv[1]):
    try:
        status = main(words)
    except SystemExit as left:
        status = left.code
    heavy = {"torch", "deepspeed", "matplotlib", "transformers", "datasets", "numpy"} & set(sys.modules)
    assert (status, heavy) == (0, set()), (words, status, heavy)
"""


def ds_sparse_command(*words, **more):
    environment = os.environ | more.pop("environment", {})
    return subprocess.run([sys.executable, "-m", "ds_sparse", *words], text=True, check=False, env=environment, **more)


def test_alone_it_prints_its_help(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: ds_sparse") and all(f"  {name} " in printed for name in COMMANDS)
    assert "exit status: 0 if all is right" in printed


def test_the_version(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"ds_sparse {ds_sparse.__version__}\n"


@pytest.mark.parametrize(
    "words",
    [
        "chekc", "--nonsense", "check", "check a.json --seq 0", "check a.json --seq 1.5", "draw a.json --layer -1",
        "new a.json --lr 0", "new a.json --lr nan", "new a.json --zero 4", "new a.json --dtype bf8",
    ],
)  # fmt: skip
def test_wrong_usage_exits_with_2(words, capsys):
    with pytest.raises(SystemExit) as left:
        main(words.split())
    assert left.value.code == 2
    assert "usage: ds_sparse" in capsys.readouterr().err


def test_what_computes_nothing_starts_without_torch():
    """torch takes a second and a half to import, DeepSpeed another."""
    words = [sys.executable, "-c", IMPORTS, json.dumps(COMPUTES_NOTHING)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_is_quiet(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("ds_sparse.cli.schema.run", interrupted)
    assert main(["schema"]) == 128 + signal.SIGINT
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("words, unbuffered", [(["schema"], ""), (["schema"], "1"), ([], "1")])
def test_a_reader_that_leaves_ends_it_quietly(words, unbuffered):
    read, write = os.pipe()
    os.close(read)
    done = ds_sparse_command(*words, stdout=write, stderr=subprocess.PIPE, environment={"PYTHONUNBUFFERED": unbuffered})
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("words, unbuffered", [(["schema"], ""), (["schema"], "1"), ([], "1")])
def test_a_full_disk_is_a_sentence(words, unbuffered):
    with open("/dev/full", "w") as full:
        done = ds_sparse_command(
            *words, stdout=full, stderr=subprocess.PIPE, environment={"PYTHONUNBUFFERED": unbuffered}
        )
    sentence = f"ds_sparse: the output cannot be written: {os.strerror(errno.ENOSPC)}.\n"
    assert (done.returncode, done.stderr) == (1, sentence)


def test_without_any_output_it_still_has_a_status():
    done = subprocess.run(f"{sys.executable} -m ds_sparse schema >&- 2>&-", shell=True, check=False)
    assert done.returncode == 0


def test_schema_prints_the_committed_schema(capsys):
    assert main(["schema"]) == 0
    committed = (CONFIGS / "sparse_attention.schema.json").read_text()
    assert capsys.readouterr().out == committed and json.loads(committed)["$defs"]


def test_families_says_what_becomes_of_those_that_are_asked_for(capsys):
    assert main(["families", "ALBERT", "SigLIP"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("ALBERT: sparse; on Transformers' attention interface.\nSigLIP: sparse, part stays dense; ")
    assert "cross-attention" in out and max(map(len, out.splitlines())) <= 100
    assert main(["families", "--markdown", "ALBERT"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "| family | what happens | why |"
    assert main(["families", "ALBERT", "Bert"]) == 2
    assert capsys.readouterr().err.startswith("ds_sparse families: 'Bert' is none of BERT, RoBERTa, ")
