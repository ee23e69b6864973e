"""Adapting models and batches to block-sparse attention."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad

from .attention_layers import (
    attention_layers,
    layers_by_model,
    models_around,
    pretrained_model_around,
    through_interface,
)
from .bert import BertSparseSelfAttention, check_num_heads
from .config import BLOCK_KEY, parse_sparse_attention
from .layout import density
from .notices import say_notices
from .ranks import say, set_common_seed
from .self_attention import whole_blocks
from .sparsity import FixedSparsityConfig, SparsityConfig, SparsityWarning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUERY_KEY_VALUE = ("query", "key", "value")
_DROPOUTS = (
    "dropout", "dropout_p", "dropout_prob", "attn_dropout", "attention_dropout", "attention_probs_dropout_prob",
)  # fmt: skip

_WITHOUT_TABLE = {"rotary": ("rotary", "rope"), "relative": ("relative", "rel_embeddings", "rel_pos")}
"""Kinds of positions that need no table, by words in the names of the modules that compute them."""


def sparsify(
    model: nn.Module,
    sparsity_config: SparsityConfig | Mapping[str, Any] | None = None,
    *,
    max_seq_length: int | None = None,
) -> SparsifyReport:
    """Makes every attention layer of a model block-sparse. The parameters stay the same objects.

    A Transformers encoder is switched through its attention interface: no module changes, nor a key of the state dict,
    and the structure is written to `model.config.sparse_attention`, which is saved with the model. That config becomes
    a copy, since other models may hold the one that it was made with; so give the whole model, not a base model inside
    it. In other models each layer that holds `query`, `key` and `value`, is called with (hidden_states, attention_mask)
    and returns a tensor, as bing_bert's `attention.self` does, gives its place to a `BertSparseSelfAttention` around
    the same three.

    Args:
        model: a Transformers model, a model in the bing_bert manner, or a module that holds such.
        sparsity_config: the structure, or a dict with the keys of the JSON block; by default what the Transformers
            model's config says, else `FixedSparsityConfig`. Random blocks without a seed get that of the model's
            config, else one that rank 0 draws.
        max_seq_length: tokens that the layout is built for, rounded up to whole blocks; by default
            `config.max_position_embeddings`, and 2048 where a model that is not of Transformers has none.

    Raises:
        SparseAttentionConfigError: the dict is wrong (a ValueError).
        ValueError: a model with a sparse layer, without an attention layer, or with one that would stay dense; a
            structure for another number of heads, or without a layout of this length. Nothing has been changed then.
        TypeError: neither a structure nor a dict.
        RuntimeError: several ranks would draw a seed before torch.distributed runs; later, in a forward, a layer
            that ran without its sparse attention.
    """
    sparse, dense = attention_layers(model)
    _refuse_sparse(model, sparse)
    structures = _Structures(sparsity_config)
    changes = [*_switches(model, structures, max_seq_length), *_swaps(model, dense, structures, max_seq_length)]
    if not changes:
        raise ValueError(
            f"{type(model).__name__} has no attention layer that ds_sparse knows; put ds_sparse.SparseSelfAttention or "
            "ds_sparse.BertSparseSelfAttention in it."
        )
    if pretrained_model_around(model):
        _transformers().give_own_configs(model)
    for change in changes:
        change.on()
    return SparsifyReport(changes)


class Replaced(NamedTuple):
    """An attention layer that `sparsify` made sparse."""

    name: str
    was: str
    now: str


class SparsifyReport:
    """What `sparsify` changed: `replaced` has an entry a layer, `str()` is a table, `undo()` puts the model back. Then
    `replaced` is empty, and the table says what became dense again."""

    def __init__(self, changes: list[Any]):
        self._changes, self._on = changes, True

    @property
    def replaced(self) -> list[Replaced]:
        return [replaced for change in self._changes for replaced in _replaced(change)] if self._on else []

    def undo(self) -> None:
        """Puts modules, config and attention implementation back. A second call changes nothing."""
        if self._on:
            for change in reversed(self._changes):
                change.off()
        self._on = False

    def __str__(self) -> str:
        lines = []
        for change in self._changes:
            attention, count = change.attention, len(change.layers)
            structure = attention.sparsity_config
            layers = f"{count} attention layer{'s' if count > 1 else ''}"
            lines.append(
                f"{f'{layers} made sparse' if self._on else f'undone: {layers} dense again, no longer'}: "
                f"{type(structure).__name__}, block {structure.block}, density {density(attention.layout):.1%} at "
                f"{attention.max_seq_length} tokens"
            )
            rows = [(name, was, now) if self._on else (name, now, was) for name, was, now in _replaced(change)]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines += [f"  {name:{widths[0]}}  {was:{widths[1]}}  ->  {now}" for name, was, now in rows]
        return "\n".join(lines)

    __repr__ = __str__


def _replaced(change: Any) -> list[Replaced]:
    return [Replaced(*entry) for entry in zip(change.layers, change.was, change.now, strict=True)]


class SparseAttentionUtils:
    """Static helpers around a sparse model. Source: DeepSpeed's class of this name."""

    @staticmethod
    def extend_position_embedding(model: nn.Module, max_position: int) -> nn.Module:
        """Makes room for `max_position` tokens in the table of learned positions: position p gets the weights of
        position p mod n of the n that there are.

        In place; the rows that RoBERTa reserves stay in front. The table's parameter is a new one, so make the
        optimizer afterwards. The config and the buffers of position and segment numbers follow.

        Args:
            model: with a head or a base model, that has `embeddings.position_embeddings`: BERT, RoBERTa, XLM-RoBERTa,
                CamemBERT, ELECTRA, DistilBERT, ALBERT and others.

        Returns:
            The model.

        Raises:
            ValueError: a model without such a table, which may need none (rotary and relative positions); fewer tokens
                than there are; a table that ZeRO has partitioned.
        """
        base = _base(model)
        table = _position_table(base)
        if table is None:
            raise ValueError(_why_no_table(model, max_position))
        weight, reserved = table.weight, _reserved_rows(table)
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
        for config in _configs(model, base):
            config.max_position_embeddings = len(extended)
        say(f"extended position embeddings from {positions} to {max_position} tokens.")
        return model

    @staticmethod
    def update_tokenizer_model_max_length(
        tokenizer: PreTrainedTokenizerBase, max_position: int
    ) -> PreTrainedTokenizerBase:
        """Sets the longest sequence of a tokenizer, also in what it saves. Returns the tokenizer."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
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
        """
        base = _base(model)
        layers = getattr(getattr(base, "encoder", None), "layer", None)
        if layers is None:
            raise ValueError(
                'Please extend "update_model_self_attention_to_sparse_self_attention" function to support your model '
                f'type. It currently only supports "bert" & "roberta"! {type(model).__name__} has no encoder.layer.'
            )
        table = _position_table(base)
        if table is not None and table.num_embeddings - _reserved_rows(table) < max_position:
            raise ValueError(
                f"max_position is {max_position}, and the model has {table.num_embeddings - _reserved_rows(table)} "
                "positions; extend_position_embedding(model, max_position) makes room for them first."
            )
        _refuse_sparse(model, attention_layers(model)[0])
        _replace_layers(model.config, layers, sparsity_config, max_position)
        if base in pretrained_model_around(model) and through_interface(base):
            # Its mask is then (batch, tokens), not a matrix of tokens x tokens.
            _transformers().give_own_configs(model)
            base.set_attn_implementation(_transformers().NAME)
        return model

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any, layers: nn.ModuleList, sparsity_config: SparsityConfig | None = None
    ) -> nn.ModuleList:
        """Puts `BertSparseSelfAttention` around `layer.attention.self.query`, `.key` and `.value` of each layer, the
        same modules. All layers share one layout.

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
        return _replace_layers(config, layers, sparsity_config, _max_position(config))

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
            attention_mask: (..., T); bool and integer masks keep where not zero and are filled with 0, float masks are
                added to the scores and are filled with the dtype's lowest number.
            token_type_ids: (B, T), filled with 0.
            position_ids: (B, T), filled with `pad_token_id`.
            inputs_embeds: (B, T, hidden); filled with `model_embeddings` of `pad_token_id`.
            model_embeddings: the word embeddings, for `inputs_embeds` alone. DeepSpeed before 0.7 called it
                `model_mbeddings`.

        Returns:
            The number of tokens added, then the five tensors in this order; None stays None.

        Raises:
            ValueError: neither `input_ids` nor `inputs_embeds` is given; the embeddings by both names.
        """
        if input_ids is None and inputs_embeds is None:
            raise ValueError("input_ids and inputs_embeds are both None; give one of them.")
        if model_embeddings is not None and model_mbeddings is not None:
            raise ValueError("model_embeddings and model_mbeddings are both given; they mean the same, give one.")
        model_embeddings = model_mbeddings if model_embeddings is None else model_embeddings
        batch, seq_len = (input_ids if input_ids is not None else inputs_embeds).shape[:2]
        pad_len = -seq_len % block_size
        if pad_len:
            input_ids = _pad(input_ids, pad_len, pad_token_id)
            position_ids = _pad(position_ids, pad_len, pad_token_id)
            token_type_ids = _pad(token_type_ids, pad_len, 0)
            if attention_mask is not None:
                additive = attention_mask.is_floating_point()
                attention_mask = _pad(attention_mask, pad_len, torch.finfo(attention_mask.dtype).min if additive else 0)
            if inputs_embeds is not None:
                padding = torch.full((batch, pad_len), pad_token_id, dtype=torch.long, device=inputs_embeds.device)
                inputs_embeds = torch.cat([inputs_embeds, model_embeddings(padding)], dim=-2)
        return pad_len, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: torch.Tensor) -> torch.Tensor:
        """Drops the last `pad_len` tokens of (B, T, ...)."""
        return sequence_output[:, : sequence_output.shape[1] - pad_len]


class _Structures:
    """The structure that was asked for, by number of heads, so that all layers of a kind have the same."""

    def __init__(self, wanted: SparsityConfig | Mapping[str, Any] | None):
        self.wanted = wanted
        self._made: dict[tuple[int, int, int | None], SparsityConfig] = {}

    def make(self, num_heads: int, saved: Mapping[str, Any] | None = None) -> SparsityConfig:
        """The structure for so many heads; where none was asked for, that of the block that was saved with the model,
        and where it has no seed, with the seed of that block."""
        wanted = saved if self.wanted is None else self.wanted
        seed = saved.get("seed") if isinstance(saved, Mapping) else None
        key = (id(wanted), num_heads, seed)
        if key not in self._made:
            self._made[key] = _structure(wanted, num_heads, seed)
        return self._made[key]


def _structure(
    wanted: SparsityConfig | Mapping[str, Any] | None, num_heads: int, seed: int | None = None
) -> SparsityConfig:
    if wanted is None:
        return FixedSparsityConfig(num_heads=num_heads)
    if isinstance(wanted, Mapping):
        notices: list[str] = []
        structure = parse_sparse_attention(wanted, num_heads, source=wanted, notices=notices)
        say_notices(notices)
    elif hasattr(wanted, "make_layout") and not isinstance(wanted, type):
        structure = copy.copy(wanted)
    else:
        raise TypeError(
            f"sparsity_config is {type(wanted).__name__}; it has to be a sparsity config, such as FixedSparsityConfig, "
            "or a dict with the keys of the sparse_attention block."
        )
    check_num_heads(structure, num_heads)
    set_common_seed(structure, seed)
    return structure


def _switches(model: nn.Module, structures: _Structures, max_seq_length: int | None) -> list[Any]:
    """The layers that are in Transformers models, all dense, ready to be switched."""
    layers_of = layers_by_model(model)
    for owner, layers in layers_of.items():
        reason = _transformers().why_not(owner, layers, models_around(model, owner))
        if reason is not None:
            raise ValueError(reason)
    switches = []
    for owner, layers in layers_of.items():
        config, hf = owner.config, _transformers()
        structure = structures.make(config.num_attention_heads, getattr(config, BLOCK_KEY, None))
        tokens = max_seq_length
        if structures.wanted is None and tokens is None:
            tokens = getattr(config, hf.MAX_SEQ_LENGTH_KEY, None)
        switches.append(hf.Switch(owner, layers, models_around(model, owner), structure, tokens))
    for reason in dict.fromkeys(switch.not_saved for switch in switches if switch.not_saved):
        warnings.warn(f"The structure is not saved with the model: {reason}", SparsityWarning, stacklevel=3)
    return switches


class _Swap:
    """Layers in the bing_bert manner, alike, whose places `on` gives to BertSparseSelfAttention and `off` gives
    back."""

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module], replacements: list[BertSparseSelfAttention]):
        self.model, self.layers = model, layers
        self.was = [type(layer).__name__ for layer in layers.values()]
        self.now = [BertSparseSelfAttention.__name__] * len(layers)
        self.attention = replacements[0].sparse_self_attention.attention
        self._sparse_for = dict(zip(layers.values(), replacements, strict=True))

    def on(self) -> None:
        _exchange(self.model, self._sparse_for)

    def off(self) -> None:
        for dense, sparse in self._sparse_for.items():
            dense.train(sparse.training)
        _exchange(self.model, {sparse: dense for dense, sparse in self._sparse_for.items()})


def _swaps(
    model: nn.Module, dense: dict[str, nn.Module], structures: _Structures, max_seq_length: int | None
) -> list[_Swap]:
    """Those of the dense layers that are outside Transformers models, ready to be replaced."""
    owners = pretrained_model_around(model)
    alike: dict[tuple[int, int, float], dict[str, nn.Module]] = {}
    for name, layer in dense.items():
        if layer not in owners:
            _check_replaceable(name, layer)
            kind = (_heads(name, layer, structures.wanted), layer.query.out_features, _dropout(name, layer))
            alike.setdefault(kind, {})[name] = layer
    tokens = _max_position(getattr(model, "config", None)) if max_seq_length is None else max_seq_length
    swaps = []
    for (heads, hidden, dropout), layers in alike.items():
        config = SimpleNamespace(hidden_size=hidden, num_attention_heads=heads, attention_probs_dropout_prob=dropout)
        replacements = _around(list(layers.values()), config, structures.make(heads), tokens)
        swaps.append(_Swap(model, layers, replacements))
    return swaps


def _refuse_sparse(model: nn.Module, sparse: Mapping[str, nn.Module]) -> None:
    if sparse:
        raise ValueError(
            f"{next(iter(sparse))} of {type(model).__name__} is sparse already; give the dense model (undo() of what "
            "sparsify returned makes it dense again)."
        )


def _check_replaceable(name: str, layer: nn.Module) -> None:
    """Raises ValueError unless a BertSparseSelfAttention around query, key and value does all that the layer does."""
    what = f"attention layer {name or 'of the model itself'} ({type(layer).__name__})"
    if not name:
        raise ValueError(f"{what} cannot be replaced from inside; pass the module that holds it.")
    projections = [getattr(layer, projection, None) for projection in _QUERY_KEY_VALUE]
    if not all(hasattr(projection, "out_features") for projection in projections):
        raise ValueError(
            f"{what} would stay dense: sparsify replaces layers that hold Linear modules query, key and value; put "
            "ds_sparse.SparseSelfAttention into this one."
        )
    taken = [parameter.name for parameter in inspect.signature(layer.forward).parameters.values()]
    if len(taken) > 1 and "mask" not in taken[1]:
        raise ValueError(
            f"{what} would stay dense: it is called with ({', '.join(taken)}), and sparsify replaces layers that take "
            "(hidden_states, attention_mask); put ds_sparse.SparseSelfAttention into it."
        )
    own = {id(x) for projection in projections for x in (*projection.parameters(), *projection.buffers())}
    more = [key for key, x in (*layer.named_parameters(), *layer.named_buffers()) if id(x) not in own]
    if more or len({projection.out_features for projection in projections}) > 1:
        raise ValueError(
            f"{what} would stay dense: besides the attention of query, key and value of one size it has "
            f"{', '.join(more) or 'projections of several sizes'}; put ds_sparse.SparseSelfAttention into it."
        )


def _heads(name: str, layer: nn.Module, wanted: Any) -> int:
    said = [getattr(layer, attribute, None) for attribute in ("num_attention_heads", "num_heads", "n_heads")]
    said.append(getattr(wanted, "num_heads", None))
    heads = next((number for number in said if isinstance(number, int)), None)
    if heads is None:
        raise ValueError(
            f"attention layer {name} ({type(layer).__name__}) does not say its number of heads (num_attention_heads); "
            "pass sparsify a sparsity config made with num_heads, instead of a dict."
        )
    return heads


def _dropout(name: str, layer: nn.Module) -> float:
    """The probability with which a dense layer drops attention probabilities: its only Dropout, or a number by one of
    the usual names."""
    modules = [module.p for module in layer.modules() if isinstance(module, nn.Dropout)]
    numbers = [x for x in (getattr(layer, attribute, None) for attribute in _DROPOUTS) if isinstance(x, int | float)]
    if len(modules) > 1:
        raise ValueError(
            f"attention layer {name} ({type(layer).__name__}) would stay dense: it has {len(modules)} Dropout modules, "
            "of which one at most can be that of the attention; put ds_sparse.SparseSelfAttention into it."
        )
    return float((modules or numbers or [0.0])[0])


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
    structure = _structure(sparsity_config, config.num_attention_heads)
    replacements = _around([layer.attention.self for layer in layers], config, structure, max_position)
    for layer, replacement in zip(layers, replacements, strict=True):
        layer.attention.self = replacement
    return layers


def _around(
    layers: list[nn.Module], config: Any, structure: SparsityConfig, max_position: int
) -> list[BertSparseSelfAttention]:
    """A sparse layer around the projections of each dense one; they share one layout."""
    tokens = whole_blocks(max_position, structure.block)
    first = BertSparseSelfAttention(config, structure, tokens, projections_of=layers[0])
    sparse = [first, *(first.with_projections_of(layer) for layer in layers[1:])]
    return [replacement.train(layer.training) for replacement, layer in zip(sparse, layers, strict=True)]


def _exchange(model: nn.Module, new_for: Mapping[nn.Module, nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in new_for:
                setattr(parent, name, new_for[child])


def _base(model: nn.Module) -> nn.Module:
    """The encoder with embeddings inside a model with a head, or the model itself."""
    for name in ("bert", "roberta"):
        if hasattr(model, name):
            return getattr(model, name)
    return getattr(model, "base_model", model)


def _configs(model: nn.Module, base: nn.Module) -> list[Any]:
    configs = [module.config for module in (model, base) if hasattr(module, "config")]
    return list({id(config): config for config in configs}.values())


def _max_position(config: Any) -> int:
    return getattr(config, "max_position_embeddings", None) or 2048


def _position_table(base: nn.Module) -> nn.Embedding | None:
    table = getattr(getattr(base, "embeddings", None), "position_embeddings", None)
    return table if isinstance(table, nn.Embedding) else None


def _why_no_table(model: nn.Module, max_position: int) -> str:
    name = type(model).__name__
    for kind, words in _WITHOUT_TABLE.items():
        found = next((path for path, _ in model.named_modules() if any(word in path.lower() for word in words)), None)
        if found is not None:
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


def _reserved_rows(table: nn.Embedding) -> int:
    """Leading rows that belong to no position: RoBERTa numbers positions from padding_idx + 1."""
    return 0 if table.padding_idx is None else table.padding_idx + 1


def _transformers() -> ModuleType:
    """Our side of Transformers, imported for a model of theirs only."""
    from .integrations import transformers

    return transformers


def _pad(x: torch.Tensor | None, pad_len: int, value: float) -> torch.Tensor | None:
    return None if x is None else pad(x, (0, pad_len), value=value)
