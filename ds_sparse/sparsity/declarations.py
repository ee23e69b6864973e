"""Declarations of structures: fields, of which come the constructor, its validation and the JSON schema, rules between
them, and of itself beside its layout `seed`, `causal` and `strict_causal`.

These three count where our constructor got them. A class with an `__init__` of its own, or one that derives from
nothing, may use the same names for something else.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidatorFunctionWrapHandler, WrapValidator
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError, ValidationError

from ..tools.block_sizes import BLOCK_SIZES
from ..tools.wording import listed
from ._docstring import with_fields

DEFAULTS: dict[str, Any] = {"seed": None, "causal": False, "strict_causal": False}

DECLARED = "_declared"
"""Attribute with the names of those that count: of a class with our constructor all of them, of a structure whose own
`__init__` calls ours those that it passes on."""

Rule = Callable[..., str | None]
"""A condition between fields. Its parameters are the names of the fields it reads; it returns the sentence that says
what is wrong, or None."""

_Structure = TypeVar("_Structure", bound=type)

_given: set[str] = set()
"""Cautions that this process has given already."""


class SparsityWarning(UserWarning):
    """A structure that does what was asked, but perhaps not what was meant.

    Examples:
        >>> import warnings
        >>> import ds_sparse
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", ds_sparse.SparsityWarning)
        ...     structure = ds_sparse.FixedSparsityConfig(num_heads=2, attention="unidirectional")
    """


def one_of_sizes(sizes: Sequence[int]) -> Callable[[int], int]:
    """A validator of a block's side."""

    def check(block: int) -> int:
        if block not in sizes:
            # pydantic's own type and wording for a choice, on an integer that stays strict (a Literal would take 16.0).
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": listed(sizes, "or")})
        return block

    return check


def _attention(value: Any, handler: ValidatorFunctionWrapHandler) -> str:
    try:
        return handler(value)
    except ValidationError as error:
        raise PydanticCustomError(
            "literal_error",
            'only "uni/bi-directional" attentions are supported for now! Input should be {expected}',
            {"expected": "'bidirectional' or 'unidirectional'"},
        ) from error


def _plain(value: Any) -> Any:
    """NumPy's integers, also inside a list, as those of Python, which are all that strict validation takes."""
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else value


def _as_list(value: Any) -> Any:
    """Other sequences of numbers as the list that strict validation takes: tuples, ranges, arrays."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, (tuple, range)) else value


Block = Annotated[int, AfterValidator(one_of_sizes(BLOCK_SIZES)), Field(json_schema_extra={"enum": list(BLOCK_SIZES)})]
Indices = Annotated[list[int], BeforeValidator(_as_list)]
WindowSizes = Annotated[list[Annotated[int, Field(ge=1)]], BeforeValidator(_as_list), Field(min_length=1)]

Attention = Annotated[
    Literal["bidirectional", "unidirectional"],
    WrapValidator(_attention),
    Field(
        description="Whether a block sees the blocks after it; inside a block all tokens see each other, see causal."
    ),
]
HorizontalGlobalAttention = Annotated[
    bool, Field(description="Whether global blocks also attend to all. Needs bidirectional attention.")
]
RandomBlocks = Annotated[int, Field(ge=0, description="Blocks drawn at random in every row.")]
WindowWidth = Annotated[
    int,
    Field(
        ge=0,
        description="Width of the window in blocks, half of it on either side of the diagonal: an even one counts as "
        "the next odd one, and 0 is the diagonal.",
    ),
]
GlobalBlockEndIndices = Annotated[
    Indices | None,
    Field(description="End (exclusive) of the range that starts at each of global_block_indices; null: single blocks."),
]


@dataclass_transform(field_specifiers=(Field,))
def declared(cls: _Structure) -> _Structure:
    """Class decorator: the annotated fields become the constructor, its strict validation and the JSON schema.

    A pydantic dataclass, except that attributes which a subclass sets before calling `super().__init__` survive,
    that the class's `rules` are checked (ValueError), that its `cautions` are given once a process, and that the
    docstring lists the fields.

    Args:
        cls: a subclass of `SparsityConfig`. A field is annotated and has a default, as those of `SparsityConfig` have,
            unless it is keyword-only; pydantic's `Field` gives it bounds and a description.

    Returns:
        The class, whose constructor takes its own fields after those of its base.

    Raises:
        TypeError: a field without a default that is not keyword-only.

    Examples:
        >>> import ds_sparse
        >>> from pydantic import Field
        >>> @ds_sparse.declared
        ... class StripesSparsityConfig(ds_sparse.SparsityConfig):
        ...     every: int = Field(default=4, ge=1, description="Columns from one live one to the next.")
        ...
        ...     def lay_out(self, h, layout):
        ...         layout[h, :, :: self.every] = 1
        ...         return layout
        >>> StripesSparsityConfig(num_heads=1, every=2).make_layout(seq_len=64)[0, 0]
        tensor([1, 0, 1, 0])
        >>> StripesSparsityConfig(num_heads=1, every=0)
        Traceback (most recent call last):
            ...
        pydantic_core._pydantic_core.ValidationError: 1 validation error for StripesSparsityConfig
        every
          Input should be greater than or equal to 1 ...
    """
    made: Any = dataclass(config=ConfigDict(strict=True, extra="forbid"), eq=False)(cls)
    validated_init = made.__init__
    parameters = inspect.signature(made).parameters.values()
    positional = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    keyword_only = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}

    @functools.wraps(validated_init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        earlier = dict(vars(self))
        if len(args) <= len(positional) and not kwargs.keys() & set(positional[: len(args)]):
            # By name, so that an error names the field and not its position.
            args, kwargs = (), dict(zip(positional, args, strict=False)) | kwargs
        validated_init(self, *map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})
        if type(self).__init__ is not __init__:
            setattr(self, DECLARED, frozenset(kwargs) & DEFAULTS.keys())
        for name, value in earlier.items():
            # A subclass older than our keyword-only fields may use one of their names: it keeps what it set.
            if name not in vars(self) or (name in keyword_only and name not in kwargs):
                setattr(self, name, value)
        for rule in self.rules:
            require(rule(**{name: self._says(name, vars(self).get(name)) for name in rule_fields(rule)}))
        self.num_layout_heads = self.num_heads if self.different_layout_per_head else 1
        for _, sentence in self.cautions():
            if sentence not in _given:
                _given.add(sentence)
                warnings.warn(sentence, SparsityWarning, stacklevel=2)

    made.__init__ = __init__
    setattr(made, DECLARED, frozenset(DEFAULTS))
    made.__doc__ = with_fields(made.__doc__ or made.__name__, made.__pydantic_fields__)
    return made


def rule_fields(rule: Rule) -> tuple[str, ...]:
    """Names of the fields that a rule reads."""
    return tuple(inspect.signature(rule).parameters)


def require(broken: str | None) -> None:
    """Raises ValueError with the sentence of a rule that is broken."""
    if broken:
        raise ValueError(broken)


def declared_value(structure: object, name: str) -> Any:
    """The value of a structure's `seed`, `causal` or `strict_causal`; the default of one that it does not declare. A
    structure that derives from ours and has one for itself is told once that it does not count."""
    if name in getattr(structure, DECLARED, ()):
        return getattr(structure, name)
    if hasattr(structure, DECLARED) and getattr(structure, name, DEFAULTS[name]) is not DEFAULTS[name]:
        _say_not_counted(type(structure), name)
    return DEFAULTS[name]


_said: set[tuple[type, str]] = set()


def _say_not_counted(cls: type, name: str) -> None:
    import torch  # not above: commands that compute nothing start without it

    if (cls, name) in _said or torch.compiler.is_compiling():  # a warning would end the graph
        return
    _said.add((cls, name))
    warnings.warn(
        f"{cls.__name__} has a {name} that does not count: its own __init__ does not pass {name} to "
        "super().__init__(). Pass it there, where it is meant as ours; an attribute of its own needs nothing.",
        SparsityWarning,
        stacklevel=3,
    )


def may_declare(structure: object, name: str) -> bool:
    """Tells if the attribute is ours to set: declared, or at the default that our constructor gave it."""
    names = getattr(structure, DECLARED, None)
    return names is not None and (name in names or getattr(structure, name, DEFAULTS[name]) is DEFAULTS[name])


def declare(structure: object, name: str, value: Any) -> None:
    """Sets `seed`, `causal` or `strict_causal` of a structure of ours, which counts from now on."""
    setattr(structure, name, value)
    names = getattr(structure, DECLARED)
    if name not in names:
        setattr(structure, DECLARED, names | {name})
