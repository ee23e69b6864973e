"""What all of `ds_sparse bench` has in common; the operations' own tests are in tests/bench."""

import subprocess
import sys

import pytest

from ds_sparse.cli import main


@pytest.mark.parametrize("operation", ["matmul", "attention", "window", "packed", "tokens"])
def test_a_folder_that_is_not_there_is_known_before_anything_is_measured(tmp_path, capsys, operation):
    assert main(["bench", operation, "--json", str(tmp_path / "nowhere" / "rows.json")]) == 1
    printed = capsys.readouterr()
    assert not printed.out
    assert f"there is no folder {tmp_path / 'nowhere'}; make it first." in printed.err


@pytest.mark.parametrize("operation", ["matmul", "attention", "window", "packed", "tokens"])
def test_a_folder_in_place_of_a_file_is_known_before_anything_is_measured(tmp_path, capsys, operation):
    assert main(["bench", operation, "--json", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert not printed.out
    assert f"--json {tmp_path}: is a folder; name a file to write, such as {tmp_path / 'rows.json'}." in printed.err


@pytest.mark.parametrize("text", ["x", "0", "-3", "1.5", ""])
def test_numbers_that_have_to_be_positive(capsys, text):
    with pytest.raises(SystemExit):
        main(["bench", "tokens", f"--seq-len=64,{text}"])
    assert f"{text!r} is not an integer of at least 1" in capsys.readouterr().err


def test_without_an_operation_it_names_them(capsys):
    assert main(["bench"]) == 2
    named = "name what to time: matmul, attention, window, packed, tokens"
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("operation", ["bert", "modernbert", "sequence", "train"])
def test_what_a_clone_measures_is_named_with_its_program(operation):
    command = [sys.executable, "-m", "ds_sparse", "bench", operation, "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and not done.stdout
    assert (
        f"in a clone of ds_sparse run `python -m benchmarks {operation} ...`, with --help for its options"
        in done.stderr
    )
