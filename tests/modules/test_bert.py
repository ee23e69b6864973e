"""BertSparseSelfAttention: BERT's layer with a sparse core."""

from types import SimpleNamespace

import pytest
import torch

from ds_sparse import BertSparseSelfAttention, DenseSparsityConfig, FixedSparsityConfig, SparseSelfAttention


def config(heads=4, hidden=32, dropout=0.0):
    return SimpleNamespace(hidden_size=hidden, num_attention_heads=heads, attention_probs_dropout_prob=dropout)


def dense_attention(layer, hidden_states, mask=None):
    query, key, value = (
        layer.transpose_for_scores(linear(hidden_states)) for linear in (layer.query, layer.key, layer.value)
    )
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return out.transpose(1, 2).flatten(2)


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


@pytest.mark.parametrize(
    "given, what",
    [({}, "dict"), ({"mode": "fixed"}, "dict"), ("fixed", "str"), (FixedSparsityConfig, "the class Fixed")],
)
def test_what_is_no_structure_is_refused_with_what_to_give(given, what):
    with pytest.raises(TypeError, match=f"sparsity_config is {what}.* it has to be a sparsity config, such as Fixed"):
        BertSparseSelfAttention(config(), given)
    with pytest.raises(TypeError, match=f"sparsity_config is {what}.* parse_sparse_attention.* makes one of a dict"):
        SparseSelfAttention(given)


def test_heads_that_do_not_fit_are_named():
    with pytest.raises(
        ValueError, match=r"The hidden size \(30\) is not a multiple of the number of attention heads \(4\)"
    ):
        BertSparseSelfAttention(config(hidden=30))
    with pytest.raises(ValueError, match="4 attention heads and the sparsity config num_heads=12"):
        BertSparseSelfAttention(config(), FixedSparsityConfig(num_heads=12))


def test_a_call_of_transformers_gets_its_tuple_and_its_masks():
    layer = BertSparseSelfAttention(config(), FixedSparsityConfig(4, num_local_blocks=2), max_seq_length=64)
    hidden_states = torch.randn(2, 50, 32)
    keep = torch.arange(50) < torch.tensor([[50], [30]])
    added = torch.where(keep, 0.0, torch.finfo(torch.float32).min)
    truth = layer(hidden_states, added)
    assert isinstance(truth, torch.Tensor)
    pairs = keep[:, None, None].expand(2, 1, 50, 50)
    for mask in (
        keep,
        keep[:, None, None],
        pairs,
        added,
        added[:, None, None],
        added[:, None, None].expand(2, 1, 50, 50),
    ):
        context, weights = layer(hidden_states, attention_mask=mask, past_key_values=None, position_ids=None)
        torch.testing.assert_close(context, truth)
        assert weights is None
    context, _ = layer(hidden_states, added[:, None, None], None, None, None, None, False)
    torch.testing.assert_close(context, truth)
    assert torch.equal(layer(hidden_states, encoder_hidden_states=None)[0], layer(hidden_states))


def test_a_bool_mask_in_the_old_call_is_added_and_warned_about():
    layer = BertSparseSelfAttention(config(), DenseSparsityConfig(num_heads=4), max_seq_length=64)
    hidden_states, mask = torch.randn(2, 64, 32), torch.rand(2, 64) < 0.5
    with pytest.warns(UserWarning, match="nothing is masked by 0 and 1"):
        out = layer(hidden_states, mask)
    torch.testing.assert_close(out, layer(hidden_states, mask.float()))


def test_of_a_mask_a_head_the_first_counts_for_all():
    layer, hidden_states = BertSparseSelfAttention(config(), max_seq_length=64), torch.randn(2, 64, 32)
    mask = torch.zeros(2, layer.num_attention_heads, 64)
    mask[:, 0, 50:] = -10000.0
    with pytest.warns(UserWarning, match="the first head's counts for all, as in DeepSpeed"):
        out = layer(hidden_states, mask)
    assert torch.equal(out, layer(hidden_states, mask[:, 0]))


def test_a_mask_that_was_not_padded_with_the_tokens_is_an_error():
    layer = BertSparseSelfAttention(config(), max_seq_length=64)
    with pytest.raises(ValueError, match="for 100 tokens and hidden_states has 112.* the mask that it returned"):
        layer(torch.randn(2, 112, 32), torch.zeros(2, 1, 1, 100))


@pytest.mark.parametrize(
    "asked",
    ["head_mask", "encoder_hidden_states", "past_key_values", "output_attentions", "is_causal", "position_bias"],
)
def test_what_the_layer_does_not_compute_is_an_error(asked):
    layer, hidden_states = BertSparseSelfAttention(config(), max_seq_length=64), torch.randn(1, 16, 32)
    with pytest.raises(ValueError, match=f"called with {asked}; it computes bidirectional self-attention"):
        layer(hidden_states, **{asked: True})
    with pytest.raises(ValueError, match="called with argument 4"):
        layer(hidden_states, None, None, hidden_states)


def test_projections_of_another_layer_are_the_same_modules():
    dense = torch.nn.ModuleDict({name: torch.nn.Linear(32, 32) for name in ("query", "key", "value")})
    other = torch.nn.ModuleDict({name: torch.nn.Linear(32, 32) for name in ("query", "key", "value")})
    state = torch.random.get_rng_state()
    layer = BertSparseSelfAttention(config(), max_seq_length=64, projections_of=dense)
    twin = layer.with_projections_of(other)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name in ("query", "key", "value"):
        assert getattr(layer, name) is dense[name] and getattr(twin, name) is other[name]
    assert twin.sparse_self_attention.get_ops(4, 64) == layer.sparse_self_attention.get_ops(4, 64)
    assert twin.state_dict().keys() == layer.state_dict().keys()


def test_the_mode_is_that_of_the_layer_whose_projections_it_has():
    training, evaluated = (
        torch.nn.ModuleDict({name: torch.nn.Linear(32, 32) for name in ("query", "key", "value")}) for _ in range(2)
    )
    evaluated.eval()
    for dense in (training, evaluated):
        first = BertSparseSelfAttention(config(), max_seq_length=64, projections_of=dense)
        for layer in (first, first.with_projections_of(dense)):
            assert all(module.training is dense.training for module in layer.modules())
    assert first.with_projections_of(training).sparse_self_attention.training
