"""From documents to batches for masked-language modelling with next-sentence prediction.

The way of a document, and of this file from top to bottom: a WordPiece vocabulary is learned from the training
documents; every document is tokenised once, into a cache; documents are packed into sequences; a sequence becomes a
sample, with tokens masked and perhaps its second segment exchanged; samples are put in order and dealt to the ranks.

Everything random is drawn from a generator seeded by (seed, epoch, sequence), so a sample is the same whichever rank
draws it, whatever came before. The number of samples seen so far is therefore all that a resumed run has to know.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from filelock import FileLock

from ds_sparse.extras import optional_imports

from corpus import Corpus, cache_root, load_corpus, unwritable_cache

with optional_imports():
    import tokenizers
    from tqdm import tqdm

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNK, CLS, SEP, MASK = range(len(SPECIAL_TOKENS))
NOT_PREDICTED = -1
MASKED_SHARE = 0.15

# Part of every cache key: a change in what the cached files mean must change it.
CACHE_FORMAT = 1

# First words of the seeds, so that order, training samples, held-out samples and dropout are drawn independently.
ORDER, TRAINING, HELD_OUT, DROPOUT = range(4)


def draw_seed(*words: int) -> int:
    """A seed for one of PyTorch's generators, as good as another's for any other words of at least 0."""
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])


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
    `manifest.json` in the same folder lists every document with its hash.
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
            whole = {name: len(array) for name, array in arrays.items()} == manifest["arrays"]
        except FileNotFoundError as error:
            raise ValueError(
                f"{error.filename} is missing; on several machines set DS_SPARSE_CACHE to a folder that "
                f"all of them see, otherwise delete {directory} and run again."
            ) from error
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise ValueError(f"The cache entry {directory} is damaged ({error}); delete it and run again.") from error
        if not whole:
            raise ValueError(
                f"The cache entry {directory} is damaged (a file has another length than its manifest "
                "says); delete it and run again."
            )
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
    with nullcontext() if keeps else tempfile.TemporaryDirectory() as scratch:
        return _opened(name, vocabulary_size, text_column, Path(scratch) if scratch else None)


def _opened(name: str, vocabulary_size: int, text_column: str | None, scratch: Path | None) -> TokenizedCorpus:
    outcome: list = [None, None, None]
    cause = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            corpus = load_corpus(name, text_column, scratch).split()
            for note in corpus.notes:
                print(note, flush=True)
            left_out = {"duplicate_documents": corpus.duplicates, "empty_documents": corpus.empty}
            origin = {"corpus": corpus.name, "sources": corpus.sources, "left_out": left_out, "notes": corpus.notes}
            outcome = [_tokenized(corpus, vocabulary_size, scratch), origin, None]
        except ValueError as error:
            outcome, cause = [None, None, str(error)], error
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    directory, origin, failure = outcome
    if failure:
        raise ValueError(failure) from cause
    tokenized = TokenizedCorpus.open(directory, origin)
    if scratch is not None and dist.is_initialized():
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
    partial = directory.with_suffix(".partial")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(directory.with_suffix(".lock")):
            if not directory.exists():
                # Only the holder of the lock writes here, so this is what a killed run left.
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                _tokenize_into(partial, corpus, vocabulary_size)
                os.replace(partial, directory)
    except OSError as error:
        raise unwritable_cache(error) from error
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
    for chunk in _with_progress(texts, "Tokenising"):
        found = tokenizer.encode_batch_fast(chunk, add_special_tokens=False)
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
    hashes = sorted(document.sha256 for document in corpus.documents)
    summary = {
        "documents_sha256": hashlib.sha256("".join(hashes).encode()).hexdigest(),
        "documents": {"training": int((~held_out).sum()), "held_out": int(held_out.sum())},
        "tokens": {"training": int(lengths[~held_out].sum()), "held_out": int(lengths[held_out].sum())},
        "vocabulary": {
            "size": len(vocabulary),
            "sha256": hashlib.sha256(listing.encode()).hexdigest(),
            "case": "kept",
            "unknown_share": round(float((arrays["tokens"] == UNK).mean()), 6),
        },
    }
    documents = [
        {"id": document.id, "sha256": document.sha256, "tokens": int(length), "held_out": document.held_out}
        for document, length in zip(corpus.documents, lengths)
    ]
    array_lengths = {name: len(array) for name, array in arrays.items()}
    manifest = {"summary": summary, "arrays": array_lengths, "documents": documents}
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=1))


def _with_progress(texts: list[str], label: str) -> Iterator[list[str]]:
    """Chunks of about four million characters: a bar on a terminal, a line every five seconds elsewhere."""
    total, done, told = sum(map(len, texts)), 0, time.monotonic()
    with tqdm(total=total, desc=label, unit="char", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        chunk: list[str] = []
        size = 0
        for index, text in enumerate(texts):
            chunk.append(text)
            size += len(text)
            if size >= 4_000_000 or index == len(texts) - 1:
                yield chunk
                bar.update(size)
                done += size
                if bar.disable and (time.monotonic() - told > 5 or done == total):
                    print(f"{label}: {done / 1e6:.1f} of {total / 1e6:.1f} million characters", flush=True)
                    told = time.monotonic()
                chunk, size = [], 0


@dataclass(frozen=True)
class Packing:
    """Which pieces of which documents make up each sequence of one split.

    Piece p is `lengths[p]` tokens from position `starts[p]` of the corpus, of document `documents[p]`. Sequence s
    consists of the pieces `sequences[s]`, the longest last. `left_out` counts tokens that no sequence took.
    """

    sequence_length: int
    starts: np.ndarray
    lengths: np.ndarray
    documents: np.ndarray
    sequences: list[list[int]]
    left_out: int

    @property
    def padding_share(self) -> float:
        """Padding as a share of all positions, between 0 and 1."""
        used = sum(2 + sum(int(self.lengths[piece]) + 1 for piece in pieces) for pieces in self.sequences)
        return 1 - used / (len(self.sequences) * self.sequence_length) if self.sequences else 0.0


def pack(offsets: np.ndarray, documents: np.ndarray, sequence_length: int) -> Packing:
    """Packs the documents numbered `documents` (int64) into sequences of `sequence_length` tokens.

    A sequence is `[CLS] piece [SEP] piece [SEP] ... piece [SEP]` with one more [SEP] where its two segments part. A
    document that does not fit into a sequence is cut into consecutive windows that each fill one; what remains of it
    and every document that does fit are pieces that stay whole. Pieces go, longest first, where they leave the least
    space (best fit decreasing), so at most one sequence ends up half empty. A sequence with fewer text tokens than half
    its length is left out: too few of its tokens could be masked.
    """
    capacity = sequence_length - 2
    window = capacity - 1
    sizes = offsets[documents + 1] - offsets[documents]
    windows = -(-sizes // window)
    owner = np.repeat(np.arange(len(documents)), windows)
    place = (np.arange(len(owner)) - np.repeat(np.cumsum(windows) - windows, windows)) * window
    starts, lengths = offsets[documents][owner] + place, np.minimum(window, sizes[owner] - place)

    sequences: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for piece in np.argsort(-lengths, kind="stable").tolist():
        needed = int(lengths[piece]) + 1
        found = bisect.bisect_left(room, (needed, 0))
        if found < len(room):
            space, sequence = room.pop(found)
            sequences[sequence].insert(0, piece)
        else:
            space, sequence = capacity, len(sequences)
            sequences.append([piece])
        if space - needed >= 2:
            bisect.insort(room, (space - needed, sequence))

    kept = [pieces for pieces in sequences if lengths[pieces].sum() >= capacity // 2]
    left_out = int(lengths.sum() - sum(lengths[pieces].sum() for pieces in kept))
    return Packing(sequence_length, starts, lengths, documents[owner], kept, left_out)


class Batch(NamedTuple):
    """What the model is given: B samples of T tokens. Tensors are int64, the first five in bing_bert's order.

    input_ids (B, T); input_mask (B, T), 1 for a token and 0 for padding; segment_ids (B, T), 0 for the first segment
    and for padding, 1 for the second; nsp_label (B,), 0 if the second segment continues the first and 1 if it is from
    another document; mlm_labels (B, T), the token to predict, or -1 where nothing is predicted.

    The last two say what is in the others, so that nobody has to wait for a device to learn it: mlm_positions (P,),
    where something is predicted, counted through all B x T positions; lengths, how many tokens of each sample are no
    padding.
    """

    input_ids: torch.Tensor
    input_mask: torch.Tensor
    segment_ids: torch.Tensor
    nsp_label: torch.Tensor
    mlm_labels: torch.Tensor
    mlm_positions: torch.Tensor
    lengths: list[int]

    @classmethod
    def of(
        cls,
        input_ids: torch.Tensor,
        input_mask: torch.Tensor,
        segment_ids: torch.Tensor,
        nsp_label: torch.Tensor,
        mlm_labels: torch.Tensor,
    ) -> Batch:
        """The batch of these samples, on the CPU."""
        positions = (mlm_labels.flatten() != NOT_PREDICTED).nonzero().flatten()
        lengths = input_mask.sum(1).tolist()
        return cls(input_ids, input_mask, segment_ids, nsp_label, mlm_labels, positions, lengths)

    def without_predictions(self) -> Batch:
        return Batch.of(*self[:4], torch.full_like(self.mlm_labels, NOT_PREDICTED))

    def to(self, device: torch.device) -> Batch:
        """The batch on another device. A copy to a GPU is only started here; its later work waits for it by itself."""
        *tensors, lengths = self
        if device.type == "cuda":
            tensors = [tensor.pin_memory() for tensor in tensors]
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in tensors), lengths)


class PretrainingData:
    """Endless training batches and a fixed held-out set from one tokenised corpus.

    Training: half of the samples get a second segment from another document; `max_predictions_per_seq` tokens of every
    sample (15 % of its length unless given) are predicted, chosen anew in every epoch: of them 80 % are replaced by
    [MASK], 10 % by a random token, 10 % kept (Devlin et al. 2019). The number is the same in every sample, so a mean
    over samples is a mean over predictions however many ranks share them. [CLS], [SEP] and padding are never
    predicted; [UNK] stands for a word of the text and can be, as in the original BERT.

    Held out: `eval_sequences` sequences, chosen and masked the same in every run, always 15 %, every second segment the
    true one.

    Raises ValueError with one sentence if an argument is impossible or the corpus is too small for the sequence length.
    """

    def __init__(
        self,
        corpus: TokenizedCorpus,
        sequence_length: int,
        seed: int = 42,
        max_predictions_per_seq: int | None = None,
        eval_sequences: int = 64,
    ) -> None:
        if sequence_length < 16:
            raise ValueError(f"The sequence length is {sequence_length}; the shortest that can be packed is 16.")
        if seed < 0:
            raise ValueError(f"The seed is {seed}; it has to be zero or more.")
        if eval_sequences < 1:
            raise ValueError(f"{eval_sequences} held-out sequences were asked for; at least 1 is needed.")
        usual, most = round(MASKED_SHARE * sequence_length), (sequence_length - 2) // 2
        if max_predictions_per_seq is None:
            max_predictions_per_seq = usual
        if not 1 <= max_predictions_per_seq <= most:
            raise ValueError(
                f"{max_predictions_per_seq} predictions per sequence were asked for; of {sequence_length} "
                f"tokens 1 to {most} can be predicted, and {usual} is usual."
            )
        self.corpus, self.seed, self.sequence_length = corpus, seed, sequence_length
        self.max_predictions_per_seq, self.eval_predictions_per_seq = max_predictions_per_seq, usual
        self.training = self._packed(np.flatnonzero(~corpus.held_out), "training")
        self.held_out = self._packed(np.flatnonzero(corpus.held_out), "held-out")
        if len(np.unique(self.training.documents)) < 2:
            raise ValueError(
                "There is only one training document, so no second segment can come from another one; use "
                "a corpus with more documents."
            )
        self.eval_asked = eval_sequences
        self.eval_order = np.random.default_rng([HELD_OUT]).permutation(len(self.held_out.sequences))[:eval_sequences]

    def _packed(self, documents: np.ndarray, part: str) -> Packing:
        packing = pack(self.corpus.offsets, documents, self.sequence_length)
        if not packing.sequences:
            raise ValueError(
                f"The {len(documents)} {part} documents have {packing.left_out:,} tokens together, too "
                f"few for one sequence of {self.sequence_length:,}; use a larger corpus or shorter "
                "sequences."
            )
        return packing

    def batches(
        self, global_batch: int, micro_batch: int, first_sample: int = 0, rank: int = 0, world_size: int = 1
    ) -> Iterator[Batch]:
        """This rank's micro-batches without end, each (micro_batch, T), from training sample `first_sample` on.

        Samples are numbered from 0 through all epochs. Each optimizer step consumes the next `global_batch` of them,
        whatever the world size; to resume, give the number consumed so far (steps x global_batch).
        Raises ValueError if the batch cannot be divided this way or is larger than an epoch.
        """
        if micro_batch < 1 or global_batch < 1 or global_batch % (micro_batch * world_size):
            raise ValueError(
                f"A batch of {global_batch} cannot be divided into micro-batches of {micro_batch} on "
                f"{world_size} ranks; it has to be a multiple of {micro_batch * world_size}."
            )
        if global_batch > len(self.training.sequences):
            raise ValueError(
                f"A batch of {global_batch} needs as many sequences, but the corpus gives "
                f"{len(self.training.sequences)} of {self.sequence_length:,} tokens; use a smaller batch, "
                "shorter sequences or a larger corpus."
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"Rank {rank} does not exist among {world_size}.")
        if first_sample < 0:
            raise ValueError(f"The first sample is {first_sample}; samples are numbered from 0.")
        return self._training_batches(micro_batch, first_sample, rank, world_size)

    def _training_batches(self, micro_batch: int, first_sample: int, rank: int, world_size: int) -> Iterator[Batch]:
        size = len(self.training.sequences)
        orders: dict[int, np.ndarray] = {}
        start = first_sample + rank * micro_batch
        while True:
            rows = []
            for sample in range(start, start + micro_batch):
                epoch, place = divmod(sample, size)
                if epoch not in orders:
                    orders[epoch] = np.random.default_rng([ORDER, self.seed, epoch]).permutation(size)
                sequence = int(orders[epoch][place])
                generator = np.random.default_rng([TRAINING, self.seed, epoch, sequence])
                rows.append(self._sample(self.training, sequence, generator, self.max_predictions_per_seq, 0.5))
            yield _stack(rows)
            start += micro_batch * world_size

    def held_out_batches(self, micro_batch: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """This rank's share of the held-out sequences, each once; the last batch may be smaller.

        Every rank gets the same number of batches, because ZeRO 3 gathers weights from all ranks in each forward. A
        rank whose share is used up gets one with nothing to predict.
        """
        share = self.eval_order[rank::world_size].tolist()
        for start in range(0, len(self.eval_order[::world_size]), micro_batch):
            sequences = share[start : start + micro_batch]
            batch = _stack(
                [
                    self._sample(
                        self.held_out,
                        sequence,
                        np.random.default_rng([HELD_OUT, sequence]),
                        self.eval_predictions_per_seq,
                        0.0,
                    )
                    for sequence in sequences or [self.eval_order[0]]
                ]
            )
            yield batch if sequences else batch.without_predictions()

    def _sample(
        self, packing: Packing, sequence: int, generator: np.random.Generator, predictions: int, other_document: float
    ) -> tuple[np.ndarray, ...]:
        """One row of a `Batch`; `other_document` is the probability that the second segment is exchanged.

        The segments part inside the longest piece, which is the last: everything up to a point in its middle half is
        the first segment, the rest of it the second, a true continuation. Exchanged for as long a stretch of another
        document, it is a false one, and nothing but the text tells them apart. Where no other document has so long a
        stretch the true one stays, and so does its label.
        """
        tokens = self.corpus.tokens
        pieces = packing.sequences[sequence]
        input_ids = np.full(packing.sequence_length, PAD, dtype=np.int64)
        segment_ids = np.zeros_like(input_ids)
        is_text = np.zeros(packing.sequence_length, dtype=bool)
        input_ids[0], end = CLS, 1

        def append(start: int, length: int) -> None:
            nonlocal end
            input_ids[end : end + length] = tokens[start : start + length]
            is_text[end : end + length] = True
            input_ids[end + length] = SEP
            end += length + 1

        for piece in pieces[:-1]:
            append(int(packing.starts[piece]), int(packing.lengths[piece]))
        last = pieces[-1]
        start, length = int(packing.starts[last]), int(packing.lengths[last])
        cut = int(generator.integers(length // 4, max(3 * length // 4, length // 4 + 1)))
        append(start, cut)
        first_segment_end = end

        start, length = start + cut, length - cut
        exchanged = generator.random() < other_document
        if exchanged:
            others = np.flatnonzero((packing.lengths >= length) & (packing.documents != packing.documents[last]))
            exchanged = len(others) > 0
        if exchanged:
            other = generator.choice(others)
            start = int(packing.starts[other] + generator.integers(packing.lengths[other] - length + 1))
        append(start, length)
        segment_ids[first_segment_end:end] = 1

        chosen = generator.choice(np.flatnonzero(is_text), predictions, replace=False)
        mlm_labels = np.full_like(input_ids, NOT_PREDICTED)
        mlm_labels[chosen] = input_ids[chosen]
        fate = generator.random(predictions)
        random_tokens = generator.integers(len(SPECIAL_TOKENS), len(self.corpus.vocabulary), predictions)
        input_ids[chosen] = np.where(fate < 0.8, MASK, np.where(fate < 0.9, random_tokens, input_ids[chosen]))
        input_mask = (np.arange(packing.sequence_length) < end).astype(np.int64)
        return input_ids, input_mask, segment_ids, np.int64(exchanged), mlm_labels

    @cached_property
    def unigram_log_probabilities(self) -> torch.Tensor:
        """log p of each token of the vocabulary, in nats, fp64: p is how often it occurs in the training documents,
        with one added to every count."""
        counts = self.corpus.training_counts + 1
        return torch.from_numpy(np.log(counts / counts.sum()))

    def unigram_cross_entropy(self, mlm_labels: torch.Tensor) -> float:
        """Mean of -log p(token), in nats, over the predicted positions of `mlm_labels`. A model that ignores context
        ends here."""
        labels = mlm_labels[mlm_labels != NOT_PREDICTED].cpu()
        return -self.unigram_log_probabilities[labels].mean().item()

    @cached_property
    def held_out_unigram_cross_entropy(self) -> float:
        """The unigram cross-entropy of the very positions that the held-out loss is computed on."""
        labels = [batch.mlm_labels for batch in self.held_out_batches(len(self.eval_order))]
        return self.unigram_cross_entropy(torch.cat(labels))

    def manifest(self) -> dict[str, object]:
        """What went in, ready for JSON: corpus, versions, hashes, counts, vocabulary, packing, seed."""
        parts = {"training": self.training, "held_out": self.held_out}
        return {
            **self.corpus.summary,
            "sequence_length": self.sequence_length,
            "seed": self.seed,
            "max_predictions_per_seq": self.max_predictions_per_seq,
            "eval_sequences": len(self.eval_order),
            "packing": {
                name: {
                    "sequences": len(part.sequences),
                    "padding_share": round(part.padding_share, 6),
                    "tokens_left_out": part.left_out,
                }
                for name, part in parts.items()
            },
            "versions": {
                "python": platform.python_version(),
                "tokenizers": tokenizers.__version__,
                "numpy": np.__version__,
                "torch": torch.__version__,
            },
            "cache_entry": self.corpus.directory.name,
        }

    def write_manifest(self, folder: Path) -> Path:
        """Writes `manifest.json` into `folder`, whole or not at all, and returns its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path, partial = folder / "manifest.json", folder / "manifest.json.partial"
        partial.write_text(json.dumps(self.manifest(), indent=1) + "\n")
        os.replace(partial, path)
        return path

    def describe(self) -> str:
        """A few lines for people: documents, tokens, vocabulary, sequences, padding, masking."""
        summary = self.corpus.summary
        documents, tokens, left_out = summary["documents"], summary["tokens"], summary["left_out"]
        short = self.training.left_out + self.held_out.left_out
        found = len(self.eval_order)
        shortfall = f" (all there are; {self.eval_asked} were asked for)" if found < self.eval_asked else ""
        return "\n".join(
            [
                f"Corpus {summary['corpus']}: {documents['training']:,} documents with {tokens['training']:,} tokens "
                f"for training, {documents['held_out']:,} with {tokens['held_out']:,} held out",
                f"Left out: {left_out['duplicate_documents']:,} duplicate and {left_out['empty_documents']:,} empty "
                f"documents, {short:,} tokens that fill no half sequence",
                f"Vocabulary: {len(self.corpus.vocabulary):,} word pieces with case, padded to "
                f"{self.corpus.padded_vocabulary_size:,}",
                f"Sequences of {self.sequence_length:,} tokens: {len(self.training.sequences):,} for training with "
                f"{self.training.padding_share:.1%} padding and {self.max_predictions_per_seq} predictions each; "
                f"{found:,} held out{shortfall}",
            ]
        )


def _stack(rows: list[tuple[np.ndarray, ...]]) -> Batch:
    return Batch.of(*(torch.from_numpy(np.stack(column)) for column in zip(*rows)))
