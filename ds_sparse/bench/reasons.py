"""Reasons for a missing time: whoever does not take a case, is wrong or fails is named with one, in a line."""

from __future__ import annotations


class Unsupported(Exception):
    """Says why a peer does not take a case."""


def in_short(error: Exception) -> str:
    """The first line of its message, with its name where it is not one of those that speak for themselves."""
    message = (str(error).strip().splitlines() or [""])[0]
    if not isinstance(error, Unsupported | ImportError | ArithmeticError):
        message = f"{type(error).__name__}: {message}"
    return message if len(message) <= 160 else f"{message[:157]}..."
