"""Times what sealing and verification cost: checksums while a checkpoint is saved and loaded, beside all else.

    python tests/examples/time_checkpoints.py --mib 512 --stage 1

The model is a linear layer in DeepSpeed's engine, of one rank, on the CPU. Of several saves and loads the quickest
counts. Loading reads files that the machine has just written, from its memory.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from saving_ranks import TERMS, checkpoints, deepspeed, init_distributed

import damage

BYTES = 16
"""Of a checkpoint for each parameter: its weight, master weight and two moments, in fp32."""


class Clock:
    """Seconds spent in functions, by the names that are given for them."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    def time(self, name: str, owner: Any, function: str) -> None:
        """From here on what `owner` calls by this name is timed."""
        setattr(owner, function, self.timed(name, getattr(owner, function)))

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            return result

        return timed


def engine_of(mib: int, stage: int) -> Any:
    width = int((mib * 2**20 / BYTES) ** 0.5)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(width, width, bias=False), config=config)
    engine.backward(engine(torch.randn(1, width)).square().mean())
    engine.step()
    return engine


def quickest(number: int, once: Callable[[], dict[str, float]]) -> dict[str, float]:
    return min((once() for _ in range(number)), key=lambda seconds: seconds["all"])


def show(what: str, seconds: dict[str, float], gib: float) -> None:
    for name, spent in seconds.items():
        share = spent / seconds["all"]
        print(f"{what:5} {name:20} {spent:7.3f} s {spent / gib:7.3f} s/GiB {share:6.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of the checkpoint (default: 512)")
    parser.add_argument("--stage", type=int, choices=range(4), default=1, help="ZeRO stage (default: 1)")
    parser.add_argument("--times", type=int, default=5, help="saves and loads (default: 5)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, clock = Path(temporary) / "checkpoints", Clock()
        folder.mkdir()
        init_distributed(
            dist_backend="gloo", init_method=f"file://{temporary}/store", rank=0, world_size=1, verbose=False
        )
        engine = engine_of(args.mib, args.stage)
        clock.time("writing", type(engine.checkpoint_engine), "save")
        clock.time("checksums", checkpoints, "checksum")
        clock.time("waiting for the disk", checkpoints, "flush")
        clock.time("checksums", damage, "checksum")
        steps = iter(range(args.times))

        def timed(do: Callable[[], Any]) -> dict[str, float]:
            clock.seconds = {}
            clock.timed("all", do)()
            return clock.seconds

        def save() -> dict[str, float]:
            step = next(steps)
            return timed(lambda: checkpoints.save(engine, folder, step, TERMS, {"step": step}))

        def load() -> dict[str, float]:
            return timed(lambda: checkpoints.load(engine, checkpoints.find(folder, TERMS)))

        saved = quickest(args.times, save)
        gib = sum(path.stat().st_size for path in folder.glob(f"step{args.times - 1}/*")) / 2**30
        print(f"ZeRO {args.stage}, {gib:.2f} GiB, {torch.get_num_threads()} threads of PyTorch")
        show("save", saved, gib)
        show("load", quickest(args.times, load), gib)


if __name__ == "__main__":
    main()
