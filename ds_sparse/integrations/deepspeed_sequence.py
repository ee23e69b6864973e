"""DeepSpeed's key `sequence_parallel_size`: its groups of ranks, and a model that computes sequences over them."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from torch import distributed, nn

from ..config import SparseAttentionConfigError
from ..tools.ranks import say
from ..tools.wording import show
from .flag import FLAG

KEY = "sequence_parallel_size"
DATA_KEY = "data_parallel_size"
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def wrong_size(size: Any) -> str | None:
    """The sentence about a value of the key that is no number of ranks."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 1:
        return None
    return f"{KEY}: got {show(size)}; wanted the number of ranks that hold a sequence, 1 or more."


def sequence_parallel_size(config: Mapping[str, Any], source: str) -> int:
    """How many ranks hold a sequence; 1 where the configuration says nothing.

    Raises:
        SparseAttentionConfigError: it is no integer, or below 1.
    """
    size = config.get(KEY, 1)
    wrong = wrong_size(size)
    if wrong is not None:
        raise SparseAttentionConfigError([f"{source}: {wrong}"])
    return size


def autosp(config: Mapping[str, Any]) -> str | None:
    """The sentence about DeepSpeed's AutoSP, if the configuration asks for it."""
    compiling = config.get("compile")
    passes = compiling.get("passes") if isinstance(compiling, Mapping) else None
    if not isinstance(passes, list | tuple) or "autosp" not in passes:
        return None
    return (
        'compile.passes: got "autosp", DeepSpeed\'s AutoSP, which cuts sequences and exchanges heads around '
        "scaled_dot_product_attention alone, so that sparse layers would see the tokens of their rank; leave it out, "
        f'and set "{KEY}" to the number of ranks that hold a sequence.'
    )


def refuse(size: int, arguments: Mapping[str, Any], is_sparse: bool) -> None:
    """Raises ValueError where a program cannot be sequence parallel, whatever its model is."""
    mpu = arguments.get("mpu")
    held = getattr(mpu, "get_sequence_parallel_world_size", lambda: 1)()
    if is_sparse and size == 1 and held > 1:
        raise ValueError(
            f"An mpu is given whose groups of {held} ranks hold a sequence, as accelerate's ParallelismConfig("
            f"sp_size={held}) makes it: its batches come in parts, and sparse attention would see those of this rank "
            f'alone. Leave sp_size out, and set "{KEY}": {held} in the JSON.'
        )
    if size == 1:
        return
    if mpu is not None and is_sparse:
        why = "an mpu is given, whose ranks ds_sparse does not know; leave it out (accelerate's sp_size makes one)"
    elif mpu is None and not is_sparse:
        why = f"sparse attention is off, without which ds_sparse does not cut sequences. Add --{FLAG}"
    else:
        return
    raise ValueError(f"{KEY} is {size}, and {why}, or leave {KEY} out.")


def parallelize(model: nn.Module, size: int, config: dict[str, Any]) -> dict[str, Any]:
    """Has a sparse model compute its sequences on groups of `size` ranks.

    Args:
        config: DeepSpeed's, which is changed where DeepSpeed would take gradients for means.

    Returns:
        What `deepspeed.initialize` is given besides: its groups.

    Raises:
        ValueError: the number of ranks is no multiple; the model cannot be computed in parts; this process has groups
            of another size; ZeRO 3 with options under which its gradients would be too small.
    """
    from .transformers import sequence_parallel

    ranks = distributed.get_world_size()
    if ranks % size:
        raise ValueError(f"{KEY} is {size} and there are {ranks} ranks; their number has to be a multiple of it.")
    # DeepSpeed would make a mesh of both keys, beside the groups that it is given here.
    data_ranks = config.pop(DATA_KEY, ranks // size)
    if data_ranks != ranks // size:
        raise ValueError(
            f"{DATA_KEY} is {data_ranks}, {KEY} {size}, and there are {ranks} ranks; leave {DATA_KEY} out, or set it "
            f"to {ranks // size}."
        )
    _count_sequences(config, size)
    groups = _groups(size)
    _sum_over_ranks_of_a_sequence(model, config)
    sequence_parallel(model, groups.get_sequence_parallel_group())
    return {"mpu": groups}


def _count_sequences(config: dict[str, Any], size: int) -> None:
    """Takes the ranks of a sequence as one in the batch that accelerate or Transformers' Trainer has filled in for
    "auto", which is that of all ranks."""
    accelerate: Any = sys.modules.get("accelerate.state")
    if accelerate is None or not accelerate.AcceleratorState._shared_state:
        return
    train, *others = (config.get(key) for key in BATCH)
    if train == math.prod(x or 1 for x in others) * distributed.get_world_size():
        config[BATCH[0]] = train // size


def _sum_over_ranks_of_a_sequence(model: nn.Module, config: dict[str, Any]) -> None:
    """Has ZeRO 3 sum gradients over ranks that hold one sequence, as the other stages do. Its reduce-scatter takes
    their mean (seen in DeepSpeed 0.19.8), its all-reduce of contiguous gradients the sum."""
    zero = config.get("zero_optimization") or {}
    if zero.get("stage") != 3:
        return
    largest = max(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
    needed = {"contiguous_gradients": True, "zero_quantized_gradients": False}
    wrong = [f"{key} {str(zero[key]).lower()}" for key, value in needed.items() if zero.get(key, value) != value]
    bucket = zero.get("reduce_bucket_size", largest)
    if isinstance(bucket, int | float) and bucket < largest:
        wrong.append(f"reduce_bucket_size {bucket}, below the {largest} numbers of the largest parameter")
    if wrong:
        raise ValueError(
            f"{KEY} is set, and zero_optimization has stage 3 with {' and '.join(wrong)}, where DeepSpeed would make "
            "gradients too small; leave that out, or use stage 2."
        )
    if zero.get("reduce_scatter", True):
        config["zero_optimization"] = {**zero, "reduce_scatter": False}
        say("ZeRO 3 has reduce_scatter off, with which gradients would be too small where ranks share a sequence.")


class _Groups:
    """DeepSpeed's groups of ranks that hold a sequence, and what its loader of training data asks for besides."""

    def __init__(self, groups: Any):
        self._groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._groups, name)

    def get_data_parallel_world_size(self) -> int:
        return distributed.get_world_size() // self._groups.get_sequence_parallel_world_size()

    def get_data_parallel_rank(self) -> int:
        return distributed.get_rank() // self._groups.get_sequence_parallel_world_size()

    # Each rank has the whole model: DeepSpeed would take the ranks of a sequence for those of a tensor, and write that
    # into checkpoints, which could then not be moved to another number of ranks.
    def get_tensor_model_parallel_world_size(self) -> int:
        return 1

    def get_tensor_model_parallel_rank(self) -> int:
        return 0


def _groups(size: int) -> _Groups:
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as groups

    if groups._SEQUENCE_PARALLEL_GROUP is None:
        groups.initialize_sequence_parallel(size)
    elif groups.get_sequence_parallel_world_size() != size:
        raise ValueError(
            f"{KEY} is {size}, and DeepSpeed has groups of {groups.get_sequence_parallel_world_size()} ranks in this "
            "process already; a process has groups of one size."
        )
    return _Groups(groups)
