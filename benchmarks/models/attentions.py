"""Attentions that a step of BERT is measured with, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_sparse.bench.cases import IN_BERT
from ds_sparse.sparsity import SparsityConfig, sparsity_class

NO_ATTENTION, FLOOR = "none", "floor"
"""Attention that returns the value; with the second the projections of query and key keep their backward."""


def mode_of_block(mode: str, block: int) -> Callable[[int], SparsityConfig]:
    """A mode at its defaults but for the block, random blocks the same at every call, as `IN_BERT` has structures."""
    options: Any = {"seed": 0} if "bigbird" in mode else {}
    return lambda num_heads: sparsity_class(mode)(num_heads=num_heads, block=block, **options)


MODES_IN_BERT = {
    f"{mode}-default-{block}": mode_of_block(mode, block)
    for mode in ("fixed", "variable", "bigbird", "bslongformer", "local_sliding_window", "transformers_bigbird")
    for block in (16, 64)
}
"""Every sparse mode at its defaults, and with blocks of 64."""

STRUCTURES_IN_BERT = IN_BERT | MODES_IN_BERT

EAGER, DENSE_IN_BERT = "eager", "sdpa"
"""Dense attention in parts, and in one operation, as Transformers names them."""

FLEX_IN_BERT = {f"flex-{name}": name for name in IN_BERT}
"""FlexAttention on the layout of a structure."""

GRAPH_IN_BERT = {f"graph-{name}": name for name in IN_BERT}
"""Structures in a step that a CUDA graph repeats."""

OF_STRUCTURES = FLEX_IN_BERT | GRAPH_IN_BERT
"""Structures of all that begin with another word."""

LONGFORMER_MODEL, BIGBIRD_MODEL = "transformers-longformer", "transformers-bigbird"
"""Models of Transformers whose attention is their own."""

BERT_ATTENTIONS: tuple[str, ...] = (
    *(NO_ATTENTION, FLOOR, EAGER, DENSE_IN_BERT, *FLEX_IN_BERT, LONGFORMER_MODEL, BIGBIRD_MODEL),
    *IN_BERT,
)
"""Attentions that a step of BERT is measured with, besides `MODES_IN_BERT`."""

PACKED_ATTENTIONS = (*IN_BERT, *GRAPH_IN_BERT)
"""Attentions of a step of BERT on packed documents: structures eager, and in a CUDA graph."""

OURS, OURS_PADDED = "ds_sparse", "ds_sparse-padded"

MODERNBERT_ATTENTIONS = (
    *(FLOOR, OURS, OURS_PADDED, DENSE_IN_BERT, "sdpa-padded"),
    *("flex_attention", "flash_attention_4", "flash_attention_2"),
)
"""Attentions of a step of ModernBERT: names of Transformers, but for the floor and padded documents."""
