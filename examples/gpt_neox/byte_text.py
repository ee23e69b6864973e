"""The text of a run as sequences of bytes: each byte is a token, and a byte of 0 ends a document."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from corpus import Corpus

END = b"\0"


class Text:
    """Documents of a corpus, one behind the other, cut into sequences; those that are held out apart.

    Args:
        corpus: split into training and held-out documents.
        tokens: of a sequence.
        seed: of the order in which they are trained.
        eval_sequences: how many are held out at most.

    Raises:
        ValueError: there is not one whole sequence of either kind.
    """

    def __init__(self, corpus: Corpus, tokens: int, seed: int, eval_sequences: int):
        self.name, self.seed = corpus.name, seed
        self.training, held_out = (_sequences(corpus, of_these, tokens) for of_these in (False, True))
        if not (len(self.training) and len(held_out)):
            raise ValueError(
                f"The corpus {corpus.name} has {len(self.training)} sequences of {tokens} bytes to train and "
                f"{len(held_out)} to hold out; use a larger one, or a smaller --max-seq-length."
            )
        chosen = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(0))
        self.held_out = held_out[chosen[:eval_sequences].sort().values]

    def batches(self, micro_batch: int, rank: int, ranks: int) -> Iterator[torch.Tensor]:
        """This rank's micro-batches (micro_batch, tokens), without end; each pass is in an order of its own."""
        numbers = itertools.chain.from_iterable(self._order(epoch) for epoch in itertools.count())
        while True:
            at_once = [next(numbers) for _ in range(ranks * micro_batch)]
            yield self.training[at_once[rank * micro_batch :][:micro_batch]].long()

    def _order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(len(self.training), generator=generator).tolist()

    def held_out_batches(self, micro_batch: int, rank: int, ranks: int) -> list[torch.Tensor]:
        """This rank's share of the held-out sequences."""
        mine = self.held_out[rank::ranks].long()
        return list(mine.split(micro_batch)) if len(mine) else []

    def unigram_cross_entropy(self) -> float:
        """The loss, in nats, of a model that knows how often each byte is, on the held-out sequences."""
        counts = torch.bincount(self.training.flatten().int(), minlength=256).double() + 1
        return -(counts / counts.sum()).log()[self.held_out[:, 1:].flatten().long()].mean().item()

    def describe(self) -> str:
        megabytes = (self.training.numel() + self.held_out.numel()) / 1e6
        return (
            f"{self.name}: {megabytes:.1f} MB, {len(self.training):,} sequences of {self.training.shape[1]:,} bytes to "
            f"train, {len(self.held_out)} held out."
        )


def readable(tokens: torch.Tensor) -> str:
    """Bytes as text, those that are none as signs for them."""
    return bytes(tokens.tolist()).decode("utf-8", errors="replace").replace("\0", "\n----\n")


def _sequences(corpus: Corpus, held_out: bool, tokens: int) -> torch.Tensor:
    ended = b"".join(document.text.encode() + END for document in corpus.documents if document.held_out == held_out)
    whole = len(ended) // tokens * tokens
    return torch.frombuffer(bytearray(ended[:whole] or END), dtype=torch.uint8)[:whole].view(-1, tokens)
