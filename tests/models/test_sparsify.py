"""sparsify: each layer becomes sparse in the way of the family that it is of."""

import subprocess
import sys

import pytest
import torch
from models.families.made import InTheManner
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import ds_sparse
from ds_sparse.models.families import Family, _registry, register_family
from ds_sparse.models.layers import attention_layers
from ds_sparse.models.report import Kind, describe
from ds_sparse.modules.structured_attention import StructuredAttention
from ds_sparse.tools import notices

HEADS, TOKENS = 4, 64


class Fused(nn.Module):
    """A layer of a kind of its own: one projection, and what computes in an attribute."""

    def __init__(self):
        super().__init__()
        self.qkv, self.attend = nn.Linear(32, 96), scaled_dot_product_attention

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, 8)).permute(2, 0, 3, 1, 4)
        return self.attend(query, key, value).transpose(1, 2).flatten(2)


class Exchange:
    def __init__(self, name, layer, attention):
        self.layers, self.attention = {name: layer}, attention
        self.kinds = [Kind(self.layers, ["Fused"], ["Fused, sparse"], describe(attention))]

    def on(self):
        for layer in self.layers.values():
            layer.attend = self.attention

    def off(self):
        for layer in self.layers.values():
            layer.attend = scaled_dot_product_attention


class FusedModels(Family):
    def of_this_family(self, model, layers):
        return {name: layer for name, layer in layers.items() if isinstance(layer, Fused)}

    def changes(self, model, layers, structures, max_seq_length):
        attention = StructuredAttention(structures.make(HEADS), max_seq_length)
        return [Exchange(name, layer, attention) for name, layer in layers.items()]

    def switched(self, model, layers):
        return {
            name: layer
            for name, layer in layers.items()
            if isinstance(getattr(layer, "attend", None), StructuredAttention)
        }


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(_registry, "_families", list(_registry._families))
    register_family(FusedModels())


class ByHand(Fused):
    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, 8)).permute(2, 0, 3, 1, 4)
        return ((query @ key.mT).softmax(-1) @ value).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("model", [nn.ModuleList([ByHand()]), nn.Linear(2, 2)], ids=["layer", "none"])
def test_the_error_about_attention_that_no_family_knows_has_the_lines_to_write(model):
    with pytest.raises(ValueError, match="would stay dense|has no attention layer") as caught:
        ds_sparse.sparsify(model, max_seq_length=TOKENS)
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    names = {"ds_sparse": ds_sparse, "self": nn.Module(), "heads": HEADS, "tokens": 128}
    names |= dict.fromkeys(("query", "key", "value"), torch.randn(2, HEADS, 100, 8))
    exec("\n".join(lines), names)
    assert len(lines) == 3 and names["context"].shape == (2, HEADS, 100, 8)


@pytest.mark.parametrize("name", ["bert-base-uncased", None])
def test_a_name_in_the_place_of_a_model_is_refused(name):
    with pytest.raises(TypeError, match="it has to be a torch.nn.Module, such as what from_pretrained returns"):
        ds_sparse.sparsify(name, {"mode": "fixed"})


@pytest.mark.usefixtures("registered")
def test_a_family_that_is_registered_makes_its_layers_sparse_and_leaves_the_others():
    model, x = nn.Sequential(Fused(), InTheManner()), torch.randn(2, TOKENS, 32)
    truth = model(x)
    report = ds_sparse.sparsify(model, ds_sparse.DenseSparsityConfig(HEADS), max_seq_length=TOKENS)
    assert [tuple(layer) for layer in report.replaced] == [
        ("0", "Fused", "Fused, sparse"),
        ("1", "InTheManner", "BertSparseSelfAttention"),
    ]
    assert list(attention_layers(model)[0]) == ["0", "1.sparse_self_attention"] and not attention_layers(model)[1]
    torch.testing.assert_close(model(x), truth)
    with pytest.raises(ValueError, match="is sparse already"):
        ds_sparse.sparsify(model, max_seq_length=TOKENS)
    report.undo()
    assert model[0].attend is scaled_dot_product_attention and isinstance(model[1], InTheManner)
    assert list(attention_layers(model)[1]) == ["0", "1"]


def test_layers_of_several_families_are_counted_together_in_the_models_order():
    heads = {"batch_first": True, "dim_feedforward": 32}
    for number, name in enumerate(["0.self_attn", "1", "2", "3.self_attn", "4"]):
        model = nn.Sequential(
            nn.TransformerEncoderLayer(32, HEADS, **heads), Fused(), InTheManner(),
            nn.TransformerEncoderLayer(32, HEADS, **heads), Fused(),
        )  # fmt: skip
        block = {"mode": "fixed", "block": 16, "layers": {str(number): None}}
        report = ds_sparse.sparsify(model, block, max_seq_length=TOKENS)
        assert [layer.name for layer in report.dense] == [name] and len(report.replaced) == 4
        names = ["0.self_attn", "1", "2.sparse_self_attention" if number != 2 else "2", "3.self_attn", "4"]
        assert attention_layers(model).numbers == {layer: place for place, layer in enumerate(names)}
        report.undo()
    with pytest.raises(ds_sparse.SparseAttentionConfigError, match=r"Sequential has 5 attention layers, 0 to 4"):
        ds_sparse.sparsify(model, {"mode": "fixed", "layers": {"5": None}}, max_seq_length=TOKENS)


@pytest.mark.usefixtures("registered")
def test_nothing_changes_where_a_later_family_refuses_a_layer():
    unknown = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("q_proj", "k_proj", "v_proj")})
    model = nn.ModuleList([Fused(), unknown])
    with pytest.raises(ValueError, match=r"attention layer 1 \(ModuleDict\) would stay dense"):
        ds_sparse.sparsify(model, max_seq_length=TOKENS)
    assert model[0].attend is scaled_dot_product_attention


def test_importing_it_does_not_import_transformers():
    code = "import sys, ds_sparse.models.sparsify; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_global_blocks_beyond_the_layout_are_said(capsys, monkeypatch):
    monkeypatch.setattr(notices, "_said", set())
    model = nn.ModuleDict({"self": nn.MultiheadAttention(32, 2, batch_first=True)})
    block = {"mode": "bslongformer", "block": 16, "global_block_indices": [0, 77]}
    ds_sparse.sparsify(model, block, max_seq_length=128)
    said = "at 128 tokens: global_block_indices: no block 77 in this sequence, whose last is 7: ignored"
    assert said in capsys.readouterr().out


def test_a_caution_is_said_of_the_first_layout_and_of_a_longer_one_where_it_is_new(capsys, monkeypatch):
    class Wide(ds_sparse.BSLongformerSparsityConfig):
        def cautions_at(self, blocks):
            yield from super().cautions_at(blocks)
            if blocks > 10:
                yield "num_sliding_window_blocks", f"is narrow for {blocks} blocks."

    monkeypatch.setattr(notices, "_said", set())
    attention = ds_sparse.SparseSelfAttention(Wide(2, global_block_indices=[0, 77]), max_seq_length=128)
    for tokens in (64, 128, 160, 192):
        attention(*torch.randn(3, 1, 2, tokens, 16))
    assert [line.partition(", at ")[2] for line in capsys.readouterr().out.splitlines()] == [
        "128 tokens: global_block_indices: no block 77 in this sequence, whose last is 7: ignored, as in DeepSpeed.",
        "192 tokens: num_sliding_window_blocks: is narrow for 12 blocks.",
    ]
