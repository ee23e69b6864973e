"""SequenceParallelAttention: attention over ranks that each hold a part of the sequence."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from zlib import crc32

import torch
from torch import distributed

from ..index.cache import KEPT
from ..index.master_layout import MasterLayout
from ..index.packed import Documents
from ..index.transforms import outside_of_graphs, outside_transforms
from ..layout import crop
from ..modules.chosen_attention import chooses_by_group
from ..modules.local_attention import LocalAttention
from ..modules.structured_attention import StructuredAttention
from ..ops._library import DTYPES, check_inputs
from ..ops.call import AttentionCall
from ..ops.operands import dropout_seed, dropout_seeded
from ..ops.packed_operands import one_as_rows, rows_as_one
from ..sparsity import SparsityConfig
from ..tools.notices import say_notices
from .deal import TOLERANCE, HeadDeal, deal_heads
from .exchange import Exchange, RanksOfSequence, heads_to_tokens, tokens_to_heads
from .halo import BlockHalo, WindowHalo
from .halo_plan import halo_that_pays, keys_pay, live_blocks, received_of_window

TOLD = 14
"""How many numbers a rank tells of its part."""


class SequenceParallelAttention:
    """Block-sparse attention of a sequence whose parts lie on several ranks.

    Each rank gives the queries, keys and values of its own tokens, and gets their outputs. Results and gradients are
    those of one rank, to rounding. Where queries see few keys of other ranks, as in windows with some global tokens,
    ranks send each other these keys, and a line says so. Otherwise they exchange tokens for heads: each computes some
    heads over the whole sequence, with their layouts for its whole length. Heads are dealt so that ranks have nearly as
    many live blocks, of packed documents in the longest; the first deal by which they differ by more than 3 % is
    printed.

    Sources: Jacobs et al., "DeepSpeed Ulysses", 2023 (the exchange of heads); DeepSpeed's `DistributedAttention`;
    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018 (rows merged from parts).

    Args:
        sparsity_config: the structure, for all heads.
        max_seq_length: tokens of the whole sequence that a layout is first built for, a multiple of the block.
        group: the ranks, of torch.distributed, in the order of their parts; all if it is not given.

    Raises:
        RuntimeError: torch.distributed does not run.
        TypeError: sparsity_config is no structure.

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
        self._dealt = functools.lru_cache(KEPT)(self._deal_on)
        self._halos = functools.lru_cache(KEPT)(self._halo_on)
        self._exchanges = functools.lru_cache(KEPT)(self._exchanges_of)
        self._has_said = False

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        lengths: tuple[int, ...] | None = None,
        cu_seqlens: torch.Tensor | None = None,
        document_layout: str = "own",
        scale: float | None = None,
        causal: bool = False,
        key_padding_mask: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> torch.Tensor:
        """Attention of the rank's own tokens to those of the whole sequence; all ranks call it.

        Args:
            query: (B, H, T_r, D), T_r the rank's own tokens, 1 or more; any strides.
            key, value: alike, or with fewer heads, which divide H. They may be fewer than ranks. H may be only where
                ranks exchange keys: with a structure or a window, a whole number of blocks on each rank but the last,
                and neither dropout nor cu_seqlens.
            lengths: T_r of each rank. Without it ranks ask each other, and a GPU is waited for;
                with it nothing is compared between ranks, which have to give the same options.
            cu_seqlens: int32 or int64 (documents + 1), the same on all ranks: the sequences are rows of packed
                documents, of which none sees another. It goes from 0 to the tokens of all rows, one whole row after the
                other, whose ends are ends of documents. Borders of ranks may lie anywhere. No key_padding_mask.
            document_layout: of packed documents, as `block_sparse_attention` has it: 'own', each has the layout from
                its own start; or of one row 'row', where the row's layout ends at borders, without dropout.
            scale: factor of the scores, 1 / sqrt(D) by default.
            causal: whether a token sees itself and those before it alone, in the whole sequence or in its document.
            key_padding_mask: (B or 1, T_r), of the rank's own tokens, or with `lengths` (B or 1, T), of all: bool keeps
                where True, a float is added.
            sinks: (H,), a logit a head in the softmax's denominator, the same on all ranks. Its gradient on a rank is
                that of what the rank computes: summed over ranks, as that of any parameter, it is whole.
            dropout_p: share of the probabilities that are dropped. Each head draws by its own number from the first
                rank's seed, in a call of its own: any number of ranks drops the same pairs.

        Returns:
            (B, H, T_r, D) in query's dtype.

        Raises:
            TypeError: cu_seqlens that is no tensor of integers.
            ValueError: fewer heads than ranks where they exchange heads; shapes, dtypes, lengths or documents that do
                not fit, or that differ between ranks. Without `lengths` all ranks raise it where one cannot compute its
                part.
            NotImplementedError: shapes of query, key and value differ in more than heads.
        """
        check_inputs(query=query, key=key, value=value, key_padding_mask=key_padding_mask, sinks=sinks)
        try:
            call = AttentionCall(query, key, value, scale, causal, sinks=sinks, dropout_p=dropout_p).checked()
            self._check_dropout(dropout_p)
            _check_mask(key_padding_mask, query.shape[2], lengths)
            documents = None if cu_seqlens is None else Documents.read(cu_seqlens)
        except (TypeError, ValueError):
            if lengths is None:  # the others wait for what this rank tells of its part
                self._told_by_all([0] * TOLD, query.device)
            raise
        if lengths is None:
            lengths = self._agreed_lengths(call, key_padding_mask, documents, document_layout)
        self._check_lengths(lengths, query.shape[2])
        tokens = sum(lengths)
        if key_padding_mask is not None:
            call = call._replace(key_padding_mask=self._whole_mask(key_padding_mask, lengths))
        if documents is not None:
            _check_documents(documents, query.shape[0], tokens, document_layout, key_padding_mask)
            tokens = tokens if document_layout == "row" else max(documents.lengths)
        if isinstance(self._attention, StructuredAttention):
            self._attention.check(call.query, call.key, call.value)
            self._attention.synchronize_layout()
        if documents is None and document_layout == "own" and not dropout_p:
            halo = self._halo(call, lengths)
            if halo is not None:
                return halo(call)
        deal = self._deal(call, tokens)
        there, back = self._exchanges(deal, lengths)
        own, rows = deal.queries[self._ranks.rank], query.shape[0]
        query, key, value = tokens_to_heads(call.query, call.key, call.value, there)
        packed: dict[str, Any] = {}
        if documents is not None:
            query, key, value = map(rows_as_one, (query, key, value))
            packed["cu_seqlens"] = cu_seqlens
        if document_layout != "own":  # windows and dense attention know no other
            packed["document_layout"] = document_layout
        sinks = None if sinks is None else sinks[list(own)]
        output = self._attend(own, call._replace(query=query, key=key, value=value, sinks=sinks), packed)
        return heads_to_tokens(output if documents is None else one_as_rows(output, rows), back)

    @outside_of_graphs
    def _halo(self, call: AttentionCall, lengths: tuple[int, ...]) -> BlockHalo | WindowHalo | None:
        """The part that computes the rank's own queries, if ranks exchange keys in the place of heads."""
        attention, layout, causal = self._attention, None, call.causal
        if self._ranks.size == 1 or not computes_own_tokens(attention):
            return None
        if isinstance(attention, StructuredAttention):
            layout, causal = attention.covering(sum(lengths)), causal or attention.causal
        heads, key_heads = call.query.shape[1], call.key.shape[1]
        return self._halos(layout, lengths, heads, key_heads, causal, call.sinks is not None, call.device)

    @outside_transforms
    def _halo_on(
        self,
        layout: MasterLayout | None,
        lengths: tuple[int, ...],
        heads: int,
        key_heads: int,
        causal: bool,
        has_sinks: bool,
        device: torch.device,
    ) -> BlockHalo | WindowHalo | None:
        ranks, attention, tokens = self._ranks, self._attention, sum(lengths)
        halo: BlockHalo | WindowHalo
        if isinstance(attention, LocalAttention):
            received = received_of_window(lengths, attention.window, causal, key_heads)
            if not keys_pay(received, tokens, ranks.size, heads, key_heads):
                return None
            halo = WindowHalo(attention, lengths, causal, ranks, device)
        else:
            assert layout is not None
            blocks = -(-tokens // layout.block)
            live, may_be_wide = crop(layout.layout, blocks, blocks), not (causal or has_sinks)
            plan = halo_that_pays(
                live,
                layout.block,
                lengths,
                heads,
                key_heads,
                functools.partial(self._dealt, layout, blocks, heads, key_heads, causal),
                causal=causal,
                may_be_wide=may_be_wide,
            )
            if plan is None:
                return None
            halo = BlockHalo(plan, live, layout.block, lengths, causal, ranks, device)
        say_notices([f"the {ranks.size} ranks of a sequence send each other the keys that their own queries see."])
        return halo

    def _deal(self, call: AttentionCall, tokens: int) -> HeadDeal:
        """Deals heads to ranks, for a sequence of so many tokens; of packed documents by the longest."""
        attention, heads, key_heads = self._attention, call.query.shape[1], call.key.shape[1]
        if not isinstance(attention, StructuredAttention) or attention.chooses:  # all heads cost the same
            return self._dealt(None, 0, heads, key_heads, call.causal)
        layout = attention.covering(tokens)
        blocks = -(-tokens // layout.block)
        deal = self._dealt(layout, blocks, heads, key_heads, call.causal or attention.causal)
        if deal.spread > TOLERANCE and not self._has_said:
            self._has_said = True
            _say(deal, blocks * layout.block)
        return deal

    def _deal_on(self, layout: MasterLayout | None, blocks: int, heads: int, key_heads: int, causal: bool) -> HeadDeal:
        live = [1] * heads if layout is None else live_blocks(crop(layout.layout, blocks, blocks), heads, causal)
        return deal_heads(live, key_heads, self._ranks.size, whole=_chooses_by_group(self._attention))

    def _exchanges_of(self, deal: HeadDeal, lengths: tuple[int, ...]) -> tuple[Exchange, Exchange]:
        """Exchanges of query, key and value, and of the output."""
        there, back = (deal.queries, deal.keys, deal.keys), (deal.queries,)
        return Exchange(there, lengths, self._ranks), Exchange(back, lengths, self._ranks)

    def _attend(self, own: tuple[int, ...], call: AttentionCall, packed: dict[str, Any]) -> torch.Tensor:
        """Attention of this rank's own heads, (B, own heads, T, D) each, over the whole sequence.

        With dropout each head is a call of its own, whose seed has the head's number: kernels number the heads of a
        call from 0, so that heads of several ranks would drop the same pairs, and other pairs on another number of
        ranks.
        """
        query, key, value, sinks = call.query, call.key, call.value, call.sinks
        options = {"scale": call.scale, "causal": call.causal, "key_padding_mask": call.key_padding_mask, **packed}
        if not call.dropout_p:
            return self._of(own)(query, key, value, sinks=sinks, **options)
        seed = self._ranks.from_first(dropout_seed(query.device))
        shared, outputs = query.shape[1] // key.shape[1], []
        for place, head in enumerate(own):
            part, keys = slice(place, place + 1), slice(place // shared, place // shared + 1)
            options["sinks"] = None if sinks is None else sinks[part]
            with dropout_seeded(seed + torch.tensor([0, head], device=seed.device)):
                of_head = query[:, part], key[:, keys], value[:, keys]
                outputs.append(self._of((head,))(*of_head, dropout_p=call.dropout_p, **options))
        return torch.cat(outputs, 1)

    def _of(self, heads: tuple[int, ...]) -> Callable[..., torch.Tensor]:
        """The attention that computes these heads."""
        attention = self._attention
        return attention.of_heads(heads) if isinstance(attention, StructuredAttention) else attention

    def _whole_mask(self, mask: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        """The key padding mask of the whole sequence, (B or 1, T)."""
        return mask if mask.shape[1] == sum(lengths) else self._ranks.all_tokens(mask, lengths)

    def _check_dropout(self, dropout_p: float) -> None:
        if dropout_p and _chooses_by_group(self._attention):
            raise ValueError(
                f"dropout_p is {dropout_p} in a layer whose heads choose blocks by groups, and ranks drop pairs of "
                "each head alone; set the attention dropout to 0, or chosen_by_group to false."
            )
        if dropout_p and not isinstance(self._attention, StructuredAttention):
            raise ValueError(
                f"dropout_p is {dropout_p} in a layer that is dense or has a window of the model's own, where ranks "
                'would drop pairs by numbers of their own; give dense layers the mode "dense" in the place of null, or '
                "set the model's attention dropout to 0."
            )

    def _agreed_lengths(
        self, call: AttentionCall, mask: torch.Tensor | None, documents: Documents | None, document_layout: str
    ) -> tuple[int, ...]:
        """The lengths of all ranks, after a look at whether the rest of their shapes, and their options, are the same.
        Waits for the device."""
        query, (batch, heads, tokens, width) = call.query, call.query.shape
        kinds = [DTYPES.index(query.dtype), -1 if mask is None else mask.element_size()]
        edges = (0, 0) if documents is None else (len(documents.edges) - 1, crc32(repr(documents.edges).encode()))
        options = call.causal, call.dropout_p > 0, document_layout == "row", call.sinks is not None
        mine = [tokens, batch, heads, call.key.shape[1], width, 0 if mask is None else len(mask), *edges, *kinds]
        mine += map(int, options)
        rows = self._told_by_all(mine, query.device)
        refusing = ", ".join(str(rank) for rank, row in enumerate(rows) if not row[0])
        if refusing:
            raise ValueError(
                f"Of the {len(rows)} ranks that share a sequence these refuse their parts: {refusing}; their own "
                "errors say why. Give each rank a part that it can compute, of one token or more."
            )
        if any(row[1:] != rows[0][1:] for row in rows):
            shapes = "; ".join(
                f"rank {rank}: batch {row[1]}, {row[2]} heads, {row[3]} key heads, head size {row[4]}, "
                f"{f'a mask of {row[5]} rows' if row[5] else 'no mask'}, "
                f"{f'{row[6]} packed documents' if row[6] else 'no cu_seqlens'}"
                for rank, row in enumerate(rows)
            )
            raise ValueError(
                f"Ranks give their parts of a sequence in different shapes or dtypes, or with other "
                f"options ({shapes}); only the tokens of a rank may differ in number: give all ranks the same batch, "
                "the same cu_seqlens and options, and a key padding mask to all or to none."
            )
        return tuple(row[0] for row in rows)

    def _told_by_all(self, mine: list[int], device: torch.device) -> list[list[int]]:
        """The `TOLD` numbers that each rank tells of its part, zeros where it refuses it."""
        return self._ranks.rows_of_all(torch.tensor(mine, device=device)).tolist()

    def _check_lengths(self, lengths: tuple[int, ...], tokens: int) -> None:
        ranks = self._ranks
        if len(lengths) != ranks.size or min(lengths) < 1 or lengths[ranks.rank] != tokens:
            raise ValueError(
                f"lengths are {tuple(lengths)} and rank {ranks.rank} of {ranks.size} has {tokens} tokens; give the "
                "number of tokens of each rank, 1 or more, the same numbers on all."
            )


def computes_own_tokens(attention: object) -> bool:
    """Tells if each rank can compute the queries of its own tokens, so that there may be more ranks than heads."""
    if isinstance(attention, StructuredAttention):
        return attention.implementation == "fused" and not attention.chooses
    return isinstance(attention, LocalAttention)


def _chooses_by_group(attention: object) -> bool:
    return isinstance(attention, StructuredAttention) and chooses_by_group(attention.sparsity_config)


def _check_mask(mask: torch.Tensor | None, own: int, lengths: tuple[int, ...] | None) -> None:
    """Raises ValueError unless a key padding mask is of the rank's own tokens, or of those of known ranks."""
    known = (own,) if lengths is None else (own, sum(lengths))
    if mask is not None and (mask.dim() != 2 or mask.shape[1] not in known):
        of_all = f", or (batch or 1, {known[-1]}), of those of all ranks" if len(known) > 1 else ""
        raise ValueError(
            f"key_padding_mask has shape {tuple(mask.shape)}; it has to be (batch or 1, {own}), of the rank's own "
            f"tokens{of_all}."
        )


def _check_documents(
    documents: Documents, rows: int, tokens: int, document_layout: str, key_padding_mask: torch.Tensor | None
) -> None:
    """Raises ValueError unless the rows, of so many tokens each, are of these documents."""
    if key_padding_mask is not None:
        raise ValueError(
            "cu_seqlens and key_padding_mask are both given; packed documents have no padding: leave the mask out."
        )
    if document_layout == "row" and rows != 1:
        raise ValueError(f"document_layout is 'row', which is for one row of documents, and query has {rows}.")
    ends = set(range(tokens, rows * tokens + 1, tokens))
    if documents.tokens != rows * tokens or not ends <= set(documents.edges):
        raise ValueError(
            f"cu_seqlens ends with {documents.tokens}, and the ranks have {rows} x {tokens} tokens together; it has to "
            "begin with 0, end with the number of all tokens, and have the end of each row."
        )


def _say(deal: HeadDeal, tokens: int) -> None:
    """Prints a deal by which ranks differ by more than they should."""
    heads = ", ".join(str(len(queries)) for queries in deal.queries)
    loads = ", ".join(f"{load:,}" for load in deal.loads)
    say_notices(
        [
            f"the heads of a sequence of {tokens:,} tokens do not deal evenly to {len(deal.loads)} ranks: they have "
            f"{heads} heads with {loads} live blocks, and wait for the one that has most."
        ]
    )
