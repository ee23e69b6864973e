"""Which implementation of an operation runs. What each one takes is data here, and whatever depends on it asks here.

An operation that has one implementation for each device, such as softmax, is not here: there is nothing to choose. A
new chip is an entry, and its files in csrc/cuda.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .block_sizes import BLOCK_SIZES
from .strides import is_whole, readable_in_boxes
from .wording import listed

TILE = 64
"""Tokens of a tile's height, unless an implementation walks others."""

HOPPER_TILE = 128
"""Tokens of the tiles of the kernels for Hopper GPUs."""

CHIPS = {9: "Hopper"}
"""Kinds of GPUs that have kernels of their own, by the first number of their compute capability."""

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
ON_CUDA = (*SIXTEEN_BITS, torch.float32)
ALL_DTYPES = (*ON_CUDA, torch.float64)


class Call(NamedTuple):
    """What the choice depends on. Of what a limit asks and an operation has not, the default fits.

    Attributes:
        device: of the operands; of the index where they are meta tensors.
        head_dim: numbers of a token in a dense operand.
        block: tokens on a block's side.
        operands: (B, H, tokens, D), which an implementation may read in place.
        value_dim: numbers of a token in value, where they may differ.
        window: tokens on one side.
        lists: a `TokenIndex`.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    block: int = TILE
    operands: tuple[torch.Tensor, ...] = ()
    value_dim: int | None = None
    window: int = 0
    lists: Any = None


class Limit(NamedTuple):
    """Something that an implementation asks of a call."""

    holds: Callable[[Implementation, Call], bool]
    sentence: Callable[[Implementation, Call], str]
    """Says why not, where it does not hold."""


@dataclass(frozen=True, eq=False)
class Implementation:
    """One way in which an operation runs, and what it takes.

    Attributes:
        name: 'cpu', 'portable' (any CUDA GPU since compute capability 8.0) or a chip's.
        about: how it works, in a few words.
        device: 'cpu' or 'cuda'.
        chip: the first number of the compute capability; 0 for any.
        dtypes: of the operands.
        head_dims: the least and the most numbers of a token.
        multiple: what they have to be a multiple of.
        tiles: for each block that it takes, tokens of the tiles that it walks; None: any block, and no tiles.
        more: what else it asks.
    """

    name: str
    about: str
    device: str
    chip: int = 0
    dtypes: tuple[torch.dtype, ...] = ALL_DTYPES
    head_dims: tuple[int, int] = (0, sys.maxsize)
    multiple: int = 1
    tiles: Mapping[int, int] | None = None
    more: tuple[Limit, ...] = ()

    def tile(self, block: int) -> int:
        """Tokens of the tiles that it walks, for a block that it takes."""
        if self.tiles is None:
            raise TypeError(f"The implementation {self.name!r} walks no tiles.")
        return self.tiles[block]

    @property
    def reads_boxes(self) -> bool:
        """Whether it reads operands by the copy engine, as `readable_in_boxes` asks."""
        return _READABLE in self.more

    def takes(self, call: Call) -> bool:
        return all(limit.holds(self, call) for limit in (*LIMITS, *self.more))

    def obstacles(self, call: Call) -> list[str]:
        """Why it does not take the call, a sentence for each reason. Where the device is another, that is all."""
        if not LIMITS[0].holds(self, call):
            return [LIMITS[0].sentence(self, call)]
        return [limit.sentence(self, call) for limit in (*LIMITS, *self.more) if not limit.holds(self, call)]


def choose(operation: str, call: Call, forced: str | None = None) -> Implementation:
    """The implementation of an operation that runs a call: the first that takes it.

    Args:
        operation: one of `IMPLEMENTATIONS`.
        forced: what `force_implementation` had named when forward ran, for the choices of backward.

    Raises:
        ValueError: none takes it; or not the one that is forced. Says why.
    """
    candidates = _candidates(operation, forced or _Forced.name)
    for implementation in candidates:
        if implementation.takes(call):
            return implementation
    asked = (
        f"{candidates[0].name!r}, which force_implementation names," if len(candidates) == 1 else "No implementation"
    )
    verb = "does not take" if len(candidates) == 1 else "takes"
    why = " ".join(f"{i.name}: {' '.join(i.obstacles(call))}" for i in candidates)
    raise ValueError(f"{asked} {verb} this call of {operation}. {why}")


def _candidates(operation: str, forced: str | None) -> list[Implementation]:
    """The implementations of an operation; of those that have been forced it alone, where there is such a one."""
    those = IMPLEMENTATIONS[operation]
    return [i for i in those if i.name == forced] or list(those)


def reasons(operation: str, call: Call) -> dict[str, list[str]]:
    """For each implementation, by name, why it is not chosen, in sentences; of the chosen one an empty list."""
    chosen, found = None, {}
    candidates = _candidates(operation, _Forced.name)
    for implementation in IMPLEMENTATIONS[operation]:
        found[implementation.name] = why = implementation.obstacles(call)
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

    The gradients of what was called inside are computed by it as well, wherever backward is called. Graphs of
    torch.compile that hold a master layout choose when they run.

    Args:
        name: 'hopper', 'portable' or 'cpu'. Operations that have none of that name, such as softmax, run as always.

    Raises:
        ValueError: another name; in an operation, one that does not take the call, which says why.

    Example:
        with ds_sparse.force_implementation("portable"):
            output = ds_sparse.block_sparse_attention(query, key, value, layout)
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
    """What `force_implementation` has set."""

    name: str | None = None


def forced_implementation() -> str | None:
    """The name that `force_implementation` has set, if it has."""
    return _Forced.name


def tile_heights(operation: str, device: torch.device, block: int) -> list[int]:
    """Tokens of the tiles that implementations on a device walk, for a block: which of them an index has to have."""
    of_device = [i for i in IMPLEMENTATIONS[operation] if LIMITS[0].holds(i, Call(device, torch.float16, 1))]
    return sorted({i.tiles[block] for i in of_device if i.tiles and block in i.tiles})


def serves(operation: str, name: str, device: torch.device) -> bool:
    """Whether a device is one that the implementation of a name is for."""
    call = Call(device, torch.float16, 1)
    return any(LIMITS[0].holds(i, call) for i in IMPLEMENTATIONS[operation] if i.name == name)


def dtypes_on(operation: str, device: torch.device) -> tuple[torch.dtype, ...]:
    """The dtypes that some implementation on a kind of device takes."""
    return _DTYPES[operation, kind_of(device)]


def largest_head_dim(operation: str, device: torch.device) -> int:
    """The most numbers of a token that some implementation on a kind of device takes."""
    return _LARGEST_HEAD_DIMS[operation, kind_of(device)]


def kind_of(device: torch.device) -> str:
    """'cuda' or 'cpu', which is also where meta tensors count."""
    return "cuda" if device.type == "cuda" else "cpu"


def chip_of(device: torch.device) -> int:
    """The first number of a GPU's compute capability; 0 for what is no CUDA GPU."""
    if device.type != "cuda":
        return 0
    return _capability(device) if torch.compiler.is_compiling() else _known_capability(device)


def multiprocessors(device: torch.device) -> int:
    return _count(device) if torch.compiler.is_compiling() else _known_count(device)


def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def _count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


# torch.compile warns of a cache.
_known_capability, _known_count = functools.cache(_capability), functools.cache(_count)


def _its_device(i: Implementation, call: Call) -> bool:
    return kind_of(call.device) == i.device and (i.chip == 0 or chip_of(call.device) == i.chip)


def _other_device(i: Implementation, call: Call) -> str:
    wanted = "the CPU" if i.device == "cpu" else "a CUDA GPU"
    if kind_of(call.device) != i.device:
        return f"Tensors are on {call.device}, and it is for {wanted}."
    return f"{call.device} has compute capability {chip_of(call.device)}, and it is for {i.chip} ({CHIPS[i.chip]})."


def _in_range(i: Implementation, call: Call) -> bool:
    least, most = i.head_dims
    of_value = call.head_dim if call.value_dim is None else call.value_dim
    return least <= call.head_dim <= most and of_value <= most and call.head_dim % i.multiple == 0


def _out_of_range(i: Implementation, call: Call) -> str:
    multiples = f", a multiple of {i.multiple}" if i.multiple > 1 else ""
    fits = i.head_dims[0] <= call.head_dim <= i.head_dims[1] and call.head_dim % i.multiple == 0
    given = call.value_dim if fits else call.head_dim
    return f"Head size is {given}, and it takes {i.head_dims[0]} to {i.head_dims[1]}{multiples}."


LIMITS = (
    Limit(_its_device, _other_device),
    Limit(
        lambda i, call: call.dtype in i.dtypes,
        lambda i, call: f"Tensors are {_name(call.dtype)}, and it takes {listed(map(_name, i.dtypes), 'and')}.",
    ),
    Limit(_in_range, _out_of_range),
    Limit(
        lambda i, call: i.tiles is None or call.block in i.tiles,
        lambda i, call: f"block is {call.block}, and it takes {listed(i.tiles or (), 'and')}.",
    ),
)
"""What each implementation has; the device comes first."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_READABLE = Limit(
    lambda i, call: all(readable_in_boxes(x) for x in call.operands),
    lambda i, call: (
        "It reads tokens whose numbers are adjacent, that begin at multiples of 16 bytes and are not expanded, and an "
        "operand's strides are "
        + listed([str(x.stride()) for x in call.operands if not readable_in_boxes(x)], "and")
        + "."
    ),
)
_NOT_EMPTY = Limit(
    lambda i, call: all(x.numel() > 0 for x in call.operands), lambda i, call: "An operand has no numbers."
)
_WHOLE_WINDOWS = Limit(
    # Bounds far away keep the kernel's numbers within 32 bits.
    lambda i, call: 64 <= call.window < 2**29 and call.window % 32 == 0 and call.operands[0].shape[2] < 2**29,
    lambda i, call: f"The window is {call.window}, and it takes multiples of 32 from 64, of fewer than 2**29 tokens.",
)
_NOT_EXPANDED = Limit(
    lambda i, call: all(is_whole(x) for x in call.operands), lambda i, call: "Operands are expanded; copy them."
)
_FILLS_THE_GPU = Limit(
    lambda i, call: multiprocessors(call.device) <= _tiles_of_windows(call) < 2**30,
    lambda i, call: (
        f"There are {_tiles_of_windows(call)} tiles of {HOPPER_TILE} tokens, and it is for "
        f"{multiprocessors(call.device)} and more, one for each multiprocessor."
    ),
)
_SAME_HEAD_SIZES = Limit(
    lambda i, call: call.value_dim == call.head_dim,
    lambda i, call: f"The head sizes of keys and values are {call.head_dim} and {call.value_dim}; it takes equal ones.",
)
_LISTS_FILL_TILES = Limit(
    # The first such question makes the tiles: it comes last.
    lambda i, call: call.lists.tiles is not None,
    lambda i, call: (
        "The lists do not fill tiles: it is for pairs that all sequences share, none of them listed twice, of which "
        "blocks that have any have one in 50."
    ),
)


def _tiles_of_windows(call: Call) -> int:
    batch, heads, tokens, _ = call.operands[0].shape
    return batch * heads * -(-tokens // HOPPER_TILE)


_HOPPER = {"name": "hopper", "device": "cuda", "chip": 9, "dtypes": SIXTEEN_BITS, "head_dims": (1, 128)}
_PORTABLE = {"name": "portable", "device": "cuda"}
_CPU = {"name": "cpu", "device": "cpu", "about": "vector instructions of the CPU, all threads"}
_FOR_PAIRS = (_SAME_HEAD_SIZES, _NOT_EMPTY, _LISTS_FILL_TILES)
_TILES = dict.fromkeys(BLOCK_SIZES, TILE)
_LARGE_TILES = {block: HOPPER_TILE for block in BLOCK_SIZES if block >= 16}
_PRODUCT_TILES = {block: TILE if block < TILE else HOPPER_TILE for block in _LARGE_TILES}
_WARPS = "tensor cores by warps (mma), tiles of 64 tokens"
_WARPGROUPS = "tensor cores by warpgroups (wgmma), fed by the copy engine (TMA), tiles of 128 tokens"

IMPLEMENTATIONS: Mapping[str, tuple[Implementation, ...]] = {
    "block_sparse_attention": (
        Implementation(about=_WARPGROUPS, tiles=_LARGE_TILES, **_HOPPER),
        Implementation(about=_WARPS, dtypes=ON_CUDA, head_dims=(1, 256), tiles=_TILES, **_PORTABLE),
        Implementation(head_dims=(1, 256), tiles=_TILES, **_CPU),
    ),
    "gradient of rpe": (
        Implementation(about=_WARPS, dtypes=ON_CUDA, head_dims=(1, 256), tiles=_TILES, **_PORTABLE),
        Implementation(head_dims=(1, 256), tiles=_TILES, **_CPU),
    ),
    "sparse_attn": (
        Implementation(about=f"{_WARPGROUPS}, a bit for each pair", more=_FOR_PAIRS, **_HOPPER),
        Implementation(about="each query gathers the keys of its list", head_dims=(1, 256), **_PORTABLE),
        Implementation(**_CPU),
    ),
    "sdd": (
        # Tiles of half the height where blocks are small: thread blocks of fewer warps, more of them, were faster than
        # columns that more block rows share.
        Implementation(about=_WARPGROUPS, tiles=_PRODUCT_TILES, more=(_READABLE,), **_HOPPER),
        Implementation(about="tensor cores by warps (mma), lists of blocks", **_PORTABLE),
        Implementation(**_CPU),
    ),
    "dsd": (
        Implementation(about=_WARPGROUPS, tiles=_LARGE_TILES, multiple=8, more=(_READABLE, _NOT_EMPTY), **_HOPPER),
        Implementation(about="tensor cores by warps (mma), lists of blocks", **_PORTABLE),
        Implementation(**_CPU),
    ),
    "window_matmul": (
        Implementation(about=_WARPGROUPS, more=(_NOT_EXPANDED, _WHOLE_WINDOWS, _FILLS_THE_GPU), **_HOPPER),
        Implementation(about="tensor cores by warps (mma)", dtypes=ON_CUDA, **_PORTABLE),
        Implementation(**_CPU),
    ),
}
"""By operation, the best first."""

_DTYPES = {
    (operation, kind): tuple(x for x in ALL_DTYPES if any(x in i.dtypes for i in those if i.device == kind))
    for operation, those in IMPLEMENTATIONS.items()
    for kind in ("cpu", "cuda")
}
_LARGEST_HEAD_DIMS = {
    (operation, kind): max(i.head_dims[1] for i in those if i.device == kind)
    for operation, those in IMPLEMENTATIONS.items()
    for kind in ("cpu", "cuda")
}
