"""A trial run of a Transformers model, without computing: what its layers ask of the attention function."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from ...models.fake_copy import fake_copy, first_line
from ...models.in_trial import in_trial
from ...modules.local_attention import LocalAttention

TOKENS = 8
"""Tokens of a trial, in a batch of two."""

SAMPLES = 8000
"""Audio samples of a trial: half a second."""

_ATTACHED = "_ds_sparse"
"""The attribute of a layer where its structure and layouts are."""


class Refused(ValueError):
    """The attention or the mask function was called for what it does not compute."""


class OtherKeys(Refused):
    """It was called for the keys of another sequence than that of the queries."""


class Untried(Exception):
    """The model did not run on made-up inputs; the text is its error."""


_MASKS = "_ds_sparse_masks"
"""The attribute of a config in a trial where its masks are."""


class Window(NamedTuple):
    """The window of a layer, as a trial has seen it.

    Attributes:
        asked: the `sliding_window` that the layer asks the attention for.
        local: what computes it; None where the layer's mask hides nothing by distance.
    """

    asked: int | None = None
    local: LocalAttention | None = None


class Masks:
    """The masks that were made in a trial, with the window of each. The config of the model that is tried holds it, so
    that no other thread notices.

    Args:
        windows: gets those of the layers, by name.
    """

    def __init__(self, windows: dict[str, Window]) -> None:
        self._made: dict[int, tuple[torch.Tensor, float]] = {}
        self._windows = windows

    @classmethod
    def of(cls, config: Any) -> Masks | None:
        """Those of the trial that a config is in; None where it is in none."""
        return getattr(config, _MASKS, None)

    def note_in(self, config: Any) -> None:
        setattr(config, _MASKS, self)

    def note(self, mask: torch.Tensor | None, window: float, shape: tuple[int, int]) -> torch.Tensor:
        """A mask of its own for the layers of the trial, by which `check` knows the window."""
        own = torch.ones(shape, dtype=torch.bool) if mask is None else mask.clone()
        self._made[id(own)] = (own, window)
        return own

    def window(self, name: str, layer: str, mask: torch.Tensor | None, asked: int | None, causal: bool) -> Window:
        """The window of a layer, that of its mask, as in dense attention. Raises Refused where the layer asks for
        another one."""
        any_window = any(window != math.inf for _, window in self._made.values())
        unknown = math.nan if any_window and mask is not None else math.inf
        by_mask = self._made[id(mask)][1] if id(mask) in self._made else unknown
        # Where a bidirectional mask sees as many tokens on a side, Transformers gives FlashAttention one less.
        by_layer = [math.inf] if asked is None else [asked - 1] if causal else [asked - 1, asked]
        if math.isnan(by_mask) or (asked is not None and by_mask not in by_layer):
            raise Refused(
                f"{layer} is local, and its mask and its sliding_window are not the same window ({by_mask} and "
                f"{by_layer[0]} tokens on a side; inf: all, nan: a mask made anew by the model)."
            )
        window = Window(asked, None if by_mask == math.inf else LocalAttention(int(by_mask)))
        if self._windows.setdefault(name, window) != window:
            raise Refused(f"{layer} is called more than once in a forward, with other windows each time.")
        return window


def run(model: nn.Module, prepare: Callable[[nn.Module], None]) -> None:
    """Runs a copy of a PreTrainedModel without weights, in eval mode, on fake tensors: a batch of two sequences.
    Nothing is computed, and neither the model nor its hooks notice.

    Args:
        prepare: is called with the copy before it runs; its modules come in the same order.

    Raises:
        Refused: a layer or a mask asks for what is not computed.
        Untried: the model runs on none of the inputs that its forward and its config let one make up.
    """
    problem: Exception | None = None
    for inputs in _inputs(model):
        try:
            in_trial(model, functools.partial(_run_copy, model, prepare, inputs))
            return
        except Refused:
            raise
        except Exception as error:  # noqa: BLE001  code that is not ours, on inputs that it does not expect
            problem = problem or error  # of the likeliest inputs
    if problem is None:
        problem = TypeError(f"its forward takes ({', '.join(inspect.signature(model.forward).parameters)})")
    if isinstance(problem, DataDependentOutputException):
        raise Untried("its forward reads a number of a tensor, as .item() does, and there is none") from problem
    raise Untried(first_line(problem)) from problem


def _run_copy(model: nn.Module, prepare: Callable[[nn.Module], None], inputs: Inputs) -> None:
    double = fake_copy(model, without=_ATTACHED)
    _choose_experts(double)
    prepare(double)
    double(**{name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in inputs.items()})


def _choose_experts(double: nn.Module) -> None:
    """Mixtures of experts run as fake tensors can: other ways read values, or want bf16 of them."""
    for module in double.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation_internal"):
            config._experts_implementation_internal = "batched_mm"


Inputs = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype by name."""


def _inputs(model: nn.Module) -> Iterator[Inputs]:
    """Inputs that a model may take, the likeliest first."""
    taken, config = inspect.signature(model.forward).parameters, model.config
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    mask = {"attention_mask": ((2, TOKENS), torch.int64)} if "attention_mask" in taken else {}
    ids = {name: ((2, TOKENS), torch.int64) for name in ("input_ids", "decoder_input_ids") if name in taken}
    pictures = [(name, shape) for name in ("pixel_values", "pixel_values_videos") for shape in _pictures(config, name)]
    sounds = [(name, shape) for name in ("input_features", "input_values") for shape in _sounds(config)]
    states = [(name, (2, TOKENS, width)) for name in ("inputs_embeds", "hidden_states") for width in _widths(config)]
    others = [(name, shape) for name, shape in (*pictures, *sounds, *states) if name in taken]
    first = [(name, shape) for name, shape in others if name == model.main_input_name]
    if ids and not first:
        yield {**ids, **mask}
        yield from ({**ids, **mask, name: (shape, dtype)} for name, shape in others if not name.startswith("inputs_"))
    for name, shape in first + others:
        yield {name: (shape, dtype)} | (mask if shape[1:2] == (TOKENS,) else {})
    if ids and first:
        yield {**ids, **mask}


def _pictures(config: Any, name: str) -> list[tuple[int, ...]]:
    side = getattr(config, "image_size", None) or 224
    height, width = side if isinstance(side, list | tuple) else (side, side)
    channels, frames = getattr(config, "num_channels", 3), getattr(config, "num_frames", None)
    still = (2, channels, height, width)
    return [(2, frames, channels, height, width), still] if frames else [still]


def _sounds(config: Any) -> list[tuple[int, ...]]:
    bins = [getattr(config, name, None) for name in ("num_mel_bins", "input_feat_per_channel", "feat_in", "input_dim")]
    frames = 2 * getattr(config, "max_source_positions", 128)
    shapes = [shape for n in bins if n for shape in ((2, n, frames), (2, getattr(config, "max_length", 128), n))]
    return [*shapes, (2, SAMPLES), (2, 1, SAMPLES)]


def _widths(config: Any) -> list[int]:
    return [width for width in (getattr(config, "hidden_size", None),) if isinstance(width, int)]
