"""Which modules are attention layers, and which of them are sparse."""

import pytest
import transformers
from torch import nn

import ds_sparse
from ds_sparse.attention_layers import attention_layers

BERT = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@pytest.mark.parametrize(
    "names",
    [
        ("query", "key", "value"),
        ("q_proj", "k_proj", "v_proj"),
        ("q_lin", "k_lin", "v_lin"),
        ("q", "k", "v"),
        ("query_proj", "key_proj", "value_proj"),
        ("c_attn",),
        ("Wqkv",),
    ],
)
def test_projections_make_a_dense_layer(names):
    layer = nn.ModuleDict({name: nn.Linear(2, 2) for name in names} | {"out": nn.Linear(2, 2)})
    sparse, dense = attention_layers(nn.ModuleDict({"layer": layer, "other": nn.Linear(2, 2)}))
    assert sparse == {} and dense == {"layer": layer}


def test_torchs_own_layer_is_dense_and_ours_are_sparse():
    theirs = nn.MultiheadAttention(32, 4)
    config = transformers.BertConfig(**BERT)
    ours = ds_sparse.BertSparseSelfAttention(config, ds_sparse.FixedSparsityConfig(4))
    sparse, dense = attention_layers(nn.ModuleDict({"theirs": theirs, "ours": ours}))
    assert dense == {"theirs": theirs} and sparse == {"ours.sparse_self_attention": ours.sparse_self_attention}


def test_a_transformers_layer_is_sparse_where_its_attention_goes_through_the_interface():
    import ds_sparse.integrations.transformers  # noqa: F401  registers the name

    bert = transformers.BertModel(transformers.BertConfig(**BERT, sparse_attention={"mode": "fixed"}))
    assert [len(layers) for layers in attention_layers(bert)] == [0, 2]
    bert.set_attn_implementation("ds_sparse")
    assert [len(layers) for layers in attention_layers(nn.ModuleList([bert]))] == [2, 0]
    takes_any_name = transformers.MPNetModel(transformers.MPNetConfig(**BERT))
    takes_any_name.config._attn_implementation = "ds_sparse"
    assert not attention_layers(takes_any_name)[0]
