"""Kills ranks that write a checkpoint, leaves them no room, damages the files of one, and continues from what is left.

    python tests/examples/attack_checkpoints.py                        a kill at every write, without DeepSpeed
    python tests/examples/attack_checkpoints.py --stage 3 --ranks 2    at every write of every rank, with its ZeRO 3
    python tests/examples/attack_checkpoints.py --stage 3 --ranks 2 --random 100 --seed 1    at random moments
    python tests/examples/attack_checkpoints.py --stage 3 --ranks 2 --damage    every file cut, emptied, flipped, gone
    python tests/examples/attack_checkpoints.py --stage 3 --ranks 2 --full    files that find no room
    python tests/examples/attack_checkpoints.py --stage 3 --ranks 2 --full --place /mnt/small    on a disk of some MiB

A kill and a full disk have to leave in force what was in force, or what was written since; damage has to be named. All
losses have to be those of an uninterrupted run, bit for bit.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import shutil
import tempfile
from pathlib import Path

from saving_ranks import NOTHING, Attack, Ranks, Run, checkpoints

BEFORE, LAST = 2, 5
MANY = 20
"""Steps of a run that is killed at random moments."""
DAMAGED = re.compile("is (damaged|empty|missing)|taken instead|not there|no checkpoint's name")
NO_ROOM = re.compile("cannot be written: .* stays in force. Make room|mend that, then continue with --resume")
SMALL = 64 * 2**20


class Trials:
    """Runs in copies of one folder, each compared with a run that nothing happened to."""

    def __init__(self, ranks: Ranks, place: Path, last: int):
        self.ranks, self.last = ranks, last
        self.base, self.work = place / "base", place / "work"
        self.reference = self._begun(self.work, last)
        self._begun(self.base, BEFORE)

    def _begun(self, folder: Path, last: int) -> Run:
        folder.mkdir()
        run = self.ranks.run(folder, last)
        assert run.ended(), run.printed
        return run

    def anew(self) -> Path:
        """The folder of the next trial, as a run of `BEFORE` steps has left it."""
        shutil.rmtree(self.work)
        return shutil.copytree(self.base, self.work)

    def run(self, what: str, last: int, attack: Attack = NOTHING) -> Run:
        """Continues, to be attacked; what it trained has to be what the other run trained."""
        run = self.ranks.run(self.work, last, attack)
        for ours, theirs in zip(run.notes, self.reference.notes, strict=True):
            wrong = {step: loss for step, loss in ours["losses"].items() if loss != theirs["losses"][step]}
            assert not wrong, f"{what}: {wrong} in place of {theirs['losses']}"
        return run

    def check_found(self, what: str, run: Run, in_force: int) -> None:
        """That a run found what was in force; or the checkpoint after it, if all but the last words of it were done."""
        assert not DAMAGED.search(run.printed), f"{what}:\n{run.printed}"
        for notes in run.notes:
            assert notes["found"] in (None, in_force, in_force + 1), f"{what}: {in_force}\n{run.notes}\n{run.printed}"

    def continues(self, what: str, in_force: int) -> None:
        run = self.run(what, self.last)
        assert run.ended(), f"{what}:\n{run.printed}"
        self.check_found(what, run, in_force)


def kills_at_every_write(trials: Trials) -> str:
    kills = 0
    for rank in range(trials.ranks.number):
        for write in itertools.count(1):
            trials.anew()
            what = f"rank {rank} killed before write {write}"
            run = trials.run(what, BEFORE + 1, NOTHING._replace(writes={rank: write}))
            if not run.killed:
                assert run.ended(), f"{what}:\n{run.printed}"
                break
            trials.continues(what, run.in_force(BEFORE))
            kills += 1
    return f"{kills} kills, one before each write"


def kills_at_random_moments(trials: Trials, number: int, seed: int) -> str:
    """One run after another continues what a kill left, until all steps are done; then it begins anew."""
    draw, kills, amid, again = random.Random(seed), 0, 0, 0
    while kills < number:
        in_force = reached = BEFORE
        trials.anew()
        ended = False
        while not ended:
            moment = draw.uniform(0, trials.reference.seconds)
            moments = {rank: moment + draw.choice((0, draw.uniform(0, 0.1))) for rank in range(trials.ranks.number)}
            what = f"kill {kills + 1}, after {moment:.3f} s"
            run = trials.run(what, trials.last, NOTHING._replace(moments=moments) if kills < number else NOTHING)
            trials.check_found(what, run, in_force)
            again += reached - run.found() if run.found() else 0
            in_force, reached = run.in_force(in_force), run.reached() or reached
            ended = run.ended()
            assert ended or run.killed, f"{what}:\n{run.printed}"
            kills += run.killed
            amid += run.killed and is_half_written(trials.work)
    return f"{kills} kills at random moments, {amid} amid a checkpoint, {again} steps trained again"


def is_half_written(folder: Path) -> bool:
    """Whether there is more of checkpoints than those that are kept, the last of them in force."""
    kept = checkpoints._tags(folder)[-checkpoints.KEPT :]
    there = {path.name for path in folder.iterdir() if path.name.startswith(("step", "."))}
    return there != set(kept) or (folder / "latest").read_text() != kept[-1]


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


def damage(trials: Trials) -> str:
    files = sorted([*(trials.base / f"step{BEFORE}").iterdir(), trials.base / "latest"])
    for file, (how, do) in itertools.product(files, DAMAGES.items()):
        name = file.relative_to(trials.base)
        do(trials.anew() / name)
        run = trials.run(f"{name} {how}", trials.last)
        said = [line for line in run.printed.splitlines() if DAMAGED.search(line)]
        assert run.ended() and said, f"{name} {how}:\n{run.printed}"
        assert run.found() == (BEFORE if name.name == "latest" else BEFORE - 1), f"{name} {how}:\n{run.printed}"
        print(f"{name} {how}: {said[0].replace(f'{trials.work}/', '')}", flush=True)
    return f"{len(files) * len(DAMAGES)} damages, each named"


def full_disks(trials: Trials) -> str:
    """No room, for a file or on a small disk: on all ranks a sentence, and what was in force stays so."""
    refused, disk = 0, trials.base.parent / "filled"
    small = shutil.disk_usage(trials.base).free <= SMALL
    sizes = [path.stat().st_size for path in (trials.base / f"step{BEFORE}").rglob("*")]
    rooms = range(0, 4 * sum(sizes), 4096) if small else sorted({0, *(size - 1 for size in sizes)})
    for room in rooms:
        trials.anew()
        what = f"{room:,} bytes of room"
        if small:
            fill(disk, room)
        run = trials.run(what, BEFORE + 1, NOTHING._replace(largest_file=None if small else room))
        disk.unlink(missing_ok=True)
        if run.ended():
            if small:
                break
            continue
        said = NO_ROOM.findall(run.printed)
        assert len(said) == trials.ranks.number, f"{what}:\n{run.printed}"
        print(f"{what}: {said[0].replace(f'{trials.work}/', '')}", flush=True)
        trials.continues(what, BEFORE)
        refused += 1
    return f"{refused} checkpoints without room"


def fill(file: Path, room: int) -> None:
    """Writes a file that leaves so many bytes on its disk."""
    with file.open("wb") as disk:
        while (free := shutil.disk_usage(file.parent).free) > room:
            disk.write(bytes(min(free - room, 2**20)))
            disk.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=range(4), help="ZeRO stage of an engine (default: no DeepSpeed)")
    parser.add_argument("--ranks", type=int, default=1)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--random", type=int, metavar="N", help="N kills of all ranks at random moments")
    ways.add_argument("--damage", action="store_true", help="damage every file of the checkpoint in force")
    ways.add_argument("--full", action="store_true", help="leave too little room for a checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--place", type=Path, help="an empty folder for checkpoints (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        ranks = Ranks(args.ranks, args.stage, Path(temporary) / "ranks")
        trials = Trials(ranks, args.place or Path(temporary), LAST if args.random is None else MANY)
        if args.random is not None:
            said = kills_at_random_moments(trials, args.random, args.seed)
        elif args.damage or args.full:
            said = (damage if args.damage else full_disks)(trials)
        else:
            said = kills_at_every_write(trials)
    print(f"{said}; nothing lost, each continued bit for bit")


if __name__ == "__main__":
    main()
