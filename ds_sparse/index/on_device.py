"""Base of all indices: tensors on one device, which any stream there may use, and of which another gets a copy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import is_dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from ..layout import LayoutRows
from ..picture import in_notebook
from .cache import Refusal, is_capturing, keep_for_good
from .transforms import made_outside, outside_transforms

MOST_DRAWN = 2**26
"""Pairs of tokens, of all heads together, that are drawn one by one."""


class ReadyEvent:
    """Recorded on a CUDA stream behind the work that made an index; other streams queue behind it what they do with it.

    The host does not wait for that work, and streams do not wait for each other. So each stream waits for the event
    once, when it first uses the index; from then on the memory is kept from others until that stream is done, even if
    the index is dropped before. In the capture of a CUDA graph a stream cannot wait for what is not captured, and need
    not: `torch.cuda.graph` synchronises before it captures; the index is kept for good, as each replay reads it. What
    torch.compile makes of a function reads the tensors without asking the index: synchronise between building it on one
    stream and running that on another.

    Does nothing on other devices. A copy, also by pickle, stands for the work of copying.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.record()

    def record(self) -> None:
        """Marks the place that the current stream has come to. What a trace or a capture makes is used in there, or
        behind it on the same stream."""
        self._event: torch.cuda.Event | None = None
        if self.device.type == "cuda" and not (torch.compiler.is_compiling() or is_capturing()):
            stream = torch.cuda.current_stream(self.device)
            self._event, self._behind = stream.record_event(), {stream.cuda_stream}

    @property
    def is_recorded(self) -> bool:
        """Whether the index was made on a GPU, and in no trace and no capture."""
        return self._event is not None

    def wait(self, index: OnDevice) -> None:
        """Puts what the current stream does next with the index, all that has been made of it, behind the event."""
        if self._event is None or torch.compiler.is_compiling():
            return
        # A stream that is captured may be one that has waited.
        if torch.cuda.is_current_stream_capturing():
            keep_for_good(index)
            return
        # The stream's number is had in a tenth of the time of a stream.
        if torch._C._cuda_getCurrentRawStream(self.device.index) in self._behind:
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self._event)
        for x in index._tensors():
            x.record_stream(stream)
        self._behind.add(stream.cuda_stream)

    def __reduce__(self):
        return ReadyEvent, (self.device,)


class OnDevice:
    """An immutable index, a dataclass of tensors and other indices; perhaps with `_made`, parts that are made at first
    use, by their names."""

    _ready: ReadyEvent
    _made: dict[Any, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ready", ReadyEvent(self.device))

    @property
    def device(self) -> torch.device:
        """Where the index is; kinds that every call asks say it of one tensor themselves, which is faster."""
        return next(self._tensors()).device

    def rows_to_draw(self) -> tuple[LayoutRows, int]:
        """The layout, and the tokens in a block; waits for the device.

        Raises:
            ValueError: there is none.
        """
        raise ValueError(f"{type(self).__name__} has no layout to draw.")

    def _repr_html_(self) -> str | None:
        return in_notebook(self.rows_to_draw, repr(self))

    def ready(self) -> Self:
        """The index itself, for what the current stream does next (see `ReadyEvent`)."""
        self._ready.wait(self)
        return self

    def to(self, device: torch.device | str) -> Self:
        """The same index on another device.

        Args:
            device: where it is to be; "cuda" is the current GPU.

        Returns:
            The index there; itself if it is there already.
        """
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return self if self.device == device else self._copied(device)

    @outside_transforms
    def _copied(self, device: torch.device) -> Self:
        return copied(self.ready(), device)

    def _once(
        self,
        name: Hashable,
        make: Callable[[], Any],
        instead: str | None = None,
        what: str | None = None,
        traced: bool = True,
    ) -> Any:
        """A part that is made at the first call, outside transforms, and kept; the current stream goes behind the end
        of the making. `instead` says what to do before where a trace or a capture makes nothing, `what` what that is.
        traced: a trace makes the part within its graph, and else ends that."""
        if name not in self._made:
            if instead is not None:
                what = what or f"What is missing of a {type(self).__name__} cannot be made"
                Refusal(what, instead, instead).check(self.device)
            self._ready.wait(self)
            self._made[name] = make() if traced and torch.compiler.is_compiling() else made_outside(make)
            self._ready.record()
        self._ready.wait(self)
        return self._made[name]

    def _tensors(self) -> Iterator[Tensor]:
        """The tensors of its own, those that were made at first use as well."""
        yield from (x for x in _parts(vars(self)) if isinstance(x, Tensor))

    def _held(self) -> Iterator[Tensor]:
        """All tensors whose memory it keeps; some may come twice."""
        for x in _parts(vars(self)):
            yield from (x,) if isinstance(x, Tensor) else x._held()


def copied(x: Any, device: torch.device) -> Any:
    """A dataclass, its tensors and indices on another device."""
    return replace(x, **{key: part.to(device) for key, part in vars(x).items() if isinstance(part, Tensor | OnDevice)})


def _parts(x: object) -> Iterator[Tensor | OnDevice]:
    """The tensors and indices in the fields of an index, also in dictionaries, tuples and dataclasses of them."""
    if isinstance(x, Tensor | OnDevice):
        yield x
    elif isinstance(x, dict | tuple):
        for part in tuple(x.values()) if isinstance(x, dict) else x:
            yield from _parts(part)
    elif is_dataclass(x):
        yield from _parts(vars(x))
