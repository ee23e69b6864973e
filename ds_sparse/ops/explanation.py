"""Says which implementation runs a call of attention, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..dispatch import IMPLEMENTATIONS, Call, choose, is_readable, reasons
from ..index import BlockIndex, TokenIndex, WindowIndex
from ..index.selection import check_chosen
from ._library import check_inputs, under_autocast
from .attention import index_for
from .block_selection import checked_number
from .operands import call_on, check_attention_operands, check_distance_bias, check_heads
from .selected import gathers, heads_together
from .token import call_on_pairs, check_operands, fitting
from .window_attention import fitting_window


@dataclass(frozen=True)
class Explanation:
    """Findings of `explain`.

    Attributes:
        operation: 'block_sparse_attention', 'selected_attention' for blocks that tokens have chosen, or 'sparse_attn'
            for a `TokenIndex`.
        implementation: the name of the one that runs; None where none does.
        reasons: by name, why an implementation does not run, in sentences; of the one that does none.
        notes: what the call costs besides, in sentences.
        text: all of it, as `explain` prints it.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> query = torch.randn(1, 2, 32, 8)
        >>> found = ds_sparse.explain(query, query, query, torch.ones(2, 2, dtype=torch.bool))
        block_sparse_attention of query (1, 2, 32, 8), torch.float32, on cpu; ...
        >>> found.implementation, found.reasons["cpu"], found.reasons["hopper"]
        ('cpu', [], ['Tensors are on cpu, and it is for a CUDA GPU.'])
    """

    operation: str
    implementation: str | None
    reasons: dict[str, list[str]]
    notes: list[str]
    text: str

    def __repr__(self) -> str:
        return f"Explanation({self.operation} by {self.implementation!r})"


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: torch.Tensor | BlockIndex | WindowIndex | TokenIndex | None = None,
    *,
    block: int | None = None,
    block_indices: torch.Tensor | None = None,
    causal: bool = False,
    rpe: torch.Tensor | None = None,
    distance_bias: torch.Tensor | None = None,
) -> Explanation:
    """Prints which implementation runs attention of these operands, and why each other one does not; runs nothing.

    Args:
        query, key, value: as of `block_sparse_attention`; with a `TokenIndex` as of `sparse_attn`.
        layout: as of `block_sparse_attention`; or the `WindowIndex` of `window_attention`, or the `TokenIndex` of
            `sparse_attn`.
        block, causal, rpe, distance_bias: as of `block_sparse_attention`; none of them with a `WindowIndex` or a
            `TokenIndex`.
        block_indices: as of `selected_attention`, in the place of a layout, with a `block`.

    Returns:
        what is printed, and its parts.

    Raises:
        TypeError, ValueError: operands or a layout that the operation refuses.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> query, key, value = (torch.randn(1, 2, 32, 8) for _ in range(3))
        >>> ds_sparse.explain(query, key, value, torch.ones(2, 2, dtype=torch.bool))
        block_sparse_attention of query (1, 2, 32, 8), torch.float32, on cpu; BlockIndex(2 x 2 blocks of 16, ...)
          hopper    Tensors are on cpu, and it is for a CUDA GPU.
          portable  Tensors are on cpu, and it is for a CUDA GPU.
          cpu       runs: vector instructions of the CPU, all threads.
        Explanation(block_sparse_attention by 'cpu')
    """
    check_inputs(query=query, key=key, value=value, rpe=rpe, distance_bias=distance_bias)
    query, key, value = under_autocast(query, key, value)
    if (layout is None) == (block_indices is None):
        raise ValueError("Give a layout, or the block_indices of selected_attention; one of them.")
    if isinstance(layout, TokenIndex | WindowIndex):
        biases = ("rpe", rpe is not None), ("distance_bias", distance_bias is not None)
        for name, is_given in (("block", block is not None), ("causal", causal), *biases):
            if is_given:
                raise ValueError(
                    f"{name} is given, and attention on a {type(layout).__name__} takes none; leave it out."
                )
    if isinstance(layout, TokenIndex):
        check_operands(query, key, value)
        fitting(layout, query, key)
        operation, described, call = "sparse_attn", repr(layout), call_on_pairs(layout, query, value)
    elif block_indices is not None:
        if block is None or rpe is not None or distance_bias is not None:
            raise ValueError("selected_attention takes a block beside block_indices, and no rpe and distance_bias.")
        check_attention_operands(query, key, value)
        indices = check_chosen(block_indices, query, key.shape[1], tokens_first=False)
        together = heads_together(query.shape[1], key.shape[1], indices.shape[1])
        columns, listed = -(-key.shape[2] // checked_number("block", block, 1)), indices.shape[3]
        described = f"{listed} of {columns} blocks of {block} keys, {together} heads together"
        if gathers(query, together, block, columns, min(listed, columns)):
            described += ", rows gathered by their block"
        operation, call = "selected_attention", Call(query.device, query.dtype, query.shape[3], block, (query,))
    else:
        check_attention_operands(query, key, value)
        index: Any = (
            fitting_window(layout, query).blocks
            if isinstance(layout, WindowIndex)
            else index_for(layout, block, query, key, causal)
        )
        check_heads(index, query, key)
        check_distance_bias(distance_bias, query, key.shape[2], query.shape[2] - 1, rpe)
        described = repr(layout if isinstance(layout, WindowIndex) else index)
        operation, call = "block_sparse_attention", call_on(index, query)
    why = reasons(operation, call)
    chosen = next((name for name, sentences in why.items() if not sentences), None)
    notes = _notes(operation, call, chosen, {"query": query, "key": key, "value": value}, rpe, distance_bias)
    lines = [f"{operation} of query {tuple(query.shape)}, {query.dtype}, on {_place(query.device)}; {described}"]
    for implementation in IMPLEMENTATIONS[operation]:
        sentences = why[implementation.name]
        said = " ".join(sentences) if sentences else f"runs: {implementation.about}."
        lines.append(f"  {implementation.name:<9} {said}")
    lines += [f"  {note}" for note in notes]
    text = "\n".join(lines)
    print(text)
    return Explanation(operation, chosen, why, notes, text)


def _notes(
    operation: str,
    call: Call,
    chosen: str | None,
    operands: dict[str, torch.Tensor],
    rpe: torch.Tensor | None,
    distance_bias: torch.Tensor | None,
) -> list[str]:
    if chosen is None:
        return []
    if operands["query"].numel() == 0:
        return ["There is nothing to compute: no kernel is called."]
    (implementation,) = (i for i in IMPLEMENTATIONS[operation] if i.name == chosen)
    in_place = operation == "sparse_attn" and implementation.tiles is None
    notes = [
        f"{name} is copied at each call: kernels read head sizes and strides that are multiples of 8, numbers of a "
        "token that are adjacent, and what begins at a multiple of 16 bytes; its shape is "
        f"{tuple(x.shape)}, its strides {x.stride()}."
        for name, x in operands.items()
        if not (in_place or x.is_meta or is_readable(x))
    ]
    if implementation.in_any_order and not torch.are_deterministic_algorithms_enabled():
        notes.append(f"Backward adds up {implementation.in_any_order} in any order, as torch allows by default.")
    elif implementation.in_any_order:
        notes.append(f"Backward takes a sweep more, to add up {implementation.in_any_order} in a fixed order.")
    if rpe is not None and rpe.requires_grad:
        name = choose("gradient of rpe", call).name
        notes.append(f"The gradient of rpe is a kernel of its own, by the implementation {name}.")
    if distance_bias is not None and distance_bias.requires_grad:
        name = choose("gradient of distance_bias", call).name
        notes.append(
            "The gradient of distance_bias is not a kernel: scores of live blocks are computed again in fp32 or wider, "
            f"some block rows at a time, by the products (sdd) of the implementation {name}."
        )
    return notes


def _place(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    properties = torch.cuda.get_device_properties(device)
    return f"{device} ({properties.name}, compute capability {properties.major}.{properties.minor})"
