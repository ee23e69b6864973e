"""What users may name for machines and ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_sparse.launcher import machines
from ds_sparse.launcher.command import runner

OPTION = "-oProxyCommand=touch${IFS}reached"


def check(*words: str) -> None:
    machines.check(runner.parse_args([*words, "train.py"]))


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """Writes a hostfile of these lines, `hosts` in the folder that the test runs in."""
    monkeypatch.chdir(tmp_path)

    def write(*lines: str) -> str:
        (tmp_path / "hosts").write_text("".join(f"{line}\n" for line in lines))
        return "hosts"

    return write


def test_usual_names_and_numbers_pass(hosts):
    check()
    check("--num_gpus", "4096", "--num_nodes", "1", "--master_port", "65535", "--master_addr", "2001:db8::1")
    names = ("worker-0", "10.0.0.1", "me@node_1.example.org", "fe80::1%eth0", "[2001:db8::1]", "knoten-ä")
    check("-H", hosts("# a comment", "", *(f"{name} slots=8" for name in names)), "--include", "worker-0@10.0.0.1:0,2")
    check("-H", "hosts", "--num_nodes", "2", "--num_gpus", "8")
    check("-H", "hosts", "--exclude", "worker-0:0,1@10.0.0.1")
    check("-H", "no_such_file", "--include", "localhost:0")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--include", "worker-3"], "--include is 'worker-3': .* not found.* ranks: worker-0 with 2, b with 4."),
        (["--exclude", "b:7"], "--exclude is 'b:7': No slot '7' .* Machines and their ranks: "),
        (["--include", "b:x"], "--include is 'b:x': .* Machines and their ranks: "),
        (["--exclude", "worker-0@b"], "--exclude is 'worker-0@b', and leaves no machine. "),
        (["--include", "b", "--exclude", "b:1"], "--include and --exclude do not go together; give one of them."),
        (["--include", "b", "--num_gpus", "1"], "--include and --num_gpus do not go together; give one of them."),
    ],
)
def test_a_choice_of_machines_that_are_not_there_is_refused(hosts, words, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        check("-H", hosts("worker-0 slots=2", "b slots=4"), *words)


def test_without_a_hostfile_there_is_this_machine_alone(monkeypatch):
    with pytest.raises(ValueError, match="^--include is 'foo': .*Machines and their ranks: localhost with "):
        check("-H", "no_such_file", "--include", "foo")
    with pytest.raises(ValueError, match="^--num_nodes is 2, and no_such_file, the hostfile, is not there.$"):
        check("-H", "no_such_file", "--num_nodes", "2")


@pytest.mark.parametrize(
    "host", [OPTION, "-w", "me@-oProxyCommand=x", "a;b", "$(touch${IFS}x)", "'a", "a,b", "^a", "/a/"]
)
def test_a_host_that_is_more_than_a_name_is_refused(hosts, host):
    with pytest.raises(ValueError, match="is no name or address of a machine") as refused:
        check("-H", hosts("worker-0 slots=1", f"{host} slots=1"))
    assert str(refused.value).startswith(f"hosts: {host!r} ")
    with pytest.raises(ValueError, match="^--master_addr: "):
        check(f"--master_addr={host}")
    if "@" not in host:
        for option in ("--include", "--exclude"):
            with pytest.raises(ValueError, match=f"^{option}: "):
                check(f"{option}=worker-0:0@{host}:1")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--num_gpus", "9" * 30], "--num_gpus is a number of 30 digits; give the accelerators of one machine, 0 to"),
        (["--num_gpus", "4097"], "--num_gpus is 4097; give "),
        (["--num_accelerators=-2"], "--num_gpus is -2; give "),
        (["--master_port", "65536"], "--master_port is 65536; give a port, 0 to 65535."),
    ],
)
def test_numbers_that_no_machine_has_are_refused(words, sentence):
    with pytest.raises(ValueError) as refused:
        check(*words)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(
    "content, sentence",
    [
        (b"worker-0 slots=99999999999999999999", "hosts: slots of worker-0 is 99999999999999999999; give "),
        (b"worker-0", "hosts: no hostfile, which has a line such as .*bad entry: worker-0"),
        (b"a slots=1\na slots=1", "hosts: no hostfile, .*multiple entries for a"),
        (b"", "hosts: no hostfile, .*empty"),
        (b"\xff slots=1", "hosts: no hostfile, .*utf-8"),
    ],
)
def test_a_hostfile_that_is_none_gets_a_sentence(hosts, tmp_path, content, sentence):
    (tmp_path / "hosts").write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        check("-H", "hosts")


def test_nothing_is_started_for_a_host_that_is_refused(hosts, tmp_path):
    for name in ("ssh", "pdsh"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\ntouch reached\n")
        program.chmod(0o755)
    (tmp_path / "train.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "ds_sparse", "run", "-H", hosts(f"{OPTION} slots=1", "b slots=1"),
         "--master_addr", "127.0.0.1", "train.py"],
        capture_output=True, text=True, check=False,
        env=os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 2 and not Path("reached").exists()
    assert done.stderr.splitlines()[-1].startswith(f"ds_sparse run: hosts: '{OPTION}' is no name or address")
