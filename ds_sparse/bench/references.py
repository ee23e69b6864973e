"""Exact results of attention, which peers are held to before they are timed, by pieces in float64.

A piece is some rows with the keys that they see, so that memory and time are those of the live scores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from ..verify.accuracy import output_and_gradients, require_as_accurate
from .registry import Build, Peer

ROWS_AT_ONCE = 1024
"""Rows whose scores against a whole document are there at a time."""

NAMES = ("output", "gradient of query", "gradient of key", "gradient of value")

Piece = tuple[slice, slice | Tensor, Tensor | None]
"""Rows, keys, and where these see those: bool (rows, keys); None: everywhere."""


def random_tensors(count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Draws the same numbers at every call on a device."""
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype, device=device) for _ in range(count)]


def block_rows(layout: Tensor, block: int, device: torch.device, causal: bool = False) -> Iterator[Piece]:
    """Every block row with its live keys. layout: bool (R, C) on the CPU."""
    place = torch.arange(block, device=device)
    for row, live in enumerate(layout):
        tokens = (live.nonzero().to(device) * block + place).flatten()
        if len(tokens):
            mask = tokens <= row * block + place[:, None] if causal else None
            yield slice(row * block, (row + 1) * block), tokens, mask


def documents(lengths: Sequence[int], mask: Callable[[int], Tensor]) -> Iterator[Piece]:
    """Rows of documents that follow one another, `ROWS_AT_ONCE` at a time. mask: from a document's length to bool
    (length, length), what each token of it sees; every token sees one at least."""
    first = 0
    for length in lengths:
        live, document = mask(length), slice(first, first + length)
        for begin in range(0, length, ROWS_AT_ONCE):
            end = min(begin + ROWS_AT_ONCE, length)
            yield slice(first + begin, first + end), document, live[begin:end]
        first += length


def attention_by_pieces(operands: Sequence[Tensor], pieces: Iterable[Piece]) -> tuple[list[Tensor], list[Tensor]]:
    """Output of one head's attention, and the gradients of query, key and value; (T, D) each.

    operands: query, key, value and the output's gradient. It computes at their precision; what is added up from piece
    to piece, in fp32 or wider.

    Returns:
        Those four, and for each the sums of the absolute values of its terms.
    """
    query, key, value, grad = operands
    wide = torch.promote_types(query.dtype, torch.float32)
    sums = [torch.zeros_like(x, dtype=wide) for x in (query, query, key, value)]
    terms = [torch.zeros_like(x) for x in sums]
    scale = query.shape[1] ** -0.5
    for rows, tokens, live in pieces:
        keys, values = key[tokens], value[tokens]
        scores = query[rows] @ keys.mT * scale
        probs = (scores if live is None else scores.masked_fill(~live, float("-inf"))).softmax(-1)
        grad_probs = grad[rows] @ values.mT
        grad_scores = probs * (grad_probs - (grad_probs * probs).sum(-1, keepdim=True)) * scale
        products = (
            (rows, probs, values),
            (rows, grad_scores, keys),
            (tokens, grad_scores.mT, query[rows]),
            (tokens, probs.mT, grad[rows]),
        )
        for total, size, (place, a, b) in zip(sums, terms, products, strict=True):
            total[place] += a @ b
            size[place] += a.abs() @ b.abs()
    return sums, terms


def group_by_pieces(
    operands: Sequence[Tensor], pieces: Callable[[], Iterable[Piece]]
) -> tuple[list[Tensor], list[Tensor]]:
    """The same of heads that share a key head: results of query are theirs one after the other, those of key and value
    sums of all.

    operands: query and the output's gradient (heads, T, D), key and value (1, T, D).
    """
    query, key, value, grad = operands
    of_heads = [attention_by_pieces([q, key[0], value[0], g], pieces()) for q, g in zip(query, grad)]

    def together(results: Iterable[list[Tensor]]) -> list[Tensor]:
        rows, gradients, *shared = zip(*results)
        return [torch.cat(rows), torch.cat(gradients), *(torch.stack(x).sum(0) for x in shared)]

    sums, terms = map(together, zip(*of_heads))
    return sums, terms


class AttentionProblem(ABC):
    """Attention of a case on a device: operands, and exact results of some heads, computed when a peer needs them.

    Args:
        shape: of query and the output's gradient.
        part: tokens whose errors are compared with those of plain PyTorch together.
        places: (sequence, head) of those that are verified, with all that share a key head with it; None: the first and
            the last.
        group: query heads that share a key head, and see the same keys.
        causal: later tokens are masked.

    Attributes:
        inputs: query, key and value.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        part: int,
        places: Sequence[tuple[int, int]] | None = None,
        group: int = 1,
        causal: bool = False,
    ) -> None:
        self.device, self.part, self.group, self.causal = device, part, group, causal
        query, key, value, self.grad = random_tensors(4, shape, dtype, device)
        self.inputs = [query, *(x[:, ::group].contiguous() for x in (key, value))]
        self.places = places or sorted({(0, 0), (shape[0] - 1, shape[1] - group)})
        self._known: dict[tuple[object, ...], list[tuple[list[Tensor], list[Tensor], list[Tensor]]]] = {}

    @abstractmethod
    def pieces(self, head: int, peer: Peer) -> Iterable[Piece]:
        """The scores of a head that a peer has to compute."""

    def verify(self, name: str, peer: Peer) -> None:
        """Holds a peer's output and gradients to the exact ones, `part` by `part`.

        Raises:
            ArithmeticError: an error larger than `require_as_accurate` allows.
        """
        *inputs, grad = (peer.arranged(x) for x in (*self.inputs, self.grad))
        if peer.no_backward:
            results = [peer.call(*inputs)]
        else:
            results = output_and_gradients(peer.call, inputs, grad)
        results = [peer.as_row(x) for x in results]
        for (batch, head), exact in zip(self.places, self._exact(peer), strict=True):
            for what, mine, *others in zip(NAMES, results, *exact, strict=False):
                tensors = [self._of_group(mine[batch], head).flatten(0, 1), *others]
                ours, plain, right, terms = (pad(x, (0, 0, 0, -len(x) % self.part)) for x in tensors)
                place = f"{what}, batch {batch}, head {head}"
                require_as_accurate(place, ours, plain, right, len(ours) // self.part, terms, least=peer.least_error)

    def _of_group(self, x: Tensor, head: int) -> Tensor:
        """Those of (H or Hkv, T, D) that share a key head with a query head."""
        return x.unflatten(0, (self.inputs[1].shape[1], -1))[head // self.group]

    def _exact(self, peer: Peer) -> list[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
        """For each of `places`: plain and exact results, and the sizes of the exact sums' terms."""
        key = peer.dense, peer.lengths
        if key not in self._known:
            tokens = None if peer.lengths is None else sum(peer.lengths)
            found = self._known[key] = []
            for batch, head in self.places:
                mine = [self._of_group(x[batch, :, :tokens], head) for x in (*self.inputs, self.grad)]
                pieces = partial(self.pieces, head, peer)
                plain, _ = group_by_pieces(mine, pieces)
                found.append((plain, *group_by_pieces([x.double() for x in mine], pieces)))
        return self._known[key]


def sdpa(backend: SDPBackend | None = None, beside: str = "", mask: Callable[[Any], Tensor] | None = None) -> Build:
    """PyTorch's attention: dense, by one backend, which PyTorch alone would not always choose, or by its choice; or
    with a mask of tokens by tokens, made of a problem."""

    def build(problem: AttentionProblem) -> Peer:
        options: dict[str, Any] = {"is_causal": problem.causal} if mask is None else {"attn_mask": mask(problem)}

        def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with nullcontext() if backend is None else sdpa_kernel(backend):
                return scaled_dot_product_attention(query, key, value, enable_gqa=problem.group > 1, **options)

        return Peer(call, beside=beside, dense=mask is None)

    return build
