"""Modules whose calls of scaled_dot_product_attention are computed under a structure, without a change of their code.

A module in which such calls are sparse is of a class made of its own and `SparseCalls`, whose methods run the module's
own under a mode of PyTorch that sees each function of PyTorch that is called in them. So it does not matter how the
module names the function, which of its methods a model calls, nor which of the modules inside it calls the function;
and where a model calls a module inside it past its methods, that one is watched too. A forward in which nothing was
computed sparsely, or of which that cannot be said, raises, and so does another method whose code names the function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ..sparsity import SparsityConfig
from .code_names import calls_attention, functions_of, name_attention
from .self_attention import as_key_padding_mask
from .structured_attention import of_keys_or_pairs

_OTHER_SEQUENCES = (
    "context", "memory", "encoder_hidden_states", "key_value_states", "cond", "kv", "encoder_output",
    "encoder_outputs", "enc_output", "enc_out",
)  # fmt: skip
"""Arguments of an attention layer that say that its keys are of another sequence than its queries."""

_INTERCEPTION = "_ds_sparse_interception"


class CannotBeSparse(ValueError):
    """A call for what is no self-attention of sequences (B, H, T, D).

    Attributes:
        layer: the name of the module that made it.
    """

    def __init__(self, module: nn.Module, problem: str):
        self.layer = _interception(module).name
        super().__init__(f"{_named(module)} {problem}")


class CrossAttention(CannotBeSparse):
    """A call with keys of another sequence than the queries."""


class RanDense(RuntimeError):
    """A forward without a call that could be sparse."""


class Interception(NamedTuple):
    """Our part of a module: its name in the model, and what computes, called as `StructuredAttention` is.

    `inside` is True for a module inside the one of that name, which is watched where it is called past it."""

    name: str
    attention: Callable[..., torch.Tensor]
    inside: bool = False


class SparseCalls(nn.Module):
    """The class before the module's own, in the order of methods, where its calls are sparse. `_sparse_class` gives it
    the methods.

    Raises:
        CannotBeSparse: in a method, a call of attention that is not computed, such as cross-attention (a ValueError).
        RuntimeError: nothing was computed sparsely.
    """

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Copies and pickles find the class by the module's own.
        reduced: Any = super().__reduce_ex__(protocol)
        return _new, (dense_class(self),), *reduced[2:]


def make_calls_sparse(module: nn.Module, name: str, attention: Callable[..., torch.Tensor]) -> None:
    """Has `attention` compute what a module asks scaled_dot_product_attention for."""
    _intercept(module, Interception(name, attention))
    for inner in _callers_inside(module):
        if not isinstance(inner, SparseCalls):
            _intercept(inner, Interception(name, attention, inside=True))


def make_calls_dense(module: nn.Module) -> None:
    """The way back from `make_calls_sparse`."""
    for inner in (module, *_callers_inside(module)):
        if inner is module or (isinstance(inner, SparseCalls) and _interception(inner).inside):
            inner.__class__ = dense_class(inner)
            delattr(inner, _INTERCEPTION)


def structure_of_calls(module: SparseCalls) -> SparsityConfig:
    """The structure of a module whose calls are sparse."""
    attention: Any = _interception(module).attention  # a StructuredAttention, but in a trial
    return attention.sparsity_config


def dense_class(module: nn.Module) -> Any:
    """The class that a module has without `make_calls_sparse`."""
    classes = type(module).__mro__
    return classes[classes.index(SparseCalls) + 1] if SparseCalls in classes else type(module)


def watched_methods(kind: Any) -> list[str]:
    """The methods of a module's class in which calls are sparse."""
    methods = [name for name in functions_of(kind) if name in _CALLED or not name.startswith("__")]
    return list(dict.fromkeys(("forward", *methods)))


_CALLED = ("forward", "__call__")


def _intercept(module: nn.Module, interception: Interception) -> None:
    setattr(module, _INTERCEPTION, interception)
    module.__class__ = _sparse_class(dense_class(module))


def _callers_inside(module: nn.Module) -> list[nn.Module]:
    return [inner for inner in module.modules() if inner is not module and calls_attention(dense_class(inner))]


@functools.cache
def _sparse_class(dense: Any) -> type[nn.Module]:
    methods = {name: _watched(name, dense) for name in watched_methods(dense)}
    return type(f"Sparse{dense.__name__}", (SparseCalls, dense), methods)


def _watched(name: str, dense: Any) -> Callable[..., Any]:
    """A method of a module's class that computes sparsely what it calls for."""
    own = getattr(dense, name)
    attends = name == "forward" or name_attention(functions_of(dense)[name])
    parameters = list(inspect.signature(own).parameters)[1:] if attends else []
    others = [(place, parameter) for place, parameter in enumerate(parameters) if parameter in _OTHER_SEQUENCES]

    # What decorators keep on a function, such as torch.compile, is for that function.
    @functools.wraps(own, updated=())
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _is_watched(self):
            return own(self, *args, **kwargs)
        for place, other in others:
            given = kwargs.get(other) if len(args) <= place else args[place]
            if given is not None:
                raise CrossAttention(self, f"is given {other}, the keys of another sequence{_WAY_OUT}")
        calls = _Calls(self)
        with calls:
            output = own(self, *args, **kwargs)
        # What returns nothing is no attention: it may choose the function that others call.
        if attends and not calls.count and (output is not None or name == "forward"):
            raise RanDense(
                f"{_named(self)} ran without a call of scaled_dot_product_attention, so its attention was dense; have "
                f"{name} call that function each time, or call undo() of what ds_sparse.sparsify returned."
            )
        return output

    return method


def _is_watched(module: nn.Module) -> bool:
    """Tells if a method of a module runs inside one that is watched: its own, or of the layer that it is inside of."""
    running = [mode.module for mode in _get_current_function_mode_stack() if isinstance(mode, _Calls)]
    # Asked by its length, as Dynamo of torch 2.11 does not trace the truth of a list.
    return any(outer is module for outer in running) or (len(running) > 0 and _interception(module).inside)


def _new(dense: Any) -> nn.Module:
    sparse = _sparse_class(dense)
    return sparse.__new__(sparse)


class _Calls(TorchFunctionMode):
    """Has calls in a forward of a module computed sparsely, and counts them."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module, self.count, self.where = module, 0, _where_autograd_is()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            self.count += 1
            here = _where_autograd_is()
            if here is not None and self.where is not None and here != self.where:
                raise CannotBeSparse(
                    self.module,
                    "calls scaled_dot_product_attention under a checkpoint or a no_grad of its own, and what backward "
                    "computes again would be dense; put the checkpoint around the whole layer.",
                )
            return _attend(self.module, *args, **kwargs)
        if func is multi_head_attention_forward:
            raise CannotBeSparse(
                self.module,
                "calls multi_head_attention_forward, whose attention would stay dense; give the model a "
                "torch.nn.MultiheadAttention for it, which ds_sparse.sparsify takes.",
            )
        name = getattr(func, "__name__", "")
        if args and getattr(torch.Tensor, name, None) is func:
            # torch.compile does not trace methods that PyTorch has in Python, such as unflatten, as functions.
            return getattr(args[0], name)(*args[1:], **kwargs)
        return func(*args, **kwargs)


def _where_autograd_is() -> tuple[bool, Any] | None:
    """The state that a checkpoint changes while it computes: gradients on or off, and hooks of saved tensors. None
    in a trace, whose backward computes again what is in the graph."""
    if torch.compiler.is_compiling():
        return None
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """scaled_dot_product_attention, by its arguments."""
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if query.dim() != 4 or key.dim() != 4 or key.shape != value.shape or key.shape[3] != query.shape[3]:
        raise CannotBeSparse(
            module,
            f"calls scaled_dot_product_attention with {shapes}, and sparse attention takes (batch, heads, tokens, head "
            f"size), the last of one size{_WAY_OUT}",
        )
    if key.shape[2] != query.shape[2] or key.shape[0] != query.shape[0]:
        raise CrossAttention(
            module,
            f"calls scaled_dot_product_attention with {shapes}, which is cross-attention, or has cached keys, and the "
            f"layout is that of a sequence with itself{_WAY_OUT}",
        )
    bias = None
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*attn_mask.shape[:-1], key.shape[2])
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        if attn_mask.requires_grad:  # operations give gradients to a bias, not to a mask
            bias, attn_mask = attn_mask.to(query.dtype), None
    return _interception(module).attention(
        query, key, value, scale=scale, dropout_p=dropout_p, causal=is_causal, rpe=bias,
        **of_keys_or_pairs(as_key_padding_mask(attn_mask)),
    )  # fmt: skip


_WAY_OUT = (
    '; keep it dense, by null in "layers" of the block or with ds_sparse.sparsify on the part of the model without it, '
    "or write SparseSelfAttention into the layers that are to be sparse."
)


def _named(module: nn.Module) -> str:
    return f"layer {_interception(module).name or 'of the model itself'} ({dense_class(module).__name__})"


def _interception(module: nn.Module) -> Interception:
    return getattr(module, _INTERCEPTION)
