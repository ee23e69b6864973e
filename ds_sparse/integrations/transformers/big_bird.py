"""BigBird as BERT: the blocks that it trains with."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...block_sizes import BLOCK_SIZES
from ...wording import listed
from .converter import Block, Converter, Weights


class BigBirdConverter(Converter):
    source, target = "BigBird", "Bert"
    heads = ("Model", "ForPreTraining", "ForMaskedLM", "ForTokenClassification", "ForMultipleChoice")
    own_keys = ("attention_type", "block_size", "num_random_blocks", "use_bias", "rescale_embeddings")

    def weights(self, model: PreTrainedModel) -> Weights:
        config: Any = model.config
        if config.rescale_embeddings:
            raise ValueError(
                f"{type(model).__name__} has config.rescale_embeddings, and no BERT scales its word embeddings; it "
                "cannot be converted."
            )
        weights = {key.replace("pooler.", "pooler.dense."): weight for key, weight in model.state_dict().items()}
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and layer.bias is None and name.endswith((".query", ".key", ".value")):
                weights[f"{name}.bias"] = layer.weight.new_zeros(layer.out_features)
        return weights

    def structure(self, model: PreTrainedModel) -> Block:
        config: Any = model.config
        if config.block_size not in BLOCK_SIZES:
            raise ValueError(
                f"{type(model).__name__} has config.block_size {config.block_size}, and blocks have "
                f"{listed(BLOCK_SIZES, 'or')} tokens; give a structure with one of them (sparsity_config, or --config)."
            )
        random_blocks, blocks = config.num_random_blocks, -(-self.longest(model) // config.block_size)
        # Up to so many blocks Transformers attends to all.
        if config.attention_type == "original_full" or blocks <= 5 + 2 * random_blocks:
            return {"mode": "dense", "block": config.block_size}
        structure: Block = {
            "mode": "transformers_bigbird",
            "block": config.block_size,
            "num_random_blocks": random_blocks,
            "seed": 0,
        }
        by_layer = {str(layer): {"seed": layer} for layer in range(1, config.num_hidden_layers)}
        return structure | ({"layers": by_layer} if by_layer else {})
