"""A decoder of short sequences that goes on with longer ones: what each attention makes of the same base, by place in
the document and by how long ago a name was seen."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ds_sparse.models.sparsify import sparsify
from ds_sparse.tools.arguments import UsageError

from . import chosen, decoder, texts
from .documents_texts import installed_sources, without_header
from .models import LOCAL_GLOBAL, Attention, attention_of, each_third_dense
from .quality import MOST_PIECES, QUICK_BYTES, TOKENIZER_BYTES, names_of
from .results import BASE_ARM, DENSE, MODELS, Case, short_of
from .trainer import Phase, Task, Waits

BYTES_OF_TOKEN = 4
"""Most bytes of a token on the average."""

HELD_OUT, QUICK_HELD_OUT = 64, 8
"""Documents at most."""

EVALUATIONS = 2
"""In an arm's budget: evaluation takes as long as many steps."""

ROPE_THETA = 10_000.0
"""That `LlamaConfig` has by itself."""

PART = 0.01
"""Least part of the tokens of a distribution that is named."""


def blocks_of(case: Case) -> chosen.Blocks:
    """Kinds of attention: those of `decoder`, and others that see as many keys. `local_global` is windows, with each
    third layer dense."""
    blocks = decoder.blocks_of(case)
    window, layers = blocks["local_sliding_window"], MODELS[case.model]["num_hidden_layers"]
    number = decoder.keys_of(case)["num_chosen_blocks"]
    random = {
        **window,
        "mode": "bigbird",
        "strict_causal": True,
        "num_sliding_window_blocks": number // 2 * 2 - 1,
        "num_global_blocks": 1,
        "num_random_blocks": number - number // 2 - 1,
        "seed": 0,
        # Each layer draws random blocks of its own, so that together they reach more.
        "layers": {str(layer): {"seed": layer} for layer in range(1, layers)},
    }
    return {
        **blocks,
        "bslongformer": {**window, "mode": "bslongformer", "num_sliding_window_blocks": 2 * number - 3},
        "bigbird": random,
        LOCAL_GLOBAL: {**window, "layers": each_third_dense(case)},
    }


def default_arms(case: Case) -> list[str]:
    short = short_of(case)
    kinds, lengths = (DENSE, "local_sliding_window", "bigbird", LOCAL_GLOBAL, "indexer"), (8 * short, 32 * short)
    longer = [f"{kind}-{of}" for of in lengths if of <= case.document_tokens for kind in kinds]
    return [base_arm(case), f"{DENSE}-{short}", *longer]


def base_arm(case: Case) -> str:
    return f"{BASE_ARM}{short_of(case)}"


def require(case: Case) -> None:
    """Raises UsageError where the case's arm is not known, or does not divide documents."""
    if not case.is_base:
        chosen.require(case, blocks_of(case))
    elif case.arm != base_arm(case):
        raise UsageError(f"--arms {case.arm}: the base is {base_arm(case)}; it comes first by itself.")


def edges(case: Case) -> list[int]:
    """Places and distances that are told apart begin here."""
    return [0, *(edge for edge in (short_of(case) << shift for shift in (0, 2, 4)) if edge < case.document_tokens)]


def prepare(case: Case, data: Path) -> None:
    """Writes train.npy and held_out.npy, uint16 (N, T); names.npy, as `names_seen` gives it; tokenizer.json; and
    about.txt, which says what all that is made of.

    Raises:
        ValueError: the sources are too few for a step.
    """
    length = case.document_tokens
    packages, found = zip(*documents(case), strict=True)
    learned = [text for text in found if not texts.is_held_out(text)]
    every = max(1, -(-sum(map(len, learned)) // TOKENIZER_BYTES))
    tokenizer = texts.trained_tokenizer(learned[::every], texts.vocabulary_of(case))
    tokenizer.save(str(data / "tokenizer.json"))
    train: list[np.ndarray] = []
    held_out: list[np.ndarray] = []
    tokens: Counter[str] = Counter()
    for package, text, ids in zip(packages, found, texts.encoded(tokenizer, found), strict=True):
        count = min(len(ids) // length, MOST_PIECES)
        is_held_out = texts.is_held_out(text)
        (held_out if is_held_out else train).append(ids[: count * length].reshape(count, length))
        tokens[package] += count * length * (not is_held_out)
    rows, others = (np.concatenate([np.empty((0, length), np.uint16), *some]) for some in (train, held_out))
    if len(rows) < (least := case.tokens_per_step // length) or not len(others):
        raise ValueError(
            f"The Python sources here have {len(rows):,} pieces of {length:,} tokens to train on and {len(others):,} "
            f"held out; a step takes {least}: give shorter --document-tokens."
        )
    most = QUICK_HELD_OUT if case.quick else HELD_OUT
    some = others[np.linspace(0, len(others) - 1, min(most, len(others))).astype(int)]
    names = names_seen(some, texts.pieces(tokenizer))
    np.save(data / "train.npy", rows)
    np.save(data / "held_out.npy", some)
    np.save(data / "names.npy", names)
    (data / "about.txt").write_text(f"{made_of(tokens)}; {held_out_of(len(some), names, edges(case))}")


def documents(case: Case) -> Iterator[tuple[str, str]]:
    """Packages and texts: as many files of one package, in the order of their paths, as make a text long enough,
    without the comments that they begin with. No file comes twice."""
    left = float(QUICK_BYTES if case.quick else "inf")
    seen: set[str] = set()
    for package, files in installed_sources().items():
        parts: list[str] = []
        for where in sorted(files):
            text = without_header(texts.text_of(files[where]))
            if text in seen:
                continue
            seen.add(text)
            parts.append(text)
            left -= len(text)
            if sum(map(len, parts)) >= BYTES_OF_TOKEN * case.document_tokens:
                yield package, "\n".join(parts)
                parts = []
        if left <= 0:
            return


def names_seen(rows: Iterable[np.ndarray], pieces: Sequence[bytes]) -> np.ndarray:
    """int64 (names, 4), the names in documents, but for one that a document begins with: the document, the first token,
    the one after the last, and how many tokens ago the name stood last, 0 where it is new.

    Args:
        rows: integers (T) each, documents.
        pieces: the bytes of each token.
    """
    found = []
    for number, ids in enumerate(rows):
        last: dict[bytes, int] = {}
        for name, first, stop in names_of(ids, pieces):
            if 0 < first < stop:
                found.append((number, first, stop, first - last.get(name, first)))
            last[name] = first
    return np.array(found, dtype=np.int64).reshape(-1, 4)


def made_of(tokens: Counter[str]) -> str:
    """Says what was trained on: the distributions that packages come from, by their tokens."""
    known, by_source = metadata.packages_distributions(), Counter[str]()
    for package, count in tokens.items():
        names = known.get(package)
        source = f"{names[0]} {metadata.version(names[0])}" if names else f"Python {platform.python_version()}"
        by_source[source] += count
    total = by_source.total()
    large = [(source, count) for source, count in by_source.most_common() if count >= PART * total]
    rest = total - sum(count for _, count in large)
    parts = [f"{source} {count / total:.1%}" for source, count in large]
    more = [f"{len(by_source) - len(large)} others {rest / total:.1%}"] if rest else []
    return f"trained on {total:,} tokens of {', '.join([*parts, *more])}"


def held_out_of(documents: int, names: np.ndarray, edges: Sequence[int]) -> str:
    """Says how many names are asked for."""
    kinds = kinds_of(names[:, 3], edges).items()
    counts = [f"{f'from {kind} on' if kind.isdecimal() else kind} {int(which.sum()):,}" for kind, which in kinds]
    asked = f"held out {documents} documents, in sequences that overlap by half where they are shorter, with "
    return f"{asked}{len(names):,} names, by tokens since their last place: {', '.join(counts)}"


def kinds_of(distances: np.ndarray, edges: Sequence[int]) -> dict[str, np.ndarray]:
    """bool arrays as distances, 0 where a name is new: which lie from one edge to the next, by the edge; which are new;
    and which are far, from the second edge on."""
    kinds = {
        str(edge): (distances > 0) & (distances >= edge) & (distances < end)
        for edge, end in zip(edges, [*edges[1:], np.inf], strict=True)
    }
    kinds |= {"new": distances == 0, "far": distances >= edges[1]}
    return {kind: which for kind, which in kinds.items() if which.any()}


class Continued(decoder.Bytes):
    """The next token. A step has sequences from anywhere: those of short ones are of as many documents.

    Args:
        held_out: uint16 (documents, T), of which each token is predicted by the greatest part of what stands before it
            that sequences have, half of their length at least: they overlap by half.
        names: of `held_out`, as `names_seen` gives them.
        weights: the file that keeps what the base has learned; None of what goes on.
    """

    asked = "tokens"
    evaluations = EVALUATIONS

    def __init__(
        self, model: Any, length: int, train: np.ndarray, held_out: np.ndarray, case: Case, device: torch.device,
        names: np.ndarray, weights: Path | None,
    ) -> None:  # fmt: skip
        super().__init__(model, length, train.reshape(-1, length), held_out, case, device)
        self.case, self.classes, self.names, self.weights = case, texts.vocabulary_of(case), names, weights

    def held_out_losses(self) -> Tensor:
        """Of each token but a document's first, fp32 (documents, T - 1)."""
        half = self.length // 2
        rows = torch.from_numpy(self.held_out.astype(np.int64)).unfold(1, self.length, half)
        parts = rows.flatten(0, 1).split(max(1, self.tokens_per_step // self.length))
        losses = torch.cat([self.losses(part.to(self.device)) for part in parts]).unflatten(0, rows.shape[:2])
        return torch.cat([losses[:, 0], losses[:, 1:, half - 1 :].flatten(1)], 1)

    def evaluate(self) -> float:
        self.found = self.held_out_losses()
        return self.found.mean().item()

    def measures(self) -> dict[str, float]:
        """The loss of tokens by place, and of names, the sum over their tokens, by how long ago they were seen."""
        losses, at = self.found.double().cpu(), edges(self.case)
        places = zip(at, [*at[1:], self.case.document_tokens], strict=True)
        found = {f"place_{first}": losses[:, max(first - 1, 0) : end - 1].mean().item() for first, end in places}
        until = pad(losses.cumsum(1), (1, 0)).numpy()
        document, first, stop, distances = self.names.T
        of_names = until[document, stop - 1] - until[document, first - 1]
        kinds = kinds_of(distances, at).items()
        return found | {f"name_{kind}": float(of_names[which].mean()) for kind, which in kinds}

    def keep(self) -> None:
        if self.weights is not None:
            unfinished = self.weights.with_suffix(".unfinished")
            torch.save(self.model.state_dict(), unfinished)
            unfinished.rename(self.weights)


def phases(case: Case, data: Path, device: torch.device) -> list[Phase]:
    """The base, or what goes on from its weights.

    Raises:
        Waits: there is no base yet.
    """
    base = replace(case, arm=base_arm(case))
    weights = data / f"{base.file}.pt"
    if not case.is_base and not weights.exists():
        raise Waits(
            f"{base.job}, has left no weights here; give the command again when it is trained, or, where its row is "
            f"there without them, remove {base.file}.json to train it again"
        )
    return [partial(make_task, case, data, weights, device)]


def make_task(case: Case, data: Path, weights: Path, device: torch.device, before: Any) -> Task:
    blocks = blocks_of(case)
    attention = attention_of(case.arm.replace(BASE_ARM, f"{DENSE}-"), (DENSE, *blocks))
    train, held_out, names = (np.load(data / f"{name}.npy", mmap_mode="r") for name in ("train", "held_out", "names"))
    reach = reach_of(attention, case)
    model = decoder.new_decoder(reach, case, device, texts.vocabulary_of(case), **positions(reach, case))
    if not case.is_base:
        model.load_state_dict(torch.load(weights, map_location=device))
    if attention.kind != DENSE:
        sparsify(model, blocks[attention.kind], max_seq_length=attention.length)
    kept = weights if case.is_base else None
    task = Continued(model, attention.length, train, held_out, case, device, names=names, weights=kept)
    task.about = (data / "about.txt").read_text()
    return task


def reach_of(attention: Attention, case: Case) -> int:
    """Tokens that one sees in a layer, the first to the last."""
    keys = decoder.keys_of(case)
    is_local = attention.kind == "local_sliding_window"
    return min(attention.length, keys["block"] * keys["num_chosen_blocks"]) if is_local else attention.length


def positions(reach: int, case: Case) -> dict[str, Any]:
    """Of `LlamaConfig`: rotary positions that are stretched as YaRN does (Peng et al. 2023, arXiv 2309.00071), by as
    much as tokens see farther than those of the base. With the base's own the loss begins higher."""
    short = short_of(case)
    yarn = {"rope_type": "yarn", "factor": reach / short, "original_max_position_embeddings": short}
    return {"rope_parameters": {"rope_theta": ROPE_THETA, **yarn}} if reach > short else {}
