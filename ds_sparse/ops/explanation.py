"""Which implementation runs a call of attention, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..dispatch import IMPLEMENTATIONS, Call, choose, reasons
from ..index import BlockIndex, TokenIndex, WindowIndex
from ..index.master_layout import MasterLayout
from ._library import under_autocast
from .attention import index_for
from .operands import check_attention_operands, is_readable
from .token import check_operands


@dataclass(frozen=True)
class Explanation:
    """What `explain` found.

    Attributes:
        operation: 'block_sparse_attention', or 'sparse_attn' for a `TokenIndex`.
        implementation: the name of the one that runs; None where none does.
        reasons: by name, why an implementation does not run, in sentences; of the one that does none.
        notes: what the call costs besides, in sentences.
        text: all of it, as `explain` prints it.
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
    layout: torch.Tensor | BlockIndex | WindowIndex | TokenIndex,
    *,
    block: int | None = None,
    causal: bool = False,
    rpe: torch.Tensor | None = None,
) -> Explanation:
    """Prints which implementation runs attention of these operands, and why each other one does not; runs nothing.

    Args:
        query, key, value, block, causal, rpe: as of `block_sparse_attention`.
        layout: as of `block_sparse_attention`; or the `WindowIndex` of `window_attention`, or the `TokenIndex` of
            `sparse_attn`.

    Returns:
        what is printed, and its parts.

    Raises:
        TypeError, ValueError: operands or a layout that the operation refuses.

    Example:
        ds_sparse.explain(query, key, value, layout)
    """
    query, key, value = under_autocast(query, key, value)
    if isinstance(layout, TokenIndex):
        check_operands(query, key, value)
        operation, described = "sparse_attn", f"{layout}"
        sizes = {"head_dim": query.shape[-1], "value_dim": value.shape[-1]}
        call = Call(query.device, query.dtype, **sizes, operands=(query,), lists=layout)
    else:
        check_attention_operands(query, key, value)
        index = _blocks_of(layout, block, query, key, causal)
        operation, described = "block_sparse_attention", f"{layout if isinstance(layout, WindowIndex) else index}"
        device = index.device if query.is_meta else query.device
        call = Call(device, query.dtype, query.shape[-1], index.block)
    why = reasons(operation, call)
    chosen = next((name for name, sentences in why.items() if not sentences), None)
    notes = _notes(call, chosen, {"query": query, "key": key, "value": value}, rpe)
    lines = [f"{operation} of query {tuple(query.shape)}, {query.dtype}, on {_place(query.device)}; {described}"]
    for implementation in IMPLEMENTATIONS[operation]:
        sentences = why[implementation.name]
        said = " ".join(sentences) if sentences else f"runs: {implementation.about}."
        lines.append(f"  {implementation.name:<9} {said}")
    lines += [f"  {note}" for note in notes]
    text = "\n".join(lines)
    print(text)
    return Explanation(operation, chosen, why, notes, text)


def _blocks_of(
    layout: torch.Tensor | BlockIndex | WindowIndex | MasterLayout,
    block: int | None,
    query: torch.Tensor,
    key: torch.Tensor,
    causal: bool,
) -> BlockIndex:
    if isinstance(layout, WindowIndex):
        return layout.blocks
    device = layout.device if query.is_meta else query.device
    index = index_for(layout, block, device, query.shape[2], key.shape[2], causal)
    return index.index(query.shape[2], device, causal) if isinstance(index, MasterLayout) else index


def _notes(call: Call, chosen: str | None, operands: dict[str, torch.Tensor], rpe: torch.Tensor | None) -> list[str]:
    copied = [name for name, x in operands.items() if chosen is not None and not x.is_meta and not is_readable(x)]
    notes = [
        f"{name} is copied at each call: kernels read head sizes and strides that are multiples of 8, numbers of a "
        "token that are adjacent, and what begins at a multiple of 16 bytes; its shape is "
        f"{tuple(operands[name].shape)}, its strides {operands[name].stride()}."
        for name in copied
    ]
    if chosen == "hopper":
        if torch.are_deterministic_algorithms_enabled():
            notes.append("Backward is deterministic, which costs a sweep of its own for the gradient of query.")
        else:
            notes.append("Backward adds up the gradient of query in any order, as torch allows unless told otherwise.")
    if chosen is not None and rpe is not None and rpe.requires_grad:
        name = choose("gradient of rpe", call).name
        notes.append(f"The gradient of rpe is a kernel of its own, by the implementation {name}.")
    return notes


def _place(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    properties = torch.cuda.get_device_properties(device)
    return f"{device} ({properties.name}, compute capability {properties.major}.{properties.minor})"
