"""What DeepSpeed will say when it makes the optimizer and the scheduler of a JSON, before anything is trained.

DeepSpeed hands the parameters of both to a class. Classes of its own optimizers compile something when they are made,
so that only the names of their parameters are looked at; all others are made, for one number to train.
"""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from ..config import STRUCTURE_ERRORS
from ..wording import did_you_mean, hint_of_text, show, show_key
from .deepspeed_reading import in_words, logged

MADE = ("optimizer", "scheduler")
"""Keys with a `type` that DeepSpeed looks up, and `params` that it hands to it."""

Maker = Callable[[dict[str, Any]], object]


def refused_when_made(config: Mapping[str, Any], auto: list[str]) -> list[str]:
    """The sentences of an optimizer and a scheduler that DeepSpeed will not make.

    Args:
        config: what DeepSpeed reads of it is right.
        auto: dotted names of what others fill in.
    """
    return [*_optimizer(config, auto), *_scheduler(config, auto)]


def _optimizer(config: Mapping[str, Any], auto: list[str]) -> list[str]:
    import torch
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    wanted = config.get("optimizer") or {}
    kind, params = wanted.get("type"), wanted.get("params") or {}
    if kind is None:
        return []
    own = kind.lower() in DEEPSPEED_OPTIMIZERS if isinstance(kind, str) else False
    if not own and not isinstance(getattr(torch.optim, str(kind), None), type):
        return [_unknown("optimizer", kind, DEEPSPEED_OPTIMIZERS, torch.optim)]
    if not isinstance(params, Mapping):
        return [_no_object("optimizer.params", params)]
    if error := _refused_of_all(params):
        return [f"optimizer.params.max_grad_norm: got {show(params['max_grad_norm'])}; DeepSpeed refuses it: {error}"]
    zero = _object(config.get("zero_optimization"))  # true and false are taken, too: an old way to say stage 1 and 0
    offloaded = _object(zero.get("offload_optimizer")).get("device", "none") != "none"
    cls, params = _optimizer_class(kind, params, offloaded) if own else (getattr(torch.optim, kind), params)
    if cls is None:
        return []
    mistakes = _refused(
        "optimizer.params", cls, params, auto, lambda given: cls([torch.nn.Parameter(torch.zeros(1))], **given)
    )
    untested = cls not in ZERO_SUPPORTED_OPTIMIZERS and not config.get("zero_allow_untested_optimizer")
    if zero.get("stage", 0) and untested:
        mistakes.append(
            f"optimizer.type: got {show(kind)}; DeepSpeed takes it with ZeRO only beside "
            '"zero_allow_untested_optimizer": true.'
        )
    return mistakes


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _refused_of_all(params: Mapping[str, Any]) -> str | None:
    """What DeepSpeed says of parameters before it looks at whose they are."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    class Looked(Exception):
        pass

    def look() -> str:
        raise Looked

    engine = SimpleNamespace(optimizer_params=lambda: params, optimizer_name=look)
    try:
        DeepSpeedEngine._configure_basic_optimizer(engine, [])
    except Looked:
        return None
    except ValueError as error:
        return in_words(error)
    return None


def _optimizer_class(kind: str, params: Mapping[str, Any], offloaded: bool) -> tuple[type | None, dict[str, Any]]:
    """The class of one of DeepSpeed's names and what it is given; None for those of other packages, and for Muon, which
    takes any keys."""
    from deepspeed.ops import adagrad, lamb, lion
    from deepspeed.runtime.engine import DeepSpeedEngine
    from torch.optim import Adagrad

    kind, given = kind.lower(), dict(params)
    if kind in ("adam", "adamw"):
        engine = SimpleNamespace(
            zero_use_cpu_optimizer=lambda: offloaded, zenflow=False, bf16_optimizer_states=lambda: False
        )
        decoupled = given.pop("adam_w_mode", True) or kind == "adamw"
        cls, more = DeepSpeedEngine.get_optimizer_configuration(engine, given, decoupled)
        return cls, given | more
    others = {
        "adagrad": adagrad.DeepSpeedCPUAdagrad if offloaded else Adagrad,
        "lamb": lamb.FusedLamb,
        "lion": lion.DeepSpeedCPULion if offloaded else lion.FusedLion,
    }
    return others.get(kind), given


def _scheduler(config: Mapping[str, Any], auto: list[str]) -> list[str]:
    import torch
    from deepspeed.runtime import lr_schedules

    wanted = config.get("scheduler") or {}
    kind, params = wanted.get("type"), wanted.get("params")
    if kind is None:
        return []
    known = kind in lr_schedules.VALID_LR_SCHEDULES
    cls = getattr(lr_schedules if known else torch.optim.lr_scheduler, str(kind), None)
    if not isinstance(cls, type):
        return [_unknown("scheduler", kind, lr_schedules.VALID_LR_SCHEDULES, torch.optim.lr_scheduler)]
    if not isinstance(params, Mapping):
        return [_no_object("scheduler.params", params)]

    def make(given: dict[str, Any]) -> object:
        return cls(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]), **given)

    return _refused("scheduler.params", cls, params, auto, make)


def _refused(at: str, cls: type, params: Mapping[str, Any], auto: list[str], make: Maker) -> list[str]:
    """The sentences of parameters that a class, whose first argument DeepSpeed gives, does not take."""
    _, *arguments = inspect.signature(cls).parameters.values()
    names = [argument.name for argument in arguments]
    takes_all = any(argument.kind is argument.VAR_KEYWORD for argument in arguments)
    mistakes = [
        f"{at}.{show_key(key)}: {cls.__name__} takes no such key (given {show(value)}).{did_you_mean(key, names)}"
        for key, value in params.items()
        if key not in names and not takes_all
    ]
    mistakes += [
        f"{at}.{argument.name}: missing; {cls.__name__} needs it."
        for argument in arguments
        if argument.default is argument.empty
        and argument.kind is argument.POSITIONAL_OR_KEYWORD
        and argument.name not in params
        and f"{at}.{argument.name}" not in auto
    ]
    if mistakes or cls.__module__.startswith("deepspeed.ops") or any(name.startswith(f"{at}.") for name in auto):
        return mistakes
    error = _error_of(make, params)
    if error is None:
        return []
    without = {key: {other: value for other, value in params.items() if other != key} for key in params}
    involved = [key for key, rest in without.items() if _error_of(make, rest) is None]
    got = ", ".join(f"{at}.{show_key(key)}: got {show(params[key])}" for key in involved) or f"{at}: got {show(params)}"
    hints = "".join(hint_of_text(params[key]) for key in involved)
    return [f"{got}; {cls.__name__} refuses it: {in_words(error)}{hints}"]


def _error_of(make: Maker, params: Mapping[str, Any]) -> Exception | None:
    with logged():
        try:
            make(copy.deepcopy(dict(params)))
        except STRUCTURE_ERRORS as error:
            return error
    return None


def _no_object(at: str, params: Any) -> str:
    return (
        f"{at}: {'missing' if params is None else f'got {show(params)}'}; wanted an object {{...}}, which may be empty."
    )


def _unknown(key: str, kind: Any, own: list[str], more: Any) -> str:
    classes = [name for name, value in vars(more).items() if isinstance(value, type) and name[0].isupper()]
    near = difflib.get_close_matches(str(kind), [*own, *classes], n=1)
    hint = f" Did you mean {show(near[0])}?" if near else ""
    return f"{key}.type: got {show(kind)}; neither DeepSpeed nor {more.__name__} has it.{hint}"
