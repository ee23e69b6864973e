"""PackedIndex: what attention over packed documents walks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .block import BlockIndex
from .documents import Documents, square_layout
from .lasting import lasting
from .packing import block_of
from .ready_event import ReadyEvent


@dataclass(frozen=True, eq=False)
class PackedIndex:
    """What `block_sparse_attention` walks for documents packed in one row, each with the layout from its own start.

    Built once for a batch, by `build`, and used by all layers; immutable. Any stream may use it (see `ReadyEvent`).

    Its block rows and columns are the documents' own, one document's after the other's: the first block of a document
    begins with its first token, and its last block may be short. An *aligned* number of a token counts as if short
    blocks were filled: the block's number times `block`, and the token's place in the block.

    Letters: T tokens of the row, N blocks of all documents.

    Attributes:
        tokens: T.
        documents: how many there are.
        blocks: the layout of all N blocks: each document's on the diagonal, nothing elsewhere.
        spans: int32 (N, 2). Each block's first token, and its number of tokens.
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
    blocks: BlockIndex
    spans: torch.Tensor
    aligned: torch.Tensor
    tokens_of: torch.Tensor
    exists: torch.Tensor
    _made: dict[tuple[str, int, bool], torch.Tensor] = field(init=False, default_factory=dict)
    _ready: ReadyEvent = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "_ready", ReadyEvent(self.device))

    @classmethod
    @lasting
    def build(
        cls,
        layout: torch.Tensor | BlockIndex,
        cu_seqlens: torch.Tensor,
        block: int | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> PackedIndex:
        """Builds the index of a batch; waits for the device twice, however many documents there are.

        Args:
            layout: bool, or 0 and 1 as numbers, (R, R) or (H or 1, R, R), for the longest document or more: one of l
                tokens uses its top-left ceil(l / block) blocks; or a `BlockIndex` of such a layout.
            cu_seqlens: int32 or int64 (documents + 1), ascending from 0 to the row's tokens, as FlashAttention has it.
            block: tokens on a block's side; that of the `BlockIndex` if one is given.
            device: where the index is to be; that of the layout if it is not given.

        Returns:
            The index, on the device.

        Raises:
            TypeError: arguments of other types.
            ValueError: a layout that is smaller than a document, or not square; no block; `cu_seqlens` that does not
                ascend from 0, or ends with 0.
        """
        documents = Documents.read(cu_seqlens)
        tokens = documents.tokens
        layout, block = square_layout(layout, block, max(documents.lengths), "the longest document", device)

        # A block's document, its number there, and its tokens: small, so made on the host.
        lengths = torch.tensor(documents.lengths)
        counts = -(-lengths // block)
        document = torch.arange(len(lengths)).repeat_interleave(counts)
        before = counts.cumsum(0) - counts
        number = torch.arange(len(document)) - before[document]
        first = torch.tensor(documents.edges[:-1])[document] + number * block
        size = (lengths[document] - number * block).clamp(max=block)
        document, number, first, size = torch.stack([document, number, first, size]).to(layout.device)

        live = layout.index_select(1, number).index_select(2, number)
        live = live.bool() & (document[:, None] == document)
        place = torch.arange(block, device=layout.device)
        exists = place < size[:, None]
        tokens_of = torch.where(exists, first[:, None] + place, 0).flatten()
        # What stands in for tokens that do not exist is written behind the last.
        aligned = torch.empty(tokens + 1, dtype=torch.int64, device=layout.device)
        numbers = torch.arange(len(tokens_of), device=layout.device)
        aligned[torch.where(exists.flatten(), tokens_of, tokens)] = numbers
        return cls(
            tokens=tokens,
            documents=len(lengths),
            blocks=BlockIndex.build(live, block),
            spans=torch.stack([first, size], 1).int(),
            aligned=aligned[:tokens].clone(),
            tokens_of=tokens_of,
            exists=exists.reshape(1, -1),
        )

    def __repr__(self) -> str:
        blocks = self.blocks
        share = blocks.live_blocks / (blocks.layout_heads * blocks.rows * blocks.columns)
        return (
            f"PackedIndex({self.documents} documents of {self.tokens} tokens together, {blocks.rows} blocks of "
            f"{blocks.block}, density {share:.1%}, {self.device})"
        )

    @property
    def device(self) -> torch.device:
        """Where the index is."""
        return self.spans.device

    @property
    def block(self) -> int:
        """Tokens on a block's side."""
        return self.blocks.block

    def causal_blocks(self, causal: bool) -> BlockIndex:
        """The blocks; with `causal` without those above the diagonal."""
        return self.blocks.causal() if causal else self.blocks

    def tile_spans(self, side: str, tile: int, causal: bool) -> torch.Tensor:
        """The spans of the blocks that tiles' lines and entries are, made at the first call.

        Args:
            side, tile: of the tiles, as `BlockIndex.tiles` has them.
            causal: of `causal_blocks`.

        Returns:
            int32 (lines + E, 2), those of lines first, zeros where a tile is not filled: for kernels, which would have
            to wait for a block's number before they could look its span up.
        """
        key = side, tile, causal
        if key not in self._made:
            self._made[key] = self._make_tile_spans(*key)
            self._ready.record()
        self._ready.wait(self._tensors)
        return self._made[key]

    @lasting
    def _make_tile_spans(self, side: str, tile: int, causal: bool) -> torch.Tensor:
        tiles = self.causal_blocks(causal).tiles(side, tile)
        of_lines = self.spans.index_select(0, tiles.lines.clamp(min=0)) * (tiles.lines >= 0)[:, None]
        return torch.cat([of_lines, self.spans.index_select(0, block_of(tiles.entries))])

    def ready(self) -> PackedIndex:
        """The index itself, for what the current stream does next."""
        self._ready.wait(self._tensors)
        return self

    def to(self, device: torch.device | str) -> PackedIndex:
        """The same index on another device.

        Args:
            device: where it is to be.

        Returns:
            The index there; itself if it is there already.
        """
        device = torch.device(device)
        return self if self.device == device else self._copied(device)

    @lasting
    def _copied(self, device: torch.device) -> PackedIndex:
        self.ready()
        parts: dict[str, Any] = {name: x for name, x in vars(self).items() if isinstance(x, torch.Tensor | BlockIndex)}
        return replace(self, **{name: x.to(device) for name, x in parts.items()})

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from (x for x in vars(self).values() if isinstance(x, torch.Tensor))
        yield from tuple(self._made.values())

    def _held(self) -> Iterator[torch.Tensor]:
        yield from self._tensors()
        yield from self.blocks._held()
