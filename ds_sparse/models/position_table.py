"""The table of learned positions of a model, where it has one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_WITHOUT_TABLE = {"rotary": ("rotary", "rope"), "relative": ("relative", "rel_embeddings", "rel_pos")}
"""Kinds of positions that need no table, by words in the names of the modules that compute them."""


def base_model(model: nn.Module) -> nn.Module:
    """The encoder with embeddings inside a model with a head, or the model itself."""
    for name in ("bert", "roberta"):
        if hasattr(model, name):
            return getattr(model, name)
    return getattr(model, "base_model", model)


def configs(model: nn.Module, base: nn.Module) -> list[Any]:
    """The configs of a model with a head and of its encoder, which may be one."""
    configs = [module.config for module in (model, base) if hasattr(module, "config")]
    return list({id(config): config for config in configs}.values())


def position_table(base: nn.Module) -> nn.Embedding | None:
    """`embeddings.position_embeddings` of an encoder, where it is a table."""
    table = getattr(getattr(base, "embeddings", None), "position_embeddings", None)
    return table if isinstance(table, nn.Embedding) else None


def most_tokens(model: nn.Module) -> int | None:
    """Tokens that a model has learned positions for; None where it has no table that is known."""
    base: Any = base_model(model)
    table = position_table(base)
    if table is not None:
        return table.num_embeddings - reserved_rows(table)
    tables = (getattr(base, name, None) for name in ("wpe", "embed_positions"))  # GPT-2's and BART's
    return next((x.num_embeddings - getattr(x, "offset", 0) for x in tables if isinstance(x, nn.Embedding)), None)


def why_too_long(model: nn.Module, tokens: int) -> str | None:
    """The sentence for a model that is to take so many tokens, and for which fewer positions are there."""
    most = most_tokens(model)
    if most is None or tokens <= most:
        return None
    how = "a longer table of positions, with a structure for as many (max_seq_length)"
    if position_table(base_model(model)) is not None:
        how = f"SparseAttentionUtils.extend_position_embedding(model, {tokens}), or its checkpoint with ds_sparse adapt"
    return f"{type(model).__name__} takes up to {most} tokens, and {tokens} are wanted; extend it with {how}."


def longest_row(model: nn.Module, ids: torch.Tensor) -> int:
    """Tokens of the longest row of (B, T) that get positions of their own: padding gets none where RoBERTa counts."""
    table = position_table(base_model(model))
    if table is None or table.padding_idx is None or ids.is_floating_point():
        return ids.shape[1]
    return int((ids != table.padding_idx).sum(1).max())


def kind_without_table(model: nn.Module) -> tuple[str, str] | None:
    """The kind of positions of a model that needs no table, "rotary" or "relative", and the module that computes them;
    None where no name tells."""
    for kind, words in _WITHOUT_TABLE.items():
        found = next((path for path, _ in model.named_modules() if any(word in path.lower() for word in words)), None)
        if found is not None:
            return kind, found
    return None


def why_no_table(model: nn.Module, max_position: int) -> str:
    """The sentence for a model without a table, by the kind of positions that it has."""
    name, known = type(model).__name__, kind_without_table(model)
    if known is not None:
        kind, found = known
        return (
            f"{name} has {kind} positions ({found}) and no table of positions, so it needs none that is longer; "
            f"leave this call out. sparsify(model, ..., max_seq_length={max_position}) builds the layout for that "
            "length."
        )
    return (
        f"{name} has no embeddings.position_embeddings, the table that extend_position_embedding makes longer; BERT, "
        "RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, DistilBERT and ALBERT have it. Make the table of this model longer "
        "where it keeps one."
    )


def reserved_rows(table: nn.Embedding) -> int:
    """Leading rows that belong to no position: RoBERTa numbers positions from padding_idx + 1."""
    return 0 if table.padding_idx is None else table.padding_idx + 1
