"""`ds_sparse completion`: the scripts of shells, and what bash completes with its own."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from ds_sparse.cli import COMMANDS, main
from ds_sparse.cli.completion import SHELLS

PROGRAM = """
source "./$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
function=$(complete -p ds_sparse | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function ds_sparse "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shells_script_has_all_commands(shell, capsys):
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS) and "block-only" in script


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    "words, completed",
    [
        (["ds_sparse", "ver"], {"verify"}),
        (["ds_sparse", "check", "--bl"], {"--block-only"}),
        (["ds_sparse", "verify", "--device", "c"], {"cpu", "cuda"}),
        (["ds_sparse", "bench", "mat"], {"matmul"}),
        (["ds_sparse", "check", "config"], {"config.json"}),
    ],
)
def test_bash_completes_commands_options_choices_and_files(words, completed, tmp_path, capsys):
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "config.json").touch()
    command = ["bash", "-c", PROGRAM, "bash", "script", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert set(done.stdout.split()) == completed, done.stderr


def test_without_its_library_it_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "zsh"]) == 1
    assert "needs shtab, which is not installed: pip install 'ds_sparse[terminal]'." in capsys.readouterr().err
