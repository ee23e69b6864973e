"""Rows of packed documents."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .cases import Draw


@dataclass(frozen=True)
class Documents:
    """How a row is cut into documents, and what its pairs, or its mask, mean for them."""

    cu_seqlens: Tensor
    layout: str

    def options(self, device: str) -> dict[str, Any]:
        return {"cu_seqlens": self.cu_seqlens.to(device), "document_layout": self.layout}

    def of_row(self, x: Tensor, between: float) -> Tensor:
        """What (..., T, T) of one document, or of the row, is for the whole row; T may be more than there are."""
        tokens = int(self.cu_seqlens[-1])
        row = x.new_full((*x.shape[:-2], tokens, tokens), between)
        for first, end in pairwise(self.cu_seqlens.tolist()):
            of_x = slice(0, end - first) if self.layout == "own" else slice(first, end)
            row[..., first:end, first:end] = x[..., of_x, of_x]
        return row


def draw_documents(draw: Draw, tokens: int) -> Documents:
    """Documents of a row, perhaps empty ones."""
    edges = torch.randint(tokens + 1, (draw.pick("", (0, 1, 3, 9)),), generator=draw.numbers).tolist()
    cu_seqlens = torch.tensor(sorted([0, tokens, *edges]), dtype=draw.pick("", (torch.int32, torch.int64)))
    draw.words["documents"] = str(cu_seqlens.tolist())
    return Documents(cu_seqlens, draw.pick("layout of documents", ("own", "row")))
