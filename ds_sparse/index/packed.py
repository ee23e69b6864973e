"""PackedIndex: what attention over packed documents walks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..dispatch import tile_heights
from ..memory import refuse_too_large
from .block import SIDES, BlockIndex
from .documents import Documents, index_of_square
from .on_device import OnDevice
from .packing import block_of
from .transforms import outside_transforms


@dataclass(frozen=True, eq=False)
class PackedIndex(OnDevice):
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

    @classmethod
    @outside_transforms
    def build(
        cls,
        layout: torch.Tensor | BlockIndex,
        cu_seqlens: torch.Tensor,
        block: int | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> PackedIndex:
        """Builds the index of a batch.

        Waits for the device twice, however many documents there are, and once more for a layout that is no `BlockIndex`
        and not on the CPU.

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
            ValueError: a layout that is smaller than a document, or not square; no block, or another than that of the
                `BlockIndex`; `cu_seqlens` that does not ascend from 0, or ends with 0.
            MemoryError: it is larger than the device's memory.
        """
        documents = Documents.read(cu_seqlens)
        tokens = documents.tokens
        of_one = index_of_square(layout, block, max(documents.lengths), "the longest document")
        block, device = of_one.block, torch.device(of_one.device if device is None else device)

        # A block's document, its number there, and its tokens: small, so made on the host.
        lengths = torch.tensor(documents.lengths)
        counts = -(-lengths // block)
        document = torch.arange(len(lengths)).repeat_interleave(counts)
        before = counts.cumsum(0) - counts
        number = torch.arange(len(document)) - before[document]
        first = torch.tensor(documents.edges[:-1])[document] + number * block
        size = (lengths[document] - number * block).clamp(max=block)
        refuse_too_large(
            f"An index of packed documents of {tokens} tokens in blocks of {block}",
            3 * of_one.layout_heads * len(document) ** 2,
            device,
            "use larger blocks, or pack fewer documents in a row",
        )
        document, number, first, size = torch.stack([document, number, first, size]).to(device)

        live = of_one.layout().to(device).index_select(1, number).index_select(2, number)
        live &= document[:, None] == document
        place = torch.arange(block, device=device)
        exists = place < size[:, None]
        tokens_of = torch.where(exists, first[:, None] + place, 0).flatten()
        # What stands in for tokens that do not exist is written behind the last.
        aligned = torch.empty(tokens + 1, dtype=torch.int64, device=device)
        numbers = torch.arange(len(tokens_of), device=device)
        aligned[torch.where(exists.flatten(), tokens_of, tokens)] = numbers
        return cls(
            tokens=tokens,
            documents=len(lengths),
            blocks=BlockIndex.build(live, block).for_heads(of_one.num_heads),
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

    def prepared(self, causal: bool = False) -> PackedIndex:
        """All is made that attention and its gradients walk: what is compiled or captured later cannot make it.

        Args:
            causal: of the attention.

        Returns:
            The index itself.
        """
        blocks = self.causal_blocks(causal)
        for tile in tile_heights("block_sparse_attention", self.device, self.block):
            for side in SIDES:
                blocks.tiles(side, tile)
                self.tile_spans(side, tile, causal)
        return self

    def causal_blocks(self, causal: bool) -> BlockIndex:
        """The blocks; with `causal` without those above the diagonal, cut at the first call."""
        if causal and not self.blocks.has_causal:
            self._refuse_parts(causal)
        return self.blocks.causal() if causal else self.blocks

    def _refuse_parts(self, causal: bool) -> None:
        instead = f"pass index.prepared({'causal=True' if causal else ''})."
        self._refuse_to_make("What is missing of a PackedIndex cannot be made", instead)

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
            self._refuse_parts(causal)
            self._made[key] = self._make_tile_spans(*key)
            self._ready.record()
        self._ready.wait(self._tensors)
        return self._made[key]

    @outside_transforms
    def _make_tile_spans(self, side: str, tile: int, causal: bool) -> torch.Tensor:
        tiles = self.causal_blocks(causal).tiles(side, tile)
        of_lines = self.spans.index_select(0, tiles.lines.clamp(min=0)) * (tiles.lines >= 0)[:, None]
        return torch.cat([of_lines, self.spans.index_select(0, block_of(tiles.entries))])
