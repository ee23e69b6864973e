"""BERT with each attention, and Longformer and BigBird of the same sizes, as Transformers has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.models.attentions import (
    BIGBIRD_MODEL,
    FLEX_IN_BERT,
    FLOOR,
    LONGFORMER_MODEL,
    NO_ATTENTION,
    STRUCTURES_IN_BERT,
)
from benchmarks.models.results import BASE, BERT, LABELLED, LARGE, Case
from benchmarks.models.steps import WITHOUT_ATTENTION, Piece, built
from ds_sparse.bench import flex as flex_attention
from ds_sparse.bench.cases import IN_BERT
from ds_sparse.bench.reasons import Unsupported
from ds_sparse.layout import to_token_mask
from ds_sparse.models.sparsify import sparsify
from ds_sparse.modules.structured_attention import whole_blocks
from ds_sparse.tools.extras import optional_imports

with optional_imports():
    import transformers
    from transformers import AttentionInterface, BertConfig, BertForMaskedLM

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1000,
}
LARGE_SIZES = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
MODELS: dict[str, dict[str, dict[str, int]]] = {
    BASE: {"cpu": SMALL, "cuda": {}},
    LARGE: {"cpu": SMALL | {"num_hidden_layers": 4}, "cuda": LARGE_SIZES},
}
"""Differences from BERT-base, the default of `BertConfig`: on a CPU small models."""

WINDOW = 512
"""Window of Longformer's checkpoints; no token is global, which is fastest."""

BIGBIRD_BLOCK, BIGBIRD_RANDOM = 64, 3
"""Block and random blocks of BigBird's checkpoints."""

FLOORS, VERIFIED_LAYERS, COPIES = (NO_ATTENTION, FLOOR), 2, True

FLEX = "ds_sparse_bench_flex"


def is_verified(name: str) -> bool:
    return name in STRUCTURES_IN_BERT


def make_model(case: Case, device: torch.device, name: str = "", **sizes: int) -> Any:
    """BERT with the attention that Transformers gives it, or another model of that name.

    Raises:
        Unsupported: the model does not take the case.
    """
    if name in OTHER_MODELS:
        return OTHER_MODELS[name](case, device)
    return built(BertForMaskedLM, bert_config(case, **sizes), case.dtype, device)


def bert_config(case: Case, **sizes: int) -> BertConfig:
    return BertConfig(
        **(MODELS[case.model][case.device] | sizes),
        max_position_embeddings=case.seq_len,
        hidden_dropout_prob=case.dropout,
        attention_probs_dropout_prob=case.dropout,
    )


def longformer(case: Case, device: torch.device) -> Any:
    # Positions are counted from the number after that of padding.
    sizes = sizes_of(case) | {"max_position_embeddings": case.seq_len + 2, "pad_token_id": 1}
    config = transformers.LongformerConfig(**sizes, attention_window=WINDOW)
    return built(transformers.LongformerForMaskedLM, config, case.dtype, device)


def bigbird(case: Case, device: torch.device) -> Any:
    dense_until = (5 + 2 * BIGBIRD_RANDOM) * BIGBIRD_BLOCK
    if case.seq_len <= dense_until:
        raise Unsupported(f"up to {dense_until} tokens it is dense")
    config = transformers.BigBirdConfig(
        **sizes_of(case), attention_type="block_sparse", block_size=BIGBIRD_BLOCK, num_random_blocks=BIGBIRD_RANDOM
    )
    return built(transformers.BigBirdForMaskedLM, config, case.dtype, device)


OTHER_MODELS: dict[str, Callable[[Case, torch.device], Any]] = {LONGFORMER_MODEL: longformer, BIGBIRD_MODEL: bigbird}


def sizes_of(case: Case) -> dict[str, Any]:
    """Sizes of BERT's config that other models share."""
    names = [
        *("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"),
        *("hidden_act", "max_position_embeddings", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    ]
    config = bert_config(case)
    return {name: getattr(config, name) for name in names}


def switch(model: Any, name: str) -> None:
    """Gives BERT its attention.

    Raises:
        Unsupported: it does not take the model.
    """
    if name in FLEX_IN_BERT:
        set_flex(model, FLEX_IN_BERT[name])
    elif name in STRUCTURES_IN_BERT:
        sparsify(model, STRUCTURES_IN_BERT[name](model.config.num_attention_heads))
    elif name not in OTHER_MODELS:
        model.set_attn_implementation(WITHOUT_ATTENTION.get(name, name))


def set_flex(model: BertForMaskedLM, name: str) -> None:
    """FlexAttention on the layout of a structure, compiled at the first step."""
    if model.device.type == "cpu":
        raise Unsupported(flex_attention.ON_CPU)
    if model.config.attention_probs_dropout_prob:
        raise Unsupported("it has no dropout")
    config = IN_BERT[name](model.config.num_attention_heads)
    layout = config.make_bool_layout(whole_blocks(model.config.max_position_embeddings, config.block))
    call = flex_attention.compiled(flex_attention.of_layout(layout.to(model.device), config.block, flex_attention.TILE))

    def flex(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return call(query, key, value).transpose(1, 2).contiguous(), None

    AttentionInterface.register(f"{FLEX}_{name}", flex)
    model.set_attn_implementation(f"{FLEX}_{name}")


def pieces_of(name: str, case: Case, config: Any, device: torch.device) -> list[Piece]:
    return [batch(case.batch, case.seq_len, config.vocab_size, device)]


def batch(sequences: int, seq_len: int, vocabulary: int, device: torch.device, seed: int = 0) -> Piece:
    """Random, without padding, the same at every call with a seed."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (sequences, seq_len), generator=generator)
    has_label = torch.rand(tokens.shape, generator=generator) < LABELLED[BERT]
    return Piece.of({"input_ids": tokens.to(device)}, tokens.masked_fill(~has_label, -100).to(device))


def queries_of(model: BertForMaskedLM) -> Tensor:
    return model.bert.encoder.layer[0].attention.self.query.weight


def masks_of(name: str, case: Case, config: BertConfig, device: torch.device) -> Callable[[Any], Tensor]:
    """From a layer's attention to its mask, the structure's layout."""
    structure = STRUCTURES_IN_BERT[name](config.num_attention_heads)
    mask = to_token_mask(structure.make_bool_layout(case.seq_len), structure.block).to(device)
    return lambda module: mask
