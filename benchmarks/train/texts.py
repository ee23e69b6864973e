"""Python sources of the running interpreter as documents, and byte-level BPE that is trained on them."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ds_sparse.tools.extras import optional_imports

from .results import Case

with optional_imports():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HELD_OUT_ONE_IN = 20

SKIPPED = {"test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
"""Folders that repeat themselves, or that hold tables made by programs."""

INSTALLED = {"site-packages", "dist-packages"}

VOCABULARY, QUICK_VOCABULARY = 8192, 1024
"""Tokens, the one that masks included."""

TOGETHER = 256
"""Documents that are encoded at a time, by all threads."""


def documents(least_bytes: int) -> Iterator[str]:
    """Texts of all files of at least so many bytes, each once, in the order of their paths; the standard library
    first."""
    paths = sysconfig.get_paths()
    folders = [(paths["stdlib"], SKIPPED | INSTALLED)]
    folders += [(folder, SKIPPED) for folder in sorted({paths["purelib"], paths["platlib"]})]
    seen = set()
    for folder, skipped in folders:
        for file in files_below(Path(folder), skipped):
            if file.stat().st_size >= least_bytes and (text := text_of(file)) and text not in seen:
                seen.add(text)
                yield text


def files_below(root: Path, skipped: Iterable[str]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - set(skipped))
        yield from (path for name in sorted(names) if name.endswith(".py") and (path := Path(folder, name)).is_file())


def text_of(file: Path) -> str:
    """Empty where the file cannot be read as UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def is_held_out(text: str, one_in: int = HELD_OUT_ONE_IN) -> bool:
    """About one document in so many; depends on the content alone, so it stays when others come or go."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) % one_in == 0


def vocabulary_of(case: Case) -> int:
    return QUICK_VOCABULARY if case.quick else VOCABULARY


def trained_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """A tokenizer with at most so many tokens, all bytes among them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[np.ndarray]:
    """uint16 (T) of each text."""
    for first in range(0, len(texts), TOGETHER):
        for encoding in tokenizer.encode_batch_fast(list(texts[first : first + TOGETHER])):
            yield np.array(encoding.ids, dtype=np.uint16)


def pieces(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes that each token stands for. Byte-level BPE writes printed ones as they are, others from 256 on."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printed]
    byte_of = {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return [bytes(byte_of[c] for c in tokenizer.id_to_token(token)) for token in range(tokenizer.get_vocab_size())]
