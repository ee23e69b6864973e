"""Why a step has no time, besides what it raised."""

from __future__ import annotations

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
