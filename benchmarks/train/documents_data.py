"""What arms of `--experiment documents` train on and are held to: tokens of files, and the package of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import vocabulary
from .documents_texts import Text

TRAINING, HELD_OUT = "training", "held_out"


@dataclass(frozen=True)
class Documents:
    """Files as tokens.

    Attributes:
        tokens: uint16 (files, tokens), 0 after the end of a file.
        lengths: int64 (files), how many tokens each has.
        packages: int64 (files), the number of the package.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    packages: np.ndarray


def write(texts: Sequence[Text], folder: Path, size: int, length: int) -> None:
    """Writes what `read` and `names` read: the first `length` tokens of each text, by a tokenizer of at most `size`
    tokens that is trained on those that are not held out."""
    tokenizer = vocabulary.train((text.text for text in texts if not text.is_held_out), size)
    tokenizer.save(str(folder / "tokenizer.json"))
    packages = sorted({text.package for text in texts})
    (folder / "packages.json").write_text(json.dumps(packages))
    for side in (TRAINING, HELD_OUT):
        of_side = [text for text in texts if text.is_held_out == (side == HELD_OUT)]
        ids = [one[:length] for one in vocabulary.encoded(tokenizer, [text.text for text in of_side])]
        np.save(folder / f"{side}-tokens.npy", np.stack([np.pad(one, (0, length - len(one))) for one in ids]))
        np.save(folder / f"{side}-lengths.npy", np.array([len(one) for one in ids]))
        np.save(folder / f"{side}-packages.npy", np.array([packages.index(text.package) for text in of_side]))


def read(folder: Path, side: str) -> Documents:
    """Of a side, `TRAINING` or `HELD_OUT`."""
    return Documents(*(np.load(folder / f"{side}-{what}.npy") for what in ("tokens", "lengths", "packages")))


def names(folder: Path) -> list[str]:
    """Of packages, by their numbers."""
    found: list[str] = json.loads((folder / "packages.json").read_text())
    return found


def rows_of(documents: Documents, length: int) -> np.ndarray:
    """The tokens of all files end to end, in rows (rows, length), without the rest."""
    ends = np.arange(documents.tokens.shape[1]) < documents.lengths[:, None]
    tokens = documents.tokens[ends]
    return tokens[: len(tokens) // length * length].reshape(-1, length)
