"""Why something has no time: whoever does not take a case, is wrong or fails is named with the reason, in a line."""

from __future__ import annotations


class Unsupported(Exception):
    """Why a peer does not take a case."""


def in_short(error: Exception) -> str:
    """The first line of its message, with its name where it is not one of those that speak for themselves."""
    message = (str(error).strip().splitlines() or [""])[0]
    if not isinstance(error, Unsupported | ImportError | ArithmeticError):
        message = f"{type(error).__name__}: {message}"
    return message if len(message) <= 160 else f"{message[:157]}..."


NOT_TRIED = "not tried: "
"""What a reason begins with that nobody's failure is."""

TOO_LONG = f"{NOT_TRIED}a shorter sequence ran out of memory"


def ran_out_of_memory(reason: str) -> bool:
    """Whether that is what CUDA's allocator said."""
    return "out of memory" in reason


def no_result_within(seconds: float) -> str:
    return f"no result within {seconds:.0f} seconds"


def took_too_long(reason: str) -> bool:
    return reason.startswith("no result within")
