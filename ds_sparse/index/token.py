"""Which keys a query sees, token by token: the forms that such a list can have, and `TokenIndex`, the one between them.

A pair (i, j) says that query token i sees key token j. The forms are a bool mask, a list of pairs, values + offsets
(the key of each pair in row order, and where each row ends: CSR), a jagged nested tensor, a sparse CSR tensor of
scores, and the blocks of a `BlockIndex`. A pair that is listed twice counts twice; the mask and the sparse CSR tensor, which
cannot say so, refuse it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from ..layout import to_token_mask
from .block import BlockIndex
from .lasting import lasting, plain
from .ready_event import ReadyEvent
from .tile_sizes import is_hopper
from .token_tiles import TokenTiles

Nested: TypeAlias = "Tensor | list[Nested]"
"""A tensor; for lists of each head a list of tensors; for lists of each sequence and head a list of such lists."""


@dataclass(frozen=True, eq=False)
class TokenIndex:
    """Lists of token pairs as operations walk them. Built once from any form, immutable, shared by every operation.

    Letters: T query tokens, S key tokens; P = batch * heads lists, one after another in (batch, head) order; N pairs of
    all lists. Tensors are int32 but for `order`.

    Attributes:
        queries, keys: T and S.
        batch: sequences with lists of their own; 1 where all share them.
        heads: heads with lists of their own; 1 where all share them.
        row_offsets: (P*T + 1). Query i of list p sees the pairs from row_offsets[p*T+i] to row_offsets[p*T+i+1].
        columns: (N). The key of each pair, ascending within a row.
        ends: where each list ends in N.
        order: int64 (N), where the caller listed each pair, within its list; None where that is the order here.
    """

    queries: int
    keys: int
    batch: int
    heads: int
    row_offsets: Tensor
    columns: Tensor
    ends: tuple[int, ...]
    order: Tensor | None
    _made: dict[object, object] = field(default_factory=dict)
    _ready: ReadyEvent = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "_ready", ReadyEvent(self.device))

    @classmethod
    def from_mask(cls, mask: Tensor) -> TokenIndex:
        """From a bool mask, True where a query sees a key: (T, S), (H or 1, T, S) or (B or 1, H or 1, T, S).

        Raises:
            TypeError: not a bool tensor.
            ValueError: another number of dimensions.
        """
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"A mask is a bool tensor, got {given}; convert it with mask != 0.")
        if mask.dim() not in (2, 3, 4):
            raise ValueError(
                "A mask has shape (queries, keys), (heads or 1, queries, keys) or (batch or 1, heads or 1, queries, "
                f"keys), got {tuple(mask.shape)}."
            )
        batch, heads, queries, keys = (1,) * (4 - mask.dim()) + tuple(mask.shape)
        mask = mask.reshape(batch * heads, queries, keys)
        p, row, column = mask.nonzero().unbind(1)
        return cls._build(p * queries + row, column, mask.sum((1, 2)).tolist(), batch, heads, queries, keys)

    @classmethod
    def from_pairs(cls, pairs: Tensor | Sequence, queries: int, keys: int) -> TokenIndex:
        """From pairs (i, j) in any order.

        Args:
            pairs: int32 or int64 (M, 2), or a list of pairs of integers, for all heads; or a list of such, one a head; or,
                padded at the end by rows of -1, (H or 1, M, 2) or (B or 1, H or 1, M, 2).

        Raises:
            TypeError: another type or dtype.
            ValueError: another shape; a token that does not exist, named by its place.
        """
        pairs = lists_of("indices", pairs, 2)
        lists, batch, heads = _as_lists("indices", pairs, 2)
        for p, one in enumerate(lists):
            if one.shape[1] != 2:
                raise ValueError(
                    f"indices{_in_list(p, lists)} have shape {tuple(one.shape)}; pairs have the shape (pairs, 2)."
                )
        if isinstance(pairs, Tensor) and pairs.dim() > 2:
            real = (torch.stack(lists) != -1).any(2)
            last = real * torch.arange(1, real.shape[1] + 1, device=real.device)
            lists = [one[:end] for one, end in zip(lists, pad(last, (1, 0)).amax(1).tolist(), strict=True)]
        counts = [len(one) for one in lists]
        row, column = torch.cat(lists).long().unbind(1)
        if bool(((row < 0) | (row >= queries) | (column < 0) | (column >= keys)).any()):
            _refuse_pairs(lists, queries, keys)
        first_rows = _of_lists([p * queries for p in range(len(lists))], counts, row.device)
        return cls._build(first_rows + row, column, counts, batch, heads, queries, keys)

    @classmethod
    def from_csr(cls, values: Tensor | Sequence, offsets: Tensor | Sequence, queries: int, keys: int) -> TokenIndex:
        """From the key of each pair in row order, and the end of each row.

        Args:
            values: int32 or int64 (N,), for all heads; or a list of such, one a head; or, padded at the end by
                anything, (H or 1, N) or (B or 1, H or 1, N). Keys of a row may stand in any order.
            offsets: int32 or int64 (T,), the end of each row; or (T + 1,), a CSR row pointer, which begins with 0;
                of each head where `values` are, a list or stacked.

        Raises:
            TypeError: another type or dtype.
            ValueError: another shape; offsets that fall or end elsewhere, a key that does not exist, each named by its
                place.
        """
        values, offsets = lists_of("values", values, 1), lists_of("offsets", offsets, 1)
        lists, batch, heads = _as_lists("values", values, 1)
        all_offsets, *of_offsets = _as_lists("offsets", offsets, 1)
        if of_offsets != [batch, heads]:
            raise ValueError(
                f"values are {len(lists)} lists and offsets {len(all_offsets)}; give offsets for each list of values."
            )
        padded = isinstance(values, Tensor) and values.dim() > 1
        # Where rows end is looked at on the CPU: each look would wait for a GPU.
        on_cpu = torch.cat(all_offsets).long().cpu().split([len(x) for x in all_offsets])
        ends, counts = [_row_ends(x, queries, _in_list(p, lists)) for p, x in enumerate(on_cpu)], []
        for p, (one, of_rows) in enumerate(zip(lists, ends, strict=True)):
            last = int(of_rows[-1]) if len(of_rows) else 0
            if last != len(one) and not (padded and last < len(one)):
                where = _in_list(p, lists)
                raise ValueError(
                    f"offsets{where} end at {last} and values{where} has {len(one)} pairs; the last row has to end "
                    "there."
                )
            counts.append(last)
        column = torch.cat([one[:last] for one, last in zip(lists, counts, strict=True)]).long()
        per_row = torch.cat([x.diff(prepend=x.new_zeros(1)) for x in ends]).to(column.device)
        lines = torch.arange(len(lists) * queries, device=column.device)
        row = lines.repeat_interleave(per_row, output_size=len(column))
        if bool(((column < 0) | (column >= keys)).any()):
            _refuse_values(lists, ends, keys)
        return cls._build(row, column, counts, batch, heads, queries, keys)

    @classmethod
    def from_jagged(cls, lists: Nested, keys: int) -> TokenIndex:
        """From a nested tensor of jagged layout, (T, keys of the query); or a list of such, one a head; or a list of such
        lists, one a sequence.

        Raises:
            TypeError, ValueError: something else; a key that does not exist, named by its place.
        """
        return cls.from_csr(*_csr_of_jagged(lists), tensors_in(lists)[0].shape[0], keys)

    @classmethod
    def from_blocks(cls, index: BlockIndex, queries: int | None = None, keys: int | None = None) -> TokenIndex:
        """From all tokens of the live blocks, cropped to so many query and key tokens. Takes T x S bytes a list."""
        return cls.from_mask(to_token_mask(index.layout(), index.block)[..., :queries, :keys])

    @classmethod
    @lasting
    def _build(
        cls, row: Tensor, column: Tensor, counts: list[int], batch: int, heads: int, queries: int, keys: int
    ) -> TokenIndex:
        """From the pairs of all lists, p*T + i and j each, and how many of them each list has."""
        if sum(counts) >= 2**31:
            raise ValueError(f"There are {sum(counts)} pairs; the index holds fewer than 2**31.")
        place, order = row * max(1, keys) + column, None
        if bool((place.diff() < 0).any()):
            by_place = torch.argsort(place, stable=True)
            row, column = row[by_place], column[by_place]
            order = by_place - _of_lists([0, *accumulate(counts[:-1])], counts, row.device)
        row_offsets = _offsets_of(row, len(counts) * queries)
        return cls(queries, keys, batch, heads, row_offsets, column.int(), tuple(accumulate(counts)), order)

    def __repr__(self) -> str:
        parts = [f"{self.queries} x {self.keys} tokens", f"{self.num_pairs} pairs"]
        parts += [f"{self.batch} sequences"] if self.batch > 1 else []
        parts += [f"{self.heads} heads" if self.heads > 1 else "any heads"]
        return f"TokenIndex({', '.join(parts)}, {self.device})"

    @property
    def device(self) -> torch.device:
        return self.columns.device

    @property
    def num_lists(self) -> int:
        return self.batch * self.heads

    @property
    def num_pairs(self) -> int:
        return self.ends[-1]

    @property
    def by_key(self) -> tuple[Tensor, Tensor, Tensor]:
        """The pairs by keys: offsets (P*S + 1), the query of each (N), ascending within a key, and its number in row
        order (N). Made at the first call."""
        return self._once("by_key", self._make_by_key)

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """int64 (N) each: of every pair the row, p*T + i, and the column, p*S + j. Made at the first call."""
        return self._once("places", self.make_places)

    @property
    def listed(self) -> Tensor:
        """int64 (N), the number of each pair here, in the order in which the caller listed them, where that is another.
        Made at the first call."""
        return self._once("listed", self._make_listed)

    def ready(self) -> TokenIndex:
        """The index itself, for what the current stream does next (see `ReadyEvent`)."""
        self._ready.wait(self._tensors)
        return self

    def to(self, device: torch.device | str) -> TokenIndex:
        """The same index on another device, copied there once; itself if it is there already."""
        device = torch.device(device)
        if device.type == self.device.type and device.index in (None, self.device.index):
            return self
        return self._once(
            device,
            lambda: TokenIndex(
                self.queries, self.keys, self.batch, self.heads, self.row_offsets.to(device), self.columns.to(device),
                self.ends, None if self.order is None else self.order.to(device),
            ),
        )  # fmt: skip

    def prepared(self) -> TokenIndex:
        """The index itself, with all made that operations and their gradients need: what is compiled later cannot make
        it."""
        _ = self.by_key, self.tiles, self.places, self.repeated
        if self.order is not None:
            _ = self.listed
        return self

    @property
    def tiles(self) -> TokenTiles | None:
        """The pairs as bits in tiles, where a Hopper GPU's kernels are faster with these. Made at the first call."""
        return self._once("tiles", lambda: TokenTiles.make(self) if is_hopper(self.device) else None)

    @property
    def repeated(self) -> tuple[int, int] | None:
        """The first pair that is listed twice, if there is one. Looked for at the first call."""
        return self._once("repeated", self._find_repeated)

    def refuse_repeated(self, form: str) -> None:
        """Raises ValueError, which names the first pair that is listed twice, if there is one."""
        if self.repeated is not None:
            raise ValueError(f"The pair {self.repeated} is listed twice, which {form} cannot say; list it once.")

    def mask(self) -> Tensor:
        """bool (T, S); (H, T, S) of lists of each head, (B, H or 1, T, S) of lists of each sequence.

        Raises:
            ValueError: a pair is listed twice.
        """
        self.refuse_repeated("a mask")
        mask = torch.zeros(self.num_lists * self.queries, self.keys, dtype=torch.bool, device=self.device)
        rows, _ = self.places
        mask[rows, self.columns.long()] = True
        return mask.view(*self._lead, self.queries, self.keys)

    def pairs(self) -> Nested:
        """int64 (N, 2), in row order; of each list."""
        rows, _ = self.places
        return self._nested(self._split(torch.stack((rows % max(1, self.queries), self.columns.long()), 1)))

    def csr(self) -> tuple[Nested, Nested]:
        """Values, int64 (N,), and offsets, int64 (T + 1,) with the leading 0; of each list.

        The ends of rows, without the 0, are offsets[1:].
        """
        starts = (0, *self.ends[:-1])
        rows = self.row_offsets.long()
        offsets = [rows[p * self.queries : (p + 1) * self.queries + 1] - start for p, start in enumerate(starts)]
        return self._nested(self._split(self.columns.long())), self._nested(offsets)

    def jagged(self) -> Nested:
        """A nested tensor of jagged layout, int64 (T, keys of the query); of each list."""
        values, offsets = (tensors_in(x) for x in self.csr())
        return self._nested(
            [torch.nested.nested_tensor_from_jagged(v, o) for v, o in zip(values, offsets, strict=True)]
        )

    def blocks(self, block: int) -> BlockIndex:
        """The index of all blocks of `block` x `block` tokens that hold a pair, for lists that sequences share.

        Raises:
            ValueError: lists of each sequence; a block that is no power of two, or below 8.
        """
        if self.batch > 1:
            raise ValueError(f"The lists are those of {self.batch} sequences; a BlockIndex is shared by all sequences.")
        rows, columns = self.make_places()
        height, width = -(-self.queries // block), -(-self.keys // block)
        layout = torch.zeros(self.heads, height, width, dtype=torch.bool, device=self.device)
        head = rows // max(1, self.queries)
        layout[head, rows % max(1, self.queries) // block, columns % max(1, self.keys) // block] = True
        return BlockIndex.build(layout, block)

    def sparse_csr(self, scores: Nested) -> Nested:
        """Scores of the pairs, as `sparse_matmul` and `sparse_matmul_vo` return them, as sparse CSR tensors (T, S).

        Of lists that all heads share (..., N) becomes one tensor (..., T, S); of others each list becomes one.
        Differentiable in the scores where these have one dimension, which is as far as PyTorch goes.

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

    @property
    def _lead(self) -> tuple[int, ...]:
        return (self.batch, self.heads) if self.batch > 1 else (self.heads,) if self.heads > 1 else ()

    def _split(self, x: Tensor, dim: int = 0) -> list[Tensor]:
        return list(x.split([end - start for start, end in zip((0, *self.ends), self.ends)], dim))

    def _nested(self, lists: list[Tensor]) -> Nested:
        if self.num_lists == 1:
            return lists[0]
        if self.batch == 1:
            return lists
        return [lists[b * self.heads : (b + 1) * self.heads] for b in range(self.batch)]

    def _once(self, name: object, make: Callable):
        if name not in self._made:
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    "What is missing of a TokenIndex cannot be made under torch.compile; pass "
                    "index.prepared(), on the device of the operands."
                )
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "What is missing of a TokenIndex cannot be made while a CUDA graph is captured; pass "
                    "index.prepared(), on the device of the operands."
                )
            self._made[name] = lasting(make)()
            self._ready.record()
        self.ready()
        return self._made[name]

    def _tensors(self) -> Iterator[Tensor]:
        for x in (*vars(self).values(), *self._made.values()):
            if isinstance(x, Tensor):
                yield x
            elif isinstance(x, tuple):
                yield from (part for part in x if isinstance(part, Tensor))
            elif isinstance(x, TokenTiles):
                yield from x.tensors()

    def make_places(self) -> tuple[Tensor, Tensor]:
        """`places`, not kept: they are four times as large as the list."""
        lines = torch.arange(self.num_lists * self.queries, device=self.device)
        rows = lines.repeat_interleave(self.row_offsets.long().diff(), output_size=self.num_pairs)
        return rows, rows // max(1, self.queries) * self.keys + self.columns

    def _make_listed(self) -> Tensor:
        starts = (0, *self.ends[:-1])
        counts = [end - start for start, end in zip(starts, self.ends, strict=True)]
        listed = torch.empty_like(self.order)
        listed[self.order + _of_lists(starts, counts, self.device)] = torch.arange(self.num_pairs, device=self.device)
        return listed

    def _make_by_key(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, columns = self.make_places()
        # Rows ascend already, and so they do within a key after a stable sort; PyTorch sorts small integers fastest.
        small = columns.int() if self.num_lists * self.keys < 2**31 else columns
        ascending, slots = torch.sort(small, stable=True)
        offsets = _offsets_of(ascending, self.num_lists * self.keys)
        return offsets, (rows % max(1, self.queries))[slots].int(), slots.int()

    def _find_repeated(self) -> tuple[int, int] | None:
        rows, columns = self.places
        same = ((rows.diff() == 0) & (columns.diff() == 0)).nonzero()
        if not len(same):
            return None
        at = int(same[0])
        return int(rows[at]) % self.queries, int(self.columns[at])


_indices = WeakTensorKeyDictionary()  # the first of the tensors given: what else was given, and the index


def index_of(build: Callable[[], TokenIndex], given: Sequence, queries: int, keys: int) -> TokenIndex:
    """What `build` makes of what is given, tensors and nested lists of them, and of the lengths; kept as long as the
    first tensor lives, until it is asked for with others or after a change in place."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "The index of token pairs cannot be built under torch.compile; build a TokenIndex before, and pass "
            "index.prepared()."
        )
    tensors = tensors_in(given)
    build = lasting(build)
    if not tensors or any(x.is_inference() for x in tensors):
        # Made in inference mode, a tensor has no version that would tell of a change.
        return build()
    first, *others = tensors
    key = (queries, keys, _nesting(given), *(x._version for x in tensors))
    known, refs, index = _indices.get(first, (None, (), None))
    if known != key or any(ref() is not x for ref, x in zip(refs, others, strict=True)):
        index = build()
        _indices[first] = key, [weakref.ref(x) for x in others], index
    return index


def _nesting(x: Tensor | Sequence) -> tuple | None:
    """How lists lie in one another."""
    return None if isinstance(x, Tensor) else tuple(map(_nesting, x))


def tensors_in(x: Tensor | Sequence) -> list[Tensor]:
    """The tensors of nested lists, one after another."""
    return [x] if isinstance(x, Tensor) else [tensor for part in x for tensor in tensors_in(part)]


def lists_of(name: str, x: Tensor | Sequence, dims: int) -> Nested:
    """Lists of pairs, or of keys, as tensors of so many dimensions and more: what is given in Python integers, too.

    Raises:
        TypeError: another form of lists, or no such thing.
    """
    if isinstance(x, Tensor):
        x = plain(name, x)
        if x.is_nested:
            raise TypeError(f"{name} are a jagged tensor; give TokenIndex.from_jagged of it in place of lists.")
        if x.layout != torch.strided:
            raise TypeError(f"{name} are a tensor of layout {x.layout}; give its col_indices() and crow_indices().")
        if x.dtype == torch.bool:
            raise TypeError(f"{name} are a mask; give TokenIndex.from_mask of it in place of lists.")
        return x
    if not isinstance(x, (list, tuple)) or not x:
        raise TypeError(f"{name} are {x!r}; they have to be a tensor, or a list of one for each head.")
    depth, leaf = 0, x
    while isinstance(leaf, (list, tuple)) and leaf:
        depth, leaf = depth + 1, leaf[0]
    if isinstance(leaf, int) and depth == dims:
        return lists_of(name, torch.tensor(x), dims)
    return [lists_of(f"{name}[{i}]", part, dims) for i, part in enumerate(x)]


def _csr_of_jagged(x: Nested) -> tuple[Nested, Nested]:
    """Values and offsets of jagged tensors, as these lie in one another."""
    if isinstance(x, (list, tuple)) and x:
        values, offsets = zip(*map(_csr_of_jagged, x))
        return list(values), list(offsets)
    if not isinstance(x, Tensor) or not x.is_nested or x.layout != torch.jagged or x.dim() != 2:
        raise TypeError("Give a nested tensor of layout torch.jagged with 2 dimensions, or a list of such.")
    if x.lengths() is not None:
        # Its rows are parts of what lies between the offsets.
        return torch.cat([x.values()[:0], *x.unbind()]), pad(x.lengths().cumsum(0), (1, 0))
    return x.values(), x.offsets()


def _as_lists(name: str, x: Nested, dims: int) -> tuple[list[Tensor], int, int]:
    """Tensors of so many dimensions, one a list in (batch, head) order; how many sequences and heads have theirs."""
    if isinstance(x, Tensor):
        if x.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} are {x.dtype}; they have to be int32 or int64, such as {name}.long().")
        if not dims <= x.dim() <= dims + 2:
            raise ValueError(
                f"{name} have {x.dim()} dimensions; they have to have {dims}, and perhaps before these (heads,) or "
                "(batch, heads)."
            )
        lead = (1, 1, *x.shape[: x.dim() - dims])[-2:]
        return list(x.reshape(math.prod(lead), *x.shape[x.dim() - dims :])), *lead
    parts = [_as_lists(f"{name}[{i}]", part, dims) for i, part in enumerate(x)]
    inner = {(batch, heads) for _, batch, heads in parts}
    depth = {_depth(part, dims) for part in x}
    if len(inner) > 1 or len(depth) > 1 or max(depth) > 1:
        raise ValueError(
            f"{name} are a list of unlike or too deeply nested parts; give one list of tensors for each head."
        )
    lists = [tensor for tensors, _, _ in parts for tensor in tensors]
    heads = len(parts[0][0])
    return (lists, len(x), heads) if max(depth) == 1 else (lists, 1, len(x))


def _depth(x: Tensor | Sequence, dims: int) -> int:
    return x.dim() - dims if isinstance(x, Tensor) else 1 + _depth(x[0], dims)


def _in_list(p: int, lists: list[Tensor]) -> str:
    """How a message names one of several lists."""
    return f" of list {p}" if len(lists) > 1 else ""


def _of_lists(numbers: Sequence[int], counts: Sequence[int], device: torch.device) -> Tensor:
    """int64 (N): for each pair its list's number."""
    total = sum(counts)
    numbers, counts = torch.tensor([numbers, counts]).to(device)
    return numbers.repeat_interleave(counts, output_size=total)


def _offsets_of(lines: Tensor, size: int) -> Tensor:
    """int32 (size + 1): where each line's entries begin among ascending lines."""
    return torch.searchsorted(lines, torch.arange(size + 1, device=lines.device, dtype=lines.dtype), out_int32=True)


def _refuse_pairs(lists: list[Tensor], queries: int, keys: int) -> None:
    """Raises ValueError, which names the first token that does not exist."""
    for p, one in enumerate(lists):
        wrong = (one < 0) | (one >= torch.tensor([queries, keys], device=one.device))
        if bool(wrong.any()):
            n, side = wrong.nonzero()[0].tolist()
            pair = tuple(one[n].tolist())
            raise ValueError(
                f"indices{_in_list(p, lists)}[{n}] is {pair}; "
                f"{('query', 'key')[side]} tokens are 0 to {(queries, keys)[side] - 1}."
                + (" Rows of -1, which fill a list up, come last." if pair == (-1, -1) else "")
            )


def _refuse_values(lists: list[Tensor], ends: list[Tensor], keys: int) -> None:
    """Raises ValueError, which names the first key that does not exist."""
    for p, (one, of_rows) in enumerate(zip(lists, ends, strict=True)):
        used = one[: int(of_rows[-1]) if len(of_rows) else 0]
        wrong = ((used < 0) | (used >= keys)).nonzero()
        if len(wrong):
            n = int(wrong[0])
            raise ValueError(
                f"values{_in_list(p, lists)}[{n}], in row {int((of_rows <= n).sum())}, is {int(used[n])}; key tokens "
                f"are 0 to {keys - 1}."
            )


def _row_ends(offsets: Tensor, queries: int, where: str) -> Tensor:
    """(T,), the end of each row; offsets: int64."""
    if len(offsets) not in (queries, queries + 1):
        raise ValueError(
            f"offsets{where} has {len(offsets)} entries for {queries} query tokens; it has to have the end of each "
            f"row, {queries}, or a CSR row pointer, {queries + 1}."
        )
    pointer = offsets if len(offsets) == queries + 1 else pad(offsets, (1, 0))
    if int(pointer[0]) != 0:
        raise ValueError(f"offsets{where}[0] is {int(pointer[0])}; a CSR row pointer begins with 0.")
    falling = (pointer.diff() < 0).nonzero()
    if len(falling):
        # The row that ends before it begins.
        row = int(falling[0])
        at = row + len(offsets) - queries
        raise ValueError(
            f"offsets{where}[{at}] is {int(pointer[row + 1])} after {int(pointer[row])}; the ends of rows must not "
            "fall."
        )
    return pointer[1:]
