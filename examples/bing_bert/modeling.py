"""A pre-LayerNorm BERT in the manner of DeepSpeedExamples' bing_bert, its self-attention dense or block-sparse.

Shapes: B batch, T tokens, H heads, D = hidden / H.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ds_sparse

from data import Batch


class BertConfig(BaseModel):
    """The `bert_model_config` of a model JSON."""

    model_config = ConfigDict(extra="forbid", strict=True)

    hidden_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    hidden_act: Literal["gelu", "relu"] = "gelu"
    hidden_dropout_prob: float = Field(0.1, ge=0, lt=1)
    attention_probs_dropout_prob: float = Field(0.1, ge=0, lt=1)
    initializer_range: float = Field(0.02, gt=0)
    type_vocab_size: int = Field(2, ge=1)
    vocab_size: int = Field(8192, ge=8, description="Tokens to train the vocabulary for; the data may need fewer.")
    max_position_embeddings: int = Field(512, ge=1, description="Raised to the sequence length where that is longer.")
    position_convolution: int = Field(0, ge=0, description="Tokens under the convolution of the embeddings; 0 is none.")

    @field_validator("position_convolution")
    @classmethod
    def _is_centred(cls, tokens: int) -> int:
        if tokens and tokens % 2 == 0:
            raise ValueError("has to be odd, as many tokens before each one as after it, or 0")
        return tokens

    @classmethod
    def read(cls, path: str) -> BertConfig:
        """The model of a model JSON; ValueError where there is no such file, it is no JSON, or has a wrong key."""
        try:
            return cls.model_validate(json.loads(Path(path).read_text())["bert_model_config"])
        except OSError as error:
            example = Path(__file__).with_name("bert_tiny.json")
            raise ValueError(f"{path}: {error.strerror}; give a model JSON such as {example}.") from error
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: the key 'bert_model_config' is missing.") from error
        except ValueError as error:  # not JSON, or pydantic's of each key
            raise ValueError(f"{path}: {error}") from error


Padding = torch.Tensor | list[int] | None
"""Padding, in the form that a layer's attention takes: sparse, a mask (B, 1, 1, T) that is added to the scores,
or None where nothing is; dense, the number of tokens of each sequence."""


class BertEmbeddings(nn.Module):
    """Word, position and segment embeddings, summed: (B, T) ids -> (B, T, hidden).

    With `position_convolution`, a depthwise convolution of the sum is added to it, as in wav2vec 2.0 (Baevski et al.
    2020, arXiv 2006.11477): the first layer then knows each token's neighbours. Attention that has to find them by
    absolute positions alone stays near the unigram cross-entropy for more than a thousand steps.
    """

    def __init__(self, config: BertConfig):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=1e-12)
        hidden, width = config.hidden_size, config.position_convolution
        self.convolution = nn.Conv1d(hidden, hidden, width, padding=width // 2, groups=hidden) if width else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, input_ids: torch.Tensor, token_type_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        """`attention_mask` (B, T) is 0 where padding is, which the convolution reads as zeros."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        embeddings = self.word_embeddings(input_ids) + self.position_embeddings(positions)
        embeddings = self.LayerNorm(embeddings + self.token_type_embeddings(token_type_ids))
        if self.convolution is not None:
            text = embeddings * attention_mask[:, :, None].to(embeddings.dtype)
            embeddings = embeddings + self.convolution(text.transpose(1, 2)).transpose(1, 2)
        return self.dropout(embeddings)


class BertSelfAttention(nn.Module):
    """Dense self-attention; `ds_sparse.BertSparseSelfAttention` takes its place in a sparse encoder.

    Where something is padded, each sequence attends by itself, to as many keys as it has tokens. A mask would do that
    in one call, but without the kernel that makes dense attention fast on GPUs: FlashAttention takes no mask.
    """

    def __init__(self, config: BertConfig):
        super().__init__()
        if config.hidden_size % config.num_attention_heads:
            raise ValueError(
                f"hidden_size {config.hidden_size} is not a multiple of num_attention_heads "
                f"{config.num_attention_heads}; change one of them in the model JSON."
            )
        self.num_attention_heads = config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = config.attention_probs_dropout_prob

    def forward(self, hidden_states: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """(B, T, hidden) -> (B, T, hidden); keys after the first `lengths[b]` of sequence b are padding."""
        query, key, value = (
            projection(hidden_states).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        attend = partial(F.scaled_dot_product_attention, dropout_p=self.dropout if self.training else 0.0)
        if min(lengths) == hidden_states.shape[1]:
            context = attend(query, key, value)
        else:
            sequences = zip(query.split(1), key.split(1), value.split(1), lengths)
            context = torch.cat([attend(q, k[:, :, :tokens], v[:, :, :tokens]) for q, k, v, tokens in sequences])
        return context.transpose(1, 2).flatten(2)


class BertAttention(nn.Module):
    """`self` is what sparse encoders swap."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.self = BertSelfAttention(config)
        dense, dropout = nn.Linear(config.hidden_size, config.hidden_size), nn.Dropout(config.hidden_dropout_prob)
        self.output = nn.Sequential(OrderedDict(dense=dense, dropout=dropout))

    def forward(self, hidden_states: torch.Tensor, padding: Padding) -> torch.Tensor:
        return self.output(self.self(hidden_states, padding))


class BertLayer(nn.Module):
    """Pre-LayerNorm: x + attention(norm(x)), then x + feed-forward(norm(x)) (Xiong et al. 2020, arXiv 2002.04745)."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.PreAttentionLayerNorm = nn.LayerNorm(config.hidden_size, eps=1e-12)
        self.attention = BertAttention(config)
        self.PostAttentionLayerNorm = nn.LayerNorm(config.hidden_size, eps=1e-12)
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = {"gelu": F.gelu, "relu": F.relu}[config.hidden_act]
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: torch.Tensor, padding: Padding) -> torch.Tensor:
        hidden_states = hidden_states + self.attention(self.PreAttentionLayerNorm(hidden_states), padding)
        feed_forward = self.output(self.activation(self.intermediate(self.PostAttentionLayerNorm(hidden_states))))
        return hidden_states + self.dropout(feed_forward)


class BertEncoder(nn.Module):
    """The layers; those that have one structure have one layout.

    Args:
        config: the model.
        args: has `max_seq_length` and `checkpoint_activations`.
        sparse_attention_config: the structure of each layer, where None leaves it dense; None is dense attention.
    """

    def __init__(
        self,
        config: BertConfig,
        args: argparse.Namespace,
        sparse_attention_config: Sequence[ds_sparse.SparsityConfig | None] | None = None,
    ):
        super().__init__()
        dense = BertLayer(config)
        layers = {None: dense}
        structures = sparse_attention_config or [None] * config.num_hidden_layers
        for structure in structures:
            if structure not in layers:
                layers[structure] = copy.deepcopy(dense)
                with torch.random.fork_rng(devices=[]):  # dense and sparse models start from the same weights
                    layers[structure].attention.self = ds_sparse.BertSparseSelfAttention(
                        config,
                        sparsity_config=structure,
                        max_seq_length=math.ceil(args.max_seq_length / structure.block) * structure.block,
                    )
        self.layer = nn.ModuleList(copy.deepcopy(layers[structure]) for structure in structures)
        self.FinalLayerNorm = nn.LayerNorm(config.hidden_size, eps=1e-12)
        self.checkpoint_activations = args.checkpoint_activations

    def forward(
        self, hidden_states: torch.Tensor, lengths: list[int], attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Dense layers go by the lengths, sparse ones by the mask."""
        for layer in self.layer:
            is_sparse = isinstance(layer.attention.self, ds_sparse.BertSparseSelfAttention)
            padding = attention_mask if is_sparse else lengths
            if self.checkpoint_activations and self.training:
                hidden_states = checkpoint(layer, hidden_states, padding, use_reentrant=False)
            else:
                hidden_states = layer(hidden_states, padding)
        return self.FinalLayerNorm(hidden_states)


class BertModel(nn.Module):
    """Embeddings and encoder; pads to whole blocks inside when attention is sparse."""

    def __init__(self, config: BertConfig, args: argparse.Namespace):
        super().__init__()
        self.pad_token_id = 0
        self.sparse_attention_config = ds_sparse.get_sparse_attention_layers(
            args, config.num_attention_heads, config.num_hidden_layers
        )
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config, args, sparse_attention_config=self.sparse_attention_config)
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, input_ids: torch.Tensor, token_type_ids: torch.Tensor, attention_mask: torch.Tensor, lengths: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, T) ids and segments -> (B, T, hidden) states, and (B, hidden) of the first token.

        Args:
            attention_mask: (B, T), 0 is padding.
            lengths: the same, as the number of tokens of each sequence.
        """
        if self.sparse_attention_config is None:
            encoded = self.encoder(self.embeddings(input_ids, token_type_ids, attention_mask), lengths)
            return encoded, torch.tanh(self.pooler(encoded[:, 0]))
        utils, embeddings = ds_sparse.SparseAttentionUtils, self.embeddings
        pad_len, input_ids, attention_mask, token_type_ids, _, _ = utils.pad_to_block_size(
            max(structure.block for structure in self.sparse_attention_config if structure),
            input_ids, attention_mask, token_type_ids, None, None, self.pad_token_id, embeddings.word_embeddings,
        )  # fmt: skip
        embedded = embeddings(input_ids, token_type_ids, attention_mask)
        extended_mask = None
        if pad_len or min(lengths) < input_ids.shape[1]:  # attention is faster without a mask
            extended_mask = (1.0 - attention_mask[:, None, None, :].to(embedded.dtype)) * -10000.0
        encoded = utils.unpad_sequence_output(pad_len, self.encoder(embedded, lengths, extended_mask))
        return encoded, torch.tanh(self.pooler(encoded[:, 0]))


class BertForPreTrainingPreLN(nn.Module):
    """Masked-language modelling and next-sentence prediction."""

    def __init__(self, config: BertConfig, args: argparse.Namespace):
        super().__init__()
        # Padding inside the model can reach to the end of the largest block.
        positions = max(config.max_position_embeddings, math.ceil(args.max_seq_length / 128) * 128)
        self.config = config = config.model_copy(update={"max_position_embeddings": positions})
        self.bert = BertModel(config, args)
        self.transform = nn.Linear(config.hidden_size, config.hidden_size)
        self.transform_norm = nn.LayerNorm(config.hidden_size, eps=1e-12)
        self.decoder_bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.seq_relationship = nn.Linear(config.hidden_size, 2)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(0.0, self.config.initializer_range)
            if isinstance(module, nn.Linear):
                module.bias.data.zero_()
        if isinstance(module, BertLayer):
            # Residual branches start small, as deep pre-LayerNorm stacks want (Radford et al. 2019).
            scale = 1 / math.sqrt(2.0 * self.config.num_hidden_layers)
            module.attention.output.dense.weight.data.mul_(scale)
            module.output.weight.data.mul_(scale)

    def forward(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Losses of a batch of B sequences of T tokens.

        Returns:
            loss: mlm_loss + nsp_loss; mlm_loss: mean over the predicted tokens; nsp_loss. Scalars, fp32, nats. In
            evaluation also guesses: (P,), the likeliest token of each predicted position.
        """
        states, pooled = self.bert(batch.input_ids, batch.segment_ids, batch.input_mask, batch.lengths)
        predicted = states.flatten(0, 1)[batch.mlm_positions]
        hidden = self.transform_norm(F.gelu(self.transform(predicted)))
        logits = F.linear(hidden, self.bert.embeddings.word_embeddings.weight, self.decoder_bias)
        mlm_loss = F.cross_entropy(logits.float(), batch.mlm_labels.flatten()[batch.mlm_positions])
        nsp_loss = F.cross_entropy(self.seq_relationship(pooled).float(), batch.nsp_label)
        losses = {"loss": mlm_loss + nsp_loss, "mlm_loss": mlm_loss, "nsp_loss": nsp_loss}
        return losses if self.training else losses | {"guesses": logits.argmax(-1)}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """All parameters, biases and LayerNorm weights without weight decay."""
    decays = ((weight_decay, lambda p: p.dim() > 1), (0.0, lambda p: p.dim() <= 1))
    return [{"params": list(filter(chosen, model.parameters())), "weight_decay": decay} for decay, chosen in decays]
