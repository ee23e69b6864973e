"""Checkpoints of which a kill, a full disk or a damaged file leaves a whole one, and what is said of the others."""

import errno
import hashlib
import os
import pickle
import resource
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

import checkpoints
import files
from checkpoints import read_state, sealed

pytestmark = pytest.mark.usefixtures("one_rank")
TERMS = {"seed": 1}


class Engine:
    """Writes a checkpoint as DeepSpeed does, without its model; each file in two writes."""

    def __init__(self, step=0):
        self.weights = torch.full((64,), float(step))

    def save(self, state, path):
        torch.save(state, f"{path}.memory")
        data = Path(f"{path}.memory").read_bytes()
        Path(f"{path}.memory").unlink()
        for half, mode in ((data[: len(data) // 2], "wb"), (data[len(data) // 2 :], "ab")):
            with open(path, mode) as file:
                file.write(half)

    def save_checkpoint(self, folder, tag, save_latest):
        assert not save_latest
        self.save({"module": self.weights}, f"{folder}/{tag}/mp_rank_00_model_states.pt")
        self.save({"m": self.weights}, f"{folder}/{tag}/zero_pp_rank_0_mp_rank_00_optim_states.pt")

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
    if found is None:
        return 0
    checkpoints.load(engine, found)
    assert torch.equal(engine.weights, torch.full((64,), float(found.state["position"]["step"])))
    return found.state["position"]["step"]


def names(folder):
    return {path.name for path in folder.glob("step*")}


def latest(folder):
    return (folder / "latest").read_text()


class Killed(BaseException):
    """Ends what writes, with nothing done after it."""


@pytest.fixture(scope="module")
def killed():
    """Kills what runs in it before its write of a number, from 1 on, below a folder."""
    armed = {}

    def audit(event, arguments):
        if armed:
            opens = event == "open" and str(arguments[0]).startswith(armed["folder"]) and arguments[2] & os.O_ACCMODE
            armed["left"] -= bool(opens or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"))
            if not armed["left"]:
                armed.clear()
                raise Killed

    @contextmanager
    def killed(folder, write):
        armed.update(folder=str(folder), left=write)
        try:
            yield
        finally:
            armed.clear()

    sys.addaudithook(audit)
    return killed


@pytest.mark.parametrize("before", [(), (1, 2)])
def test_a_kill_at_any_write_leaves_in_force_what_was_or_the_new_one(tmp_path, capsys, killed, before):
    base, kills, ended = tmp_path / "base", 0, False
    base.mkdir()
    save(base, *before)
    while not ended:
        folder = shutil.copytree(base, tmp_path / str(kills))
        try:
            with killed(folder, kills + 1):
                save(folder, 3)
            ended = True
        except Killed:
            kills += 1
        assert resume(folder) in ((3,) if ended else (3, before[-1] if before else 0))
        save(folder, 4)
        assert resume(folder) == 4 and names(folder) <= {"step2", "step3", "step4"} and len(names(folder)) <= 2
    said = capsys.readouterr().out
    assert kills >= 11 and "damaged" not in said and (not before or "taken instead" not in said)


def test_two_checkpoints_are_kept_and_a_step_saved_again_gets_a_name_of_its_own(tmp_path):
    save(tmp_path, 1, 2)
    before = {path: path.read_bytes() for path in (tmp_path / "step2").iterdir()}
    save(tmp_path, 2)
    assert names(tmp_path) == {"step2", "step2.1"} and latest(tmp_path) == "step2.1"
    assert {path: path.read_bytes() for path in (tmp_path / "step2").iterdir()} == before
    save(tmp_path, 2, 10)
    assert names(tmp_path) == {"step2.2", "step10"} and resume(tmp_path) == 10
    assert list(checkpoints.kept(tmp_path)) == ["step2.2", "step10"]


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


def hold(data):
    return lambda file: file.write_bytes(data)


MODEL, OPTIMIZER = "step3/mp_rank_00_model_states.pt", "step3/zero_pp_rank_0_mp_rank_00_optim_states.pt"
STATE = "step3/state.json"
DAMAGES = [
    *((file, cut, "is damaged: it has ") for file in (MODEL, OPTIMIZER)),
    *((file, flip, "is damaged: its checksum is not that of what was written") for file in (MODEL, OPTIMIZER)),
    *((file, hold(b""), "is empty") for file in (MODEL, OPTIMIZER, STATE, "latest")),
    *((file, Path.unlink, "is missing") for file in (MODEL, OPTIMIZER, STATE)),
    (STATE, cut, "is damaged: "),
    (STATE, flip, "is damaged: "),
    (STATE, hold(b"{}"), "is damaged: it holds no terms, position and files"),
    (STATE, hold(b'{"terms": {}, "position": {}, "files": {}}'), "is damaged: what it holds does not fit its own"),
    (STATE, hold(b"[" * 100000), "is damaged: "),
    (STATE, hold(b"\xff\xfe"), "is damaged: 'utf-8' codec can't decode byte 0xff"),
    ("latest", hold(b"../../elsewhere"), "holds '../../elsewhere', which is no checkpoint's name"),
    ("latest", hold(b"\xff\x00\n"), "holds '\ufffd\\x00', which is no checkpoint's name"),
    ("latest", hold(b"step9"), "names step9, which is not there"),
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
    assert said.startswith(f"{tmp_path / sentence}." if name == "step3" else f"{tmp_path / name} {sentence}")
    assert f"{tmp_path}/step{whole} is whole and is taken instead" in said
    assert ("the 2 steps after it are trained again" in said) == name.startswith("step3/")

    assert latest(tmp_path) == f"step{whole}"
    save(tmp_path, 3)
    assert resume(tmp_path) == 3 and capsys.readouterr().out == ""
    assert (tmp_path / "step3.damaged").exists() == name.startswith("step3/")


def test_where_no_checkpoint_is_whole_or_terms_are_others_the_sentence_says_what_to_do(tmp_path):
    assert checkpoints.find(tmp_path, TERMS) is None
    save(tmp_path, 3)
    with pytest.raises(ValueError, match="step3 cannot be continued exactly: seed was 1 and is 2. Give the old values"):
        checkpoints.find(tmp_path, {"seed": 2})
    (tmp_path / STATE).unlink()
    with pytest.raises(ValueError, match=rf"{STATE} is missing. No checkpoint in .* is whole; put back a copy, or"):
        checkpoints.find(tmp_path, TERMS)


def test_each_flipped_bit_of_a_state_is_found(tmp_path):
    """And what JSON has no number for is kept."""
    file = tmp_path / "state.json"
    position = {"held_out_loss": float("nan"), "text": "\ud800 é", 1: (2,)}
    file.write_text(sealed({"terms": TERMS, "position": position, "files": {}}))
    state, wrong = read_state(file)
    assert wrong is None and state["position"]["1"] == [2] and state["position"]["held_out_loss"] != 0
    data = file.read_bytes()
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        assert read_state(file)[1].startswith(f"{file} is damaged: "), changed


def test_an_older_checkpoint_is_taken_where_the_user_names_it_and_a_line_says_so(tmp_path, capsys):
    save(tmp_path, 1, 3)
    (tmp_path / "latest").write_text("step1\n")
    assert resume(tmp_path) == 1
    said = "latest names step1; step3 is newer, and goes when the next checkpoint is written."
    assert said in capsys.readouterr().out
    save(tmp_path, 2)
    assert names(tmp_path) == {"step1", "step2"}


class Code:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER])
@pytest.mark.parametrize("as_zip", [True, False])
def test_a_pickle_that_runs_code_is_refused_before_it_runs(tmp_path, capsys, name, as_zip):
    """Put there by someone who knows of the checksums."""
    save(tmp_path, 1, 3)
    code, file = Code(f"touch {tmp_path / 'ran'}"), tmp_path / name
    torch.save(code, file) if as_zip else file.write_bytes(pickle.dumps(code, protocol=2))
    state, _ = read_state(tmp_path / STATE)
    del state["seal"]
    state["files"][file.name] = {"bytes": file.stat().st_size, "checksum": files.checksum(file)}
    (tmp_path / STATE).write_text(sealed(state))
    assert resume(tmp_path) == 1 and not (tmp_path / "ran").exists()
    assert f"{name} is not loaded: it asks for posix.system, which is no plain data." in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda file: torch.save(Code("false"), file), "cannot be loaded: it asks for posix.system, which is"),
        (Path.unlink, r"cannot be loaded: .*Write the name of an older one beside it into"),
    ],
)
def test_files_that_changed_after_they_were_verified_end_in_a_sentence(tmp_path, change, sentence):
    save(tmp_path, 3)
    found = checkpoints.find(tmp_path, TERMS)
    change(tmp_path / MODEL)
    with pytest.raises(ValueError, match=sentence):
        checkpoints.load(Engine(), found)


def test_tensors_plain_values_and_what_deepspeed_keeps_are_read_and_nothing_else(tmp_path, monkeypatch):
    """Even where the caller, or a variable, asks for any pickle; a damaged one ends in one line."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    kept = {"stage": ZeroStageEnum(2), "scale": DynamicLossScaler(8, 2, 2, 1, 1), "rest": [(1, 2.5, None, "a")]}
    torch.save(kept, tmp_path / "kept.pt")
    torch.save(Code("false"), tmp_path / "code.pt", _use_new_zipfile_serialization=False)
    assert files.refusal(tmp_path / "kept.pt") is None
    with files.plain_data_only():
        read = torch.load(tmp_path / "kept.pt", weights_only=False)
        with pytest.raises(pickle.UnpicklingError):
            torch.load(tmp_path / "code.pt", weights_only=False)
    assert read["stage"] == 2 and read["scale"].cur_scale == 8
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1" and "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    data = (tmp_path / "code.pt").read_bytes()
    for length in range(len(data)):
        (tmp_path / "code.pt").write_bytes(data[:length])
        sentence = files.refusal(tmp_path / "code.pt")
        assert sentence and "\n" not in sentence and "PyTorch 2.6" not in sentence


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
        with pytest.raises(ValueError, match=r"No space left on device .*; step2 stays in force\. Make room"):
            save(tmp_path, 3)
    assert names(tmp_path) == {"step1", "step2"} and resume(tmp_path) == 2
    save(tmp_path, 3)
    assert resume(tmp_path) == 3


def test_pytorchs_writer_that_finds_no_room_is_named(tmp_path, monkeypatch):
    """A limit of the process stops it as a full disk does."""
    save(tmp_path, 1)
    monkeypatch.setattr(Engine, "save", lambda engine, state, path: torch.save(state, path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(ValueError, match="step2 cannot be written: PyTorch stopped .*; step1 stays"):
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == {"step1"} and resume(tmp_path) == 1


def test_all_of_a_checkpoint_is_on_the_disk_before_latest_is_moved_to_it(tmp_path, monkeypatch):
    flushed, move = set(), os.replace

    def moved(old, new):
        if new.name == "latest":
            monkeypatch.undo()
            written = {*(tmp_path / "step1").rglob("*"), tmp_path, tmp_path / "step1", old}
            assert {str(path) for path in written} <= {path.replace(".state.json.tmp", STATE[6:]) for path in flushed}
        move(old, new)

    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.add(os.readlink(f"/proc/self/fd/{descriptor}")))
    monkeypatch.setattr(os, "replace", moved)
    save(tmp_path, 1)
    assert flushed and latest(tmp_path) == "step1"


def test_a_checksum_is_that_of_the_checksums_of_the_pieces_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE", 4)
    file, data = tmp_path / "file", bytes(range(250))
    file.write_bytes(data)
    pieces = [hashlib.sha256(data[start : start + 4]).digest() for start in range(0, 250, 4)]
    assert files.checksum(file) == hashlib.sha256(b"".join(pieces)).hexdigest()


def test_a_checkpoint_of_an_earlier_version_is_read(tmp_path):
    """A state.json with its checksums, byte for byte as it was written then."""
    (tmp_path / "step3").mkdir()
    (tmp_path / "step3" / "note.txt").write_text("known")
    (tmp_path / STATE).write_text(EARLIER)
    assert checkpoints.find(tmp_path, TERMS).state["position"] == {"step": 3}


EARLIER = (
    '{"terms": {"seed": 1}, "position": {"step": 3}, "ranks": 1, "files": {"note.txt": {"bytes": 5, "checksum": '
    '"df3cb7b1260ab7a3cf834925504369626492a33bd17d778464aeaf86661328a2"}}, "seal": '
    '"3b3786573b8e482c5e3c18e27bfb7b2bdaecdf13b71a136a218584be1b915d6a"}'
)
