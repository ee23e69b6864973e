"""Operands of operations, attention's foremost: checked, and made as kernels take them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch.nn.functional import pad

from ..dispatch import Call, dtypes_on, largest_head_dim
from ..index import BlockIndex, PackedIndex
from ..index.master_layout import MasterLayout
from ..index.parts import Parts
from ..index.selection import Selection
from ..index.tiles import Tiles
from ._library import DTYPES, check_alike, check_device, check_dtype, check_floating, check_scale, shapes_of

# Finite biases below count as this, and so do sums of them: times log2(e) they must not reach -inf, which masks.
LOWEST_BIAS = -1e30


def check_attention_operands(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raises ValueError unless query, key and value belong together and a kernel takes them."""
    if query.dim() != 4 or key.dim() != 4 or value.shape != key.shape:
        raise ValueError(
            f"Shapes are {shapes_of(query=query, key=key, value=value)}; they have to be (batch, heads, tokens, head "
            f"size), those of key and value equal.{_of_documents(query)}{_of_one_size(key, value)}"
        )
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"Shapes are {shapes_of(query=query, key=key, value=value)}; batch and head size, the first and the last, "
            "have to be equal."
        )
    heads, key_heads = query.shape[1], key.shape[1]
    if heads % key_heads if key_heads else heads:
        hint = of_flash(query, heads < key_heads > query.shape[2] >= key.shape[2])  # a few queries of many keys
        raise ValueError(f"query has {heads} heads and key {key_heads}; they have to be a multiple of key's.{hint}")
    largest = largest_head_dim("block_sparse_attention", query.device)
    dtypes = dtypes_on("block_sparse_attention", query.device)
    if query.shape[3] < 1 or (largest is not None and query.shape[3] > largest):
        raise ValueError(
            f"Head size is {query.shape[3]}; it has to be from 1 to {largest}. Of a layout, MatMul and "
            "Softmax take larger ones, of which SparseSelfAttention(..., implementation='separate') is made."
        )
    if 0 in (query.shape[2], key.shape[2]):
        raise ValueError(
            f"Shapes are {shapes_of(query=query, key=key, value=value)}; there has to be at least one token."
        )
    if not (query.dtype == key.dtype == value.dtype and query.device == key.device == value.device):
        check_alike(query=query, key=key, value=value)
    if query.dtype not in dtypes:
        check_dtype(query)
        raise ValueError(
            "Tensors are float64 on CUDA, where this operation takes float16, bfloat16 and float32; use MatMul and "
            "Softmax, which take float64, or the CPU."
        )


def _of_documents(query: torch.Tensor) -> str:
    return " (T, heads, head size) is for packed documents; give their cu_seqlens, too." if query.dim() == 3 else ""


def _of_one_size(key: torch.Tensor, value: torch.Tensor) -> str:
    """Says what to do about a value whose head size is another than key's; "" where more differs."""
    if key.dim() != 4 or value.shape[:-1] != key.shape[:-1]:
        return ""
    depth, of_value = key.shape[-1], value.shape[-1]
    if of_value < depth:
        padded = f"torch.nn.functional.pad(value, (0, {depth - of_value})), and take result[..., :{of_value}]"
    else:
        padded = f"query and key padded alike, by (0, {of_value - depth}), and scale={depth}**-0.5"
    return f" Give {padded}; or call sparse_attn with TokenIndex.from_blocks(index): it takes both sizes."


def of_flash(query: torch.Tensor, fits: bool, name: str = "query") -> str:
    """The end of a sentence about operands that would fit with tokens before heads, as FlashAttention has them."""
    if not fits:
        return ""
    return (
        f" {name} has shape {tuple(query.shape)}, read as (batch, heads, tokens, head size); where tokens come before "
        f"heads, as FlashAttention has them, give {name}.transpose(1, 2), and the others so."
    )


def broadcasts(sizes: Sequence[int], wanted: Sequence[int]) -> bool:
    """Tells if each of the sizes is 1 or the wanted one, the last beside the last.

    They are compared one by one: sizes of a traced tensor may be symbols, which torch.compile does not find in a tuple,
    as in `size in (1, wanted)`.
    """
    if len(sizes) > len(wanted):
        return False
    for size, full in zip(sizes[::-1], wanted[::-1]):
        if size != 1 and size != full:
            return False
    return True


def check_heads(index: BlockIndex | PackedIndex | MasterLayout | Parts, query: torch.Tensor, key: torch.Tensor) -> None:
    """Raises ValueError unless the layout is for query's heads, and its sequences."""
    heads, given = query.shape[1], index.num_heads
    if isinstance(index, BlockIndex):
        # One by one: torch.compile does not find a symbol in a tuple.
        if index.num_sequences != 1 and index.num_sequences != query.shape[0]:
            raise ValueError(
                f"query has {query.shape[0]} sequences and the layout {index.num_sequences}; give the layout as many, "
                "or one for all."
            )
        if given == key.shape[1]:  # one for each group of heads
            return
    if given != 1 and given != heads:
        of_keys = f", such as layout.repeat_interleave({heads // given}, 0)" if key.shape[1] == given else ""
        raise ValueError(
            f"query has {heads} heads and the layout {given}; give the layout as many heads{of_keys}, or one."
            + of_flash(query, query.shape[2] == given)
        )


_given_seed: ContextVar[torch.Tensor | None] = ContextVar("given_seed", default=None)


def dropout_seed(device: torch.device) -> torch.Tensor:
    """Seed and offset of a call's dropout, drawn on the device from torch's generator: replayed where that is. Inside
    `dropout_seeded` what is given there."""
    # What torch.compile traces is no part of another operation, and it cannot read the variable.
    given = None if torch.compiler.is_compiling() else _given_seed.get()
    return torch.randint(2**62, (2,), device=device) if given is None else given


@contextmanager
def dropout_seeded(seed: torch.Tensor) -> Iterator[None]:
    """Calls of attention take this seed and offset, int64 (2,), in the place of numbers of their own: where several
    make up one operation."""
    token = _given_seed.set(seed)
    try:
        yield
    finally:
        _given_seed.reset(token)


def check_dropout(name: str, probability: float) -> None:
    """Raises ValueError for a probability that is not 0 to below 1, of which something is left."""
    if not 0 <= probability < 1:
        raise ValueError(f"{name} is {probability}; it has to be 0 or more and below 1.")


def factor_of(scale: float | None, head_dim: int) -> float:
    """The factor of the scores."""
    return head_dim**-0.5 if scale is None else check_scale(scale)


def check_bias(
    name: str,
    x: torch.Tensor | None,
    query: torch.Tensor,
    full: tuple[int, ...],
    dims: tuple[int, ...],
    query_name: str = "query",
) -> None:
    """Raises ValueError unless something added to scores, or a mask of them, fits their `full` shape; `dims`: the
    numbers of dimensions that it may have."""
    if x is None:
        return
    is_mask = name != "rpe"
    check_device(name, x, query.device, query_name)
    if x.dtype not in DTYPES and not (is_mask and x.dtype == torch.bool):
        raise ValueError(
            f"{name} is {x.dtype}; it has to be float16, bfloat16, float32 or float64, which is added"
            + (", or bool, which keeps where True." if is_mask else ".")
        )
    if is_mask and x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires a gradient, and masks have none here; detach it, or "
            + ("give it as rpe, which has one." if name == "attn_mask" else "use MatMul and Softmax, where it has one.")
        )
    if x.dim() not in dims or not broadcasts(x.shape, full):
        shapes = " or ".join(str(full[-n:]) for n in dims)
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; it has to be {shapes}, where any dimension may be 1."
            + of_flash(query, query_name == "query" and x.shape[-1:] == query.shape[1:2] != query.shape[2:3])
        )


def check_distance_bias(
    bias: torch.Tensor | None, query: torch.Tensor, keys: int, last: int, rpe: torch.Tensor | None
) -> None:
    """Raises ValueError unless it has the distances of queries up to the position `last` and so many keys."""
    if bias is None:
        return
    if rpe is not None:
        raise ValueError(
            "rpe and distance_bias are both given; rpe is a matrix of tokens by tokens already, so add to it what "
            "distance_bias has for each pair, ds_sparse.reference.bias_of_pairs(distance_bias, tokens, keys)."
        )
    check_device("distance_bias", bias, query.device)
    check_floating("distance_bias", bias)
    heads, least = query.shape[1], max(last + 1, keys)
    if bias.dim() != 2 or not broadcasts(bias.shape[:1], (heads,)) or bias.shape[1] % 2 == 0:
        raise ValueError(
            f"distance_bias has shape {tuple(bias.shape)}; it has to be ({heads}, 2 * M - 1) or (1, 2 * M - 1), that "
            f"of the distance 0 in the middle, with M at least {least}."
        )
    if bias.shape[1] < 2 * least - 1:
        raise ValueError(
            f"distance_bias has {bias.shape[1]} distances, up to {bias.shape[1] // 2}, and there are queries up to the "
            f"position {last} and {keys} keys; give {2 * least - 1} or more, from -{least - 1} to {least - 1}."
        )


def as_matrix(bias: torch.Tensor, tokens: int, keys: int) -> torch.Tensor:
    """A bias by distance (H or 1, 2M - 1) as one of pairs of tokens, (H or 1, T, S)."""
    middle = bias.shape[1] // 2 + 1
    return pad(bias, (tokens - middle, keys - middle)).unfold(-1, keys, 1).flip(1)


def as_added(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A bias of scores in `dtype`: -inf stays, and no finite value becomes it."""
    shape = x.shape
    if not x.requires_grad:
        # What an expanded view repeats is converted once. With a gradient each repeat has its own.
        x = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]
    return raised(x.to(torch.promote_types(x.dtype, dtype))).to(dtype).expand(shape)


def capped(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    """Scaled scores within a soft cap, which is above 0."""
    return softcap * torch.tanh(scores / softcap)


def raised(x: torch.Tensor) -> torch.Tensor:
    """A bias, or a sum of some, that counts as no lower than LOWEST_BIAS; -inf stays. The gradient is that of x, as it
    is in kernels."""
    if torch.finfo(x.dtype).min >= LOWEST_BIAS:
        return x  # fp16, on CUDA, does not compare with a number that it does not have
    lowest = LOWEST_BIAS + (x - x.detach()) if x.requires_grad else LOWEST_BIAS
    return torch.where((x < LOWEST_BIAS) & (x != float("-inf")), lowest, x)


def kept(key_padding_mask: torch.Tensor) -> torch.Tensor:
    """Which keys are no padding, bool (B or 1, S)."""
    return key_padding_mask if key_padding_mask.dtype == torch.bool else key_padding_mask != float("-inf")


def matrices(x: torch.Tensor, dtype: torch.dtype, keys: int) -> torch.Tensor:
    """rpe or attn_mask as kernels take it, (B or 1, H or 1, T or 1, S) in a dtype of theirs, nothing repeated."""
    if x.dtype not in (torch.bool, dtype, wide_dtype(dtype)):
        x = as_added(x, wide_dtype(dtype))
    x = x if x.dim() == 4 else x.reshape((1,) * (4 - x.dim()) + x.shape)
    return x if x.shape[3] == keys else x.expand(-1, -1, -1, keys)


def key_bias_of(mask: torch.Tensor, dtype: torch.dtype, keys: int, may_be_bool: bool) -> torch.Tensor:
    """A key padding mask as kernels take it, added in `dtype`; or bool, which is faster where they take that."""
    if mask.dtype != torch.bool:
        mask = as_added(mask, dtype)
    elif not may_be_bool:
        # The logarithm of 1 and 0 is 0 and -inf.
        mask = mask.to(dtype).log()
    mask = mask if mask.shape[1] == keys else mask.expand(-1, keys)
    # PyTorch calls every empty tensor contiguous, whatever its strides are.
    return mask.contiguous() if mask.numel() else mask.new_empty(mask.shape)


def distinct_when_traced(query: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Operands of which none is the same object as the one before: torch.compile takes no function of such."""
    operands = [query]
    for x in others:
        same = torch.compiler.is_compiling() and any(x is earlier for earlier in operands)
        operands.append(x.view_as(x) if same else x)
    return tuple(operands)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics, and of what is added to scores where it has not the inputs' own."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_as(x: torch.Tensor) -> torch.Tensor:
    """Allocates as a kernel does for a result beside x, (B, H, T, D) or (B, H, T, g, D): heads inside tokens in memory
    where x has them so."""
    batch, heads, tokens, *inner = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(batch, tokens, heads, *inner).transpose(1, 2)
    if len(inner) == 2 and x.stride(3) > x.stride(2):
        return x.new_empty(batch, heads, inner[0], tokens, inner[1]).transpose(2, 3)
    return x.new_empty(x.shape)


def lists_of_tiles(tiles: Tiles) -> tuple[torch.Tensor, ...]:
    return tiles.lines, tiles.entries, tiles.units, tiles.cuts


def call_on(index: BlockIndex | PackedIndex | Selection, dense: torch.Tensor, *others: torch.Tensor) -> Call:
    """A call on the blocks of an index, of dense operands (B, H, T, D); of meta tensors it is one on the index's
    device."""
    device = index.device if dense.is_meta else dense.device
    return Call(device, dense.dtype, dense.shape[-1], index.block, (dense, *others))
