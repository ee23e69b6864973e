"""Writes the table of docs/checkpoints.md, what `--resume` says of damaged files, between the comments
`<!-- damages -->` and `<!-- end -->`: .venv/bin/python website/damage_table.py

Each sentence is what the pretraining example prints of a checkpoint that is damaged here.
"""

import errno
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "checkpoints.md"
sys.path[:0] = [str(ROOT / "examples" / "bing_bert")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import checkpoints  # noqa: E402
from damage import read_state, sealed  # noqa: E402
from report import read_metrics  # noqa: E402

MODEL, OPTIMIZER = "step200/mp_rank_00_model_states.pt", "step200/zero_pp_rank_0_mp_rank_00_optim_states.pt"
STATE, LATEST = "step200/state.json", "latest"
TERMS: dict[str, Any] = {"seed": 42}


class Engine:
    """Writes a checkpoint as DeepSpeed does, without its model."""

    def __init__(self):
        self.checkpoint_engine = SimpleNamespace(save=torch.save)

    def save_checkpoint(self, folder: str, tag: str, save_latest: bool) -> None:
        for name, state in ((MODEL, {"module": torch.zeros(64)}), (OPTIMIZER, {"exp_avg": torch.zeros(64)})):
            self.checkpoint_engine.save(state, f"{folder}/{tag}/{Path(name).name}")


class Code:
    """A pickle that runs a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def hold(text: str) -> Callable[[Path], object]:
    return lambda file: file.write_text(text)


def run_code(file: Path) -> None:
    """As someone does who knows of the checksums."""
    torch.save(Code(), file)
    state, _ = read_state(file.with_name("state.json"))
    del state["seal"]
    state["files"][file.name] = {"bytes": file.stat().st_size, "checksum": checkpoints.checksum(file)}
    file.with_name("state.json").write_text(sealed(state))


DAMAGES: list[tuple[str, str, Callable[[Path], object]]] = [
    ("weights or states of the optimizer are gone", MODEL, Path.unlink),
    ("they are emptied", MODEL, empty),
    ("they are cut", OPTIMIZER, cut),
    ("one bit of them is flipped", MODEL, flip),
    ("they are a pickle that runs code, with the right checksum", OPTIMIZER, run_code),
    ("`state.json` is gone", STATE, Path.unlink),
    ("it is emptied", STATE, empty),
    ("it is cut", STATE, hold('{"terms": ')),
    ("it holds `{}`", STATE, hold("{}")),
    ("one bit of it is flipped", STATE, flip),
    ("`latest` is gone", LATEST, Path.unlink),
    ("it is emptied", LATEST, empty),
    ("it holds something else", LATEST, hold("../../elsewhere")),
    ("it names what is not there", LATEST, hold("step300")),
    ("the checkpoint's folder is gone", "step200", shutil.rmtree),
]


def sentences(place: Path) -> list[tuple[str, str]]:
    """What happened, and all that is printed of it."""
    found = []
    for what, name, damage in DAMAGES:
        folder = written(place)
        damage(folder / name)
        found.append((what, printed(partial(checkpoints.find, folder, TERMS), folder)))
    folder = written(place)
    for step in (100, 200):
        (folder / f"step{step}" / "state.json").unlink()
    found.append(("no checkpoint is whole", printed(partial(checkpoints.find, folder, TERMS), folder)))
    folder = written(place)
    found.append(("other options are given", printed(partial(checkpoints.find, folder, {"seed": 43}), folder)))
    metrics = place / "metrics.jsonl"
    metrics.write_text('{"step": 1, "mlm_loss": 9.1}\ngarbage\n{"step": 3, "mlm_loss": 9.0}\n')
    found.append(("a line of `metrics.jsonl` is damaged", printed(partial(read_metrics, metrics, 4), place)))
    found.append(("the disk is full, while a run saves", printed(partial(save_without_room, folder), folder)))
    return found


def written(place: Path) -> Path:
    """Checkpoints of steps 100 and 200."""
    folder = place / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for step in (100, 200):
        checkpoints.save(Engine(), folder, step, TERMS, {"step": step})
    return folder


def save_without_room(folder: Path) -> None:
    engine = Engine()

    def save(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    engine.checkpoint_engine.save = save
    checkpoints.save(engine, folder, 300, TERMS, {"step": 300})


def printed(do: Callable[[], object], folder: Path) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        try:
            do()
        except ValueError as error:
            print(error)
    text = re.sub(r"[\d,]+ bytes of the [\d,]+", "6,658 bytes of the 13,317", out.getvalue())  # as PyTorch has it
    text = re.sub(r"[\d.]+ GiB", "0.00 GiB", text)
    return " ".join(text.replace(f"{folder}/", "").replace(str(folder), "checkpoints").split())


def table() -> str:
    with tempfile.TemporaryDirectory() as place:
        rows = [f"| {what} | {said} |" for what, said in sentences(Path(place))]
    return "\n".join(["| what happened | what is said |", "|---|---|", *rows])


def with_table(page: str) -> str:
    """The page with its table made anew; in a process group of one rank."""
    return re.sub(
        r"(<!-- damages -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}\n{table()}\n\n{found[2]}",
        page,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    PAGE.write_text(with_table(PAGE.read_text()))
    dist.destroy_process_group()
