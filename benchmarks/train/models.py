"""The model of an arm: Transformers' BERT, dense or made sparse as a user makes it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from benchmarks.models.attentions import DENSE_IN_BERT, STRUCTURES_IN_BERT
from benchmarks.models.steps import require_layout
from ds_sparse.models.sparsify import sparsify
from ds_sparse.tools.arguments import UsageError
from ds_sparse.tools.extras import optional_imports

from .results import DENSE, MODELS, Case, short_of

with optional_imports():
    from transformers import BertConfig, BertForMaskedLM

LARGE_BLOCK = {
    "bigbird": "bigbird-64",
    "bslongformer": "longformer-64",
    "fixed": "fixed-default-64",
    "variable": "variable-default-64",
    "local_sliding_window": "local_sliding_window-default-64",
}
"""Modes to what is trained of them, by the names of `python -m benchmarks bert`."""

SMALL_BLOCK = {mode: f"{mode}-default-16" for mode in LARGE_BLOCK}
"""The same where all is small."""

LOCAL_GLOBAL = "local_global"
"""Windows, with each third layer dense, as ModernBERT has them; how wide they are is said by each experiment."""

ATTENTIONS = (DENSE, *LARGE_BLOCK, LOCAL_GLOBAL)


def default_arms(case: Case) -> list[str]:
    """Arms that decide most."""
    short, long = short_of(case), case.document_tokens
    return [f"{DENSE}-{short}", f"{DENSE}-{long}", f"bigbird-{long}", f"bslongformer-{long}"]


@dataclass(frozen=True)
class Attention:
    """An arm's attention, of `ATTENTIONS`, and the tokens of a sequence."""

    kind: str
    length: int


def attention_of(arm: str, kinds: Collection[str] = ATTENTIONS) -> Attention | None:
    """The attention of a name such as bigbird-4096; None for another."""
    kind, _, length = arm.rpartition("-")
    return Attention(kind, int(length)) if kind in kinds and length.isdecimal() and int(length) else None


def require_attention(case: Case, name: str = "", also: str = "") -> None:
    """Raises UsageError where the case's arm, or that of the name, is none of an attention, where its sequences do not
    divide pieces of documents, or where they are too short for its structure. `also` says in words what else is an arm.
    """
    attention = require_arm(case, name or case.arm, ATTENTIONS, also)
    if attention.kind != DENSE:
        # Their windows are as wide.
        kind = "bslongformer" if attention.kind == LOCAL_GLOBAL else attention.kind
        require_layout(structure_name(kind, case), attention.length)


def require_arm(case: Case, name: str, kinds: Sequence[str], also: str = "") -> Attention:
    """The attention of an arm. Raises UsageError where it is none of `kinds`, or its sequences do not divide pieces."""
    attention = attention_of(name, kinds)
    if attention is None:
        known = f"ATTENTION-LENGTH of {', '.join(kinds)}, such as {kinds[1]}-{case.document_tokens}{also}"
        raise UsageError(f"--arms {name}: is no arm of {case.experiment}; give {known}.")
    if case.document_tokens % attention.length:
        raise UsageError(
            f"--arms {name}: sequences of {attention.length} tokens do not divide documents of "
            f"{case.document_tokens}; give --document-tokens a multiple."
        )
    return attention


def structure_name(kind: str, case: Case) -> str:
    """A name in `STRUCTURES_IN_BERT`."""
    return (SMALL_BLOCK if case.quick else LARGE_BLOCK)[kind]


def local_global(case: Case) -> dict[str, Any]:
    """The sparse_attention block of `LOCAL_GLOBAL`: windows of 576 keys, where all is small of 48."""
    return {
        "mode": "local_sliding_window",
        "block": 16 if case.quick else 64,
        "attention": "bidirectional",
        "num_sliding_window_blocks": 3 if case.quick else 9,
        "layers": each_third_dense(case),
    }


def each_third_dense(case: Case) -> dict[str, None]:
    """The block's "layers" of `LOCAL_GLOBAL`."""
    layers = MODELS[case.model]["num_hidden_layers"]
    return {str(layer): None for layer in range(min(2, layers - 1), layers, 3)}


def make_bert(attention: Attention, case: Case, frequencies: Tensor, device: torch.device) -> BertForMaskedLM:
    """BERT without dropout: no text is seen often."""
    config = BertConfig(
        **MODELS[case.model],
        vocab_size=len(frequencies),
        max_position_embeddings=attention.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return make_model(BertForMaskedLM, config, attention, case, frequencies, device)


def make_model(
    kind: Any, config: Any, attention: Attention, case: Case, frequencies: Tensor, device: torch.device
) -> Any:
    """A model of Transformers with new weights in fp32, the same of a seed, and its embeddings with `Neighbours`. It
    begins with the frequencies of its tokens, as `log_frequencies` gives them."""
    torch.manual_seed(case.seed)
    model = kind(config)
    embeddings = model.base_model.embeddings
    embeddings.neighbours = Neighbours(config.hidden_size)
    embeddings.register_forward_hook(lambda module, _, output: module.neighbours(output))
    give_frequencies(model.get_output_embeddings(), frequencies)
    model.to(device)
    give_attention(model, attention.kind, case)
    return model


REACH = 2
"""Tokens on each side."""

LARGEST = 2.0
"""Bound of new weights, which are uniform around 0; with a quarter of it a model takes twice the steps to leave
the unigram cross-entropy."""


class Neighbours(nn.Module):
    """Adds to the vector of each token, (B, T, hidden), a depthwise convolution of those on both sides, as wav2vec 2.0
    does (Baevski et al. 2020, arXiv 2006.11477); causal, of those before.

    Attention that has to find neighbours by absolute positions alone stays near the unigram cross-entropy for more than
    a thousand steps, in which short runs would have nothing to compare. Neighbours begin with twice the weight of the
    token itself, whose vector says nothing where it is masked.
    """

    def __init__(self, hidden: int, causal: bool = False) -> None:
        super().__init__()
        self.places = [place for place in range(REACH if causal else 2 * REACH + 1) if place != REACH]
        self.weight = nn.Parameter(torch.empty(len(self.places), hidden).uniform_(-LARGEST, LARGEST))

    def forward(self, x: Tensor) -> Tensor:
        padded, tokens = pad(x, (0, 0, REACH, REACH)), x.shape[1]
        return x + sum(padded[:, place : place + tokens] * weight for place, weight in zip(self.places, self.weight))


def give_frequencies(last: nn.Linear, frequencies: Tensor) -> None:
    """To a new model, as the bias of its last layer.

    Without, the first hundred steps learn them by turning the vectors of all tokens the same way, and layers that
    normalise what they add keep nothing that differs: a BERT of six layers can stay there.
    """
    with torch.no_grad():
        last.bias.copy_(frequencies)


def give_attention(model: Any, kind: str, case: Case) -> None:
    """Dense attention is PyTorch's."""
    if kind == DENSE:
        model.set_attn_implementation(DENSE_IN_BERT)
    elif kind == LOCAL_GLOBAL:
        sparsify(model, local_global(case))
    else:
        structure = STRUCTURES_IN_BERT[structure_name(kind, case)]
        sparsify(model, structure(MODELS[case.model]["num_attention_heads"]))


class Classifier(nn.Module):
    """Classes from an encoder; it begins with their frequencies."""

    def __init__(self, encoder: Any, frequencies: Tensor) -> None:
        super().__init__()
        self.encoder = encoder
        self.classes = nn.Linear(encoder.config.hidden_size, len(frequencies), device=encoder.device)
        give_frequencies(self.classes, frequencies)

    def of_sequences(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Logits (sequences, classes) from the mean over tokens, of which each sequence has so many."""
        mask = torch.arange(input_ids.shape[1], device=input_ids.device) < lengths[:, None]
        hidden = self.encoder(input_ids=input_ids, attention_mask=mask.long()).last_hidden_state
        logits: Tensor = self.classes((hidden * mask[..., None]).sum(1) / lengths[:, None])
        return logits
