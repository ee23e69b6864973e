"""The event behind which the streams of a GPU may read an index."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from .cache import is_capturing


class ReadyEvent:
    """Recorded on a CUDA stream behind the work that made an index; other streams queue behind it what they do with it.

    The host does not wait for that work, and streams do not wait for each other. So each stream waits for the event
    once, when it first uses the index; from then on the memory is kept from others until that stream is done, even if
    the index is dropped before. In the capture of a CUDA graph a stream cannot wait for what is not captured, and need
    not: `torch.cuda.graph` synchronises before it captures. What torch.compile makes of a function reads the tensors
    without asking the index: synchronise between building it on one stream and running that on another.

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

    def wait(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Puts what the current stream does next behind the event; `tensors` gives all that has been made."""
        # The stream's number is had in a tenth of the time of a stream.
        if self._event is None or torch.compiler.is_compiling():
            return
        if torch._C._cuda_getCurrentRawStream(self.device.index) in self._behind:
            return
        stream = torch.cuda.current_stream(self.device)
        if not torch.cuda.is_current_stream_capturing():
            stream.wait_event(self._event)
            for x in tensors():
                x.record_stream(stream)
            self._behind.add(stream.cuda_stream)

    def __reduce__(self):
        return ReadyEvent, (self.device,)
