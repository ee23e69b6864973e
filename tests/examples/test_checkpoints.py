"""Folders of runs, and checkpoints of which a kill at any moment leaves a whole one."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import checkpoints

TERMS = {"seed": 1}


class Killed(BaseException):
    pass


class Engine:
    """Writes a checkpoint as DeepSpeed does, without its model."""

    def save_checkpoint(self, folder, tag, save_latest):
        assert not save_latest
        path = checkpoints.Path(folder) / tag
        path.mkdir(exist_ok=True)
        (path / "weights.pt").write_text(tag)

    def load_checkpoint(self, folder, tag):
        path = checkpoints.Path(folder) / tag / "weights.pt"
        return (str(path), {}) if path.exists() else (None, None)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "barrier", lambda: None)


def save(folder, step):
    checkpoints.save(Engine(), folder, step, TERMS, {"step": step})


def kill(*args, **kwargs):
    raise Killed


@pytest.mark.parametrize("at", ["random states", "state", "flush", "latest", "clean-up"])
def test_a_kill_while_a_checkpoint_is_written_leaves_a_whole_one_in_force(tmp_path, monkeypatch, at):
    save(tmp_path, 1)
    save(tmp_path, 2)
    with monkeypatch.context() as patch:
        owner, name = {
            "random states": (torch, "save"),
            "state": (checkpoints.json, "dumps"),
            "flush": (checkpoints, "_flush"),
            "latest": (checkpoints.os, "replace"),
            "clean-up": (checkpoints.shutil, "rmtree"),
        }[at]
        patch.setattr(owner, name, kill)
        with pytest.raises(Killed):
            save(tmp_path, 3)
    in_force = 3 if at == "clean-up" else 2
    assert checkpoints.latest(tmp_path) == f"step{in_force}"
    assert checkpoints.read_position(tmp_path, TERMS) == {"step": in_force}
    checkpoints.load(Engine(), tmp_path)

    save(tmp_path, 4)
    assert checkpoints.read_position(tmp_path, TERMS) == {"step": 4}
    assert {path.name for path in tmp_path.glob("step*")} == {f"step{in_force}", "step4"}


def test_random_states_come_back(tmp_path):
    save(tmp_path, 1)
    wanted = torch.rand(3)
    checkpoints.load(Engine(), tmp_path)
    assert torch.equal(torch.rand(3), wanted)


def test_no_checkpoint_is_none_and_other_terms_are_refused(tmp_path):
    assert checkpoints.read_position(tmp_path, TERMS) is None
    save(tmp_path, 1)
    with pytest.raises(ValueError, match="seed was 1 and is 2"):
        checkpoints.read_position(tmp_path, {"seed": 2})


def test_a_checkpoint_without_its_files_names_the_file_and_the_way_out(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "step2" / "weights.pt").unlink()
    with pytest.raises(ValueError, match="step2; write the name of an older checkpoint beside it into .*latest"):
        checkpoints.load(Engine(), tmp_path)
    (tmp_path / "step2" / checkpoints.STATE).unlink()
    with pytest.raises(ValueError, match="state.json is missing; write the name of an older checkpoint"):
        checkpoints.read_position(tmp_path, TERMS)
    (tmp_path / "latest").write_text("step1")
    assert checkpoints.read_position(tmp_path, TERMS) == {"step": 1}


def test_runs_that_start_together_get_folders_of_their_own(tmp_path):
    (tmp_path / "0003").mkdir()
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: checkpoints.new_run_folder(tmp_path), range(16)))
    assert sorted(folder.name for folder in folders) == [f"{number:04d}" for number in range(4, 20)]
    assert checkpoints.newest_run_folder(tmp_path).name == "0019"


def test_the_newest_run_of_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="There is no run in .* to resume"):
        checkpoints.newest_run_folder(tmp_path)


def test_write_atomically_leaves_the_old_text_or_the_new(tmp_path, monkeypatch):
    path = tmp_path / "file"
    checkpoints.write_atomically(path, json.dumps([1]))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.os, "replace", kill)
        with pytest.raises(Killed):
            checkpoints.write_atomically(path, json.dumps([2]))
    assert json.loads(path.read_text()) == [1]
