"""Chooses the implementation of an operation that runs: everything that depends on it asks here."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from ..tools.wording import listed
from .implementations import ALL_DTYPES, IMPLEMENTATIONS, LIMITS, Call, Implementation


def choose(operation: str, call: Call, forced: str | None = None) -> Implementation:
    """The implementation of an operation that runs a call: the first that takes it.

    Args:
        operation: one of `IMPLEMENTATIONS`.
        forced: for backward, what `forced_implementation` said when forward ran; None: what it says now.

    Raises:
        ValueError: none takes it; or not the one that is forced. Says why.
    """
    if forced is None:
        forced = _Forced.name
    shortlist = _shortlist if torch.compiler.is_compiling() else _known_shortlist
    for implementation in shortlist(operation, call.device, call.dtype, call.block, forced):
        if implementation.takes(call, forced != ""):
            return implementation
    candidates = _candidates(operation, forced)
    asked = (
        f"{candidates[0].name!r}, which force_implementation names," if len(candidates) == 1 else "No implementation"
    )
    verb = "does not take" if len(candidates) == 1 else "takes"
    why = " ".join(f"{i.name}: {' '.join(i.obstacles(call, forced != ''))}" for i in candidates)
    raise ValueError(f"{asked} {verb} this call of {operation}. {why}")


def _shortlist(
    operation: str, device: torch.device, dtype: torch.dtype, block: int, forced: str
) -> tuple[Implementation, ...]:
    """The implementations that are for calls such as these."""
    call = Call(device, dtype, 1, block)
    return tuple(i for i in _candidates(operation, forced) if i.is_for(call))


# The same for most calls of a program; torch.compile warns of a cache.
_known_shortlist = functools.cache(_shortlist)


def _candidates(operation: str, forced: str) -> tuple[Implementation, ...]:
    """The implementations of an operation; of those that have been forced it alone, where there is such a one."""
    those = IMPLEMENTATIONS[operation]
    return tuple(i for i in those if i.name == forced) or those


def reasons(operation: str, call: Call) -> dict[str, list[str]]:
    """For each implementation, by name, why it is not chosen, in sentences; of the chosen one an empty list."""
    chosen, found = None, {}
    candidates = _candidates(operation, _Forced.name)
    for implementation in IMPLEMENTATIONS[operation]:
        found[implementation.name] = why = implementation.obstacles(call, _Forced.name != "")
        if implementation not in candidates:
            why.append(f"force_implementation names {_Forced.name!r}.")
        elif not why and chosen is None:
            chosen = implementation.name
        elif not why:
            why.append(f"{chosen} comes before it.")
    return found


@contextmanager
def force_implementation(name: str) -> Iterator[None]:
    """Has operations run by the implementation of a name, in the whole process, for tests and reports of faults.

    The gradients of what was called inside are computed by it as well, wherever backward is called, and of what was
    called outside never. What computes forward again, as checkpointing does, and graphs of torch.compile that hold a
    master layout choose when they run. Blocks of several threads must not overlap.

    Args:
        name: 'hopper', 'portable' or 'cpu'. Operations that have none of that name, such as softmax, run as always.

    Yields:
        nothing; it stands in a `with` statement, or decorates a function.

    Raises:
        ValueError: another name; in an operation, one that does not take the call, which says why.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> query, key, value = (torch.randn(1, 2, 32, 8) for _ in range(3))
        >>> layout = torch.ones(2, 2, dtype=torch.bool)
        >>> with ds_sparse.force_implementation("cpu"):
        ...     output = ds_sparse.block_sparse_attention(query, key, value, layout)
        >>> with ds_sparse.force_implementation("hopper"):
        ...     output = ds_sparse.block_sparse_attention(query, key, value, layout)
        Traceback (most recent call last):
            ...
        ValueError: 'hopper', which force_implementation names, does not take this call of block_sparse_attention. ...
    """
    names = list(dict.fromkeys(i.name for those in IMPLEMENTATIONS.values() for i in those))
    if name not in names:
        raise ValueError(f"There is no implementation {name!r}; there are {listed(names, 'and')}.")
    before, _Forced.name = _Forced.name, name
    try:
        yield
    finally:
        _Forced.name = before


class _Forced:
    """The name that `force_implementation` has set."""

    name = ""


def forced_implementation() -> str:
    """The name that `force_implementation` has set; "" if it has not."""
    return _Forced.name


def tile_heights(operation: str, device: torch.device, block: int) -> list[int]:
    """Tokens of the tiles that implementations on a device walk, for a block: which of them an index has to have."""
    of_device = [i for i in IMPLEMENTATIONS[operation] if LIMITS[0].holds(i, Call(device, torch.float16, 1))]
    return sorted({i.tiles[block] for i in of_device if i.tiles and block in i.tiles})


def walkers(operation: str, block: int) -> dict[int, list[str]]:
    """By tokens of a tile's height, ascending: the names of the implementations that walk such tiles, on any device,
    for a block."""
    heights = [(i.tiles[block], i.name) for i in IMPLEMENTATIONS[operation] if i.tiles and block in i.tiles]
    return {tile: [name for height, name in heights if height == tile] for tile in sorted(dict(heights))}


def dtypes_on(operation: str, device: torch.device) -> tuple[torch.dtype, ...]:
    """The dtypes that some implementation on a kind of device takes."""
    return _DTYPES[operation, device.type == "cuda"]


def largest_head_dim(operation: str, device: torch.device) -> int | None:
    """The most numbers of a token that some implementation on a kind of device takes; None: any number."""
    return _LARGEST_HEAD_DIMS[operation, device.type == "cuda"]


def _largest(bounds: Iterable[int | None]) -> int | None:
    return max(bounds, key=lambda bound: math.inf if bound is None else bound)


_DTYPES, _LARGEST_HEAD_DIMS = {}, {}
"""By operation, and whether a device is a GPU."""
for _operation, _those in IMPLEMENTATIONS.items():
    for _on_cuda in (False, True):
        _there = [i for i in _those if (i.device == "cuda") == _on_cuda]
        _DTYPES[_operation, _on_cuda] = tuple(x for x in ALL_DTYPES if any(x in i.dtypes for i in _there))
        _LARGEST_HEAD_DIMS[_operation, _on_cuda] = _largest(i.head_dims[1] for i in _there)
