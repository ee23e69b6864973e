"""Ranks that train, write a checkpoint after each step, and note what they did, so that they can be killed meanwhile.

Imports are done once: ranks are forks of the process that starts them.
"""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
sys.path[:0] = [str(Path(__file__).parents[2] / "examples" / "bing_bert")]

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from ds_sparse import init_distributed  # noqa: E402

import checkpoints  # noqa: E402

TERMS = {"seed": 1}
PATIENCE = 60.0
"""Seconds after which ranks hang."""


class PlainEngine:
    """Trains and writes checkpoints as an engine of DeepSpeed does, without DeepSpeed."""

    def __init__(self):
        self.weights, self.checkpoint_engine = torch.zeros(64), self

    def train_step(self, step: int) -> float:
        seed_of(step)
        batch = torch.rand(64)
        dist.all_reduce(batch)
        self.weights += batch
        return self.weights.sum().item()

    def save(self, state_dict, path):
        torch.save(state_dict, path)

    def save_checkpoint(self, folder, tag, save_latest):
        if dist.get_rank() == 0:
            self.checkpoint_engine.save({"weights": self.weights}, f"{folder}/{tag}/mp_rank_00_model_states.pt")
        states = f"{folder}/{tag}/zero_pp_rank_{dist.get_rank()}_mp_rank_00_optim_states.pt"
        self.checkpoint_engine.save({"rank": dist.get_rank()}, states)
        dist.barrier()

    def load_checkpoint(self, folder, tag):
        path = f"{folder}/{tag}/mp_rank_00_model_states.pt"
        self.weights = torch.load(path)["weights"]
        return path, {}


def seed_of(step: int) -> None:
    """Has a rank draw what is its own in a step."""
    torch.manual_seed(1000 * step + dist.get_rank())


def zero_engine(stage: int) -> Any:
    """A small model in an engine of DeepSpeed, whose batches are drawn."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)

    def train_step(step: int) -> float:
        seed_of(step)
        loss = engine(torch.randn(2, 8)).square().mean()
        engine.backward(loss)
        engine.step()
        return loss.item()

    engine.train_step = train_step
    return engine


class Attack(NamedTuple):
    """What happens to the ranks of a run."""

    writes: Mapping[int, int]
    """The ranks that are killed, each before its write of this number, from 1 on."""
    moments: Mapping[int, float]
    """The seconds after which ranks are killed."""
    largest_file: int | None
    """Bytes that a file may have while a checkpoint is written, as if the disk were full; None for any."""


NOTHING = Attack({}, {}, None)


class Run(NamedTuple):
    """What ranks did until they ended or were killed."""

    notes: list[dict[str, Any]]
    """Of each rank: the step that it `found` to continue from and the last that it `saved`, None where it did not come
    so far; `losses` by step; whether it `ended`."""
    printed: str
    killed: bool
    seconds: float

    def ended(self) -> bool:
        return all(notes["ended"] for notes in self.notes)

    def found(self) -> int | None:
        """The step that it continued from, None where it was killed before."""
        return next((notes["found"] for notes in self.notes if notes["found"] is not None), None)

    def in_force(self, before: int) -> int:
        """The last step whose checkpoint is known to be in force; `before`, that step when the run began."""
        return max([before, *(step for notes in self.notes for step in (notes["found"], notes["saved"]) if step)])

    def reached(self) -> int | None:
        """The last step that was trained."""
        return max((step for notes in self.notes for step in notes["losses"]), default=None)


class Ranks:
    """Starts `number` ranks with an engine of a ZeRO stage, or a plain one; what they leave to read is in `place`."""

    def __init__(self, number: int, stage: int | None, place: Path):
        self.number, self.stage, self.place = number, stage, place
        if stage is not None:
            # Takes seconds, in each engine's first start; forks have it done.
            import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401

    def run(self, folder: Path, last: int, attack: Attack = NOTHING) -> Run:
        """Continues what is in `folder` to step `last`. Once a rank is killed by itself, so are the others.

        Raises:
            TimeoutError: the ranks hang.
        """
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()
        start = time.monotonic()
        pids = {self._fork(rank, folder, last, attack): rank for rank in range(self.number)}
        killed, hang = self._end(pids, {rank: start + after for rank, after in attack.moments.items()})
        seconds = time.monotonic() - start
        printed = "".join((self.place / f"{rank}.txt").read_text() for rank in range(self.number))
        if hang:
            raise TimeoutError(f"ranks hang:\n{printed}")
        return Run([self._notes(rank) for rank in range(self.number)], printed, killed, seconds)

    def _end(self, pids: dict[int, int], moments: Mapping[int, float]) -> tuple[bool, bool]:
        """Waits until all ranks have ended; whether one was killed, and whether one hung."""
        killed, patience = False, time.monotonic() + PATIENCE
        while pids:
            now = time.monotonic()
            for pid, rank in pids.items():
                if now >= min(moments.get(rank, patience), patience):
                    os.kill(pid, signal.SIGKILL)
            for pid in list(pids):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del pids[pid]
                    killed |= os.waitstatus_to_exitcode(status) == -signal.SIGKILL
            if killed and not moments:
                moments = dict.fromkeys(pids.values(), now)
            time.sleep(0.0005)
        return killed, now >= patience

    def _fork(self, rank: int, folder: Path, last: int, attack: Attack) -> int:
        out = os.open(self.place / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
        pid = os.fork()
        if pid:
            os.close(out)
            return pid
        try:
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.number)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # asked for, and not used beside a store
            store = f"file://{self.place}/store"
            init_distributed(dist_backend="gloo", init_method=store, rank=rank, world_size=self.number, verbose=False)
            with (self.place / f"{rank}.jsonl").open("w", buffering=1) as notes:
                self._train(rank, folder, last, attack, lambda **note: notes.write(f"{json.dumps(note)}\n"))
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a fork must not go on as its parent
            traceback.print_exc()
            os._exit(1)

    def _train(self, rank: int, folder: Path, last: int, attack: Attack, note: Callable[..., Any]) -> None:
        engine = PlainEngine() if self.stage is None else zero_engine(self.stage)
        found = checkpoints.find(folder, TERMS)
        if found is not None:
            checkpoints.load(engine, found)
        begun = found.position["step"] if found else 0
        note(found=begun)
        if rank in attack.writes:
            kill_at(attack.writes[rank], folder)
        for step in range(begun + 1, last + 1):
            note(step=step, loss=engine.train_step(step))
            with files_of_at_most(attack.largest_file):
                checkpoints.save(engine, folder, step, TERMS, {"step": step})
            note(saved=step)
        note(ended=True)

    def _notes(self, rank: int) -> dict[str, Any]:
        notes = {"found": None, "saved": None, "losses": {}, "ended": False}
        file = self.place / f"{rank}.jsonl"
        for line in file.read_text().splitlines() if file.exists() else ():
            note = json.loads(line)
            if "loss" in note:
                notes["losses"][note["step"]] = note["loss"]
            else:
                notes |= note
        return notes


def kill_at(write: int, folder: Path) -> None:
    """From here on counts what this process writes, and kills it before number `write`, from 1 on."""
    left = write

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple) -> None:
        opens = event == "open" and str(arguments[0]).startswith(str(folder)) and arguments[2] & os.O_ACCMODE
        if opens or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            count()

    whole = torch.save

    def save_in_halves(state: object, path: object, **options: object) -> None:
        """PyTorch writes files without Python, so that audits do not see it."""
        buffer = io.BytesIO()
        whole(state, buffer, **options)
        data = buffer.getvalue()
        with open(path, "wb") as file:
            for half in (data[: len(data) // 2], data[len(data) // 2 :]):
                file.write(half)
                file.flush()
                count()

    torch.save = save_in_halves
    sys.addaudithook(audit)


@contextmanager
def files_of_at_most(size: int | None) -> Iterator[None]:
    """Files that would grow further fail to be written, as on a full disk. For this process, and None for no limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
