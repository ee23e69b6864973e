"""Documents packed in one row, of which none sees another: where each lies, what attention over them walks, and their
token pairs and masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .._ops import ops
from ..dispatch import HOPPER_TILE, tile_heights
from ..layout import LayoutRows, unpack_bits
from ..tools.memory import refuse_too_large
from .block import BlockIndex, as_index, check_integers
from .build import TilePlan
from .cache import COMPARED_ON_GPU, Refusal, is_in_graph, refuse_captured, refuse_traced
from .on_device import OnDevice
from .tiles import SIDES, Tiles
from .transforms import least_of, outside_transforms_or_traced, unwrap_functorch

_UNREAD = (
    "cu_seqlens is on a GPU, and cannot be read while a CUDA graph is captured; give it on the CPU, or, to "
    "PackedIndex.build, tokens."
)


def check_document_layout(document_layout: str) -> None:
    """Raises ValueError unless it is one of the two meanings that a layout, or token pairs, have for documents."""
    if document_layout not in ("own", "row"):
        raise ValueError(
            f"document_layout is {document_layout!r}; it has to be 'own', where each document has the layout from its "
            "own start, or 'row', where the row's layout ends at the borders of documents."
        )


def sent_to(x: Tensor, device: torch.device) -> Tensor:
    """x on a device; from the CPU to a GPU nobody waits. Raises RuntimeError where a CUDA graph, which is being
    captured, would repeat the copy from memory of the host that is gone by then."""
    if x.is_cpu:
        refuse_captured(
            device,
            "The index of packed documents is built while a CUDA graph is captured, and what it is made of is on the "
            "CPU; give cu_seqlens and the layout on the GPU.",
        )
    if x.is_cpu and device.type == "cuda" and not torch.compiler.is_compiling():
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def check_form(cu_seqlens: Tensor) -> None:
    """Raises TypeError or ValueError unless it is an int32 or int64 tensor (documents + 1)."""
    sums = "the sums of the documents' lengths: 0, the first, the first two together, and so on"
    check_integers("cu_seqlens", cu_seqlens, sums)
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; it has to be (documents + 1), with one document at least."
        )


@dataclass(frozen=True)
class Documents:
    """The documents of a row, read to the host once.

    Attributes:
        edges: where each begins, and the row's end: ascending from 0 to the row's tokens. Equal neighbours are a
            document without tokens.
    """

    edges: tuple[int, ...]

    @classmethod
    def read(cls, cu_seqlens: Tensor, if_captured: str = _UNREAD) -> Documents:
        """Reads `cu_seqlens`, int32 or int64 (documents + 1), ascending from 0 to the row's tokens, as FlashAttention
        has it; waits for its device. Raises TypeError or ValueError for anything else, RuntimeError with the sentence
        `if_captured` in the capture of a CUDA graph."""
        check_form(cu_seqlens)
        refuse_captured(cu_seqlens.device, if_captured)
        edges = unwrap_functorch("cu_seqlens", cu_seqlens).tolist()
        if edges[0] != 0 or edges[-1] < 1:
            raise ValueError(
                f"cu_seqlens goes from {edges[0]} to {edges[-1]}; it has to begin with 0 and end with the number of "
                "all tokens, one at least."
            )
        for number, (first, end) in enumerate(pairwise(edges)):
            if first > end:
                raise ValueError(
                    f"cu_seqlens falls from {first} to {end} at document {number}; its numbers have to ascend."
                )
        return cls(tuple(edges))

    def check_fills(self, tokens: int) -> Documents:
        """The documents themselves. Raises ValueError unless they have so many tokens together."""
        if self.tokens != tokens:
            raise ValueError(
                f"The documents of cu_seqlens end at {self.tokens}, and query has {tokens} tokens; the last number of "
                "cu_seqlens has to be the number of tokens."
            )
        return self

    def check_covered(self, what: str, queries: int, keys: int, document_layout: str) -> None:
        """Raises ValueError unless there are as many queries and keys as documents need, or more."""
        of, wanted = "the longest document", max(self.lengths)
        if document_layout == "row":
            of, wanted = "the row", self.tokens
        if min(queries, keys) < wanted:
            raise ValueError(
                f"{what} for {queries} query and {keys} key tokens, and {of} has {wanted}; it takes as many of both, "
                "or more."
            )

    @property
    def tokens(self) -> int:
        return self.edges[-1]

    @property
    def lengths(self) -> list[int]:
        return [end - first for first, end in pairwise(self.edges)]

    def counts(self, block: int) -> list[int]:
        """The blocks of each, the last of which may be short."""
        return [-(-length // block) for length in self.lengths]

    def of_tokens(self, device: torch.device | str) -> Tensor:
        """Begin and end of each token's document, int64 (T, 2)."""
        edges = sent_to(torch.tensor(self.edges, dtype=torch.int32), torch.device(device))
        return ops.index_limits(edges, edges[-1:], self.tokens)[0].long()


@dataclass(frozen=True, eq=False)
class Borders:
    """The documents of a row on the device where an index is made of them.

    Attributes:
        edges: int32 (documents + 1), where each begins, and the row's end.
        tokens: those of the row.
        known: what the host has read of them. None: nobody has, and where they are not as `Documents.read` wants them
            all that attention gives is NaN.
    """

    edges: Tensor
    tokens: int
    known: Documents | None

    @classmethod
    def of(cls, cu_seqlens: Tensor, tokens: int | None, device: torch.device, reads_cpu: bool = True) -> Borders:
        """Reads `cu_seqlens` where `tokens`, those of the row, is None; outside of graphs also if `reads_cpu`, where it
        is on the CPU, and with DS_SPARSE_CHECK_LAYOUTS=1. Raises TypeError or ValueError for what it sees to be wrong,
        RuntimeError where a graph gives no tokens."""
        check_form(cu_seqlens)
        known, is_read = None, COMPARED_ON_GPU or (reads_cpu and cu_seqlens.is_cpu)
        if tokens is None or (is_read and not is_in_graph(cu_seqlens)):
            refuse_traced("cu_seqlens cannot be read", "give tokens.")
            known = Documents.read(cu_seqlens)
            tokens = known.tokens if tokens is None else known.check_fills(tokens).tokens
        edges = unwrap_functorch("cu_seqlens", cu_seqlens)
        if edges.dtype == torch.int64:  # int32 has no numbers beyond these, which are as wrong
            edges = edges.clamp(-1, 2**31 - 1)
        return cls(sent_to(edges.int().contiguous(), device), tokens, known)

    def blocks(self, block: int) -> int:
        """The blocks of the documents, the last of each perhaps short; at most as many, where nobody has read them."""
        if self.known is not None:
            return sum(self.known.counts(block))
        documents = min(len(self.edges) - 1, self.tokens)  # others have no tokens
        return (self.tokens + documents * (block - 1)) // block

    def in_blocks(self, block: int, most: int, own: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """Blocks of the row, whose tokens see a document as far as `most`, or (`own`) of documents that have up to
        `most` blocks: their first tokens and numbers of tokens, int32 (N, 2); the first block, and the one after the
        last, of which they see some, int32 (N, 2); and what `TilePlan.fill` takes as lost."""
        blocks = self.blocks(block) if own else -(-self.tokens // block)
        (spans, ranges), lost = ops.index_documents(self.edges, self.tokens, blocks, block, own, most)
        return spans, ranges, None if self.known else lost

    def limits(self, windows: Sequence[int]) -> Tensor:
        """The first token, and the one after the last, that are in each token's document and at most windows[l] away,
        int32 (L, T, 2)."""
        # Written on the device: a graph would repeat a copy from memory of the host, which is gone by then.
        of_heads = [torch.full((1,), window, dtype=torch.int32, device=self.edges.device) for window in windows]
        return ops.index_limits(self.edges, torch.cat(of_heads), self.tokens)


def places_of(spans: Tensor, block: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """The aligned number of each token of a row, int64 (T); the token of each aligned number, int64 (N * block), 0
    where there is none; and whether there is one, bool (1, N * block). spans: of the documents' own blocks."""
    first, size = spans.long().unsqueeze(-1).unbind(1)
    place = torch.arange(block, device=spans.device)
    exists = place < size
    tokens_of = torch.where(exists, first + place, 0).flatten()
    # What stands in for tokens that do not exist is written behind the last.
    aligned = torch.empty(tokens + 1, dtype=torch.int64, device=spans.device)
    numbers = torch.arange(len(tokens_of), device=spans.device)
    aligned[torch.where(exists.flatten(), tokens_of, tokens)] = numbers
    return aligned[:tokens].clone(), tokens_of, exists.reshape(1, -1)


def index_of_square(layout: Tensor | BlockIndex, block: int | None, tokens: int, of: str) -> BlockIndex:
    """Index of a square layout, or the one given, of at least so many tokens `of` something. Raises TypeError or
    ValueError for a layout of another form, and where the block is missing or another."""
    if isinstance(layout, BlockIndex):
        block = layout.block if block is None else block
    if block is None:
        raise ValueError("A layout is given without its block; pass block, as the layout may be larger than needed.")
    index = as_index(layout, block).for_all_sequences("Packed documents are")
    wanted = -(-tokens // index.block)
    if index.rows != index.columns or index.rows < wanted:
        raise ValueError(
            f"The layout has {index.rows} x {index.columns} blocks of {index.block}; for {of} of {tokens} tokens it "
            f"has to be square and have {wanted} x {wanted} blocks or more."
        )
    return index


@dataclass(frozen=True, eq=False)
class PackedIndex(OnDevice):
    """The index of documents packed in one row, each with the layout from its own start.

    Built once for a batch, by `build`, and used by all layers; immutable. Any stream may use it (see `ReadyEvent`).

    Its block rows and columns are the documents' own, one document's after the other's: the first block of a document
    begins with its first token, and its last block may be short. An *aligned* number of a token counts as if short
    blocks were filled: the block's number times `block`, and the token's place in the block.

    Kernels that read documents where they lie walk its `tiles`, which are made without waiting for the device; all
    others walk its `blocks`, made at first use, as everything is but for the attributes up to `spans`.

    A *bounded* index, which `tokens` gives, waits for no device: sizes follow from shapes. It may be built in each
    step, in the capture of a CUDA graph, which then repeats it with what `cu_seqlens` holds, and in a graph of
    torch.compile. Blocks beyond those of the documents have no tokens.

    Letters: T tokens of the row, N blocks of all documents, L layout heads of the `BlockIndex` of the layout.

    Attributes:
        tokens: T.
        documents: how many there are.
        block: tokens on a block's side.
        num_heads: heads of the layout as given; 1 means that any number of heads share it.
        capacity: live blocks of all documents, of L heads together, and those of them that are not above the diagonal;
            of a bounded index so many at most, whatever the documents are.
        layout_bits: uint8 (L, R, 4 * ceil(R / 32)). The layout, as `BlockIndex.bits`.
        ranges: int32 (N, 2). The first block of each block's document, and the one after its last.
        spans: int32 (N, 2). Each block's first token, and its number of tokens.
        lost: int32 (1), of a bounded index: 1 where `cu_seqlens` was not as `build` wants it. Then all is NaN.
        blocks: the layout of all N blocks: each document's on the diagonal, nothing elsewhere.
        aligned: int64 (T). The aligned number of each token.
        tokens_of: int64 (N * block). The token of each aligned number, 0 where there is none.
        exists: bool (1, N * block). Whether there is one.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> layout = ds_sparse.BSLongformerSparsityConfig(num_heads=4, block=16).make_layout(128)
        >>> index = ds_sparse.PackedIndex.build(layout, torch.tensor([0, 100, 130, 200]), block=16)
        >>> index
        PackedIndex(3 documents of 200 tokens together, 14 blocks of 16, density 26.5%, cpu)
        >>> index.spans[6:9].tolist()
        [[96, 4], [100, 16], [116, 14]]
    """

    tokens: int
    documents: int
    block: int
    num_heads: int
    capacity: tuple[int, int]
    layout_bits: Tensor
    ranges: Tensor
    spans: Tensor
    lost: Tensor | None = None
    _made: dict[Any, Any] = field(init=False, default_factory=dict)

    @classmethod
    @outside_transforms_or_traced
    def build(
        cls, layout: Tensor | BlockIndex, cu_seqlens: Tensor, block: int | None = None, *,
        tokens: int | None = None, device: torch.device | str | None = None,
    ) -> PackedIndex:  # fmt: skip
        """Builds the index of a batch.

        Waits for `cu_seqlens`, where it is on a GPU and `tokens` is not given; and once for each layout, to count its
        live blocks: give its `BlockIndex`, which keeps their numbers. A graph counts none, and has space for all.

        Args:
            layout: bool, or 0 and 1 as numbers, (R, R) or (H or 1, R, R), for the longest document or more: one of l
                tokens uses its top-left ceil(l / block) blocks; or a `BlockIndex` of such a layout.
            cu_seqlens: int32 or int64 (documents + 1), ascending from 0 to the row's tokens, as FlashAttention has it.
            block: tokens on a block's side; that of the `BlockIndex` if one is given.
            tokens: T, for a bounded index where `cu_seqlens` is on a GPU or traced. What it holds is not looked at
                (unless DS_SPARSE_CHECK_LAYOUTS=1 is set): where it does not ascend from 0 to T, or the layout is
                smaller than a document, all that attention gives is NaN, and reading `live_blocks` raises.
            device: where the index is to be; that of the layout if it is not given.

        Returns:
            The index, on the device.

        Raises:
            TypeError: arguments of other types.
            ValueError: a layout that is smaller than a document, or not square; no block, or another than that of the
                `BlockIndex`; `cu_seqlens` that does not ascend from 0, or ends with 0; `2**31` live blocks or more.
            RuntimeError: a graph that gives no tokens; on the CPU, with `tokens`, documents that do not fit.
            MemoryError: it is larger than the device's memory.
        """
        if isinstance(tokens, bool) or not (tokens is None or (isinstance(tokens, int) and tokens > 0)):
            raise ValueError(f"tokens is {tokens!r}; it has to be an integer of 1 or more, the tokens of the row.")
        on = torch.device(getattr(layout, "device", "cpu") if device is None else device)
        borders = Borders.of(cu_seqlens, tokens, on, reads_cpu=False)
        longest = 1 if borders.known is None else max(borders.known.lengths)
        of_one = index_of_square(layout, block, longest, "the longest document").ready()
        blocks, block = borders.blocks(of_one.block), of_one.block
        refuse_too_large(
            lambda: f"An index of packed documents of {borders.tokens} tokens in blocks of {block}",
            of_one.layout_heads * blocks**2 // 8,
            on,
            "use larger blocks, or pack fewer documents in a row",
        )
        if borders.known is None:
            capacity = most_live(of_one, blocks, least_of(of_one.rows, -(-borders.tokens // block)))
        else:
            of_all, not_ahead = live_squares(of_one)[:2]
            counts = borders.known.counts(block)
            capacity = sum(of_all[n] for n in counts), sum(not_ahead[n] for n in counts)
        if capacity[0] >= 2**31:
            raise ValueError(
                f"The layout has {'up to ' * (borders.known is None)}{capacity[0]} live blocks for such documents; the "
                "index holds fewer than 2**31. Use a larger block."
            )
        spans, ranges, lost = borders.in_blocks(block, of_one.rows, own=True)
        bits = sent_to(of_one.bits, on)
        return cls(borders.tokens, len(cu_seqlens) - 1, block, of_one.num_heads, capacity, bits, ranges, spans, lost)

    def __repr__(self) -> str:
        share = self.capacity[0] / (len(self.layout_bits) * len(self.spans) ** 2)
        most, density = ("at most ", "up to ") if self.bounded else ("", "")
        return (
            f"PackedIndex({self.documents} documents of {self.tokens} tokens together, {most}{len(self.spans)} blocks "
            f"of {self.block}, density {density}{share:.1%}, {self.device})"
        )

    @property
    def bounded(self) -> bool:
        """Whether its sizes are bounded, and not exact."""
        return self.lost is not None

    @property
    def live_blocks(self) -> tuple[int, int]:
        """Those of all documents, of L heads together; and those of them that are not above the diagonal. A bounded
        index counts them when it is first asked, which waits for the device.

        Raises:
            ValueError: `cu_seqlens` was not as `build` wants it.
        """
        if not self.bounded:
            return self.capacity
        return self.blocks.live_blocks, self.causal_blocks(True).live_blocks

    @property
    def device(self) -> torch.device:
        """Where the index is."""
        return self.spans.device

    @property
    def layout_heads(self) -> int:
        """L."""
        return len(self.layout_bits)

    @property
    def blocks(self) -> BlockIndex:
        return self.causal_blocks(False)

    @property
    def aligned(self) -> Tensor:
        return self._places[0]

    @property
    def tokens_of(self) -> Tensor:
        return self._places[1]

    @property
    def exists(self) -> Tensor:
        return self._places[2]

    def prepared(self, causal: bool = False) -> PackedIndex:
        """All is made that attention and its gradients walk: what is compiled or captured later cannot make it.

        Args:
            causal: of the attention.

        Returns:
            The index itself.
        """
        self.causal_blocks(causal).with_tiles()
        _ = self._places
        if HOPPER_TILE in tile_heights("block_sparse_attention", self.device, self.block):
            self.tile_spans("rows", HOPPER_TILE, causal)
        return self

    def rows_to_draw(self) -> tuple[LayoutRows, int]:
        """The blocks of all documents, one after the other; waits for the device."""
        layout = unpack_bits(self.ready()._bits(False), len(self.spans))
        return LayoutRows.of(layout, None if self.num_heads == 1 else self.num_heads), self.block

    def causal_blocks(self, causal: bool) -> BlockIndex:
        """The blocks; with `causal` without those above the diagonal. Made at the first call, which synchronises once;
        not for a bounded index, whose blocks are bounded."""
        cut = self._cuts(causal)

        def make() -> BlockIndex:
            bits, size = self._bits(cut), (len(self.spans), self.block, self.num_heads)
            if self.lost is None:
                return BlockIndex._of_bits(bits, *size)
            return BlockIndex._bounded(bits, *size, 1, self.capacity[int(cut)], cut, self.lost)

        return self._once(("blocks", cut), make, self._instead(causal))

    def tiles(self, side: str, tile: int, causal: bool) -> Tiles:
        """The tiles of a side, without the blocks above the diagonal if `causal`; made at the first call, without
        waiting: operators take them as bounded.

        Args:
            side, tile: as of `BlockIndex.tiles`.
            causal: as of `causal_blocks`.
        """
        cut = self._cuts(causal)

        def make() -> dict[str, Tiles]:
            plan = TilePlan(self._bits(cut), len(self.spans), self.block, [tile], bounded=True)
            made = plan.fill(len(plan.bits), [self.capacity[int(cut)]], lost=self.lost)
            return {side: tiles for (side, _), tiles in made.items()}

        return self._once(("tiles", tile, cut), make, self._instead(causal))[side]

    def tile_spans(self, side: str, tile: int, causal: bool) -> Tensor:
        """The spans of the blocks that lines and entries of `tiles` are, made at the first call.

        Args:
            side, tile, causal: as of `tiles`.

        Returns:
            int32 (lines + E, 2), those of lines first, zeros where a tile is not filled: for kernels, which would have
            to wait for a block's number before they could look its span up.
        """
        cut = self._cuts(causal)

        def make() -> dict[str, Tensor]:
            both = {side: self.tiles(side, tile, cut) for side in SIDES}
            return {side: ops.index_tile_spans(self.spans, x.lines, x.entries) for side, x in both.items()}

        return self._once(("spans", tile, cut), make, self._instead(causal))[side]

    def _cuts(self, causal: bool) -> bool:
        """Tells if causality leaves blocks out."""
        of_all, not_ahead = self.capacity
        return causal and (self.bounded or not_ahead < of_all)

    def _instead(self, causal: bool) -> str | None:
        """How parts are made before a graph, which makes those of a bounded index alone that was built in it."""
        if self.bounded and not self._ready.is_recorded:
            return None
        return f"pass index.prepared({'causal=True' if causal else ''})."

    @property
    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._once("places", lambda: places_of(self.spans, self.block, self.tokens), self._instead(False))

    def _bits(self, cut: bool) -> Tensor:
        return ops.index_bits_of_documents(self.layout_bits, self.ranges, True, cut)


def live_squares(index: BlockIndex) -> tuple[list[int], ...]:
    """By n, the live blocks of the top-left n x n, of all stored heads together; those of them that are not above the
    diagonal; and of both the most for each block of n, of as many or fewer, rounded up. Counted at the first call,
    which waits for the device, and kept with the index."""

    def count() -> tuple[list[int], ...]:
        live = index.layout()
        in_rows, in_columns = live.tril().sum((0, 2)), live.triu(1).sum((0, 1))
        squares = torch.stack([in_rows + in_columns, in_rows]).cumsum(1)
        a_block = -(-squares // torch.arange(1, len(in_rows) + 1, device=squares.device))
        numbers = torch.cat([squares, a_block.cummax(1).values])
        return tuple([0, *of_n] for of_n in numbers.tolist())

    return index._once("squares", count, traced=False)


def most_live(index: BlockIndex, blocks: int, longest: int | None = None) -> tuple[int, int]:
    """The live blocks of the top-left so many; with `longest` the most of documents that have so many blocks together,
    up to `longest` each; and those of them that are not above the diagonal. A graph counts none, and has space for all
    blocks where they have not been counted before."""
    is_counted = "squares" in index._made
    if torch.compiler.is_compiling() or (not is_counted and is_in_graph(index.bits)):
        of_rows = index.layout_heads * blocks
        of_all = of_rows * (blocks if longest is None else longest)
        most = of_all, (of_all + of_rows) // 2
        if not is_counted:
            return most
        # A number that is looked up by the length would make the graph one of this length.
        _, _, a_block, not_ahead = live_squares(index)
        return least_of(most[0], blocks * a_block[-1]), least_of(most[1], blocks * not_ahead[-1])
    squares = live_squares(index)
    if longest is None:
        return squares[0][blocks], squares[1][blocks]
    return blocks * squares[2][longest], blocks * squares[3][longest]


def mask_of_documents(mask: Tensor, cu_seqlens: Tensor, document_layout: str, tokens: int) -> Tensor:
    """Mask of a row, (..., T, T), in which no document sees another. `mask` is that of one document ("own") or of the
    row ("row"), bool, or added, which has a gradient; (..., L, L) with as many tokens as these have, or more; a size of
    1 stands for all. Waits for the device of `cu_seqlens`. Raises TypeError or ValueError for what does not fit,
    RuntimeError under torch.compile and in the capture of a CUDA graph."""
    check_document_layout(document_layout)
    instead = "give the mask of the whole row, without cu_seqlens."
    Refusal("The mask of packed documents cannot be made", instead, instead).check(mask.device)
    documents = Documents.read(cu_seqlens).check_fills(tokens)
    mask = mask.reshape((1,) * (2 - mask.dim()) + mask.shape)
    queries, keys = (x if x > 1 else documents.tokens for x in mask.shape[-2:])
    documents.check_covered("The mask is", queries, keys, document_layout)
    first, _ = documents.of_tokens(mask.device).unbind(1)
    place = torch.arange(documents.tokens, device=mask.device)
    place = place - first if document_layout == "own" else place
    for dim in (-2, -1):
        if mask.shape[dim] > 1:
            mask = mask.index_select(dim, place)
    apart = first[:, None] != first
    return mask.masked_fill(apart, False if mask.dtype == torch.bool else float("-inf"))
