"""SparseAttentionUtils: DeepSpeed's static helpers, which adapt models and batches to block-sparse attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import pad

from ..modules.structured_attention import check_tokens
from ..sparsity import SparsityConfig
from ..tools.ranks import say
from .families import families
from .families._plain import longest_sequence
from .families.bing_bert import around
from .layers import attention_layers, refuse_sparse
from .position_table import base_model, configs, position_table, reserved_rows, why_no_table
from .structures import Structures

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SparseAttentionUtils:
    """Static helpers around a sparse model. Source: DeepSpeed's class of this name.

    Examples:
        >>> import torch
        >>> import transformers
        >>> from ds_sparse import FixedSparsityConfig, SparseAttentionUtils
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        >>> model = transformers.BertModel(transformers.BertConfig(vocab_size=50, max_position_embeddings=64, **sizes))
        >>> model = SparseAttentionUtils.extend_position_embedding(model, 128)
        ds_sparse: extended position embeddings from 64 to 128 tokens.
        >>> structure = FixedSparsityConfig(num_heads=2, block=16)
        >>> model = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(model, 128, structure)
        >>> input_ids, mask = torch.full((2, 90), 7), torch.ones(2, 90)
        >>> pad_len, input_ids, mask, *_ = SparseAttentionUtils.pad_to_block_size(
        ...     16, input_ids, mask.long(), None, None, None, pad_token_id=0
        ... )
        >>> pad_len, input_ids.shape
        (6, torch.Size([2, 96]))
        >>> output = model(input_ids, attention_mask=mask).last_hidden_state
        >>> SparseAttentionUtils.unpad_sequence_output(pad_len, output).shape
        torch.Size([2, 90, 32])
    """

    @staticmethod
    def extend_position_embedding(model: nn.Module, max_position: int) -> nn.Module:
        """Makes room for more tokens in the table of learned positions.

        Position p gets the weights of position p mod n of the n that there are. In place; the rows that RoBERTa
        reserves stay in front. The table's parameter is a new one, so make the optimizer afterwards. The config and the
        buffers of position and segment numbers follow.

        Args:
            model: with a head or a base model, that has `embeddings.position_embeddings`: BERT, RoBERTa, XLM-RoBERTa,
                CamemBERT, ELECTRA, DistilBERT, ALBERT and others.
            max_position: maximum length of the model afterwards, in tokens.

        Returns:
            The model.

        Raises:
            ValueError: a model without such a table, which may need none (rotary and relative positions); fewer tokens
                than there are; a table that ZeRO has partitioned.
            TypeError: a `max_position` that is no integer.
        """
        check_tokens("max_position", max_position)
        base: Any = base_model(model)
        table = position_table(base)
        if table is None:
            raise ValueError(why_no_table(model, max_position))
        weight, reserved = table.weight, reserved_rows(table)
        if len(weight) != table.num_embeddings or hasattr(weight, "ds_id"):  # which ZeRO 3 gives its parameters
            raise ValueError(
                f"the table of positions is partitioned (here {tuple(weight.shape)}, {table.num_embeddings} rows in "
                "all); extend it before deepspeed.zero.Init or deepspeed.initialize."
            )
        positions = len(weight) - reserved
        if max_position < positions:
            raise ValueError(f"max_position is {max_position}, and there are {positions} positions; ask for more.")
        if max_position == positions:
            return model
        rows = torch.arange(max_position, device=weight.device) % positions + reserved
        with torch.no_grad():
            extended = torch.cat([weight[:reserved], weight[rows]])
        table.weight = nn.Parameter(extended, requires_grad=weight.requires_grad)
        table.num_embeddings = len(extended)
        numbers = {"position_ids": torch.arange(len(extended)), "token_type_ids": torch.zeros(len(extended))}
        for name, buffer in base.embeddings.named_buffers(recurse=False):
            if name in numbers:
                setattr(base.embeddings, name, numbers[name].to(buffer).expand(1, -1))
        for config in configs(model, base):
            config.max_position_embeddings = len(extended)
        say(f"extended position embeddings from {positions} to {max_position} tokens.")
        return model

    @staticmethod
    def update_tokenizer_model_max_length(
        tokenizer: PreTrainedTokenizerBase, max_position: int
    ) -> PreTrainedTokenizerBase:
        """Sets the longest sequence of a tokenizer, also in what it saves.

        Args:
            tokenizer: one of Transformers.
            max_position: tokens.

        Returns:
            The tokenizer.
        """
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        truncation = getattr(backend, "truncation", None)
        if truncation is not None:  # which its file keeps, for those who read it without Transformers
            backend.enable_truncation(**truncation | {"max_length": max_position})
        say(f"updated tokenizer model maximum length to {max_position}.")
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: nn.Module, max_position: int, sparsity_config: SparsityConfig | None = None
    ) -> nn.Module:
        """Puts `BertSparseSelfAttention` around the projections of each layer of a BERT or RoBERTa model.

        `ds_sparse.sparsify` does this through Transformers' attention interface, without other modules or keys in the
        state dict, and can be undone.

        Args:
            model: with a head (`model.bert`, `model.roberta`), or a base model with `encoder.layer`.
            max_position: tokens that the layout is built for, rounded up to whole blocks.
            sparsity_config: the structure; by default `FixedSparsityConfig` for the model's number of heads.

        Returns:
            The model.

        Raises:
            ValueError: another kind of model, a decoder, one that is sparse already, one whose config asks for
                attention probabilities, a structure for another number of heads, or a table of positions for fewer
                tokens than `max_position`.
            TypeError: a `max_position` that is no integer.
        """
        check_tokens("max_position", max_position)
        base = base_model(model)
        layers = getattr(getattr(base, "encoder", None), "layer", None)
        if layers is None:
            raise ValueError(
                'Please extend "update_model_self_attention_to_sparse_self_attention" function to support your model '
                f'type. It currently only supports "bert" & "roberta"! {type(model).__name__} has no encoder.layer.'
            )
        table = position_table(base)
        if table is not None and table.num_embeddings - reserved_rows(table) < max_position:
            raise ValueError(
                f"max_position is {max_position}, and the model has {table.num_embeddings - reserved_rows(table)} "
                "positions; extend_position_embedding(model, max_position) makes room for them first."
            )
        refuse_sparse(model, attention_layers(model).sparse)
        _replace_layers(model.config, layers, sparsity_config, max_position)
        for family in families():
            family.adapt_replaced(model, base)
        return model

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any, layers: nn.ModuleList, sparsity_config: SparsityConfig | None = None
    ) -> nn.ModuleList:
        """Puts `BertSparseSelfAttention` around the projections of each layer, as the modules that they are.

        They are `layer.attention.self.query`, `.key` and `.value`. All layers share one layout.

        Args:
            config: the model's; the layout is built for its `max_position_embeddings`, or 2048 tokens without.
            layers: each has `attention.self`.
            sparsity_config: the structure; by default `FixedSparsityConfig` for the model's number of heads.

        Returns:
            The layers.

        Raises:
            ValueError: a decoder, a config that asks for attention probabilities, a structure for another number of
                heads.
        """
        return _replace_layers(config, layers, sparsity_config, longest_sequence(config))

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        token_type_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        pad_token_id: int,
        model_embeddings: nn.Module | None = None,
        *,
        model_mbeddings: nn.Module | None = None,
    ) -> tuple[
        int, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None
    ]:
        """Pads the inputs of an encoder on the right, to a multiple of the block.

        Args:
            block_size: tokens on a block's side.
            input_ids: (B, T), or None when `inputs_embeds` is given; filled with `pad_token_id`.
            attention_mask: (..., T); bool and integer masks keep where not zero and are filled with 0, and so are float
                masks of 0 and 1 alone that have a 1; other float masks are added to the scores, and are filled with
                the dtype's lowest number.
            token_type_ids: (B, T), filled with 0.
            position_ids: (B, T), filled with `pad_token_id`.
            inputs_embeds: (B, T, hidden); filled with `model_embeddings` of `pad_token_id`.
            pad_token_id: the number of the padding token.
            model_embeddings: the word embeddings, for `inputs_embeds` alone.
            model_mbeddings: the same, as DeepSpeed before 0.7 called it.

        Returns:
            The number of tokens added, then the five tensors in this order; None stays None.

        Raises:
            ValueError: neither `input_ids` nor `inputs_embeds` is given; the embeddings by both names; `inputs_embeds`
                that are to be padded without embeddings.
        """
        given = inputs_embeds if input_ids is None else input_ids
        if given is None:
            raise ValueError("input_ids and inputs_embeds are both None; give one of them.")
        if model_embeddings is not None and model_mbeddings is not None:
            raise ValueError("model_embeddings and model_mbeddings are both given; they mean the same, give one.")
        model_embeddings = model_mbeddings if model_embeddings is None else model_embeddings
        batch, seq_len = given.shape[:2]
        pad_len = -seq_len % block_size
        if pad_len:
            input_ids = _pad(input_ids, pad_len, pad_token_id)
            position_ids = _pad(position_ids, pad_len, pad_token_id)
            token_type_ids = _pad(token_type_ids, pad_len, 0)
            if attention_mask is not None:
                attention_mask = _pad_mask(attention_mask, pad_len)
            if inputs_embeds is not None:
                if model_embeddings is None:
                    raise ValueError(
                        "inputs_embeds is given without model_embeddings, of which its padding is made; give both."
                    )
                padding = torch.full((batch, pad_len), pad_token_id, dtype=torch.long, device=inputs_embeds.device)
                inputs_embeds = torch.cat([inputs_embeds, model_embeddings(padding)], dim=-2)
        return pad_len, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: torch.Tensor) -> torch.Tensor:
        """Drops the tokens that `pad_to_block_size` added.

        Args:
            pad_len: how many.
            sequence_output: (B, T, ...).

        Returns:
            (B, T - pad_len, ...), a view.
        """
        return sequence_output[:, : sequence_output.shape[1] - pad_len]


def _pad_mask(mask: torch.Tensor, pad_len: int) -> torch.Tensor:
    """Padding that no query sees. What a float mask is, its numbers say; they are not waited for on a device."""
    fill = torch.zeros((), dtype=mask.dtype, device=mask.device)
    if mask.is_floating_point():
        keeps = ((mask == 0) | (mask == 1)).all() & mask.any()
        fill = torch.where(keeps, fill, torch.finfo(mask.dtype).min)
    return torch.cat([mask, fill.expand(*mask.shape[:-1], pad_len)], dim=-1)


def _replace_layers(
    config: Any, layers: nn.ModuleList, sparsity_config: SparsityConfig | None, max_position: int
) -> nn.ModuleList:
    if getattr(config, "is_decoder", False):
        raise ValueError(
            f"this {type(config).__name__} is a decoder's, and BertSparseSelfAttention serves the bidirectional "
            "self-attention of encoders; leave its layers dense."
        )
    if getattr(config, "output_attentions", False):
        raise ValueError(
            f"this {type(config).__name__} has output_attentions, and BertSparseSelfAttention computes no attention "
            "probabilities; set it to False."
        )
    structure = Structures(sparsity_config).make(config.num_attention_heads)
    attentions: list[Any] = [layer.attention for layer in layers]
    replacements = around([attention.self for attention in attentions], config, structure, max_position)
    for attention, replacement in zip(attentions, replacements, strict=True):
        attention.self = replacement
    return layers


def _pad(x: torch.Tensor | None, pad_len: int, value: float) -> torch.Tensor | None:
    return None if x is None else pad(x, (0, pad_len), value=value)
