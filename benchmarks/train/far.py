"""What a model can know from afar alone: names that stand in a document before, and nowhere near."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

NAME = re.compile(rb"[A-Za-z0-9]*(?:[a-z0-9][A-Z]|[A-Za-z0-9]_[A-Za-z0-9])\w*")
"""Names of several words, such as read_rows or RowReader: those are identifiers wherever they stand, and no English."""

WORD = re.compile(rb"[A-Za-z0-9]")


def far_tokens(ids: np.ndarray, pieces: Sequence[bytes], distance: int) -> np.ndarray:
    """bool (T): the tokens of names that stand more than `distance` tokens before, and not nearer before or after.

    Args:
        ids: integers (T), a document.
        pieces: the bytes of each token.

    Examples:
        >>> pieces = [b"x", b" ", b"read_rows"]
        >>> far_tokens(np.array([2, 1, 1, 0, 2, 2]), pieces, distance=3).tolist()
        [False, False, False, False, False, False]
        >>> far_tokens(np.array([2, 1, 1, 1, 2, 1]), pieces, distance=3).tolist()
        [False, False, False, False, True, False]
    """
    parts = [pieces[token] for token in ids]
    ends = np.cumsum([len(part) for part in parts])
    starts = ends - [len(part) for part in parts]
    places: dict[bytes, list[tuple[int, int, int]]] = {}
    for found in NAME.finditer(b"".join(parts)):
        token = int(np.searchsorted(ends, found.start(), side="right"))
        places.setdefault(found[0], []).append((token, *found.span()))
    far: np.ndarray = np.zeros(len(ids), dtype=bool)
    for of_name in places.values():
        for before, here, after in zip(of_name, of_name[1:], [*of_name[2:], None]):
            if here[0] - before[0] > distance and (after is None or after[0] - here[0] > distance):
                # With the space before a name, which byte-level BPE has in its first token.
                far |= (starts >= here[1] - 1) & (ends <= here[2])
    has_word = np.array([WORD.search(part) is not None for part in parts], dtype=bool)
    return far & has_word
