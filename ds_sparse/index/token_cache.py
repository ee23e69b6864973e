"""The index of lists of token pairs that are given as tensors, kept as long as these live."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .lasting import lasting
from .token import TokenIndex
from .token_forms import tensors_in

_indices = WeakTensorKeyDictionary()  # the first of the tensors given: what else was given, and the index


def index_of(build: Callable[[], TokenIndex], given: Sequence, queries: int, keys: int) -> TokenIndex:
    """What `build` makes of what is given, tensors and nested lists of them, and of the lengths; kept as long as the
    first tensor lives, until it is asked for with others or after a change in place."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "The index of token pairs cannot be built under torch.compile; build a TokenIndex before, and pass "
            "index.prepared()."
        )
    tensors = tensors_in(given)
    build = lasting(build)
    if not tensors or any(x.is_inference() for x in tensors):
        # Made in inference mode, a tensor has no version that would tell of a change.
        return build()
    first, *others = tensors
    key = (queries, keys, _nesting(given), *(x._version for x in tensors))
    known, refs, index = _indices.get(first, (None, (), None))
    if known != key or any(ref() is not x for ref, x in zip(refs, others, strict=True)):
        index = build()
        _indices[first] = key, [weakref.ref(x) for x in others], index
    return index


def _nesting(x: Tensor | Sequence) -> tuple | None:
    """How lists lie in one another."""
    return None if isinstance(x, Tensor) else tuple(map(_nesting, x))
