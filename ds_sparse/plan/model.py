"""The model that is planned for: its sizes, by name or from a config.json of Transformers, and its family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..tools.arguments import UsageError
from ..tools.wording import listed, reason, show


@dataclass(frozen=True)
class Family:
    """Traits of a family of models: what its layers compute around their products, in eager PyTorch.

    Attributes:
        gated: the feed-forward part multiplies two projections (GeGLU, SwiGLU).
        biases: linear layers have them.
        rms_norm: norms are RMS norms, computed in fp32 step by step.
        rotary: part of the numbers of a head that are rotated by position.
        learned_positions: the model has a table of them.
        transform: a linear layer and a norm before the logits.
        logits_in_fp32: the loss is computed of logits that are made fp32 first.
        labelled: part of the tokens whose logits are computed.
        causal: attention sees no later tokens.
        measured: whether steps of it are among the committed results.
    """

    gated: bool = False
    biases: bool = True
    rms_norm: bool = False
    rotary: float = 0.0
    learned_positions: bool = True
    transform: bool = True
    logits_in_fp32: bool = False
    labelled: float = 1.0
    causal: bool = False
    measured: bool = False


_LIKE_BERT = Family(measured=True)
_ROTARY: dict[str, Any] = {"learned_positions": False, "logits_in_fp32": True}
_GATED: dict[str, Any] = _ROTARY | {"gated": True, "biases": False, "rotary": 1.0}
_DECODER: dict[str, Any] = _ROTARY | {"transform": False, "causal": True}
FAMILIES = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), _LIKE_BERT),
    "bing_bert": replace(_LIKE_BERT, logits_in_fp32=True, labelled=0.15),
    "modernbert": Family(**_GATED, measured=True),
    "gpt_neox": Family(**_DECODER, rotary=0.25),
    "llama": Family(**(_GATED | _DECODER), rms_norm=True),
}
"""Families by the `model_type` of a config.json; "bing_bert" is the model of examples/bing_bert, which predicts
15 % of the tokens."""


@dataclass(frozen=True)
class Model:
    """Attributes:
    family: of `FAMILIES`.
    key_heads: heads of keys and values; fewer than `heads` where groups of query heads share them.
    positions: rows of the table of learned positions; 0 without one. A longer sequence makes the table longer.
    tied: the logits' weight is that of the embeddings.
    predicted: part of the tokens whose logits are computed; None: as its family does.
    windows: for each layer the tokens on either side that it sees by the model's own window; None for the layers that
        get the structure.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    positions: int = 0
    dropout: float = 0.0
    attention_dropout: float = 0.0
    tied: bool = True
    predicted: float | None = None
    windows: tuple[int | None, ...] = ()

    @property
    def does(self) -> Family:
        return FAMILIES[self.family]

    @property
    def labelled(self) -> float:
        """Part of the tokens whose logits are computed."""
        return self.does.labelled if self.predicted is None else self.predicted

    @property
    def attention_width(self) -> int:
        """Numbers of a token in query."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Numbers of a token in key, and in value."""
        return self.key_heads * self.head_dim

    def table(self, seq_len: int) -> int:
        """Rows of its table of positions for sequences of so many tokens."""
        return max(self.positions, seq_len) if self.does.learned_positions else 0

    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        biases, ups = int(self.does.biases), 2 if self.does.gated else 1
        width = self.attention_width + 2 * self.key_width
        attention = self.hidden * width + biases * width + self.attention_width * self.hidden + biases * self.hidden
        feed_forward = (ups + 1) * self.hidden * self.intermediate + biases * (ups * self.intermediate + self.hidden)
        return attention + feed_forward + 2 * (1 + biases) * self.hidden

    def parameters(self, seq_len: int) -> int:
        """Parameters of the whole model, for sequences of so many tokens."""
        biases = int(self.does.biases)
        norm = (1 + biases) * self.hidden
        embeddings = (self.vocabulary + self.table(seq_len) + 2 * self.does.learned_positions) * self.hidden
        head = 0 if self.tied else self.vocabulary * self.hidden
        if self.does.transform:
            head += self.vocabulary + self.hidden**2 + biases * self.hidden + norm
        return embeddings + norm + self.layers * self.layer_parameters() + head


def find_model(given: str, model_type: str | None = None, **changes: Any) -> Model:
    """The model of a name, or of a config.json.

    Args:
        given: one of `NAMED`, or a path: a config.json of Transformers, or a model's JSON of examples/bing_bert.
        model_type: the family, where the file does not name it.
        changes: fields to replace, those that are not None.

    Raises:
        ValueError: no such name or file; a family that is not known; sizes that are missing or make no heads.
    """
    if model_type is not None and model_type not in FAMILIES:
        raise UsageError(f"--model-type {model_type}: plan knows {listed(FAMILIES, 'and')}.")
    if model_type is not None and given in NAMED:
        raise UsageError(f"--model-type {model_type} beside --model {given}, which has one; leave --model-type out.")
    model = NAMED.get(given) or _from_file(given, model_type)
    return replace(model, **{name: value for name, value in changes.items() if value is not None})


def _from_file(path: str, model_type: str | None) -> Model:
    file = Path(path)
    try:
        content = json.loads((file / "config.json" if file.is_dir() else file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"--model {path}: no such file, and not one of {listed(NAMED, 'or')}; give one of these, or a config.json."
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {path}: cannot be read as JSON: {reason(error)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"--model {path}: a config.json is an object {{...}}, got {show(content)}.")
    if "bert_model_config" in content:
        if model_type is not None:
            raise UsageError(
                f"--model-type {model_type} beside --model {path}, a model of bing_bert; leave --model-type out."
            )
        content, model_type = content["bert_model_config"], "bing_bert"
    family = model_type or content.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"--model {path}: model_type is {show(family)}; plan knows {listed(FAMILIES, 'and')}. "
            "Give the one that it is like with --model-type."
        )
    try:
        return model_of_config(path, family, content)
    except KeyError as error:
        raise ValueError(f"--model {path}: the key {error} is missing; a config.json of {family} has it.") from None
    except TypeError as error:
        raise ValueError(f"--model {path}: a size is no number: {error}.") from None


def model_of_config(name: str, family: str, config: Mapping[str, Any]) -> Model:
    """The model of the keys of a config.json.

    Raises:
        KeyError: a size is missing.
        TypeError: a size is no number.
        ValueError: sizes that make no heads.
    """
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    if "head_dim" not in config and hidden % heads:
        raise ValueError(f"--model {name}: hidden_size {hidden} is not a multiple of {heads} heads.")
    layers = _size(config, "num_hidden_layers")
    return Model(
        name=name,
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        intermediate=_size(config, "intermediate_size"),
        vocabulary=_size(config, "vocab_size"),
        positions=config.get("max_position_embeddings", 0) if FAMILIES[family].learned_positions else 0,
        dropout=_first(config, "hidden_dropout_prob", "hidden_dropout", "mlp_dropout"),
        attention_dropout=_first(config, "attention_probs_dropout_prob", "attention_dropout"),
        tied=bool(config.get("tie_word_embeddings", FAMILIES[family].transform)),
        windows=_windows(config, layers) if family == "modernbert" else (),
    )


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise TypeError(f"{key} is {show(value)}")
    return value


def _first(config: Mapping[str, Any], *keys: str) -> float:
    return next((float(config[key]) for key in keys if config.get(key) is not None), 0.0)


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """ModernBERT's local layers: a window of `local_attention` tokens in all, but in every so many."""
    every, side = config.get("global_attn_every_n_layers", 3), config.get("local_attention", 128) // 2
    kinds = config.get("layer_types")
    of_layer = (kinds[i] == "full_attention" if kinds else i % every == 0 for i in range(layers))
    return tuple(None if whole else side for whole in of_layer)


def _named(name: str, family: str, layers: int, hidden: int, heads: int, inner: int, words: int, **more: Any) -> Model:
    return Model(name, family, layers, hidden, heads, heads, hidden // heads, inner, words, **more)


_BERT: dict[str, Any] = {"positions": 512, "dropout": 0.1, "attention_dropout": 0.1}
_NAMED = (
    _named("bert-base", "bert", 12, 768, 12, 3072, 30522, **_BERT),
    _named("bert-large", "bert", 24, 1024, 16, 4096, 30522, **_BERT),
    _named("modernbert-base", "modernbert", 22, 768, 12, 1152, 50368, windows=_windows({}, 22)),
    _named("bing_bert-base", "bing_bert", 12, 768, 12, 3072, 30528, **_BERT),
    _named("neox-small", "gpt_neox", 8, 512, 8, 2048, 256, tied=False),
)
NAMED = {model.name: model for model in _NAMED}
"""Models that need no file; the last two are those of examples/bing_bert and examples/gpt_neox."""
