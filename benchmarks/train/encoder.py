"""The BERT of examples/bing_bert on its data, dense, with a static structure, and with blocks that it chooses."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ds_sparse.tools.arguments import UsageError

from . import chosen
from .examples import example
from .models import require_arm
from .results import DENSE, MODELS, Case
from .texts import vocabulary_of
from .trainer import Phase, Task

CORPUS = "stdlib"

HELD_OUT, QUICK_HELD_OUT = 64, 4
"""Sequences at most."""

CONVOLUTION = 5
"""Tokens under that of the embeddings, as in bert_tiny.json."""


def blocks_of(case: Case) -> chosen.Blocks:
    """A token sees as many keys in all, but for those that see all of bigbird's."""
    both = chosen.sizes(case, 8)
    block, number = both.values()
    random = {"num_sliding_window_blocks": 3, "num_global_blocks": 1, "num_random_blocks": number - 4, "seed": 0}
    return {
        "bigbird": {"mode": "bigbird", "block": block, **random},
        "moba": {"mode": "moba", **both, "selection": "block"},
        "indexer": {"mode": "indexer", **both},
    }


def default_arms(case: Case) -> list[str]:
    return chosen.default_arms(case, blocks_of(case))


def require(case: Case) -> None:
    """Raises UsageError where the case's arm is not known, or of another length than documents: the example packs
    documents for a length, so other lengths would have other tokens."""
    chosen.require(case, blocks_of(case))
    if not case.arm.endswith(f"-{case.document_tokens}"):
        raise UsageError(f"--arms {case.arm}: all arms of encoder have sequences of --document-tokens; give that.")


def prepare(case: Case, data: Path) -> None:
    """Makes the tokens, in the examples' cache.

    Raises:
        ValueError: the corpus is too small for the length.
    """
    data_of(case.shared)


@cache
def data_of(case: Case) -> Any:
    """The examples' `PretrainingData`, of a case's length, size and seed."""
    corpus, most = (
        example("tokens").open_corpus(CORPUS, vocabulary_of(case)),
        QUICK_HELD_OUT if case.quick else HELD_OUT,
    )
    return example("data").PretrainingData(corpus, case.document_tokens, case.seed, eval_sequences=most)


class Pretraining(Task):
    """Masked tokens, and whether the second segment follows the first, of which the held-out loss is not."""

    asked = "masked tokens"

    def __init__(self, model: Any, data: Any, case: Case, device: torch.device) -> None:
        self.model, self.data, self.device = model, data, device
        self.tokens_per_step, self.sequences = case.tokens_per_step, case.tokens_per_step // data.sequence_length
        self.batches, self.next_step = iter(()), -1

    def loss(self, step: int) -> Tensor:
        if step != self.next_step:
            self.batches = self.data.batches(self.sequences, self.sequences, step * self.sequences)
        self.next_step = step + 1
        return self.model(next(self.batches).to(self.device))["loss"]

    def evaluate(self) -> float:
        total, predictions = 0.0, 0
        for batch in self.data.held_out_batches(self.sequences):
            total += self.model(batch.to(self.device))["mlm_loss"].item() * len(batch.mlm_positions)
            predictions += len(batch.mlm_positions)
        return total / predictions

    def unigram(self) -> float:
        return self.data.held_out_unigram_cross_entropy

    def measures(self) -> dict[str, float]:
        batch = next(self.data.held_out_batches(1))
        return chosen.measures(self.model, batch=batch.to(self.device))


def phases(case: Case, data: Path, device: torch.device) -> list[Phase]:
    return [partial(make_task, case, device)]


def make_task(case: Case, device: torch.device, before: Any) -> Task:
    data = data_of(replace(case.shared, seed=case.seed))
    return Pretraining(make_encoder(case, data, device), data, case, device)


def make_encoder(case: Case, data: Any, device: torch.device) -> Any:
    """Of the example's JSON and flag, without dropout: no text is seen often. It begins with the frequencies of
    tokens."""
    modeling, vocabulary, tokens = example("modeling"), data.corpus.padded_vocabulary_size, data.sequence_length
    config = modeling.BertConfig(
        **MODELS[case.model],
        vocab_size=vocabulary,
        max_position_embeddings=tokens,
        position_convolution=CONVOLUTION,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    kind = require_arm(case, case.arm, (DENSE, *blocks_of(case))).kind
    args = Namespace(
        max_seq_length=tokens,
        checkpoint_activations=False,
        deepspeed_sparse_attention=kind != DENSE,
        deepspeed_config={} if kind == DENSE else {"sparse_attention": blocks_of(case)[kind]},
    )
    torch.manual_seed(case.seed)
    model = modeling.BertForPreTrainingPreLN(config, args)
    frequencies = data.unigram_log_probabilities
    bias = pad(frequencies, (0, vocabulary - len(frequencies)), value=frequencies.min().item())
    model.decoder_bias.data.copy_(bias)
    return model.to(device)
