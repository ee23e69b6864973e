"""Transformers: `attn_implementation="ds_sparse"`, through its attention interface and its mask interface.

Importing this module registers both; with the first alone Transformers would drop the padding mask. The structure of a
model is its `config.sparse_attention`, a dict with the keys of the JSON block, which is saved and loaded with the
config. No module and no key of the state dict differs from the dense model's.
"""

from __future__ import annotations

import copy
import functools
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..config import BLOCK_KEY, parse_sparse_attention, sparse_attention_block
from ..extras import optional_imports
from ..modules.bert import VARIANTS
from ..modules.structured_attention import StructuredAttention, of_keys_or_pairs, whole_blocks
from ..sparsity import SparsityConfig
from ..sparsity.draws import Draws, draws, why_unrepeatable
from .pretrained import NAME, layers_by_model, through_interface
from .trial import Refused, Untried
from .trial import run as run_trial

_NOT_COMPUTED = tuple(name for name in VARIANTS if name != "position_bias")

with optional_imports():
    import transformers

MAX_SEQ_LENGTH_KEY = f"{BLOCK_KEY}_max_seq_length"

if int(transformers.__version__.split(".")[0]) < 5:
    raise ImportError(
        f"transformers {transformers.__version__} is installed, and its encoders take no attention from outside before "
        "5.0; install transformers>=5."
    )

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function: sparse self-attention of an encoder's layer.

    Args:
        module: the layer; its `config.sparse_attention` says the structure.
        query: (B, H, T, D), any strides, any T; key, value: alike, or with fewer heads that divide H.
        attention_mask: (B, T) bool, True keeps; or (B, 1 or H, 1 or T, T), where bool keeps and a float is added; a
            float that requires a gradient gets one.
        scaling: factor of the scores, 1 / sqrt(D) by default.
        dropout: probability with which attention probabilities are dropped.
        position_bias: (1 or B, H, T, T), T5's relative positions, added after scaling; it gets a gradient.

    Returns:
        (B, T, H, D), contiguous, and None: there is no matrix of attention probabilities.

    Raises:
        ValueError: a call for what is not computed (the probabilities, causal or cross-attention, ...), no structure,
            a mask of another kind.
        SparseAttentionConfigError: the structure in the config is wrong.
    """
    _refuse_what_is_not_computed(module, query, key, attention_mask, is_causal, more)
    rpe = position_bias
    if attention_mask is not None and attention_mask.requires_grad:
        attention_mask, rpe = None, attention_mask if rpe is None else attention_mask + rpe
    sparse = _attached_to(module).attention
    masks = {**of_keys_or_pairs(attention_mask), "rpe": None if rpe is None else rpe.to(query.dtype)}
    output = sparse(query, key, value, scale=scaling, dropout_p=dropout, **masks)
    return output.transpose(1, 2).contiguous(), None


def _refuse_what_is_not_computed(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    is_causal: bool | None,
    more: Mapping[str, Any],
) -> None:
    asked = [name for name in _NOT_COMPUTED if more.get(name) is not None and more[name] is not False]
    asked += ["output_attentions"] if getattr(module.config, "output_attentions", False) else []
    if asked:
        raise Refused(
            f"{_which(module)} asks the attention for {', '.join(asked)}, which {NAME} does not compute; leave "
            'that out, or use attn_implementation="sdpa" or "eager".'
        )
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    if causal or query.shape[2] != key.shape[2]:
        raise Refused(
            f"{_which(module)} is {'causal' if causal else 'cross-attention, or has cached keys'}, and {NAME} "
            'serves the bidirectional self-attention of encoders; use attn_implementation="sdpa".'
        )
    if attention_mask is not None and attention_mask.is_meta and not query.is_meta:
        raise Refused(
            f"{_which(module)} is given a mask that is causal, windowed, packed or for cross-attention, and "
            f'{NAME} serves the bidirectional self-attention of encoders; use attn_implementation="sdpa".'
        )


def key_padding_mask(
    *,
    batch_size: int,
    kv_length: int,
    mask_function: Callable,
    q_length: int | None = None,
    cache_position: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    allow_is_bidirectional_skip: bool = True,
    **_: Any,
) -> torch.Tensor | None:
    """The mask function: the padding mask (B, T), True keeps, as it is, so that nothing of size T x T exists.

    For another mask than that of bidirectional self-attention, a tensor without data (device "meta"): some models make
    masks that none of their layers takes, and `attention` refuses it.
    """
    q_length = len(cache_position) if q_length is None else q_length  # the first 5.x releases give the positions
    plain = mask_function is bidirectional_mask_function and allow_is_bidirectional_skip and q_length == kv_length
    if not plain or (attention_mask is not None and attention_mask.dim() != 2):
        return torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    return attention_mask


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, key_padding_mask)


def why_not(
    model: PreTrainedModel, layers: Mapping[str, nn.Module], around: Sequence[PreTrainedModel] = ()
) -> str | None:
    """The sentence that says why attention layers of a model cannot be sparse; None where they can, and then every
    forward that raises no error computes them so.

    Args:
        model: the innermost PreTrainedModel around the layers.
        layers: by name.
        around: the models around it; one of them is tried where `model` takes inputs that only they give it.
    """
    name, config = type(model).__name__, model.config
    if not through_interface(model):
        where = f" ({_named(layers)})" if layers else ""
        return f"{name} computes its attention itself{where} and would stay dense; {_WHAT_TO_USE}"
    if not layers:
        return f"{name} has no attention layer that ds_sparse knows by its projections, and would stay dense; {_WHAT_TO_USE}"
    causal = {layer: module for layer, module in layers.items() if getattr(module, "is_causal", False)}
    if causal or any(getattr(config, key, False) for key in _DECODER_KEYS):
        what = f"{_named(causal)} is causal" if causal else "its config has a decoder"
        return f"{name} is no encoder ({what}), and {NAME} serves bidirectional self-attention alone; train it dense."
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        return f"{name} has layers of {', '.join(sorted(kinds))}, a sparse structure of its own; train it as it is."
    foreign = {layer: module for layer, module in layers.items() if getattr(module, "config", None) is not config}
    if foreign:
        return (
            f"{_named(foreign)} of {name} does not read the model's config, where the structure is kept, and would stay "
            "dense; train the model dense."
        )
    if getattr(config, "output_attentions", False):
        return f"{name} has config.output_attentions, and {NAME} computes no attention probabilities; set it to False."
    return _why_not_by_trial(model, layers, around)


def _why_not_by_trial(
    model: PreTrainedModel, layers: Mapping[str, nn.Module], around: Sequence[PreTrainedModel]
) -> str | None:
    name, heads = type(model).__name__, getattr(model.config, "num_attention_heads", None)
    try:
        seen = _heads_in_a_trial(model, around)
    except Refused as refusal:
        return f"{name} cannot be sparse: {refusal}"
    except Untried as error:
        return (
            f"{name} did not run on inputs that ds_sparse made up, to see what its attention does ({error}); give "
            "ds_sparse.sparsify the whole model, or train it dense."
        )
    silent = {layer: module for layer, module in layers.items() if module not in seen}
    if silent:
        return f"{_named(silent)} of {name} did not call the attention function, and would stay dense; {_WHAT_TO_USE}"
    unknown = {layer: module for layer, module in model.named_modules() if module in seen.keys() - set(layers.values())}
    if unknown:
        return (
            f"{name} has an attention that ds_sparse does not know by its projections ({_named(unknown)}); train it "
            "dense."
        )
    other = {layer: module for layer, module in layers.items() if seen[module] != heads}
    if other:
        return (
            f"{_named(other)} of {name} has {seen[next(iter(other.values()))]} attention heads and the config says "
            f"{heads}, for which the structure is made; train it dense."
        )
    return None


def _heads_in_a_trial(model: PreTrainedModel, around: Sequence[PreTrainedModel]) -> dict[nn.Module, int]:
    """The modules of a model that called `attention` in a trial of it, or of one around it, with their number of query
    heads."""
    heads: dict[nn.Module, int] = {}

    def prepare(tried: PreTrainedModel, double: PreTrainedModel) -> None:
        for (name, module), twin in zip(tried.named_modules(), double.modules(), strict=True):
            twin._ds_sparse = _Attached(None, 0, functools.partial(_note, heads, module), name)
            if module is model:
                _set_config(twin.config, {})
                twin.config._attn_implementation_internal = NAME

    problems = []
    for tried in (model, *around):
        heads.clear()
        try:
            run_trial(tried, functools.partial(prepare, tried))
            return heads
        except Untried as error:
            problems.append(error)
    raise problems[0]


def _note(
    heads: dict[nn.Module, int],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Stands for StructuredAttention in a trial."""
    heads[module] = query.shape[1]
    return torch.empty_like(query)


def _which(module: nn.Module) -> str:
    attached = vars(module).get("_ds_sparse")
    return _named({attached.name: module}) if attached is not None and attached.name else type(module).__name__


def _named(layers: Mapping[str, nn.Module]) -> str:
    layer, module = next(iter(layers.items()))
    return f"layer {layer} ({type(module).__name__})"


def _refuse_what_stays_dense(model: PreTrainedModel, layers: Mapping[str, nn.Module]) -> None:
    """Raises ValueError unless these layers of a model that has our name are sparse in every forward."""
    reason = why_not(model, layers)
    if reason is not None:
        raise ValueError(reason)
    with torch.device("cpu"):  # Transformers makes models that it loads on the meta device
        for layer in layers.values():
            _attached_to(layer)


_accepted = PreTrainedModel.get_correct_attn_implementation
_post_init, _set_attn_implementation = PreTrainedModel.post_init, PreTrainedModel.set_attn_implementation


@functools.wraps(_accepted)
def _accepted_where_used(self: PreTrainedModel, requested_attention: str | None, *more: Any, **named: Any) -> str:
    if requested_attention == NAME and not through_interface(self):  # its layers may not even be made by this name
        raise ValueError(why_not(self, {}))
    return _accepted(self, requested_attention, *more, **named)


@functools.wraps(_post_init)
def _post_init_and_check(self: PreTrainedModel) -> None:
    _post_init(self)
    if self.config._attn_implementation == NAME:
        layers = layers_by_model(self)
        if self in layers:  # the models inside it have been checked when they were made
            _refuse_what_stays_dense(self, layers[self])


@functools.wraps(_set_attn_implementation)
def _set_attn_implementation_and_check(
    self: PreTrainedModel, attn_implementation: str | dict, *more: Any, **named: Any
) -> None:
    configs = {id(module.config): module.config for module in self.modules() if isinstance(module, PreTrainedModel)}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        _set_attn_implementation(self, attn_implementation, *more, **named)
        for model, layers in layers_by_model(self).items():
            if attn_implementation == NAME or model.config._attn_implementation == NAME:
                _refuse_what_stays_dense(model, layers)
    except ValueError:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        raise


# Transformers takes a registered name for every model, also for one that never calls the function.
PreTrainedModel.get_correct_attn_implementation = _accepted_where_used
PreTrainedModel.post_init = _post_init_and_check
PreTrainedModel.set_attn_implementation = _set_attn_implementation_and_check


def give_own_configs(model: nn.Module) -> None:
    """Puts copies in the place of the configs in a model: one made by `BertModel(config)` holds its caller's, which
    other models may hold too. What is one config in the model stays one."""
    holders = [module for module in model.modules() if isinstance(vars(module).get("config"), PreTrainedConfig)]
    for module, config in zip(holders, copy.deepcopy([module.config for module in holders]), strict=True):
        module.config = config


class Switch:
    """A Transformers model that `on` makes sparse and `off` dense again.

    Args:
        model: the innermost PreTrainedModel around the layers.
        layers: its attention layers by name.
        around: the Transformers models around it, whose configs are saved; of these, a config of the same class gets
            the structure too (T5's encoder may have a copy).
        structure: for the model's number of heads, with a seed where it draws blocks.
        max_seq_length: tokens that the layout is built for; by default those of the config.

    Raises:
        ValueError: the structure has no layout of that length, or no length is known.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Mapping[str, nn.Module],
        around: Sequence[PreTrainedModel],
        structure: SparsityConfig,
        max_seq_length: int | None = None,
    ):
        self.model, self.layers = model, layers
        self._holders = [model, *(outer for outer in around if type(outer.config) is type(model.config))]
        self._implementation = model.config._attn_implementation
        self.was = [f"{type(layer).__name__}, {self._implementation}" for layer in layers.values()]
        self.now = [f"{type(layer).__name__}, {NAME}" for layer in layers.values()]
        tokens = _max_position(model.config) if max_seq_length is None else max_seq_length
        self.attention = StructuredAttention(structure, whole_blocks(tokens, structure.block))
        self._entries: dict[str, Any] = {} if max_seq_length is None else {MAX_SEQ_LENGTH_KEY: max_seq_length}
        self.not_saved: str | None = None
        """Why the structure cannot be saved with the model; None where it can."""
        try:
            self._entries[BLOCK_KEY] = _reproducible_block(self.attention)
        except ValueError as error:
            self.not_saved = str(error)

    def on(self) -> None:
        configs = {id(holder.config): holder.config for holder in self._holders}.values()
        self._before = [(c, {key: vars(c)[key] for key in _CONFIG_KEYS if key in vars(c)}) for c in configs]
        for config in configs:
            _set_config(config, self._entries)
        _set_attn_implementation(self.model, NAME)
        config = self.model.config
        block, tokens = getattr(config, BLOCK_KEY, None), _tokens(config)
        self._hooks = []
        for name, layer in self.layers.items():
            layer._ds_sparse = _Attached(block, tokens, self.attention, name)
            self._hooks.append(layer.register_forward_hook(_check_is_switched))

    def off(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for layer in self.layers.values():
            del layer._ds_sparse
        for config, entries in self._before:
            _set_config(config, entries)
        self.model.set_attn_implementation(self._implementation)


def structure_of(layer: nn.Module) -> SparsityConfig:
    """The structure of a layer whose config has `attn_implementation="ds_sparse"`."""
    return _attached_to(layer).attention.sparsity_config


_CONFIG_KEYS = (BLOCK_KEY, MAX_SEQ_LENGTH_KEY)
_DECODER_KEYS = ("is_decoder", "add_cross_attention", "is_encoder_decoder")
_WHAT_TO_USE = (
    "use BERT, RoBERTa, XLM-RoBERTa, ELECTRA, DistilBERT, ALBERT or another encoder on Transformers' attention "
    "interface. For BERT code of your own there is "
    "SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention."
)


@dataclass
class _Attached:
    """What the attention function keeps on a layer."""

    block: dict[str, Any] | None  # what the config said when `attention` was made; None: a structure that has no block
    tokens: int
    attention: StructuredAttention
    name: str = ""

    def __post_init__(self):
        self.block = copy.deepcopy(self.block)  # the config's own may be edited in place


_made: weakref.WeakValueDictionary[tuple, StructuredAttention] = weakref.WeakValueDictionary()
"""What layers that say the same share."""


def _attached_to(layer: nn.Module) -> _Attached:
    """What is on a layer, made from its config when it is first used or the config has changed since."""
    config, attached = layer.config, vars(layer).get("_ds_sparse")
    block = getattr(config, BLOCK_KEY, None)
    if attached is not None and attached.block == block and (block is None or attached.tokens == _tokens(config)):
        return attached
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"config.{BLOCK_KEY} has changed since the model was made sparse, and torch.compile cannot trace what makes "
            "a layout of it; call the model once before."
        )
    layer._ds_sparse = _Attached(block, _tokens(config), _attention_for(config, block))
    return layer._ds_sparse


def _attention_for(config: PreTrainedConfig, block: dict[str, Any] | None) -> StructuredAttention:
    if block is None:
        raise ValueError(
            f"{type(config).__name__} has no {BLOCK_KEY}; set it before the model takes the name {NAME}, as in "
            f'config.{BLOCK_KEY} = {{"mode": "fixed", "block": 16}}, or call ds_sparse.sparsify, which does.'
        )
    structure = parse_sparse_attention(block, config.num_attention_heads, source=type(config).__name__)
    tokens = whole_blocks(_tokens(config), structure.block)
    key = (type(structure), json.dumps(block, sort_keys=True), structure.num_heads, tokens)
    attention = _made.get(key)
    if attention is None:
        attention = StructuredAttention(structure, tokens)
        _check_is_repeated(attention)
        _made[key] = attention
    return attention


def _check_is_repeated(attention: StructuredAttention) -> None:
    """Raises ValueError where ranks would draw other blocks, and so would the model when it is loaded."""
    structure = attention.sparsity_config
    how = draws(structure, attention.max_seq_length)
    if how is Draws.UNREPEATABLY:
        raise ValueError(why_unrepeatable(structure))
    if how is Draws.BY_SEED and structure.seed is None:
        raise ValueError(
            f"{type(structure).__name__} has random blocks and no seed, so they would differ between ranks and after "
            f'loading; add one to config.{BLOCK_KEY}, such as "seed": 0.'
        )


def _tokens(config: PreTrainedConfig) -> int:
    """Tokens that the layout of a model is built for, not yet in whole blocks."""
    return getattr(config, MAX_SEQ_LENGTH_KEY, None) or _max_position(config)


def _max_position(config: PreTrainedConfig) -> int:
    tokens = getattr(config, "max_position_embeddings", None)
    if tokens is None:
        raise ValueError(
            f"{type(config).__name__} has no max_position_embeddings, so the length that the layout is to be built for "
            f"is not known; pass max_seq_length to ds_sparse.sparsify, or set config.{MAX_SEQ_LENGTH_KEY}."
        )
    return tokens


def _reproducible_block(attention: StructuredAttention) -> dict[str, Any]:
    """The block that makes this layout again. Raises ValueError where there is none."""
    block = sparse_attention_block(attention.sparsity_config)
    _check_is_repeated(attention)
    return block


def _set_config(config: PreTrainedConfig, entries: dict[str, Any]) -> None:
    for key in _CONFIG_KEYS:
        if key in entries:
            setattr(config, key, entries[key])
        elif key in vars(config):
            delattr(config, key)


def _check_is_switched(layer: nn.Module, arguments: tuple, output: Any) -> None:
    """Forward hook: nobody has switched the layer to another implementation since, with which it has run."""
    attached, implementation = vars(layer).get("_ds_sparse"), layer.config._attn_implementation
    if attached is not None and implementation != NAME:
        raise RuntimeError(
            f"layer {attached.name} ({type(layer).__name__}) ran without {NAME}: its attention implementation is "
            f"{implementation!r}. The model is not sparse; call undo() of what ds_sparse.sparsify returned to train it "
            "dense."
        )
