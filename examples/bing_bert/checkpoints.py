"""Checkpoints of a run, which continues them exactly, on any number of ranks; and weights of an earlier run.

A checkpoint is a folder of DeepSpeed's, such as `step40`, with a `state.json` beside it that says where the run is and
with what it was started. `latest` names the one in force, and is moved once all else is written: a kill leaves the one
before it. Where `latest` is lost, the newest that is whole is in force. Files are read as tensors and plain values
alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from report import on_rank_0, reason, write_atomically

KEPT = 2
STATE = "state.json"
POSITIONS = "bert.embeddings.position_embeddings.weight"

LOADING_ERRORS = (
    AssertionError, AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError,
    pickle.UnpicklingError,
)  # fmt: skip
"""Errors by which DeepSpeed stops at a file that is not as it wrote it."""


class Checkpoint(NamedTuple):
    path: Path
    """Its folder, in that of all checkpoints of the run."""
    state: dict[str, Any]
    """The `terms` and the `position` that were given to `save`, and the number of `ranks` that wrote it."""


def save(engine: Any, folder: Path, step: int, terms: dict[str, Any], position: dict[str, Any]) -> None:
    """Writes a checkpoint of `step` under `folder` on all ranks, and then makes it the latest one.

    Two are kept. Where the one in force is of this step, its position alone is replaced.

    Args:
        engine: the DeepSpeed engine.
        terms: what has to be equal for the run to continue; plain JSON values, the same on every rank.
        position: where the run is; plain JSON values.

    Raises:
        ValueError: a file cannot be written; the checkpoint before it stays in force.
    """
    path = folder / f"step{step}"
    try:
        current = on_rank_0(lambda: _begin(folder))
        if current is not None and _order(current)[0] == step:
            on_rank_0(lambda: _write_state(current, json.loads((current / STATE).read_text()) | {"position": position}))
            return
        engine.save_checkpoint(str(folder), tag=path.name, save_latest=False)
        dist.barrier()
        on_rank_0(lambda: _put_in_force(path, {"terms": terms, "position": position, "ranks": dist.get_world_size()}))
    except (OSError, RuntimeError) as error:  # the second: torch.save on a full disk
        raise ValueError(
            f"The checkpoint {path} cannot be written: {reason(error)}; the one before it stays in force. Make room, "
            "then continue with --resume."
        ) from error


def _begin(folder: Path) -> Path | None:
    """The checkpoint in force, after removing what a kill left of newer ones."""
    current = _latest(folder)
    left = [path for path in kept(folder) if current is None or _order(path) > _order(current)]
    for path in [*left, *folder.glob(".*.universal")]:
        shutil.rmtree(path)
    return current


def _write_state(path: Path, state: dict[str, Any]) -> None:
    write_atomically(path / STATE, json.dumps(state))


def _put_in_force(path: Path, state: dict[str, Any]) -> None:
    _write_state(path, state)
    write_atomically(path.with_name("latest"), path.name)
    for old in kept(path.parent)[:-KEPT]:
        shutil.rmtree(old)


def _latest(folder: Path) -> Path | None:
    file = folder / "latest"
    if file.exists():
        return folder / file.read_text().strip()
    whole = [path for path in kept(folder) if (path / STATE).exists()]
    return whole[-1] if whole else None


def kept(folder: Path) -> list[Path]:
    """All checkpoints, the newest last."""
    return sorted((path for path in folder.glob("step*/") if re.fullmatch(r"step[\d.]+", path.name)), key=_order)


def _order(path: Path) -> tuple[int, ...]:
    """The step of a checkpoint; in version 0.1.0 also how many of that step were there before, as in `step40.1`."""
    return tuple(int(number) for number in path.name.removeprefix("step").split("."))


def find(folder: Path, terms: dict[str, Any]) -> Checkpoint | None:
    """The checkpoint in force, the same on every rank; None where there is none yet.

    Args:
        terms: those of this run; a run only continues under the terms it was started with.

    Raises:
        ValueError: the checkpoint was made under other terms, or its state cannot be read.
    """
    found = on_rank_0(lambda: _read(folder))
    old = found.state["terms"] if found else terms
    differing = [f"{name} was {old.get(name)!r} and is {new!r}" for name, new in terms.items() if old.get(name) != new]
    if differing:
        raise ValueError(
            f"The checkpoint {found.path} cannot be continued exactly: {'; '.join(differing)}. Give the old values, or "
            "start a new run without --resume."
        )
    return found


def _read(folder: Path) -> Checkpoint | None:
    path = _latest(folder)
    if path is None:
        return None
    try:
        return Checkpoint(path, json.loads((path / STATE).read_text()))
    except (OSError, ValueError) as error:
        raise ValueError(_unreadable(path, reason(error))) from error


def _unreadable(path: Path, words: str) -> str:
    return (
        f"The checkpoint {path} cannot be loaded: {words}. Write the name of an older one beside it into "
        f"{path.with_name('latest')}, or start a new run without --resume."
    )


def load(engine: Any, checkpoint: Checkpoint) -> None:
    """Loads what `find` found: weights, layouts, optimizer and schedule.

    Raises:
        ValueError: DeepSpeed cannot load it.
    """
    path = checkpoint.path
    try:
        with plain_data_only():
            if checkpoint.state["ranks"] != dist.get_world_size() and engine.zero_optimization():
                loaded = _load_of_other_ranks(engine, path)
            else:
                loaded, _ = engine.load_checkpoint(str(path.parent), tag=path.name)
        if loaded is None:
            raise ValueError("DeepSpeed finds no files of its own there")
    except LOADING_ERRORS as error:
        raise ValueError(_unreadable(path, reason(error))) from error


@contextmanager
def plain_data_only() -> Iterator[None]:
    """Lets torch.load make tensors, plain values and what DeepSpeed keeps, and nothing else that a pickle asks for.

    PyTorch's variable holds for DeepSpeed's calls of torch.load too, which ask for whole pickles.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    of_deepspeed = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    with mock.patch.dict(os.environ), torch.serialization.safe_globals(of_deepspeed):
        os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
        os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
        yield


def require_movable(config: dict[str, Any], written_by: int, ranks: int, source: str) -> None:
    """Raises ValueError where a checkpoint of `written_by` ranks cannot be continued on `ranks`, by the DeepSpeed JSON
    of both."""
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


def _load_of_other_ranks(engine: Any, path: Path) -> str | None:
    """Loads a checkpoint that another number of ranks wrote into an engine with ZeRO; None where DeepSpeed finds none.

    ZeRO deals the states of the optimizer to all ranks. A universal checkpoint has them whole, a folder for each
    parameter; it is made of the checkpoint beside it, loaded, and removed.
    """
    made = path.with_name(f".{path.name}.universal")
    on_rank_0(lambda: _make_universal(path, made))
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


def _make_universal(path: Path, made: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    shutil.rmtree(made, ignore_errors=True)  # what a kill left
    options = argparse.Namespace(
        input_folder=str(path), output_folder=str(made), keep_temp_folder=False, strict=True, inject_missing_state=True,
        num_extract_workers=1, num_merge_workers=1,  # in this process, which reads plain data only
    )  # fmt: skip
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        ds_to_universal.main(options)
    (made.parent / "latest_universal").unlink()


def of_weights(run: Path, same: dict[str, Any]) -> Checkpoint:
    """The last checkpoint of a run's folder, such as runs/bing_bert/0001/dense.

    Args:
        same: terms that have to be equal in both runs: the sizes of the model, and the data.

    Raises:
        ValueError: there is no checkpoint, or one of other terms.
    """
    checkpoint = find(run / "checkpoints", same)
    if checkpoint is None:
        raise ValueError(f"--weights-from {run}: has no checkpoint; name a run's folder, such as 0001/dense.")
    return checkpoint


def take_weights(model: torch.nn.Module, run: Path, same: dict[str, Any]) -> None:
    """Gives a model the weights of `of_weights`.

    The sequences of that run may be shorter: position p gets the weights of position p mod n of the n that they had.

    Raises:
        ValueError: as of `of_weights`, or its file cannot be loaded.
    """
    checkpoint = of_weights(run, same)
    file = checkpoint.path / "mp_rank_00_model_states.pt"  # DeepSpeed's name, unless ZeRO 3 deals weights to ranks
    try:
        with plain_data_only():
            found = torch.load(file, map_location="cpu", weights_only=True)["module"]
    except LOADING_ERRORS as error:
        raise ValueError(f"--weights-from {run}: {file} cannot be loaded: {reason(error)}.") from error
    for name, parameter in model.named_parameters():
        weight = found[name]
        if name == POSITIONS:
            weight = weight[torch.arange(len(parameter)) % checkpoint.state["terms"]["max_seq_length"]]
        parameter.data.copy_(weight)
