"""SparseMultiheadAttention: what nn.MultiheadAttention computes, under a structure."""

import copy
import pickle

import pytest
import torch
from helpers import random, seeded
from torch import nn

import ds_sparse
from ds_sparse import (
    BigBirdSparsityConfig,
    DenseSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparseMultiheadAttention,
)

HEADS, EMBED, TOKENS, BLOCK = 4, 32, 50, 16
DENSE = DenseSparsityConfig(HEADS, BLOCK)
LOCAL = LocalSlidingWindowSparsityConfig(HEADS, BLOCK, attention="bidirectional")


def pair(structure=DENSE, **arguments):
    """PyTorch's module in float64, and ours with its state dict."""
    torch.manual_seed(0)
    dense = nn.MultiheadAttention(EMBED, HEADS, dtype=torch.float64, **arguments)
    for parameter in dense.parameters():
        nn.init.normal_(parameter, std=0.2)
    sparse = SparseMultiheadAttention(
        EMBED, HEADS, dtype=torch.float64, sparsity_config=structure, max_seq_length=64, **arguments
    )
    sparse.load_state_dict(dense.state_dict())
    return dense, sparse


def padding(batch=2):
    mask = torch.zeros(batch, TOKENS, dtype=torch.bool)
    mask[-1, 30:] = True
    return mask


def added(mask):
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, float("-inf"))


def dropped(*shape):
    mask = torch.rand(*shape, generator=seeded()) < 0.4
    mask[..., 0] = False
    return mask


MASKS = {
    "none": {},
    "padding": {"key_padding_mask": padding()},
    "added padding": {"key_padding_mask": added(padding()) - 0.5},
    "pairs": {"attn_mask": dropped(TOKENS, TOKENS)},
    "pairs of heads": {"attn_mask": dropped(2 * HEADS, TOKENS, TOKENS), "key_padding_mask": padding()},
    "added pairs": {"attn_mask": random(seeded(), TOKENS, TOKENS), "key_padding_mask": added(padding())},
}


def assert_alike(dense, sparse, operands, masks, **more):
    """Outputs and the gradients of operands and parameters."""
    (wanted, _), (found, weights) = (
        dense(*operands, need_weights=False, **masks),
        sparse(*operands, **{**masks, **more}),
    )
    assert weights is None
    torch.testing.assert_close(found, wanted)
    seed = random(seeded(1), *wanted.shape)
    inputs = list(dict.fromkeys(operands))
    gradients = [
        torch.autograd.grad((output * seed).sum(), [*inputs, *module.parameters()])
        for output, module in ((found, sparse), (wanted, dense))
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_dense_structure_gives_what_pytorchs_module_gives(masks, batch_first):
    x = random(seeded(), *((2, TOKENS) if batch_first else (TOKENS, 2)), EMBED).requires_grad_()
    assert_alike(*pair(batch_first=batch_first), [x, x, x], masks)


def test_each_device_gives_what_pytorchs_module_gives(device):
    dense, sparse = (module.to(device, torch.float32) for module in pair(batch_first=True))
    x = torch.randn(2, TOKENS, EMBED, device=device)
    found = []
    for module, more in ((dense, {"need_weights": False}), (sparse, {})):
        output = module(x, x, x, key_padding_mask=padding().to(device), **more)[0]
        found.append((output, torch.autograd.grad(output.square().sum(), list(module.parameters()))))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


def test_operands_may_have_no_batch_and_the_module_no_bias():
    x = random(seeded(), TOKENS, EMBED).requires_grad_()
    masks = {"key_padding_mask": padding()[1], "attn_mask": dropped(HEADS, TOKENS, TOKENS)}
    for batch_first in (True, False):
        assert_alike(*pair(bias=False, batch_first=batch_first), [x, x, x], masks)


def test_operands_may_differ_and_key_and_value_have_sizes_of_their_own():
    query, key, value = (random(seeded(n), TOKENS, 2, n).requires_grad_() for n in (EMBED, 24, 40))
    assert_alike(*pair(kdim=24, vdim=40), [query, key, value], MASKS["padding"])
    value = random(seeded(1), TOKENS, 2, EMBED).requires_grad_()
    assert_alike(*pair(), [query, query, value], MASKS["padding"])


def test_rows_with_nothing_left_are_the_bias_of_the_output_projection():
    dense, sparse = pair(batch_first=True)
    x = random(seeded(), 2, TOKENS, EMBED).requires_grad_()
    masks = {"key_padding_mask": padding()}
    masks["key_padding_mask"][0] = True
    assert_alike(dense, sparse, [x, x, x], masks)
    torch.testing.assert_close(sparse(x, x, x, **masks)[0][0], sparse.out_proj.bias.expand(TOKENS, -1))


def test_the_hint_of_a_causal_mask_is_taken_with_and_without_the_mask():
    dense, sparse = pair(batch_first=True)
    x = random(seeded(), 2, TOKENS, EMBED).requires_grad_()
    causal = {"attn_mask": torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), "key_padding_mask": padding()}
    for more in ({}, {"is_causal": True}, {"is_causal": True, "attn_mask": None}):
        assert_alike(dense, sparse, [x, x, x], causal, **more)


def test_added_masks_get_gradients():
    dense, sparse = pair(batch_first=True)
    x = random(seeded(), 2, TOKENS, EMBED)
    found = []
    for module, more in ((dense, {"need_weights": False}), (sparse, {})):
        masks = {
            "attn_mask": random(seeded(3), 2 * HEADS, TOKENS, TOKENS).requires_grad_(),
            "key_padding_mask": random(seeded(4), 2, TOKENS).requires_grad_(),
        }
        module(x, x, x, **masks, **more)[0].square().sum().backward()
        found.append([mask.grad for mask in masks.values()])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("structure", [LOCAL, {"mode": "bigbird", "block": BLOCK, "num_random_blocks": 1, "seed": 3}])
def test_a_structure_is_a_mask_of_its_blocks(structure):
    dense, sparse = pair(structure, batch_first=True)
    live = sparse.attention.layout_for(TOKENS).repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    dead = ~live[:, :TOKENS, :TOKENS].expand(HEADS, -1, -1)
    assert dead.any()
    x = random(seeded(), 1, TOKENS, EMBED).requires_grad_()
    output = sparse(x, x, x, key_padding_mask=padding()[1:])[0]
    wanted = dense(x, x, x, attn_mask=dead, key_padding_mask=padding()[1:], need_weights=False)[0]
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x) for y in (output, wanted)))


def test_checkpoints_of_either_load_into_the_other():
    dense, sparse = pair(kdim=24)
    assert list(sparse.state_dict()) == list(dense.state_dict())
    dense.load_state_dict(sparse.state_dict())
    assert isinstance(sparse, nn.MultiheadAttention) and sparse.max_seq_length == 64


def test_copies_share_the_layout_and_a_pickle_has_it():
    x = torch.randn(TOKENS, 2, EMBED, dtype=torch.float64)
    sparse = pair(LOCAL)[1]
    twin, read = copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse))
    assert twin.attention._master is sparse.attention._master
    for other in (twin, read):
        assert torch.equal(other(x, x, x)[0], sparse(x, x, x)[0])


def test_weights_are_drawn_as_pytorch_draws_them():
    for sizes in ({}, {"kdim": 24}):
        modules = []
        for make in (nn.MultiheadAttention, SparseMultiheadAttention):
            torch.manual_seed(5)
            modules.append(make(EMBED, HEADS, **sizes))
            modules[-1]._reset_parameters()
        torch.testing.assert_close(modules[1].state_dict(), modules[0].state_dict())


def test_dropout_is_that_of_probabilities_and_in_training_alone():
    sparse = SparseMultiheadAttention(EMBED, HEADS, dropout=0.5, sparsity_config=DENSE)
    x = torch.randn(TOKENS, 2, EMBED)
    assert not torch.equal(sparse(x, x, x)[0], sparse(x, x, x)[0])
    sparse.eval()
    assert torch.equal(sparse(x, x, x)[0], sparse(x, x, x)[0])


X = torch.randn(TOKENS, 2, EMBED)


@pytest.mark.parametrize(
    ("operands", "more", "sentence"),
    [
        ((X, X, X), {"need_weights": True}, "computes no matrix of attention probabilities"),
        ((X, X[:40], X[:40]), {}, "the layout is that of a sequence with itself"),
        ((X, X.clone(), X), {"key_padding_mask": padding().long()}, r"bool \(drops where True\)"),
        ((X, X, X), {"key_padding_mask": padding().T}, r"has shape \(50, 2\); it has to be \(2, 50\)"),
        ((X, X, X), {"attn_mask": torch.zeros(HEADS, TOKENS, TOKENS)}, r"has to be \(50, 50\) or \(8, 50, 50\)"),
        ((X[None], X[None], X[None]), {}, r"or \(tokens, batch, numbers\) alike"),
        ((X[..., :16], X, X.clone()), {}, r"the last dimensions have to be \(32, 32, 32\)"),
    ],
)
def test_what_is_not_computed_is_refused(operands, more, sentence):
    sparse = SparseMultiheadAttention(EMBED, HEADS, sparsity_config=DENSE)
    with pytest.raises(ValueError, match=sentence):
        sparse(*operands, **more)


def test_key_and_value_in_one_beside_another_query_are_cross_attention():
    sparse = SparseMultiheadAttention(EMBED, HEADS, sparsity_config=DENSE)
    other = X.clone()
    with pytest.raises(ValueError, match="as in cross-attention"):
        sparse(X, other, other)
    assert sparse(X, other, other.view_as(other))[0].shape == X.shape


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"add_bias_kv": True}, "has add_bias_kv, which add a key that is no token"),
        ({"add_zero_attn": True}, "has add_zero_attn"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"sparsity_config": DenseSparsityConfig(8)}, "The model has 4 attention heads"),
        ({"sparsity_config": {"mode": "fixd"}}, "fixd"),
        ({"sparsity_config": BigBirdSparsityConfig(HEADS)}, "has random blocks and no seed.*give it one"),
    ],
)
def test_modules_that_could_not_compute_are_not_built(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        SparseMultiheadAttention(EMBED, HEADS, **arguments)


def encoder(attention, **more):
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 64, dropout=0.0, batch_first=True, dtype=torch.float64)
    layer.self_attn = attention
    return nn.TransformerEncoder(layer, 2, **more)


def test_it_runs_inside_pytorchs_encoder_in_training_and_in_evaluation(monkeypatch):
    dense, sparse = pair(batch_first=True)
    x = random(seeded(), 2, TOKENS, EMBED)
    wanted = encoder(dense)(x, src_key_padding_mask=padding())
    model = encoder(sparse, enable_nested_tensor=False)
    calls = []
    forward = SparseMultiheadAttention.forward
    monkeypatch.setattr(
        SparseMultiheadAttention, "forward", lambda *args, **more: calls.append(1) or forward(*args, **more)
    )
    torch.testing.assert_close(model(x, src_key_padding_mask=padding()), wanted)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x, src_key_padding_mask=padding()), wanted)
        model(x)
        model.layers[0](x)
    assert len(calls) == 2 + 2 + 2 + 1


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ({"sparsity_config": 3}, TypeError, r"sparsity_config is int; .* such as FixedSparsityConfig\(num_heads=4\)"),
        ({"sparsity_config": ds_sparse.FixedSparsityConfig}, TypeError, "is the class FixedSparsityConfig; it has to"),
        ({"sparsity_config": {"layers": {"0": None}}}, ValueError, "has layers, and one structure is wanted here"),
        ({"max_seq_length": "x"}, TypeError, "max_seq_length, or .*, is 'x'; it has to be an integer of 1 or more"),
        ({"max_seq_length": 12.5}, TypeError, "is 12.5; it has to be an integer"),
        ({"max_seq_length": -5}, ValueError, "is -5; it has to be an integer of 1 or more, in tokens"),
    ],
)
def test_a_structure_or_length_of_another_type_is_refused(given, error, sentence):
    with pytest.raises(error, match=sentence):
        ds_sparse.SparseMultiheadAttention(16, 4, **given)
    if "layers" not in str(given):
        with pytest.raises(error, match=sentence):
            ds_sparse.sparsify(nn.TransformerEncoderLayer(16, 4), **{"sparsity_config": {}} | given)


def test_nested_tensors_of_pytorchs_encoder_are_refused_with_the_way_out():
    dense, sparse = pair(batch_first=True)
    model, x = encoder(dense).eval(), random(seeded(), 2, TOKENS, EMBED)
    for layer in model.layers:
        layer.self_attn = sparse
    with torch.no_grad(), pytest.raises(ValueError, match="use_nested_tensor = False"):
        model(x, src_key_padding_mask=padding())
    model.use_nested_tensor = False
    with torch.no_grad():
        assert model(x, src_key_padding_mask=padding()).shape == x.shape


def test_it_compiles_into_one_graph_inside_pytorchs_encoder():
    torch._dynamo.reset()
    model = encoder(pair(LOCAL, batch_first=True)[1], enable_nested_tensor=False).layers[0]
    x = random(seeded(), 2, TOKENS, EMBED).requires_grad_()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found, wanted = (f(x, src_key_padding_mask=padding()) for f in (compiled, model))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x) for y in (found, wanted)))


def test_autocast_is_that_of_the_projections():
    sparse = SparseMultiheadAttention(EMBED, HEADS, sparsity_config=DENSE)
    with torch.autocast("cpu", torch.bfloat16):
        assert sparse(X, X, X)[0].dtype == torch.bfloat16
