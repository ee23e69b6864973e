"""WindowIndex: what attention with a window of tokens walks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._ops import ops
from ..layout import LayoutRows, RowMaker
from ..native import instruction_set
from ..tools.block_sizes import BLOCK_SIZES
from ..tools.memory import refuse_too_large
from ..tools.wording import listed
from .block import BlockIndex
from .cache import is_in_graph, refuse_traced
from .on_device import MOST_DRAWN, OnDevice
from .packed import Borders, Documents, index_of_square, most_live, sent_to
from .transforms import least_of, outside_transforms_or_traced, while_traced
from .window_sizes import Numbers, global_numbers, of_heads

MAX_ROWS = {"cpu": 4096, "cuda": 2048}
"""Block rows that an index of short windows has, where larger blocks can cover the tokens with fewer."""


@dataclass(frozen=True, eq=False)
class WindowIndex(OnDevice):
    """The index that `window_attention` walks: built once for a length and a window, by `build`; immutable.

    Any stream may use it (see `ReadyEvent`). Kernels see tokens in an order of their own: first the global ones, then
    those whose dilated windows belong together, each in the order of the sequence. What a token sees are then the
    global tokens and one range of others. Without dilation, and with global tokens at the beginning or none, it is the
    sequence's own order.

    Letters: T tokens; L heads, 1 when all have the same window, else as many as were given.

    Attributes:
        tokens: T.
        causal: whether tokens see none after them.
        num_heads: heads the windows were given for; 1 means that any number of heads share them.
        blocks: the blocks with something live, of tokens in the kernels' order.
        limits: int32 (L, T, 2). The first token, and the one after the last, of each token's range; all for global.
        num_global: global tokens.
        order: int64 (L, T). The kernels' tokens as places in the sequence; None where that is their order.
        inverse: int64 (L, T). The sequence's tokens as places among the kernels'; None likewise.
        places: int32 (L, T). The order again, for causality to go by; None where it goes by the kernels' order.

    Examples:
        >>> import ds_sparse
        >>> index = ds_sparse.WindowIndex.build(100, window_size=8, global_tokens=[0], dilation=2)
        >>> index
        WindowIndex(100 tokens, any heads, 1 global, blocks of 16, cpu)
        >>> index.order[0, :6].tolist()
        [0, 2, 4, 6, 8, 10]
    """

    tokens: int
    causal: bool
    num_heads: int
    blocks: BlockIndex
    limits: Tensor
    num_global: int = 0
    order: Tensor | None = None
    inverse: Tensor | None = None
    places: Tensor | None = None

    @classmethod
    @outside_transforms_or_traced
    def build(
        cls, tokens: int, window_size: Numbers, causal: bool = False,
        global_tokens: Sequence[int] | Tensor | None = None, dilation: Numbers = 1, *, block: int | None = None,
        device: torch.device | str = "cpu", cu_seqlens: Tensor | None = None,
    ) -> WindowIndex:  # fmt: skip
        """Builds the index for sequences of so many tokens.

        Waits for the device, but not with `cu_seqlens` and without dilation: then it may be built in each step, in the
        capture of a CUDA graph, which repeats it with what `cu_seqlens` holds, and in a graph of torch.compile.

        Args:
            tokens: T, 1 or more.
            window_size, causal, global_tokens, dilation: as in `window_attention`.
            block: 8, 16, 32, 64 or 128 tokens on the side of the blocks that kernels walk; chosen by the window if it
                is not given.
            device: where the index is to be.
            cu_seqlens: int32 or int64 (documents + 1), ascending from 0 to T: windows end with their document. Without
                global tokens. Where it is on a GPU, and there is no dilation, nobody looks at what it holds (unless
                DS_SPARSE_CHECK_LAYOUTS=1 is set): if it does not ascend so, all that attention gives is NaN.

        Returns:
            The index, on the device.

        Raises:
            TypeError, ValueError: arguments of another type or value; numbers for different numbers of heads; global
                tokens beside documents.
            MemoryError: it is larger than the device's memory.
        """
        windows, dilations = of_heads("window_size", window_size, 0), of_heads("dilation", dilation, 1)
        num_heads = max(len(windows), len(dilations))
        if {len(windows), len(dilations)} - {1, num_heads}:
            raise ValueError(
                f"window_size has {len(windows)} numbers and dilation {len(dilations)}; give each one number, or one a "
                "head."
            )
        if isinstance(tokens, bool) or not isinstance(tokens, Integral) or tokens < 1:
            raise ValueError(f"tokens is {tokens!r}; it has to be an integer of 1 or more, the length of the sequence.")
        if block not in (None, *BLOCK_SIZES):
            raise ValueError(f"block is {block!r}; windows take {listed(BLOCK_SIZES, 'and')}.")
        tokens, global_tokens = int(tokens), global_numbers(global_tokens, tokens)
        if block is None:
            block = fitting_block(tokens, max(windows), torch.device(device).type)
        need = num_heads * (8 * tokens + (-(-tokens // block)) ** 2)
        refuse_too_large(
            lambda: f"An index of {tokens} tokens in blocks of {block}",
            need,
            torch.device(device),
            "take shorter sequences",
        )
        if cu_seqlens is not None and global_tokens:
            raise ValueError(
                "Both cu_seqlens and global_tokens are given, and global tokens see all documents; leave one out, or "
                "use a layout with global blocks, which each document has of its own."
            )
        if cu_seqlens is None or max(dilations) > 1:
            instead = "build it before, or give cu_seqlens and no dilation."
            refuse_traced("The index of a window cannot be built", instead)
        # No window reaches further than the sequence, and no product overflows.
        windows, dilations = ([min(n, tokens) for n in numbers] for numbers in (windows, dilations))
        if all(number == numbers[0] for numbers in (windows, dilations) for number in numbers):
            windows, dilations = windows[:1], dilations[:1]
        if not global_tokens and max(dilations) == 1:
            edges = torch.tensor([0, tokens], device="cpu") if cu_seqlens is None else cu_seqlens
            borders = Borders.of(edges, tokens, torch.device(device))
            ranges = [borders.in_blocks(block, window) for window in windows]
            bits = torch.cat([ops.index_bits_of_documents(None, x, False, causal) for _, x, _ in ranges])
            rows, heads = bits.shape[1], len(bits)
            if cu_seqlens is None:
                blocks = BlockIndex._of_bits(bits, rows, block, heads)
            else:
                sides = 1 if causal else 2
                of_line = [sides * -(-window // block) + 1 for window in windows]
                capacity = rows * sum(least_of(rows, most) for most in of_line)
                blocks = BlockIndex._bounded(bits, rows, block, heads, 1, capacity, causal, ranges[0][-1], max(of_line))
                blocks = blocks if is_in_graph(bits) else blocks.with_tiles()
            return cls(tokens, causal, num_heads, blocks, borders.limits(windows))
        documents = Documents((0, tokens)) if cu_seqlens is None else Documents.read(cu_seqlens).check_fills(tokens)
        layout_heads = max(len(windows), len(dilations))
        window, dilation = (
            torch.tensor(numbers, device=device).expand(layout_heads)[:, None] for numbers in (windows, dilations)
        )

        # Ascending by these numbers, tokens are in the kernels' order: the sequence's among global ones, and among
        # those whose places leave the same rest.
        place = torch.arange(tokens, device=device)
        is_global = torch.zeros(tokens, dtype=torch.bool, device=device)
        is_global[list(global_tokens)] = True
        start = place % dilation * tokens
        numbers, order = torch.where(is_global, place - tokens, start + place).sort(1)
        start, reach = start.gather(1, order), window * dilation
        earliest, after = documents.of_tokens(device)[order].unbind(-1)
        first = torch.searchsorted(numbers, start + (order - reach).maximum(earliest))
        end = torch.searchsorted(numbers, start + (order + reach).minimum(after - 1), right=True)
        limits = torch.stack([first, end], 2)
        limits[:, : len(global_tokens)] = torch.tensor([0, tokens], device=device)

        blocks = BlockIndex.build(_live_blocks(limits, order, len(global_tokens), causal, block), block)
        given = tokens, causal, num_heads, blocks, limits.int(), len(global_tokens)
        if bool((order == place).all()):
            return cls(*given)
        return cls(*given, order, order.argsort(1), order.int() if causal else None)

    def __repr__(self) -> str:
        heads = "any heads" if self.num_heads == 1 else f"{self.num_heads} heads"
        parts = [f"{self.tokens} tokens", heads, f"{self.num_global} global"]
        parts += ["causal"] if self.causal else []
        return f"WindowIndex({', '.join(parts)}, blocks of {self.blocks.block}, {self.device})"

    def rows_to_draw(self) -> tuple[LayoutRows, int]:
        """The pairs of tokens in the sequence's order, or where there are many, and it is the kernels' too, the blocks
        that hold them; waits for the device."""
        if self.inverse is None and len(self.limits) * self.tokens**2 > MOST_DRAWN:
            return self.blocks.rows_to_draw()
        limits, places = self.ready().limits.cpu(), torch.arange(self.tokens)
        inverse = places[None] if self.inverse is None else self.inverse.cpu()

        def of_head(head: int) -> RowMaker:
            order = inverse[head if len(inverse) > 1 else 0]

            def make(rows: range) -> Tensor:
                queries = places[rows.start : rows.stop]
                first, after = limits[head, order[queries], :, None].unbind(1)
                live = ((order >= first) & (order < after)) | (order < self.num_global)
                return live & (places <= queries[:, None]) if self.causal else live

            return make

        return LayoutRows(len(limits), self.tokens, self.tokens, of_head), 1

    @property
    def device(self) -> torch.device:
        """Where the index is."""
        return self.limits.device


@outside_transforms_or_traced
def index_of_row(
    layout: Tensor | BlockIndex, cu_seqlens: Tensor, block: int | None, tokens: int, causal: bool, device: torch.device
) -> WindowIndex:
    """Index of the blocks of a row's layout in which a document sees itself, with the range of its document for each
    token. The layout, as of `PackedIndex.build`, has the row's blocks or more, of which the top-left ones count. Waits
    for nothing but, once, the layout's number of live blocks; `cu_seqlens` on a GPU as of `WindowIndex.build`. Raises
    TypeError or ValueError for what does not fit."""
    borders = Borders.of(cu_seqlens, tokens, device)
    of_row = index_of_square(layout, block, tokens, "a row").ready()
    _, ranges, lost = borders.in_blocks(of_row.block, tokens)
    bits = ops.index_bits_of_documents(sent_to(of_row.bits, device), ranges, False, causal)
    capacity = most_live(of_row, len(ranges))[int(causal)]
    blocks = BlockIndex._bounded(bits, len(ranges), of_row.block, of_row.num_heads, 1, capacity, causal, lost)
    blocks = blocks if is_in_graph(bits) else blocks.with_tiles()
    return WindowIndex(tokens, causal, of_row.num_heads, blocks, borders.limits([tokens]))


def fitting_block(tokens: int, window: int, device_type: str) -> int:
    """The side of the blocks that cover a window in the least time, as measured on CPUs with and without AMX and on an
    H200; larger ones for long sequences, as the index is built from all of tokens / block squared."""
    if device_type == "cuda":
        least, rows = 32 if window < 32 else 64, MAX_ROWS["cuda"]
    else:
        long = 64 if _has_amx() else 192
        least, rows = 16 if window < long else 32, MAX_ROWS["cpu"]
    return next((block for block in BLOCK_SIZES if block >= least and tokens <= rows * block), BLOCK_SIZES[-1])


@while_traced
def _has_amx() -> bool:
    return instruction_set() == "amx_bf16"


def _live_blocks(limits: Tensor, places: Tensor, num_global: int, causal: bool, block: int) -> Tensor:
    """bool (L, R, R): the blocks in which something may be live. Ranges of neighbours touch: each has its own token."""

    def in_blocks(x: Tensor, filled_with: int) -> Tensor:
        return pad(x, (0, -x.shape[1] % block), value=filled_with).unflatten(1, (-1, block))

    tokens = limits.shape[1]
    first = in_blocks(limits[..., 0], tokens).amin(2) // block
    last = (in_blocks(limits[..., 1], 0).amax(2) - 1) // block
    number = torch.arange(first.shape[1], device=limits.device)
    live = (number >= first[..., None]) & (number <= last[..., None]) | (number * block < num_global)
    if causal:
        live &= in_blocks(places, tokens).amin(2)[:, None] <= in_blocks(places, -1).amax(2)[..., None]
    return live
