"""Checkpoints of ZeRO on another number of ranks than wrote them, by way of DeepSpeed's universal checkpoints.

ZeRO deals the states of the optimizer to all ranks. A universal checkpoint has them whole, a folder for each parameter;
it is made of the checkpoint beside it, loaded, and removed.
"""

from __future__ import annotations

import argparse
import copy
import shutil
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal

from files import LOADING_ERRORS, why
from report import on_rank_0


def require_movable(config: dict[str, Any], written_by: int, ranks: int, source: str) -> None:
    """Raises ValueError where a checkpoint cannot be continued on another number of ranks.

    Args:
        config: the DeepSpeed JSON of both.
        written_by: the number of ranks that wrote it.
    """
    stage = config.get("zero_optimization", {}).get("stage", 0)
    optimizer = config["optimizer"]
    kind, amsgrad = optimizer["type"], optimizer["params"].get("amsgrad", False)
    if written_by != ranks and stage and (kind.lower() not in ("adam", "adamw") or amsgrad):
        raise ValueError(
            f"{source}: the checkpoint is of {written_by} ranks, and there are {ranks}. With ZeRO stage {stage} "
            f"DeepSpeed moves the states of Adam and AdamW to another number of ranks, not those of {kind}"
            f"{' with amsgrad' if amsgrad else ''}; continue on {written_by} ranks, or start a new run without "
            "--resume."
        )


def load(engine: Any, path: Path) -> str | None:
    """Loads a checkpoint that another number of ranks wrote into an engine with ZeRO; None where DeepSpeed finds none.

    Raises:
        ValueError: DeepSpeed makes no universal checkpoint of it.
    """
    made = path.with_name(f".{path.name}.universal")
    on_rank_0(lambda: _convert(path, made))
    decays = [group["weight_decay"] for group in engine.optimizer.param_groups]
    engine._config.load_universal_checkpoint = True
    try:
        loaded, _ = engine.load_checkpoint(str(path.parent), tag=made.name)
    finally:
        engine._config.load_universal_checkpoint = False
    # ZeRO 3 gives all groups of parameters what the first one had, and all states the same tensor as their number of
    # steps, which each of them would raise (seen in DeepSpeed 0.19.8).
    for group, decay in zip(engine.optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay
    for state in engine.optimizer.state.values():
        if "step" in state:
            state["step"] = copy.deepcopy(state["step"])
    dist.barrier()  # some ranks still read it
    on_rank_0(lambda: shutil.rmtree(made))
    return loaded


def remove_left_over(folder: Path) -> None:
    """Removes what a kill left of a universal checkpoint."""
    for made in folder.glob(".*.universal"):
        shutil.rmtree(made)


def _convert(path: Path, made: Path) -> None:
    remove_left_over(made.parent)
    options = argparse.Namespace(
        input_folder=str(path), output_folder=str(made), keep_temp_folder=False, strict=True, inject_missing_state=True,
        num_extract_workers=1, num_merge_workers=1,  # in this process, which reads plain data only
    )  # fmt: skip
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            ds_to_universal.main(options)
    except OSError:
        raise
    except LOADING_ERRORS as error:
        raise ValueError(f"DeepSpeed makes no universal checkpoint of it ({why(error)})") from error
    (made.parent / "latest_universal").unlink()
