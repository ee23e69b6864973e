"""From documents to batches for masked-language modelling with next-sentence prediction.

The way of a document, and of this file from top to bottom: documents are packed into sequences of the tokens that
`tokens.py` keeps; a sequence becomes a sample, with tokens masked and perhaps its second segment exchanged; samples are
put in order and dealt to the ranks.

Everything random is drawn from a generator seeded by (seed, epoch, sequence), so a sample is the same whichever rank
draws it, whatever came before. The number of samples seen so far is therefore all that a resumed run has to know.
"""

from __future__ import annotations

import bisect
import itertools
import json
import signal
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from report import write_atomically
from tokens import CLS, MASK, PAD, SEP, SPECIAL_TOKENS, TokenizedCorpus

NOT_PREDICTED = -1
MASKED_SHARE = 0.15

# First words of the seeds, so that order, training samples, held-out samples and dropout are drawn independently.
ORDER, TRAINING, HELD_OUT, DROPOUT = range(4)


def draw_seed(*words: int) -> int:
    """A seed for one of PyTorch's generators, as good as another's for any other words of at least 0."""
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])


@dataclass(frozen=True)
class Packing:
    """Pieces of documents that make up each sequence of one split.

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
    """Input of the model: B samples of T tokens. Tensors are int64, the first five in bing_bert's order.

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
    def of(cls, *tensors: torch.Tensor) -> Batch:
        """The batch of samples that the first five fields hold, on the CPU."""
        _, input_mask, _, _, mlm_labels = tensors
        positions = (mlm_labels.flatten() != NOT_PREDICTED).nonzero().flatten()
        return cls(*tensors, positions, input_mask.sum(1).tolist())

    def to(self, device: torch.device) -> Batch:
        """The batch on another device. A copy to a GPU is only started here; its later work waits for it by itself."""
        *tensors, lengths = self
        if device.type == "cuda":
            tensors = [tensor.pin_memory() for tensor in tensors]
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in tensors), lengths)


class PretrainingData(Dataset):
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
        usual, most = round(MASKED_SHARE * sequence_length), (sequence_length - 2) // 2
        predictions = usual if max_predictions_per_seq is None else max_predictions_per_seq
        if sequence_length < 16:
            raise ValueError(f"The sequence length is {sequence_length}; the shortest that can be packed is 16.")
        if seed < 0:
            raise ValueError(f"The seed is {seed}; it has to be zero or more.")
        if eval_sequences < 1:
            raise ValueError(f"{eval_sequences} held-out sequences were asked for; at least 1 is needed.")
        if not 1 <= predictions <= most:
            raise ValueError(
                f"{predictions} predictions per sequence were asked for; of {sequence_length} tokens 1 to {most} can "
                f"be predicted, and {usual} is usual."
            )
        self.corpus, self.seed, self.sequence_length = corpus, seed, sequence_length
        self.max_predictions_per_seq, self.eval_predictions_per_seq = predictions, usual
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
                f"The {len(documents)} {part} documents have {packing.left_out:,} tokens together, too few for one "
                f"sequence of {self.sequence_length:,}; use a larger corpus or shorter sequences."
            )
        return packing

    def batches(
        self,
        global_batch: int,
        micro_batch: int,
        first_sample: int = 0,
        rank: int = 0,
        world_size: int = 1,
        ahead: bool = False,
    ) -> Generator[Batch]:
        """This rank's micro-batches without end, each (micro_batch, T), from training sample `first_sample` on.

        With `ahead` a process of its own makes them before they are asked for: for a GPU; a CPU would share its cores.
        It ends when the generator is closed, which is the caller's to do.

        Samples are numbered from 0 through all epochs. Each optimizer step consumes the next `global_batch` of them,
        whatever the world size; to resume, give the number consumed so far (steps x global_batch).
        Raises ValueError if the batch cannot be divided this way or is larger than an epoch.
        """
        at_once = micro_batch * world_size
        if at_once < 1 or global_batch < 1 or global_batch % at_once:
            raise ValueError(
                f"A batch of {global_batch} cannot be divided into micro-batches of {micro_batch} on {world_size} "
                f"ranks; it has to be a multiple of {at_once}."
            )
        if global_batch > len(self.training.sequences):
            raise ValueError(
                f"A batch of {global_batch} needs as many sequences, but the corpus gives "
                f"{len(self.training.sequences)} of {self.sequence_length:,} tokens; use a smaller batch, "
                "shorter sequences or a larger corpus."
            )
        starts = itertools.count(first_sample + rank * micro_batch, at_once)
        numbers = (range(start, start + micro_batch) for start in starts)
        # A generator of its own: the seed that a loader draws is not taken from dropout's.
        generator = torch.Generator()
        load = partial(DataLoader, self, batch_sampler=numbers, collate_fn=_stack, generator=generator)
        if not ahead:
            return (batch for batch in load())
        fork = {"multiprocessing_context": "fork", "worker_init_fn": _leave_signals_to_the_run}
        return _until_closed(load(num_workers=1, pin_memory=True, **fork))

    def __getitem__(self, sample: int) -> tuple[np.ndarray, ...]:
        """The training sample of this number, one row of a `Batch`."""
        epoch, place = divmod(sample, len(self.training.sequences))
        sequence = int(_order(self.seed, epoch, len(self.training.sequences))[place])
        generator = np.random.default_rng([TRAINING, self.seed, epoch, sequence])
        return self._sample(self.training, sequence, generator, self.max_predictions_per_seq, 0.5)

    def held_out_batches(self, micro_batch: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """This rank's share of the held-out sequences, each once; the last batch may be smaller.

        Every rank gets the same number of batches, because ZeRO 3 gathers weights from all ranks in each forward. A
        rank whose share is used up gets one with nothing to predict.
        """
        share = self.eval_order[rank::world_size].tolist()
        for start in range(0, len(self.eval_order[::world_size]), micro_batch):
            mine = share[start : start + micro_batch]
            drawn = [
                (sequence, np.random.default_rng([HELD_OUT, sequence])) for sequence in mine or self.eval_order[:1]
            ]
            batch = _stack([self._sample(self.held_out, *one, self.eval_predictions_per_seq, 0.0) for one in drawn])
            yield batch if mine else Batch.of(*batch[:4], torch.full_like(batch.mlm_labels, NOT_PREDICTED))

    def _sample(
        self, packing: Packing, sequence: int, generator: np.random.Generator, predictions: int, other_document: float
    ) -> tuple[np.ndarray, ...]:
        """One row of a `Batch`; `other_document` is the probability that the second segment is exchanged.

        The segments part inside the longest piece, which is the last: everything up to a point in its middle half is
        the first segment, the rest of it the second, a true continuation. Exchanged for as long a stretch of another
        document, it is a false one, and nothing but the text tells them apart. Where no other document has so long a
        stretch the true one stays, and so does its label.
        """
        spans = [(int(packing.starts[piece]), int(packing.lengths[piece])) for piece in packing.sequences[sequence]]
        start, length = spans.pop()
        document = packing.documents[packing.sequences[sequence][-1]]
        cut = int(generator.integers(length // 4, max(3 * length // 4, length // 4 + 1)))
        spans.append((start, cut))
        start, length = start + cut, length - cut
        exchanged = generator.random() < other_document
        if exchanged:
            others = np.flatnonzero((packing.lengths >= length) & (packing.documents != document))
            exchanged = len(others) > 0
        if exchanged:
            other = generator.choice(others)
            start = int(packing.starts[other] + generator.integers(packing.lengths[other] - length + 1))
        spans.append((start, length))

        input_ids = np.full(packing.sequence_length, PAD, dtype=np.int64)
        is_text = np.zeros(packing.sequence_length, dtype=bool)
        segment_ids = np.zeros_like(input_ids)
        input_ids[0], end = CLS, 1
        for start, length in spans:
            second_segment = end
            input_ids[end : end + length] = self.corpus.tokens[start : start + length]
            is_text[end : end + length] = True
            input_ids[end + length] = SEP
            end += length + 1
        segment_ids[second_segment:end] = 1

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

    @cached_property
    def held_out_unigram_cross_entropy(self) -> float:
        """Mean of -log p(token), in nats, over the very positions that the held-out loss is computed on. A model that
        ignores context ends here."""
        labels = torch.cat([batch.mlm_labels for batch in self.held_out_batches(len(self.eval_order))])
        return -self.unigram_log_probabilities[labels[labels != NOT_PREDICTED]].mean().item()

    def manifest(self) -> dict[str, object]:
        """Describes what went in, ready for JSON: corpus, counts, vocabulary, versions, seed."""
        return {
            **self.corpus.summary,
            "sequence_length": self.sequence_length,
            "seed": self.seed,
            "max_predictions_per_seq": self.max_predictions_per_seq,
            "eval_sequences": len(self.eval_order),
            "versions": {name: metadata.version(name) for name in ("tokenizers", "numpy", "torch")},
            "cache_entry": self.corpus.directory.name,
        }

    def write_manifest(self, folder: Path) -> None:
        """Writes `manifest.json` into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "manifest.json", json.dumps(self.manifest(), indent=1) + "\n")

    def describe(self) -> str:
        """A few lines for people: documents, tokens, vocabulary, sequences, padding, masking."""
        summary, found = self.corpus.summary, len(self.eval_order)
        documents, tokens, left_out = summary["documents"], summary["tokens"], summary["left_out"]
        shortfall = f" (all there are; {self.eval_asked} were asked for)" if found < self.eval_asked else ""
        return (
            f"Corpus {summary['corpus']}: {documents['training']:,} documents with {tokens['training']:,} tokens "
            f"for training, {documents['held_out']:,} with {tokens['held_out']:,} held out\n"
            f"Left out: {left_out['duplicate_documents']:,} duplicate and {left_out['empty_documents']:,} empty "
            f"documents, {self.training.left_out + self.held_out.left_out:,} tokens that fill no half sequence\n"
            f"Vocabulary: {len(self.corpus.vocabulary):,} word pieces with case, padded to "
            f"{self.corpus.padded_vocabulary_size:,}\n"
            f"Sequences of {self.sequence_length:,} tokens: {len(self.training.sequences):,} for training with "
            f"{self.training.padding_share:.1%} padding and {self.max_predictions_per_seq} predictions each; "
            f"{found:,} held out{shortfall}"
        )


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng([ORDER, seed, epoch]).permutation(size)


def _leave_signals_to_the_run(worker: int) -> None:
    """Ctrl-C and launchers reach all processes; the run goes on to the end of its step, and ends this one."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _until_closed(loader: DataLoader) -> Generator[Batch]:
    """The batches of a loader, whose process ends when this is closed, or an error ends it. By itself it would not: the
    error's traceback keeps the loader's iterator, and Python waits at its end for a process that ignores SIGTERM."""
    batches: Any = iter(loader)
    try:
        yield from batches
    finally:
        batches._shutdown_workers()


def _stack(rows: list[tuple[np.ndarray, ...]]) -> Batch:
    return Batch.of(*(torch.from_numpy(np.stack(column)) for column in zip(*rows)))
