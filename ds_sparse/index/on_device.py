"""Base of all indices: tensors on one device, which any stream there may use, and of which another gets a copy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import is_dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from .cache import Refusal
from .ready_event import ReadyEvent
from .transforms import outside_transforms


class OnDevice:
    """An immutable index, a dataclass of tensors and other indices; perhaps with `_made`, parts that are made at first
    use, by their names."""

    _ready: ReadyEvent
    _made: dict[Any, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ready", ReadyEvent(self.device))

    @property
    def device(self) -> torch.device:
        """Where the index is; each kind of index says it."""
        raise NotImplementedError

    def ready(self) -> Self:
        """The index itself, for what the current stream does next (see `ReadyEvent`)."""
        self._ready.wait(self._tensors)
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
        self.ready()
        index: Any = self
        parts = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor | OnDevice)}
        return replace(index, **parts)

    def _once(self, name: Hashable, make: Callable[[], Any], instead: str | None = None) -> Any:
        """A part that is made at the first call, and kept; the current stream goes behind the end of the making.
        `instead` says what to do before where a trace or a capture makes nothing."""
        if name not in self._made:
            if instead is not None:
                self._refuse_to_make(instead)
            self._ready.wait(self._tensors)
            self._made[name] = make()
            self._ready.record()
        self._ready.wait(self._tensors)
        return self._made[name]

    def _refuse_to_make(self, instead: str, what: str | None = None) -> None:
        """Raises RuntimeError under torch.compile, and in the capture of a CUDA graph."""
        what = what or f"What is missing of a {type(self).__name__} cannot be made"
        Refusal(what, instead, instead).check(self.device)

    def _tensors(self) -> Iterator[Tensor]:
        """The tensors of its own, those that were made at first use as well."""
        yield from (x for x in _parts(vars(self)) if isinstance(x, Tensor))

    def _held(self) -> Iterator[Tensor]:
        """All tensors whose memory it keeps; some may come twice."""
        for x in _parts(vars(self)):
            yield from (x,) if isinstance(x, Tensor) else x._held()


def _parts(x: object) -> Iterator[Tensor | OnDevice]:
    """The tensors and indices in the fields of an index, also in dictionaries, tuples and dataclasses of them."""
    if isinstance(x, Tensor | OnDevice):
        yield x
    elif isinstance(x, dict | tuple):
        for part in tuple(x.values()) if isinstance(x, dict) else x:
            yield from _parts(part)
    elif is_dataclass(x):
        yield from _parts(vars(x))
