"""What is wrong with the files of a checkpoint, in words that name the file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from files import checksum, reason
from plain_data import refusal


def sealed(state: dict[str, Any]) -> str:
    """The text of a state.json, which ends in a checksum of its own."""
    return json.dumps({**state, "seal": hashlib.sha256(json.dumps(state).encode()).hexdigest()})


def read_state(file: Path) -> tuple[dict[str, Any], str | None]:
    """What a state.json holds, and what is wrong with it."""
    try:
        text = file.read_text()
        state = json.loads(text)
    except FileNotFoundError:
        return {}, f"{file} is missing"
    except (OSError, ValueError, RecursionError) as error:
        empty = file.is_file() and not file.stat().st_size
        return {}, f"{file} is empty" if empty else f"{file} is damaged: {reason(error)}"
    if not (
        isinstance(state, dict) and all(isinstance(state.get(key), dict) for key in ("terms", "position", "files"))
    ):
        return {}, f"{file} is damaged: it holds no terms, position and files"
    if text != sealed({key: value for key, value in state.items() if key != "seal"}):
        return {}, f"{file} is damaged: what it holds does not fit its own checksum"
    return state, None


def wrong_with(file: Path, written: dict[str, Any]) -> str | None:
    """Says how a file differs from what was written, or why it is not loaded; None where it is whole.

    Args:
        written: its size and checksum.
    """
    try:
        size = file.stat().st_size
        if not size and written["bytes"]:
            return "is empty"
        if size != written["bytes"]:
            return f"is damaged: it has {size:,} bytes of the {written['bytes']:,} that were written"
        if checksum(file) != written["checksum"]:
            return "is damaged: its checksum is not that of what was written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {reason(error)}"
    refused = refusal(file) if file.suffix == ".pt" else None
    return f"is not loaded: {refused}" if refused else None
