"""record_choices: the blocks of keys that the queries of a model's layers choose, kept while the model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..layout import LayoutRows, RowMaker
from ..ops.operands import kept
from ..tools.wording import counted


@dataclass(frozen=True)
class Choice:
    """The blocks that the queries of a layer chose in a call; of NSA those of its branch of blocks.

    Attributes:
        block_indices: (B or 1, G, T or blocks of queries, k), int32 or int64: numbers of blocks, -1 for none, in any
            order, for each of G groups of neighbouring heads.
        block: keys in a block.
        sequences: B, of the query.
        heads: H, of the query.
        tokens, keys: T and S.
        query_block: queries that chose together.
        first, local: blocks from the start, and up to a query's own, that were taken whatever they score; None where
            the model's own indexer chose.
        causal, scale, query_offset, cu_seqlens, key_padding_mask: as of `selected_attention`.
        query, key: of the call, (B, H, T, D) and (B, Hkv, S, D), where `record_choices` keeps them.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> attention = ds_sparse.IndexerAttention(4, 2, 32, index_dim=16, block=16, k=2)
        >>> query, key = torch.randn(1, 4, 64, 32), torch.randn(1, 2, 64, 32)
        >>> with ds_sparse.record_choices(attention) as choices:
        ...     output = attention(query, key, key)
        >>> rows = choices[""].rows()
        >>> rows.heads, rows.rows, rows.columns
        (4, 64, 64)
        >>> print(choices[""].explain(token=20, head=3))
        Token 20, head 3, sees keys of 2 blocks:
          0 to 15, block 0: chosen
          16 to 20, block 1: its own
    """

    block_indices: Tensor
    block: int
    sequences: int
    heads: int
    tokens: int
    keys: int
    query_block: int = 1
    first: int | None = None
    local: int | None = None
    causal: bool = False
    query_offset: int | Tensor = 0
    cu_seqlens: Tensor | None = None
    key_padding_mask: Tensor | None = None
    scale: float | None = None
    query: Tensor | None = None
    key: Tensor | None = None

    def rows(self, sequence: int = 0) -> LayoutRows:
        """Which keys each query sees: a layout of blocks of 1 token, as `draw` and `save_drawing` take it.

        Args:
            sequence: of the batch.

        Raises:
            IndexError: there is no such sequence.
        """
        _check("sequence", sequence, self.sequences)
        indices = _of(self.block_indices, sequence).cpu()
        keep = None if self.key_padding_mask is None else kept(_of(self.key_padding_mask, sequence)).cpu()
        at, begins, blocks = self._position(sequence), self._begins(), -(-self.keys // self.block)
        place = torch.arange(self.keys)

        def maker(head: int) -> RowMaker:
            return partial(made, indices[head * len(indices) // self.heads])

        def made(of_head: Tensor, rows: range) -> Tensor:
            row = torch.arange(rows.start, rows.stop)
            numbers = of_head[row // self.query_block].long()
            # What names no block has a column of its own, which nothing reads.
            numbers = torch.where((numbers >= 0) & (numbers < blocks), numbers, blocks)
            chosen = torch.zeros(len(row), blocks + 1, dtype=torch.bool).scatter_(1, numbers, True)
            begin = begins[row, None]
            seen = chosen.gather(1, (place - begin).clamp(min=0) // self.block) & (begins_of_keys == begin)
            if self.causal:
                seen &= place <= row[:, None] + at
            return seen if keep is None else seen & keep

        begins_of_keys = begins if self.cu_seqlens is not None else torch.zeros(self.keys, dtype=torch.int64)
        return LayoutRows(1 if len(indices) == 1 else self.heads, self.tokens, self.keys, maker, num_heads=self.heads)

    def explain(self, token: int, head: int = 0, sequence: int = 0) -> str:
        """Says which keys a query sees, and why: a block of them was chosen, or is taken whatever it scores.

        Args:
            token: the query's place in the call.
            head: of the query.
            sequence: of the batch.

        Raises:
            IndexError: there is no such token, head or sequence.
        """
        _check("token", token, self.tokens)
        _check("head", head, self.heads)
        (seen,) = self.rows(sequence).maker(head)(range(token, token + 1))
        begin, keys = int(self._begins()[token]), seen.nonzero().flatten()
        own = (token - begin + self._position(sequence)) // self.block
        numbers = (keys - begin) // self.block
        lines = []
        for number in numbers.unique().tolist():
            of_block = keys[numbers == number]
            lines.append(f"  {of_block[0]} to {of_block[-1]}, block {number}: {self._why(number, own)}")
        return "\n".join(
            [f"Token {token}, head {head}, sees keys of {counted(len(lines), 'block')}{':' if lines else '.'}", *lines]
        )

    def _why(self, number: int, own: int) -> str:
        if self.first is None or self.local is None:
            return "chosen by the model's own indexer"
        if number < self.first:
            return "one of the first"
        if abs(number - own) < self.local:
            return "its own" if number == own else "beside its own"
        return "chosen"

    def _position(self, sequence: int) -> int:
        """The place of the call's first query among the keys."""
        offset = self.query_offset
        return int(_of(offset.reshape(-1), sequence)) if isinstance(offset, Tensor) else offset

    def _begins(self) -> Tensor:
        """(T): where the document of each token begins."""
        if self.cu_seqlens is None:
            return torch.zeros(self.tokens, dtype=torch.int64)
        borders = self.cu_seqlens.cpu().long()
        return borders[:-1].repeat_interleave(borders.diff())


@contextmanager
def record_choices(model: nn.Module, *, keep_operands: bool = False) -> Iterator[dict[str, Choice]]:
    """Keeps the blocks that the layers of a model choose, while it runs inside: of each layer those of its last call.

    It knows layers by a structure whose queries choose (modes "moba", "nsa", "indexer"), `NativeSparseAttention` and
    `IndexerAttention` in a model of your own, and MiniMax-M3's of Transformers with `attn_implementation="ds_sparse"`.
    Nothing is copied to the host, and what was compiled runs eagerly inside; the replay of a CUDA graph is not seen.

    Args:
        model: the model, or a part of it that is called.
        keep_operands: whether each choice has the query and key of its call, which stay in memory as long as it.

    Yields:
        A dictionary, by the name of the module in the model that chose: the attention layer, or what learns in it, such
        as "model.layers.0.self_attn.sparse_attention"; "" is the model itself. In the order of the first calls.

    Raises:
        TypeError: a model that is no module.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> structure = ds_sparse.MobaSparsityConfig(num_heads=4, block=16, num_chosen_blocks=2, causal=True)
        >>> attention = ds_sparse.SparseSelfAttention(structure, max_seq_length=128)
        >>> query, key, value = (torch.randn(1, 4, 128, 8) for _ in range(3))
        >>> with ds_sparse.record_choices(attention) as choices:
        ...     output = attention(query, key, value)
        >>> choices[""].block_indices.shape
        torch.Size([1, 4, 128, 2])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; it has to be a torch.nn.Module.")
    recorder = _Recorder(keep_operands)
    with ExitStack() as stack:
        for name, module in model.named_modules():
            before = module.register_forward_pre_hook(partial(recorder.enter, name))
            after = module.register_forward_hook(recorder.leave, always_call=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        _recorders.append(recorder)
        stack.callback(_recorders.remove, recorder)
        yield recorder.choices


def note(block_indices: Tensor, block: int, query: Tensor, key: Tensor, **about: Any) -> None:
    """Tells those who record what the queries of a call have chosen, (B, H, T, D). about: the others of `Choice`."""
    for recorder in _recorders:
        recorder.note(block_indices, block, query, key, **about)


@dataclass(eq=False)
class _Recorder:
    """running: names of the modules that are in their forward, the innermost last."""

    keep_operands: bool
    choices: dict[str, Choice] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)

    def enter(self, name: str, *_: Any) -> None:
        self.running.append(name)

    def leave(self, *_: Any) -> None:
        self.running.pop()

    def note(self, block_indices: Tensor, block: int, query: Tensor, key: Tensor, **about: Any) -> None:
        if not self.running:  # of another model
            return
        sizes = *query.shape[:3], key.shape[2]
        if self.keep_operands:
            about |= {"query": query.detach(), "key": key.detach()}
        self.choices[self.running[-1]] = Choice(block_indices.detach(), block, *sizes, **about)


_recorders: list[_Recorder] = []


def _check(name: str, number: int, end: int) -> None:
    if not 0 <= number < end:
        raise IndexError(f"{name} is {number}; it has to be from 0 to {end - 1}.")


def _of(x: Tensor, sequence: int) -> Tensor:
    """That of a sequence, of what may be one for all."""
    return x[sequence if len(x) > 1 else 0]
