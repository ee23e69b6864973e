"""How the raw operators run under `torch.vmap`: the vmapped dimension becomes part of the batch, for one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix, ops
from ..dispatch import readable
from .window import band_implementation

BIASES = frozenset({"rpe", "key_bias", "attn_mask", "key_padding_mask"})
"""Operands with a batch in dimension 0, or 1 for all of it."""

OPERANDS = frozenset(
    {
        *("query", "key", "value", "output", "rows", "grad_output", "grad_lse", "a", "b", "x", "values", "dense"),
        *("scores", "grad", "probs", "band"),
    }
)
"""Operands with a batch in dimension 0; of values of token pairs it is in there with the heads, before them."""

AS_KERNELS_READ = frozenset({"query", "key", "value", "output", "grad_output"})
"""Operands that `readable` makes readable; other head sizes than multiples of 8 come where kernels read any."""

CONTIGUOUS = frozenset({"key_bias", "rows", "grad_lse", "values", "scores", "grad", "probs", "band"})


def register_rule(operator: str, names: list[str], one_by_one: bool) -> None:
    """Registers the rule of an operator with arguments of these names; one_by_one: a call for each sample."""
    call = getattr(ops, operator)
    first = next(name for name in names if name in OPERANDS and not name.startswith("grad"))

    def rule(info, in_dims, *args):
        # Last arguments at their defaults are left out.
        given = dict(zip(names, args))
        # Lists of numbers have a list.
        dims = {name: dim if isinstance(dim, int) else None for name, dim in zip(names, in_dims)}
        number = info.batch_size
        if one_by_one or dims.get("sinks") is not None:  # these have no batch, and each sample may have its own
            _refuse_seeds(dims)
            return _one_by_one(call, given, dims, number)
        rpe, seed = given.get("rpe"), dims.get("dropout_seed")
        by_distance = rpe is not None and rpe.dim() - (dims["rpe"] is not None) == 2
        if by_distance:
            _refuse_seeds(dims)
            if dims["rpe"] is not None:
                return _one_by_one(call, given, dims, number)
        if seed is not None:
            # Kernels draw others for each matrix of the batch; it is one call, with one seed.
            given["dropout_seed"], dims["dropout_seed"] = given["dropout_seed"].select(seed, 0), None
        elif given.get("dropout_p", 0) > 0:
            # vmap's randomness="same", or the gradients of one forward: the same ones for each.
            return _one_by_one(call, given, dims, number)
        # Packed documents are one row, and what each sequence has is of so many.
        if given.get("list_batch", 1) > 1 or "spans" in given or given.get("by_sequence") or _are_of_sequences(given):
            return _one_by_one(call, given, dims, number)
        of_samples = dims[first]
        batch = given[first].shape[0 if of_samples is None else _after(of_samples)]
        for name, x in given.items():
            if by_distance and name == "rpe":
                continue
            if x is not None and (name in OPERANDS or (name in BIASES and (dims[name] is not None or x.shape[0] > 1))):
                x = _folded(x, dims[name], number, batch if name in BIASES else -1)
                x = readable(x) if name in AS_KERNELS_READ and x.dim() >= 4 and x.shape[-1] % 8 == 0 else x
                given[name] = x.contiguous() if name in CONTIGUOUS else x
            elif dims[name] is not None:
                raise RuntimeError(f"{operator} takes one {name} for all samples of torch.vmap; close over it.")
        shape = given.get("shape")
        if shape is not None:
            given["shape"] = (number * batch, *shape[1:])
        if operator == "window_matmul":
            # How much there is to do depends on the number of samples.
            given["implementation"] = band_implementation(given["a"], given["b"], given["window"])
        results: Any = _unfolded(call(*given.values()), number)
        if shape is not None and shape[0] == 1:
            results = results.sum(1, keepdim=True)
        return results, 0 if isinstance(results, Tensor) else (0,) * len(results)

    torch.library.register_vmap(add_op_namespace_prefix(operator), rule)


def _are_of_sequences(given: dict) -> bool:
    """Tells if each sequence has blocks, or a position, of its own."""
    if "bits_heads" not in given:
        return False
    offsets = given["offsets"]
    return len(given["bits"]) > given["bits_heads"] or (offsets is not None and len(offsets) > 1)


def _refuse_seeds(dims: dict) -> None:
    if dims.get("dropout_seed") is not None:
        raise RuntimeError(
            "distance_bias with dropout draws the same numbers for each sample of torch.vmap alone; give vmap "
            'randomness="same", or a batch in place of samples.'
        )


def _after(dim: int) -> int:
    """Dimension 0 of a sample."""
    return 1 if dim == 0 else 0


def _folded(x: Tensor, dim: int | None, number: int, batch: int) -> Tensor:
    """x, of which each sample or all have one, with the samples in dimension 0; `batch`: what a 1 there stands for."""
    x = x.expand(number, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.expand(-1, batch, *x.shape[2:]).flatten(0, 1)


def _unfolded(results: Tensor | tuple[Tensor, ...], number: int) -> Tensor | tuple[Tensor, ...]:
    if isinstance(results, Tensor):
        return results.unflatten(0, (number, -1))
    return tuple(x.unflatten(0, (number, -1)) for x in results)


def _one_by_one(call: Callable, given: dict, dims: dict, number: int):
    """A call for each sample."""

    def sample(i: int) -> list:
        return [x if dims[name] is None else x.select(dims[name], i) for name, x in given.items()]

    results = [call(*sample(i)) for i in range(number)]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])
