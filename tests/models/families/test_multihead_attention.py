"""sparsify on models with nn.MultiheadAttention: PyTorch's transformers, and modules of a user's own."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ds_sparse
from ds_sparse import SparseMultiheadAttention
from ds_sparse.models.layers import attention_layers

HEADS, EMBED, TOKENS = 4, 32, 50
DENSE = {"mode": "dense", "block": 16}
LOCAL = {"mode": "local_sliding_window", "block": 16, "num_sliding_window_blocks": 1}


def encoder(**more):
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 64, batch_first=True, dtype=torch.float64, **more)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not more.get("norm_first", False))


def batch():
    padding = torch.zeros(2, TOKENS, dtype=torch.bool)
    padding[1, 30:] = True
    return torch.randn(2, TOKENS, EMBED, dtype=torch.float64), padding


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_dense_structure_gives_what_the_encoder_gave_and_undo_puts_it_back(norm_first):
    model, (x, padding) = encoder(dropout=0.0, norm_first=norm_first), batch()
    parameters, modules = list(model.parameters()), list(model.modules())

    def step():
        output = model(x, src_key_padding_mask=padding)
        return output, torch.autograd.grad(output.square().sum(), parameters)

    wanted = step()
    report = ds_sparse.sparsify(model, DENSE, max_seq_length=60)
    assert report.replaced == [
        (f"layers.{n}.self_attn", "MultiheadAttention", "SparseMultiheadAttention") for n in range(2)
    ]
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    torch.testing.assert_close(step(), wanted)
    with pytest.raises(ValueError, match="is sparse already"):
        ds_sparse.sparsify(model)
    report.undo()
    assert list(model.modules()) == modules and not attention_layers(model)[0]
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention
    torch.testing.assert_close(step(), wanted, rtol=0, atol=0)


def test_evaluation_is_sparse_too_where_pytorch_has_a_fast_path_of_its_own():
    model, (x, padding) = encoder(dropout=0.1).eval(), batch()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # PyTorch's nested tensors are a prototype
        dense = model(x, src_key_padding_mask=padding), model(x), model.layers[0](x)
    report = ds_sparse.sparsify(model, LOCAL, max_seq_length=64)
    with torch.no_grad():
        without_grad = model(x, src_key_padding_mask=padding), model(x), model.layers[0](x)
    with_grad = model(x, src_key_padding_mask=padding), model(x), model.layers[0](x)
    torch.testing.assert_close(without_grad, with_grad, rtol=0, atol=0)
    assert not any(torch.allclose(a, b) for a, b in zip(dense, without_grad, strict=True))
    report.undo()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        assert torch.equal(model(x, src_key_padding_mask=padding), dense[0])


def test_all_layers_and_copies_share_one_layout():
    model = encoder()
    ds_sparse.sparsify(model, LOCAL, max_seq_length=64)
    layers = [module for copied in (model, copy.deepcopy(model)) for module in copied.layers]
    assert len({id(layer.self_attn.attention._master) for layer in layers}) == 1


def test_a_decoder_keeps_its_cross_attention_and_the_report_says_so():
    torch.manual_seed(0)
    model = nn.Transformer(EMBED, HEADS, 1, 1, 64, dropout=0.0, batch_first=True)
    source, target = torch.randn(2, 40, EMBED), torch.randn(2, TOKENS, EMBED)
    causal = nn.Transformer.generate_square_subsequent_mask(TOKENS)
    masks = {"tgt_mask": causal, "tgt_is_causal": True}
    wanted = model(source, target, **masks)
    report = ds_sparse.sparsify(model, DENSE, max_seq_length=64)
    assert [name for name, *_ in report.replaced] == ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn"]
    assert str(report).endswith(
        "1 attention layer stays dense: cross-attention, whose keys are of another sequence\n"
        "  decoder.layers.0.multihead_attn  MultiheadAttention"
    )
    torch.testing.assert_close(model(source, target, **masks), wanted)
    torch.testing.assert_close(model(source, target, tgt_mask=causal), wanted)
    assert type(model.decoder.layers[0].multihead_attn) is nn.MultiheadAttention
    report.undo()
    assert "stays dense" not in str(report)


class Own(nn.Module):
    """Attention in a module of one's own, called as many do: without need_weights."""

    def __init__(self, **more):
        super().__init__()
        self.attention = nn.MultiheadAttention(EMBED, HEADS, **more)

    def forward(self, x, memory=None):
        memory = x if memory is None else memory
        return self.attention(x, memory, memory)[0]


def test_a_module_of_ones_own_is_taken_and_its_hooks_stay():
    model, x, seen = Own(), torch.randn(TOKENS, 2, EMBED), []
    model.attention.register_forward_hook(lambda *_: seen.append(1))
    wanted = model(x)
    ds_sparse.sparsify(model, DENSE, max_seq_length=64)
    torch.testing.assert_close(model(x), wanted)
    assert len(seen) == 2
    for memory in (torch.randn(40, 2, EMBED), x.clone()):
        with pytest.raises(ValueError, match="cross-attention"):
            model(x, memory)


def test_the_layer_itself_can_be_given():
    layer = nn.MultiheadAttention(EMBED, HEADS)
    report = ds_sparse.sparsify(layer, DENSE, max_seq_length=64)
    assert type(layer) is SparseMultiheadAttention
    report.undo()
    assert type(layer) is nn.MultiheadAttention and "attention" not in vars(layer)


class Subclass(nn.MultiheadAttention):
    pass


HELD = []


def held():
    HELD.append(nn.MultiheadAttention(EMBED, HEADS).forward)
    return HELD[0].__self__


def replaced():
    layer = nn.MultiheadAttention(EMBED, HEADS)
    layer.forward = layer.forward
    return layer


@pytest.mark.parametrize(
    ("layer", "structure", "sentence"),
    [
        (
            Subclass(EMBED, HEADS),
            DENSE,
            r"attention layer 1 \(Subclass\) would stay dense: it is of a class of its own",
        ),
        (replaced(), DENSE, r"attention layer 1 \(MultiheadAttention\) would stay dense: its forward was replaced"),
        (
            held(),
            DENSE,
            r"attention layer 1 \(MultiheadAttention\) would stay dense: something holds its method forward",
        ),
        (nn.MultiheadAttention(600, 2), DENSE, r"1 \(MultiheadAttention\) cannot be sparse. Head size is 300; .* 256"),
        (nn.MultiheadAttention(EMBED, HEADS, add_zero_attn=True), DENSE, "attention layer 1 .* has add_zero_attn"),
        (nn.Linear(2, 2), ds_sparse.BigBirdSparsityConfig(HEADS), "has random blocks and no seed"),
        (nn.Linear(2, 2), {"mode": "bigbird", "num_random_blocks": 1}, "has random blocks and no seed"),
        (nn.Linear(2, 2), ds_sparse.DenseSparsityConfig(8), "The model has 4 attention heads"),
    ],
)
def test_what_would_not_compute_the_same_is_refused_before_anything_changes(layer, structure, sentence, capsys):
    model = nn.ModuleList([nn.MultiheadAttention(EMBED, HEADS), layer])
    with pytest.raises(ValueError, match=sentence):
        ds_sparse.sparsify(model, structure, max_seq_length=64)
    assert type(model[0]) is nn.MultiheadAttention and not capsys.readouterr().out


class ByWeights(Own):
    """Computes the attention of its module from the module's weights."""

    def forward(self, x):
        m, options = self.attention, {"training": self.training, "need_weights": False}
        biases = (None, None, False, 0.0, m.out_proj.weight, m.out_proj.bias)
        return F.multi_head_attention_forward(
            x, x, x, EMBED, HEADS, m.in_proj_weight, m.in_proj_bias, *biases, **options
        )[0]


def attention_of(m, x):
    heads = F.linear(x, m.in_proj_weight, m.in_proj_bias).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    return m.out_proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class ByFunction(Own):
    def forward(self, x):
        return x + attention_of(self.attention, x)


class Needy(ByWeights):
    """Which a trial cannot run."""

    def forward(self, x, more):
        return super().forward(x) + more


class Initialized(Own):
    """Which reads the weights for other ends."""

    def start(self):
        nn.init.normal_(self.attention.in_proj_weight)

    def forward(self, x):
        return super().forward(x.to(self.attention.in_proj_weight.dtype))


@pytest.mark.parametrize("kind", [ByWeights, ByFunction, Needy])
def test_a_model_that_computes_a_layer_from_its_weights_is_refused(kind):
    model = nn.Sequential(Own(), kind())
    with pytest.raises(
        ValueError, match=r"attention layer 1.attention \(MultiheadAttention\) would stay dense: .* Call the"
    ):
        ds_sparse.sparsify(model, DENSE, max_seq_length=64)
    assert type(model[0].attention) is nn.MultiheadAttention
    report = ds_sparse.sparsify(model, {**DENSE, "layers": {"1": None}}, max_seq_length=64)
    assert [name for name, *_ in report.replaced] == ["0.attention"]


def test_a_model_that_reads_the_weights_of_a_layer_for_other_ends_is_taken():
    assert len(ds_sparse.sparsify(nn.Sequential(Initialized(), Initialized()), DENSE).replaced) == 2


def test_layers_may_have_structures_of_their_own_or_stay_dense():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(EMBED, HEADS, 64, batch_first=True), 4)
    report = ds_sparse.sparsify(model, {**LOCAL, "layers": {"1": DENSE, "2": None}}, max_seq_length=64)
    assert [name for name, *_ in report.replaced] == [f"layers.{n}.self_attn" for n in (0, 3, 1)]
    assert report.dense == [("layers.2.self_attn", "MultiheadAttention", 'null in "layers" of the block')]
    first, second, third, last = (layer.self_attn for layer in model.layers)
    assert first.attention is last.attention is not second.attention and type(third) is nn.MultiheadAttention
    report.undo()
    assert type(first) is nn.MultiheadAttention and model.use_nested_tensor
    with pytest.raises(ds_sparse.SparseAttentionConfigError, match="4"):
        ds_sparse.sparsify(model, {**LOCAL, "layers": {"4": None}}, max_seq_length=64)
    random_blocks = {"mode": "bigbird", "num_random_blocks": 1}
    with pytest.raises(ValueError, match="has random blocks and no seed"):
        ds_sparse.sparsify(model, {**LOCAL, "layers": {"0": random_blocks}}, max_seq_length=64)
