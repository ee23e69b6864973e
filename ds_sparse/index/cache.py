"""The cache of indices: what is kept, for how long and in how much memory; how a change of a tensor is seen; and what
a trace of torch.compile and the capture of a CUDA graph may not build."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from ctypes import c_char
from dataclasses import dataclass
from threading import RLock
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from .transforms import as_it_is, made_outside, outside_transforms

BYTES = 1 << 32
"""Memory of the tensors that a cache keeps; what was used last is kept however large it is."""

KEPT = 16
"""Indices of a layout's parts for other lengths and devices that are kept, the last that were used."""

CPU, META = torch.device("cpu"), torch.device("meta")

COMPARED_ON_GPU = os.environ.get("DS_SPARSE_CHECK_LAYOUTS", "") not in ("", "0")
"""The values of tensors on a GPU are compared, too, for which each look waits."""


class Holder(Protocol):
    def _held(self) -> Iterator[Tensor]:
        """All tensors whose memory it keeps; some may come twice."""


Kept = TypeVar("Kept", bound="Holder | tuple[Holder, ...]")

captured: set[Holder | tuple[Holder, ...]] = set()
"""Values and indices that are kept for good: graphs read their memory whenever they are replayed."""


@dataclass(frozen=True, eq=False)
class _Entry(Generic[Kept]):
    """A value, the owners that it was made of, and what those that are tensors held then."""

    value: Kept
    owners: Sequence[Callable[[], Any]] = ()  # weak references
    contents: Sequence[Contents | None] = ()

    def is_of(self, owners: Sequence[Any], rows: range | None) -> bool:
        """Tells if the value was made of these, and none has been changed since, or these rows of it have not."""
        for there, held, x in zip(self.owners, self.contents, owners, strict=True):
            if there() is not x or not (held is None or held.are_of(x, rows)):
                return False
        return True

    def tensors(self) -> Iterator[Tensor]:
        for holder in self.value if isinstance(self.value, tuple) else (self.value,):
            yield from holder._held()
        for held in self.contents:
            if held is not None and held.copy is not None:
                yield held.copy


class Refusal(NamedTuple):
    """The sentences for what cannot be built where torch.compile traces, or a CUDA graph is captured.

    Attributes:
        what: as in "The index of a layout cannot be built".
        if_traced, if_captured: what to do instead.
    """

    what: str
    if_traced: str
    if_captured: str

    def check(self, device: torch.device) -> None:
        """Raises RuntimeError in a trace, and in a capture on the device, where the host waits for nothing."""
        refuse_traced(self.what, self.if_traced)
        refuse_captured(device, f"{self.what} while a CUDA graph is captured; {self.if_captured}")


def refuse_traced(what: str, instead: str) -> None:
    """Raises RuntimeError where torch.compile traces, with what cannot be done, and what to do instead."""
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{what} under torch.compile; {instead}")


def refuse_captured(device: torch.device, sentence: str) -> None:
    """Raises RuntimeError with the sentence in a capture on the device."""
    if is_captured(device):
        raise RuntimeError(sentence)


def is_capturing() -> bool:
    """Tells if the current stream is captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def keep_for_good(value: Holder | tuple[Holder, ...]) -> None:
    """Keeps what a CUDA graph that is being captured reads."""
    captured.add(value)


def is_captured(device: torch.device) -> bool:
    """Tells if what is done on the device is part of a CUDA graph that is being captured. A trace, which runs nothing,
    is in none."""
    return device.type == "cuda" and not torch.compiler.is_compiling() and is_capturing()


def is_in_graph(x: Tensor) -> bool:
    """Tells if what is made of x is part of a graph, where nobody can wait for it: torch.compile traces, or a CUDA
    graph is captured on x's device."""
    return torch.compiler.is_compiling() or is_captured(x.device)


class Cache(Generic[Kept]):
    """Keeps the values that were used last, `most` of them and `BYTES` of tensors, by their keys.

    Threads may share it, and processes that are forked have it as it was. A value that a CUDA graph being captured asks
    for is kept for good.
    """

    def __init__(self, most: int = KEPT):
        self.most = most
        self._entries: OrderedDict[Hashable, _Entry[Kept]] = OrderedDict()

    @as_it_is
    def get(
        self,
        key: Hashable,
        build: Callable[[], Kept],
        refusal: Refusal | None = None,
        device: torch.device = CPU,
        owners: Sequence[object] | None = None,
        rows: range | None = None,
    ) -> Kept:
        """The value of a key, built when it is first asked for, outside transforms, which it outlives.

        Args:
            refusal: raised where it would have to be built in a trace, or for the device in a capture.
            owners: objects that it is made of, tensors among them. It is kept as long as all live and no tensor is
                changed, as far as `Contents` can tell, which a trace cannot; not at all where there are none. None: it
                is made of the key alone.
            rows: of each owner's last dimension but one, all of the value that is asked for: only these are compared.
        """
        if torch.compiler.is_compiling():
            # A trace changes no cache.
            if not owners and key in self._entries:
                return self._entries[key].value
            if refusal is not None:
                refuse_traced(refusal.what, refusal.if_traced)
            return build()
        given = owners or ()
        with _lock:
            kept = self.find(key, given, rows)
            if kept is not None:
                return kept
            if refusal is not None:
                refusal.check(device)
            nothing_tells = owners is not None and not given
            if nothing_tells or not all(can_tell(x) for x in given if isinstance(x, Tensor)):
                return made_outside(build)
            # Before the value is built: what is written meanwhile is seen at the next look.
            contents = [Contents(x) if isinstance(x, Tensor) else None for x in given]
            value = made_outside(build)
            key = (key, *map(id, given)) if given else key
            # Without the lock: it may be called anywhere, as where a thread that makes an index is waited for.
            refs = [ref(x, lambda _: self._entries.pop(key, None)) for x in given]
            self._entries.pop(key, None)
            self._entries[key] = _Entry(value, refs, contents)
            while len(self._entries) > 1 and (len(self._entries) > self.most or memory_of(self) > BYTES):
                self._entries.popitem(last=False)
            if is_capturing():
                captured.add(value)
            return value

    def find(self, key: Hashable, owners: Sequence[object] = (), rows: range | None = None) -> Kept | None:
        """The value of a key, as `get` gives it, if it is kept and no owner has been changed; not for a trace."""
        key = (key, *map(id, owners)) if owners else key
        with _lock:
            entry = self._entries.get(key)
            if entry is None or not entry.is_of(owners, rows):
                return None
            self._entries.move_to_end(key)
            if is_capturing():
                keep_for_good(entry.value)
            return entry.value

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> list[tuple[Any, Kept]]:
        """The keys and values, those that were used last at the end."""
        return [(key, entry.value) for key, entry in self._listed()]

    def _held(self) -> Iterator[Tensor]:
        for _, entry in self._listed():
            yield from entry.tensors()

    def _listed(self) -> list[tuple[Hashable, _Entry[Kept]]]:
        while True:
            try:
                return list(self._entries.items())
            except RuntimeError:
                # An owner went while they were listed.
                continue


_lock = RLock()  # modules of one structure share a cache, and may run in threads of their own

# A data loader's process may be forked while another thread holds the lock.
os.register_at_fork(after_in_child=lambda: globals().update(_lock=RLock()))


def memory_of(holder: Holder) -> int:
    """Bytes of the tensors, each counted once: a layout's operations share an index."""
    return sum({id(x): x.nbytes for x in holder._held()}.values())


class Contents:
    """Bytes and form of a tensor, for a later look: a write counts also where PyTorch does not count it, as one through
    `x.numpy()`, `x.data` and memory that another library shares. On the CPU all values are compared at each look: in 2
    µs those of 64 x 64 bools, in 2 ms those of 16 million. A look at a GPU would wait for it: there PyTorch's count of
    changes in place tells, and with DS_SPARSE_CHECK_LAYOUTS=1 in the environment, which is for finding mistakes, the
    values as well."""

    @outside_transforms
    def __init__(self, x: Tensor):
        if not can_tell(x):
            raise ValueError("Nothing tells whether this tensor is changed.")
        self._form = _form(x)
        self._version = None if x.is_cpu else x._version
        self._bytes = bytearray(memoryview(_memory(x))) if x.is_cpu else None
        # What lies where x is; it is looked at only while x is still there.
        self._there = _bytes_at(x.data_ptr(), x.nbytes) if x.is_cpu and x.is_contiguous() else None
        self._place = None if self._there is None else x.data_ptr()
        self.copy: Tensor | None = None
        if self._bytes:
            self.copy = torch.frombuffer(self._bytes, dtype=torch.uint8)
        elif COMPARED_ON_GPU and not x.is_cpu:
            self.copy = x.detach().clone()

    def are_of(self, x: Tensor, rows: range | None = None) -> bool:
        """Tells if x holds the same, on the CPU in these rows if they are given. While a CUDA graph is captured, no
        values of a GPU are looked at."""
        if self._form != _form(x):
            return False
        if rows is None and self._there is not None and self._place == x.data_ptr():
            return self._bytes == self._there
        if self._bytes is not None and rows is not None and x.is_contiguous():
            width, height = x.shape[-1] * x.itemsize, x.shape[-2]
            begins = range(min(rows.start, height) * width, x.nbytes, height * width)
            size = len(range(height)[rows.start : rows.stop]) * width
            first = x.data_ptr()
            return all(self._bytes[at : at + size] == _bytes_at(first + at, size) for at in begins)
        if self._bytes is not None:
            return self._bytes == _memory(x)
        if self._version != x._version:
            return False
        return self.copy is None or is_capturing() or torch.equal(self.copy, x)


def can_tell(x: Tensor) -> bool:
    """Tells if a change of x can be seen: not where it has no memory, nor on a GPU if it was made in inference mode,
    which counts no changes."""
    return not isinstance(x, FakeTensor) and (x.is_cpu or not x.is_inference())


def _form(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device


def _memory(x: Tensor) -> Any:
    """The bytes of a tensor on the CPU in order, its own memory where they lie so. Python compares such a buffer with a
    bytearray as fast as memory is read."""
    x = x if x.is_contiguous() else _in_order(x)
    buffer = _bytes_at(x.data_ptr(), x.nbytes)
    buffer.owner = x  # a copy lasts as long as the buffer
    return buffer


def _bytes_at(place: int, size: int) -> Any:
    return (c_char * size).from_address(place)


@outside_transforms
def _in_order(x: Tensor) -> Tensor:
    """A contiguous copy, without what an expanded view repeats."""
    with unset_fake_temporarily(), torch.no_grad():
        return x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())].contiguous()
