"""Shows a run: its numbered folder, a progress bar or plain lines, metrics.jsonl, TensorBoard where installed, memory.

Weights & Biases, Comet and CSV files are DeepSpeed's, by the keys of its JSON; they get the same figures."""

from __future__ import annotations

import gc
import json
import math
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import harmonic_mean, median
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from ds_sparse.plan.utilisation import MFU, TFLOPS, TOKENS, in_words
from ds_sparse.tools.ranks import from_rank_0, rank

T = TypeVar("T")


def say(text: str) -> None:
    """Prints on rank 0 only, above the progress bar if there is one."""
    if rank() == 0:
        tqdm.write(text)
        sys.stdout.flush()


def on_rank_0(do: Callable[[], T]) -> T:
    """Returns on every rank what `do` returns on rank 0; an error of it ends them all."""
    value = failure = None
    if rank() == 0:
        try:
            value = do()
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer
            failure = error
    value, failure = from_rank_0((value, failure))
    if failure is not None:
        raise failure
    return value


def write_atomically(path: Path, text: str) -> None:
    """Replaces a small file in one move."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def reason(error: BaseException) -> str:
    """Says in one line why something failed."""
    if asked := re.search(r"GLOBAL (\S+)", str(error)):  # PyTorch's refusal of a pickle
        return f"it asks for {asked[1]}, which is no plain data"
    words = str(getattr(error, "strerror", None) or error).strip()
    return words.splitlines()[0].rstrip(".") if words else type(error).__name__


def run_folder(output_dir: Path, resume: bool = False, or_start: bool = False, makes: bool = True) -> Path:
    """The newest run of `output_dir` to resume, or the next numbered folder, the same on every rank.

    Runs that start together each get a folder of their own. With `or_start`, a run that is not there is started.
    Raises ValueError where there is nothing to resume, or the folder cannot be made.
    """

    def chosen() -> Path:
        numbers = [int(path.name) for path in output_dir.glob("[0-9]*") if path.name.isdigit()]
        if resume and numbers:
            return output_dir / f"{max(numbers):04d}"
        if resume and not or_start:
            raise ValueError(
                f"There is no run in {output_dir} to resume; start one without --resume, or with --resume-or-start."
            )
        folder = output_dir / f"{max(numbers, default=0) + 1:04d}"
        try:
            if makes:
                folder.mkdir(parents=True)
        except FileExistsError:
            return chosen()
        except OSError as error:
            words = f"--output-dir {output_dir} cannot be used: {reason(error)}; give another folder."
            raise ValueError(words) from error
        return folder

    return on_rank_0(chosen)


class Metrics:
    """metrics.jsonl, one record a line, TensorBoard, and what the DeepSpeed JSON asks for; written on rank 0 only.

    Args:
        resumed_step: records after it are dropped, a half-written one too; None drops all.
        engine: the DeepSpeed engine, whose monitor gets the figures as "run/figure"; None: there is none.
    """

    def __init__(self, path: Path, resumed_step: int | None, engine: Any = None):
        self.path, self.records = path, []
        self._engine = engine if engine is not None and engine.monitor.enabled else None
        self._tensorboard = None
        last_step = -1 if resumed_step is None else resumed_step
        if rank() == 0:
            self.records = read_metrics(path, last_step)
            write_atomically(path, "".join(json.dumps(record) + "\n" for record in self.records))
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                return
            # Hides what an earlier process wrote of steps that are trained again.
            self._tensorboard = SummaryWriter(str(path.parent / "tensorboard"), purge_step=last_step + 1)

    def add(self, step: int, **figures: Any) -> None:
        if rank() != 0:
            return
        record = {"step": step, **figures}
        self.records.append(record)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if self._tensorboard is not None:
            for name, value in figures.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._engine is not None:
            # By sequences, as the engine's own events are: Weights & Biases drops what lies before the last it got.
            sequences, run = step * self._engine.train_batch_size(), self.path.parent.name
            self._engine.monitor.write_events([(f"{run}/{name}", value, sequences) for name, value in figures.items()])

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()


def read_metrics(path: Path, last_step: int) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl up to a step, without a last line that a kill has cut off."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [record for record in map(json.loads, lines) if record["step"] <= last_step]


class Progress:
    """Share of the run that is done, by steps or by minutes, whichever ends it first.

    A bar where standard error is a terminal. A plain line every `print_steps` steps where there is no bar, and where
    standard output goes into a file.
    """

    def __init__(self, label: str, first_step: int, max_steps: int | None, seconds: float, print_steps: int):
        self.label, self.max_steps, self.seconds, self.print_steps = label, max_steps, seconds, print_steps
        self.first_step, self.started = first_step, time.monotonic()
        self.bar = None
        if sys.stderr.isatty() and rank() == 0:
            self.bar = tqdm(total=1.0, desc=label, bar_format="{desc} {percentage:3.0f}%|{bar}| {postfix}", leave=True)
        self.prints_lines = self.bar is None or not sys.stdout.isatty()

    def show(self, step: int, loss: float, figures: Mapping[str, float], memory_gib: float) -> None:
        """Shows a step that was trained, so `step` is after `first_step`; `figures` are its `StepWork.figures`."""
        elapsed = time.monotonic() - self.started
        left = self.seconds - elapsed
        done = elapsed / self.seconds if left > 0 else 1.0
        if self.max_steps is not None:
            by_steps = (step - self.first_step) / (self.max_steps - self.first_step)
            done, left = max(done, by_steps), min(left, elapsed * (1 / by_steps - 1))
        end = f"{max(0, int(left)) // 60}:{max(0, int(left)) % 60:02d} left" if math.isfinite(left) else "no limit"
        text = f"step {step}  loss {loss:.4f}  {in_words(figures)}  {memory_gib:.2f} GiB  {end}"
        if self.bar is not None:
            self.bar.n = done
            self.bar.set_postfix_str(text)
        if self.prints_lines and step % self.print_steps == 0:
            say(f"{self.label}: {text}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def median_figures(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The figures of `StepWork.figures` in the median step; empty where no step was recorded with them."""
    steps = [record for record in records if TFLOPS in record]
    names = [name for name in (TOKENS, TFLOPS, MFU) if steps and name in steps[-1]]
    return {name: median(record[name] for record in steps) for name in names}


def tokens_per_second(records: Sequence[Mapping[str, float]]) -> float:
    """Speed of all steps together, which have the same tokens: less than in the median step on a busy machine."""
    return harmonic_mean(record[TOKENS] for record in records if TFLOPS in record)


def speed_in_words(records: Sequence[Mapping[str, float]]) -> str:
    """The figures of the median step, and the speed of all; empty where no step was recorded with them."""
    figures = median_figures(records)
    if not figures:
        return ""
    return f"{in_words(figures)} in the median step, {tokens_per_second(records):,.0f} tokens/s in all steps together"


def end_in_words(max_steps: int | None, max_minutes: float) -> str:
    """When a run ends by its options, as "after step 50 or 5 minutes"."""
    ends = [f"step {max_steps}"] if max_steps else []
    ends += [f"{max_minutes:g} minute{'' if max_minutes == 1 else 's'}"] if math.isfinite(max_minutes) else []
    return f"after {' or '.join(ends)}" if ends else "when it is stopped"


def how_long(max_steps: int | None, max_minutes: float) -> str:
    """The sentence about its end with which a run begins, without a full stop."""
    end = end_in_words(max_steps, max_minutes)
    return f"The run ends {end} at most; a smaller --max-minutes or --max-steps ends it earlier"


def forget_peak_memory() -> None:
    """Frees what an earlier run in this process left on the GPU, and measures its peak from here on."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_memory_gib() -> float:
    """Peak memory of this process: the GPU's where one is used, else resident memory."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
