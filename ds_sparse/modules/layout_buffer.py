"""LayoutBuffer: `master_layout` as DeepSpeed's state dicts and loaders know it, int64 with a copy a head."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..master_layout import MasterLayout

_EMPTY_LIKE = torch.empty_like
_NOT_WRITING = ("requires_grad_", "__index__", "__int__", "__invert__")


class LayoutBuffer(Tensor):
    """The layout of a module, (H, R, C) int64 on the CPU, one head of memory where all are equal. For reading.

    Operations give plain tensors. Loaders fill a buffer that no checkpoint wrote with `torch.empty_like` of it, whose
    memory may look like a layout (Transformers' `from_pretrained`, `Module.to_empty`); of this one that is itself, so
    the structure's layout is what stays.

    Raises:
        RuntimeError: an operation that would write into it, which modules that share it would not notice.
    """

    @classmethod
    def of(cls, layout: MasterLayout, num_heads: int) -> LayoutBuffer:
        """The buffer of a layout for so many heads, the same one as long as it is held: at 65,536 tokens it is 134 MB a
        head, and is kept no longer."""
        key = (layout.text, num_heads)
        buffer = _held.get(key)
        if buffer is None:
            buffer = layout.layout.to(torch.int64).expand(num_heads, -1, -1).as_subclass(cls)
            _held[key] = buffer
        return buffer

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _EMPTY_LIKE:
            return args[0]
        if _writes(func.__name__) and isinstance(args[0], cls):
            raise RuntimeError(
                "master_layout is for reading: layers of one structure share it. Change a copy and assign that: "
                "layout = module.master_layout.clone(); ...; module.master_layout = layout"
            )
        with torch._C.DisableTorchFunctionSubclass():
            plain_args, plain_kwargs = tree_map_only(cls, lambda x: x.as_subclass(Tensor), (args, kwargs or {}))
            return func(*plain_args, **plain_kwargs)


_held: WeakValueDictionary[tuple[str, int], LayoutBuffer] = WeakValueDictionary()


def _writes(name: str) -> bool:
    """Whether a method of this name changes values: `copy_`, `__setitem__`, `__iadd__`."""
    special = name.startswith("__")
    in_place = name.startswith(("__i", "__setitem__")) if special else name.endswith("_")
    return in_place and name not in _NOT_WRITING
