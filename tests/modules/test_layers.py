"""Which modules are attention layers, and which of them are ours."""

import pytest
import transformers
from torch import nn

import ds_sparse
from ds_sparse.modules.layers import cross_attention_layers, ours_and_others

BERT = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@pytest.mark.parametrize(
    "names",
    [
        ("query", "key", "value"),
        ("q_proj", "k_proj", "v_proj"),
        ("q_lin", "k_lin", "v_lin"),
        ("q", "k", "v"),
        ("query_proj", "key_proj", "value_proj"),
        ("to_q", "to_k", "to_v"),
        ("to_q", "to_kv"),
        ("q", "kv"),
        ("wq", "wk", "wv"),
        ("linear_q", "linear_k", "linear_v"),
        ("q_head", "k_head", "v_head"),
        ("query_key_value",),
        ("qkv_proj",),
        ("to_qkv",),
        ("qkv",),
        ("c_attn",),
        ("Wqkv",),
    ],
)
def test_projections_make_a_layer(names):
    layer = nn.ModuleDict({name: nn.Linear(2, 2) for name in names} | {"out": nn.Linear(2, 2)})
    ours, others = ours_and_others(nn.ModuleDict({"layer": layer, "other": nn.Linear(2, 2)}))
    assert ours == {} and others == {"layer": layer}


def test_torchs_own_layer_is_one_too_and_what_holds_ours_is_none():
    theirs = nn.MultiheadAttention(32, 4)
    config = transformers.BertConfig(**BERT)
    layer = ds_sparse.BertSparseSelfAttention(config, ds_sparse.FixedSparsityConfig(4))
    ours, others = ours_and_others(nn.ModuleDict({"theirs": theirs, "layer": layer}))
    assert others == {"theirs": theirs} and ours == {"layer.sparse_self_attention": layer.sparse_self_attention}


def test_cross_attention_of_pytorchs_decoders_is_no_self_attention():
    decoder = nn.TransformerDecoderLayer(32, 4)
    ours, others = ours_and_others(nn.ModuleDict({"decoder": decoder}))
    assert not ours and others == {"decoder.self_attn": decoder.self_attn}
    assert cross_attention_layers(decoder) == {"multihead_attn": decoder.multihead_attn}
    sparse = ds_sparse.SparseMultiheadAttention(32, 4)
    assert ours_and_others(nn.ModuleDict({"layer": sparse})) == ({"layer": sparse}, {})
