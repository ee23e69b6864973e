"""The models of `--experiment dna`: BERT with rotary positions, which predicts masked bases, then the class of each."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ds_sparse.extras import optional_imports

from .dna_data import IGNORED
from .dna_genomes import PAD, VOCABULARY
from .models import Attention, give_frequencies, make_model
from .settings import MODELS, Settings

with optional_imports():
    from transformers import NomicBertConfig, NomicBertForMaskedLM, NomicBertModel

ROPE_THETA = 10_000.0
"""The slowest of the rotary angles has then a period of about 63,000 bases."""


def make_masked(
    attention: Attention, settings: Settings, frequencies: Tensor, seed: int, device: torch.device
) -> NomicBertForMaskedLM:
    """With new weights in fp32, the same of a seed, and without dropout. It begins with the frequencies of its tokens,
    as `log_frequencies` gives them."""
    config = NomicBertConfig(
        **MODELS[settings.model],
        vocab_size=VOCABULARY,
        pad_token_id=PAD,
        type_vocab_size=1,
        max_position_embeddings=attention.length,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
    )
    return make_model(NomicBertForMaskedLM, config, attention, settings, frequencies, seed, device)


class GeneModel(nn.Module):
    """Classes of bases from an encoder; it begins with their frequencies."""

    def __init__(self, encoder: NomicBertModel, frequencies: Tensor) -> None:
        super().__init__()
        self.encoder = encoder
        self.classes = nn.Linear(encoder.config.hidden_size, len(frequencies), device=encoder.device)
        give_frequencies(self.classes, frequencies)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits (sequences, bases, classes) of int64 tokens (sequences, bases)."""
        logits: Tensor = self.classes(self.encoder(input_ids=input_ids).last_hidden_state)
        return logits


def loss_of(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy, nats, of the bases that have a label."""
    return cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction)
