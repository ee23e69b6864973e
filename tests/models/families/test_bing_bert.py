"""sparsify on models in the bing_bert manner, beyond what test_contract.py asks of every family."""

import functools

import pytest
import torch
import transformers
from models.families.made import DENSE, EMBED, LOCAL, InTheManner, Sequence, hidden
from torch import nn

import ds_sparse


def test_dropout_and_length_are_the_models():
    model = Sequence(InTheManner(), InTheManner())
    model.config = transformers.BertConfig(max_position_embeddings=100)
    first, second = model.layers
    first.dropout.p = 0.25
    del second.dropout
    second.dropout_p = 0.5
    report = ds_sparse.sparsify(model, {"block": 32})
    assert first.sparse_self_attention.attention_dropout == 0.25
    assert second.sparse_self_attention.attention_dropout == 0.5
    assert str(report).count("at 128 tokens") == 2


def test_random_blocks_without_a_seed_get_one_and_the_same(capsys):
    block = {"mode": "bigbird", "layers": {"1": {"num_random_blocks": 1}, "2-3": {"num_random_blocks": 2}}}
    model = Sequence(*(InTheManner() for _ in range(4)))
    ds_sparse.sparsify(model, block, max_seq_length=256)
    cores = [layer.sparse_self_attention for layer in model.layers]
    seeds = [core.sparsity_config.seed for core in cores]
    assert seeds[0] is None and seeds[1] == seeds[2] and capsys.readouterr().out.count("drawn with seed") == 1
    assert cores[2].attention._master is cores[3].attention._master


class Calls(nn.Module):
    """Calls its layers by other ways than its modules."""

    def __init__(self, way):
        super().__init__()
        self.layers = nn.ModuleList([InTheManner(), InTheManner()])
        first, second = self.layers
        self.calls = {
            "list": lambda: [first, second],
            "closure": lambda: [lambda x: first(x, None), lambda x: second(x, None)],
            "partial": lambda: [functools.partial(first), functools.partial(second)],
            "call": lambda: [first.__call__, second.__call__],
            "compiled": lambda: [torch.compile(layer, backend="eager") for layer in self.layers],
        }[way]()

    def forward(self, hidden_states):
        for call in self.calls:
            hidden_states = hidden_states + call(hidden_states)
        return hidden_states


@pytest.mark.parametrize(
    "way", ["list", "closure", "partial", "call", pytest.param("compiled", marks=pytest.mark.slow("compiles"))]
)
def test_layers_are_sparse_for_whatever_holds_them(way):
    model, x = Calls(way), hidden()
    dense, other = model(x), torch.cat([x[:, :-1], torch.randn(2, 1, EMBED)], 1)
    report = ds_sparse.sparsify(model, LOCAL, max_seq_length=64)
    assert torch.equal(model(x)[:, :16], model(other)[:, :16])  # two layers reach no other block
    report.undo()
    assert torch.equal(model(x), dense)


def test_a_method_is_held_no_longer_than_something_holds_it():
    model = Sequence(InTheManner())
    held = model.layers[0].forward
    with pytest.raises(ValueError, match="something holds its method"):
        ds_sparse.sparsify(model, DENSE, max_seq_length=64)
    del held
    assert ds_sparse.sparsify(model, DENSE, max_seq_length=64).replaced
