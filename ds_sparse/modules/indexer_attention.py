"""IndexerAttention: attention on the blocks of keys that an indexer chooses, and the loss that teaches it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..ops import select_blocks
from ..ops._autograd import Function
from ..ops._library import under_autocast
from ..ops.block_selection import checked_number
from ..ops.call import AttentionCall
from ..ops.operands import kept, wide_dtype
from ..ops.selected import Chosen, selected_results
from .choices import note
from .learned_choice import LearnedChoice


class IndexerAttention(LearnedChoice):
    """Attention on the blocks of keys that an indexer chooses, whose heads are few and small.

    A block's score is the largest product of the indexer's query with one of its keys that the token sees. The choice
    has no gradient: in training the indexer learns from the attention that it chose for, by `indexer_loss`. Its
    gradient flows although nobody adds the loss to the model's: where the output has a gradient, the loss has one of
    `loss_weight`. Only what the indexer's queries and keys are made of by gets it.

    Operands are those of attention layers, after rotary embedding. The indexer's query is a projection of the queries
    of all heads that an index head chooses for, concatenated, and its key one of their keys; both are detached. It
    begins as the mean product of these heads, on a random projection. Who makes the indexer's queries and keys of the
    hidden state, as the source does, gives them to each call, and detaches that state.

    Sources: MiniMax, "MiniMax-M3", 2026; DeepSeek-AI, "DeepSeek-V3.2", 2025 (the loss).

    Args:
        num_heads: H.
        num_key_heads: Hkv, a divisor of it.
        head_dim: D.
        index_heads: Hi, heads of the indexer: Hkv, H or 1; Hkv if it is not given.
        index_dim: Di, numbers of each, D at most; None makes no projections: `index_query` and `index_key` are given.
        block: keys in a block: 16, 32, 64, 128, 256, 512 or 1024.
        k: how many blocks a token sees, with those of `first` and `local`.
        first, local: so many blocks from the start, and so many up to the token's own, are seen whatever they score; if
            not causal, as many behind it.
        loss_weight: the loss' gradient. With None nothing is added to the model's gradient, and the user adds `loss` to
            the model's. Optimizers of Adam's kind learn alike with any weight; where fp16 losses are scaled, give the
            scale.

    Attributes:
        query_weight: (Hi, H / Hi * D, Di), and key_weight: (Hi, Hkv / Hi * D, Di), or (Hi, D, Di) with H index heads.
        loss: that of the last call that learned, which those in evaluation, without gradients or with a `query_offset`
            do not. It has a gradient if there is no `loss_weight`, and is else a buffer that the state dict has not.
            Where activations are checkpointed by PyTorch's `use_reentrant=True` it is there after the backward pass.

    Raises:
        ValueError: numbers that do not fit.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> attention = ds_sparse.IndexerAttention(8, 2, 32, index_dim=16, block=16, k=4)
        >>> query = torch.randn(1, 8, 100, 32, requires_grad=True)
        >>> key, value = torch.randn(1, 2, 100, 32), torch.randn(1, 2, 100, 32)
        >>> output = attention(query, key, value)
        >>> output.sum().backward()
        >>> attention.loss.shape, attention.key_weight.grad.shape
        (torch.Size([]), torch.Size([2, 32, 16]))
    """

    loss: Tensor

    def __init__(
        self,
        num_heads: int,
        num_key_heads: int,
        head_dim: int,
        *,
        index_heads: int | None = None,
        index_dim: int | None = 64,
        block: int = 128,
        k: int = 16,
        first: int = 0,
        local: int = 1,
        loss_weight: float | None = 1.0,
    ) -> None:
        super().__init__(num_heads, num_key_heads, head_dim, block, k, first, local)
        index_heads = num_key_heads if index_heads is None else checked_number("index_heads", index_heads, 1)
        if index_heads not in (1, num_key_heads, num_heads):
            raise ValueError(
                f"index_heads is {index_heads}; it has to be num_key_heads ({num_key_heads}), num_heads "
                f"({num_heads}) or 1."
            )
        _check_index_dim(1 if index_dim is None else checked_number("index_dim", index_dim, 1), head_dim)
        is_number = isinstance(loss_weight, int | float) and not isinstance(loss_weight, bool)
        if loss_weight is not None and not (is_number and 0 < loss_weight < float("inf")):
            raise ValueError(f"loss_weight is {loss_weight!r}; it has to be a number above 0, or None.")
        self.index_heads, self.index_dim, self.loss_weight = index_heads, index_dim, loss_weight
        self.register_buffer("loss", torch.zeros(()), persistent=False)
        if index_dim is None:
            self.query_weight = self.key_weight = None
            return
        self.query_weight, self.key_weight = (
            nn.Parameter(torch.empty(index_heads, heads * head_dim, index_dim))
            for heads in (num_heads // index_heads, max(1, num_key_heads // index_heads))
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters anew, as the constructor does: the mean of heads, on a random projection."""
        self.loss = torch.zeros_like(self.loss)
        if self.query_weight is None or self.key_weight is None or self.index_dim is None:
            return
        projection = self.query_weight.new_empty(self.index_heads, self.head_dim, self.index_dim)
        nn.init.normal_(projection, std=(self.index_dim * self.head_dim) ** -0.25)
        with torch.no_grad():
            for weight in (self.query_weight, self.key_weight):
                heads = weight.shape[1] // self.head_dim
                weight.copy_(projection.repeat(1, heads, 1) / heads)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        index_query: Tensor | None = None,
        index_key: Tensor | None = None,
        causal: bool = True,
        scale: float | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        query_offset: int | Tensor = 0,
    ) -> Tensor:
        """Attention of each token to the blocks that the indexer chooses for it.

        Args:
            query: (B, H, T, D), fp16, bf16 or fp32, on the CPU also fp64.
            key, value: (B, Hkv, S, D).
            index_query: (B, Hi, T, Di), in the place of the module's.
            index_key: (B, Hi or 1, S, Di), which comes with it.
            causal, scale, key_padding_mask, cu_seqlens, query_offset: as in `selected_attention`; with `cu_seqlens` B
                is 1. With a `query_offset`, as while decoding, there is no loss.

        Returns:
            (B, H, T, D).

        Raises:
            TypeError: operands that are no tensors.
            ValueError: shapes that do not fit.
        """
        self.check_operands(query, key, value)
        query, key, value = under_autocast(query, key, value)  # once, where each operation would cast its own
        if index_query is None or index_key is None:
            if index_query is not None or index_key is not None:
                raise ValueError("One of index_query and index_key is given; give both, or neither.")
            index_query, index_key = self._index(query, key)
        more: dict[str, Any] = {"causal": causal, "cu_seqlens": cu_seqlens, "key_padding_mask": key_padding_mask}
        chosen = select_blocks(
            index_query, index_key, self.block, self.k, score="max", first=self.first, local=self.local,
            query_offset=query_offset, **more,
        )  # fmt: skip
        note(
            chosen, self.block, query, key, first=self.first, local=self.local, scale=scale, query_offset=query_offset,
            **more,
        )  # fmt: skip
        call = AttentionCall(query, key, value, scale, causal, key_padding_mask)
        (output,), made = selected_results(call, chosen, self.block, cu_seqlens, query_offset)
        at_start = not isinstance(query_offset, Tensor) and query_offset == 0
        if self.training and torch.is_grad_enabled() and at_start:
            loss = _loss(call, index_query, index_key, chosen, self.block, None, cu_seqlens, made)
            if self.loss_weight is not None:
                output = _WithLoss.apply(output, loss, float(self.loss_weight))
                # In place, as graphs that compute activations again let no module keep another tensor.
                self.loss.copy_(loss.detach())
            else:
                self.loss = loss
        return output

    def _index(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """The indexer's queries and keys, (B, Hi, T, Di) and (B, Hi, S, Di)."""
        if self.query_weight is None or self.key_weight is None:
            raise ValueError("index_dim is None, so there are no projections; give index_query and index_key.")
        key = _repeated(key, max(self.index_heads, self.num_key_heads))
        of_query, of_key = (
            x.detach().unflatten(1, (self.index_heads, -1)).transpose(2, 3).flatten(3) for x in (query, key)
        )
        # One product for each head, of all sequences: it reads queries and keys where a projection has written them.
        product = "bhtd,hde->bhte"
        return torch.einsum(product, of_query, self.query_weight), torch.einsum(product, of_key, self.key_weight)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have the loss without its graph, which none can have."""
        state = super().__getstate__()
        # The same tensor where it has no graph: who copies may have chosen its copy, by deepcopy's memo.
        return state | {"_buffers": self._buffers | {"loss": self.loss.detach()}} if self.loss.requires_grad else state


def indexer_loss(
    query: Tensor,
    key: Tensor,
    index_query: Tensor,
    index_key: Tensor,
    chosen: Tensor,
    block: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    index_scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """What an indexer learns by: the cross entropy of attention's probabilities and its own, on the chosen keys.

    Attention's, the mean over the heads that an index head chooses for, have no gradient; the indexer's are
    softmax(index_scale * index_query @ index_key^T). The cross entropy is the divergence KL(attention || indexer) and
    the entropy of attention, which has no gradient: gradients are those of the divergence. It is the mean over
    sequences, index heads, and tokens that see something and are no padding. No matrix of tokens by keys is made:
    memory is linear in tokens, and time that of two calls of `selected_attention`.

    Sources: DeepSeek-AI, "DeepSeek-V3.2", 2025; MiniMax, "MiniMax-M3", 2026.

    Args:
        query: (B, H, T, D).
        key: (B, Hkv, T, D).
        index_query: (B, Hi, T, Di); Hi is Hkv, H or 1, Di at most D.
        index_key: (B, Hi or 1, T, Di).
        chosen: (B, Hi, T, k), the numbers of blocks that each token sees: of `select_blocks`.
        block: keys in a block.
        causal, scale, cu_seqlens, key_padding_mask: as in `selected_attention`; with `cu_seqlens` B is 1.
        index_scale: factor of the indexer's scores; 1 / sqrt(Di) if it is not given.

    Returns:
        A scalar, fp32 or fp64, with a gradient for index_query and index_key alone.

    Raises:
        TypeError: operands that are no tensors.
        ValueError: shapes, dtypes or devices that do not fit.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> query, key = torch.randn(1, 8, 100, 32), torch.randn(1, 2, 100, 32)
        >>> index_query = torch.randn(1, 2, 100, 16, requires_grad=True)
        >>> index_key = torch.randn(1, 1, 100, 16, requires_grad=True)
        >>> chosen = ds_sparse.select_blocks(index_query, index_key, 16, 4, score="max", causal=True)
        >>> ds_sparse.indexer_loss(query, key, index_query, index_key, chosen, 16, causal=True).backward()
        >>> index_key.grad.shape
        torch.Size([1, 1, 100, 16])
    """
    call = AttentionCall(query, key, key, scale, causal, key_padding_mask)
    return _loss(call, index_query, index_key, chosen, block, index_scale, cu_seqlens)


def _loss(
    call: AttentionCall,
    index_query: Tensor,
    index_key: Tensor,
    block_indices: Tensor,
    block: int,
    index_scale: float | None,
    cu_seqlens: Tensor | None,
    chosen: Chosen | None = None,
) -> Tensor:
    """`indexer_loss` of attention, whatever its value. chosen: what a call on the same numbers of blocks has made of
    them."""
    query, key = call.query, call.key
    head_dim, (index_heads, _, index_dim) = query.shape[3], index_query.shape[1:]
    _check_index_dim(index_dim, head_dim)
    index_scale = index_dim**-0.5 if index_scale is None else index_scale
    of_indexer = call._replace(query=index_query, key=index_key, value=index_key.detach(), scale=index_scale)
    (_, lse), chosen = selected_results(of_indexer, block_indices, block, cu_seqlens, return_lse=True, chosen=chosen)
    # The mean score under attention's probabilities is a product with the mean of the indexer's keys under them.
    values, heads = pad(index_key, (0, head_dim - index_dim)), max(key.shape[1], index_key.shape[1])
    keys, values = (_repeated(x, heads) for x in (key.detach(), values))
    call = call._replace(query=query.detach(), key=keys, value=values)
    (of_heads,), _ = selected_results(call, block_indices, block, cu_seqlens, chosen=chosen)
    # Sums of heads, and then the numbers of the indexer: their gradients are no copies of what is as large as query.
    sums = of_heads.unflatten(1, (index_heads, -1)).sum(2, dtype=wide_dtype(of_heads.dtype))[..., :index_dim]
    factor = index_scale * index_heads / of_heads.shape[1]
    cross_entropy = lse - factor * (index_query * sums).sum(-1)
    counts = lse > float("-inf")
    if call.key_padding_mask is not None:
        counts = counts & kept(call.key_padding_mask)[:, None]
    return torch.where(counts, cross_entropy, 0).sum() / counts.sum().clamp(min=1)


def _repeated(x: Tensor, heads: int) -> Tensor:
    """x (B, n, T, D) with so many heads, a multiple of n: each as often as that takes."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _check_index_dim(index_dim: int, head_dim: int) -> None:
    if not 1 <= index_dim <= head_dim:
        raise ValueError(
            f"The indexer's heads have {index_dim} numbers, their index_dim, and those of attention {head_dim}; give 1 "
            f"to {head_dim}."
        )


class _WithLoss(Function):
    """The output; where it has a gradient, the loss has that of `weight`."""

    @staticmethod
    def forward(output: Tensor, loss: Tensor, weight: float) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, loss, ctx.weight = inputs
        ctx.like = {"dtype": loss.dtype, "device": loss.device}

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.full((), ctx.weight, **ctx.like), None
