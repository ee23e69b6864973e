"""The models of `ds_sparse bench bert`: BERT with each attention, and Transformers' Longformer and BigBird, all of the
same sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import bert_steps
from benchmarks.models.bert_results import MODELS, Case
from benchmarks.models.no_attention import PROJECTIONS
from ds_sparse.bench.cases import BIGBIRD_MODEL, FLEX_IN_BERT, FLOOR, IN_BERT, LONGFORMER_MODEL
from ds_sparse.bench.peers import FLEX_ON_CPU, FLEX_TILE, compiled_flex
from ds_sparse.bench.reasons import Unsupported
from ds_sparse.extras import optional_imports
from ds_sparse.modules.structured_attention import whole_blocks

with optional_imports():
    import transformers
    from transformers import AttentionInterface, BertForMaskedLM

WINDOW = 512
"""Of Longformer, as its checkpoints have it; no token is global, which is fastest."""

BIGBIRD_BLOCK, BIGBIRD_RANDOM = 64, 3
"""Of BigBird, as its checkpoints have them."""


def model_with(name: str, case: Case, device: torch.device) -> Any:
    """A model with an attention, in training mode, the same numbers at every call.

    Raises:
        Unsupported: the attention does not take the case.
    """
    model = OTHER_MODELS[name](case, device) if name in OTHER_MODELS else bert_with(name, case, device)
    if case.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def make_model(case: Case, device: torch.device, **sizes: int) -> BertForMaskedLM:
    """BERT with the attention that Transformers gives it."""
    return bert_steps.make_model(case, device, **(MODELS[case.model][case.device] | sizes))


def bert_with(name: str, case: Case, device: torch.device) -> BertForMaskedLM:
    model = make_model(case, device)
    switch(model, name)
    return model


def longformer(case: Case, device: torch.device) -> Any:
    # Positions are counted from the number after that of padding.
    sizes = sizes_of(case) | {"max_position_embeddings": case.seq_len + 2, "pad_token_id": 1}
    config = transformers.LongformerConfig(**sizes, attention_window=WINDOW)
    return bert_steps.built(transformers.LongformerForMaskedLM, config, case, device)


def bigbird(case: Case, device: torch.device) -> Any:
    dense_until = (5 + 2 * BIGBIRD_RANDOM) * BIGBIRD_BLOCK
    if case.seq_len <= dense_until:
        raise Unsupported(f"up to {dense_until} tokens it is dense")
    config = transformers.BigBirdConfig(
        **sizes_of(case), attention_type="block_sparse", block_size=BIGBIRD_BLOCK, num_random_blocks=BIGBIRD_RANDOM
    )
    return bert_steps.built(transformers.BigBirdForMaskedLM, config, case, device)


OTHER_MODELS: dict[str, Callable[[Case, torch.device], Any]] = {LONGFORMER_MODEL: longformer, BIGBIRD_MODEL: bigbird}


def sizes_of(case: Case) -> dict[str, Any]:
    """What other models have of BERT's config."""
    names = [
        *("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"),
        *("hidden_act", "max_position_embeddings", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    ]
    config = bert_steps.bert_config(case, **MODELS[case.model][case.device])
    return {name: getattr(config, name) for name in names}


def switch(model: BertForMaskedLM, name: str) -> None:
    """Gives BERT its attention.

    Raises:
        Unsupported: it does not take the model.
    """
    if name in FLEX_IN_BERT:
        set_flex(model, FLEX_IN_BERT[name])
    else:
        bert_steps.switch(model, PROJECTIONS if name == FLOOR else name)


def set_flex(model: BertForMaskedLM, name: str) -> None:
    """FlexAttention on the layout of a structure, compiled at the first step."""
    if model.device.type == "cpu":
        raise Unsupported(FLEX_ON_CPU)
    if model.config.attention_probs_dropout_prob:
        raise Unsupported("it has no dropout")
    config = IN_BERT[name](model.config.num_attention_heads)
    layout = config.make_bool_layout(whole_blocks(model.config.max_position_embeddings, config.block))
    call = compiled_flex(layout.to(model.device), config.block, FLEX_TILE)
    for layer in model.bert.encoder.layer:
        layer.attention.self.ds_sparse_bench_flex = call
    model.set_attn_implementation(_FLEX)


def flex(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return module.ds_sparse_bench_flex(query, key, value).transpose(1, 2).contiguous(), None


_FLEX = "ds_sparse_bench_flex"
AttentionInterface.register(_FLEX, flex)


def versions() -> dict[str, str]:
    return {"transformers": transformers.__version__}
