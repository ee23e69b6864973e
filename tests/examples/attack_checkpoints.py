"""Kills ranks that write a checkpoint, and damages the files of one, and continues from what is left.

    python tests/examples/attack_checkpoints.py                        a kill at every write, without DeepSpeed
    python tests/examples/attack_checkpoints.py --stage 3 --ranks 2    at every write of every rank, with its ZeRO 3
    python tests/examples/attack_checkpoints.py --stage 3 --ranks 2 --random 20 --seed 1    at random moments
    python tests/examples/attack_checkpoints.py --stage 3 --ranks 2 --damage    every file cut, emptied, flipped, gone

A kill has to leave a whole checkpoint in force; damage has to be named. In each trial the losses after it have to be
those of an uninterrupted run, bit for bit. Imports are done once: the ranks of all trials are forks of this process.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
sys.path[:0] = [str(Path(__file__).parents[2] / "examples" / "bing_bert")]

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from ds_sparse import init_distributed  # noqa: E402

import checkpoints  # noqa: E402

TERMS = {"seed": 1}
BEFORE, LAST = 2, 5
DAMAGED = re.compile("is (damaged|empty|missing)|taken instead|not there|no checkpoint's name")


class PlainEngine:
    """Trains and writes checkpoints as an engine of DeepSpeed does, without DeepSpeed."""

    def __init__(self):
        self.weights, self.checkpoint_engine = torch.zeros(64), self

    def train(self) -> float:
        self.weights += torch.rand(64)
        return self.weights.sum().item()

    def save(self, state_dict, path):
        torch.save(state_dict, path)

    def save_checkpoint(self, folder, tag, save_latest):
        if dist.get_rank() == 0:
            self.checkpoint_engine.save({"weights": self.weights}, f"{folder}/{tag}/mp_rank_00_model_states.pt")
        dist.barrier()

    def load_checkpoint(self, folder, tag):
        path = f"{folder}/{tag}/mp_rank_00_model_states.pt"
        self.weights = torch.load(path)["weights"]
        return path, {}


class ZeroEngine:
    """A small model in an engine of DeepSpeed, whose batches are drawn from the random state."""

    def __init__(self, stage: int):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
        }
        self.engine, *_ = deepspeed.initialize(model=model, config=config)

    def train(self) -> float:
        loss = self.engine(torch.randn(2, 8)).square().mean()
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()

    def __getattr__(self, name):
        return getattr(self.engine, name)


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


def train(rank: int, args: argparse.Namespace, folder: Path, last: int, write: int | None) -> dict[int, float]:
    """One rank of a run that continues what is in `folder` and saves each step to `last`; the losses by step."""
    torch.manual_seed(rank)
    engine = PlainEngine() if args.stage is None else ZeroEngine(args.stage)
    found = checkpoints.find(folder, TERMS)
    if found is not None:
        checkpoints.load(engine, found)
    if write is not None:
        kill_at(write, folder)
    losses = {}
    for step in range(found.position["step"] + 1 if found else 1, last + 1):
        losses[step] = engine.train()
        checkpoints.save(engine, folder, step, TERMS, {"step": step})
    return losses


def fork(rank: int, args: argparse.Namespace, folder: Path, last: int, write: int | None) -> int:
    """Starts a rank; beside `folder` it leaves what it printed and its losses."""
    pid = os.fork()
    if pid:
        return pid
    try:
        out = os.open(f"{folder}.{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(args.ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # asked for, and not used beside a store
        init_distributed(
            dist_backend="gloo", init_method=f"file://{folder}.store", rank=rank, world_size=args.ranks, verbose=False
        )
        losses = train(rank, args, folder, last, write)
        Path(f"{folder}.{rank}.json").write_text(json.dumps(losses))
        os._exit(0)
    except BaseException:  # noqa: BLE001 - a fork must not go on as its parent
        traceback.print_exc()
        os._exit(1)


def run(
    args: argparse.Namespace, folder: Path, last: int, writes: dict[int, int], seconds: float | None = None
) -> bool:
    """Runs all ranks, those in `writes` killed at that write of theirs, or all after `seconds`; whether one was."""
    Path(f"{folder}.store").unlink(missing_ok=True)
    pids = [fork(rank, args, folder, last, writes.get(rank)) for rank in range(args.ranks)]
    if seconds is not None:
        time.sleep(seconds)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    killed = False
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if os.waitstatus_to_exitcode(status) == -signal.SIGKILL and not killed:
            killed = True
            for other in pids:
                os.kill(other, signal.SIGKILL)
    return killed


def printed(args: argparse.Namespace, folder: Path) -> str:
    return "".join(Path(f"{folder}.{rank}.txt").read_text() for rank in range(args.ranks))


def losses(args: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    found = [Path(f"{folder}.{rank}.json") for rank in range(args.ranks)]
    assert all(file.exists() for file in found), printed(args, folder)
    return [json.loads(file.read_text()) for file in found]


def check(args: argparse.Namespace, folder: Path, reference: list[dict[str, float]], what: str, named: bool) -> None:
    """Continues from what an attack left, which has to lead to the losses of the uninterrupted run."""
    run(args, folder, LAST, {})
    said = printed(args, folder)
    assert bool(DAMAGED.search(said)) == named, f"{what}:\n{said}"
    for ours, theirs in zip(losses(args, folder), reference, strict=True):
        assert ours and ours == {step: theirs[step] for step in ours}, f"{what}: {ours} {theirs}"
    if named:
        sentence = next(line for line in said.splitlines() if DAMAGED.search(line))
        print(f"{what}: {sentence.replace(f'{folder}/', '')}", flush=True)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGES = {
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "emptied": lambda file: os.truncate(file, 0),
    "flipped": flip,
    "gone": Path.unlink,
}


def attack(args: argparse.Namespace, place: Path) -> int:
    """Attacks copies of a run in each of the ways that were asked for; the number of attacks."""
    whole, base, work = (place / name for name in ("whole", "base", "work"))
    for folder, last in ((whole, LAST), (base, BEFORE)):
        folder.mkdir()
        started = time.monotonic()
        run(args, folder, last, {})
        losses(args, folder)
    reference, seconds = losses(args, whole), time.monotonic() - started

    def copy() -> Path:
        shutil.rmtree(work, ignore_errors=True)
        for path in place.glob("work.*"):
            path.unlink()
        return shutil.copytree(base, work)

    def is_killed(what: str, *how: Any) -> bool:
        killed = run(args, copy(), *how)
        if killed:
            check(args, work, reference, what, named=False)
        return killed

    if args.random is not None:
        moments = (random.Random(f"{args.seed} {number}").uniform(0, seconds) for number in range(args.random))
        return sum(is_killed(f"kill after {moment:.3f} s", LAST - 1, {}, moment) for moment in moments)
    if args.damage:
        files = [*(base / f"step{BEFORE}").iterdir(), base / "latest"]
        for file, (damage, do) in itertools.product(sorted(files), DAMAGES.items()):
            name = file.relative_to(base)
            do(copy() / name)
            check(args, work, reference, f"{name} {damage}", named=True)
        return len(files) * len(DAMAGES)
    kills = 0
    for rank in range(args.ranks):
        write = 1
        while is_killed(f"rank {rank} before write {write}", BEFORE + 1, {rank: write}):
            write += 1
        losses(args, work)
        kills += write - 1
    return kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=range(4), help="ZeRO stage of an engine (default: no DeepSpeed)")
    parser.add_argument("--ranks", type=int, default=1)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--random", type=int, metavar="N", help="N runs, all ranks killed at a random moment of each")
    ways.add_argument("--damage", action="store_true", help="damage every file of the checkpoint in force")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        print(f"{attack(args, Path(place))} attacks, each continued bit for bit")


if __name__ == "__main__":
    main()
