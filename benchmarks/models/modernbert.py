"""ModernBERT on packed documents. All attentions get the same documents, each in a form of its own: one flat row with
the documents' edges, as `DataCollatorWithFlattening` makes it; rows with masks; or documents one below the other,
padded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from benchmarks.models.attentions import FLOOR, MODERNBERT_ATTENTIONS, OURS, OURS_PADDED
from benchmarks.models.results import LABELLED, MODERNBERT, Case
from benchmarks.models.steps import WITHOUT_ATTENTION, Piece, built
from ds_sparse.bench.cases import IN_BERT
from ds_sparse.bench.documents import cu_seqlens_of, places_of
from ds_sparse.bench.flex import of_scores
from ds_sparse.bench.reasons import Unsupported
from ds_sparse.layout import to_token_mask
from ds_sparse.models.sparsify import sparsify
from ds_sparse.modules.structured_attention import whole_blocks
from ds_sparse.tools.extras import optional_imports

with optional_imports():
    import transformers
    from transformers import ModernBertConfig, ModernBertForMaskedLM
    from transformers.utils import import_utils

MODEL: dict[str, dict[str, int]] = {
    "cpu": {
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 2,
        "intermediate_size": 192,
        "vocab_size": 1000,
        **{f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")},
    },
    "cuda": {},
}
"""Differences from ModernBERT-base, the default of `ModernBertConfig`: on a CPU a small model."""

STRUCTURE = "bigbird-64"
"""Structure of global layers, of `IN_BERT`; local ones keep the model's own window."""

FLOORS, VERIFIED_LAYERS, COPIES = (FLOOR,), 4, False
"""Verified layers, the first and last of which are global."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers, as the model's config names them."""

FLAT, ROWS, PADDED = "flat", "rows", "padded"

FORMS = dict(zip(MODERNBERT_ATTENTIONS, (ROWS, FLAT, PADDED, ROWS, PADDED, ROWS, FLAT, FLAT), strict=True))
"""The form in which each attention gets the documents."""


def is_verified(name: str) -> bool:
    return name != FLOOR


def make_model(case: Case, device: torch.device, name: str = "", **sizes: int) -> ModernBertForMaskedLM:
    config = ModernBertConfig(**(MODEL[case.device] | sizes), max_position_embeddings=case.seq_len)
    return built(ModernBertForMaskedLM, config, case.dtype, device)


def switch(model: ModernBertForMaskedLM, name: str) -> None:
    """Gives a model its attention.

    Raises:
        Unsupported: a package that Transformers does not find.
    """
    if name in (OURS, OURS_PADDED):
        sparsify(model, IN_BERT[STRUCTURE](model.config.num_attention_heads))
        return
    if name.startswith("flash_attention"):
        require_flash_attention(int(name[-1]))
    model.set_attn_implementation(WITHOUT_ATTENTION.get(name, name.removesuffix("-padded")))


def require_flash_attention(version: int) -> None:
    """Raises Unsupported where Transformers would look for the kernels elsewhere than in the package."""
    available = getattr(import_utils, f"is_flash_attn_{version}_available", None)
    if available is None:
        raise Unsupported(f"Transformers {transformers.__version__} does not know FlashAttention-{version}")
    if not available():
        package = "flash-attn" if version == 2 else f"flash-attn-{version}"
        raise Unsupported(f"Transformers finds no {package} here, or no GPU for it")


def pieces_of(name: str, case: Case, config: ModernBertConfig, device: torch.device) -> list[Piece]:
    """The same random tokens and labels for all, in the form of each."""
    lengths = case.documents
    generator = torch.Generator().manual_seed(0)
    shape = len(lengths), case.seq_len
    tokens = torch.randint(1, config.vocab_size, shape, generator=generator)
    labels = tokens.masked_fill(torch.rand(shape, generator=generator) >= LABELLED[MODERNBERT], -100)
    tokens, labels = tokens.to(device), labels.to(device)
    place = places_in_rows(lengths, device)[1].long()
    form, flat = FORMS[name], list(chain.from_iterable(lengths))
    if form == FLAT:
        edges = cu_seqlens_of(flat, device)
        inputs: dict[str, Any] = {"input_ids": tokens.view(1, -1), "position_ids": place.view(1, -1)}
        inputs |= {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges}
        inputs |= {"max_length_q": max(flat), "max_length_k": max(flat)}
        return [Piece.of(inputs, labels.view(1, -1))]
    if form == PADDED:
        split_tokens, split_labels = tokens.flatten().split(flat), labels.flatten().split(flat)
        pieces, first = [], 0
        for batch in padded_batches(flat, tokens.numel()):
            mine = slice(first, first := first + len(batch))
            pieces.append(padded(split_tokens[mine], split_labels[mine], config.pad_token_id))
        return pieces
    inputs = {"input_ids": tokens, "position_ids": place}
    if name == "sdpa":
        inputs["attention_mask"] = {kind: masks(kind, lengths, config, device) for kind in (FULL, SLIDING)}
    if name == "flex_attention":
        inputs["attention_mask"] = {
            kind: of_scores(sees(kind, lengths, config, device), len(lengths), case.seq_len, device)
            for kind in (FULL, SLIDING)
        }
    return [Piece.of(inputs, labels)]


def places_in_rows(lengths: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """int32 (rows, T) each: the number of each token's document in its row, and the token's place in it."""
    of_rows = [places_of(cu_seqlens_of(row, device), sum(row)) for row in lengths]
    return [torch.stack(x) for x in zip(*of_rows, strict=True)]


def padded_batches(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Documents in batches, in their order, each with as many as are no more than `most` tokens when they are padded to
    the longest."""
    batches: list[list[int]] = [[]]
    for length in lengths:
        together = [*batches[-1], length]
        if len(together) > 1 and len(together) * max(together) > most:
            batches.append([length])
        else:
            batches[-1] = together
    return batches


def padded(tokens: Sequence[Tensor], labels: Sequence[Tensor], pad_token: int) -> Piece:
    """Documents one below the other."""
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    exists = pad([torch.ones_like(x) for x in tokens])
    inputs = {"input_ids": pad(list(tokens), padding_value=pad_token), "attention_mask": exists}
    return Piece.of(inputs, pad(list(labels), padding_value=-100))


def sees(
    kind: str, lengths: Sequence[Sequence[int]], config: ModernBertConfig, device: torch.device
) -> Callable[[Any, Any, Tensor, Tensor], Tensor]:
    """From (row, head, query, key) to whether the query sees the key: in its document; in local layers near it too."""
    document, _ = places_in_rows(lengths, device)
    reach = config.sliding_window if kind == SLIDING else sum(lengths[0])

    def live(b: Any, h: Any, q: Tensor, k: Tensor) -> Tensor:
        return (document[b, q] == document[b, k]) & ((q - k).abs() <= reach)

    return live


def masks(kind: str, lengths: Sequence[Sequence[int]], config: ModernBertConfig, device: torch.device) -> Tensor:
    """bool (rows, 1, T, T)."""
    live = sees(kind, lengths, config, device)
    token = torch.arange(sum(lengths[0]), device=device)
    return torch.stack([live(row, None, token[:, None], token) for row in range(len(lengths))])[:, None]


def queries_of(model: ModernBertForMaskedLM) -> Tensor:
    """The weight that makes queries, and keys and values too."""
    return model.model.layers[0].attn.Wqkv.weight


def masks_of(name: str, case: Case, config: ModernBertConfig, device: torch.device) -> Callable[[Any], Tensor]:
    """From a layer's attention to its mask, bool (rows, 1 or H, T, T): of documents, and in global layers of ours of
    the structure in each."""
    lengths = case.documents
    found = {kind: masks(kind, lengths, config, device) for kind in (FULL, SLIDING)}
    if name in (OURS, OURS_PADDED):
        structure = IN_BERT[STRUCTURE](config.num_attention_heads)
        layout = structure.make_bool_layout(whole_blocks(case.seq_len, structure.block))
        live = to_token_mask(layout, structure.block).to(device)
        _, places = places_in_rows(lengths, device)
        found[FULL] = found[FULL] & torch.stack([live[:, place[:, None], place] for place in places])
    return lambda module: found[FULL if module.sliding_window is None else SLIDING]
