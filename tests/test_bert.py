"""BertSparseSelfAttention: BERT's layer with a sparse core."""

from types import SimpleNamespace

import pytest
import torch

from ds_sparse import BertSparseSelfAttention, DenseSparsityConfig, FixedSparsityConfig


def config(heads=4, hidden=32, dropout=0.0):
    return SimpleNamespace(hidden_size=hidden, num_attention_heads=heads, attention_probs_dropout_prob=dropout)


def dense_attention(layer, hidden_states, mask=None):
    query, key, value = (layer.transpose_for_scores(linear(hidden_states)) for linear in (layer.query, layer.key, layer.value))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return out.transpose(1, 2).flatten(2)


def test_equals_dense_attention_with_a_dense_layout_and_padding():
    layer = BertSparseSelfAttention(config(), DenseSparsityConfig(num_heads=4), max_seq_length=64)
    hidden_states = torch.randn(2, 64, 32)
    mask = torch.zeros(2, 1, 1, 64)
    mask[0, ..., 50:] = -10000.0
    torch.testing.assert_close(layer(hidden_states, mask), dense_attention(layer, hidden_states, mask))


@pytest.mark.parametrize("tokens", [1, 50, 64, 100])
@pytest.mark.parametrize("masked", [False, True])
def test_any_length_is_taken(tokens, masked):
    layer = BertSparseSelfAttention(config(), DenseSparsityConfig(num_heads=4), max_seq_length=64)
    hidden_states = torch.randn(2, tokens, 32)
    mask = torch.where(torch.arange(tokens) < max(1, tokens - 3), 0.0, -10000.0).expand(2, 1, 1, -1) if masked else None
    torch.testing.assert_close(layer(hidden_states, mask), dense_attention(layer, hidden_states, mask))


def test_default_structure_follows_the_model():
    layer = BertSparseSelfAttention(config(heads=8))
    assert isinstance(layer.sparse_self_attention.sparsity_config, FixedSparsityConfig)
    assert layer.sparse_self_attention.sparsity_config.num_heads == 8
    assert layer.sparse_self_attention.max_seq_length == 2048


def test_state_dict_keys_are_deepspeeds():
    keys = set(BertSparseSelfAttention(config()).state_dict())
    assert keys == {
        *(f"{name}.{kind}" for name in ("query", "key", "value") for kind in ("weight", "bias")),
        "sparse_self_attention.master_layout",
    }


def test_attention_dropout_of_the_model_is_applied():
    layer = BertSparseSelfAttention(config(dropout=0.5), max_seq_length=64)
    hidden_states = torch.randn(1, 64, 32)
    assert not torch.equal(layer(hidden_states), layer(hidden_states))
    layer.eval()
    assert torch.equal(layer(hidden_states), layer(hidden_states))


def test_heads_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"The hidden size \(30\) is not a multiple of the number of attention heads \(4\)"):
        BertSparseSelfAttention(config(hidden=30))
    with pytest.raises(ValueError, match="4 attention heads and the sparsity config num_heads=12"):
        BertSparseSelfAttention(config(), FixedSparsityConfig(num_heads=12))
