"""Which attention layers are sparse."""

import transformers
from torch import nn

from ds_sparse.models.layers import attention_layers

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
