"""The meaning of every operation, in plain PyTorch.

Slow on purpose: what a reader can check by eye, tests hold the kernels to. Everything here is differentiable by
autograd; call it in float64 to judge an implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product

import torch

from .layout import as_bool_layout, to_token_mask


def to_dense(values: torch.Tensor, layout: torch.Tensor, block: int, heads: int) -> torch.Tensor:
    """Sparse values as a dense matrix.

    Args:
        values: (B, V, b, b), the live blocks in (head, row, column) order.
        layout: (R, C) or (H or 1, R, C).
        block: b, tokens on a block's side.
        heads: H.

    Returns:
        (B, H, R * b, C * b), zero outside the live blocks.

    Examples:
        >>> import torch
        >>> from ds_sparse.reference import to_dense
        >>> to_dense(torch.ones(1, 2, 2, 2), torch.eye(2), block=2, heads=1)
        tensor([[[[1., 1., 0., 0.],
                  [1., 1., 0., 0.],
                  [0., 0., 1., 1.],
                  [0., 0., 1., 1.]]]])
    """
    layout = as_bool_layout(layout).expand(heads, -1, -1)
    _, rows, columns = layout.shape
    head, row, column = layout.nonzero(as_tuple=True)
    blocks = values.new_zeros(values.shape[0], heads, rows, columns, block, block)
    sequence = torch.arange(len(values), device=values.device)[:, None]
    blocks = blocks.index_put((sequence, head, row, column), values)
    return blocks.transpose(3, 4).reshape(values.shape[0], heads, rows * block, columns * block)


def to_sparse(dense: torch.Tensor, layout: torch.Tensor, block: int) -> torch.Tensor:
    """The live blocks of a dense matrix.

    Args:
        dense: (B, H, R * b, C * b).
        layout: (R, C) or (H or 1, R, C).
        block: b, tokens on a block's side.

    Returns:
        (B, V, b, b) in (head, row, column) order.

    Examples:
        >>> import torch
        >>> from ds_sparse.reference import to_sparse
        >>> to_sparse(torch.arange(16.0).reshape(1, 1, 4, 4), torch.eye(2), block=2)
        tensor([[[[ 0.,  1.],
                  [ 4.,  5.]],
        <BLANKLINE>
                 [[10., 11.],
                  [14., 15.]]]])
    """
    batch, heads, rows, columns = dense.shape
    layout = as_bool_layout(layout).expand(heads, -1, -1)
    blocks = dense.reshape(batch, heads, rows // block, block, columns // block, block).transpose(3, 4)
    head, row, column = layout.nonzero(as_tuple=True)
    return blocks[:, head, row, column]


def matmul(
    a: torch.Tensor, b: torch.Tensor, layout: torch.Tensor, block: int, mode: str, trans_a: bool, trans_b: bool
) -> torch.Tensor:
    """op(a) @ op(b) with one of a, b (mode 'dsd', 'dds') or the result ('sdd') block-sparse; 4-D operands.

    The dense operand sets the number of heads. Source: DeepSpeed's `MatMul`.

    Args:
        a, b: dense (B, H, M, K) and (B, H, K, N), or one of them sparse values (B, V, block, block).
        layout: (R, C) or (H or 1, R, C).
        block: tokens on a block's side.
        mode: 'sdd', 'dsd' or 'dds'.
        trans_a, trans_b: whether the last two dimensions of a, b are swapped first.

    Returns:
        (B, H, M, N); in mode 'sdd' the sparse values (B, V, block, block).

    Examples:
        >>> import torch
        >>> from ds_sparse.reference import matmul
        >>> query = key = torch.randn(1, 2, 32, 8)
        >>> matmul(query, key, torch.eye(2), 16, "sdd", trans_a=False, trans_b=True).shape
        torch.Size([1, 4, 16, 16])
    """
    if mode == "dsd":
        a = to_dense(a, layout, block, b.shape[1])
    if mode == "dds":
        b = to_dense(b, layout, block, a.shape[1])
    product = (a.transpose(-1, -2) if trans_a else a) @ (b.transpose(-1, -2) if trans_b else b)
    return to_sparse(product, layout, block) if mode == "sdd" else product


def softmax(
    scores: torch.Tensor,
    layout: torch.Tensor,
    block: int,
    heads: int,
    scale: float = 1.0,
    rpe: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Row softmax of scale * scores + rpe + key_padding_mask + attn_mask over the live blocks of each head.

    Args:
        scores: (B, V, b, b).
        layout: (R, C) or (H or 1, R, C).
        block: b, tokens on a block's side.
        heads: H.
        scale: factor of scores alone.
        rpe, attn_mask: (B or 1, H or 1, T or 1, S); a bool attn_mask keeps where True, a float one is added.
        key_padding_mask: (B or 1, S); bool keeps where True, float is added. Finite numbers below -1e30 count as -1e30,
            in each of these and in their sum.
        causal: a token sees no later token.

    Returns:
        (B, V, b, b); a row with nothing left is zeros.

    Examples:
        >>> import torch
        >>> from ds_sparse.reference import softmax
        >>> softmax(torch.zeros(1, 2, 2, 2), torch.eye(2), block=2, heads=1, causal=True)[0, 1]
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
    """
    dense = to_dense(scores, layout, block, heads) * scale
    live = to_token_mask(as_bool_layout(layout), block).expand(heads, -1, -1)
    if causal:
        live = live & torch.ones(dense.shape[-2:], dtype=torch.bool, device=dense.device).tril()
    dense, alive = _masked(dense, live, [rpe, attn_mask, _of_keys(key_padding_mask)])
    return to_sparse(_probabilities(dense, alive), layout, block)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: torch.Tensor,
    block: int,
    scale: float | None = None,
    rpe: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    causal: bool = False,
    sinks: torch.Tensor | None = None,
    query_offset: int = 0,
    distance_bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: tuple[int, int] = (0, 0),
    return_lse: bool = False,
    softcap: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * query @ key^T + rpe + masks) @ value over the live blocks, with dropout after the softmax.

    Args:
        query: (B, H, T, D).
        key, value: (B, Hkv, S, D); query head h reads head h // (H / Hkv).
        layout: (R, C) or (H or 1, R, C), enough blocks for T and S tokens; the last ones may be short.
        block: tokens on a block's side.
        scale: 1 / sqrt(D) if it is not given.
        rpe, key_padding_mask, attn_mask, causal: as in `softmax`.
        sinks: (H,), a logit a head in the softmax's denominator, without a value.
        query_offset: the position of the first query; the layout's rows, `causal` and distances count from there.
        distance_bias: (H or 1, 2M - 1), what `bias_of_pairs` takes: it is added as rpe is.
        dropout_p, dropout_seed: what `dropout_keep` is asked; the seed and the offset.
        return_lse: whether to return each row's log of its sum of exponentials as well.
        softcap: above 0, scaled scores are softcap * tanh(score / softcap), before anything is added.

    Returns:
        (B, H, T, D); with `return_lse` also (B, H, T), the log of each row's sum of exponentials before dropout, in
        fp32 or wider. A row with nothing left is zeros, its lse -inf, or the sink.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> from ds_sparse.reference import attention
        >>> query, key, value = (torch.randn(1, 2, 60, 8, dtype=torch.float64) for _ in range(3))
        >>> layout = ds_sparse.BSLongformerSparsityConfig(num_heads=2, block=16).make_layout(64)
        >>> expected = attention(query, key, value, layout, block=16)
        >>> torch.testing.assert_close(ds_sparse.block_sparse_attention(query, key, value, layout), expected)
    """
    batch, heads, tokens, head_dim = query.shape
    keys, shared_by = key.shape[2], heads // key.shape[1]
    key, value = key.repeat_interleave(shared_by, dim=1), value.repeat_interleave(shared_by, dim=1)
    scores = query @ key.transpose(-1, -2) * (head_dim**-0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    live = to_token_mask(as_bool_layout(layout), block)[:, query_offset : query_offset + tokens, :keys]
    if causal:
        live = live & torch.ones(tokens, keys, dtype=torch.bool, device=live.device).tril(query_offset)
    by_distance = None if distance_bias is None else bias_of_pairs(distance_bias, tokens, keys, query_offset)
    scores, alive = _masked(scores, live, [rpe, by_distance, attn_mask, _of_keys(key_padding_mask)])
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].to(scores.dtype).expand(batch, -1, tokens, 1)], -1)
        alive = alive | (sinks[:, None, None] > float("-inf"))
    probs = _probabilities(scores, alive)[..., :keys]
    if dropout_p > 0:
        keep = dropout_keep(*dropout_seed, batch, heads, tokens, keys, dropout_p).to(probs.device)
        probs = probs * keep * (32768 / (32768 - _dropout_threshold(dropout_p)))
    output = probs.to(value.dtype) @ value
    if not return_lse:
        return output
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(~alive, 0)
    return output, torch.logsumexp(wide, dim=-1).masked_fill(~alive[..., 0], float("-inf"))


def selected_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_indices: torch.Tensor,
    block: int,
    causal: bool = False,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    query_offset: int | torch.Tensor = 0,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * query @ key^T) @ value over the blocks of keys that each query token has chosen.

    Args:
        query, key, value, scale, key_padding_mask, sinks: as in `attention`.
        block_indices: (B or 1, Hkv or H or 1, T, k), numbers of blocks in any order; those of no block are none.
        block: keys in a block.
        causal: a query sees no key after its own position.
        cu_seqlens: (documents + 1): query is (T, H, D), key and value (T, Hkv, D), block_indices (T, Hkv or H or 1, k),
            and each document is a call of its own.
        query_offset: the position of the first query; or (B,), one a sequence.
        return_lse: whether to return each row's log of its sum of exponentials as well.

    Returns:
        as of `attention`; with `cu_seqlens` (T, H, D), and (T, H).

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> from ds_sparse.reference import selected_attention
        >>> query, key, value = (torch.randn(1, 2, 60, 8, dtype=torch.float64) for _ in range(3))
        >>> chosen = torch.randint(-1, 4, (1, 2, 60, 2))
        >>> expected = selected_attention(query, key, value, chosen, block=16, causal=True)
        >>> output = ds_sparse.selected_attention(query, key, value, chosen, block=16, causal=True)
        >>> torch.testing.assert_close(output, expected)
    """
    if cu_seqlens is not None:
        results = []
        for first, end in pairwise(cu_seqlens.tolist()):
            q, k, v, chosen = (x[first:end].transpose(0, 1)[None] for x in (query, key, value, block_indices))
            of_one = selected_attention(q, k, v, chosen, block, causal, scale, sinks, return_lse=True)
            results.append([x[0].transpose(0, 1) for x in of_one])
        output, lse = map(torch.cat, zip(*results, strict=True))
        return (output, lse) if return_lse else output
    (_, heads, tokens, _), keys = query.shape, key.shape[2]
    numbers = torch.arange(-(-keys // block), device=query.device)
    chosen = (block_indices.unsqueeze(-1) == numbers).any(-2)  # of each token, which blocks
    seen = chosen.repeat_interleave(block, -1)[..., :keys].repeat_interleave(heads // chosen.shape[1], 1)
    if causal:
        position = torch.as_tensor(query_offset, device=query.device).reshape(-1, 1, 1, 1)
        position = position + torch.arange(tokens, device=query.device)[:, None]
        seen = seen & (torch.arange(keys, device=query.device) <= position)
    everything = torch.ones(1, 1, dtype=torch.bool, device=query.device)
    return attention(
        query, key, value, everything, max(tokens, keys), scale, key_padding_mask=key_padding_mask, attn_mask=seen,
        sinks=sinks, return_lse=return_lse,
    )  # fmt: skip


def select_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    block: int,
    k: int,
    score: str = "mean",
    groups: int | None = None,
    causal: bool = False,
    first: int = 0,
    local: int = 0,
    query_block: int = 1,
    cu_seqlens: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    query_offset: int | torch.Tensor = 0,
) -> torch.Tensor:
    """The numbers of the k blocks of keys that score highest. Sources: Lu et al., "MoBA", 2025; "MiniMax-M3", 2026.

    Args:
        query: (B, H, T, D).
        key: (B, Hkv, S, D); query head h reads head h // (H / Hkv).
        block: keys in a block; the last one may be short.
        k: how many are chosen.
        score: 'mean', query . mean(keys of the block), of blocks that are wholly behind a causal query; or 'max', the
            largest query . key of the block that the query sees.
        groups: G, of so many groups of neighbouring heads each adds its heads' scores up; H if it is not given.
        causal: nothing is chosen that is wholly ahead of a query.
        first: so many blocks from the start are chosen before all others.
        local: so many are, the query's own and those before it; if not `causal` also as many after it.
        query_block: queries that choose together, by the product of their mean, or the largest of all of them.
        cu_seqlens: (documents + 1): query is (T, H, D), key (T, Hkv, D), and each document is a call of its own.
        key_padding_mask: bool (B or 1, S); keys where it is False are in no block.
        query_offset: the position of the first query; or (B,), one a sequence.

    Returns:
        int32 (B, G, ceil(T / query_block), k), of equal scores the lower number first, -1 where there are fewer; with
        `cu_seqlens` (T, G, k).

    Examples:
        >>> import torch
        >>> from ds_sparse.reference import select_blocks
        >>> query, key = torch.ones(1, 1, 6, 1), torch.tensor([5, 0, 3, 3, 9, 9]).reshape(1, 1, 6, 1).float()
        >>> select_blocks(query, key, block=2, k=2, causal=True, local=1)[0, 0]
        tensor([[ 0, -1],
                [ 0, -1],
                [ 1,  0],
                [ 1,  0],
                [ 2,  1],
                [ 2,  1]], dtype=torch.int32)
    """
    if cu_seqlens is not None:
        documents = []
        for begin, end in pairwise(cu_seqlens.tolist()):
            q, of_keys = (x[begin:end].transpose(0, 1)[None] for x in (query, key))
            documents.append(select_blocks(q, of_keys, block, k, score, groups, causal, first, local))
        return torch.cat([chosen[0].transpose(0, 1) for chosen in documents])
    (batch, heads, tokens, _), keys = query.shape, key.shape[2]
    query, key = query.detach(), key.detach().repeat_interleave(heads // key.shape[1], 1)
    is_key = torch.ones(batch, keys, dtype=torch.bool) if key_padding_mask is None else key_padding_mask.cpu()
    is_key = is_key.expand(batch, keys)

    def score_of(b: int, head: int, queries: range, offset: int, number: int) -> float | None:
        there = [s for s in range(number * block, min((number + 1) * block, keys)) if is_key[b, s]]
        if score == "mean":
            if causal and (number + 1) * block - 1 > queries[0] + offset:
                return None
            return float(query[b, head, list(queries)].mean(0) @ key[b, head, there].mean(0))
        pairs = [(t, s) for t in queries for s in there if not causal or s <= t + offset]
        return max(float(query[b, head, t] @ key[b, head, s]) for t, s in pairs)

    rows = [range(t, min(t + query_block, tokens)) for t in range(0, tokens, query_block)]
    return _best_blocks(score_of, heads, groups or heads, rows, is_key, block, k, causal, first, local, query_offset)


def select_blocks_by_compression(
    query: torch.Tensor,
    compressed_key: torch.Tensor,
    block: int,
    k: int,
    length: int,
    stride: int,
    keys: int,
    groups: int | None = None,
    scale: float | None = None,
    causal: bool = False,
    first: int = 0,
    local: int = 0,
    key_padding_mask: torch.Tensor | None = None,
    query_offset: int | torch.Tensor = 0,
) -> torch.Tensor:
    """The numbers of the k blocks of keys to which attention on compressed keys gives most.

    A block's score is the sum of the probabilities of compressed keys, each as often as it has strides in the block.
    Source: Yuan et al., "Native sparse attention", 2025, equations 8 to 10.

    Args:
        query: (B, H, T, D).
        compressed_key: (B, Hkv, C, D), number c made of the keys from c * stride to before c * stride + length.
        block: keys in a block, a multiple of stride.
        k: how many are chosen.
        length, stride: of what a compressed key is made.
        keys: S, how many keys there are.
        groups: G; Hkv if it is not given.
        scale: 1 / sqrt(D) if it is not given.
        causal: a query sees compressed keys of which no key is ahead of it.
        first, local, query_offset: as in `select_blocks`.
        key_padding_mask: bool (B or 1, S); compressed keys of which a key is False are not there.

    Returns:
        int32 (B, G, T, k), as of `select_blocks`.

    Examples:
        >>> import torch
        >>> from ds_sparse.reference import select_blocks_by_compression
        >>> query, key = torch.ones(1, 1, 8, 1), torch.tensor([5, 0, 3, 9]).reshape(1, 1, 4, 1).float()
        >>> select_blocks_by_compression(query, key, block=4, k=2, length=2, stride=2, keys=8, causal=True)[0, 0, 3:6]
        tensor([[ 0, -1],
                [ 0, -1],
                [ 0,  1]], dtype=torch.int32)
    """
    (batch, heads, tokens, depth), key_heads = query.shape, compressed_key.shape[1]
    is_key = torch.ones(batch, keys, dtype=torch.bool) if key_padding_mask is None else key_padding_mask.cpu()
    is_key = is_key.expand(batch, keys)
    query, compressed_key = query.detach(), compressed_key.detach().repeat_interleave(heads // key_heads, 1)
    scale = depth**-0.5 if scale is None else scale

    def score_of(b: int, head: int, queries: range, offset: int, number: int) -> float | None:
        ends = [c * stride + length for c in range(compressed_key.shape[2])]
        seen = [c for c, end in enumerate(ends) if is_key[b, c * stride : end].all() and end <= keys]
        if causal:
            seen = [c for c in seen if ends[c] - 1 <= queries[0] + offset]
        probs = torch.softmax(compressed_key[b, head, seen] @ query[b, head, queries[0]] * scale, 0)
        begin, sums = number * block, []
        for c, prob in zip(seen, probs.tolist(), strict=True):
            overlap = min(begin + block, ends[c]) - max(begin, ends[c] - length)
            sums += [prob * overlap / stride] if overlap > 0 else []
        return sum(sums) if sums else None

    rows = [range(t, t + 1) for t in range(tokens)]
    groups = groups or key_heads
    return _best_blocks(score_of, heads, groups, rows, is_key, block, k, causal, first, local, query_offset)


def _best_blocks(
    score_of: Callable[[int, int, range, int, int], float | None],
    heads: int,
    groups: int,
    rows: list[range],
    is_key: torch.Tensor,
    block: int,
    k: int,
    causal: bool,
    first: int,
    local: int,
    query_offset: int | torch.Tensor,
) -> torch.Tensor:
    """The k blocks of the highest sums of the scores of a group's heads, for each row of queries, after those that are
    chosen whatever they score; of those alone that have a key which a query sees. score_of: of a sequence, head, row,
    offset and block; None if it cannot be chosen by a score."""
    batch, keys = is_key.shape
    chosen = torch.full((batch, groups, len(rows), k), -1, dtype=torch.int32)
    offsets = torch.as_tensor(query_offset).expand(batch).tolist()
    for b, group, (row, queries) in product(range(batch), range(groups), enumerate(rows)):
        begin, end = queries[0] + offsets[b], queries[-1] + offsets[b]
        seen = {s // block for s in range(keys) if is_key[b, s] and (s <= end or not causal)}
        forced = set(range(first))
        if local:
            forced |= set(range(begin // block - local + 1, end // block + (1 if causal else local)))
        scores = {}
        for number in seen - forced:
            of_heads = [
                score_of(b, head, queries, offsets[b], number)
                for head in range(group * heads // groups, (group + 1) * heads // groups)
            ]
            if None not in of_heads:
                scores[number] = sum(x for x in of_heads if x is not None)
        best = sorted(seen & forced) + sorted(scores, key=lambda number: (-scores[number], number))
        chosen[b, group, row, : len(best)] = torch.tensor(best[:k], dtype=torch.int32)
    return chosen


def moba(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block: int,
    k: int,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mixture of block attention: causal, each query on its own block and the best of those behind it, k in all.

    The best are those whose mean of keys has the largest product with the query. Source: Lu et al., "MoBA", 2025.

    Args:
        query, key, value, scale, cu_seqlens: as in `selected_attention`.
        block: keys in a block.
        k: blocks that a query sees.

    Returns:
        (B, H, T, D), or (T, H, D).

    Examples:
        >>> import torch
        >>> from ds_sparse.reference import moba
        >>> query, key, value = (torch.randn(1, 2, 60, 8, dtype=torch.float64) for _ in range(3))
        >>> moba(query, key, value, block=16, k=2).shape
        torch.Size([1, 2, 60, 8])
    """
    chosen = select_blocks(query, key, block, k, "mean", causal=True, local=1, cu_seqlens=cu_seqlens)
    output = selected_attention(query, key, value, chosen, block, causal=True, scale=scale, cu_seqlens=cu_seqlens)
    assert isinstance(output, torch.Tensor)
    return output


def nsa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    compressed_key: torch.Tensor,
    compressed_value: torch.Tensor,
    window_key: torch.Tensor,
    window_value: torch.Tensor,
    gates: torch.Tensor,
    block: int,
    k: int,
    length: int,
    stride: int,
    window: int,
    first: int = 1,
    local: int = 2,
    scale: float | None = None,
    key_padding_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Native sparse attention: gated causal attention on compressed keys, on chosen blocks, and on a window.

    Compressed keys choose the blocks, for each group of heads. Source: Yuan et al., "Native sparse attention", 2025.

    Args:
        query: (B, H, T, D).
        key, value: (B, Hkv, T, D), of the blocks that are chosen.
        compressed_key, compressed_value: (B, Hkv, C, D); number c stands for `length` keys, from c * stride on.
        window_key, window_value: (B, Hkv, T, D), of the window.
        gates: (B, H, T, 3), the factors of what compressed keys, chosen blocks and the window give.
        block, k, length, stride, first, local: as in `select_blocks_by_compression`.
        window: tokens that are seen there, the query's own and those before it.
        scale: factor of the scores; 1 / sqrt(D) if it is not given.
        key_padding_mask: bool (B or 1, T); keys where it is False are not seen, nor compressed keys made of one.

    Returns:
        (B, H, T, D).

    Examples:
        >>> import torch
        >>> from ds_sparse.reference import nsa
        >>> query, key, value = (torch.randn(1, 2, 60, 8, dtype=torch.float64) for _ in range(3))
        >>> compressed = [x.unfold(2, 8, 4).mean(-1) for x in (key, value)]
        >>> gates = torch.rand(1, 2, 60, 3, dtype=torch.float64)
        >>> nsa(query, key, value, *compressed, key, value, gates, 16, k=3, length=8, stride=4, window=20).shape
        torch.Size([1, 2, 60, 8])
    """
    tokens = query.shape[2]
    keep = torch.ones(1, tokens, dtype=torch.bool) if key_padding_mask is None else key_padding_mask
    chosen = select_blocks_by_compression(
        query, compressed_key, block, k, length, stride, tokens, scale=scale, causal=True, first=first, local=local,
        key_padding_mask=keep,
    )  # fmt: skip
    position = torch.arange(tokens)[:, None]
    whole = keep.unfold(1, length, stride).all(-1) if tokens >= length else keep[:, :0]
    complete = (torch.arange(compressed_key.shape[2]) * stride + length - 1 <= position) & whole[:, None]
    away = position - torch.arange(tokens)
    near = (away >= 0) & (away < window) & keep[:, None]
    everything = torch.ones(1, 1, dtype=torch.bool)

    def on(keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        output = attention(query, keys, values, everything, tokens, scale, attn_mask=seen[:, None])
        assert isinstance(output, torch.Tensor)
        return output

    selected = selected_attention(query, key, value, chosen, block, causal=True, scale=scale, key_padding_mask=keep)
    assert isinstance(selected, torch.Tensor)
    branches = on(compressed_key, compressed_value, complete), selected, on(window_key, window_value, near)
    return sum((gate[..., None] * x for gate, x in zip(gates.unbind(-1), branches)), torch.zeros_like(query))


def msa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    index_query: torch.Tensor,
    index_key: torch.Tensor,
    block: int,
    k: int,
    first: int = 0,
    local: int = 1,
    scale: float | None = None,
    index_scale: float | None = None,
    causal: bool = True,
    key_padding_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention on the blocks that an indexer chooses, and the loss that teaches the indexer.

    Source: MiniMax, "MiniMax-M3", 2026. The loss is the divergence KL(attention || indexer) of probabilities over the
    keys that a query sees: those of attention, the mean over the heads that one head of the indexer chooses for, teach
    and have no gradient; those of the indexer are softmax(index_scale * index_query @ index_key^T). It is the mean over
    sequences, heads of the indexer, and queries that see something and are no padding.

    Args:
        query: (B, H, T, D).
        key, value: (B, Hkv, T, D).
        index_query: (B, Hi, T, Di), H a multiple of Hi: a head of it chooses for H / Hi neighbouring heads of query.
        index_key: (B, 1 or a divisor of Hi, T, Di).
        block, k, first, local: as in `select_blocks`.
        scale, index_scale: factors of the scores; 1 / sqrt(D) and 1 / sqrt(Di) if they are not given.
        causal: a query sees no key after its own position.
        key_padding_mask: bool (B or 1, T); keys where it is False are not seen.

    Returns:
        (B, H, T, D), which has gradients for query, key and value, and the loss, for index_query and index_key.

    Examples:
        >>> import torch
        >>> from ds_sparse.reference import msa
        >>> query, key, value = (torch.randn(1, 2, 60, 8, dtype=torch.float64) for _ in range(3))
        >>> output, loss = msa(query, key, value, query[:, :1, :, :4], key[:, :1, :, :4], block=16, k=2)
        >>> output.shape, loss.shape
        (torch.Size([1, 2, 60, 8]), torch.Size([]))
    """
    tokens, index_heads = query.shape[2], index_query.shape[1]
    keep = torch.ones(1, tokens, dtype=torch.bool) if key_padding_mask is None else key_padding_mask
    chosen = select_blocks(
        index_query, index_key, block, k, "max", causal=causal, first=first, local=local, key_padding_mask=keep
    )
    output = selected_attention(query, key, value, chosen, block, causal=causal, scale=scale, key_padding_mask=keep)
    assert isinstance(output, torch.Tensor)
    numbers, place = torch.arange(tokens) // block, torch.arange(tokens)
    seen = (chosen.unsqueeze(-1) == numbers).any(-2) & keep[:, None, None]
    if causal:
        seen = seen & (place <= place[:, None])
    counts = seen.any(-1) & keep[:, None]

    def log_probs(q: torch.Tensor, k: torch.Tensor, scale: float | None) -> torch.Tensor:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        hidden = ~seen & counts.unsqueeze(-1)  # a row without a key would be NaN
        hidden = hidden.repeat_interleave(q.shape[1] // index_heads, 1)
        return torch.log_softmax(scores.masked_fill(hidden, float("-inf")), -1)

    teacher = log_probs(query, key, scale).exp().unflatten(1, (index_heads, -1)).mean(2).detach()
    student = log_probs(index_query, index_key, index_scale)
    divergence = torch.where(teacher > 0, teacher * (teacher.log() - student), 0)
    return output, divergence.sum(-1)[counts].mean()


def bias_of_pairs(distance_bias: torch.Tensor, tokens: int, keys: int, query_offset: int = 0) -> torch.Tensor:
    """The matrix of a bias that depends on the distance of two tokens alone, as T5's.

    Args:
        distance_bias: (..., 2M - 1), M above every distance: the bias of the distance d, a key's position less a
            query's, is number M - 1 + d. That of 0 is in the middle.
        tokens, keys: T and S.
        query_offset: the position of the first query.

    Returns:
        (..., T, S).

    Examples:
        >>> import torch
        >>> from ds_sparse.reference import bias_of_pairs
        >>> bias_of_pairs(torch.tensor([-2, -1, 0, 1, 2]), tokens=3, keys=3)
        tensor([[ 0,  1,  2],
                [-1,  0,  1],
                [-2, -1,  0]])
    """
    distance = torch.arange(keys) - torch.arange(query_offset, query_offset + tokens)[:, None]
    return distance_bias[..., distance.to(distance_bias.device) + distance_bias.shape[-1] // 2]


def window_matmul(a: torch.Tensor, b: torch.Tensor, window: int) -> torch.Tensor:
    """a @ b near the diagonal, 0 where there is no such column. Source: pytorch-window-matmul.

    Args:
        a: (..., T, D).
        b: (..., D, T).
        window: tokens on each side.

    Returns:
        (..., T, 2 * window + 1).

    Examples:
        >>> import torch
        >>> from ds_sparse.reference import window_matmul
        >>> window_matmul(torch.ones(3, 1), torch.ones(1, 3), window=1)
        tensor([[0., 1., 1.],
                [1., 1., 1.],
                [1., 1., 0.]])
    """
    column, is_there = _columns_of_band(a.shape[-2], window, a.device)
    product = a @ b
    return product.gather(-1, column.clamp(0, a.shape[-2] - 1).expand(*product.shape[:-2], -1, -1)) * is_there


def unwindow_matmul(p: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """A band, as a matrix that is zero beside it, times v. Source: pytorch-window-matmul.

    Args:
        p: the band, (..., T, 2 * window + 1).
        v: (..., T, D).
        window: tokens on each side.

    Returns:
        (..., T, D).

    Examples:
        >>> import torch
        >>> from ds_sparse.reference import unwindow_matmul
        >>> unwindow_matmul(torch.ones(3, 3), torch.ones(3, 1), window=1)
        tensor([[2.],
                [3.],
                [2.]])
    """
    column = torch.arange(p.shape[-2], device=p.device)
    row = column[:, None]
    place = column - row + window
    matrix = p.gather(-1, place.clamp(0, 2 * window).expand(*p.shape[:-2], -1, -1))
    return matrix.masked_fill((column - row).abs() > window, 0) @ v


def window_softmax(
    scores: torch.Tensor,
    windows: tuple[int, ...],
    scale: float = 1.0,
    causal: bool = False,
    key_padding_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Row softmax of scale * scores + key_padding_mask over each token's window, 0 elsewhere.

    Args:
        scores: (B, H, T, 2 * w + 1), w the largest of the windows.
        windows: tokens on each side, one number for all heads, or one a head.
        scale: factor of scores alone.
        causal: a token sees no later token.
        key_padding_mask: (B or 1, T); bool keeps where True, float is added.

    Returns:
        of the shape of scores; a row with nothing left is zeros.

    Examples:
        >>> import torch
        >>> from ds_sparse.reference import window_softmax
        >>> window_softmax(torch.zeros(1, 1, 3, 3), windows=(1,), causal=True)
        tensor([[[[0.0000, 1.0000, 0.0000],
                  [0.5000, 0.5000, 0.0000],
                  [0.5000, 0.5000, 0.0000]]]])
    """
    tokens, widest = scores.shape[-2], scores.shape[-1] // 2
    column, live = _columns_of_band(tokens, widest, scores.device)
    away = torch.arange(-widest, widest + 1, device=scores.device)
    live = live & (away.abs() <= torch.tensor(windows, device=scores.device)[:, None, None])
    if causal:
        live = live & (away <= 0)
    mask = None if key_padding_mask is None else key_padding_mask[:, column.clamp(0, tokens - 1)][:, None]
    scores, alive = _masked(scores * scale, live, [mask])
    return _probabilities(scores, alive)


def window_mask(
    tokens: int,
    windows: tuple[int, ...],
    causal: bool = False,
    global_tokens: tuple[int, ...] = (),
    dilations: tuple[int, ...] = (1,),
) -> torch.Tensor:
    """Who sees whom in windowed attention. Source: Beltagy et al., "Longformer", 2020.

    Args:
        tokens: T.
        windows: how many tokens are seen on each side, one number for all heads, or one a head.
        causal: a token sees no later token; nor does a global one.
        global_tokens: see all tokens, and all see them.
        dilations: distance of the tokens that are seen, one for all heads, or one a head.

    Returns:
        bool (1 or H, T, T), True where a query sees a key.

    Examples:
        >>> from ds_sparse.reference import window_mask
        >>> window_mask(4, windows=(1,), global_tokens=(0,)).int()
        tensor([[[1, 1, 1, 1],
                 [1, 1, 1, 0],
                 [1, 1, 1, 1],
                 [1, 0, 1, 1]]], dtype=torch.int32)
    """
    window, dilation = (torch.tensor(numbers)[:, None, None] for numbers in (windows, dilations))
    row, column = torch.arange(tokens)[:, None], torch.arange(tokens)
    away = (row - column).abs()
    live = (away % dilation == 0) & (away <= window * dilation)
    is_global = torch.zeros(tokens, dtype=torch.bool)
    is_global[list(global_tokens)] = True
    live = live | is_global | is_global[:, None]
    return live & (column <= row) if causal else live


def window_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    windows: tuple[int, ...],
    causal: bool = False,
    key_padding_mask: torch.Tensor | None = None,
    global_tokens: tuple[int, ...] = (),
    dilations: tuple[int, ...] = (1,),
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """softmax(scale * query @ key^T) @ value over what `window_mask` keeps.

    Args:
        query, key, value, key_padding_mask, scale, sinks, softcap: as in `attention`, with as many key tokens as query
            tokens.
        windows, causal, global_tokens, dilations: as in `window_mask`.

    Returns:
        (B, H, T, D); a row with nothing left is zeros.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> from ds_sparse.reference import window_attention
        >>> query, key, value = (torch.randn(1, 2, 20, 8, dtype=torch.float64) for _ in range(3))
        >>> expected = window_attention(query, key, value, windows=(3,), causal=True)
        >>> torch.testing.assert_close(ds_sparse.window_attention(query, key, value, 3, causal=True), expected)
    """
    tokens = query.shape[2]
    with query.device:
        mask = window_mask(tokens, windows, causal, global_tokens, dilations)
    everything = torch.ones(1, 1, dtype=torch.bool, device=query.device)
    output = attention(
        query, key, value, everything, tokens, scale, key_padding_mask=key_padding_mask, attn_mask=mask[None],
        sinks=sinks, softcap=softcap,
    )  # fmt: skip
    assert isinstance(output, torch.Tensor)
    return output


def token_scores(query: torch.Tensor, key: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """query[..., i, :] . key[..., j, :] for each pair (i, j).

    Args:
        query: (..., T, D).
        key: (..., S, D).
        pairs: integers (N, 2).

    Returns:
        (..., N).

    Examples:
        >>> import torch
        >>> from ds_sparse.reference import token_scores
        >>> query = key = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
        >>> token_scores(query, key, torch.tensor([[1, 0], [1, 1]]))
        tensor([1., 5.])
    """
    return (query[..., pairs[:, 0], :] * key[..., pairs[:, 1], :]).sum(-1)


def token_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    counts: torch.Tensor,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * query @ key^T) @ value over token pairs, each as often as it is listed.

    Args:
        query: (B, H, T, D).
        key: (B, H, S, D).
        value: (B, H, S, E).
        counts: integers (B or 1, H or 1, T, S), how often the pair is listed; 0: never.
        scale: 1 / sqrt(D) if it is not given.
        return_lse: whether to return each row's log of its sum of exponentials as well.

    Returns:
        (B, H, T, E); with `return_lse` also (B, H, T), the log of each row's sum of exponentials, in fp32 or wider. A
        row without a pair is zeros, its lse -inf.

    Examples:
        >>> import torch
        >>> from ds_sparse.reference import token_attention
        >>> query, key, value = (torch.randn(1, 2, 3, 8) for _ in range(3))
        >>> output = token_attention(query, key, value, counts=torch.eye(3, dtype=torch.int64)[None, None])
        >>> torch.equal(output, value)
        True
    """
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    live = counts > 0
    alive = live.any(-1, keepdim=True)
    # n times the exponential is the exponential of a score that is log n larger.
    scores = (scores + counts.clamp(min=1).to(scores.dtype).log()).masked_fill(~live, float("-inf"))
    output = _probabilities(scores, alive) @ value
    if not return_lse:
        return output
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(~alive, 0)
    return output, torch.logsumexp(wide, dim=-1).masked_fill(~alive[..., 0], float("-inf"))


def dropout_keep(
    seed: int, offset: int, batch: int, heads: int, tokens: int, keys: int, dropout_p: float
) -> torch.Tensor:
    """Draws which probabilities dropout keeps: those whose 15-bit random number reaches the threshold.

    The numbers are a function of the seed, the offset and the element's place: eight elements of a 16 x 16 square share
    the 128 bits of a Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

    Args:
        seed, offset: the seed, of 64 bits, and the offset, whose 32 lower bits count.
        batch, heads, tokens, keys: B, H, T and S.
        dropout_p: share that is dropped, 0 to below 1, in steps of 1/32768.

    Returns:
        bool (B, H, T, S).

    Examples:
        >>> from ds_sparse.reference import dropout_keep
        >>> dropout_keep(seed=0, offset=0, batch=1, heads=1, tokens=2, keys=4, dropout_p=0.5).int()
        tensor([[[[0, 1, 1, 0],
                  [0, 0, 1, 1]]]], dtype=torch.int32)
    """
    low = 0xFFFFFFFF
    i, j, matrix = torch.arange(tokens)[:, None], torch.arange(keys), torch.arange(batch * heads)[:, None, None]
    counter = (j // 16 * 4 + j % 8 // 2, i // 16 * 8 + i % 8, matrix, torch.tensor(offset & low))
    words = torch.broadcast_tensors(*counter)
    key = [seed & low, (seed >> 32) & low]
    for _ in range(7):
        # Products wrap around int64, which leaves the 64 bits of the unsigned product.
        a, b = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = ((b >> 32) & low ^ words[1] ^ key[0], b & low, (a >> 32) & low ^ words[3] ^ key[1], a & low)
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    element = j % 2 + 2 * (i % 16 // 8) + 4 * (j % 16 // 8)
    word = torch.stack(words).gather(0, (element // 2).expand_as(words[0])[None])[0]
    number = (word >> (16 * (element % 2))) & 0x7FFF
    return (number >= _dropout_threshold(dropout_p)).reshape(batch, heads, tokens, keys)


def _dropout_threshold(dropout_p: float) -> int:
    return min(int(dropout_p * 32768 + 0.5), 32767)


def _columns_of_band(tokens: int, window: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The column that each number of a band belongs to, (T, 2 * window + 1), and whether there is such a column."""
    column = torch.arange(tokens, device=device)[:, None] + torch.arange(-window, window + 1, device=device)
    return column, (column >= 0) & (column < tokens)


def _of_keys(mask: torch.Tensor | None) -> torch.Tensor | None:
    return None if mask is None else mask[:, None, None, :]


def _masked(
    scores: torch.Tensor, live: torch.Tensor, biases: list[torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores with everything added, -inf where masked, and which rows have something left, (..., T, 1)."""
    live = live & (scores != float("-inf"))
    added = torch.zeros((), dtype=scores.dtype, device=scores.device)
    for bias in biases:
        if bias is None:
            continue
        if bias.dtype == torch.bool:
            live = live & bias
        else:
            live = live & (bias != float("-inf"))
            added = added + _raised(bias.masked_fill(bias == float("-inf"), 0))
    return (scores + _raised(added)).masked_fill(~live, float("-inf")), live.any(-1, keepdim=True)


def _raised(bias: torch.Tensor) -> torch.Tensor:
    """Biases, and sums of them, count as no lower than -1e30; their gradient is that of what they are."""
    return torch.where(bias < -1e30, -1e30 + (bias - bias.detach()), bias)


def _probabilities(scores: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores.masked_fill(~alive, 0), dim=-1) * alive
