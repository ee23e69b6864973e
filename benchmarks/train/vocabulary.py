"""Byte-level BPE, trained on the documents that it is for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ds_sparse.extras import optional_imports

from .settings import Settings

with optional_imports():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SIZE, QUICK_SIZE = 8192, 1024
"""Tokens, the one that masks included."""

TOGETHER = 256
"""Documents that are encoded at a time, by all threads."""


def size_of(settings: Settings) -> int:
    return QUICK_SIZE if settings.quick else SIZE


def train(texts: Iterable[str], size: int) -> Tokenizer:
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
    """The bytes that each token stands for."""
    byte_of = {character: byte for byte, character in enumerate(characters())}
    return [bytes(byte_of[c] for c in tokenizer.id_to_token(token)) for token in range(tokenizer.get_vocab_size())]


def characters() -> list[str]:
    """What byte-level BPE writes for each byte: those that are printed as they are, others from 256 on."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]
