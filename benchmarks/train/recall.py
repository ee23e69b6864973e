"""Recall by distance: how far away each structure finds what it is asked for, on sequences that are made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ds_sparse.config import parse_sparse_attention
from ds_sparse.modules.self_attention import SparseSelfAttention
from ds_sparse.tools.arguments import UsageError

from . import chosen
from .models import Neighbours, attention_of
from .recall_texts import FIRST_NAME, VALUES, Sequences, doublings, renamed, sequences
from .results import CAUSAL, DENSE, MODELS, Answered, Case, short_of
from .tasks import IGNORED, Batch, TokenTask, log_frequencies
from .trainer import Phase, Task

NAMES_OF_LENGTH = 8
"""Tokens of the longest sequence for each name that there is."""

SHORT_STEPS, QUICK_SHORT_STEPS = 150, 4
"""First steps, all of short sequences; the lengths of the others are each power of two from there, in turn."""

POOL, QUICK_POOL = 16, 2
"""Steps of each length that are made up; each time they come they have other names and values."""

HELD_OUT, QUICK_HELD_OUT = 8, 4
"""Sequences, of the longest."""

SIDES = {"": False, CAUSAL: True}
"""Beginnings of kinds, and whether tokens see those before them alone."""


def blocks_of(case: Case) -> chosen.Blocks:
    """Kinds of attention; nothing for a dense one. Tokens see about as many keys in all, those of eight blocks, but for
    `fixed`, whose global blocks are a part of the sequence, and for causal windows, which have half of a window."""
    both = chosen.sizes(case, 8)
    block, number = both.values()
    # The widest that fits into short sequences.
    window: dict[str, Any] = {"num_sliding_window_blocks": short_of(case) // block // 2 * 2 - 1}
    seen = {"num_sliding_window_blocks": 3, "num_global_blocks": 1, "num_random_blocks": number - 4}
    modes: dict[str, dict[str, Any]] = {
        "local_sliding_window": window | {"attention": "bidirectional"},
        "bslongformer": window,
        "bigbird": seen,
        "fixed": {},
        "variable": {"num_random_blocks": number - 5},
        "moba": both,
        "indexer": both,
    }
    behind = {
        "local_sliding_window": window | {"attention": "unidirectional"},
        "moba": both,
        "nsa": both | {"window": number * block // 2},
        "indexer": both,
    }
    kinds: dict[str, dict[str, Any]] = {DENSE: {}}
    kinds |= {mode: {"mode": mode, "block": block} | more for mode, more in modes.items()}
    kinds |= {f"{CAUSAL}{DENSE}": {}}
    return kinds | {
        f"{CAUSAL}{mode}": {"mode": mode, "block": block, "causal": True} | more for mode, more in behind.items()
    }


def default_arms(case: Case) -> list[str]:
    return [f"{DENSE}-{short_of(case)}", *(f"{kind}-{case.document_tokens}" for kind in blocks_of(case))]


def require(case: Case) -> None:
    """Raises UsageError where the case's arm is not known, the longest sequence is no power of two, or the budget is
    one of minutes: a step's time depends on its length."""
    chosen.require(case, blocks_of(case))
    longest, short = case.document_tokens, short_of(case)
    if longest & (longest - 1) or longest < short:
        raise UsageError(f"--document-tokens {longest}: give recall a power of two of at least {short}.")
    if case.minutes:
        raise UsageError("--minutes: steps of recall take times as different as their lengths; give --tokens.")


def lengths_of(case: Case, longest: int) -> list[int]:
    """Tokens of the sequences that an arm is trained on: powers of two."""
    return [length for length in doublings(short_of(case), case.document_tokens) if length <= longest] or [longest]


def names_of(case: Case) -> int:
    return max(case.document_tokens // NAMES_OF_LENGTH, 64)


def length_at(step: int, lengths: Sequence[int], case: Case) -> int:
    """Tokens of a step's sequences."""
    after = step - (QUICK_SHORT_STEPS if case.quick else SHORT_STEPS)
    return lengths[0 if after < 0 else after % len(lengths)]


def prepare(case: Case, data: Path) -> None:
    """Writes training steps of all lengths, uint16 tokens and int8 labels (steps, N, T), and sequences that are held
    out, for both sides."""
    pool, held_out = (QUICK_POOL, QUICK_HELD_OUT) if case.quick else (POOL, HELD_OUT)
    for side, is_causal in SIDES.items():
        for length in lengths_of(case, case.document_tokens):
            rows = case.tokens_per_step // length
            made = [sequences(rows, length, names_of(case), is_causal, 0, length, step) for step in range(pool)]
            np.save(data / f"{side}tokens-{length}.npy", np.stack([one.tokens for one in made]).astype(np.uint16))
            np.save(data / f"{side}labels-{length}.npy", np.stack([one.labels for one in made]).astype(np.int8))
        asked_for = sequences(held_out, case.document_tokens, names_of(case), is_causal, 1)
        np.savez_compressed(data / f"{side}held_out.npz", **vars(asked_for))


def of_layer(block: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A layer's block: each draws random blocks of its own, so that together they reach more."""
    return {**block, "seed": number} if "num_random_blocks" in block else dict(block)


class Vectors(NamedTuple):
    """As Transformers' encoders give them."""

    last_hidden_state: Tensor


class Recaller(nn.Module):
    """A Transformer that sees no positions, but for neighbours: what it finds is found by what it says, as well at any
    distance as at another, and at lengths that it was not trained on.

    Args:
        block: of the JSON; nothing for dense attention.
        shortest: of the sequences that have random blocks of their own length.
    """

    def __init__(self, size: Mapping[str, int], tokens: int, block: Mapping[str, Any], causal: bool, shortest: int):
        super().__init__()
        hidden = size["hidden_size"]
        self.embeddings = nn.Embedding(tokens, hidden)
        nn.init.normal_(self.embeddings.weight, std=0.02)
        self.neighbours = Neighbours(hidden, causal)
        numbers = range(size["num_hidden_layers"])
        self.layers = nn.ModuleList(Layer(size, of_layer(block, number), causal, shortest) for number in numbers)
        self.norm = nn.LayerNorm(hidden)
        self.values = nn.Linear(hidden, VALUES)

    def forward(self, input_ids: Tensor) -> Vectors:
        x = self.neighbours(self.embeddings(input_ids))
        for layer in self.layers:
            x = layer(x)
        return Vectors(self.norm(x))


class Layer(nn.Module):
    """Attention, and two linear layers after it, normalised before each."""

    def __init__(self, size: Mapping[str, int], block: dict[str, Any], causal: bool, shortest: int) -> None:
        super().__init__()
        hidden, self.heads, wide = (size[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
        self.causal, self.sparse = causal, None
        self.before, self.operands = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden, bias=False)
        self.output = nn.Linear(hidden, hidden)
        self.wide = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, wide), nn.GELU(), nn.Linear(wide, hidden))
        if block:
            structure = parse_sparse_attention(block, self.heads)
            self.sparse = SparseSelfAttention(structure, max_seq_length=shortest, head_dim=hidden // self.heads)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.operands(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.sparse is None:
            found = scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        else:
            found = self.sparse.attend(query, key, value)
        x = x + self.output(found.transpose(1, 2).flatten(2))
        return x + self.wide(x)


class Recall(TokenTask):
    """Values that are asked for.

    Args:
        asked_for: the sequences that are held out.
    """

    def __init__(self, *arguments: Any, asked_for: Sequences) -> None:
        super().__init__(*arguments)
        of_labels = asked_for.labels != IGNORED
        self.hops, self.distances = asked_for.hops[of_labels], asked_for.distances[of_labels]

    def answered(self) -> list[Answered]:
        right = self.predictions()[1].numpy()
        kinds, numbers = np.unique(np.stack([self.hops, self.distances], 1), axis=0, return_inverse=True)
        asked, of_right = np.bincount(numbers), np.bincount(numbers, right)
        return [
            Answered(int(hops), int(distance), int(all_of), int(right_of))
            for (hops, distance), all_of, right_of in zip(kinds, asked, of_right, strict=True)
        ]


def phases(case: Case, data: Path, device: torch.device) -> list[Phase]:
    return [partial(make_task, case, data, device)]


def make_task(case: Case, data: Path, device: torch.device, before: Any) -> Task:
    blocks = blocks_of(case)
    attention = attention_of(case.arm, blocks.keys())
    side = CAUSAL if attention.kind.startswith(CAUSAL) else ""
    lengths = lengths_of(case, attention.length)
    pools = {
        length: [np.load(data / f"{side}{what}-{length}.npy", mmap_mode="r") for what in ("tokens", "labels")]
        for length in lengths
    }
    asked_for = Sequences(**np.load(data / f"{side}held_out.npz"))
    torch.manual_seed(case.seed)
    tokens = FIRST_NAME + names_of(case)
    model = Recaller(MODELS[case.model], tokens, blocks[attention.kind], bool(side), lengths[0]).to(device)

    def batch_of(step: int) -> Batch:
        generator = np.random.default_rng([case.seed, step])
        tokens, labels = pools[length_at(step, lengths, case)]
        number = generator.integers(len(tokens))
        return renamed(tokens[number], labels[number], names_of(case), generator)

    # All values are as likely.
    frequencies = log_frequencies([np.arange(VALUES)], VALUES)
    fixed = batch_of, (asked_for.tokens, asked_for.labels), frequencies, case, device
    return Recall("values", model, model, model.values, attention.length, *fixed, asked_for=asked_for)
