"""What every family in plain PyTorch promises of `sparsify`: results, objects that stay, undo, entries and refusals."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from models.families.made import (
    DENSE,
    EMBED,
    HEADS,
    LOCAL,
    TOKENS,
    Block,
    Fused,
    InTheManner,
    Language,
    Outer,
    Own,
    Rotated,
    Sequence,
    encoder,
    hidden,
    output_and_gradients,
    padding,
)
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import ds_sparse
from ds_sparse.models.layers import attention_layers


class BertLike(Fused):
    """Three projections by the names of BERT, and one more."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(EMBED, EMBED) for _ in range(3))

    def forward(self, hidden_states, mask):
        operands = (
            f(hidden_states).unflatten(-1, (HEADS, 8)).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        return self.out(scaled_dot_product_attention(*operands, attn_mask=mask).transpose(1, 2).flatten(2))


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = encoder(dropout=0.0, norm_first=True)

    def forward(self, x):
        return self.encoder(x, src_key_padding_mask=~padding()[:, 0, 0])


def shared() -> Sequence:
    """The last layer is the first."""
    first = InTheManner()
    return Sequence(first, InTheManner(), first)


ADDED = torch.zeros(2, 1, 1, TOKENS).masked_fill(~padding(), -10000.0)
MODELS = {
    "bing_bert": (shared(), [hidden(), ADDED]),
    "bing_bert layer": (InTheManner(), [hidden(), ADDED]),
    "encoder": (encoder(dropout=0.0), [hidden()]),
    "encoder, norm first, padded": (Padded(), [hidden()]),
    "multihead": (Sequence(Own(), Own()), [hidden()]),
    "fused": (Fused(), [hidden()]),
    "padding": (Fused(), [hidden(), padding()]),
    "pairs": (Fused(), [hidden(), padding().expand(2, HEADS, TOKENS, TOKENS).tril()]),
    "added": (Fused(), [hidden(), torch.randn(TOKENS, TOKENS)]),
    "of heads": (Fused(scale=0.1), [hidden(), torch.randn(HEADS, TOKENS, 1)]),
    "causal": (Fused(is_causal=True), [hidden()]),
    "grouped": (Fused(key_heads=2, enable_gqa=True), [hidden()]),
    "inside": (Outer(), [hidden()]),
    "block": (Block(), [hidden()]),
    "mask wanted": (BertLike(), [hidden(), padding()]),
    "language": (Language(), [torch.randint(9, (2, TOKENS))]),
}


@pytest.mark.parametrize(("model", "inputs"), MODELS.values(), ids=MODELS)
def test_a_dense_structure_gives_what_the_model_gave_and_undo_puts_it_back(model, inputs):
    before = {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}
    parameters, modules = list(model.parameters()), list(model.modules())
    wanted = output_and_gradients(model, *inputs)
    report = ds_sparse.sparsify(model, DENSE, max_seq_length=60)
    assert report.headings == [f"{n(len(report.replaced))} made sparse: DenseSparsityConfig, {AT_64}"]
    assert not attention_layers(model).dense
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    torch.testing.assert_close(output_and_gradients(model, *inputs), wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="is sparse already"):
        ds_sparse.sparsify(model)
    for _ in range(2):
        report.undo()
        assert list(model.modules()) == modules and not attention_layers(model).sparse and report.replaced == []
        assert {name: (type(module), dict(vars(module))) for name, module in model.named_modules()} == before
    assert str(report).startswith(f"undone: {n(len(attention_layers(model).dense))} dense again")
    torch.testing.assert_close(output_and_gradients(model, *inputs), wanted, rtol=0, atol=0)


AT_64 = "block 16, density 100.0% at 64 tokens"


def n(layers: int) -> str:
    return f"{layers} attention layer{'s' if layers > 1 else ''}"


class Stack(NamedTuple):
    """Four layers of a family, and what a layer is before and after."""

    make: Any
    name: str
    was: str
    now: str


STACKS = {
    "bing_bert": Stack(lambda: Sequence(*(InTheManner() for _ in range(4))), "layers.{}", "InTheManner",
                       "BertSparseSelfAttention"),
    "multihead": Stack(lambda: encoder(4, dropout=0.0), "layers.{}.self_attn", "MultiheadAttention",
                       "SparseMultiheadAttention"),
    "calls": Stack(lambda: Sequence(*(Fused() for _ in range(4))), "layers.{}", "Fused, scaled_dot_product_attention",
                   "Fused, ds_sparse"),
}  # fmt: skip


@pytest.fixture(params=STACKS)
def stack(request):
    return STACKS[request.param]


def test_sparse_layers_see_their_blocks_alone_keep_their_hooks_and_are_copied_and_pickled(stack):
    model, x, seen = stack.make(), hidden(), []
    model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    keys, dense = set(model.state_dict()), model(x)
    report = ds_sparse.sparsify(model, LOCAL, max_seq_length=64)
    assert report.replaced == [(stack.name.format(place), stack.was, stack.now) for place in range(4)]
    assert isinstance(model.layers[0], type(stack.make().layers[0])) or stack.now == "BertSparseSelfAttention"
    sparse, seen[:] = model(x), []
    other = torch.cat([x[:, :-1], torch.randn(2, 1, EMBED)], 1)
    assert torch.equal(model(other)[:, :48], sparse[:, :48]) and not torch.allclose(sparse, dense) and seen
    del model.layers[0]._forward_hooks[next(iter(model.layers[0]._forward_hooks))]
    layouts = {key for key in model.state_dict() if key.endswith("sparse_self_attention.master_layout")}
    assert set(model.state_dict()) == keys | layouts and len(layouts) in (0, 4)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x), sparse) and len(attention_layers(copied).sparse) == 4


def test_layers_get_the_structures_of_their_entries_and_null_stays_dense(stack):
    model, x = stack.make(), hidden()
    wanted = model(x)
    layers = {"1-2": {"block": 32}, "2": None}
    report = ds_sparse.sparsify(model, DENSE | {"layers": layers}, max_seq_length=60)
    assert [name for name, *_ in report.replaced] == [stack.name.format(place) for place in (0, 3, 1)]
    name, was = stack.name.format(2), stack.was.partition(",")[0]
    assert report.dense == [(name, was, 'null in "layers" of the block')]
    assert report.headings == [
        f"2 attention layers made sparse: DenseSparsityConfig, {AT_64}",
        f"1 attention layer made sparse: DenseSparsityConfig, {AT_64.replace('16', '32')}",
        '1 attention layer stays dense: null in "layers" of the block',
    ]
    torch.testing.assert_close(model(x), wanted)
    report.undo()
    assert torch.equal(model(x), wanted)
    for wrong, sentence in (
        ({"2-4": None}, f'"2-4": names layer 4, and {type(model).__name__} has 4 attention layers, 0 to 3'),
        ({"0-3": None}, f'No attention layer of {type(model).__name__} would be sparse: null in "layers" of the block'),
    ):
        with pytest.raises(ValueError, match=sentence):
            ds_sparse.sparsify(model, {"layers": wrong}, max_seq_length=64)
    assert not attention_layers(model).sparse


class CrossAttention(InTheManner):
    def forward(self, hidden_states, context):
        return super().forward(hidden_states) + context


class WithoutHeads(InTheManner):
    def __init__(self):
        super().__init__()
        del self.num_attention_heads


class Subclass(nn.MultiheadAttention):
    pass


class WithoutBatch(Fused):
    def forward(self, x):
        heads = (part.unflatten(-1, (-1, 8)).transpose(1, 2).flatten(0, 1) for part in self.qkv(x).chunk(3, -1))
        return scaled_dot_product_attention(*heads)


class TwoKinds(Fused):
    def forward(self, x):
        heads = self.qkv(x).chunk(3, -1)
        return sum(
            scaled_dot_product_attention(*(part.unflatten(-1, (n, -1)).transpose(1, 2) for part in heads))
            .transpose(1, 2)
            .flatten(2)
            for n in (2, 4)
        )


class WrittenOut(Fused):
    def forward(self, x):
        query, key, value = self.qkv(x).chunk(3, -1)
        return (query @ key.mT).softmax(-1) @ value


class Large(Block):
    """Heads of more than kernels take."""

    def __init__(self):
        super().__init__()
        self.projections, self.out = nn.Linear(EMBED, 3 * HEADS * 300), nn.Linear(HEADS * 300, EMBED)

    def forward(self, x):
        return self.out(self.attention(x))


HELD = []


def held(layer, method="forward"):
    HELD.append(getattr(layer, method))
    return layer


def replaced(layer, method="forward"):
    setattr(layer, method, functools.partial(getattr(type(layer), method), layer))
    return layer


def multihead(*sizes, **more):
    return nn.MultiheadAttention(*(sizes or (EMBED, HEADS)), **more)


RANDOM, EIGHT = ds_sparse.BigBirdSparsityConfig(HEADS), ds_sparse.DenseSparsityConfig(8)
REFUSED = [
    (nn.Linear(2, 2), DENSE, "Sequence has no attention layer that ds_sparse knows"),
    (InTheManner(relative=nn.Embedding(8, 4)), DENSE, r"0 \(InTheManner\) would stay dense: .*relative.weight"),
    (CrossAttention(), DENSE, r"is called with \(hidden_states, context\)"),
    (nn.ModuleDict({name: nn.Linear(2, 2) for name in ("q_proj", "k_proj", "v_proj")}), DENSE, "query, key and value"),
    (InTheManner(more=nn.Dropout(0.1)), DENSE, r"0 \(InTheManner\) would stay dense: it has 2 Dropout modules"),
    (WithoutHeads(), DENSE, r"does not say its number of heads \(num_attention_heads\)"),
    (replaced(InTheManner()), DENSE, r"0 \(InTheManner\) would stay dense: its forward was replaced"),
    (held(InTheManner()), DENSE, r"0 \(InTheManner\) would stay dense: something holds its method forward"),
    (InTheManner(4 * 300), DENSE, r"0 \(InTheManner\) cannot be sparse. Head size is 300; .* 1 to 256"),
    (Subclass(EMBED, HEADS), DENSE, r"0 \(Subclass\) would stay dense: it is of a class of its own"),
    (replaced(multihead()), DENSE, r"0 \(MultiheadAttention\) would stay dense: its forward was replaced"),
    (held(multihead()), DENSE, r"0 \(MultiheadAttention\) would stay dense: something holds its method forward"),
    (multihead(600, 2), DENSE, r"0 \(MultiheadAttention\) cannot be sparse. Head size is 300; .* 256"),
    (multihead(add_zero_attn=True), DENSE, "attention layer layers.0 .* has add_zero_attn"),
    (multihead(), RANDOM, "has random blocks and no seed"),
    (multihead(), {"mode": "bigbird", "num_random_blocks": 1}, "has random blocks and no seed"),
    (multihead(), {"layers": {"0": {"mode": "bigbird", "num_random_blocks": 1}}}, "has random blocks and no seed"),
    (multihead(), EIGHT, "The model has 4 attention heads"),
    (WithoutBatch(), DENSE, r"layer layers.0 \(WithoutBatch\) calls .* takes \(batch, heads, tokens, head size\)"),
    (TwoKinds(), DENSE, r"attention layer layers.0 \(TwoKinds\) calls .* with \[2, 4\] heads"),
    (replaced(Fused()), DENSE, r"0 \(Fused\) would stay dense: its forward was replaced"),
    (replaced(Block(), "attention"), DENSE, r"0 \(Block\) would stay dense: its attention was replaced"),
    (held(Fused()), DENSE, r"0 \(Fused\) would stay dense: something holds its method forward"),
    (held(Block(), "attention"), DENSE, r"0 \(Block\) would stay dense: something holds its method attention"),
    (Large(), DENSE, r"attention layer layers.0 \(Large\) calls .* Head size is 300; it has to be from 1 to 256"),
    (
        Rotated(),
        DENSE,
        r"0 \(Rotated\) would stay dense: .* as a trial of this one on made-up inputs did not: it raised TypeError: "
        r".* missing 1 required positional argument: 'angles'\. Have it call that, or write",
    ),
    (WrittenOut(), DENSE, r"0 \(WrittenOut\) would stay dense: .* inputs did not\. Have it call that, or write"),
    (Fused(), RANDOM, "has random blocks and no seed"),
    (Fused(), EIGHT, "The model has 4 attention heads"),
]


@pytest.mark.parametrize(("layer", "structure", "sentence"), REFUSED)
def test_what_cannot_be_sparse_is_refused_before_anything_changes(layer, structure, sentence, capsys):
    others = [] if isinstance(layer, nn.Linear) else [Fused(), InTheManner(), multihead()]
    model = Sequence(layer, *others)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=sentence):
        ds_sparse.sparsify(model, structure, max_seq_length=64)
    assert [type(module) for module in model.modules()] == kinds
    said = capsys.readouterr().out
    assert "seed" not in said and "has left tensors" not in said
