"""Asks DeepSpeed's own classes what they will say about a JSON, before anything is trained.

Nothing is initialised and no device is used. DeepSpeed reads a configuration once, for one rank, and stops at the first
mistake. Here it reads each key beside a batch size alone, so that every mistake is found and has a name, and then all
that passed together, for what it says about several. Parameters of the optimizer and the scheduler it hands to a class:
those of its own optimizers compile something when they are made, so that only the names of their parameters are looked
at; all others are made, for one number to train.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import inspect
import logging
import re
from collections.abc import Callable, Iterator, KeysView, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from ..config import STRUCTURE_ERRORS
from ..tools.extras import optional_imports
from ..tools.wording import cut, did_you_mean, hint_of_text, printable, reason, show, show_key
from .deepspeed_sequence import BATCH, DATA_KEY, KEY, autosp, wrong_size

AUTO = "auto"
"""Values that Transformers' Trainer and accelerate fill in before DeepSpeed reads them."""

_TRAIN, _MICRO, _ = BATCH
_IGNORED = "DeepSpeed reads no such key, and ignores it."

Maker = Callable[[dict[str, Any]], object]

LONGEST = 240
"""Characters of what DeepSpeed says."""


class Verdict(NamedTuple):
    """DeepSpeed's verdict on a configuration: sentences that begin with a dotted key."""

    version: str
    mistakes: list[str]
    notices: list[str]


def check_deepspeed_config(config: Mapping[str, Any]) -> Verdict:
    """Has DeepSpeed read a configuration without the `sparse_attention` block.

    Raises:
        ImportError: DeepSpeed is not installed, or cannot be imported.
    """
    deepspeed = _import_deepspeed()
    filled, auto = _without_auto(config)
    mistakes, notices = [], []
    if auto and "zero_optimization" not in config:
        mistakes.append(
            'zero_optimization: missing; Transformers\' Trainer and accelerate, which fill in "auto", refuse a file '
            'without it. Add "zero_optimization": {"stage": 0}, or another stage.'
        )
    if auto:
        notices.append(
            f'{_names(auto)}: "{AUTO}" is for Transformers\' Trainer or accelerate to fill in; another '
            "script has to give a value."
        )
    if auto and not any(key in filled for key in BATCH) and any(key in auto for key in BATCH):
        filled[_MICRO] = 1
    size = filled.pop(KEY, 1)
    wrong = wrong_size(size)
    notices += _fit_to_one_rank(filled, 1 if wrong else size)
    alone, passed = _refused_alone(filled)
    mistakes += alone
    mistakes += [sentence for sentence in (wrong, autosp(filled)) if sentence is not None]
    mistakes += _refused_together(passed, filled)
    mistakes += _numbers_in_quotes(passed)
    refused = [*_optimizer(passed, auto), *_scheduler(passed, auto)]
    passed = {key: value for key, value in passed.items() if not any(one.startswith(f"{key}.") for one in refused)}
    mistakes += refused
    notices += _ignored(filled)
    return Verdict(deepspeed.__version__, mistakes, notices + _warned(passed))


def _error_of(config: Mapping[str, Any]) -> Exception | None:
    return _read(copy.deepcopy(dict(config)))[0]


def _refused_alone(config: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The sentences of each key that DeepSpeed refuses, and the keys that it does not."""
    refused = {key: sentences for key, value in config.items() if (sentences := _refusal(key, value))}
    passed = {key: value for key, value in config.items() if key not in refused}
    for key in list(refused):
        # Some need another key: master weights in bf16 need ZeRO.
        if _error_of(_with_batch_size(passed | {key: config[key]}, config)) is None:
            passed[key] = config[key]
            del refused[key]
    return [sentence for sentences in refused.values() for sentence in sentences], passed


def _with_batch_size(passed: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys with a batch size, where that of the configuration is a mistake of its own."""
    given = [key for key in BATCH if key in config]
    return passed if not given or any(key in passed for key in given) else {**passed, _MICRO: 1}


def _refusal(key: str, value: Any) -> list[str]:
    beside = {} if key in (_TRAIN, _MICRO) else {_MICRO: 1}
    error = _error_of(beside | {key: value})
    if error is None:
        return []
    if isinstance(error, ValidationError):
        return _fields(key, value, error)
    if not isinstance(error, TypeError | AttributeError):
        return [f"{show_key(key)}: got {show(value)}; DeepSpeed refuses it: {_in_words(error)}"]
    # It took a shape for granted: one that it takes says which.
    shapes: dict[str, Any] = {"an object {...}": {}, **({"a number": 1} if key in BATCH else {"true or false": True})}
    taken = [
        words
        for words, shape in shapes.items()
        if not isinstance(value, type(shape)) and _error_of({**beside, key: shape}) is None
    ]
    wanted = f" wanted {taken[0]}.{hint_of_text(value)}" if taken else ""
    return [f"{show_key(key)}: got {show(value)};{wanted} DeepSpeed says: {_in_words(error)}"]


def _fields(key: str, value: Any, error: ValidationError) -> list[str]:
    """The sentences of pydantic's errors, with the dotted name that each has in the file."""
    # DeepSpeed's class stands for the object of the key, for one in it (timers.throughput), or for all (tensorboard).
    inner = [name for name, below in value.items() if isinstance(below, dict)] if isinstance(value, dict) else []
    sentences = []
    for detail in error.errors(include_url=False):
        loc = detail["loc"]
        above = [name for name in inner if loc and loc[0] not in value and loc[0] in value[name]]
        place = loc if loc[:1] == (key,) else (key, *above[:1], *loc)
        name, given = ".".join(show_key(part) for part in place), show(detail["input"])
        if detail["type"] == "extra_forbidden":
            hint = did_you_mean(loc[-1], _known_fields(error.title, loc))
            sentences.append(f"{name}: DeepSpeed has no such key (given {given}).{hint}")
        elif detail["type"] == "enum":
            choices = dict.fromkeys(re.split(", | or ", detail["ctx"]["expected"]))  # a value may have two names
            sentences.append(f"{name}: got {given}; wanted {' or '.join(choices)}.{hint_of_text(detail['input'])}")
        else:
            said = cut(printable(detail["msg"]), LONGEST).rstrip(".")
            sentences.append(f"{name}: got {given}; DeepSpeed says: {said}.{hint_of_text(detail['input'])}")
    return sentences


def _known_fields(title: str, place: tuple[Any, ...]) -> list[str]:
    """The fields beside the last part of a place, below DeepSpeed's class of that name."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    models = [model for model in DeepSpeedConfigModel.__subclasses__() if model.__name__ == title]
    for part in place[:-1]:
        fields = {name: field for model in models for name, field in model.model_fields.items()}
        outermost = (fields[part].annotation,) if part in fields else ()
        kinds = [kind for outer in outermost for kind in (outer, *get_args(outer))]
        models = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return [name for model in models for name in model.model_fields]


def _refused_together(passed: dict[str, Any], config: Mapping[str, Any]) -> list[str]:
    """The sentence of what each key passes and all of them do not; it names those without which they would."""
    passed = _with_batch_size(passed, config)
    error = _error_of(passed)
    if error is None:
        return []
    involved = ", ".join(map(show_key, _involved(passed, _error_of)))
    return [f"{involved}{': ' if involved else ''}DeepSpeed refuses it: {_in_words(error)}"]


def _involved(given: Mapping[str, Any], error_of: Callable[[dict[str, Any]], Exception | None]) -> list[str]:
    """The keys without any one of which there is no error."""
    without = {key: {other: value for other, value in given.items() if other != key} for key in given}
    return [key for key, rest in without.items() if error_of(rest) is None]


def _numbers_in_quotes(config: Mapping[str, Any]) -> list[str]:
    """Finds numbers in quotes, which DeepSpeed reads without a look and trips over later."""
    from deepspeed.runtime.config import DeepSpeedConfig

    default = DeepSpeedConfig({_MICRO: 1})
    return [
        f"{show_key(key)}: got {show(value)}; wanted a number.{hint_of_text(value)}"
        for key, value in config.items()
        if isinstance(value, str) and type(getattr(default, key, None)) in (int, float)
    ]


def _ignored(config: Mapping[str, Any]) -> list[str]:
    """A notice for each key that DeepSpeed does not look up."""
    recorded = _Asked(config)
    plain = _Asked({_MICRO: 1})
    _read(recorded)
    _read(plain)  # to the end, in case the other is refused
    recorded.asked |= plain.asked | {DATA_KEY}  # read by deepspeed.initialize
    for key in ("optimizer", "scheduler"):  # whose parameters are handed to a class
        made = dict.get(recorded, key)
        if isinstance(made, _Asked) and isinstance(params := dict.get(made, "params"), _Asked):
            params.handed_on = True
    near = dict(_never_asked(recorded, ""))
    notices = [f"{key}: {_IGNORED} Did you mean {show(known)}?" for key, known in near.items() if known]
    others = [key for key, known in near.items() if not known]
    return notices + ([f"{_names(others)}: {_IGNORED}"] if others else [])


def _never_asked(config: _Asked, above: str) -> Iterator[tuple[str, str | None]]:
    """The dotted name of each key that was not looked up, and the key of that object that it may be meant for."""
    for key, value in config.items():
        if key not in config.asked:
            known = [name for name in config.asked if isinstance(name, str)]
            yield f"{above}{show_key(key)}", next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.8)), None)
        elif isinstance(value, _Asked) and value.read and not value.handed_on:
            yield from _never_asked(value, f"{above}{show_key(key)}.")


def _warned(config: Mapping[str, Any]) -> list[str]:
    """Collects the warnings that DeepSpeed logs while it reads."""
    _, warnings = _read(copy.deepcopy(dict(config)))
    said = (cut(printable(" ".join(warning.split())), LONGEST) for warning in warnings)
    return [f"DeepSpeed warns: {sentence.rstrip('.')}." for sentence in said]


def _fit_to_one_rank(config: dict[str, Any], size: int) -> list[str]:
    """Where all three batch sizes are given they say the number of ranks, `size` of which hold a sequence: takes it out
    of `config`, for DeepSpeed reads it for one."""
    sizes = [size for size in (config.get(key) for key in BATCH) if type(size) is int and size > 0]
    if len(sizes) < len(BATCH):
        return []
    train, micro, steps = sizes
    groups, rest = divmod(train, micro * steps)
    ranks = groups * size
    if rest or ranks < 2:
        return []
    config[_TRAIN] = micro * steps
    of_ranks = f"{ranks} ranks" if size == 1 else f"({ranks} ranks / {KEY} {size})"
    return [
        f"{_TRAIN}: {train} = {micro} x {steps} accumulation steps x {of_ranks}; DeepSpeed refuses any other number."
    ]


def _without_auto(config: Mapping[str, Any], above: str = "") -> tuple[dict[str, Any], list[str]]:
    """The configuration without what is "auto", and the dotted names of that."""
    rest: dict[str, Any] = {}
    auto: list[str] = []
    for key, value in config.items():
        name = f"{above}{show_key(key)}"
        if value == AUTO:
            auto.append(name)
        elif isinstance(value, Mapping):
            rest[key], below = _without_auto(value, f"{name}.")
            auto += below
        else:
            rest[key] = value
    return rest, auto


def _names(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 5 else ""
    return f"{', '.join(names[: 4 if more else 5])}{more}"


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
    """DeepSpeed's refusal of parameters before it looks at whose they are."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    engine = SimpleNamespace(optimizer_params=lambda: params)
    try:
        DeepSpeedEngine._configure_basic_optimizer(engine, [])
    except ValueError as error:
        return _in_words(error)
    except AttributeError:  # it looks whose they are
        return None
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
    error = _not_made(make, params)
    if error is None:
        return []
    involved = _involved(params, functools.partial(_not_made, make))
    got = ", ".join(f"{at}.{show_key(key)}: got {show(params[key])}" for key in involved) or f"{at}: got {show(params)}"
    hints = "".join(hint_of_text(params[key]) for key in involved)
    return [f"{got}; {cls.__name__} refuses it: {_in_words(error)}{hints}"]


def _not_made(make: Maker, params: Mapping[str, Any]) -> Exception | None:
    with _logged():
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


def _import_deepspeed() -> ModuleType:
    """DeepSpeed, without the lines that it logs when it is imported (where it finds no GPU, say)."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with optional_imports():
            import deepspeed
    finally:
        logging.disable(before)
    return deepspeed


class _Asked(dict):
    """A configuration that keeps which keys were looked up, in itself and in the objects below."""

    def __init__(self, content: Mapping[Any, Any]):
        super().__init__({key: _Asked(value) if isinstance(value, dict) else value for key, value in content.items()})
        self.asked: set[Any] = set()
        self.read = False
        """A value was taken by its key, and not only all of them at once."""
        self.handed_on = False
        """It was copied for what reads it later."""

    def __copy__(self) -> _Asked:
        self.handed_on = True
        return self

    def __contains__(self, key: object) -> bool:
        self.asked.add(key)
        return super().__contains__(key)

    def __getitem__(self, key: Any) -> Any:
        self.asked.add(key)
        self.read = True
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked.add(key)
        self.read = True
        return super().get(key, default)

    def keys(self) -> KeysView[Any]:  # type: ignore[override]  # dict's own kind cannot be made
        return KeysView(self)


def _read(config: dict[str, Any]) -> tuple[Exception | None, list[str]]:
    """Has DeepSpeed read a configuration: its error, and its warnings. Over a shape that it does not expect it trips by
    any error."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    raised = None
    with _logged() as records:
        try:
            DeepSpeedConfig(config)
        except (*STRUCTURE_ERRORS, DeepSpeedConfigError) as error:
            raised = error
    return raised, [record.getMessage() for record in records]


@contextlib.contextmanager
def _logged() -> Iterator[list[logging.LogRecord]]:
    """Keeps what DeepSpeed logs, in place of printing it."""
    from deepspeed.utils import logger

    records: list[logging.LogRecord] = []
    collector: Any = logging.Handler(logging.WARNING)
    collector.emit = records.append
    handlers, logger.handlers = logger.handlers, [collector]
    try:
        yield records
    finally:
        logger.handlers = handlers


def _in_words(error: Exception) -> str:
    """Puts an error of DeepSpeed's into words, as the end of a sentence."""
    text = reason(error)
    kind = f"{type(error).__name__}: "
    # An assertion or an error of DeepSpeed's own says it in words.
    text = text.removeprefix(kind) if type(error).__name__ in ("AssertionError", "DeepSpeedConfigError") else text
    return f"{cut(text, LONGEST).rstrip('.')}."
