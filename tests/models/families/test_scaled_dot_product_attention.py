"""sparsify on layers of any kind that call F.scaled_dot_product_attention."""

import copy
import pickle
import traceback

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import ds_sparse
from ds_sparse.models.layers import attention_layers

HEADS, EMBED, TOKENS = 4, 32, 50
DENSE = {"mode": "dense", "block": 16}
LOCAL = {
    "mode": "local_sliding_window", "block": 16, "num_sliding_window_blocks": 1, "attention": "bidirectional",
}  # fmt: skip


class Fused(nn.Module):
    """One projection, as many models have it; what the call is given besides can be set."""

    def __init__(self, key_heads=HEADS, **options):
        super().__init__()
        self.heads, self.options = (HEADS, key_heads, key_heads), options
        self.qkv, self.out = nn.Linear(EMBED, 8 * sum(self.heads)), nn.Linear(EMBED, EMBED)

    def forward(self, x, mask=None):
        parts = self.qkv(x).split([8 * heads for heads in self.heads], dim=-1)
        query, key, value = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in parts)
        output = F.scaled_dot_product_attention(query, key, value, mask, **self.options)
        return self.out(output.transpose(1, 2).flatten(2))


class Attend(nn.Module):
    def forward(self, *operands):
        return scaled_dot_product_attention(*operands)


class Outer(nn.Module):
    """The call is in a module inside, and keys may be of another sequence."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_kv, self.attend = nn.Linear(EMBED, EMBED), nn.Linear(EMBED, 2 * EMBED), Attend()

    def forward(self, x, context=None):
        operands = (self.to_q(x), *self.to_kv(x if context is None else context).chunk(2, -1))
        heads = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in operands)
        return self.attend(*heads).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """The whole layer in one module, with what it calls in a method."""

    def __init__(self):
        super().__init__()
        self.norm, self.projections = nn.LayerNorm(EMBED), nn.Linear(EMBED, 3 * EMBED)

    def attention(self, x):
        heads = self.projections(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)

    def forward(self, x):
        return x + self.attention(self.norm(x))


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


class Rotated(Fused):
    """Needs angles, which only the model gives it."""

    def forward(self, x, angles):
        return super().forward(x * angles.cos())


class Language(nn.Module):
    def __init__(self, last=Rotated):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(9, EMBED), nn.ModuleList([Rotated(), last()])

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x, torch.arange(ids.shape[1], device=ids.device)[:, None])
        return x


class Sequence(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, *more):
        for layer in self.layers:
            x = layer(x, *more)
        return x


def hidden(tokens=TOKENS):
    return torch.randn(2, tokens, EMBED, generator=torch.Generator().manual_seed(0))


def padding():
    keep = torch.ones(2, 1, 1, TOKENS, dtype=torch.bool)
    keep[1, ..., 30:] = False
    return keep


def output_and_gradients(model, *inputs):
    output = model(*inputs)
    grads = torch.autograd.grad(output.square().sum(), list(model.parameters()), allow_unused=True)
    return output, [grad for grad in grads if grad is not None]


CASES = {
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


@pytest.mark.parametrize(("model", "inputs"), CASES.values(), ids=CASES)
def test_a_dense_structure_gives_what_the_model_gave_and_undo_puts_it_back(model, inputs):
    kinds, state = [type(module) for module in model.modules()], list(model.state_dict())
    wanted = output_and_gradients(model, *inputs)
    report = ds_sparse.sparsify(model, DENSE, max_seq_length=64)
    assert all(was.endswith(", scaled_dot_product_attention") for _, was, _ in report.replaced)
    assert not attention_layers(model)[1] and list(model.state_dict()) == state
    torch.testing.assert_close(output_and_gradients(model, *inputs), wanted)
    with pytest.raises(ValueError, match="is sparse already"):
        ds_sparse.sparsify(model)
    report.undo()
    assert [type(module) for module in model.modules()] == kinds
    torch.testing.assert_close(output_and_gradients(model, *inputs), wanted, rtol=0, atol=0)


def test_each_device_gives_what_the_model_gave(device):
    model, x = Sequence(Fused(is_causal=True), Outer()).to(device), hidden().to(device)
    wanted = output_and_gradients(model, x)
    ds_sparse.sparsify(model, DENSE, max_seq_length=64)
    torch.testing.assert_close(output_and_gradients(model, x), wanted, rtol=1e-3, atol=1e-3)


def test_a_structure_is_a_mask_of_its_blocks_and_the_report_names_layers():
    model, x = Sequence(Fused(), Outer()), hidden()
    twin = copy.deepcopy(model)
    report = ds_sparse.sparsify(model, LOCAL, max_seq_length=64)
    assert report.replaced == [
        ("layers.0", "Fused, scaled_dot_product_attention", "Fused, ds_sparse"),
        ("layers.1", "Outer, scaled_dot_product_attention", "Outer, ds_sparse"),
    ]
    assert isinstance(model.layers[0], Fused) and attention_layers(model)[0] == dict(
        zip(["layers.0", "layers.1"], model.layers, strict=True)
    )
    blocks = torch.arange(TOKENS) // 16
    wanted = twin.layers[0](x, blocks[:, None] == blocks)
    torch.testing.assert_close(model.layers[0](x), wanted)


def test_masks_that_are_learned_get_their_gradients():
    model, found = Fused(), []
    for _ in range(2):
        bias = torch.randn(HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(1)).requires_grad_()
        model(hidden(), bias).square().sum().backward()
        found.append(bias.grad)
        if len(found) == 1:
            ds_sparse.sparsify(model, DENSE, max_seq_length=64)
    torch.testing.assert_close(*found)


def test_dropout_of_the_call_is_that_of_probabilities():
    model = Fused(dropout_p=0.5)
    ds_sparse.sparsify(model, DENSE, max_seq_length=64)
    assert not torch.equal(model(hidden()), model(hidden()))


def test_copies_and_pickles_are_sparse_too():
    model, x = Sequence(Fused(), Outer()), hidden()
    ds_sparse.sparsify(model, LOCAL, max_seq_length=64)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x)) and len(attention_layers(other)[0]) == 2


def test_a_compiled_model_is_one_graph():
    torch._dynamo.reset()
    model, x = Sequence(Fused(), Outer()), hidden()
    ds_sparse.sparsify(model, LOCAL, max_seq_length=64)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(output_and_gradients(compiled, x), output_and_gradients(model, x))


class Compiled(Fused):
    """Whose forward is compiled where it is written."""

    @torch.compile(backend="eager")
    def forward(self, x):
        return super().forward(x)


@pytest.mark.slow("compiles for 4 seconds and more")
def test_a_forward_that_was_compiled_before_is_sparse_and_dense_again():
    torch._dynamo.reset()
    model, eager, x = Compiled(), Fused(), hidden()
    eager.load_state_dict(model.state_dict())
    wanted = model(x)
    reports = [ds_sparse.sparsify(both, LOCAL, max_seq_length=64) for both in (model, eager)]
    torch.testing.assert_close(model(x), eager(x))
    reports[0].undo()
    torch.testing.assert_close(model(x), wanted)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_a_layer_computes_the_same_again(reentrant):
    model = Fused()
    ds_sparse.sparsify(model, LOCAL, max_seq_length=64)
    grads = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        x = hidden().requires_grad_()
        run(x).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads, rtol=0, atol=0)


class Checkpointing(Fused):
    reentrant = None

    def forward(self, x):
        heads = [part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]
        if self.reentrant is None:
            return scaled_dot_product_attention(*heads)
        return checkpoint(scaled_dot_product_attention, *heads, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_inside_a_layer_is_refused_as_its_second_run_would_be_dense(reentrant):
    model = Checkpointing()
    ds_sparse.sparsify(model, DENSE, max_seq_length=64)
    model.reentrant = reentrant
    with pytest.raises(ValueError, match="put the checkpoint around the whole layer"):
        model(hidden().requires_grad_())


class Switchable(Fused):
    by_hand = False

    def forward(self, x):
        if not self.by_hand:
            return super().forward(x)
        query, key, value = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return ((query @ key.mT).softmax(-1) @ value).transpose(1, 2).flatten(2)


def test_a_forward_without_the_call_raises():
    model = Sequence(Switchable())
    ds_sparse.sparsify(model, DENSE, max_seq_length=64)
    model.layers[0].by_hand = True
    with pytest.raises(RuntimeError, match=r"layer layers.0 \(Switchable\) ran without a call of scaled_dot"):
        model(hidden())


class Around(nn.Module):
    """Calls something else of a layer than its forward in evaluation."""

    def __init__(self, layer, call):
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x):
        return self.layer(x) if self.training else self.call(self.layer, x)


class WithoutForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.projections = nn.Linear(EMBED, 3 * EMBED)

    attention = Block.attention


class Mixin:
    @torch.autocast("cpu", enabled=False)
    def attend(self, x):
        return Fused.forward(self, x)

    def through(self, x):
        return self.attend(x)


class Mixed(Mixin, Fused):
    pass


def past_its_methods(layer, x):
    heads = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (layer.to_q(x), *layer.to_kv(x).chunk(2, -1)))
    return layer.attend(*heads).transpose(1, 2).flatten(2)


INSTEAD = {
    "a method": (Block(), lambda layer, x: x + layer.attention(layer.norm(x))),
    "the only method": (WithoutForward(), lambda layer, x: layer.attention(x)),
    "a decorated one of another base": (Mixed(), lambda layer, x: layer.attend(x)),
    "one that calls it": (Mixed(), lambda layer, x: layer.through(x)),
    "a module inside": (Outer(), past_its_methods),
}


@pytest.mark.parametrize(("layer", "call"), INSTEAD.values(), ids=INSTEAD)
def test_what_a_model_calls_instead_of_the_forward_is_sparse_too(layer, call):
    model, x = Around(layer, call).eval(), hidden()
    dense = model(x)
    for structure in (DENSE, LOCAL):
        report = ds_sparse.sparsify(model, structure, max_seq_length=64)
        sparse = model(x)
        assert torch.allclose(sparse, dense, atol=1e-6) == (structure is DENSE)
        if structure is LOCAL and not isinstance(layer, WithoutForward):
            torch.testing.assert_close(model.train()(x), model.eval()(x))
        report.undo()
        assert torch.equal(model(x), dense) and "Sparse" not in repr(model)


@pytest.mark.slow("compiles for 2 seconds")
def test_what_a_model_calls_instead_of_the_forward_is_compiled_into_one_graph():
    torch._dynamo.reset()
    model, x = Sequence(*(Around(*INSTEAD[name]).eval() for name in ("a method", "a module inside"))), hidden()
    ds_sparse.sparsify(model, LOCAL, max_seq_length=64)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))


def test_a_method_that_names_the_call_and_makes_none_raises_unless_it_returns_nothing():
    class Chosen(Block):
        by_hand = False

        def attention(self, x):
            return x if self.by_hand else super().attention(x)

        def choose(self):
            self.function = scaled_dot_product_attention

    model = Chosen()
    ds_sparse.sparsify(model, DENSE, max_seq_length=64)
    model.choose()
    model.by_hand = True
    for call in (model, model.attention):
        with pytest.raises(
            RuntimeError, match=r"ran without a call of scaled_dot_product_attention.* have (forward|attention) call"
        ):
            call(hidden())


class MultiHead(Switchable):
    """Attention by PyTorch's whole function, beside a call that is sparse."""

    def forward(self, x):
        y = super().forward(x)
        if self.by_hand is None:
            weight, bias = torch.eye(EMBED), torch.zeros(EMBED)
            inner = (weight.repeat(3, 1), bias.repeat(3), None, None, False, 0.0, weight, bias)
            y = y + F.multi_head_attention_forward(x, x, x, EMBED, HEADS, *inner)[0]
        return y


def test_a_layer_with_dense_attention_besides_raises():
    model = MultiHead()
    ds_sparse.sparsify(model, DENSE, max_seq_length=64)
    model(hidden())
    model.by_hand = None
    with pytest.raises(ValueError, match="calls multi_head_attention_forward"):
        model(hidden())


@pytest.mark.parametrize("context", [hidden(40), hidden()], ids=["another length", "the same length"])
def test_cross_attention_of_a_layer_that_is_sparse_raises(context):
    model = Outer()
    ds_sparse.sparsify(model, DENSE, max_seq_length=64)
    for arguments, named in (((context,), {}), ((), {"context": context})):
        with pytest.raises(ValueError, match="is given context, the keys of another sequence"):
            model(hidden(), *arguments, **named)
    assert model(hidden(), None).shape == hidden().shape


class Pooling(nn.Module):
    """Cross-attention: one learned query."""

    def __init__(self):
        super().__init__()
        self.latent, self.kv = nn.Parameter(torch.randn(1, HEADS, 1, 8)), nn.Linear(EMBED, 2 * EMBED)

    def forward(self, x):
        key, value = self.kv(x).unflatten(-1, (2, HEADS, 8)).permute(2, 0, 3, 1, 4)
        return scaled_dot_product_attention(self.latent.expand(len(x), -1, -1, -1), key, value).flatten(1)


def test_cross_attention_is_left_dense_and_reported():
    model, x = Sequence(Fused(), Pooling()), hidden()
    wanted = model(x)
    report = ds_sparse.sparsify(model, DENSE, max_seq_length=64)
    assert [name for name, *_ in report.replaced] == ["layers.0"]
    assert report.dense == [("layers.1", "Pooling", "cross-attention, whose keys are of another sequence")]
    torch.testing.assert_close(model(x), wanted)


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


class Large(Block):
    """Heads of more than kernels take."""

    def __init__(self):
        super().__init__()
        self.projections, self.out = nn.Linear(EMBED, 3 * HEADS * 300), nn.Linear(HEADS * 300, EMBED)

    def forward(self, x):
        return self.out(self.attention(x))


class Slip(Fused):
    def forward(self, x):
        return super().forward(x) + undefined  # noqa: F821


class SlipInside(Rotated):
    def forward(self, x, angles):
        return super().forward(x, angles) + undefined  # noqa: F821


HELD = []


def held(layer, method):
    HELD.append(getattr(layer, method))
    return layer


def replaced(layer, method):
    setattr(layer, method, getattr(layer, method))
    return layer


@pytest.mark.parametrize(
    ("layer", "structure", "sentence"),
    [
        (WithoutBatch(), DENSE, r"layer layers.1 \(WithoutBatch\) calls .* takes \(batch, heads, tokens, head size\)"),
        (TwoKinds(), DENSE, r"attention layer layers.1 \(TwoKinds\) calls .* with \[2, 4\] heads"),
        (replaced(Fused(), "forward"), DENSE, r"layers.1 \(Fused\) would stay dense: its forward was replaced"),
        (replaced(Block(), "attention"), DENSE, r"layers.1 \(Block\) would stay dense: its attention was replaced"),
        (held(Fused(), "forward"), DENSE, r"layers.1 \(Fused\) would stay dense: something holds its method forward"),
        (
            held(Block(), "attention"),
            DENSE,
            r"layers.1 \(Block\) would stay dense: something holds its method attention",
        ),
        (Large(), DENSE, r"attention layer layers.1 \(Large\) calls .* Head size is 300; it has to be from 1 to 256"),
        (
            Rotated(),
            DENSE,
            r"layers.1 \(Rotated\) would stay dense: .* as a trial of this one on made-up inputs did not: it raised "
            "TypeError: .* missing 1 required positional argument: 'angles'",
        ),
        (Fused(), ds_sparse.BigBirdSparsityConfig(HEADS), "has random blocks and no seed"),
        (Fused(), ds_sparse.DenseSparsityConfig(8), "The model has 4 attention heads"),
    ],
)
def test_what_cannot_be_sparse_is_refused_before_anything_changes(layer, structure, sentence):
    model = Sequence(Fused(), layer)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=sentence):
        ds_sparse.sparsify(model, structure, max_seq_length=64)
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("model", [Sequence(Fused(), Slip()), Language(SlipInside)])
def test_a_slip_in_a_layer_is_named_and_the_cause(model):
    with pytest.raises(ValueError, match="did not: it raised NameError: name 'undefined' is not defined") as refusal:
        ds_sparse.sparsify(model, DENSE, max_seq_length=64)
    cause = refusal.value.__cause__
    assert isinstance(cause, NameError) and "return super().forward" in traceback.format_tb(cause.__traceback__)[-1]


def test_random_numbers_and_training_mode_are_as_before():
    model, state = Fused(), torch.random.get_rng_state()
    ds_sparse.sparsify(model, DENSE, max_seq_length=64)
    assert torch.equal(torch.random.get_rng_state(), state) and model.training
