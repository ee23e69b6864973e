"""The grid of `ds_sparse bench packed`, as data: rows of documents, and what each document sees of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..layout import to_token_mask
from ..modules.structured_attention import whole_blocks
from .cases import BIGBIRD, STRUCTURES, WINDOW, in_k
from .documents import LONGEST, corpus_lengths, equal_lengths

OPTIONS: dict[str, dict[str, Any]] = {"bigbird": BIGBIRD, "longformer": WINDOW}

STEP = 64
"""Lengths that are tried for a batch without documents are multiples of it where there is no block."""


@dataclass(frozen=True)
class Case:
    """One line of the grid: a row of `tokens` tokens, filled with documents, H heads with D numbers each.

    Attributes:
        length: tokens of each document; None: lengths as real corpora have them, see `documents`.
        structure: of `OPTIONS`, from each document's own start; or "window".
        size: tokens on a block's side; of a window those that are seen on each side.
    """

    name: str
    length: int | None
    structure: str
    size: int
    causal: bool
    tokens: int
    heads: int
    head_dim: int

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document, the last of which ends with the row."""
        if self.length is None:
            return corpus_lengths(self.tokens)[0]
        return equal_lengths(self.tokens, self.length)

    @property
    def is_window(self) -> bool:
        return self.structure == "window"

    def layout(self) -> Tensor | None:
        """bool (1, R, R) on the CPU for the longest document that there may be, of which others use the top-left part;
        None for a window."""
        if self.is_window:
            return None
        longest = min(self.tokens, self.length or LONGEST)
        config = STRUCTURES[self.structure](num_heads=1, block=self.size, **OPTIONS[self.structure])
        return config.make_bool_layout(whole_blocks(longest, self.size))

    def mask(self, layout: Tensor | None, length: int, device: torch.device) -> Tensor:
        """bool (length, length): what each token of a document sees."""
        place = torch.arange(length, device=device)
        if layout is None:
            live = (place[:, None] - place).abs() <= self.size
        else:
            blocks = -(-length // self.size)
            live = to_token_mask(layout[:, :blocks, :blocks].to(device), self.size)[0, :length, :length]
        return live & (place[:, None] >= place) if self.causal else live

    def live_scores(self, layout: Tensor | None, lengths: Sequence[int]) -> int:
        """Scores of one head that documents of these lengths have together."""
        return sum(lengths.count(length) * self._live_scores_of(layout, length) for length in set(lengths))

    def _live_scores_of(self, layout: Tensor | None, length: int) -> int:
        if layout is None:
            reach = min(self.size, length - 1)
            earlier = reach * length - reach * (reach + 1) // 2
            return length + (1 if self.causal else 2) * earlier
        blocks = -(-length // self.size)
        sizes = torch.full((blocks,), self.size)
        sizes[-1] = length - (blocks - 1) * self.size
        pairs = sizes[:, None] * sizes
        if self.causal:
            pairs = pairs.tril(-1) + torch.diag(sizes * (sizes + 1) // 2)
        return int(pairs[layout[0, :blocks, :blocks].cpu()].sum())

    def unpacked(self, layout: Tensor | None) -> tuple[int, int]:
        """Sequences, and tokens of each, of the batch without documents that packed ones are compared with.

        Sequences are as long as the documents, where these are alike. Else they are as long, in whole blocks, as gives
        a token about as many scores as it has in the row.
        """
        if self.length is not None:
            tokens = min(self.length, self.tokens)
            return self.tokens // tokens, tokens
        wanted = self.live_scores(layout, self.lengths) / self.tokens
        step = STEP if layout is None else self.size
        longest = self.tokens if layout is None else min(self.tokens, layout.shape[1] * self.size)
        tried = range(step, longest + 1, step)
        tokens = min(tried, key=lambda length: abs(self._live_scores_of(layout, length) / length - wanted))
        return self.tokens // tokens, tokens

    def small(self, heads: int = 2, tokens: int = 4096) -> Case:
        """The case cut to so many heads and tokens: for a CPU. Its name says the tokens where they are fewer."""
        name = f"{self.name}{in_k(tokens)}" if tokens < self.tokens else self.name
        return replace(self, name=name, heads=min(self.heads, heads), tokens=min(self.tokens, tokens))


# fmt: off
TABLE = [
    #    name                     length structure     size causal T     H   D
    Case("bigbird-2048",          2048, "bigbird",     64, False, 32768, 12,  64),
    Case("bigbird-512",            512, "bigbird",     64, False, 32768, 12,  64),
    Case("bigbird-4093",          4093, "bigbird",     64, False, 32768, 12,  64),
    Case("bigbird-corpus",        None, "bigbird",     64, False, 32768, 12,  64),
    Case("longformer-corpus",     None, "longformer",  64, False, 32768, 12,  64),
    Case("window-2048",           2048, "window",      64, False, 32768, 12,  64),
    Case("window-corpus",         None, "window",      64, False, 32768, 12,  64),
    Case("bigbird-corpus-causal", None, "bigbird",     64, True,  32768, 12,  64),
    Case("window-corpus-causal",  None, "window",     128, True,  32768, 12,  64),
    Case("bigbird-2048-d128",     2048, "bigbird",     64, False, 32768, 12, 128),
    Case("bigbird-corpus-d128",   None, "bigbird",     64, False, 32768, 12, 128),
    Case("window-corpus-d128",    None, "window",      64, False, 32768, 12, 128),
]
"""What is measured by default: documents of one length and such as real corpora have, in the structures that people
configure; windows of 64 tokens on each side are ModernBERT's."""
# fmt: on
