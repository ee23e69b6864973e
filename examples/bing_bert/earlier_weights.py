"""The weights of an earlier run, with which a run begins whose sequences are longer or whose attention is another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import checkpoints
from files import LOADING_ERRORS, plain_data_only, why

POSITIONS = "bert.embeddings.position_embeddings.weight"


def take_weights(model: nn.Module, run: Path, same: dict[str, Any]) -> None:
    """Gives a model those of the last checkpoint of a run's folder, such as runs/bing_bert/0001/dense, as they are kept
    there: of fp16 and bf16 in these.

    Position p gets the weights of position p mod n of the n that sequences had there.

    Args:
        same: terms that have to be equal in both runs: the sizes of the model, and the data.

    Raises:
        ValueError: there is no whole checkpoint, or one of other terms.
    """
    checkpoint = checkpoints.find(run / "checkpoints", same)
    if checkpoint is None:
        raise ValueError(f"--weights-from {run}: has no checkpoint; name a run's folder, such as 0001/dense.")
    file = checkpoint.path / "mp_rank_00_model_states.pt"  # DeepSpeed's name, unless ZeRO 3 deals weights to ranks
    try:
        with plain_data_only():
            found = torch.load(file, map_location="cpu", weights_only=True)["module"]
    except LOADING_ERRORS as error:
        raise ValueError(f"--weights-from {run}: {file} cannot be loaded: {why(error)}.") from error
    for name, parameter in model.named_parameters():
        weight = found[name]
        if name == POSITIONS:
            weight = weight[torch.arange(len(parameter)) % checkpoint.state["terms"]["max_seq_length"]]
        parameter.data.copy_(weight)
