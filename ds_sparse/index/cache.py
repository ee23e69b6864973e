"""The cache of all indices that are made of what a call was given: bounded, the same in threads, while torch.compile
traces and in the capture of a CUDA graph.

Each kind of index has a part of it, an `OrderedDict` of its own, which `kept` and `kept_with` fill, bound and read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

from .contents import Contents, can_tell
from .lasting import as_it_is

BYTES = 1 << 32
"""Of the tensors that a part keeps; what was used last is kept however large it is."""

KEPT = 16
"""Indices of a layout's parts for other lengths and devices that are kept, the last that were used."""


class Holder(Protocol):
    def _held(self) -> Iterator[Tensor]:
        """All tensors whose memory it keeps; some may come twice."""


Key = TypeVar("Key", bound=Hashable)
Kept = TypeVar("Kept", bound="Holder | tuple[Holder, ...]")
Index = TypeVar("Index", bound=Holder)

captured: set[Holder | tuple[Holder, ...]] = set()
"""Kept for good: graphs read their memory whenever they are replayed."""

_keeping = RLock()  # modules of one structure share a part, and may run in threads of their own


@dataclass(frozen=True, eq=False)
class Made(Generic[Index]):
    """What was made of some owners, and what those of them that are tensors held then."""

    index: Index
    owners: list[WeakIdRef]
    contents: list[Contents | None]

    def is_of(self, owners: Sequence[object]) -> bool:
        """Whether it was made of these, and none has been changed since."""
        for ref, held, x in zip(self.owners, self.contents, owners, strict=True):
            if ref() is not x or not (held is None or held.are_of(x, _is_capturing)):
                return False
        return True

    def _held(self) -> Iterator[Tensor]:
        yield from self.index._held()
        for held in self.contents:
            if held is not None and held.copy is not None:
                yield held.copy


@as_it_is
def kept(part: OrderedDict[Key, Kept], key: Key, build: Callable[[], Kept], most: int = KEPT) -> Kept:
    """What a part has for the key, built when it is first asked for. The part keeps the last that were used, `most` of
    them and `BYTES`; what a graph being captured asks for is kept for good."""
    if torch.compiler.is_compiling():
        # What is traced changes no part; what is missing refuses to be built there.
        return part[key] if key in part else build()
    with _keeping:
        found = part.get(key)
        return _add(part, key, build(), most) if found is None else _use(part, key, found)


@as_it_is
def kept_with(
    part: OrderedDict[Hashable, Made[Index]],
    owners: Sequence[object],
    key: Hashable,
    build: Callable[[], Index],
    most: int = KEPT,
) -> Index:
    """`kept` of what is made of `owners`, tensors among them: as long as all live and no tensor is changed, as far as
    `Contents` can tell."""
    if not owners or not all(can_tell(x) for x in owners if isinstance(x, Tensor)):
        return build()
    key = (key, *map(id, owners))

    def forget(_: WeakIdRef) -> None:
        # Without the lock: it may be called anywhere, as where a thread that makes an index is waited for.
        part.pop(key, None)

    with _keeping:
        found = part.get(key)
        if found is not None and found.is_of(owners):
            return _use(part, key, found).index
        # Before the index is built: what is written meanwhile is seen at the next look.
        contents = [Contents(x) if isinstance(x, Tensor) else None for x in owners]
        made = Made(build(), [WeakIdRef(x, forget) for x in owners], contents)
        part.pop(key, None)
        return _add(part, key, made, most).index


def refuse_traced(what: str, instead: str) -> None:
    """Raises RuntimeError where torch.compile traces what it cannot.

    Args:
        what: as in "The index of a layout cannot be built".
        instead: what to do.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{what} under torch.compile; {instead}")


def refuse_captured(what: str, device: torch.device, instead: str) -> None:
    """Raises RuntimeError while a CUDA graph is captured on the device, where nothing can be made that the host waits
    for."""
    if device.type == "cuda" and _is_capturing():
        raise RuntimeError(f"{what} while a CUDA graph is captured; {instead}")


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _use(part: OrderedDict[Key, Kept], key: Key, found: Kept) -> Kept:
    part.move_to_end(key)
    if _is_capturing():
        captured.add(found)
    return found


def _add(part: OrderedDict[Key, Kept], key: Key, made: Kept, most: int) -> Kept:
    part[key] = made
    while len(part) > 1 and (len(part) > most or _bytes(part) > BYTES):
        part.popitem(last=False)
    return _use(part, key, made)


def _bytes(part: OrderedDict) -> int:
    """What the tensors of a part take, each counted once: a layout's operations share an index."""
    sizes: dict[int, int] = {}
    for value in _values(part):
        for holder in value if isinstance(value, tuple) else (value,):
            sizes |= {id(x): x.nbytes for x in holder._held()}
    return sum(sizes.values())


def _values(part: OrderedDict) -> list:
    while True:
        try:
            return list(part.values())
        except RuntimeError:
            # An owner went while they were listed.
            continue
