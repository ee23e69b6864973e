"""Checkpoints of which a kill, a full disk or a damaged file leaves a whole one, and what is said of the others."""

import errno
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import checkpoints
from damage import sealed

pytestmark = pytest.mark.usefixtures("one_rank")
TERMS = {"seed": 1}


class Engine:
    """Writes a checkpoint as DeepSpeed does, without its model."""

    def __init__(self, step=0):
        self.weights, self.checkpoint_engine = torch.full((64,), float(step)), self

    def save(self, state_dict, path):
        torch.save(state_dict, path)

    def save_checkpoint(self, folder, tag, save_latest):
        assert not save_latest
        self.checkpoint_engine.save({"module": self.weights}, f"{folder}/{tag}/mp_rank_00_model_states.pt")
        self.checkpoint_engine.save({"m": self.weights}, f"{folder}/{tag}/zero_pp_rank_0_mp_rank_00_optim_states.pt")

    def load_checkpoint(self, folder, tag):
        path = Path(folder) / tag / "mp_rank_00_model_states.pt"
        if not path.exists():
            return None, None
        self.weights = torch.load(path, weights_only=False)["module"]  # as DeepSpeed does
        return str(path), {}


def save(folder, *steps):
    for step in steps:
        checkpoints.save(Engine(step), folder, step, TERMS, {"step": step})


def resume(folder):
    """The step of what is continued, after its weights were found to be of that step."""
    found, engine = checkpoints.find(folder, TERMS), Engine()
    checkpoints.load(engine, found)
    assert torch.equal(engine.weights, torch.full((64,), float(found.position["step"])))
    return found.position["step"]


def names(folder):
    return {path.name for path in folder.glob("step*")}


def latest(folder):
    return (folder / "latest").read_text()


ATTACKS = {
    "at every write": ([], 15),  # folder, two files in two halves, seal, name, and an old one to remove
    "at random moments": (["--stage", "3", "--ranks", "2", "--random", "3", "--seed", "1"], 3),
    "full disk": (["--stage", "2", "--ranks", "2", "--full"], 5),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.slow("saves and continues in ranks that are killed, for ten seconds")
def test_a_kill_and_a_full_disk_leave_a_checkpoint_that_continues_exactly(attack):
    """Real kills, of forks that are ranks; the program does more of each by hand."""
    options, least = ATTACKS[attack]
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("attack_checkpoints.py"), *options],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert int(last.split()[0]) >= least and last.endswith("nothing lost, each continued bit for bit")


def test_two_checkpoints_are_kept_and_a_step_saved_again_gets_a_name_of_its_own(tmp_path):
    save(tmp_path, 1, 2)
    before = {path: path.read_bytes() for path in (tmp_path / "step2").iterdir()}
    save(tmp_path, 2)
    assert names(tmp_path) == {"step2", "step2.1"} and latest(tmp_path) == "step2.1"
    assert {path: path.read_bytes() for path in (tmp_path / "step2").iterdir()} == before
    save(tmp_path, 2, 10)
    assert names(tmp_path) == {"step2.2", "step10"}
    assert resume(tmp_path) == 10


def test_no_checkpoint_is_none_and_other_terms_are_refused(tmp_path):
    assert checkpoints.find(tmp_path, TERMS) is None
    save(tmp_path, 1)
    with pytest.raises(ValueError, match="seed was 1 and is 2"):
        checkpoints.find(tmp_path, {"seed": 2})


def test_what_a_kill_left_of_a_first_checkpoint_is_no_checkpoint(tmp_path):
    (tmp_path / "step1").mkdir()
    assert checkpoints.find(tmp_path, TERMS) is None
    save(tmp_path, 1)
    assert resume(tmp_path) == 1


class Code:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file):
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def empty(file):
    file.write_bytes(b"")


def hold(text):
    return lambda file: file.write_text(text)


MODEL, OPTIMIZER = "step3/mp_rank_00_model_states.pt", "step3/zero_pp_rank_0_mp_rank_00_optim_states.pt"
STATE = "step3/state.json"
DAMAGES = [
    *((file, cut, "is damaged: it has ") for file in (MODEL, OPTIMIZER)),
    *((file, flip, "is damaged: its checksum is not that of what was written") for file in (MODEL, OPTIMIZER)),
    *((file, empty, "is empty") for file in (MODEL, OPTIMIZER, STATE, "latest")),
    *((file, Path.unlink, "is missing") for file in (MODEL, OPTIMIZER, STATE)),
    (STATE, cut, "is damaged: "),
    (STATE, flip, "is damaged: "),
    (STATE, hold("{}"), "is damaged: it holds no terms, position and files"),
    (STATE, hold("[" * 100000), "is damaged: "),
    (STATE, lambda file: file.write_bytes(b"\xff\xfe"), "is damaged: 'utf-8' codec can't decode byte 0xff"),
    ("latest", hold("../../elsewhere"), "holds '../../elsewhere', which is no checkpoint's name"),
    ("latest", lambda file: file.write_bytes(b"\xff\x00\n"), "holds '\ufffd\\x00', which is no checkpoint's name"),
    ("latest", hold("step9"), "names step9, which is not there"),
    ("latest", Path.unlink, "is missing"),
    ("step3", shutil.rmtree, "latest names step3, which is not there"),
]


@pytest.mark.parametrize("name, damage, sentence", DAMAGES)
def test_a_damaged_file_is_named_and_the_newest_whole_checkpoint_taken(tmp_path, capsys, name, damage, sentence):
    save(tmp_path, 1, 3)
    damage(tmp_path / name)
    whole = 3 if name == "latest" else 1
    assert resume(tmp_path) == whole
    said = capsys.readouterr().out
    file = tmp_path / name
    assert said.startswith(f"{tmp_path / sentence}." if name == "step3" else f"{file} {sentence}")
    assert f"{tmp_path}/step{whole} is whole and is taken instead" in said
    assert ("the 2 steps after it are trained again" in said) == name.startswith("step3/")

    assert latest(tmp_path) == f"step{whole}"
    save(tmp_path, 3)
    assert resume(tmp_path) == 3 and capsys.readouterr().out == ""
    assert (tmp_path / "step3.damaged").exists() == (name.startswith("step3/"))


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, STATE])
def test_where_no_checkpoint_is_whole_the_sentence_says_what_to_do(tmp_path, name):
    save(tmp_path, 3)
    (tmp_path / name).unlink()
    with pytest.raises(
        ValueError, match=rf"{name} is missing. No checkpoint in .* is whole; put back a copy, or start"
    ):
        checkpoints.find(tmp_path, TERMS)
    shutil.rmtree(tmp_path / "step3")
    with pytest.raises(ValueError, match="latest names step3, which is not there. No checkpoint"):
        checkpoints.find(tmp_path, TERMS)


def test_an_older_checkpoint_is_taken_where_the_user_names_it_and_a_line_says_so(tmp_path, capsys):
    save(tmp_path, 1, 3)
    (tmp_path / "latest").write_text("step1\n")
    assert resume(tmp_path) == 1
    assert (
        "latest names step1; step3 is newer, and goes when the next checkpoint is written." in capsys.readouterr().out
    )
    save(tmp_path, 2)
    assert names(tmp_path) == {"step1", "step2"}


def seal_again(path):
    """As someone does who changes a file and knows of the checksums."""
    state = json.loads((path / "state.json").read_text())
    del state["seal"]
    state["files"] = {
        name: {"bytes": (path / name).stat().st_size, "checksum": checkpoints.checksum(path / name)}
        for name in state["files"]
    }
    (path / "state.json").write_text(sealed(state))


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER])
@pytest.mark.parametrize("as_zip", [True, False])
def test_a_pickle_that_runs_code_is_refused_before_it_runs(tmp_path, capsys, name, as_zip):
    save(tmp_path, 1, 3)
    code = Code(f"touch {tmp_path / 'ran'}")
    if as_zip:
        torch.save(code, tmp_path / name)
    else:
        (tmp_path / name).write_bytes(pickle.dumps(code, protocol=2))
    seal_again(tmp_path / "step3")
    assert resume(tmp_path) == 1
    assert not (tmp_path / "ran").exists()
    assert f"{name} is not loaded: it asks for posix.system, which is no plain data." in capsys.readouterr().out


def test_what_deepspeed_unpickles_is_plain_data_even_if_it_changed_after_it_was_verified(tmp_path):
    save(tmp_path, 3)
    found = checkpoints.find(tmp_path, TERMS)
    torch.save(Code(f"touch {tmp_path / 'ran'}"), tmp_path / MODEL)
    with pytest.raises(ValueError, match="cannot be loaded: it asks for posix.system, which is"):
        checkpoints.load(Engine(), found)
    assert not (tmp_path / "ran").exists()


def test_files_that_deepspeed_cannot_load_end_in_a_sentence(tmp_path):
    save(tmp_path, 3)
    found = checkpoints.find(tmp_path, TERMS)
    (tmp_path / MODEL).unlink()
    with pytest.raises(ValueError, match=r"step3 cannot be loaded: .*Write the name of an older one beside it into"):
        checkpoints.load(Engine(), found)


def no_room(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


FULL = {
    "folder": (Path, "mkdir"),
    "a file of DeepSpeed's": (Engine, "save"),
    "state.json": (checkpoints, "write_atomically"),
    "latest": (checkpoints.os, "replace"),
}


@pytest.mark.parametrize("at", FULL)
def test_a_full_disk_ends_in_a_sentence_and_leaves_the_checkpoint_in_force(tmp_path, monkeypatch, at):
    save(tmp_path, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(*FULL[at], no_room)
        with pytest.raises(ValueError, match="No space left on device.*, then continue with --resume"):
            save(tmp_path, 3)
    assert names(tmp_path) == {"step1", "step2"} and resume(tmp_path) == 2
    save(tmp_path, 3)
    assert resume(tmp_path) == 3


def test_all_of_a_checkpoint_is_on_the_disk_before_latest_is_moved_to_it(tmp_path, monkeypatch):
    flushed, move = set(), os.replace

    def moved(old, new):
        if new.name == "latest":
            monkeypatch.undo()
            written = set((tmp_path / "step1").rglob("*")) | {tmp_path, tmp_path / "step1", old}
            assert {str(path) for path in written} <= {
                path.replace(".state.json.tmp", "state.json") for path in flushed
            }
        move(old, new)

    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.add(os.readlink(f"/proc/self/fd/{descriptor}")))
    monkeypatch.setattr(os, "replace", moved)
    save(tmp_path, 1)
    assert flushed and latest(tmp_path) == "step1"


@pytest.mark.parametrize("room", [100, 1000])
def test_files_that_find_no_room_are_removed(tmp_path, room):
    """A limit of the process stops PyTorch's writer and Python's as a full disk does."""
    save(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(ValueError) as caught:
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    print(caught.value)
    assert str(caught.value).startswith(f"The checkpoint {tmp_path / 'step2'} cannot be written: ")
    assert "GiB were free there); step1 stays in force. Make room, then continue with --resume." in str(caught.value)
    assert names(tmp_path) == {"step1"} and resume(tmp_path) == 1


TWO_RANKS = """
import errno, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from saving_ranks import Ranks, dist, torch

folder = Path(sys.argv[2]) / "run"
folder.mkdir()
ranks = Ranks(2, None, Path(sys.argv[2]) / "ranks")
assert ranks.run(folder, 2).ended()
with (folder / "step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").open("r+b") as file:
    file.truncate(100)
run = ranks.run(folder, 2)
assert run.ended()
print(run.printed)

save = torch.save
def full_on_rank_1(state, path, **options):
    if dist.get_rank() == 1:
        raise OSError(errno.ENOSPC, "No space left on device")
    save(state, path, **options)
torch.save = full_on_rank_1
print(ranks.run(folder, 3).printed)
"""


@pytest.mark.slow("trains on two ranks")
def test_ranks_agree_on_what_one_of_them_finds_and_on_what_one_cannot_write(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", TWO_RANKS, Path(__file__).parent, tmp_path],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("zero_pp_rank_1_mp_rank_00_optim_states.pt is damaged: it has 100 bytes of the") == 1
    assert done.stdout.count("step1 is whole and is taken instead; the 1 steps after it are trained again.") == 1
    assert done.stdout.count("step3 cannot be written: No space left on device") == 2  # on both ranks
    assert names(tmp_path / "run") == {"step1", "step2.1", "step2.damaged"} and latest(tmp_path / "run") == "step2.1"
