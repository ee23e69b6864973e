"""sparsify on models with nn.MultiheadAttention, beyond what test_contract.py asks of every family."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from models.families.made import DENSE, EMBED, HEADS, LOCAL, TOKENS, Own, encoder, hidden
from torch import nn

import ds_sparse


def batch():
    padding = torch.zeros(2, TOKENS, dtype=torch.bool)
    padding[1, 30:] = True
    return hidden(), padding


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
