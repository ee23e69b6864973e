"""SequenceParallelAttention: attention over ranks that each hold a part of the sequence."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import distributed

from ..index.cache import KEPT
from ..index.master_layout import MasterLayout
from ..layout import causal_cut, count_live, crop
from ..modules.structured_attention import StructuredAttention
from ..notices import say_notices
from ..ops import block_sparse_attention
from ..ops._library import DTYPES, check_inputs, under_autocast
from ..ops.operands import check_attention_operands, check_dropout, dropout_seed, dropout_seeded
from ..sparsity import SparsityConfig
from .deal import TOLERANCE, HeadDeal, deal_heads
from .exchange import RanksOfSequence, heads_to_tokens, tokens_to_heads


class SequenceParallelAttention:
    """Block-sparse attention of a sequence whose parts lie on several ranks.

    Each rank gives the queries, keys and values of its own tokens, and gets their outputs. In between ranks exchange
    tokens for heads: each computes some heads over the whole sequence, with their layouts for its whole length. Results
    and gradients are those of one rank, to rounding. Heads are dealt so that ranks have nearly as many live blocks; a
    deal by which they differ by more than 3 % is printed once.

    Sources: Jacobs et al., "DeepSpeed Ulysses", 2023 (the exchange); DeepSpeed's `DistributedAttention`.

    Args:
        sparsity_config: the structure, for all heads.
        max_seq_length: tokens of the whole sequence that a layout is first built for, a multiple of the block.
        group: the ranks, of torch.distributed, in the order of their parts; all if it is not given.

    Raises:
        RuntimeError: torch.distributed does not run.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> ds_sparse.init_distributed()  # here of one rank
        >>> attention = ds_sparse.SequenceParallelAttention(ds_sparse.FixedSparsityConfig(num_heads=4), 128)
        >>> query, key, value = (torch.randn(2, 4, 100, 16) for _ in range(3))
        >>> attention(query, key, value, causal=True).shape
        torch.Size([2, 4, 100, 16])
    """

    def __init__(
        self,
        sparsity_config: SparsityConfig,
        max_seq_length: int = 2048,
        *,
        group: distributed.ProcessGroup | None = None,
    ):
        self._is_of(StructuredAttention(sparsity_config, max_seq_length), RanksOfSequence(group))

    @classmethod
    def around(cls, attention: Callable[..., torch.Tensor], ranks: RanksOfSequence) -> SequenceParallelAttention:
        """The same around what a layer has already.

        Args:
            attention: a `StructuredAttention`, whose layouts are shared, a `LocalAttention` or `dense_attention`.
            ranks: those that hold the parts.

        Returns:
            What computes over these ranks.
        """
        made = cls.__new__(cls)
        made._is_of(attention, ranks)
        return made

    def _is_of(self, attention: Callable[..., torch.Tensor], ranks: RanksOfSequence) -> None:
        self._attention, self._ranks = attention, ranks
        self._made = functools.lru_cache(KEPT)(self._make)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        lengths: tuple[int, ...] | None = None,
        scale: float | None = None,
        causal: bool = False,
        key_padding_mask: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> torch.Tensor:
        """Attention of the rank's own tokens to those of the whole sequence; all ranks call it.

        Args:
            query: (B, H, T_r, D), T_r the rank's own tokens, 1 or more; any strides.
            key, value: alike, or with fewer heads, which divide H; they may be fewer than ranks, H may not.
            lengths: T_r of each rank. Without it ranks ask each other, and a GPU is waited for.
            scale: factor of the scores, 1 / sqrt(D) by default.
            causal: whether a token sees itself and those before it in the whole sequence alone.
            key_padding_mask: (B or 1, T_r), of the rank's own tokens: bool keeps where True, a float is added.
            sinks: (H,), a logit a head in the softmax's denominator, the same on all ranks. Its gradient on a rank is
                that of the rank's heads: summed over ranks, as that of any parameter, it is whole.
            dropout_p: share of the probabilities that are dropped. Each head draws by its own number from the first
                rank's seed, in a call of its own: any number of ranks drops the same pairs.

        Returns:
            (B, H, T_r, D) in query's dtype.

        Raises:
            ValueError: fewer heads than ranks; shapes, dtypes or lengths that do not fit, or that differ between ranks.
            NotImplementedError: shapes of query, key and value differ in more than heads.
        """
        check_inputs(query=query, key=key, value=value, key_padding_mask=key_padding_mask, sinks=sinks)
        query, key, value = under_autocast(query, key, value)
        check_attention_operands(query, key, value)
        if lengths is None:
            lengths = self._agreed_lengths(query, key, key_padding_mask)
        if key_padding_mask is not None:
            key_padding_mask = self._ranks.all_tokens(key_padding_mask, lengths)
        return self.attend(
            query, key, value, lengths, scale=scale, causal=causal, key_padding_mask=key_padding_mask, sinks=sinks,
            dropout_p=dropout_p,
        )  # fmt: skip

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: tuple[int, ...],
        *,
        scale: float | None = None,
        causal: bool = False,
        key_padding_mask: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> torch.Tensor:
        """The call, with the lengths of all ranks and the key padding mask of the whole sequence, (B or 1, T)."""
        check_dropout("dropout_p", dropout_p)
        if dropout_p and not isinstance(self._attention, StructuredAttention):
            raise ValueError(
                f"dropout_p is {dropout_p} in a layer that is dense or has a window of the model's own, where ranks "
                'would drop pairs by numbers of their own; give dense layers the mode "dense" in the place of null, or '
                "set the model's attention dropout to 0."
            )
        self._check_lengths(lengths, query.shape[2])
        own = self._own(query, key, value, sum(lengths), causal)
        heads = tokens_to_heads(query, key, value, own.deal, lengths, self._ranks)
        options = {"scale": scale, "causal": causal, "key_padding_mask": key_padding_mask}
        if sinks is not None:
            options["sinks"] = sinks[list(own.deal.queries[self._ranks.rank])]
        output = self._with_dropout(own, heads, options, dropout_p) if dropout_p else own.attend(*heads, **options)
        return heads_to_tokens(output, own.deal, lengths, self._ranks)

    def _own(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tokens: int, causal: bool) -> _OwnHeads:
        """Which heads each rank has of a sequence of so many tokens, and what computes this rank's."""
        attention, heads, key_heads = self._attention, query.shape[1], key.shape[1]
        if not isinstance(attention, StructuredAttention):
            deal = deal_heads([1] * heads, key_heads, self._ranks.size)
            return _OwnHeads(deal, attention, lambda _: attention)
        attention.check(query, key, value)
        attention.synchronize_layout()
        layout = attention.covering(tokens)
        return self._made(layout, -(-tokens // layout.block), heads, key_heads, causal or attention.causal)

    def _make(self, layout: MasterLayout, blocks: int, heads: int, key_heads: int, causal: bool) -> _OwnHeads:
        live = _live_blocks(crop(layout.layout, blocks, blocks), causal)
        deal = deal_heads(live * heads if len(live) == 1 else live, key_heads, self._ranks.size)
        _say(deal, blocks * layout.block)
        return _OwnHeads.on(layout, deal, self._ranks.rank)

    def _with_dropout(
        self, own: _OwnHeads, heads: tuple[torch.Tensor, ...], options: dict[str, Any], dropout_p: float
    ) -> torch.Tensor:
        """Each head in a call of its own, whose seed has the head's number: kernels number the heads of a call from 0,
        so that heads of several ranks would drop the same pairs, and other pairs on another number of ranks."""
        query, key, value = heads
        seed = self._ranks.from_first(dropout_seed(query.device))
        shared, sinks, outputs = query.shape[1] // key.shape[1], options.pop("sinks", None), []
        for place, head in enumerate(own.deal.queries[self._ranks.rank]):
            keys = slice(place // shared, place // shared + 1)
            with dropout_seeded(seed + torch.tensor([0, head], device=seed.device)):
                output = own.attend_one(place)(
                    query[:, place : place + 1], key[:, keys], value[:, keys], dropout_p=dropout_p,
                    sinks=None if sinks is None else sinks[place : place + 1], **options,
                )  # fmt: skip
            outputs.append(output)
        return torch.cat(outputs, 1)

    def _agreed_lengths(
        self, query: torch.Tensor, key: torch.Tensor, key_padding_mask: torch.Tensor | None
    ) -> tuple[int, ...]:
        """The lengths of all ranks, after a look at whether the rest of their shapes is the same. Waits for the
        device."""
        batch, heads, tokens, width = query.shape
        masks = 0 if key_padding_mask is None else key_padding_mask.shape[0]
        kinds = [DTYPES.index(query.dtype), -1 if key_padding_mask is None else key_padding_mask.element_size()]
        mine = [tokens, batch, heads, key.shape[1], width, masks, *kinds]
        rows = self._ranks.rows_of_all(torch.tensor(mine, device=query.device)).tolist()
        if any(row[1:] != rows[0][1:] for row in rows):
            shapes = "; ".join(
                f"rank {rank}: batch {row[1]}, {row[2]} heads, {row[3]} key heads, head size {row[4]}, "
                f"{f'a mask of {row[5]} rows' if row[5] else 'no mask'}"
                for rank, row in enumerate(rows)
            )
            raise ValueError(
                f"Ranks give their parts of a sequence in different shapes or dtypes ({shapes}); only the tokens of a "
                "rank may differ in number: give all ranks the same batch, and a key padding mask to all or to none."
            )
        return tuple(row[0] for row in rows)

    def _check_lengths(self, lengths: tuple[int, ...], tokens: int) -> None:
        ranks = self._ranks
        if len(lengths) != ranks.size or min(lengths) < 1 or lengths[ranks.rank] != tokens:
            raise ValueError(
                f"lengths are {tuple(lengths)} and rank {ranks.rank} of {ranks.size} has {tokens} tokens; give the "
                "number of tokens of each rank, 1 or more, the same numbers on all."
            )


class _OwnHeads(NamedTuple):
    """The heads of each rank, what computes those of this one, and what computes one of them."""

    deal: HeadDeal
    attend: Callable[..., torch.Tensor]
    attend_one: Callable[[int], Callable[..., torch.Tensor]]

    @classmethod
    def on(cls, layout: MasterLayout, deal: HeadDeal, rank: int) -> _OwnHeads:
        """On the layout of all heads, which those of the rank are taken of where heads differ."""

        def attend_on(heads: list[int]) -> Callable[..., torch.Tensor]:
            of_heads = layout if len(layout.layout) == 1 else MasterLayout(layout.layout[heads], layout.block)
            return functools.partial(block_sparse_attention, layout=of_heads)

        heads = list(deal.queries[rank])
        return cls(deal, attend_on(heads), functools.cache(lambda place: attend_on([heads[place]])))


def _live_blocks(layout: torch.Tensor, causal: bool) -> list[int]:
    """Of each head of (1 or H, R, R); with `causal` without those above the diagonal."""
    return [int(count_live(causal_cut(head) if causal else head).sum()) for head in layout]


def _say(deal: HeadDeal, tokens: int) -> None:
    """Prints a deal by which ranks differ by more than they should."""
    if deal.spread > TOLERANCE:
        heads = ", ".join(str(len(queries)) for queries in deal.queries)
        loads = ", ".join(f"{load:,}" for load in deal.loads)
        say_notices(
            [
                f"the heads of a sequence of {tokens:,} tokens do not deal evenly to {len(deal.loads)} ranks: they "
                f"have {heads} heads with {loads} live blocks, and wait for the one that has most."
            ]
        )
