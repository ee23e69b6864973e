"""sparsify: every attention layer of a model becomes block-sparse, in the way of the family that it is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..sparsity import SparsityConfig
from ..tools.ranks import say
from .families import families
from .families._plain import BY_HAND
from .layers import AttentionLayers, attention_layers, refuse_sparse
from .position_table import why_too_long
from .report import Change, SparsifyReport
from .structures import Structures, Wanted


def sparsify(
    model: nn.Module,
    sparsity_config: SparsityConfig | Mapping[str, Any] | None = None,
    *,
    max_seq_length: int | None = None,
) -> SparsifyReport:
    """Makes every attention layer of a model block-sparse. The parameters stay the same objects.

    A structure that adds parameters (modes "nsa" and "indexer") gives each layer a module `sparse_attention`, so make
    the optimizer afterwards.

    A Transformers model is switched through its attention interface: no other module changes, nor a key of the state
    dict, and the structure is written to `model.config.sparse_attention`, which is saved with the model. That config
    becomes a copy, since other models may hold the one that it was made with; so give the whole model, not a base model
    inside it. In other models each layer that holds `query`, `key` and `value`, is called with (hidden_states,
    attention_mask) and returns a tensor, as bing_bert's `attention.self` does, becomes a `BertSparseSelfAttention`;
    each `nn.MultiheadAttention` becomes a `SparseMultiheadAttention`, both in place; and in a layer that calls
    `scaled_dot_product_attention` what it calls for becomes sparse. Their cross-attention stays dense, and the report
    says so.

    Args:
        model: a Transformers model, a model in the bing_bert manner or in plain PyTorch, or a module that holds such.
        sparsity_config: the structure, or a dict with the keys of the JSON block, whose `layers` give layers a
            structure of their own, or leave them dense; by default what the Transformers model's config says, else
            `FixedSparsityConfig`. Random blocks without a seed get that of the model's config, else one that rank 0
            draws; a model in plain PyTorch keeps no seed, so its random blocks need one.
        max_seq_length: tokens that the layout is built for, rounded up to whole blocks; by default
            `config.max_position_embeddings`. Without that it is 2048; the layout of a Transformers model then doubles
            until it covers the batch. Where the model has fewer positions, a line says how to extend them.

    Returns:
        What was changed; its `undo()` puts the model back.

    Raises:
        SparseAttentionConfigError: the dict is wrong (a ValueError).
        ValueError: a model with a sparse layer, without an attention layer, or with one that would stay dense; a
            structure for another number of heads, or without a layout of this length. Nothing has been changed then.
        TypeError: a model that is no module; neither a structure nor a dict.
        RuntimeError: several ranks would draw a seed before torch.distributed runs; later, in a forward, a layer
            that ran without its sparse attention. A forward raises ValueError for cross-attention, and a model of
            Transformers for more tokens than it has learned positions for.

    Examples:
        >>> import transformers
        >>> import ds_sparse
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        >>> config = transformers.BertConfig(vocab_size=50, max_position_embeddings=128, **sizes)
        >>> model = transformers.BertModel(config)
        >>> report = ds_sparse.sparsify(model, ds_sparse.BSLongformerSparsityConfig(num_heads=2, block=16))
        >>> print(report)
        1 attention layer made sparse: BSLongformerSparsityConfig, block 16, density 53.1% at 128 tokens
          encoder.layer.0.attention.self  BertSelfAttention, sdpa  ->  BertSelfAttention, ds_sparse
        >>> report.undo()
        >>> report.replaced
        []
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}; it has to be a torch.nn.Module, such as what from_pretrained returns."
        )
    report = activate(model, attention_layers(model), sparsity_config, max_seq_length)
    if max_seq_length is not None and (why := why_too_long(model, max_seq_length)) is not None:
        say(why)
    return report


def activate(
    model: nn.Module, found: AttentionLayers, wanted: Wanted, max_seq_length: int | None = None
) -> SparsifyReport:
    """`sparsify` of a model whose layers have been found, by a structure or a block that may have been read."""
    refuse_sparse(model, found.sparse)
    structures = Structures(wanted, found.numbers, type(model).__name__)
    changes: list[Change] = []
    dense: Mapping[str, nn.Module] = found.dense
    for family in families():
        layers = family.of_this_family(model, dense)
        changes += family.changes(model, layers, structures, max_seq_length)
        dense = {name: layer for name, layer in dense.items() if name not in layers}
    kinds = [kind for change in changes for kind in change.kinds]
    if not kinds:
        raise ValueError(
            f"{type(model).__name__} has no attention layer that ds_sparse knows; where it computes it, {BY_HAND}"
        )
    if not any(kind.sparse for kind in kinds):
        reasons = "; ".join(sorted({kind.what for kind in kinds}))
        raise ValueError(f"No attention layer of {type(model).__name__} would be sparse: {reasons}.")
    for change in changes:
        change.on()
    return SparsifyReport(changes)
