"""Tokens of a corpus: a WordPiece vocabulary is learned from the training documents, and every document tokenised once,
into a cache."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import tempfile
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist

from ds_sparse.tools.extras import optional_imports

from corpus import Corpus, cache_root, load_corpus
from report import on_rank_0, reason

with optional_imports():
    import tokenizers
    from tqdm import tqdm

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNK, CLS, SEP, MASK = range(len(SPECIAL_TOKENS))

# Part of every cache key: a change in what the cached files mean must change it.
CACHE_FORMAT = 1

AT_ONCE = 4_000_000
"""Characters that are tokenised in one call, about."""


def learn_vocabulary(texts: list[str], size: int) -> list[str]:
    """A WordPiece vocabulary (Wu et al. 2016) of at most `size` entries, the special tokens first.

    The trainer numbers the characters in the order of a hash table that differs from run to run, and breaks ties
    between merges by those numbers. Giving it all characters up front, in an order of ours, makes it deterministic.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    frequent = sorted((-count, char) for char, count in counts.items() if count >= 10 and char.isprintable())
    alphabet = [char for _, char in frequent if not char.isspace()][: size // 4]
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=size,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
        special_tokens=[*SPECIAL_TOKENS, *alphabet, *("##" + char for char in alphabet)],
    )
    tokenizer = build_tokenizer(list(SPECIAL_TOKENS))
    tokenizer.train_from_iterator(texts, trainer)
    vocabulary = tokenizer.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)


def build_tokenizer(vocabulary: list[str]) -> tokenizers.Tokenizer:
    """BERT's tokeniser, keeping case and accents: in source code `Path` and `path` are different words.

    The special tokens are not declared as such, so a document that spells out "[MASK]" gets ordinary tokens.
    """
    numbered = {token: number for number, token in enumerate(vocabulary)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(numbered, unk_token=SPECIAL_TOKENS[UNK]))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return tokenizer


@dataclass(frozen=True)
class TokenizedCorpus:
    """Documents as token numbers, memory-mapped from one folder of the cache.

    `tokens` holds all documents end to end, document d being `tokens[offsets[d]:offsets[d + 1]]`; `held_out` is one
    bool per document; `training_counts` says how often each vocabulary entry occurs in the training documents.
    """

    directory: Path
    summary: dict[str, object]
    vocabulary: list[str]
    tokens: np.ndarray
    offsets: np.ndarray
    held_out: np.ndarray
    training_counts: np.ndarray

    @classmethod
    def open(cls, directory: Path, origin: dict[str, object]) -> TokenizedCorpus:
        """Opens a cache entry; `origin` is what the summary says about where the documents came from."""
        try:
            manifest = json.loads((directory / "manifest.json").read_text())
            vocabulary = (directory / "vocabulary.txt").read_text(encoding="utf-8").split("\n")[:-1]
            arrays = {name: np.load(directory / f"{name}.npy", mmap_mode="r") for name in manifest["arrays"]}
        except (OSError, ValueError, EOFError) as error:
            raise ValueError(
                f"The cache entry {directory} cannot be read ({reason(error)}); on several machines set "
                "DS_SPARSE_CACHE to a folder that all of them see, otherwise delete it and run again."
            ) from error
        return cls(directory, {**origin, **manifest["summary"]}, vocabulary, **arrays)

    @property
    def padded_vocabulary_size(self) -> int:
        """Rows of the model's embedding: the vocabulary, rounded up to a multiple of 8 for the matrix units."""
        return -(-len(self.vocabulary) // 8) * 8


def open_corpus(
    name: str, vocabulary_size: int = 8192, text_column: str | None = None, keeps: bool = True
) -> TokenizedCorpus:
    """The tokenised corpus called `name` (see `corpus.load_corpus`), from the cache or made now.

    Without `keeps` nothing is downloaded, and the files that are made now are removed when they have been opened. They
    are mapped, and can be read for as long as the corpus is.

    Under torch.distributed every rank calls this: rank 0 makes it, the others wait for it. Raises ValueError, on every
    rank, with one sentence if the corpus or the cache cannot be used.
    """

    def made(scratch: Path | None) -> tuple[Path, dict[str, object]]:
        corpus = load_corpus(name, text_column, scratch).split()
        for note in corpus.notes:
            print(note, flush=True)
        left_out = {"duplicate_documents": corpus.duplicates, "empty_documents": corpus.empty}
        origin = {"corpus": corpus.name, "left_out": left_out, "notes": corpus.notes}
        try:
            return _tokenized(corpus, vocabulary_size, scratch), origin
        except OSError as error:
            raise ValueError(
                f"The cache folder {cache_root()} cannot be written to ({reason(error)}); "
                "set DS_SPARSE_CACHE to a folder that can, with room for the corpus."
            ) from error

    with nullcontext() if keeps else tempfile.TemporaryDirectory() as scratch:
        tokenized = TokenizedCorpus.open(*on_rank_0(lambda: made(Path(scratch) if scratch else None)))
        if dist.is_initialized():
            dist.barrier()  # before rank 0 removes the files
    return tokenized


def _tokenized(corpus: Corpus, vocabulary_size: int, scratch: Path | None) -> Path:
    """The corpus's folder in the cache, where it appears whole or not at all; else one made in `scratch`."""
    if vocabulary_size < 256:
        raise ValueError(f"A vocabulary of {vocabulary_size} is too small: letters alone need 256; 8192 is usual.")
    identity = hashlib.sha256(repr((CACHE_FORMAT, tokenizers.__version__, vocabulary_size)).encode())
    for document in corpus.documents:
        identity.update(f"{document.id}\0{document.sha256}\n".encode())
    directory = cache_root() / "bing_bert" / identity.hexdigest()[:32]
    if directory.exists():
        return directory
    if scratch is not None:
        directory = scratch / directory.name
    partial = directory.with_suffix(f".partial{os.getpid()}")
    partial.mkdir(parents=True, exist_ok=True)
    _tokenize_into(partial, corpus, vocabulary_size)
    try:
        os.rename(partial, directory)
    except OSError:
        if not directory.exists():  # else another run was faster
            raise
    return directory


def _tokenize_into(directory: Path, corpus: Corpus, vocabulary_size: int) -> None:
    held_out = np.array([document.held_out for document in corpus.documents])
    texts = [document.text for document in corpus.documents]
    print(f"Learning a WordPiece vocabulary from {(~held_out).sum():,} documents of {corpus.name}", flush=True)
    vocabulary = learn_vocabulary([text for text, out in zip(texts, held_out) if not out], vocabulary_size)
    if len(vocabulary) == len(SPECIAL_TOKENS):
        raise ValueError(
            f"The corpus {corpus.name} is too small to learn a vocabulary from: no character occurs ten "
            "times; use a larger one."
        )
    tokenizer = build_tokenizer(vocabulary)
    encoded: list[np.ndarray] = []
    dtype = np.uint16 if len(vocabulary) <= 2**16 else np.uint32
    ends = itertools.accumulate(map(len, texts))
    shown = tqdm(texts, "Tokenising", unit=" documents", mininterval=1)
    for _, chunk in itertools.groupby(zip(ends, shown), lambda one: one[0] // AT_ONCE):
        found = tokenizer.encode_batch_fast([text for _, text in chunk], add_special_tokens=False)
        encoded += [np.array(document.ids, dtype=dtype) for document in found]
    lengths = np.array([len(document) for document in encoded])
    training = np.concatenate([document for document, out in zip(encoded, held_out) if not out])
    arrays = {
        "tokens": np.concatenate(encoded),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]),
        "held_out": held_out,
        "training_counts": np.bincount(training, minlength=len(vocabulary)),
    }
    for name, array in arrays.items():
        np.save(directory / f"{name}.npy", array)
    listing = "".join(token + "\n" for token in vocabulary)
    (directory / "vocabulary.txt").write_text(listing, encoding="utf-8")
    summary = {
        "documents": {"training": int((~held_out).sum()), "held_out": int(held_out.sum())},
        "tokens": {"training": int(lengths[~held_out].sum()), "held_out": int(lengths[held_out].sum())},
        "vocabulary": {"size": len(vocabulary), "unknown_share": round(float((arrays["tokens"] == UNK).mean()), 6)},
    }
    (directory / "manifest.json").write_text(json.dumps({"summary": summary, "arrays": list(arrays)}, indent=1))
