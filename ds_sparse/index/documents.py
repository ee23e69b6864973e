"""Documents packed in one row: where each begins and ends, by `cu_seqlens`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from .block import BlockIndex, as_index
from .transforms import unwrap_functorch

DOCUMENT_LAYOUTS = ("own", "row")


def check_document_layout(document_layout: str) -> None:
    """Raises ValueError unless it is one of the two meanings that a layout, or token pairs, have for documents."""
    if document_layout not in DOCUMENT_LAYOUTS:
        raise ValueError(
            f"document_layout is {document_layout!r}; it has to be 'own', where each document has the layout from its "
            "own start, or 'row', where the row's layout ends at the borders of documents."
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
    def read(cls, cu_seqlens: torch.Tensor) -> Documents:
        """Those of `cu_seqlens` as FlashAttention has it; waits for its device.

        Args:
            cu_seqlens: int32 or int64 (documents + 1), ascending from 0 to the row's tokens.

        Raises:
            TypeError: it is no tensor of integers.
            ValueError: another shape, or numbers that do not ascend from 0; no token.
        """
        if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
            what = cu_seqlens.dtype if isinstance(cu_seqlens, torch.Tensor) else type(cu_seqlens).__name__
            raise TypeError(
                f"cu_seqlens is {what}; it has to be an int32 or int64 tensor with the sums of the documents' lengths: "
                "0, the first, the first two together, and so on."
            )
        if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
            raise ValueError(
                f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; it has to be (documents + 1), with one document at "
                "least."
            )
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

    @property
    def tokens(self) -> int:
        return self.edges[-1]

    @property
    def lengths(self) -> list[int]:
        return [end - first for first, end in pairwise(self.edges)]

    def of_tokens(self, device: torch.device | str) -> torch.Tensor:
        """int64 (T, 2): for each token where its document begins, and where it ends."""
        edges = torch.tensor(self.edges, device=device)
        lengths = edges.diff()
        both = torch.stack([edges[:-1], edges[1:]], 1)
        return both.repeat_interleave(lengths, 0, output_size=self.tokens)


def index_of_square(layout: torch.Tensor | BlockIndex, block: int | None, tokens: int, of: str) -> BlockIndex:
    """The index of a layout, or the one given, which may be larger than so many tokens `of` something need.

    Raises:
        TypeError: a layout of another type or dtype.
        ValueError: no block, one that is none, or another than that of the index; a layout that is not square, or has
            too few blocks.
    """
    if isinstance(layout, BlockIndex):
        block = layout.block if block is None else block
    if block is None:
        raise ValueError("A layout is given without its block; pass block, as the layout may be larger than needed.")
    index = as_index(layout, block)
    wanted = -(-tokens // index.block)
    if index.rows != index.columns or index.rows < wanted:
        raise ValueError(
            f"The layout has {index.rows} x {index.columns} blocks of {index.block}; for {of} of {tokens} tokens it "
            f"has to be square and have {wanted} x {wanted} blocks or more."
        )
    return index
