"""Several documents in a row, as Transformers packs them: by positions that start again, or by `cu_seq_lens_q`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..pretrained import NAME
from .binding import which
from .trial import Refused

ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What Transformers' collators say of documents, and models hand on to their attention."""


class Packing(NamedTuple):
    """The documents of a call, whose rows lie one behind the other.

    Attributes:
        cu_seqlens: int32 (documents + 1), as `block_sparse_attention` has it.
        longest: tokens of the longest document.
    """

    cu_seqlens: torch.Tensor
    longest: int

    @classmethod
    def of_positions(cls, positions: torch.Tensor, rows: int) -> Packing:
        """That of positions (rows or 1, T): a document ends with its row, and where positions do not go on by one."""
        begins = positions.new_ones(rows, positions.shape[1], dtype=torch.bool)
        begins[:, 1:] = positions.diff(dim=-1) != 1
        edges = [*begins.flatten().nonzero().flatten().tolist(), begins.numel()]
        lengths = [end - first for first, end in pairwise(edges)]
        return cls(torch.tensor(edges, dtype=torch.int32, device=positions.device), max(lengths))

    @classmethod
    def of_arguments(cls, model: str, given: dict[str, Any]) -> Packing | None:
        """That of `ARGUMENTS`; None where there is none.

        Raises:
            ValueError: queries and keys of other documents; `seq_idx` alone.
        """
        queries, keys = given.get("cu_seq_lens_q"), given.get("cu_seq_lens_k")
        if queries is None and keys is None:
            if given.get("seq_idx") is not None:
                raise Refused(
                    f"{model} is given seq_idx alone, which {NAME} does not go by; give position_ids that start again, "
                    "or cu_seq_lens_q and cu_seq_lens_k."
                )
            return None
        if queries is None or (keys is not None and keys is not queries and not torch.equal(queries, keys)):
            raise Refused(
                f"{model} is given cu_seq_lens_q and cu_seq_lens_k that are not the same, and self-attention has as "
                "many queries as keys in each document; give one tensor as both."
            )
        longest = given.get("max_length_q")
        return cls(queries, int(queries.diff().max()) if longest is None else int(longest))

    def arguments(self) -> dict[str, Any]:
        """As models hand it on."""
        return dict(zip(ARGUMENTS, (self.cu_seqlens, self.cu_seqlens, self.longest, self.longest), strict=False))


_calls: ContextVar[tuple[tuple[nn.Module, Packing | None], ...]] = ContextVar("calls of models", default=())
"""Those that are under way, the innermost last."""


def is_under_way() -> bool:
    """Whether the innermost call of a model is of packed documents."""
    calls = () if torch.compiler.is_compiling() else _calls.get()
    return bool(calls) and calls[-1][1] is not None


def packing_of(layer: nn.Module, arguments: dict[str, Any]) -> Packing | None:
    """The documents of a layer's call, by what its model has handed on; None where there are none.

    Raises:
        Refused: the model has not handed them on.
    """
    packing = Packing.of_arguments(which(layer), arguments)
    if packing is None and is_under_way():
        raise Refused(
            f"{which(layer)} is not told of the documents that are packed in its rows: its model does not hand "
            f"cu_seq_lens_q on to the attention, and with {NAME} tokens of one would see the others. Give each "
            "document a row, with an attention_mask for the padding."
        )
    return packing


def watch(model: nn.Module) -> list[RemovableHandle]:
    """Has a model tell its layers of documents that are packed in its rows; nothing where it does already."""
    if any(hook is _before for hook in model._forward_pre_hooks.values()):
        return []
    return [
        model.register_forward_pre_hook(_before, with_kwargs=True),
        model.register_forward_hook(_after, with_kwargs=True, always_call=True),
    ]


def _before(model: nn.Module, arguments: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    if torch.compiler.is_compiling() and not _says_documents(model, _given(model, arguments, named)):
        return None
    return _tell(model, arguments, named)


@torch.compiler.disable(reason="The index of packed documents is made while the model runs.")
def _tell(model: nn.Module, arguments: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    packing = None
    try:
        packing = _packing(model, arguments, named)
    finally:
        _calls.set((*_calls.get(), (model, packing)))  # also where it raises: then `_after` is called as well
    if packing is None:
        return None
    takes = inspect.signature(model.forward).parameters
    without_cache = {"use_cache": False} if "use_cache" in takes else {}
    return arguments, {**named, **without_cache, **packing.arguments()}


def _after(model: nn.Module, arguments: tuple, named: dict[str, Any], output: Any) -> None:
    if not torch.compiler.is_compiling() or named.get("cu_seq_lens_q") is not None:
        _forget(model)


@torch.compiler.disable(reason="It was told so outside of the graph.")
def _forget(model: nn.Module) -> None:
    calls = _calls.get()
    if calls and calls[-1][0] is model:
        _calls.set(calls[:-1])


def _given(model: nn.Module, arguments: tuple, named: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(inspect.signature(model.forward).parameters, arguments, strict=False)), **named}


def _packing(model: nn.Module, arguments: tuple, named: dict[str, Any]) -> Packing | None:
    """The documents of a call of a model.

    Raises:
        ValueError: they are packed, and something else is given that does not go with it.
    """
    config: Any = model.config
    if config._attn_implementation != NAME:
        return None
    given, name = _given(model, arguments, named), type(model).__name__
    packing = Packing.of_arguments(name, given)
    if packing is None:
        positions = given.get("position_ids")
        if positions is None or positions.dim() > 2 or given.get("attention_mask") is not None or positions.is_meta:
            return None
        positions = positions.view(-1, positions.shape[-1])
        if not bool((positions.diff(dim=-1) < 0).any()):
            return None
        packing = Packing.of_positions(positions, _rows(given, positions))
    wrong = [key for key in ("attention_mask", "past_key_values") if given.get(key) is not None]
    wrong += ["use_cache=True"] if given.get("use_cache") else []
    if wrong:
        raise ValueError(
            f"{name} is given documents that are packed in a row, and {' and '.join(wrong)} besides. Leave that out: "
            "packed documents have no padding, and no token comes after them."
        )
    if not any(x.kind is inspect.Parameter.VAR_KEYWORD for x in inspect.signature(model.forward).parameters.values()):
        raise ValueError(
            f"{name} is given documents that are packed in a row, and its forward does not take cu_seq_lens_q to hand "
            "it on. Give each document a row, with an attention_mask for the padding."
        )
    return packing


def _rows(given: dict[str, Any], positions: torch.Tensor) -> int:
    """The rows of a batch: its positions may be those of all."""
    inputs = (given.get(name) for name in ("input_ids", "inputs_embeds"))
    return next((len(x) for x in inputs if x is not None), len(positions))


def _says_documents(model: nn.Module, given: dict[str, Any]) -> bool:
    """Under torch.compile, whether a call gives `cu_seq_lens_q`. What positions say is found out when the graph runs,
    too late to make an index: it stops if they start again."""
    config: Any = model.config
    if config._attn_implementation != NAME:
        return False
    positions = given.get("position_ids")
    if given.get("cu_seq_lens_q") is not None:
        return True
    if positions is not None and positions.dim() <= 2 and given.get("attention_mask") is None:
        torch._assert_async(
            (positions.diff(dim=-1) >= 0).all(),
            f"position_ids of {type(model).__name__} start again within a row, as of documents that are packed; under "
            f"torch.compile {NAME} has to be given their lengths too, cu_seq_lens_q and cu_seq_lens_k, as "
            "DataCollatorWithFlattening(return_flash_attn_kwargs=True) gives them.",
        )
    return False


MaskFunction = Callable[..., torch.Tensor]

_CAUSAL = {
    "causal_mask_function", "sliding_window_overlay", "packed_sequence_mask_function", "and_masks",
    "remap_positions_for_packed_sequence", "add_offsets_to_mask_function",
}  # fmt: skip


def is_causal_within_documents(mask_function: MaskFunction) -> bool:
    """Whether a mask function of Transformers is of what it makes of causal masks, windows and packed documents."""
    names: set[str] = set()
    _collect(mask_function, names)
    return "packed_sequence_mask_function" in names and names <= _CAUSAL


def _collect(value: Any, names: set[str]) -> None:
    """The names of a function and of those that it calls, as far as it holds them."""
    if isinstance(value, tuple | list):
        for one in value:
            _collect(one, names)
    elif inspect.isfunction(value):
        names.add(value.__qualname__.split(".")[0])
        for cell in value.__closure__ or ():
            _collect(cell.cell_contents, names)
