"""sparsify on models in the bing_bert manner."""

import copy
import functools
import pickle

import pytest
import torch
import transformers
from torch import nn

import ds_sparse
from ds_sparse import BertSparseSelfAttention, FixedSparsityConfig

HEADS, BLOCK = 4, 16
LOCAL = {
    "mode": "local_sliding_window", "block": BLOCK, "num_sliding_window_blocks": 1, "attention": "bidirectional",
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self, hidden=32, **more):
        super().__init__()
        self.num_attention_heads, self.dropout = HEADS, nn.Dropout(0.0)
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        for name, module in more.items():
            setattr(self, name, module)

    def forward(self, hidden_states, attention_mask):
        query, key, value = (
            linear(hidden_states).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        scores = query @ key.mT / query.shape[-1] ** 0.5
        scores = scores if attention_mask is None else scores + attention_mask
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


class Layer(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.self = attention

    def forward(self, hidden_states, attention_mask):
        return hidden_states + self.self(hidden_states, attention_mask)


class Encoder(nn.Module):
    """In the manner of bing_bert; the last layer shares its attention with the first."""

    def __init__(self):
        super().__init__()
        first = Attention()
        self.layers = nn.ModuleList([Layer(first), Layer(Attention()), Layer(first)])

    def forward(self, hidden_states, attention_mask):
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask)
        return hidden_states


def make_states(tokens=50):
    mask = torch.zeros(2, 1, 1, tokens)
    mask[1, ..., tokens // 3 :] = -10000.0
    return torch.randn(2, tokens, 32), mask


def test_sparsify_replaces_layers_in_the_bing_bert_manner_and_undo_puts_them_back():
    model, inputs = Encoder(), make_states()
    before, modules = model(*inputs), list(model.modules())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = {id(p) for p in model.parameters()}
    report = ds_sparse.sparsify(model, {"mode": "dense", "block": BLOCK}, max_seq_length=60)
    assert report.replaced == [(f"layers.{n}.self", "Attention", "BertSparseSelfAttention") for n in range(2)]
    assert "DenseSparsityConfig, block 16, density 100.0% at 64 tokens" in str(report)
    assert {id(p) for p in model.parameters()} == parameters
    assert model.layers[0].self is model.layers[2].self and isinstance(model.layers[0].self, BertSparseSelfAttention)
    torch.testing.assert_close(model(*inputs), before)
    model.eval()
    for _ in range(2):
        report.undo()
        assert list(model.modules()) == modules and not model.layers[0].self.training
        assert torch.equal(model(*inputs), before)
    assert str(report).startswith("undone: 2 attention layers dense again") and report.replaced == []
    ds_sparse.sparsify(model, FixedSparsityConfig(HEADS, BLOCK, num_local_blocks=1))
    changed = model(*inputs)
    assert not torch.allclose(changed, before)
    changed.square().sum().backward()
    optimizer.step()
    assert not torch.equal(model(*inputs), changed)


def test_sparsify_takes_dropout_and_length_from_the_model():
    model = Encoder()
    model.config = transformers.BertConfig(max_position_embeddings=100)
    model.layers[0].self.dropout.p = 0.25
    del model.layers[1].self.dropout
    model.layers[1].self.dropout_p = 0.5
    report = ds_sparse.sparsify(model, {"block": 32})
    assert model.layers[0].self.sparse_self_attention.attention_dropout == 0.25
    assert model.layers[1].self.sparse_self_attention.attention_dropout == 0.5
    assert str(report).count("at 128 tokens") == 2


def test_a_dict_and_random_blocks_give_all_layers_one_seed(capsys):
    model = Encoder()
    ds_sparse.sparsify(model, {"mode": "bigbird", "num_random_blocks": 1}, max_seq_length=256)
    first, second = (model.layers[n].self.sparse_self_attention for n in range(2))
    assert first.sparsity_config.seed is not None and capsys.readouterr().out.count("drawn with seed") == 1
    assert torch.equal(first.master_layout, second.master_layout)


class CrossAttention(Attention):
    def forward(self, hidden_states, context):
        return super().forward(hidden_states, None) + context


class WithoutHeads(Attention):
    def __init__(self):
        super().__init__()
        del self.num_attention_heads


def with_own_forward():
    layer = Attention()
    layer.forward = functools.partial(Attention.forward, layer)
    return layer


@pytest.mark.parametrize(
    "layer, sentence",
    [
        (
            Attention(relative=nn.Embedding(8, 4)),
            r"attention layer 0 \(Attention\) would stay dense: .*relative.weight",
        ),
        (CrossAttention(), r"is called with \(hidden_states, context\)"),
        (
            nn.ModuleDict({name: nn.Linear(2, 2) for name in ("q_proj", "k_proj", "v_proj")}),
            "Linear modules query, key and value",
        ),
        (
            Attention(residual_dropout=nn.Dropout(0.1)),
            r"attention layer 0 \(Attention\) would stay dense: it has 2 Dropout modules",
        ),
        (WithoutHeads(), r"does not say its number of heads \(num_attention_heads\)"),
        (with_own_forward(), r"attention layer 0 \(Attention\) would stay dense: its forward was replaced"),
        (Attention(4 * 300), r"attention layer 0 \(Attention\) cannot be sparse. Head size is 300; .* 1 to 256"),
        (nn.Linear(2, 2), "ModuleList has no attention layer that ds_sparse knows"),
    ],
)
def test_layers_that_cannot_be_replaced_are_named_before_anything_changes(layer, sentence):
    model = nn.ModuleList([layer, Layer(Attention())] if not isinstance(layer, nn.Linear) else [layer])
    modules = list(model.modules())
    with pytest.raises(ValueError, match=sentence):
        ds_sparse.sparsify(model, {"mode": "fixed"}, max_seq_length=64)
    assert list(model.modules()) == modules


def test_an_attention_layer_itself_can_be_given():
    layer, inputs = Attention(), make_states()
    wanted = layer(*inputs)
    report = ds_sparse.sparsify(layer, {"mode": "dense"}, max_seq_length=64)
    assert type(layer) is BertSparseSelfAttention
    torch.testing.assert_close(layer(*inputs), wanted)
    report.undo()
    assert torch.equal(layer(*inputs), wanted)


class Calls(nn.Module):
    """Calls its layers by other ways than its modules."""

    def __init__(self, way):
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])
        first, second = self.layers
        self.calls = {
            "list": lambda: [first, second],
            "closure": lambda: [lambda *inputs: first(*inputs), lambda *inputs: second(*inputs)],
            "partial": lambda: [functools.partial(first), functools.partial(second)],
            "call": lambda: [first.__call__, second.__call__],
            "compiled": lambda: [torch.compile(layer, backend="eager") for layer in self.layers],
        }[way]()

    def forward(self, hidden_states, attention_mask):
        for call in self.calls:
            hidden_states = hidden_states + call(hidden_states, attention_mask)
        return hidden_states


@pytest.mark.parametrize(
    "way", ["list", "closure", "partial", "call", pytest.param("compiled", marks=pytest.mark.slow("compiles"))]
)
def test_layers_are_sparse_for_whatever_holds_them(way):
    model, (x, mask) = Calls(way), make_states()
    dense, other = model(x, mask), torch.cat([x[:, :-1], torch.randn(2, 1, 32)], 1)
    parameters, seen = list(model.parameters()), []
    model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    report = ds_sparse.sparsify(model, LOCAL, max_seq_length=64)
    assert torch.equal(model(x, mask)[:, :16], model(other, mask)[:, :16])  # two layers reach no other block
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True)) and seen
    report.undo()
    assert torch.equal(model(x, mask), dense)


def test_a_sparse_layer_is_copied_pickled_saved_and_undone_with_nothing_left():
    model, inputs = Encoder(), make_states()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    keys = set(model.state_dict())
    report = ds_sparse.sparsify(model, LOCAL, max_seq_length=64)
    core = ("layers.0", "layers.1", "layers.2")
    assert set(model.state_dict()) == keys | {f"{name}.self.sparse_self_attention.master_layout" for name in core}
    wanted = model(*inputs)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(*inputs), wanted)
    report.undo()
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_a_forward_that_something_holds_is_refused():
    model = Encoder()
    held = [layer.self.forward for layer in model.layers]
    with pytest.raises(ValueError, match=r"layers.0.self \(Attention\) would stay dense: something holds its method"):
        ds_sparse.sparsify(model, LOCAL, max_seq_length=64)
    assert len(held) == 3 and type(model.layers[0].self) is Attention
    del held
    ds_sparse.sparsify(model, LOCAL, max_seq_length=64)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(Attention()) for _ in range(4)])

    def forward(self, hidden_states, attention_mask):
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask)
        return hidden_states


def test_layers_get_the_structures_of_their_entries_and_null_stays_dense():
    model, inputs = Deep(), make_states()
    before = model(*inputs)
    report = ds_sparse.sparsify(
        model, {"mode": "dense", "layers": {"1-2": {"block": 32}, "2": None}}, max_seq_length=60
    )
    assert [type(layer.self).__name__ for layer in model.layers] == [
        "BertSparseSelfAttention", "BertSparseSelfAttention", "Attention", "BertSparseSelfAttention",
    ]  # fmt: skip
    assert str(report).splitlines() == [
        "2 attention layers made sparse: DenseSparsityConfig, block 16, density 100.0% at 64 tokens",
        "  layers.0.self  Attention  ->  BertSparseSelfAttention",
        "  layers.3.self  Attention  ->  BertSparseSelfAttention",
        "1 attention layer made sparse: DenseSparsityConfig, block 32, density 100.0% at 64 tokens",
        "  layers.1.self  Attention  ->  BertSparseSelfAttention",
        '1 attention layer stays dense: null in "layers" of the block',
        "  layers.2.self  Attention",
    ]
    assert report.dense == [("layers.2.self", "Attention", 'null in "layers" of the block')]
    first, last = (model.layers[n].self.sparse_self_attention.attention for n in (0, 3))
    assert first._master is last._master
    torch.testing.assert_close(model(*inputs), before)
    report.undo()
    assert all(type(layer.self) is Attention for layer in model.layers)


@pytest.mark.parametrize(
    "layers, sentence",
    [
        ({"2-4": None}, 'sparse_attention.layers."2-4": names layer 4, and Deep has 4 attention layers, 0 to 3'),
        ({"0-3": None}, 'No attention layer of Deep would be sparse: null in "layers" of the block'),
    ],
)
def test_layers_that_there_are_not_and_nothing_sparse_are_refused(layers, sentence):
    model = Deep()
    with pytest.raises(ValueError, match=sentence):
        ds_sparse.sparsify(model, {"layers": layers}, max_seq_length=64)
    assert all(type(layer.self) is Attention for layer in model.layers)


def test_layers_without_a_seed_get_one_and_the_same(capsys):
    block = {"mode": "bigbird", "layers": {"1": {"num_random_blocks": 1}, "2": {"num_random_blocks": 2}}}
    model = Deep()
    ds_sparse.sparsify(model, block, max_seq_length=128)
    seeds = [layer.self.sparse_self_attention.sparsity_config.seed for layer in model.layers]
    assert seeds[0] is None and seeds[1] == seeds[2] and capsys.readouterr().out.count("drawn with seed") == 1
