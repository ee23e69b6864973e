"""The steps from dense attention to `sparse_attn` in plain PyTorch, to learn from and to compare with; on any device.

Each computes softmax(scale * q @ k^T) @ v over the same pairs, and is differentiable. A row without a key is zeros.
What a step takes beside the others, `ds_sparse bench tokens` prints. Source of the ladder: the learning project
lrn-sparseatt (2026).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..index import TokenIndex
from ..index.packed import mask_of_documents
from ._autograd import first_derivatives_only
from ._library import check_device, check_inputs, under_autocast
from .operands import broadcasts, factor_of, of_flash, raised
from .packed_operands import check_row, is_packed, packed_operands
from .token import NAMES, Lists, PairsCall, as_4d, check_operands, pairs_call


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    document_layout: str = "own",
) -> Tensor:
    """The dense baseline: all scores, those outside the mask set to -inf.

    Args:
        q, k, v: (..., H, T, D), (..., H, S, D), (..., H, S, E), fp16, bf16, fp32 or fp64. Scores have their dtype: in
            fp16 those of more than 65,504 are infinite, and their rows NaN.
        mask: (T, S), or what broadcasts to (..., H, T, S), such as (H, T, S) and (B, 1, T, S); bool, True where a query
            sees a key, or floating point, which is added to the scores.
        scale: 1 / sqrt(D) if it is not given.
        cu_seqlens, document_layout: of packed documents, as in `sparse_attn`, with the mask of one document, or of the
            row, in place of pairs; it may be larger than needed. Each call waits for the device of cu_seqlens.

    Returns:
        (..., H, T, E).

    Raises:
        TypeError: operands that are no tensors; a mask that is neither bool nor floating point; a scale that is no
            number.
        ValueError: shapes, dtypes, devices or a scale that do not fit.
        RuntimeError: packed documents under torch.compile, or in the capture of a CUDA graph.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> query, key, value = (torch.randn(2, 4, 3, 8) for _ in range(3))
        >>> output = ds_sparse.masked_attention(query, key, value, torch.eye(3, dtype=torch.bool))
        >>> torch.equal(output, value)
        True
    """
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            f"mask is {given}; it has to be a tensor, bool, True where a query sees a key, or floating point, which is "
            "added. TokenIndex.mask() makes one of lists."
        )
    check_inputs(mask=mask)
    if is_packed(q, k, v, cu_seqlens, document_layout):
        q, k, v, documents, as_given, _ = packed_operands(q, k, v, cu_seqlens, NAMES)
        check_row(q, k, v, NAMES)
        assert documents is not None, "or the operands would not be packed"
        mask = mask_of_documents(mask, documents, document_layout, q.shape[2])
        return as_given(masked_attention(q, k, v, mask, scale))
    check_inputs(q=q, k=k, v=v)
    check_operands(*under_autocast(q, k, v))
    check_device("mask", mask, q.device, "q")
    whole = (*q.shape[:-1], k.shape[-2])
    if not broadcasts(mask.shape, whole):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}; it has to broadcast to {whole}."
            + of_flash(q, q.dim() == 4 and broadcasts(mask.shape[-2:], (q.shape[1], k.shape[1])), "q")
        )
    scores = (q @ k.mT) * factor_of(scale, q.shape[-1])
    if mask.dtype == torch.bool:
        seen, scores = mask, scores.masked_fill(~mask, float("-inf"))
    else:
        seen, scores = mask != float("-inf"), scores + raised(mask)
        # A finite number, such as the lowest of fp16, hides no key: the sum must not become -inf.
        scores = scores.clamp(min=torch.finfo(scores.dtype).min).masked_fill(~seen, float("-inf"))
    # A row of -inf would become NaN; 0 in its place becomes 0 again after the softmax.
    nothing = ~seen.any(-1, keepdim=True)
    probs = scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
    # A float mask may be wider than the scores.
    return probs.to(v.dtype) @ v


def gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    values: Lists,
    offsets: Tensor | Sequence | None = None,
    scale: float | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    document_layout: str = "own",
) -> Tensor:
    """`index_select` of a query, key and value for each pair, `index_add` of exponentials and of weighted values.

    Work is that of the pairs alone, but every pair's numbers go through memory several times. Sums are in fp32 or
    wider. On CUDA PyTorch adds them up as they come, so that last bits differ from run to run, forward and backward,
    unless `torch.use_deterministic_algorithms(True)` is set.

    Args:
        q, k, v, values, offsets, scale, cu_seqlens, document_layout: as in `sparse_attn`; head sizes have no bound on
            CUDA either.

    Returns:
        (..., H, T, E) in q's dtype.

    Raises:
        TypeError, ValueError: as `sparse_attn`.
        RuntimeError: lists in place of their index under torch.compile.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> query, key, value = (torch.randn(2, 4, 3, 8) for _ in range(3))
        >>> lists = torch.tensor([0, 0, 2]), torch.tensor([1, 1, 3])
        >>> output = ds_sparse.gather_attention(query, key, value, *lists)
        >>> torch.testing.assert_close(output, ds_sparse.sparse_attn(query, key, value, *lists))
    """
    call = pairs_call(q, k, v, values, offsets, scale, cu_seqlens, document_layout)
    q, k, v, index, scale, _ = call
    if q.is_meta:
        return _nothing(call)
    rows, columns = index.places
    queries, keys, weighted = (index.fold(as_4d(x)) for x in (q, k, v))
    scores = (queries.index_select(1, rows) * keys.index_select(1, columns)).sum(-1) * scale
    return _finish(call, *weighted_sums(index, scores, weighted))


def weighted_sums(index: TokenIndex, scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The exponentials of the pairs' scores (R, N) times values (R, P*S, E) summed up by rows, (R, P*T, E), and their
    own sums, (R, P*T); both in fp32 or wider, the largest score of a row taken off before."""
    rows, columns = index.places
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    zeros = scores.new_zeros(len(scores), index.num_lists * index.queries)
    largest = zeros.scatter_reduce(1, rows.expand_as(scores), scores.detach(), "amax", include_self=False)
    exps = (scores - largest.index_select(1, rows)).exp()
    terms = exps.unsqueeze(-1) * values.index_select(1, columns)
    return zeros.unsqueeze(-1).repeat(1, 1, values.shape[-1]).index_add(1, rows, terms), zeros.index_add(1, rows, exps)


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    values: Lists,
    offsets: Tensor | Sequence | None = None,
    scale: float | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    document_layout: str = "own",
) -> Tensor:
    """Nested tensors of jagged layout: every query has a matrix of its keys and one of its values, of their own length.

    Sums are in fp32 or wider. Of jagged tensors PyTorch 2.13 has products that train, while gradients of their softmax
    are wrong, a sum has none, and those of a product with a dense tensor take memory that grows with the square of the
    tokens. So each row's largest score, and its sums, come from `segment_reduce` over the jagged values; a column of
    ones beside the value sums the exponentials. On CUDA PyTorch adds gradients up as they come, so that their last bits
    differ from run to run, unless `torch.use_deterministic_algorithms(True)` is set.

    Args:
        q, k, v, values, offsets, scale, cu_seqlens, document_layout: as in `sparse_attn`; head sizes have no bound on
            CUDA either.

    Returns:
        (..., H, T, E) in q's dtype.

    Raises:
        TypeError, ValueError: as `sparse_attn`.
        RuntimeError: under one of torch.func's transforms, which do not take nested tensors; lists in place of their
            index under torch.compile.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> query, key, value = (torch.randn(2, 4, 3, 8) for _ in range(3))
        >>> lists = torch.tensor([0, 0, 2]), torch.tensor([1, 1, 3])
        >>> output = ds_sparse.jagged_attention(query, key, value, *lists)
        >>> torch.testing.assert_close(output, ds_sparse.sparse_attn(query, key, value, *lists))
    """
    _refuse_transforms("jagged_attention", "nested")
    call = pairs_call(q, k, v, values, offsets, scale, cu_seqlens, document_layout)
    q, k, v, index, scale, _ = call
    queries, keys, weighted = (index.fold(as_4d(x)) for x in (q, k, pad(v, (0, 1), value=1.0)))
    repeats, lines = queries.shape[:2]
    if repeats * index.num_pairs == 0 or q.is_meta:
        return _nothing(call)
    rows, columns = index.places
    starts = index.row_offsets[:-1].long() + index.num_pairs * torch.arange(repeats, device=q.device)[:, None]
    ends = pad(starts.flatten(), (0, 1), value=repeats * index.num_pairs)

    def jagged(x: Tensor, places: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(x.index_select(1, places).flatten(0, 1), ends)

    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (jagged(queries, rows) * jagged(keys, columns)).values().sum(-1).to(wide) * scale
    largest = torch.segment_reduce(scores.detach(), "max", offsets=ends)
    exps = (scores - largest.repeat_interleave(ends.diff())).exp().unsqueeze(-1)
    terms = jagged(weighted.to(wide), columns) * torch.nested.nested_tensor_from_jagged(exps, ends)
    sums = torch.segment_reduce(terms.values(), "sum", offsets=ends, axis=0).view(repeats, lines, -1)
    return first_derivatives_only("jagged_attention", _finish(call, sums[..., :-1], sums[..., -1]))


def torch_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    values: Lists,
    offsets: Tensor | Sequence | None = None,
    scale: float | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    document_layout: str = "own",
) -> Tensor:
    """torch.sparse: `sampled_addmm` for the scores, their softmax in CSR's values, and a sparse matrix product.

    One head after another: these operations take matrices. Autocast does not change the dtype.

    Args:
        q, k, v, values, offsets, scale, cu_seqlens, document_layout: as in `sparse_attn`; q, k and v in fp32 or fp64,
            and head sizes have no bound on CUDA either.

    Returns:
        (..., H, T, E) in q's dtype.

    Raises:
        TypeError, ValueError: as `sparse_attn`; another dtype; a pair that is listed twice, which a CSR tensor cannot
            say.
        RuntimeError: under one of torch.func's transforms, which do not take sparse tensors; lists in place of their
            index under torch.compile; on CUDA with torch 2.11, in the backward pass under deterministic algorithms.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> query, key, value = (torch.randn(2, 4, 3, 8) for _ in range(3))
        >>> lists = torch.tensor([0, 0, 2]), torch.tensor([1, 1, 3])
        >>> output = ds_sparse.torch_sparse_attention(query, key, value, *lists)
        >>> torch.testing.assert_close(output, ds_sparse.sparse_attn(query, key, value, *lists))
    """
    _refuse_transforms("torch_sparse_attention", "sparse CSR")
    call = pairs_call(q, k, v, values, offsets, scale, cu_seqlens, document_layout, casts=False)
    q, k, v, index, scale, as_given = call
    if q.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"Tensors are {q.dtype}, and torch.sparse takes float32 and float64; convert them.")
    index.refuse_repeated("a sparse CSR tensor")
    queries, keys, weighted = (index.fold(as_4d(x)) for x in (q, k, v))
    if queries.shape[0] * index.num_pairs == 0 or q.is_meta:
        return _nothing(call)
    with torch.autocast(q.device.type, enabled=False):
        outputs = [_torch_sparse(*parts, index, scale) for parts in zip(queries, keys, weighted, strict=True)]
    output = index.unfold(torch.stack(outputs), *as_4d(q).shape[:2]).reshape(*q.shape[:-1], v.shape[-1])
    return as_given(first_derivatives_only("torch_sparse_attention", output))


def _torch_sparse(q: Tensor, k: Tensor, v: Tensor, index: TokenIndex, scale: float) -> Tensor:
    rows, columns = index.places
    pointer = index.row_offsets.long()

    def csr(x: Tensor) -> Tensor:
        return torch.sparse_csr_tensor(pointer, columns, x, size=(len(q), len(k)), check_invariants=False)

    scores = torch.sparse.sampled_addmm(csr(q.new_zeros(len(rows))), q, k.mT, beta=0.0, alpha=scale).values()
    largest = scores.detach().new_zeros(len(q)).scatter_reduce(0, rows, scores.detach(), "amax", include_self=False)
    exps = (scores - largest[rows]).exp()
    totals = exps.new_zeros(len(q)).index_add(0, rows, exps)
    return csr(exps / totals[rows]) @ v


def _refuse_transforms(operation: str, kind: str) -> None:
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{operation} is made of {kind} tensors, which torch.func's transforms (grad, vjp, vmap) do not take; use "
            "sparse_attn or gather_attention."
        )


def _finish(call: PairsCall, sums: Tensor, totals: Tensor) -> Tensor:
    """Sums of weighted values over those of the weights, as the caller wants them."""
    output = sums / totals.masked_fill(totals == 0, 1).unsqueeze(-1)
    output = call.pairs.unfold(output, *as_4d(call.q).shape[:2]).to(call.q.dtype)
    return call.as_given(output.reshape(*call.q.shape[:-2], *output.shape[2:]))


def _nothing(call: PairsCall) -> Tensor:
    """Zeros, where no query sees a key, or tensors have no values. Sums of nothing keep what was given in the graph."""
    q, k, v, *_ = call
    return call.as_given(q.new_zeros(*q.shape[:-1], v.shape[-1]) + sum(x.flatten()[:0].sum() for x in (q, k, v)))
