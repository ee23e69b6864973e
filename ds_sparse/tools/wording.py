"""How values, keys and errors of a configuration stand in a sentence: on one line, cut, control characters escaped."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

BLOCK_KEY = "sparse_attention"
"""The key of the block in a DeepSpeed JSON."""

LONGEST = 80
"""Characters of a value in a sentence; of a longer one the beginning is shown."""


def show(value: Any) -> str:
    """A value as it stands in the file."""
    return cut(printable(json.dumps(value, default=repr, ensure_ascii=False)))


def show_key(key: Any) -> str:
    """A key as it stands in a dotted name: quoted only where it could be misread."""
    plain = isinstance(key, str) and key.isprintable() and key == key.strip() and 0 < len(key) <= LONGEST
    return key if plain else show(key)


def printable(text: str) -> str:
    """Text whose control characters, also those that no JSON escapes (C1, line separators, text directions), are
    escaped as JSON does it."""
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def cut(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else f"{text[: longest - 20]}... ({len(text):,} characters)"


def kind(value: Any) -> str:
    """Names the type of a value, where something else is wanted, or says that it is a class."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def reason(error: Exception) -> str:
    """An error in one line, with its kind where the text alone says little."""
    text = printable(" ".join(str(error).split()))
    return text if text and isinstance(error, MemoryError | ValueError) else f"{type(error).__name__}: {text}"


def one_of(choices: Iterable[Any]) -> str:
    return listed(map(show, choices), "or")


def listed(items: Iterable[Any], word: str) -> str:
    """Items as a sentence has them: of 8, 16 and 32 and "or" 8, 16 or 32; of nothing "none"."""
    *first, last = [str(item) for item in items] or ["none"]
    return f"{', '.join(first)} {word} {last}" if first else last


def counted(number: int, word: str) -> str:
    """A number of things: of 1 and "thread" 1 thread, of 2 2 threads."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def in_ranges(numbers: Sequence[int], least: int = 3, between: str = ", ") -> str:
    """Sorted numbers, `least` and more in a row as a range: "0, 1, 4-7"."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return between.join(f"{run[0]}-{run[-1]}" if len(run) >= least else between.join(map(str, run)) for run in runs)


def list_modes(modes: list[str]) -> str:
    return f"mode{'s' if len(modes) > 1 else ''} {listed(map(show, modes), 'and')}"


def did_you_mean(word: Any, known: Iterable[str]) -> str:
    """A sentence with the known word nearest to this one, and a space before it; "" if none is near."""
    if not isinstance(word, str) or not word:
        return ""
    known = list(known)
    close = difflib.get_close_matches(word.lower(), known, n=1)
    if not close and len(word) > 2:
        close = [name for name in known if word.lower() in name]
    return f' Did you mean "{close[0]}"?' if close else ""


def hint_of_text(value: Any) -> str:
    """For text that was meant to be something else: hjson takes what it does not know for text, up to the line's end.
    A sentence with a space before it, or ""."""
    word = value.rstrip(", ") if isinstance(value, str) else ""
    if word in _SPELLINGS:
        return f" JSON spells it {_SPELLINGS[word]}, without quotes."
    if word.lstrip("+-").lower() in ("nan", "inf", "infinity"):
        return f" JSON has no {word}: write a number."
    if isinstance(value, str) and value.endswith(","):
        return " It stands there without quotes, so it was read as text up to the end of its line."
    return ""


_SPELLINGS = {"True": "true", "False": "false"}


@contextmanager
def or_cannot_be_sparse(what: str) -> Iterator[None]:
    """Has a ValueError begin with the layer that cannot be sparse."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what} cannot be sparse. {error}") from error
