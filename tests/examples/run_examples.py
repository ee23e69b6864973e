"""Runs of an example's program on any number of ranks, one after the other: forks of a process that imports once.

    python tests/examples/run_examples.py PLACE '[[2, "deepspeed_train", ["--deepspeed_config", "ds.json", ...]], ...]'

prints for each run how its ranks ended, 0 or a sentence, and what rank 0 printed, as JSON, a line a run.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import shutil
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1"}
sys.path[:0] = [str(Path(__file__).parents[2] / "examples" / "bing_bert")]

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402, F401 - an engine imports it, which takes seconds
import torch  # noqa: E402
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator  # noqa: E402

from ds_sparse import init_distributed  # noqa: E402

import deepspeed_train  # noqa: E402


def run(place: Path, ranks: int, program: str, arguments: list[str]) -> list[object]:
    if torch.cuda.is_initialized():  # which a fork cannot use
        with redirect_stdout(io.StringIO()) as printed, redirect_stderr(printed):
            return [ended(program, arguments), printed.getvalue()]
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    pids = [fork(place, rank, ranks, program, arguments) for rank in range(ranks)]
    for pid in pids:
        os.waitpid(pid, 0)
    files = [place / f"{rank}.json" for rank in range(ranks)]
    return [*(json.loads(file.read_text()) if file.exists() else "" for file in files), (place / "0.txt").read_text()]


def ended(program: str, arguments: list[str]) -> object:
    """Runs a program here: 0, or the sentence or the status that it ended with."""
    sys.argv = [program, *arguments]
    try:
        return importlib.import_module(program).main()
    except ValueError as error:
        return str(error)
    except SystemExit as error:
        return error.code


def fork(place: Path, rank: int, ranks: int, program: str, arguments: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        out = os.open(place / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        if ranks > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # asked for, and not used beside a store
            store = f"file://{place}/store"
            init_distributed(dist_backend="gloo", init_method=store, rank=rank, world_size=ranks, verbose=False)
        (place / f"{rank}.json").write_text(json.dumps(ended(program, arguments)))
    except BaseException:  # noqa: BLE001 - a fork must not go on as its parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    CPU_Accelerator.is_fp16_supported = lambda self: True  # PyTorch has it on every CPU, if slowly
    # Pictures take longer than the training.
    deepspeed_train.draw_curves = deepspeed_train.write_page = lambda *_: None
    for ranks, program, arguments in json.loads(sys.argv[2]):
        print(json.dumps(run(Path(sys.argv[1]), ranks, program, arguments)), flush=True)
