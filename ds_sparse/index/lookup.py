"""The index of what a call was given, a layout, the numbers of a window or lists of pairs: built at first use, and kept
in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .block import BlockIndex, check_block
from .cache import CPU, META, Cache, Refusal, is_in_graph
from .packed import PackedIndex
from .token import TokenIndex
from .token_forms import tensors_in
from .transforms import in_a_thread, unwrap_functorch
from .window import WindowIndex, index_of_row
from .window_sizes import WindowNumbers

_of_layouts, _copies, _of_documents, _of_pairs, _of_lists = (Cache[Any](most=1024) for _ in range(5))
"""Indices of tensors and other indices, kept as long as these live: so many of each kind."""

_of_windows: Cache[WindowIndex] = Cache(most=64)


def _refusal(what: str, instead: str, if_traced: str = "") -> Refusal:
    return Refusal(what, f"{instead}{if_traced}.", f"{instead}, or call once before the capture.")


_LAYOUT = _refusal(
    "The index of a layout cannot be built",
    "pass BlockIndex.build(layout, block) as the layout",
    if_traced=", on the device of query",
)
_WINDOW = _refusal(
    "The index of a window cannot be built",
    "pass WindowIndex.build(tokens, window_size, ...) as window_size",
    if_traced=", on the device of query",
)
_LISTS = _refusal("The index of token pairs cannot be built", "build a TokenIndex before, and pass index.prepared()")
_PACKED = _refusal("The index of packed documents cannot be built", "give cu_seqlens on the GPU")
_PACKED_PAIRS = _refusal(
    "The pairs of packed documents cannot be found", "pass index.packed(cu_seqlens).prepared(), without cu_seqlens"
)


def index_of_layout(layout: Tensor, block: int, device: torch.device, rows: range | None = None) -> BlockIndex:
    """Index of a layout on the device, built at first use and after a change, or one of these block rows where no
    others are asked for. Raises ValueError for another layout for each sample of torch.vmap."""
    layout = unwrap_functorch("The layout", layout)
    on = layout.device if device == META else device
    return _of_layouts.get((block, on), lambda: BlockIndex.build(layout.to(on), block), _LAYOUT, on, [layout], rows)


def kept_of_layout(layout: Tensor, block: int, device: torch.device) -> BlockIndex | None:
    """What `index_of_layout` has kept."""
    return _of_layouts.find((block, device), (layout,))


def copy_of(index: BlockIndex, device: torch.device) -> BlockIndex:
    """Copy of an index on another device, made at first use; refused under torch.compile."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"The BlockIndex is on {index.device} and query on {device}, and under torch.compile it cannot be copied; "
            f"pass index.to({str(device)!r})."
        )
    return _copies.get(device, lambda: index.to(device), owners=[index])


def index_of_documents(
    layout: Tensor | BlockIndex, cu_seqlens: Tensor, block: int | None, tokens: int, causal: bool | None,
    device: torch.device,
) -> Any:  # fmt: skip
    """Index of a layout and of the documents of a batch, built at first use and after a change of either: a
    `PackedIndex`, or, with `causal` of the call, the `WindowIndex` of a row's layout."""
    anew = is_built_anew(cu_seqlens)

    def build() -> PackedIndex | WindowIndex:
        indexed = _indexed(layout, block, device)
        if causal is not None:
            return index_of_row(indexed, cu_seqlens, block, tokens, causal, device)
        bounds = tokens if anew or (isinstance(cu_seqlens, Tensor) and not cu_seqlens.is_cpu) else None
        return PackedIndex.build(indexed, cu_seqlens, block, tokens=bounds, device=device)

    if anew:
        return build()
    return _of_documents.get((block, tokens, causal, device), build, _PACKED, device, (layout, cu_seqlens))


def kept_of_documents(
    layout: Tensor | BlockIndex, cu_seqlens: Tensor, block: int | None, tokens: int, causal: bool | None,
    device: torch.device,
) -> Any:  # fmt: skip
    """What `index_of_documents` has kept."""
    return _of_documents.find((block, tokens, causal, device), (layout, cu_seqlens))


def packed_pairs_of(index: TokenIndex, cu_seqlens: Tensor, document_layout: str) -> TokenIndex:
    """Pairs of the documents of a batch, built at first use and after a change of `cu_seqlens`."""

    def build() -> TokenIndex:
        return index.packed(cu_seqlens, document_layout)

    return _of_pairs.get(document_layout, build, _PACKED_PAIRS, index.device, (index, cu_seqlens))


def index_of_window(
    tokens: int, numbers: WindowNumbers, device: torch.device, cu_seqlens: Tensor | None = None
) -> WindowIndex:
    """Index of a window's numbers, built at first use."""
    key = tokens, numbers, device

    def build() -> WindowIndex:
        return WindowIndex.build(tokens, *numbers, device=device, cu_seqlens=cu_seqlens)

    if cu_seqlens is None:
        return _of_windows.get(key, lambda: in_a_thread(build), _WINDOW, device)
    if numbers.in_order and is_built_anew(cu_seqlens):
        return build()
    return _of_documents.get(key, build, _WINDOW, device, (cu_seqlens,))


def index_of_lists(build: Callable[[], TokenIndex], given: Sequence, queries: int, keys: int) -> TokenIndex:
    """Index that `build` makes of what is given, tensors and nested lists of them, kept as long as these live, until
    one is changed."""
    tensors = tensors_in(given)
    device = next((x.device for x in tensors if not x.is_cpu), CPU)
    return _of_lists.get((queries, keys, _nesting(given)), build, _LISTS, device, tensors)


def is_built_anew(cu_seqlens: Tensor | None) -> bool:
    """Tells if the index of packed documents is built in the graph, at each call, which keeps none of it."""
    return isinstance(cu_seqlens, Tensor) and is_in_graph(cu_seqlens)


def _indexed(layout: Tensor | BlockIndex, block: int | None, device: torch.device) -> Tensor | BlockIndex:
    """A layout's own index on the device, which batches of other documents share; a layout as it is where `block` is
    missing."""
    if not isinstance(layout, Tensor) or block is None:
        return layout
    return index_of_layout(layout, check_block(block), device)


def _nesting(x: Tensor | Sequence) -> tuple | None:
    """Nesting of lists in one another, as tuples."""
    return None if isinstance(x, Tensor) else tuple(map(_nesting, x))
