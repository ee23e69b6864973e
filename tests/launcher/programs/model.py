"""The model and the batch of the programs here; none of them knows of ds_sparse."""

import torch
from transformers import BertConfig, BertForMaskedLM


def make_model():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.3,
    )  # fmt: skip
    return BertForMaskedLM(config)


def make_samples(count):
    """Two in turn are of 100 and of 60 tokens."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for number in range(count):
        input_ids = torch.randint(2, 64, (100,), generator=generator)
        attention_mask = torch.ones_like(input_ids)
        attention_mask[60 if number % 2 else 100 :] = 0
        samples.append({"input_ids": input_ids, "attention_mask": attention_mask, "labels": input_ids})
    return samples
