"""Attention on compressed keys, each made of some neighbours, without a matrix of tokens by compressed keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..index.selection import AlignedDocuments
from ..ops import window_attention
from ..ops._autograd import Function, differentiable_once
from ..ops.moved import moving_function

_ALL = 2**30
"""A window that holds all keys. It does not depend on the length, so that one graph serves all lengths."""


class Compression(nn.Module):
    """Makes one key of each `length` neighbours, every `stride` of them: an MLP of their numbers and places.

    Args:
        head_dim: D.
        length, stride: as in `NativeSparseAttention`.
    """

    def __init__(self, head_dim: int, length: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.position = nn.Parameter(torch.empty(length, head_dim))
        self.mlp = nn.Sequential(
            nn.Linear(length * head_dim, head_dim), nn.GELU(), nn.Linear(head_dim, head_dim, bias=False)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters anew."""
        nn.init.normal_(self.position, std=0.02)
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """(B, Hkv, C, D) of x (B, Hkv, T, D). C is 1 where T is below `length`, and nobody sees that key."""
        neighbours = windows_of(x, 2, len(self.position), self.stride).mT
        return self.mlp((neighbours + self.position.to(x.dtype)).flatten(3))


@dataclass(frozen=True)
class StridesOfDocuments:
    """Packed documents as they lie where each begins with a whole stride.

    Compressed keys are made there as of one sequence. What is made of two documents ends behind the first, and no token
    of it sees that.

    Attributes:
        documents: the aligned ones, whose blocks are strides.
        begins: (documents + 1), the compressed keys that documents begin with.
    """

    documents: AlignedDocuments
    begins: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, query: Tensor, stride: int) -> StridesOfDocuments:
        """Raises TypeError or ValueError for `cu_seqlens` that do not fit the query, (1, H, T, D)."""
        documents = AlignedDocuments.of(cu_seqlens, query.shape[2], stride, query.device)
        strides = (cu_seqlens.diff() + (stride - 1)) // stride
        return cls(documents, pad(strides.cumsum(0), (1, 0)))

    def aligned(self, x: Tensor) -> Tensor:
        """The tokens of x (1, H, T, D), zeros between documents."""
        return _Moved.apply(x, self.documents.tokens_of, self.documents.aligned, self.documents.exists[0], None)

    def as_given(self, x: Tensor, blind: int) -> Tensor:
        """The way back, with zeros for the first `blind` tokens of each document."""
        documents, stride = self.documents, self.documents.block
        place = torch.arange(x.shape[2], device=x.device).unflatten(0, (-1, stride)) - documents.ranges[:, :1] * stride
        x = x.where((place >= blind).view(-1, 1), 0)
        return _Moved.apply(x, documents.aligned, documents.tokens_of, None, documents.exists[0])

    def of_rows(self, rows: int) -> Tensor:
        """Where documents begin among so many compressed keys, as `cu_seqlens` has it: what is behind the last is one
        more."""
        return pad(self.begins.clamp(max=rows), (0, 1), value=rows)


def compressed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    length: int,
    stride: int,
    *,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    documents: StridesOfDocuments | None = None,
    query_offset: int | None = None,
) -> Tensor:
    """Attention of each token to the compressed keys that are made of itself and tokens before it.

    From token `length - 1` on, `stride` neighbours see the same keys, and the next ones see one more. So the neighbours
    are heads of one row, and what rows see is causal.

    Args:
        query: (B, H, T, D).
        key, value: (B, Hkv, C, D), number c made of the tokens from `c * stride` to before `c * stride + length`.
        length, stride: of these.
        scale: factor of the scores; 1 / sqrt(D) if it is not given.
        key_padding_mask: bool (B or 1, C), False where a compressed key is not seen.
        documents: where those of a packed row lie; keys are made of their aligned tokens.
        query_offset: the position of the first query, where keys are made of tokens before it too; None: they are made
            of the queries' own.

    Returns:
        (B, H, T, D), zeros of tokens that see none.
    """
    if documents is not None:
        query = documents.aligned(query)
    tokens, rows, at = query.shape[2], key.shape[2], query_offset or 0
    blind = min(max(length - 1 - at, 0), tokens)
    # The row that the first query is of, and how many of the row are before it.
    seeing = max(at - length + 1, 0)
    first, ahead = seeing // stride, seeing % stride  # divmod has no symbolic numbers, and would be compiled anew
    if query_offset is not None:
        rows = max(1, -(-(ahead + tokens - blind) // stride))
    behind = rows * stride - tokens + blind - ahead
    # Whole sequences are moved by one copy each way; a graph fuses what moves them, and takes no writes in place.
    in_one_copy = query_offset is None and not torch.compiler.is_compiling()
    if in_one_copy:
        of_rows = _InRows.apply(query, blind, rows, stride)
    else:
        of_rows = pad(query[:, :, blind:], (0, 0, ahead, behind)).unflatten(2, (rows, stride))
        of_rows = of_rows.transpose(2, 3).flatten(1, 2)
    output = window_attention(
        of_rows, key, value, _ALL, causal=True, scale=scale,
        key_padding_mask=key_padding_mask, cu_seqlens=None if documents is None else documents.of_rows(rows),
        query_offset=None if query_offset is None else first,
    )  # fmt: skip
    if in_one_copy:
        output = _OfTokens.apply(output, blind, tokens, stride, _has_tokens_first(query))
    else:
        output = output.unflatten(1, (-1, stride)).transpose(2, 3).flatten(2, 3)
        output = pad(output[:, :, ahead : ahead + tokens - blind], (0, 0, blind, 0))
    return output if documents is None else documents.as_given(output, blind=length - 1)


def windows_of(x: Tensor, dim: int, length: int, stride: int) -> Tensor:
    """x.unfold(dim, length, stride), one window with zeros behind x where it is shorter."""
    if x.shape[dim] < length:
        x = pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, length - x.shape[dim]))
    return x.unfold(dim, length, stride)


def _in_rows(x: Tensor, blind: int, rows: int, stride: int) -> Tensor:
    """The tokens of x (B, H, T, D) after the first `blind` as rows of `stride` neighbours, each a head of its own, (B,
    H * stride, rows, D); zeros behind the last."""
    made = x.new_empty(*x.shape[:2], stride, rows, x.shape[3])
    for of_tokens, of_rows in _places(x, made, blind):
        of_rows.copy_(of_tokens)
    behind = (x.shape[2] - blind) % stride
    if rows * stride > x.shape[2] - blind:
        made[:, :, behind:, -1].zero_()
    return made.flatten(1, 2)


def _of_tokens(x: Tensor, blind: int, tokens: int, stride: int, tokens_first: bool) -> Tensor:
    """The way back, with zeros for the first `blind` tokens, in memory as `tokens_first` says."""
    x = x.unflatten(1, (-1, stride))
    batch, heads, _, _, depth = x.shape
    sizes = (tokens, heads) if tokens_first else (heads, tokens)
    made = x.new_empty(batch, *sizes, depth)
    made = made.transpose(1, 2) if tokens_first else made
    for of_tokens, of_rows in _places(made, x, blind):
        of_tokens.copy_(of_rows)
    made[:, :, :blind].zero_()
    return made


def _places(tokens: Tensor, rows: Tensor, blind: int) -> list[tuple[Tensor, Tensor]]:
    """Views of the same tokens, of (B, H, T, D) and (B, H, stride, rows, D): those of whole rows, and the others."""
    seeing, stride = tokens[:, :, blind:], rows.shape[2]
    whole, behind = divmod(seeing.shape[2], stride)
    of_whole = seeing[:, :, : whole * stride].unflatten(2, (whole, stride)).transpose(2, 3), rows[:, :, :, :whole]
    others = [(seeing[:, :, whole * stride :], rows[:, :, :behind, whole])] if behind else []
    return [of_whole, *others]


def _has_tokens_first(x: Tensor) -> bool:
    return x.stride(1) < x.stride(2)


class _InRows(Function):
    """`_in_rows`, which `_of_tokens` undoes."""

    @staticmethod
    def forward(x: Tensor, blind: int, rows: int, stride: int) -> Tensor:
        return _in_rows(x, blind, rows, stride)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, blind, _, stride = inputs
        ctx.back = blind, x.shape[2], stride, _has_tokens_first(x)

    @staticmethod
    @differentiable_once("native_sparse_attention")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _of_tokens(grad, *ctx.back), None, None, None


class _OfTokens(Function):
    """`_of_tokens`, which `_in_rows` undoes."""

    @staticmethod
    def forward(x: Tensor, blind: int, tokens: int, stride: int, tokens_first: bool) -> Tensor:
        return _of_tokens(x, blind, tokens, stride, tokens_first)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, blind, _, stride, _ = inputs
        ctx.back = blind, x.shape[2], stride

    @staticmethod
    @differentiable_once("native_sparse_attention")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _in_rows(grad, *ctx.back), None, None, None, None


_Moved = moving_function("_Moved", "native_sparse_attention")
