"""What DeepSpeed will say about a JSON, from its own configuration classes, before anything is trained.

Nothing is initialised and no device is used. DeepSpeed reads a configuration once, for one rank, and stops at the first
mistake. Here it reads each key beside a batch size alone, so that every mistake is found and has a name, and then all
that passed together, for what it says about several.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from ..wording import cut, did_you_mean, hint_of_text, printable, show, show_key
from .deepspeed_made import MADE, refused_when_made
from .deepspeed_reading import LONGEST, Asked, import_deepspeed, in_words, read
from .deepspeed_sequence import BATCH, DATA_KEY, KEY, autosp, wrong_size

AUTO = "auto"
"""What Transformers' Trainer and accelerate fill in before DeepSpeed reads it."""

_TRAIN, _MICRO, _ = BATCH
_IGNORED = "DeepSpeed reads no such key, and ignores it."


class Verdict(NamedTuple):
    """What DeepSpeed says about a configuration: sentences that begin with a dotted key."""

    version: str
    mistakes: list[str]
    notices: list[str]


def check_deepspeed_config(config: Mapping[str, Any]) -> Verdict:
    """Has DeepSpeed read a configuration without the `sparse_attention` block.

    Raises:
        ImportError: DeepSpeed is not installed, or cannot be imported.
    """
    deepspeed = import_deepspeed()
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
    refused = refused_when_made(passed, auto)
    passed = {key: value for key, value in passed.items() if not any(one.startswith(f"{key}.") for one in refused)}
    mistakes += refused
    notices += _ignored(filled)
    return Verdict(deepspeed.__version__, mistakes, notices + _warned(passed))


def _error_of(config: Mapping[str, Any]) -> Exception | None:
    return read(copy.deepcopy(dict(config)))[0]


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
        return [f"{show_key(key)}: got {show(value)}; DeepSpeed refuses it: {in_words(error)}"]
    # It took a shape for granted: one that it takes says which.
    shapes: dict[str, Any] = {"an object {...}": {}, **({"a number": 1} if key in BATCH else {"true or false": True})}
    taken = [
        words
        for words, shape in shapes.items()
        if not isinstance(value, type(shape)) and _error_of({**beside, key: shape}) is None
    ]
    wanted = f" wanted {taken[0]}.{hint_of_text(value)}" if taken else ""
    return [f"{show_key(key)}: got {show(value)};{wanted} DeepSpeed says: {in_words(error)}"]


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
    without = {key: {other: value for other, value in passed.items() if other != key} for key in passed}
    involved = [show_key(key) for key, rest in without.items() if _error_of(rest) is None]
    return [f"{', '.join(involved)}{': ' if involved else ''}DeepSpeed refuses it: {in_words(error)}"]


def _numbers_in_quotes(config: Mapping[str, Any]) -> list[str]:
    """What DeepSpeed reads without a look, and trips over when it computes with it."""
    from deepspeed.runtime.config import DeepSpeedConfig

    default = DeepSpeedConfig({_MICRO: 1})
    return [
        f"{show_key(key)}: got {show(value)}; wanted a number.{hint_of_text(value)}"
        for key, value in config.items()
        if isinstance(value, str) and type(getattr(default, key, None)) in (int, float)
    ]


def _ignored(config: Mapping[str, Any]) -> list[str]:
    """A notice for each key that DeepSpeed does not look up."""
    recorded = Asked(config)
    plain = Asked({_MICRO: 1})
    read(recorded)
    read(plain)  # to the end, in case the other is refused
    recorded.asked |= plain.asked | {DATA_KEY}  # read by deepspeed.initialize
    for key in MADE:
        if isinstance(made := dict.get(recorded, key), Asked) and isinstance(params := dict.get(made, "params"), Asked):
            params.handed_on = True
    near = dict(_never_asked(recorded, ""))
    notices = [f"{key}: {_IGNORED} Did you mean {show(known)}?" for key, known in near.items() if known]
    others = [key for key, known in near.items() if not known]
    return notices + ([f"{_names(others)}: {_IGNORED}"] if others else [])


def _never_asked(config: Asked, above: str) -> Iterator[tuple[str, str | None]]:
    """The dotted name of each key that was not looked up, and the key of that object that it may be meant for."""
    for key, value in config.items():
        if key not in config.asked:
            known = [name for name in config.asked if isinstance(name, str)]
            yield f"{above}{show_key(key)}", next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.8)), None)
        elif isinstance(value, Asked) and value.read and not value.handed_on:
            yield from _never_asked(value, f"{above}{show_key(key)}.")


def _warned(config: Mapping[str, Any]) -> list[str]:
    """What DeepSpeed logs as a warning while it reads."""
    _, warnings = read(copy.deepcopy(dict(config)))
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
