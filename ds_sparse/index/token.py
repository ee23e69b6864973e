"""TokenIndex: which keys a query sees, token by token, between all the forms that such a list can have.

Beside those of `token_forms` these are a sparse CSR tensor of scores, and the blocks of a `BlockIndex`. A pair that is
listed twice counts twice; the mask and the sparse CSR tensor, which cannot say so, refuse it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..dispatch import tile_heights
from ..layout import LayoutRows, to_token_mask
from .block import BlockIndex, check_block
from .on_device import MOST_DRAWN, OnDevice
from .packed import Documents, check_document_layout
from .token_forms import (
    Nested,
    TokenPairs,
    csr_of_jagged,
    length,
    of_lists,
    pairs_of_csr,
    pairs_of_mask,
    pairs_of_pairs,
    tensors_in,
)
from .token_tiles import BLOCK, TokenTiles
from .transforms import made_outside, outside_transforms

_PREPARED = "pass index.prepared(), on the device of the operands."


@dataclass(frozen=True, eq=False)
class TokenIndex(OnDevice):
    """Lists of token pairs as operations walk them. Built once from any form, immutable, shared by every operation.

    `from_mask`, `from_pairs`, `from_csr`, `from_jagged` and `from_blocks` build it, and `mask`, `pairs`, `csr`,
    `jagged` and `blocks` are the ways back.

    Letters: T query tokens, S key tokens; P = batch * heads lists, one after another in (batch, head) order; N pairs of
    all lists. Tensors are int32 but for `order`.

    Attributes:
        queries, keys: T and S.
        batch: sequences with lists of their own; 1 where all share them.
        heads: heads with lists of their own; 1 where all share them.
        row_offsets: `(P*T + 1)`. Query i of list p sees the pairs from `row_offsets[p*T+i]` to `row_offsets[p*T+i+1]`.
        columns: (N). The key of each pair, ascending within a row.
        ends: where each list ends in N.
        order: int64 (N), where the caller listed each pair, within its list; None where that is the order here.
        documents: of `packed`, how many there are in the row; 0 else.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> index = ds_sparse.TokenIndex.from_pairs([[2, 0], [0, 0], [2, 2]], queries=3, keys=3)
        >>> index
        TokenIndex(3 x 3 tokens, 3 pairs, any heads, cpu)
        >>> index.mask().int()
        tensor([[1, 0, 0],
                [0, 0, 0],
                [1, 0, 1]], dtype=torch.int32)
        >>> values, offsets = index.csr()
        >>> values.tolist(), offsets.tolist()
        ([0, 0, 2], [0, 1, 1, 3])
        >>> query, key, value = (torch.randn(1, 2, 3, 8) for _ in range(3))
        >>> ds_sparse.sparse_attn(query, key, value, index).shape
        torch.Size([1, 2, 3, 8])
    """

    queries: int
    keys: int
    batch: int
    heads: int
    row_offsets: Tensor
    columns: Tensor
    ends: tuple[int, ...]
    order: Tensor | None
    documents: int = 0
    _made: dict[object, object] = field(init=False, default_factory=dict)

    @classmethod
    def from_mask(cls, mask: Tensor) -> TokenIndex:
        """From a mask over tokens.

        Args:
            mask: bool, True where a query sees a key: (T, S), (H or 1, T, S) or (B or 1, H or 1, T, S).

        Returns:
            The index, on the mask's device.

        Raises:
            TypeError: not a bool tensor.
            ValueError: another number of dimensions.
        """
        return cls._build(pairs_of_mask(mask))

    @classmethod
    def from_pairs(cls, pairs: Tensor | Sequence, queries: int, keys: int) -> TokenIndex:
        """From pairs (i, j) in any order.

        Args:
            pairs: int32 or int64 (N, 2), or a list of pairs of integers, for all heads; or a list of such, one a head;
                or, padded at the end by rows of -1, (H or 1, N, 2) or (B or 1, H or 1, N, 2).
            queries, keys: T and S, the tokens that there are.

        Returns:
            The index, on the device of the pairs.

        Raises:
            TypeError: another type or dtype; `queries` or `keys` that are no integers.
            ValueError: another shape; a token that does not exist, named by its place; `queries` or `keys` below 0 or
                above `2**31 - 1`.
        """
        return cls._build(pairs_of_pairs(pairs, queries, keys))

    @classmethod
    def from_csr(cls, values: Tensor | Sequence, offsets: Tensor | Sequence, queries: int, keys: int) -> TokenIndex:
        """From the key of each pair in row order, and the end of each row.

        Args:
            values: int32 or int64 (N,), for all heads; or a list of such, one a head; or, padded at the end by
                anything, (H or 1, N) or (B or 1, H or 1, N). Keys of a row may stand in any order.
            offsets: int32 or int64 (T,), the end of each row; or (T + 1,), a CSR row pointer, which begins with 0;
                of each head where `values` are, a list or stacked.
            queries, keys: T and S, the tokens that there are.

        Returns:
            The index, on the device of `values`.

        Raises:
            TypeError, ValueError: as `from_pairs`; ValueError also for offsets that fall or end elsewhere, named by
                their place.
        """
        return cls._build(pairs_of_csr(values, offsets, queries, keys))

    @classmethod
    def from_jagged(cls, lists: Nested, keys: int) -> TokenIndex:
        """From nested tensors of jagged layout.

        Args:
            lists: int32 or int64 (T, keys of the query); or a list of such, one a head; or a list of such lists, one a
                sequence.
            keys: S, the key tokens that there are.

        Returns:
            The index, on the device of the lists.

        Raises:
            TypeError, ValueError: something else; a key that does not exist, named by its place.
        """
        return cls.from_csr(*csr_of_jagged(lists), tensors_in(lists)[0].shape[0], keys)

    @classmethod
    def from_blocks(cls, index: BlockIndex, queries: int | None = None, keys: int | None = None) -> TokenIndex:
        """From all tokens of the live blocks. Takes T x S bytes a list.

        Args:
            index: whose blocks they are.
            queries, keys: T and S, to which the blocks are cropped; by default all tokens of the blocks.

        Returns:
            The index, on the device of the other.

        Raises:
            TypeError, ValueError: `queries` or `keys` are no numbers of tokens.
        """
        queries, keys = (None if n is None else length(name, n) for name, n in (("queries", queries), ("keys", keys)))
        return cls.from_mask(to_token_mask(index.layout(), index.block)[..., :queries, :keys])

    @classmethod
    @outside_transforms
    def _build(cls, pairs: TokenPairs) -> TokenIndex:
        row, column, counts, batch, heads, queries, keys = pairs
        if sum(counts) >= 2**31:
            raise ValueError(f"There are {sum(counts)} pairs; the index holds fewer than 2**31.")
        place, order = row * max(1, keys) + column, None
        if bool((place.diff() < 0).any()):
            by_place = torch.argsort(place, stable=True)
            row, column = row[by_place], column[by_place]
            order = by_place - of_lists([0, *accumulate(counts[:-1])], counts, row.device)
        row_offsets = _offsets_of(row, len(counts) * queries)
        return cls(queries, keys, batch, heads, row_offsets, column.int(), tuple(accumulate(counts)), order)

    def __repr__(self) -> str:
        parts = [f"{self.queries} x {self.keys} tokens", f"{self.num_pairs} pairs"]
        parts += [f"{self.batch} sequences"] if self.batch > 1 else []
        parts += [f"{self.heads} heads" if self.heads > 1 else "any heads"]
        return f"TokenIndex({', '.join(parts)}, {self.device})"

    def rows_to_draw(self) -> tuple[LayoutRows, int]:
        """The pairs, or the blocks of 64 that hold them where there are many tokens; waits for the device."""
        if self.num_lists * self.queries * self.keys > MOST_DRAWN:
            return self.blocks(64).rows_to_draw()
        return LayoutRows.of(self.mask()), 1

    @property
    def device(self) -> torch.device:
        """Where the index is."""
        return self.columns.device

    @property
    def num_lists(self) -> int:
        return self.batch * self.heads

    @property
    def num_pairs(self) -> int:
        return self.ends[-1]

    @property
    def by_key(self) -> tuple[Tensor, Tensor, Tensor]:
        """The pairs by keys: offsets `(P*S + 1)`, the query of each (N), ascending within a key, and its number in row
        order (N). Made at the first call."""

        def make() -> tuple[Tensor, Tensor, Tensor]:
            rows, columns = self.make_places()
            # Rows ascend already, and so they do within a key after a stable sort; PyTorch sorts small integers
            # fastest.
            small = columns.int() if self.num_lists * self.keys < 2**31 else columns
            ascending, slots = torch.sort(small, stable=True)
            offsets = _offsets_of(ascending, self.num_lists * self.keys)
            return offsets, (rows % max(1, self.queries))[slots].int(), slots.int()

        return self._once("by_key", make, _PREPARED)

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """int64 (N) each: of every pair the row, `p*T + i`, and the column, `p*S + j`. Made at the first call."""
        return self._once("places", self.make_places, _PREPARED)

    @property
    def listed(self) -> Tensor:
        """int64 (N), the number of each pair here, in the order in which the caller listed them, where that is another.
        Made at the first call."""

        def make() -> Tensor:
            assert self.order is not None
            listed = torch.empty_like(self.order)
            place = self.order + of_lists(self._starts, self._counts, self.device)
            listed[place] = torch.arange(self.num_pairs, device=self.device)
            return listed

        return self._once("listed", make, _PREPARED)

    @outside_transforms
    def packed(self, cu_seqlens: Tensor, document_layout: str = "own") -> TokenIndex:
        """The pairs of documents packed in one row, of which none sees another. Built at each call, which waits for the
        device twice, however many documents there are; `sparse_attn` with `cu_seqlens` keeps what it builds.

        Args:
            cu_seqlens: int32 or int64 (documents + 1), ascending from 0 to the row's tokens, as FlashAttention has it.
            document_layout: 'own': the pairs are those of one document from its own start, and one of l tokens has
                those (i, j) with i, j < l. 'row': they are those of the row, and pairs between documents are left out.

        Returns:
            The index of the row, which has as many queries as keys, on this one's device; its pairs are in row order.

        Raises:
            TypeError: `cu_seqlens` is no tensor of integers.
            ValueError: `cu_seqlens` that does not ascend from 0, or ends with 0; another `document_layout`; pairs for
                fewer tokens than the longest document, or the row, has; lists of each sequence, or of packed documents;
                `2**31` pairs or more.

        Examples:
            >>> import torch
            >>> import ds_sparse
            >>> index = ds_sparse.TokenIndex.from_mask(torch.ones(3, 3, dtype=torch.bool).tril())
            >>> index.packed(torch.tensor([0, 3, 5])).mask().int()
            tensor([[1, 0, 0, 0, 0],
                    [1, 1, 0, 0, 0],
                    [1, 1, 1, 0, 0],
                    [0, 0, 0, 1, 0],
                    [0, 0, 0, 1, 1]], dtype=torch.int32)
        """
        check_document_layout(document_layout)
        if self.documents:
            raise ValueError(
                f"The TokenIndex is that of {self.documents} packed documents already; give it without cu_seqlens, to "
                "operands (1, heads, T, head size), or give the one that it was packed from."
            )
        if self.batch > 1:
            raise ValueError(
                f"The lists are those of {self.batch} sequences, and packed documents are one row; give lists that "
                "sequences share."
            )
        documents = Documents.read(cu_seqlens)
        rows, _ = self.ready().make_places()
        documents.check_covered("The pairs are", self.queries, self.keys, document_layout)
        first, end = documents.of_tokens(self.device).unbind(1)
        tokens, none = torch.arange(documents.tokens, device=self.device), torch.zeros_like(first)
        # Of each token, the query and the keys that it has here, and what is added to these keys.
        if document_layout == "own":
            query, lowest, bound, added = tokens - first, none, end - first, first
        else:
            query, lowest, bound, added = tokens, first, end, none
        # Keys ascend within a row: those of a document stand beside each other.
        places = rows * self.keys + self.columns
        begins = (torch.arange(self.heads, device=self.device)[:, None] * self.queries + query) * self.keys
        start, stop = (torch.searchsorted(places, begins + x).flatten() for x in (lowest, bound))
        counts = stop - start
        offsets = pad(counts.cumsum(0), (1, 0))
        ends = tuple(offsets[documents.tokens :: documents.tokens].tolist())
        if ends[-1] >= 2**31:
            raise ValueError(f"The documents have {ends[-1]} pairs together; the index holds fewer than 2**31.")
        to_source, to_column = (
            x.repeat_interleave(counts, output_size=ends[-1]) for x in (start - offsets[:-1], added.repeat(self.heads))
        )
        columns = self.columns[to_source + torch.arange(ends[-1], device=self.device)] + to_column
        sizes = documents.tokens, documents.tokens, 1, self.heads
        return TokenIndex(*sizes, offsets.int(), columns.int(), ends, None, len(documents.lengths))

    def prepared(self) -> TokenIndex:
        """All is made that operations and their gradients need: what is compiled later cannot make it.

        Returns:
            The index itself.
        """
        _ = self.by_key, self.tiles, self.places, self.repeated
        if self.order is not None:
            _ = self.listed
        return self

    @property
    def tiles(self) -> TokenTiles | None:
        """The pairs as bits in tiles, where a Hopper GPU's kernels are faster with these. Made at the first call."""
        return self._once(
            "tiles", lambda: TokenTiles.of(self) if tile_heights("sparse_attn", self.device, BLOCK) else None, _PREPARED
        )

    @property
    def repeated(self) -> tuple[int, int] | None:
        """The first pair that is listed twice, if there is one. Looked for at the first call."""

        def find() -> tuple[int, int] | None:
            rows, columns = self.places
            same = ((rows.diff() == 0) & (columns.diff() == 0)).nonzero()
            if not len(same):
                return None
            at = int(same[0])
            return int(rows[at]) % self.queries, int(self.columns[at])

        return self._once("repeated", find, _PREPARED)

    def refuse_repeated(self, form: str) -> None:
        """Raises ValueError, which names the first pair that is listed twice, if there is one."""
        if self.repeated is not None:
            raise ValueError(f"The pair {self.repeated} is listed twice, which {form} cannot say; list it once.")

    def mask(self) -> Tensor:
        """The pairs as a mask over tokens.

        Returns:
            bool (T, S), True where a query sees a key; (H, T, S) of lists of each head, (B, H or 1, T, S) of lists of
            each sequence.

        Raises:
            ValueError: a pair is listed twice.
        """
        self.refuse_repeated("a mask")
        mask = torch.zeros(self.num_lists * self.queries, self.keys, dtype=torch.bool, device=self.device)
        rows, _ = self.places
        mask[rows, self.columns.long()] = True
        lead = (self.batch, self.heads) if self.batch > 1 else (self.heads,) if self.heads > 1 else ()
        return mask.view(*lead, self.queries, self.keys)

    def pairs(self) -> Nested:
        """The pairs (i, j), in row order.

        Returns:
            int64 (N, 2); a list of such, one a head, or a list of such lists, one a sequence, where these have lists of
            their own.
        """
        rows, _ = self.places
        return self._nested(self._split(torch.stack((rows % max(1, self.queries), self.columns.long()), 1)))

    def csr(self) -> tuple[Nested, Nested]:
        """The key of each pair in row order, and where the rows begin and end.

        The ends of rows, without the leading 0, are offsets[1:].

        Returns:
            Values, int64 (N,), and offsets, int64 (T + 1,); each nested as in `pairs`.
        """
        rows, count = self.row_offsets.long(), self.queries
        offsets = [rows[p * count : (p + 1) * count + 1] - start for p, start in enumerate(self._starts)]
        return self._nested(self._split(self.columns.long())), self._nested(offsets)

    def jagged(self) -> Nested:
        """The keys of each query as a nested tensor of jagged layout.

        Returns:
            int64 (T, keys of the query), nested as in `pairs`.
        """
        values, offsets = (tensors_in(x) for x in self.csr())
        return self._nested(
            [torch.nested.nested_tensor_from_jagged(v, o) for v, o in zip(values, offsets, strict=True)]
        )

    def blocks(self, block: int) -> BlockIndex:
        """The index of all blocks of tokens that hold a pair, for lists that sequences share.

        Args:
            block: tokens on a block's side, a power of two, 8 or more.

        Returns:
            The index, on this one's device.

        Raises:
            ValueError: lists of each sequence; a block that is no power of two from 8 on.
        """
        if self.batch > 1:
            raise ValueError(f"The lists are those of {self.batch} sequences; a BlockIndex is shared by all sequences.")
        block = check_block(block)
        rows, columns = made_outside(self.make_places)
        height, width = -(-self.queries // block), -(-self.keys // block)
        layout = torch.zeros(self.heads, height, width, dtype=torch.bool, device=self.device)
        head = rows // max(1, self.queries)
        layout[head, rows % max(1, self.queries) // block, columns % max(1, self.keys) // block] = True
        return BlockIndex.build(layout, block)

    def sparse_csr(self, scores: Nested) -> Nested:
        """Scores of the pairs, as `sparse_matmul` and `sparse_matmul_vo` return them, as sparse CSR tensors (T, S).

        Of lists that all heads share (..., N) becomes one tensor (..., T, S); of others each list becomes one.
        Differentiable in the scores where these have one dimension, which is as far as PyTorch goes.

        Args:
            scores: (..., N) in the order in which the pairs were listed, nested as in `pairs`.

        Returns:
            Sparse CSR tensors (..., T, S) in the dtype of the scores, nested as in `pairs`.

        Raises:
            ValueError: a pair is listed twice; scores of another number of pairs.
        """
        self.refuse_repeated("a sparse CSR tensor")
        values, offsets = (tensors_in(x) for x in self.csr())
        orders = [None] * self.num_lists if self.order is None else self._split(self.order)
        tensors = []
        for x, columns, pointer, order in zip(tensors_in(scores), values, offsets, orders, strict=True):
            if x.shape[-1:] != columns.shape:
                raise ValueError(f"Scores have shape {tuple(x.shape)}, and the list has {len(columns)} pairs.")
            x = x if order is None else x[..., order]
            lead = x.shape[:-1]
            tensors.append(
                torch.sparse_csr_tensor(
                    pointer.expand(*lead, -1).contiguous(), columns.expand(*lead, -1).contiguous(), x.contiguous(),
                    size=(*lead, self.queries, self.keys), check_invariants=False,
                )
            )  # fmt: skip
        return self._nested(tensors)

    def fold(self, x: Tensor) -> Tensor:
        """(B, H, tokens, D) -> (R, P*tokens, D): the R of the sequences and heads that share lists, and the tokens of
        all lists as `places` numbers them."""
        batch, heads, tokens, depth = x.shape
        if self.batch > 1 and self.heads == 1:
            # Here the heads share lists.
            x = x.transpose(0, 1)
        return x.reshape(batch * heads // self.num_lists, self.num_lists * tokens, depth)

    def unfold(self, x: Tensor, batch: int, heads: int) -> Tensor:
        """(R, P*tokens, D) -> (B, H, tokens, D), the reverse of `fold`."""
        sizes = x.shape[1] // self.num_lists, x.shape[2]
        if self.batch > 1 and self.heads == 1:
            return x.reshape(heads, batch, *sizes).transpose(0, 1)
        return x.reshape(batch, heads, *sizes)

    def scores_of(self, flat: Tensor, lead: tuple[int, ...]) -> Nested:
        """The numbers of all pairs, (R, N), as a caller wants them: in the order in which pairs were listed, those of
        shared lists (..., N) with the leading dimensions (..., H) of the operands; otherwise by lists, each with the
        dimensions that share it."""
        if self.order is not None:
            flat = flat.index_select(1, self.listed)
        if self.num_lists == 1:
            return flat.reshape(*lead, self.num_pairs)
        shared = lead[:-1] if self.batch == 1 else lead[-1:] if self.heads == 1 else ()
        return self._nested([x.reshape(*shared, x.shape[-1]) for x in self._split(flat, 1)])

    def _split(self, x: Tensor, dim: int = 0) -> list[Tensor]:
        return list(x.split(self._counts, dim))

    @property
    def _starts(self) -> tuple[int, ...]:
        return (0, *self.ends[:-1])

    @property
    def _counts(self) -> list[int]:
        return [end - start for start, end in zip(self._starts, self.ends, strict=True)]

    def _nested(self, lists: list[Any]) -> Nested:
        if self.num_lists == 1:
            return lists[0]
        if self.batch == 1:
            return lists
        return [lists[b * self.heads : (b + 1) * self.heads] for b in range(self.batch)]

    def _copied(self, device: torch.device) -> TokenIndex:
        """Copied there once."""
        return self._once(device, partial(super()._copied, device), _PREPARED)

    def make_places(self) -> tuple[Tensor, Tensor]:
        """`places`, not kept: they are four times as large as the list."""
        lines = torch.arange(self.num_lists * self.queries, device=self.device)
        rows = lines.repeat_interleave(self.row_offsets.long().diff(), output_size=self.num_pairs)
        return rows, rows // max(1, self.queries) * self.keys + self.columns


def _offsets_of(lines: Tensor, size: int) -> Tensor:
    """int32 (size + 1): where each line's entries begin among ascending lines."""
    return torch.searchsorted(lines, torch.arange(size + 1, device=lines.device, dtype=lines.dtype), out_int32=True)
