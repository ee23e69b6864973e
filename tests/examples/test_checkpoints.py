"""Checkpoints: a kill or a full disk leaves the one before, other terms are refused, other ranks go on."""

import errno
import json
import os
import pickle
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

import checkpoints

TERMS = {"seed": 1}


class Engine:
    """Writes and loads weights as DeepSpeed does, without its model; the file in two writes."""

    def __init__(self, step=0):
        self.weights = torch.full((64,), float(step))

    def save_checkpoint(self, folder, tag, save_latest):
        path = Path(folder) / tag / "mp_rank_00_model_states.pt"
        path.parent.mkdir()
        torch.save({"module": self.weights}, f"{path}.memory")
        data = Path(f"{path}.memory").read_bytes()
        Path(f"{path}.memory").unlink()
        for half, mode in ((data[: len(data) // 2], "wb"), (data[len(data) // 2 :], "ab")):
            with open(path, mode) as file:
                file.write(half)

    def load_checkpoint(self, folder, tag):
        path = Path(folder) / tag / "mp_rank_00_model_states.pt"
        if not path.exists():
            return None, None
        self.weights = torch.load(path, weights_only=False)["module"]  # as DeepSpeed does
        return str(path), {}


@pytest.fixture(autouse=True)
def rank(one_rank):
    """What checkpoints ask torch.distributed for."""


def save(folder, *steps, **position):
    for step in steps:
        checkpoints.save(Engine(step), folder, step, TERMS, {"step": step, **position})


def resume(folder):
    """The step of what is continued, after its weights were found to be of that step."""
    found, engine = checkpoints.find(folder, TERMS), Engine()
    if found is None:
        return 0
    checkpoints.load(engine, found)
    assert torch.equal(engine.weights, torch.full((64,), float(found.state["position"]["step"])))
    return found.state["position"]["step"]


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
def test_a_kill_at_any_write_leaves_in_force_what_was_or_the_new_one(tmp_path, killed, before):
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
        names = {path.name for path in folder.glob("step*")}
        assert resume(folder) == 4 and names <= {"step2", "step3", "step4"} and len(names) <= 2
    assert kills >= 7


def test_two_checkpoints_are_kept_and_a_step_saved_again_gets_its_new_position(tmp_path):
    save(tmp_path, 1, 2, 10)
    before = (tmp_path / "step10" / "mp_rank_00_model_states.pt").stat().st_mtime_ns
    save(tmp_path, 10, held_out_loss=1.5)
    assert [path.name for path in checkpoints.kept(tmp_path)] == ["step2", "step10"]
    assert checkpoints.find(tmp_path, TERMS).state["position"] == {"step": 10, "held_out_loss": 1.5}
    assert (tmp_path / "step10" / "mp_rank_00_model_states.pt").stat().st_mtime_ns == before


def test_an_older_checkpoint_is_taken_where_the_user_names_it(tmp_path):
    save(tmp_path, 1, 3)
    (tmp_path / "latest").write_text("step1\n")
    assert resume(tmp_path) == 1
    save(tmp_path, 2)
    assert [path.name for path in checkpoints.kept(tmp_path)] == ["step1", "step2"]


def test_without_the_file_that_names_it_the_newest_whole_checkpoint_is_in_force(tmp_path):
    save(tmp_path, 1, 2)
    (tmp_path / "latest").unlink()
    (tmp_path / "step3").mkdir()
    assert resume(tmp_path) == 2
    save(tmp_path, 4)
    assert [path.name for path in checkpoints.kept(tmp_path)] == ["step2", "step4"]


def test_a_checkpoint_of_version_0_1_0_is_read(tmp_path):
    """A step saved again had a number behind it, damaged ones another name, and a state a seal."""
    save(tmp_path, 3)
    (tmp_path / "step3").rename(tmp_path / "step3.1")
    (tmp_path / "step3.damaged").mkdir()
    (tmp_path / "latest").write_text("step3.1")
    state = tmp_path / "step3.1" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"files": {}, "seal": "0"}))
    assert resume(tmp_path) == 3
    save(tmp_path, 3, 4)
    assert [path.name for path in checkpoints.kept(tmp_path)] == ["step3.1", "step4"] and resume(tmp_path) == 4


class Code:
    """A pickle that runs a command when it is loaded."""

    def __reduce__(self):
        return os.system, ("false",)


MODEL, STATE = "step3/mp_rank_00_model_states.pt", "step3/state.json"
REFUSED = {
    "other terms": (STATE, lambda file: file.write_text('{"terms": {"seed": 2}}'), "seed was 2 and is 1. Give the old"),
    "no state": (STATE, Path.unlink, "cannot be loaded: No such file"),
    "cut state": (STATE, lambda file: file.write_text("{"), "cannot be loaded: Expecting property name"),
    "no weights": (
        MODEL,
        Path.unlink,
        "cannot be loaded: DeepSpeed finds no files of its own there. Write the name of",
    ),
    "cut weights": (MODEL, lambda file: os.truncate(file, 99), "cannot be loaded: .* Write the name of an older one"),
    "code": (MODEL, lambda file: torch.save(Code(), file), "it asks for posix.system, which is no plain data"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_continued_is_a_sentence_that_says_what_to_do(tmp_path, case):
    assert checkpoints.find(tmp_path, TERMS) is None
    save(tmp_path, 1, 3)
    name, change, sentence = REFUSED[case]
    change(tmp_path / name)
    with pytest.raises(ValueError, match=f"The checkpoint .*step3 .*{sentence}"):
        resume(tmp_path)
    (tmp_path / "latest").write_text("step1")
    assert resume(tmp_path) == 1


def test_tensors_plain_values_and_what_deepspeed_keeps_are_read_and_nothing_else(tmp_path, monkeypatch):
    """Even where the caller, or a variable, asks for any pickle."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    kept = {"stage": ZeroStageEnum(2), "scale": DynamicLossScaler(8, 2, 2, 1, 1), "rest": [(1, 2.5, None, "a")]}
    torch.save(kept, tmp_path / "kept.pt")
    torch.save(Code(), tmp_path / "code.pt")
    with checkpoints.plain_data_only():
        read = torch.load(tmp_path / "kept.pt", weights_only=False)
        with pytest.raises(pickle.UnpicklingError):
            torch.load(tmp_path / "code.pt", weights_only=False)
    assert read["stage"] == 2 and read["scale"].cur_scale == 8
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1" and "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("file write failed")])
def test_a_full_disk_ends_in_a_sentence_and_leaves_the_checkpoint_in_force(tmp_path, monkeypatch, error):
    save(tmp_path, 1, 2)

    def no_room(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "save_checkpoint", no_room)
        with pytest.raises(
            ValueError, match=rf"step3 cannot be written: {error.args[-1]}; .* stays in force\. Make room"
        ):
            save(tmp_path, 3)
    assert resume(tmp_path) == 2
    save(tmp_path, 3)
    assert resume(tmp_path) == 3


# Steps so large that a state which is not moved as it was shows in the next losses.
OPTIMIZER = {"type": "AdamW", "params": {"lr": 3e-2, "weight_decay": 0.5, "torch_adam": True}}
MOVES = ([2, "2"], [1, "4", "--resume"], [4, "6", "--resume"])


def options(workplace, name, steps, *more, **changes):
    changes = {"train_batch_size": 8, "optimizer": OPTIMIZER} | changes
    more = ("--max_seq_length", "128", "--max-steps", steps, "--warmup-steps", "1", "--save_steps", "100", *more)
    config = workplace.config(f"{name}{len(changes)}{changes['train_batch_size']}", **changes)
    return workplace.options(name, "--deepspeed_sparse_attention", *more, config=config, model="dropout")


@pytest.mark.slow("trains 13 runs on up to four ranks")
def test_a_run_goes_on_with_any_number_of_ranks_as_on_one(workplace):
    """The same sequences in the same order, the same draws of dropout, the optimizer's states where they were."""
    ranks, runs = [1], [options(workplace, "alone", "6")]
    for stage in range(4):
        for number, *arguments in MOVES:
            ranks.append(number)
            runs.append(options(workplace, f"zero{stage}", *arguments, zero_optimization={"stage": stage}))
    zero1 = {"zero_optimization": {"stage": 1}}
    wrong = [
        options(workplace, "zero1", "8", "--resume", train_batch_size=16, **zero1),
        options(workplace, "nowhere", "8", "--resume"),
    ]
    *ended, (refused, printed), nowhere = workplace.run([*runs, *wrong], [*ranks, 1, 2])
    assert all(code == 0 for *codes, _ in ended for code in codes), ended
    alone, *moved = (
        [loss for _, loss, _ in workplace.training_losses(name)]
        for name in ("alone", *(f"zero{stage}" for stage in range(4)))
    )
    assert len(alone) == 6 and moved == [pytest.approx(alone, abs=1e-5)] * 4
    folder = workplace.folder / "zero1" / "0001" / "sparse" / "checkpoints"
    assert {path.name for path in folder.iterdir() if path.suffix != ".py"} == {"latest", "step4", "step6"}
    assert "train_batch_size was 8 and is 16" in refused and "density" not in printed
    assert ["There is no run in" in sentence for sentence in nowhere[:2]] == [True, True], "what rank 0 finds ends all"


@pytest.mark.parametrize(
    "kind, params, kept", [("Lion", {}, "Lion"), ("AdamW", {"amsgrad": True}, "AdamW with amsgrad")]
)
def test_states_that_deepspeed_does_not_move_are_refused(kind, params, kept):
    config = {"optimizer": {"type": kind, "params": params}, "zero_optimization": {"stage": 2}}
    checkpoints.require_movable(config, 2, 2, "ds.json")
    checkpoints.require_movable(config | {"zero_optimization": {"stage": 0}}, 2, 4, "ds.json")
    checkpoints.require_movable(config | {"optimizer": OPTIMIZER}, 2, 4, "ds.json")
    with pytest.raises(ValueError, match=f"of 2 ranks, and there are 4.* not those of {kept}; continue on 2 ranks"):
        checkpoints.require_movable(config, 2, 4, "ds.json")
