"""The index of what a call was given, a layout, the numbers of a window or lists of pairs: built at first use, and kept
in the cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from .block import BlockIndex, check_block
from .cache import Made, kept, kept_with, refuse_captured, refuse_traced
from .lasting import in_a_thread, lasting, plain
from .packed import PackedIndex
from .row_of_documents import index_of_row
from .token import TokenIndex
from .token_forms import tensors_in
from .window import WindowIndex
from .window_sizes import WindowNumbers

MOST_OF_TENSORS = 1024
"""Layouts, and lists given as tensors, whose indices are kept as long as they live, the last that were used."""

MOST_WINDOWS = 64
"""Indices of windows that are kept, the last that were used."""

_of_layouts: OrderedDict[Hashable, Made[BlockIndex]] = OrderedDict()
_copies: OrderedDict[Hashable, Made[BlockIndex]] = OrderedDict()
_of_windows: OrderedDict[Hashable, WindowIndex] = OrderedDict()
_of_documents: OrderedDict[Hashable, Made[PackedIndex]] = OrderedDict()
_of_rows: OrderedDict[Hashable, Made[WindowIndex]] = OrderedDict()
_of_lists: OrderedDict[Hashable, Made[TokenIndex]] = OrderedDict()
_of_packed_pairs: OrderedDict[Hashable, Made[TokenIndex]] = OrderedDict()


def index_of_layout(layout: torch.Tensor, block: int, device: torch.device) -> BlockIndex:
    """The index of a layout on the device, built at first use and after a change, as far as `Contents` can tell.

    Raises:
        ValueError: another layout for each sample of torch.vmap.
        RuntimeError: under torch.compile; where it would have to be built in the capture of a CUDA graph.
    """
    what, instead = "The index of a layout cannot be built", "pass BlockIndex.build(layout, block) as the layout"
    refuse_traced(what, f"{instead}, on the device of query.")
    layout = plain("The layout", layout)
    on = layout.device if device.type == "meta" else device

    def build() -> BlockIndex:
        refuse_captured(what, on, f"{instead}, or call once before the capture.")
        return BlockIndex.build(layout.to(on), block)

    return kept_with(_of_layouts, [layout], (block, on), build, MOST_OF_TENSORS)


def copy_of(index: BlockIndex, device: torch.device) -> BlockIndex:
    """The index on another device, copied there at first use.

    Raises:
        RuntimeError: under torch.compile.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"The BlockIndex is on {index.device} and query on {device}, and under torch.compile it cannot be copied; "
            f"pass index.to({str(device)!r})."
        )
    return kept_with(_copies, [index], device, lambda: index.to(device), MOST_OF_TENSORS)


def packed_index_of(
    layout: torch.Tensor | BlockIndex, cu_seqlens: torch.Tensor, block: int | None, device: torch.device
) -> PackedIndex:
    """The index of a layout and of the documents of a batch, built at first use and after a change of either.

    Raises:
        TypeError, ValueError: as of `PackedIndex.build`.
        RuntimeError: as of `index_of_layout`.
    """
    what, instead = "The index of packed documents cannot be built", "pass PackedIndex.build(layout, cu_seqlens, block)"
    refuse_traced(what, f"{instead} as the layout.")

    def build() -> PackedIndex:
        refuse_captured(what, device, f"{instead} as the layout, or call once before the capture.")
        return PackedIndex.build(_indexed(layout, block), cu_seqlens, block, device=device)

    return kept_with(_of_documents, _owners(layout, cu_seqlens), (block, device), build, MOST_OF_TENSORS)


def row_index_of(
    layout: torch.Tensor | BlockIndex,
    cu_seqlens: torch.Tensor,
    block: int | None,
    tokens: int,
    causal: bool,
    device: torch.device,
) -> WindowIndex:
    """The index of a row's layout that ends at the borders of documents, built at first use and after a change.

    Raises:
        TypeError, ValueError: as of `index_of_row`.
        RuntimeError: as of `index_of_layout`.
    """
    what, instead = "The index of a row of documents cannot be built", "call without torch.compile"
    refuse_traced(what, f"{instead}.")

    def build() -> WindowIndex:
        refuse_captured(what, device, "call once before the capture.")
        return index_of_row(_indexed(layout, block), cu_seqlens, block, tokens, causal, device)

    return kept_with(_of_rows, _owners(layout, cu_seqlens), (block, tokens, causal, device), build, MOST_OF_TENSORS)


def _indexed(layout: torch.Tensor | BlockIndex, block: int | None) -> torch.Tensor | BlockIndex:
    """A layout's own index, which batches of other documents share; a layout as it is where `block` is missing."""
    if not isinstance(layout, torch.Tensor) or block is None:
        return layout
    return index_of_layout(layout, check_block(block), layout.device)


def packed_pairs_of(index: TokenIndex, cu_seqlens: torch.Tensor, document_layout: str) -> TokenIndex:
    """The pairs of the documents of a batch, built at first use and after a change of `cu_seqlens`.

    Raises:
        TypeError, ValueError: as of `TokenIndex.packed`.
        RuntimeError: as of `index_of_lists`.
    """
    what, instead = "The pairs of packed documents cannot be found", "pass index.packed(cu_seqlens).prepared()"
    refuse_traced(what, f"{instead}, without cu_seqlens.")

    def build() -> TokenIndex:
        refuse_captured(what, index.device, f"{instead}, without cu_seqlens, or call once before the capture.")
        return index.packed(cu_seqlens, document_layout)

    return kept_with(_of_packed_pairs, _owners(index, cu_seqlens), document_layout, build, MOST_OF_TENSORS)


def _owners(*given: torch.Tensor | BlockIndex | TokenIndex) -> list:
    """What an index of documents is made of; anything else is refused when it is built."""
    return [x for x in given if isinstance(x, torch.Tensor | BlockIndex | TokenIndex)]


def index_of_window(
    tokens: int, numbers: WindowNumbers, device: torch.device, cu_seqlens: torch.Tensor | None = None
) -> WindowIndex:
    """The index of arguments that have been seen before, or a new one.

    Raises:
        RuntimeError: under torch.compile; where it would have to be built in the capture of a CUDA graph.
    """
    what, instead = (
        "The index of a window cannot be built",
        "pass WindowIndex.build(tokens, window_size, ...) as window_size",
    )
    refuse_traced(what, f"{instead}, on the device of query.")

    def build() -> WindowIndex:
        refuse_captured(what, device, f"{instead}, or call once before the capture.")
        return in_a_thread(lambda: WindowIndex.build(tokens, *numbers, device=device, cu_seqlens=cu_seqlens))

    key = (tokens, numbers, device)
    if cu_seqlens is not None:
        return kept_with(_of_rows, _owners(cu_seqlens), key, build, MOST_OF_TENSORS)
    return kept(_of_windows, key, build, MOST_WINDOWS)


def index_of_lists(build: Callable[[], TokenIndex], given: Sequence, queries: int, keys: int) -> TokenIndex:
    """What `build` makes of what is given, tensors and nested lists of them, and of the lengths; kept as long as the
    tensors live, until one is changed.

    Raises:
        RuntimeError: under torch.compile; where it would have to be built in the capture of a CUDA graph.
    """
    what, instead = "The index of token pairs cannot be built", "build a TokenIndex before, and pass index.prepared()"
    refuse_traced(what, f"{instead}.")
    tensors = tensors_in(given)

    def make() -> TokenIndex:
        for x in tensors:
            refuse_captured(what, x.device, f"{instead}, or call once before the capture.")
        return lasting(build)()

    return kept_with(_of_lists, tensors, (queries, keys, _nesting(given)), make, MOST_OF_TENSORS)


def _nesting(x: Tensor | Sequence) -> tuple | None:
    """How lists lie in one another."""
    return None if isinstance(x, Tensor) else tuple(map(_nesting, x))
