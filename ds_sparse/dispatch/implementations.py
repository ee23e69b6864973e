"""Calls that each implementation of an operation takes: data, from which `dispatch` chooses.

An operation that has one implementation for each device, such as softmax, is not here: there is nothing to choose. A
new chip is an entry here, and its files in csrc/cuda.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..tools.block_sizes import BLOCK_SIZES, CHOSEN_BLOCK_SIZES
from ..tools.wording import listed
from .strides import readable_in_boxes

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
    """A call, as far as the choice depends on it. An operation leaves out what it does not have.

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
    for_speed: bool = False
    """It would run, but another one is faster: what is forced is not asked."""


@dataclass(frozen=True, eq=False)
class Implementation:
    """One way in which an operation runs, and what it takes.

    Attributes:
        name: 'cpu', 'portable' (any CUDA GPU since compute capability 8.0) or a chip's.
        about: how it works, in a few words.
        device: 'cpu' or 'cuda'.
        chip: the first number of the compute capability; 0 for any.
        dtypes: of the operands.
        head_dims: the least and the most numbers of a token; None: any number.
        multiple: what they have to be a multiple of.
        tiles: for each block that it takes, tokens of the tiles that it walks; None: any block, and no tiles.
        more: what else it asks.
        in_any_order: what backward adds up in any order, unless `torch.use_deterministic_algorithms` is set.
    """

    name: str
    about: str
    device: str
    chip: int = 0
    dtypes: tuple[torch.dtype, ...] = ALL_DTYPES
    head_dims: tuple[int, int | None] = (0, None)
    multiple: int = 1
    tiles: Mapping[int, int] | None = None
    more: tuple[Limit, ...] = ()
    in_any_order: str = ""

    def tile(self, block: int) -> int:
        """Tokens of the tiles that it walks, for a block that it takes."""
        if self.tiles is None:
            raise TypeError(f"The implementation {self.name!r} walks no tiles.")
        return self.tiles[block]

    @property
    def reads_boxes(self) -> bool:
        """Tells if it reads operands by the copy engine, as `readable_in_boxes` asks."""
        return _READABLE in self.more

    def is_for(self, call: Call) -> bool:
        """Tells if it takes calls of this device, dtype and block, of some sizes."""
        return all(limit.holds(self, call) for limit in LIMITS)

    def takes(self, call: Call, forced: bool = False) -> bool:
        """Tells if it takes a call that it is for."""
        if not _in_range(self, call):
            return False
        for limit in self.more:
            if not (forced and limit.for_speed) and not limit.holds(self, call):
                return False
        return True

    def obstacles(self, call: Call, forced: bool = False) -> list[str]:
        """Why it does not take the call, a sentence for each reason. Where the device is another, that is all."""
        if not LIMITS[0].holds(self, call):
            return [LIMITS[0].sentence(self, call)]
        limits = (*LIMITS, Limit(_in_range, _out_of_range), *self.more)
        asked = [limit for limit in limits if not (forced and limit.for_speed)]
        return [limit.sentence(self, call) for limit in asked if not limit.holds(self, call)]


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
    if most is not None and (call.head_dim > most or (call.value_dim is not None and call.value_dim > most)):
        return False
    return (least == 0 or call.head_dim >= least) and (i.multiple == 1 or call.head_dim % i.multiple == 0)


def _out_of_range(i: Implementation, call: Call) -> str:
    multiples = f", a multiple of {i.multiple}" if i.multiple > 1 else ""
    given = call.head_dim if _in_range(i, call._replace(head_dim=i.multiple)) else call.value_dim
    return f"Head size is {given}, and it takes {i.head_dims[0]} to {i.head_dims[1]}{multiples}."


LIMITS = (
    Limit(_its_device, _other_device),
    Limit(
        lambda i, call: call.dtype in i.dtypes,
        lambda i, call: f"Tensors are {_name(call.dtype)}, and it takes {listed(map(_name, i.dtypes), 'and')}.",
    ),
    Limit(
        lambda i, call: i.tiles is None or call.block in i.tiles,
        lambda i, call: f"block is {call.block}, and it takes {listed(i.tiles or (), 'and')}.",
    ),
)
"""Conditions of implementations beside sizes, each with its sentence; the device comes first."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_READABLE = Limit(
    lambda i, call: all(map(readable_in_boxes, call.operands)),
    lambda i, call: (
        "It reads tokens whose numbers are adjacent, that begin at multiples of 16 bytes and are not expanded, and an "
        "operand's strides are "
        + listed([str(x.stride()) for x in call.operands if not readable_in_boxes(x)], "and")
        + "."
    ),
    for_speed=True,
)
_NOT_EMPTY = Limit(lambda i, call: all(map(torch.numel, call.operands)), lambda i, call: "An operand has no numbers.")
_WHOLE_WINDOWS = Limit(
    lambda i, call: 64 <= call.window < 2**29 and call.window % 32 == 0,
    lambda i, call: f"The window is {call.window}, and it takes multiples of 32 from 64.",
)
_COUNTABLE = Limit(
    # An exported program is for all sizes; the kernel looks again.
    lambda i, call: torch.compiler.is_exporting() or _tiles_of_windows(call) < 2**22,
    lambda i, call: (
        f"There are {_tiles_of_windows(call)} tiles of {HOPPER_TILE} tokens, and it takes fewer than 2**22."
    ),
)
_FILLS_THE_GPU = Limit(
    lambda i, call: torch.compiler.is_exporting() or _tiles_of_windows(call) >= multiprocessors(call.device),
    lambda i, call: (
        f"There are {_tiles_of_windows(call)} tiles of {HOPPER_TILE} tokens, and it is for "
        f"{multiprocessors(call.device)} and more, one for each multiprocessor."
    ),
    for_speed=True,
)
_SAME_HEAD_SIZES = Limit(
    lambda i, call: call.value_dim == call.head_dim,
    lambda i, call: f"The head sizes of keys and values are {call.head_dim} and {call.value_dim}; it takes equal ones.",
)
_LISTS_FILL_TILES = Limit(
    # The first such question makes the tiles: it comes last.
    lambda i, call: call.lists.tiles is not None,
    lambda i, call: (
        "The lists do not fill tiles: it is for lists that all sequences share, that name no pair twice, and that "
        "have one pair in 50 and more in the blocks in which they have any."
    ),
)


def _tiles_of_windows(call: Call) -> int:
    batch, heads, tokens, _ = call.operands[0].shape
    return batch * heads * -(-tokens // HOPPER_TILE)


_TILES = dict.fromkeys(BLOCK_SIZES, TILE)
_LARGE_TILES = {block: HOPPER_TILE for block in BLOCK_SIZES if block >= 16}
_CHOSEN_TILES = dict.fromkeys(CHOSEN_BLOCK_SIZES, TILE)
_CHOSEN_LARGE_TILES = dict.fromkeys(CHOSEN_BLOCK_SIZES, HOPPER_TILE)
_PRODUCT_TILES = {block: TILE if block < TILE else HOPPER_TILE for block in _LARGE_TILES}
_FOR_PAIRS = (_SAME_HEAD_SIZES, _NOT_EMPTY, _LISTS_FILL_TILES)

_HOPPER = Implementation(
    "hopper",
    "tensor cores by warpgroups (wgmma), fed by the copy engine (TMA), tiles of 128 tokens",
    "cuda",
    chip=9,
    dtypes=SIXTEEN_BITS,
    head_dims=(1, 128),
)
_PORTABLE = Implementation("portable", "tensor cores by warps (mma)", "cuda")
_CPU = Implementation("cpu", "vector instructions of the CPU, all threads", "cpu")

IMPLEMENTATIONS: Mapping[str, tuple[Implementation, ...]] = {
    "block_sparse_attention": (
        replace(_HOPPER, tiles=_LARGE_TILES, in_any_order="the gradient of query"),
        replace(_PORTABLE, dtypes=ON_CUDA, head_dims=(1, 256), tiles=_TILES),
        replace(_CPU, head_dims=(1, 256), tiles=_TILES),
    ),
    "selected_attention": (
        replace(_HOPPER, tiles=_CHOSEN_LARGE_TILES, in_any_order="the gradient of query"),
        replace(_PORTABLE, dtypes=ON_CUDA, head_dims=(1, 256), tiles=_CHOSEN_TILES),
        replace(_CPU, head_dims=(1, 256), tiles=_CHOSEN_TILES),
    ),
    "gradient of rpe": (
        replace(_PORTABLE, dtypes=ON_CUDA, head_dims=(1, 256), tiles=_TILES),
        replace(_CPU, head_dims=(1, 256), tiles=_TILES),
    ),
    "gradient of distance_bias": (_PORTABLE, _CPU),
    "sparse_attn": (
        replace(_HOPPER, tiles={TILE: HOPPER_TILE}, more=_FOR_PAIRS, in_any_order="the gradient of q"),
        replace(_PORTABLE, about="each query gathers the keys of its list", head_dims=(1, 256)),
        _CPU,
    ),
    "sdd": (
        # Tiles of half the height where blocks are small: thread blocks of fewer warps, more of them, were faster than
        # columns that more block rows share.
        replace(_HOPPER, tiles=_PRODUCT_TILES, more=(_READABLE,)),
        _PORTABLE,
        _CPU,
    ),
    "dsd": (
        replace(_HOPPER, tiles=_LARGE_TILES, multiple=8, more=(_READABLE, _NOT_EMPTY)),
        _PORTABLE,
        _CPU,
    ),
    "window_matmul": (
        replace(_HOPPER, more=(_WHOLE_WINDOWS, _COUNTABLE, _FILLS_THE_GPU)),
        replace(_PORTABLE, dtypes=ON_CUDA),
        _CPU,
    ),
}
"""By operation, the best first. Each takes all options of its operation."""
