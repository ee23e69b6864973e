"""sparsify on layers that call F.scaled_dot_product_attention, beyond what test_contract.py asks of every family."""

import traceback

import pytest
import torch
import torch.nn.functional as F
from models.families.made import (
    DENSE,
    EMBED,
    HEADS,
    LOCAL,
    TOKENS,
    Block,
    Fused,
    Language,
    Outer,
    Rotated,
    Sequence,
    hidden,
    output_and_gradients,
)
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import ds_sparse


def test_each_device_gives_what_the_model_gave(device):
    model, x = Sequence(Fused(is_causal=True), Outer()).to(device), hidden().to(device)
    wanted = output_and_gradients(model, x)
    ds_sparse.sparsify(model, DENSE, max_seq_length=64)
    torch.testing.assert_close(output_and_gradients(model, x), wanted, rtol=1e-3, atol=1e-3)


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


class DropsInTraining(Fused):
    def forward(self, x):
        self.options["dropout_p"] = 0.5 if self.training else 0.0
        return super().forward(x)


@pytest.mark.parametrize(
    ("layer", "selection", "sentence"),
    [
        (DropsInTraining(), "token", "dropout of attention .0.5.: .* set it to 0"),
        (Fused(is_causal=True), "block", 'a causal layer, .*; take selection "token"'),
    ],
)
def test_what_is_not_computed_where_queries_choose_is_refused_at_the_door(layer, selection, sentence):
    model = Sequence(layer).eval()
    with pytest.raises(ValueError, match=f"cannot be sparse. {sentence}"):
        ds_sparse.sparsify(model, {"mode": "moba", "block": 16, "selection": selection})
    ds_sparse.sparsify(model, DENSE, max_seq_length=64)


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


class Slip(Fused):
    def forward(self, x):
        return super().forward(x) + undefined  # noqa: F821


class SlipInside(Rotated):
    def forward(self, x, angles):
        return super().forward(x, angles) + undefined  # noqa: F821


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
