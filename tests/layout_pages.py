"""The layouts in a page that `save_page` wrote, as its program reads them."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    return json.loads(found[1])


def numbers(text: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i4")


def layout_of(packed: bytes, rows: int, columns: int) -> np.ndarray:
    """bool (rows, columns) of what `Changes.packed` wrote."""
    values = np.frombuffer(packed, "<i4")
    counts, steps = values[:rows], iter(values[rows:].tolist())
    live = np.zeros((rows, columns), dtype=bool)
    row_above = np.zeros(columns, dtype=bool)
    for row, count in enumerate(counts):
        place, places = row, []
        for _ in range(count):
            place += next(steps)
            places.append(place)
        for start, end in zip(places[::2], places[1::2], strict=True):
            row_above[start:end] ^= True
        live[row] = row_above
    assert next(steps, None) is None
    return live
