"""A trial of a model: a copy without weights runs on fake tensors, which compute nothing; none is left behind."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import sys
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..modules.code_names import NO_MODELS
from ..tools.notices import say_notices

T = TypeVar("T")

_LRU_CACHE = type(functools.cache(lambda: None))

_CODE = (ModuleType, FunctionType, torch.Tensor, type)

_DEPTH = 8
"""Steps from a cache to a tensor in what it keeps."""

TOKENS = 8
"""Tokens of a trial, in a batch of two."""

_LEFT_OUT = object()


def fake_copy(model: nn.Module, without: str | None = None) -> nn.Module:
    """A copy in eval mode and without hooks, with fake tensors for its parameters and buffers, in a trial.

    Args:
        without: the name of attributes of modules that the copy is made without.
    """
    memo: dict[int, Any] = {}
    for x in (*model.parameters(), *model.buffers()):
        fake = torch.empty(getattr(x, "ds_shape", x.shape), dtype=x.dtype)  # ZeRO 3 keeps the whole shape in ds_shape
        memo[id(x)] = nn.Parameter(fake, requires_grad=False) if isinstance(x, nn.Parameter) else fake
    for module in model.modules():
        if without in vars(module):
            memo[id(vars(module)[without])] = _LEFT_OUT
    double = copy.deepcopy(model, memo).eval()
    for module in double.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return double


Input = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype."""


def made_up_inputs(model: nn.Module) -> Iterator[Input]:
    """What a model in plain PyTorch may take: token ids where it has a table of embeddings; hidden states."""
    if any(isinstance(module, nn.Embedding) for module in model.modules()):
        yield (2, TOKENS), torch.int64
    if (states := hidden_states(model)) is not None:
        yield states


def hidden_states(model: nn.Module) -> Input | None:
    """Hidden states of the width that the first projection in a model takes; None where it has none."""
    width = next((module.in_features for module in model.modules() if isinstance(module, nn.Linear)), None)
    return None if width is None else ((2, TOKENS, width), floating_dtype(model))


def floating_dtype(model: nn.Module) -> torch.dtype:
    """The dtype in which a model computes."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def first_line(error: Exception) -> str:
    """An error of code that is not ours, in a sentence of ours."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def in_trial(model: nn.Module, run: Callable[[], T]) -> T:
    """Returns what `run` does, which runs a copy of a model: nothing is computed, and PyTorch does not log what
    operations do not take.

    The code of a model may keep what it makes: in caches of functools, in globals and classes of its package, in
    modules that a closure holds. Fake tensors there would be in every later forward, so these are put back. What `run`
    returns holds none.
    """
    modes = [FakeTensorMode(allow_non_fake_inputs=True)]  # emptied before it is asked who else holds it
    alive, before = weakref.ref(modes[0]), [_Place(place) for place in _places(model)]
    try:
        with _quiet(), modes[0], torch.device("cpu"), torch.no_grad():
            return run()
    except Exception as error:
        modes.clear()
        for each in _behind(error):  # it keeps the variables of the frames that it has gone through
            traceback.clear_frames(each.__traceback__)
        if _is_alive(alive, 1):  # and a frame its function, with what that closes over, as that of a generator does
            for each in _behind(error):
                each.__traceback__ = None
        raise
    finally:
        modes.clear()
        if _is_alive(alive):
            _forget(model, alive, before)


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _behind(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and those that it came of."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_alive(mode: Callable[[], FakeTensorMode | None], generations: int = 3) -> bool:
    """Tells whether there is a fake tensor of a mode, as far as is known: each holds it."""
    for generation in range(generations):  # the youngest objects first, as looking at all takes a second
        if mode() is not None:
            gc.collect(generation)
    return mode() is not None


def _forget(model: nn.Module, mode: Callable[[], FakeTensorMode | None], before: list[_Place]) -> None:
    for place in before:
        place.put_back(lambda value: _holds_a_fake([value], mode()))
    for cache in [x for x in gc.get_objects() if type(x) is _LRU_CACHE]:
        if _holds_a_fake(gc.get_referents(cache), mode()):
            cache.cache_clear()
    if _is_alive(mode) and _holds_a_fake(gc.get_objects(), mode(), 1):
        say_notices(
            [
                f"{type(model).__name__}: a trial of it without data has left tensors where ds_sparse does not find "
                "them. If a model of this process gives fake tensors, call sparsify in a process of its own, and save "
                "the model there."
            ]
        )


def _holds_a_fake(found: list[Any], mode: FakeTensorMode | None, depth: int = _DEPTH) -> bool:
    seen: set[int] = set()
    for _ in range(depth):
        found = [x for x in found if id(x) not in seen]
        if any(issubclass(type(x), FakeTensor) and x.fake_mode is mode for x in found):
            return True
        seen.update(map(id, found))
        found = [inner for x in found for inner in _inside(x)]
    return False


def _inside(x: Any) -> list[Any]:
    """Lists what a container holds, or the attributes of an object."""
    kind = type(x)
    if issubclass(kind, dict | list | tuple | set | frozenset):
        return gc.get_referents(x)
    if not kind.__dictoffset__ or issubclass(kind, _CODE):
        return []
    return list(getattr(x, "__dict__", {}).values())  # a TypeVar of Python 3.14 has an offset, and no dict


def _places(model: nn.Module) -> list[Any]:
    """Where the code of a model may keep something: its modules, the files of their packages, and what these define."""
    packages = {_package(kind) for module in model.modules() for kind in type(module).__mro__} - {*NO_MODELS}
    files = [file for name, file in list(sys.modules.items()) if name.partition(".")[0] in packages]
    found = [x for file in files for x in list(vars(file).values()) if not isinstance(x, ModuleType)]
    defined = {id(x): x for x in found if hasattr(x, "__dict__") and _package(x) in packages}
    return [*model.modules(), *files, *defined.values()]


def _package(x: Any) -> str:
    """The package of a class, of a function, or of an object's class."""
    return str(getattr(x, "__module__", "")).partition(".")[0]


class _Place:
    """Something with attributes, as they are now, and what is in those that are containers."""

    def __init__(self, place: Any):
        self._place, self._attributes = place, dict(vars(place))
        containers = [x for x in self._attributes.values() if type(x) in (dict, OrderedDict, list, set)]
        self._containers = [(x, x.copy()) for x in containers]

    def put_back(self, is_left: Callable[[Any], bool]) -> None:
        """Puts back what `is_left` says that the trial left; all else stays: imports, registrations, counters."""
        place, now = self._place, dict(vars(self._place))
        # Attributes of a class cannot be written but by these; those of a module have a meaning to PyTorch.
        is_class = isinstance(place, type)
        for name, value in now.items():
            was = self._attributes.get(name)
            if value is was or not is_left(value):
                continue
            if name in self._attributes:
                setattr(place, name, was) if is_class else vars(place).update({name: was})
            else:
                delattr(place, name) if is_class else vars(place).pop(name)
        for container, was in self._containers:
            if not is_left(container):
                continue
            if isinstance(container, list):
                container[:] = was
            else:
                container.clear()
                container.update(was)
