"""Layers whose queries choose their blocks by means of keys: mode "moba"."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import random, seeded

import ds_sparse
from ds_sparse import MobaSparsityConfig, SparseSelfAttention, reference, sparsify
from ds_sparse.modules.structured_attention import StructuredAttention

OPERATORS = ("selected_attention_forward", "selected_attention_backward")


def operands(tokens: int, heads: int = 4, key_heads: int = 2, batch: int = 2) -> list[torch.Tensor]:
    shapes = (batch, heads, tokens, 16), *[(batch, key_heads, tokens, 16)] * 2
    return [random(seeded(i), *shape, dtype=torch.float32) for i, shape in enumerate(shapes)]


def expected(structure: MobaSparsityConfig, query: Any, key: Any, value: Any, **options: Any) -> torch.Tensor:
    """Of tokens that choose, in float64."""
    groups = key.shape[1] if structure.chosen_by_group else None
    chosen = reference.select_blocks(
        query, key, structure.block, structure.num_chosen_blocks, groups=groups, first=structure.num_first_blocks,
        local=structure.num_sliding_window_blocks // 2 + 1, **options,
    )  # fmt: skip
    output = reference.selected_attention(query, key, value, chosen, structure.block, **options)
    assert isinstance(output, torch.Tensor)
    return output


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_tokens_choose(device: str, causal: bool, by_group: bool):
    structure = MobaSparsityConfig(
        4, block=16, num_chosen_blocks=4, num_first_blocks=1, num_sliding_window_blocks=3 if causal else 1,
        chosen_by_group=by_group, causal=causal,
    )  # fmt: skip
    wide = [x.double().requires_grad_() for x in operands(100)]
    mine = [x.to(device).requires_grad_() for x in operands(100)]
    keep = torch.rand(2, 100, generator=seeded(5)) < 0.8
    wanted = expected(structure, *wide, causal=causal, key_padding_mask=keep)
    found = StructuredAttention(structure, 128)(*mine, key_padding_mask=keep.to(device))
    torch.testing.assert_close(found.cpu().double(), wanted, atol=1e-4, rtol=1e-4)
    grad = torch.randn(wanted.shape, generator=seeded(6), dtype=torch.float64)
    of_wanted = torch.autograd.grad(wanted, wide, grad)
    of_found = torch.autograd.grad(found, mine, grad.float().to(device))
    for ours, right in zip(of_found, of_wanted, strict=True):
        torch.testing.assert_close(ours.cpu().double(), right, atol=1e-3, rtol=1e-3)


def test_blocks_of_queries_choose(device: str):
    structure = MobaSparsityConfig(4, block=16, num_chosen_blocks=3, selection="block")
    query, key, value = operands(120)
    chosen = reference.select_blocks(query.double(), key.double(), 16, 3, local=1, query_block=16)  # (2, 4, 8, 3)
    live = (chosen.unsqueeze(-1) == torch.arange(8)).any(3)
    seen = live.repeat_interleave(16, 2).repeat_interleave(16, 3)[..., :120, :120]
    everything = torch.ones(1, 8, 8, dtype=torch.bool)
    wanted = reference.attention(*(x.double() for x in (query, key, value)), everything, 16, attn_mask=seen)
    found = StructuredAttention(structure, 128)(*(x.to(device) for x in (query, key, value)))
    torch.testing.assert_close(found.cpu().double(), wanted, atol=1e-4, rtol=1e-4)


def test_padding_as_models_write_it_counts_in_no_mean(device: str):
    """-10000 of BERT's masks, and the least number of a dtype, hide as a bool mask does."""
    attention = SparseSelfAttention(MobaSparsityConfig(4, block=16, num_chosen_blocks=2), max_seq_length=128)
    query, key, value = (x.to(device) for x in operands(96, key_heads=4))
    keep = torch.ones(2, 96, dtype=torch.bool, device=device)
    keep[:, 70:] = False
    wanted = attention.attend(query, key, value, key_padding_mask=keep)
    for least in (-10000.0, torch.finfo(torch.float32).min, float("-inf")):
        mask = torch.zeros(2, 96, device=device).masked_fill(~keep, least)
        assert torch.equal(attention(query, key, value, key_padding_mask=mask), wanted)


@pytest.mark.parametrize("side", [slice(0, 21), slice(70, 96)], ids=["left", "right"])
@pytest.mark.parametrize(("selection", "causal"), [("token", False), ("token", True), ("block", False)])
def test_what_padding_holds_reaches_no_token(device: str, selection: Any, causal: bool, side: slice):
    structure = MobaSparsityConfig(4, block=16, num_chosen_blocks=2, selection=selection, causal=causal)
    attention, given = StructuredAttention(structure, 96), [x.to(device) for x in operands(96)]
    keep = torch.ones(2, 96, dtype=torch.bool, device=device)
    keep[:, side] = False
    wanted = attention(*given, key_padding_mask=keep)
    for value in (100.0, math.nan):
        spoilt = (x.masked_fill(~keep[:, None, :, None], value) for x in given)
        found = attention(*spoilt, key_padding_mask=keep)
        torch.testing.assert_close(found.transpose(1, 2)[keep], wanted.transpose(1, 2)[keep])


def test_documents_choose_in_their_own(device: str):
    attention = StructuredAttention(MobaSparsityConfig(4, block=16, num_chosen_blocks=2, causal=True), 128)
    query, key, value = (x.to(device) for x in operands(150, batch=1))
    edges = torch.tensor([0, 37, 37, 150], device=device)
    found = attention(query, key, value, cu_seqlens=edges)
    for begin, end in ((0, 37), (37, 150)):
        alone = attention(*(x[:, :, begin:end] for x in (query, key, value)))
        torch.testing.assert_close(found[:, :, begin:end], alone, atol=1e-5, rtol=1e-5)


def test_cached_keys_are_chosen_as_all_others(device: str):
    """Tokens one after the other give what they give together, beyond max_seq_length too."""
    attention = StructuredAttention(MobaSparsityConfig(4, block=16, num_chosen_blocks=2, causal=True), 32)
    query, key, value = (x.to(device) for x in operands(80))
    together = attention(query, key, value)
    for at in (0, 15, 16, 47, 79):
        one = attention(query[:, :, at : at + 1], key[:, :, : at + 1], value[:, :, : at + 1], query_offset=at)
        torch.testing.assert_close(one, together[:, :, at : at + 1], atol=1e-5, rtol=1e-5)


def test_a_mask_that_learns_is_refused():
    attention = StructuredAttention(MobaSparsityConfig(4, block=16, num_chosen_blocks=2), 32)
    with pytest.raises(ValueError, match="key_padding_mask requires a gradient, and masks have none here"):
        attention(*operands(32), key_padding_mask=torch.zeros(2, 32, requires_grad=True))


def test_there_are_no_separate_operations():
    structure = MobaSparsityConfig(4, block=16, num_chosen_blocks=2)
    with pytest.raises(ValueError, match='implementation is "separate", and MobaSparsityConfig chooses'):
        SparseSelfAttention(structure, implementation="separate")
    with pytest.raises(ValueError, match="MobaSparsityConfig chooses blocks in each call"):
        SparseSelfAttention(structure).get_ops(4, 128)


def test_checkpoints_go_from_and_to_structures_with_a_layout():
    """Another structure would compute on blocks that may be chosen, which are all but dense."""
    chooses = SparseSelfAttention(MobaSparsityConfig(4, block=16, num_chosen_blocks=2), max_seq_length=128)
    fixed = SparseSelfAttention(ds_sparse.FixedSparsityConfig(4, block=32, num_local_blocks=2), max_seq_length=128)
    of_fixed = fixed.master_layout.clone()
    fixed.load_state_dict(chooses.state_dict())
    assert torch.equal(fixed.master_layout, of_fixed)
    chooses.load_state_dict(fixed.state_dict())
    assert chooses.master_layout.all() and chooses.max_seq_length == 128
    with pytest.raises(ValueError, match="MobaSparsityConfig chooses blocks in each call, and takes no layout"):
        chooses.master_layout = of_fixed


def test_no_layout_is_made_of_what_may_be_chosen():
    """Of this many tokens it would not fit into a machine."""
    attention = SparseSelfAttention(
        MobaSparsityConfig(4, block=16, num_chosen_blocks=2, causal=True), "add", "mul", 2**26
    )
    assert attention.attend(*operands(40)).shape == (2, 4, 40, 16)
    assert list(attention.named_buffers()) == [] and attention.max_seq_length == 2**26
    part = attention.attention.of_heads((0, 1))
    assert part(*(x[:, :n] for x, n in zip(operands(40), (2, 1, 1), strict=True))).shape == (2, 2, 40, 16)
    with pytest.raises(ValueError, match="sequence length, 40, is not a multiple"):
        SparseSelfAttention(MobaSparsityConfig(4, block=16, num_chosen_blocks=2), max_seq_length=40)


@pytest.mark.parametrize(("selection", "causal"), [("token", True), ("token", False), ("block", False)])
def test_no_sequences_and_tensors_without_values_give_their_shape(selection: Any, causal: bool):
    structure = MobaSparsityConfig(4, block=16, num_chosen_blocks=2, selection=selection, causal=causal)
    attention, given = SparseSelfAttention(structure, max_seq_length=64), operands(50)
    for batch in ([x[:0] for x in given], [x.to("meta") for x in given]):
        leaves = [x.requires_grad_() for x in batch]
        output = attention.attend(*leaves, key_padding_mask=torch.ones_like(batch[0][:, 0, :, 0], dtype=torch.bool))
        assert output.shape == leaves[0].shape and output.device == leaves[0].device
        assert [x.shape for x in torch.autograd.grad(output.sum(), leaves)] == [x.shape for x in leaves]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_decoder_generates_as_it_trains(compiled: bool):
    families = pytest.importorskip("integrations.families")
    model = families.make(families.DECODERS["llama"])
    tokens = torch.randint(50, (2, 70), generator=seeded(0))
    dense = model(tokens).logits
    report = sparsify(model, {"mode": "moba", "block": 16, "num_chosen_blocks": 2})
    forward = torch.compile(model, backend="aot_eager") if compiled else model
    whole = forward(input_ids=tokens).logits
    assert not torch.allclose(whole, dense, atol=1e-4)
    first = forward(input_ids=tokens[:, :50], use_cache=True)
    rest = forward(input_ids=tokens[:, 50:], past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), whole, atol=1e-4, rtol=1e-4)
    loss = forward(input_ids=tokens, labels=tokens).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    report.undo()
    torch.testing.assert_close(model(tokens).logits, dense)


def test_layers_that_drop_are_refused_at_the_door():
    structure = MobaSparsityConfig(4, block=16)
    sentence = 'dropout of attention .0.1.: MobaSparsityConfig .* set it to 0, or take selection "block"'
    with pytest.raises(ValueError, match=sentence):
        SparseSelfAttention(structure, attention_dropout=0.1)
    with pytest.raises(ValueError, match=sentence):
        ds_sparse.SparseMultiheadAttention(32, 4, dropout=0.1, sparsity_config=structure)
    model = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    with pytest.raises(ValueError, match=f"layer self_attn .MultiheadAttention. cannot be sparse. {sentence}"):
        sparsify(model, structure)
    assert type(model.self_attn) is torch.nn.MultiheadAttention
    sparsify(model, MobaSparsityConfig(4, block=16, selection="block"))


def test_a_causal_model_refuses_blocks_of_queries_at_the_door():
    families = pytest.importorskip("integrations.families")
    model = families.make(families.DECODERS["llama"])
    with pytest.raises(ValueError, match='LlamaAttention. cannot be sparse. a causal layer, .* take selection "token"'):
        sparsify(model, {"mode": "moba", "selection": "block"})
    assert model.config._attn_implementation != "ds_sparse"
