"""Attention over lists of token pairs by native kernels: scores of pairs, and the whole in one operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._ops import ops
from ..dispatch import Call, choose, largest_head_dim, readable
from ..index import TokenIndex
from ..index.kernels import require_kernel
from ..index.lookup import index_of_lists, packed_pairs_of
from ..index.packed import check_document_layout
from ..index.token_forms import Nested, lists_of, tensors_in
from ._autograd import Function, product_function
from ._library import check_alike, check_inputs, shapes_of, under_autocast
from .attention_function import attention_function
from .operands import broadcasts, factor_of, lists_of_tiles, of_flash
from .packed_operands import check_row, check_tokens, is_packed, packed_operands, row_of, unchanged
from .remembered import Remembered, Walk, signature

Lists: TypeAlias = Tensor | Sequence | TokenIndex
NAMES = ("q", "k", "v")
"""How sentences about packed operands call them here."""

_known = Remembered()


@overload
def sparse_matmul(q: Tensor, k: Tensor, indices: Tensor) -> Tensor: ...


@overload
def sparse_matmul(q: Tensor, k: Tensor, indices: Lists) -> Nested: ...


def sparse_matmul(q: Tensor, k: Tensor, indices: Lists) -> Nested:
    """q[..., i, :] . k[..., j, :] for each pair (i, j) of a list, unscaled.

    Differentiable in q and k. A pair that is listed twice has two scores. Sums are in fp32 or wider and in a fixed
    order: the same input gives the same bits. Under autocast q and k are cast.

    Source: the sampled dense-dense product; `sparse_matmul` of the learning project lrn-sparseatt (2026), here with
    heads and gradients.

    Args:
        q: (..., H, T, D) or (T, D), fp16, bf16, fp32 or fp64, any strides; on CUDA D is up to 256.
        k: (..., H, S, D) or (S, D).
        indices: int32 or int64 (N, 2), pairs for all heads in any order; or a list of such, one a head; or, padded at
            the end by rows of -1, (H or 1, N, 2) or (B or 1, H or 1, N, 2), B the product of what stands before H; or a
            `TokenIndex`. The index of tensors is built at first use and kept until they are changed, which each call
            looks for as `block_sparse_attention` does in a layout.

    Returns:
        (..., H, N) in q's dtype and in the order of the list; of padded lists the same, 0 where these are padded; of a
        list, or a `TokenIndex` of several, a list of (..., N) for each head. `TokenIndex.sparse_csr` makes sparse CSR
        tensors of them.

    Raises:
        TypeError: operands that are no tensors; pairs of another type or dtype.
        ValueError: shapes, dtypes, devices that do not fit; a token that does not exist, named by its place.
        RuntimeError: tensors on a device without kernels; pairs in place of their index under torch.compile.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> query = key = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
        >>> ds_sparse.sparse_matmul(query, key, torch.tensor([[1, 0], [1, 1]]))
        tensor([1., 5.])
    """
    q, k = _operands_of_scores(q, k)
    index = _index_of_pairs(indices, q, k)
    return _padded(_scores(q, k, index), indices, -2, q.shape[:-2])


@overload
def sparse_matmul_vo(q: Tensor, k: Tensor, values: Tensor, offsets: Tensor | Sequence | None = None) -> Tensor: ...


@overload
def sparse_matmul_vo(q: Tensor, k: Tensor, values: Lists, offsets: Tensor | Sequence | None = None) -> Nested: ...


def sparse_matmul_vo(q: Tensor, k: Tensor, values: Lists, offsets: Tensor | Sequence | None = None) -> Nested:
    """`sparse_matmul` of pairs given by rows: the key of each pair, and where each row ends.

    Args:
        q, k: as in `sparse_matmul`.
        values, offsets: as in `sparse_attn`.

    Returns:
        (..., H, N), the scores in the order of `values`; of padded and of several lists as in `sparse_matmul`.

    Raises:
        TypeError, RuntimeError: as `sparse_matmul`.
        ValueError: as `sparse_matmul`; offsets that fall or end elsewhere.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> query = key = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
        >>> ds_sparse.sparse_matmul_vo(query, key, values=torch.tensor([0, 1]), offsets=torch.tensor([0, 2]))
        tensor([1., 5.])
    """
    q, k = _operands_of_scores(q, k)
    index = token_index(values, offsets, q, k)
    return _padded(_scores(q, k, index), values, -1, q.shape[:-2])


class Documents(TypedDict, total=False):
    """The argument that says where packed documents are."""

    cu_seqlens: Tensor | None
    document_layout: str


_Offsets: TypeAlias = Tensor | Sequence | None


@overload
def sparse_attn(
    q: Tensor, k: Tensor, v: Tensor, values: Lists, offsets: _Offsets = ..., scale: float | None = ..., *,
    return_lse: Literal[False] = ..., **more: Unpack[Documents],
) -> Tensor: ...  # fmt: skip


@overload
def sparse_attn(
    q: Tensor, k: Tensor, v: Tensor, values: Lists, offsets: _Offsets = ..., scale: float | None = ..., *,
    return_lse: Literal[True], **more: Unpack[Documents],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def sparse_attn(
    q: Tensor, k: Tensor, v: Tensor, values: Lists, offsets: _Offsets = ..., scale: float | None = ..., *,
    return_lse: bool, **more: Unpack[Documents],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def sparse_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    values: Lists,
    offsets: Tensor | Sequence | None = None,
    scale: float | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    document_layout: str = "own",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q @ k^T) @ v over lists of token pairs, in one operation.

    Differentiable in q, k and v; probabilities are computed again in backward. The softmax of each row subtracts the
    row's largest score. A row without a key is zeros, its lse -inf, its gradients zero. A pair that is listed twice
    counts twice. Statistics and sums are in fp32 or wider. Under autocast q, k and v are cast.

    On a Hopper GPU lists that fill the blocks in which they have pairs, one pair in 50 and more, are walked in tiles
    with a bit for each pair, in fp16 and bf16, with D = E up to 128, lists that sequences share and no pair listed
    twice. Else, and on other devices, each query gathers its keys. NaN and infinities reach those that list them alone.
    The same input gives the same bits, for any number of threads,
    but for the gradient of q in tiles: there its sums are added in memory as they come, unless
    `torch.use_deterministic_algorithms(True)` is set, which costs a sweep more.

    Source: `sparse_attn` of the learning project lrn-sparseatt (2026), which *divided* scores by its last argument:
    its factor sqrt(D) is scale=1/sqrt(D) here, the default.

    Args:
        q: (..., H, T, D) or (T, D), fp16, bf16, fp32 or fp64, any strides; on CUDA D and E are up to 256.
        k: (..., H, S, D) or (S, D).
        v: (..., H, S, E) or (S, E).
        values: int32 or int64 (N,), the key of each pair in row order, in any order within a row, for all heads; or a
            list of such, one a head; or, padded at the end by anything, (H or 1, N) or (B or 1, H or 1, N), B the
            product of what stands before H; or a `TokenIndex`, and then no offsets.
            The index of tensors is built at first use and kept until they are changed, which each call looks for as
            `block_sparse_attention` does in a layout.
        offsets: int32 or int64 (T,), the end of each row in `values`, or a CSR row pointer (T + 1,), which begins with
            0; of each head where `values` are.
        scale: factor of the scores; 1 / sqrt(D) if it is not given.
        cu_seqlens: int32 or int64 (documents + 1), ascending from 0 to T, as FlashAttention has it: operands are one
            row of packed documents, of which none sees another, (1, H, T, D) or (T, H, D), the result likewise; or
            jagged nested tensors (B, H, tokens, D), which need no cu_seqlens. The pairs of a batch are found once for
            the same index and cu_seqlens; or beforehand, by `TokenIndex.packed`, and are then given without cu_seqlens.
        document_layout: of packed documents. 'own': values are a `TokenIndex` of one document, for as many tokens as
            the longest has or more; one of l tokens has its pairs (i, j) with i, j < l, so that results are those of
            separate calls. 'row': the pairs are those of the row, and those between documents are left out.
        return_lse: whether to return each row's log of its sum of exponentials as well.

    Returns:
        (..., H, T, E) in q's dtype; with `return_lse` also (..., H, T) in fp32 (fp64 for fp64), differentiable.

    Raises:
        TypeError: operands that are no tensors; values or offsets of another type or dtype; a scale that is no number.
        ValueError: shapes, dtypes, devices or a scale that do not fit; a key that does not exist, offsets that fall or
            end elsewhere, each named by its place.
        RuntimeError: tensors on a device without kernels; lists in place of their index under torch.compile.

    Examples:
        Token 0 sees itself, token 1 none, token 2 the first and itself.

        >>> import torch
        >>> import ds_sparse
        >>> query, key, value = (torch.randn(2, 4, 3, 8) for _ in range(3))
        >>> values, offsets = torch.tensor([0, 0, 2]), torch.tensor([1, 1, 3])
        >>> output = ds_sparse.sparse_attn(query, key, value, values, offsets)
        >>> output.shape
        torch.Size([2, 4, 3, 8])
        >>> torch.equal(output[:, :, 0], value[:, :, 0]), output[:, :, 1].any().item()
        (True, False)

        Packed documents of 2 and 3 tokens, in which each token sees itself and those before it.

        >>> index = ds_sparse.TokenIndex.from_mask(torch.ones(4, 4, dtype=torch.bool).tril())
        >>> query, key, value = (torch.randn(5, 4, 8) for _ in range(3))
        >>> output = ds_sparse.sparse_attn(query, key, value, index, cu_seqlens=torch.tensor([0, 2, 5]))
        >>> torch.equal(output[[0, 2]], value[[0, 2]])
        True
    """
    like = signature(
        type(values),
        (q, k, v),
        (cu_seqlens, values if isinstance(values, Tensor) else None, offsets if isinstance(offsets, Tensor) else None),
        (
            None if isinstance(values, Tensor | TokenIndex) else values,
            None if isinstance(offsets, Tensor) else offsets,
            scale,
            document_layout,
        ),
    )
    known = None if like is None else _known.get(like)
    if known is not None:
        found = _found_index(values, offsets, q, k, cu_seqlens, document_layout)
        walk = known.walks.get(found)
        if walk is not None:
            row = None if cu_seqlens is None else row_of(q, k, v, cu_seqlens)
            output, lse = _attend(*((q, k, v) if row is None else row[:3]), found, known.scale, walk)
            if row is not None:
                output, lse = row.as_given(output), row.as_given(lse) if return_lse else lse
            return (output, lse) if return_lse else output
    q, k, v, index, scale, as_given = pairs_call(q, k, v, values, offsets, scale, cu_seqlens, document_layout)
    _check_native("token_attention_forward", q, v)
    output, lse = _attend(q, k, v, index, scale)
    if like is not None and index is _found_index(values, offsets, q, k, cu_seqlens, document_layout):
        _known.keep(like, scale, None, index, lambda: Walk().of_calls_like(_function_of(index, q, v), (q, k, v)))
    return (as_given(output), as_given(lse)) if return_lse else as_given(output)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, index: TokenIndex, scale: float, walk: Walk | None = None
) -> tuple[Tensor, Tensor]:
    """Output and lse of a checked call. walk: that of one which is remembered."""
    operands, depth = [as_4d(x) for x in (q, k, v)], v.shape[-1]
    in_tiles = _runs_in_tiles(index, q, v) if walk is None else walk.function is _TiledAttention
    if walk is None:
        apply = _TiledAttention.apply if in_tiles else _Attention.apply
    else:
        apply = walk.apply
        index.ready()
    if not in_tiles:
        output, lse, _ = apply(*operands, *[None] * 5, index, walk, (scale,))
    else:
        operands = operands if walk is not None and walk.in_place else [readable(x) for x in operands]
        output, lse, _ = apply(*operands, *[None] * 5, index.tiles, walk, (scale,))
        output = output[..., :depth] if depth % 8 else output
    if q.dim() != 4:
        lead = q.shape[:-2]
        output, lse = output.reshape(*lead, *output.shape[2:]), lse.reshape(*lead, lse.shape[2])
    return output, lse


def _runs_in_tiles(index: TokenIndex, q: Tensor, v: Tensor) -> bool:
    return choose("sparse_attn", call_on_pairs(index, q, v)).tiles is not None


def _function_of(index: TokenIndex, q: Tensor, v: Tensor) -> type[Function]:
    return _TiledAttention if _runs_in_tiles(index, q, v) else _Attention


def _found_index(values: Any, offsets: Any, q: Tensor, k: Tensor, cu_seqlens: Tensor | None, layout: str) -> Any:
    """The index of a call that is remembered: the given one, or one that is kept."""
    if isinstance(values, TokenIndex):
        if cu_seqlens is None:
            return values
        return packed_pairs_of(values if q.is_meta else values.to(q.device), cu_seqlens, layout)
    if cu_seqlens is not None:
        return None
    return _index_of_lists(values, offsets, q, k)


class PairsCall(NamedTuple):
    """A checked call of attention over token pairs: operands (..., H, tokens, D), and how results go back to the form
    in which packed operands were given."""

    q: Tensor
    k: Tensor
    v: Tensor
    pairs: TokenIndex
    scale: float
    as_given: Callable[[Tensor], Tensor]


def pairs_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    values: Lists,
    offsets: Tensor | Sequence | None,
    scale: float | None,
    cu_seqlens: Tensor | None,
    document_layout: str,
    casts: bool = True,
) -> PairsCall:
    """Checks a call as `sparse_attn` takes it, and finds its index.

    Args:
        casts: whether autocast casts the operands, where it is on.

    Raises:
        TypeError, ValueError: what does not fit, in a sentence.
        RuntimeError: under torch.compile, and where pairs would have to be found in the capture of a CUDA graph.
    """
    as_given: Callable[[Tensor], Tensor] = unchanged
    if is_packed(q, k, v, cu_seqlens, document_layout):
        check_document_layout(document_layout)
        q, k, v, cu_seqlens, as_given, _ = packed_operands(q, k, v, cu_seqlens, NAMES)
        assert cu_seqlens is not None, "or the operands would not be packed"
        check_row(q, k, v, NAMES)
        values = packed_pairs_of(_index_of_one(values, offsets, q, k, document_layout), cu_seqlens, document_layout)
        offsets = None
        check_tokens(values.queries, q)
    check_inputs(q=q, k=k, v=v)
    if casts:
        q, k, v = under_autocast(q, k, v)
    check_operands(q, k, v)
    return PairsCall(q, k, v, token_index(values, offsets, q, k), factor_of(scale, q.shape[-1]), as_given)


def _index_of_one(
    values: Lists, offsets: Tensor | Sequence | None, q: Tensor, k: Tensor, document_layout: str
) -> TokenIndex:
    """The pairs of one document, or of the row."""
    if isinstance(values, TokenIndex):
        _refuse_offsets(offsets)
        return values if q.is_meta else values.to(q.device)
    if document_layout == "row":
        return token_index(values, offsets, q, k)
    lists_of("values", values, 1)
    raise ValueError(
        "values are the pairs of one document, and do not say for how many tokens they are; give a TokenIndex, "
        "such as TokenIndex.from_csr(values, offsets, tokens, tokens), or document_layout='row' if they are the "
        "row's."
    )


def token_index(values: Lists, offsets: Tensor | Sequence | None, q: Tensor, k: Tensor) -> TokenIndex:
    """The index of values and offsets for these operands, which have been checked, on q's device."""
    if isinstance(values, TokenIndex):
        _refuse_offsets(offsets)
        return fitting(values, q, k)
    values = lists_of("values", values, 1)
    if offsets is None:
        raise ValueError("offsets is not given; values need the end of each row, or give a TokenIndex as values.")
    return fitting(_index_of_lists(values, lists_of("offsets", offsets, 1), q, k), q, k)


def _index_of_lists(values: Nested, offsets: Nested, q: Tensor, k: Tensor) -> TokenIndex:
    given, lengths = (values, offsets), (q.shape[-2], k.shape[-2])
    return index_of_lists(lambda: TokenIndex.from_csr(*given, *lengths), given, *lengths)


def _refuse_offsets(offsets: Tensor | Sequence | None) -> None:
    if offsets is not None:
        raise ValueError("values is a TokenIndex, which has its offsets; leave offsets out.")


def check_operands(q: Tensor, k: Tensor, v: Tensor | None = None) -> None:
    """Raises ValueError unless q, k and, if it is given, v belong together."""
    of_q, of_k = q.shape, k.shape
    of_v = of_k if v is None else v.shape
    wanted = None
    if min(len(of_q), len(of_k), len(of_v)) < 2 or of_k[:-2] != of_q[:-2] or of_v[:-2] != of_q[:-2]:
        wanted = "they have to be (..., heads, tokens, head size), equal before the tokens"
    elif of_q[-1] != of_k[-1] or of_v[-2] != of_k[-2]:
        wanted = "q and k need the same head size, k and v the same tokens"
    elif of_q[-1] == 0 or of_v[-1] == 0:
        wanted = "head sizes have to be 1 or more"
    operands = {"q": q, "k": k} if v is None else {"q": q, "k": k, "v": v}
    if wanted is not None:
        raise ValueError(f"Shapes are {shapes_of(**operands)}; {wanted}.")
    check_alike(**operands)


def call_on_pairs(index: TokenIndex, q: Tensor, v: Tensor) -> Call:
    return Call(q.device, q.dtype, q.shape[-1], operands=(q,), value_dim=v.shape[-1], lists=index)


def _check_native(operator: str, *tensors: Tensor) -> None:
    """Raises RuntimeError or ValueError unless a kernel takes tensors (..., tokens, head size) such as these."""
    require_kernel(operator, tensors[0].device)
    largest = largest_head_dim("sparse_attn", tensors[0].device)
    if largest is not None and (given := max(x.shape[-1] for x in tensors)) > largest:
        raise ValueError(
            f"Head size is {given}; on CUDA it has to be up to {largest}. Move tensors to the CPU, or use "
            "gather_attention."
        )


def _index_of_pairs(indices: Lists, q: Tensor, k: Tensor) -> TokenIndex:
    if isinstance(indices, TokenIndex):
        return fitting(indices, q, k)
    lengths = q.shape[-2], k.shape[-2]
    given = lists_of("indices", indices, 2)
    return fitting(index_of_lists(lambda: TokenIndex.from_pairs(given, *lengths), (given,), *lengths), q, k)


def fitting(index: TokenIndex, q: Tensor, k: Tensor) -> TokenIndex:
    """The index on q's device, after a check that it fits."""
    if (index.queries, index.keys) != (q.shape[-2], k.shape[-2]):
        raise ValueError(
            f"The lists are for {index.queries} query and {index.keys} key tokens, and q has {q.shape[-2]} and k "
            f"{k.shape[-2]}; build them for these."
            + of_flash(q, q.dim() == 4 and (index.queries, index.keys) == (q.shape[1], k.shape[1]), "q")
        )
    batch, heads = _batch_and_heads(q)
    for name, own, size in (("heads", index.heads, heads), ("sequences", index.batch, batch)):
        if not broadcasts((own,), (size,)):
            raise ValueError(f"There are lists for {own} {name}, and q has {size}; give as many, or one for all.")
    return index if q.device.type == "meta" else index.to(q.device).ready()


def _batch_and_heads(q: Tensor) -> tuple[int, int]:
    lead = q.shape[:-2]
    return math.prod(lead[:-1]), lead[-1] if lead else 1


def as_4d(x: Tensor) -> Tensor:
    """(..., H, tokens, D) as (B, H, tokens, D)."""
    return x if x.dim() == 4 else x.reshape(*_batch_and_heads(x), *x.shape[-2:])


def _operands_of_scores(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    check_inputs(q=q, k=k)
    q, k = under_autocast(q, k)
    check_operands(q, k)
    _check_native("token_matmul_sdd", q)
    return q, k


def _scores(q: Tensor, k: Tensor, index: TokenIndex) -> Nested:
    flat = _Matmul.apply(as_4d(q), as_4d(k), (index,))
    return index.scores_of(flat, tuple(q.shape[:-2]))


def _padded(scores: Nested, given: Lists, pairs_dim: int, lead: torch.Size) -> Nested:
    """Scores of lists that were given in one padded tensor in one tensor as well, (..., H, N)."""
    if not isinstance(given, Tensor) or given.dim() == -pairs_dim:
        return scores
    width = given.shape[pairs_dim]
    if isinstance(scores, Tensor):
        return pad(scores, (0, width - scores.shape[-1]))
    lists = [pad(x, (0, width - x.shape[-1])) for x in tensors_in(scores)]
    # Lists of heads stand beside each other after what they share, those of sequences before the heads that share them.
    own_heads = given.shape[pairs_dim - 1] > 1
    return torch.stack(lists, -2 if own_heads else 0).reshape(*lead, width)


def _product(q: Tensor, k: Tensor, index: TokenIndex) -> Tensor:
    return ops.token_matmul_sdd(q, k, index.row_offsets, index.columns, index.batch, index.heads)


_Matmul = product_function(
    "_Matmul",
    "sparse_matmul",
    _product,
    lambda grad, q, k, index, forced: ops.token_matmul_dsd(
        grad, k, index.row_offsets, index.columns, None, index.batch, index.heads
    ),
    lambda grad, q, k, index, forced: ops.token_matmul_dsd(grad, q, *index.by_key, index.batch, index.heads),
    lambda grad, index, forced: grad.contiguous(),
)


def _run(index, walk, numbers, q, k, v, *_):
    return ops.token_attention_forward.default(
        q, k, v, index.row_offsets, index.columns, index.batch, index.heads, *numbers
    )


def _gradients(index, walk, numbers, wanted, forced, *saved):
    grads = ops.token_attention_backward.default(
        *saved[:7], index.row_offsets, index.columns, *index.by_key, index.batch, index.heads, *numbers
    )
    return *grads, None


def _run_tiles(tiles, walk, numbers, q, k, v, *_):
    rows = lists_of_tiles(tiles.rows)
    return ops.token_tiles_forward.default(q, k, v, *rows, tiles.row_pairs, tiles.layout_heads, *numbers)


def _gradients_of_tiles(tiles, walk, numbers, wanted, forced, *saved):
    grads = ops.token_tiles_backward.default(
        *saved[:7], *lists_of_tiles(tiles.rows), tiles.row_pairs, *lists_of_tiles(tiles.columns), tiles.column_pairs,
        tiles.layout_heads, *numbers, torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return *grads, None


_Attention = attention_function("_Attention", "sparse_attn", _run, _gradients, lambda grad: grad)
_TiledAttention = attention_function("_TiledAttention", "sparse_attn", _run_tiles, _gradients_of_tiles)
