"""What every index has: its tensors are on one device, any stream there may use them, another device gets a copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self

import torch

from .cache import Refusal
from .ready_event import ReadyEvent
from .transforms import outside_transforms


class OnDevice:
    """An immutable index, a dataclass of tensors and other indices; perhaps with `_made`, what was made at first
    use."""

    _ready: ReadyEvent

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
        parts = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, torch.Tensor | OnDevice)}
        return replace(index, **parts)

    def _refuse_to_make(self, what: str, instead: str) -> None:
        """Raises RuntimeError where nothing can be made: under torch.compile, and in the capture of a CUDA graph."""
        Refusal(what, instead, instead).check(self.device)

    def _tensors(self) -> Iterator[torch.Tensor]:
        """The tensors of its own, those that were made at first use as well."""
        for x in (*vars(self).values(), *tuple(getattr(self, "_made", {}).values())):
            if isinstance(x, torch.Tensor):
                yield x

    def _held(self) -> Iterator[torch.Tensor]:
        """All tensors whose memory it keeps; some may come twice."""
        yield from self._tensors()
        for x in vars(self).values():
            if isinstance(x, OnDevice):
                yield from x._held()
