"""LayoutBuffer: `master_layout` as DeepSpeed's state dicts and loaders know it, int64 with a copy a head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..index.master_layout import MasterLayout

_EMPTY_LIKE = torch.empty_like
# torch's stubs have attributes where torch has descriptors.
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_GET_BASE = Tensor._base.__get__  # type: ignore[union-attr]
_NOT_WRITING = ("requires_grad_", "__index__", "__int__", "__invert__", "__iter__")


class LayoutBuffer(Tensor):
    """The layout of a module, (H, R, C) int64 on the CPU, one head of memory where all are equal. For reading.

    Operations give plain tensors, but for those that share its memory (views, `data`, `detach()`), which are for
    reading too; arrays of NumPy's are read-only. Loaders fill a buffer that no checkpoint wrote with `torch.empty_like`
    of it, whose memory may look like a layout (Transformers' `from_pretrained`, `Module.to_empty`); of this one that is
    itself, so the structure's layout is what stays.

    Raises:
        RuntimeError: an operation that would write into its memory, which modules that share it would not notice.
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
        kwargs = kwargs or {}
        if func is _EMPTY_LIKE:
            return args[0]
        if (_writes(func) and isinstance(args[0], cls)) or isinstance(kwargs.get("out"), cls):
            raise RuntimeError(
                "master_layout is for reading: layers of one structure share it. Change a copy and assign that: "
                "layout = module.master_layout.clone(); ...; module.master_layout = layout"
            )
        with torch._C.DisableTorchFunctionSubclass():
            given: list[Tensor] = []

            def plain(x: LayoutBuffer) -> Tensor:
                given.append(x.as_subclass(Tensor))
                return given[-1]

            plain_args, plain_kwargs = tree_map_only(cls, plain, (args, kwargs))
            results = func(*plain_args, **plain_kwargs)
            if func == _GET_BASE:  # of which another view would have a base in turn, without end
                return results
            return tree_map_only((Tensor, np.ndarray), lambda x: _for_reading(x, given, cls), results)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind(0))


def _for_reading(result: Any, given: list[Tensor], cls: type[LayoutBuffer]) -> Any:
    """An operation's result, guarded as well where it shares memory with its operands."""
    if isinstance(result, np.ndarray):
        result.flags.writeable &= result.base is None
        return result
    shares = any(torch._C._is_alias_of(result, x) for x in given)  # type: ignore[attr-defined]  # not in stubs
    return result.as_subclass(cls) if shares else result


_held: WeakValueDictionary[tuple[str, int], LayoutBuffer] = WeakValueDictionary()


def _writes(func: Any) -> bool:
    """Tells if a function of tensors changes values, by its name: `copy_`, `__setitem__`, `__iadd__`."""
    name = func.__name__
    special = name.startswith("__")
    in_place = name.startswith(("__i", "__setitem__")) if special else name.endswith("_")
    return func == _SET_DATA or (in_place and name not in _NOT_WRITING)
