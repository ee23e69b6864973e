"""Which modules are attention layers, which of them are ours, and which are sparse."""

import pytest
import transformers
from torch import nn

import ds_sparse
from ds_sparse.models.families._plain import cross_attention_layers
from ds_sparse.models.layers import attention_layers, ours_and_others

BERT = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def test_a_transformers_layer_is_sparse_where_its_attention_goes_through_the_interface():
    bert = transformers.BertModel(transformers.BertConfig(**BERT, sparse_attention={"mode": "fixed"}))
    assert [len(layers) for layers in attention_layers(bert)[:2]] == [0, 2]
    bert.set_attn_implementation("ds_sparse")
    assert [len(layers) for layers in attention_layers(nn.ModuleList([bert]))[:2]] == [2, 0]
    takes_any_name = transformers.MPNetModel(transformers.MPNetConfig(**BERT))
    takes_any_name.config._attn_implementation = "ds_sparse"
    assert not attention_layers(takes_any_name)[0]


def test_transformers_models_count_their_layers_themselves_and_all_others_are_counted_together():
    bert = transformers.BertModel(transformers.BertConfig(**BERT))
    model = nn.ModuleList([nn.MultiheadAttention(8, 2), bert, nn.MultiheadAttention(8, 2)])
    sparse, dense, numbers = attention_layers(model)
    assert not sparse and len(dense) == 4 and numbers == {"0": 0, "2": 1}


PROJECTIONS = (
    "query key value", "q_proj k_proj v_proj", "q_lin k_lin v_lin", "q k v", "query_proj key_proj value_proj",
    "to_q to_k to_v", "to_q to_kv", "q kv", "wq wk wv", "linear_q linear_k linear_v", "q_head k_head v_head",
    "query_key_value", "qkv_proj", "to_qkv", "qkv", "c_attn", "Wqkv",
)  # fmt: skip


@pytest.mark.parametrize("names", map(str.split, PROJECTIONS), ids=PROJECTIONS)
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
