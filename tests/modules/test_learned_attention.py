"""Modes "nsa" and "indexer", whose structures add parameters, and what all that choose refuse alike, "moba" too."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import CountedOperators, random, seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ds_sparse
from ds_sparse import (
    BertSparseSelfAttention,
    IndexerSparsityConfig,
    MobaSparsityConfig,
    NativeSparsityConfig,
    SparseMultiheadAttention,
    SparseSelfAttention,
    sparsify,
)
from ds_sparse.modules.structured_attention import StructuredAttention

NSA = NativeSparsityConfig(
    4, block=16, num_chosen_blocks=4, num_sliding_window_blocks=1, compressed_length=16, compressed_stride=8, window=20,
    causal=True,
)  # fmt: skip
INDEXER = IndexerSparsityConfig(4, block=16, num_chosen_blocks=2, num_first_blocks=1, index_dim=8)
MOBA = MobaSparsityConfig(4, block=16, num_chosen_blocks=2)
BY_BLOCK = MobaSparsityConfig(4, block=16, num_chosen_blocks=2, selection="block")
EACH = pytest.mark.parametrize("structure", [NSA, INDEXER], ids=["nsa", "indexer"])


def operands(tokens: int, heads: int = 4, key_heads: int = 2, batch: int = 2) -> list[Tensor]:
    shapes = (batch, heads, tokens, 16), *[(batch, key_heads, tokens, 16)] * 2
    return [random(seeded(i), *shape, dtype=torch.float32) for i, shape in enumerate(shapes)]


def module_of(structure: Any) -> nn.Module:
    """Gates of nsa start at zero, where they have no gradient of queries."""
    torch.manual_seed(0)
    made = SparseSelfAttention(structure, max_seq_length=96, head_dim=16, num_key_heads=2).sparse_attention
    for name, parameter in made.named_parameters():
        if name.startswith("gate"):
            nn.init.normal_(parameter)
    return made


@EACH
def test_a_layer_computes_what_its_module_does(device: str, structure: Any):
    layer = SparseSelfAttention(structure, max_seq_length=96, head_dim=16, num_key_heads=2).to(device)
    query, key, value = (x.to(device) for x in operands(90))
    keep = torch.ones(2, 90, dtype=torch.bool, device=device)
    keep[:, 80:] = False
    padding = torch.zeros(2, 90, device=device).masked_fill(~keep, -10000.0)  # as BERT's masks have it
    found = layer.attend(query, key, value, key_padding_mask=padding)
    more = {"causal": structure.causal, "key_padding_mask": keep}
    assert torch.equal(found, layer.sparse_attention(query, key, value, **more))
    assert layer.sparse_attention.k == structure.num_chosen_blocks and layer.sparse_attention.first == 1
    assert not torch.equal(found, layer.attend(query, key, value))


def test_an_indexer_has_the_heads_that_are_asked_for():
    for index_heads, heads in (("group", 2), ("head", 4), ("one", 1)):
        structure = IndexerSparsityConfig(4, block=16, index_dim=8, index_heads=index_heads, loss_weight=0.5)
        module: Any = SparseSelfAttention(structure, head_dim=16, num_key_heads=2).sparse_attention
        assert (module.index_heads, module.index_dim, module.loss_weight) == (heads, 8, 0.5)


def test_an_encoders_layer_learns_both_ways_and_is_saved(device: str):
    config = SimpleNamespace(hidden_size=64, num_attention_heads=4)
    layer = BertSparseSelfAttention(config, INDEXER, max_seq_length=96).to(device)
    x = random(seeded(0), 2, 96, 64, dtype=torch.float32).to(device)
    layer(x).sum().backward()
    assert all(parameter.grad.any() for parameter in layer.sparse_self_attention.parameters())
    other = BertSparseSelfAttention(config, INDEXER, max_seq_length=96).to(device)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.eval()(x), layer.eval()(x))


class Layer(nn.Module):
    """In the manner of bing_bert."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))
        self.num_attention_heads = 4

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        raise NotImplementedError


def test_layers_that_become_sparse_have_parameters_of_their_own():
    model = nn.ModuleDict({name: Layer().double().eval() for name in ("first", "second")})
    keys = set(model.state_dict())
    report = sparsify(model, {"mode": "indexer", "block": 16, "index_dim": 8}, max_seq_length=64)
    assert ", 2,048 parameters added" in str(report)
    learned = [layer.sparse_self_attention.sparse_attention for layer in model.values()]
    assert all(weight.dtype == torch.float64 for module in learned for weight in module.parameters())
    assert not torch.equal(learned[0].key_weight, learned[1].key_weight)
    assert not any(module.training for module in learned)
    report.undo()
    assert set(model.state_dict()) == keys


@EACH
def test_layers_without_a_place_for_parameters_are_refused(structure: Any):
    sentence = f"{type(structure).__name__} adds parameters, a module a layer, and this kind of layer has no place"
    for make in (
        lambda: StructuredAttention(structure, 64),
        lambda: SparseSelfAttention(structure),
        lambda: SparseMultiheadAttention(32, 4, sparsity_config=structure),
        lambda: ds_sparse.SequenceParallelAttention(structure, 64),
        lambda: sparsify(nn.TransformerEncoderLayer(32, 4), structure),
    ):
        with pytest.raises(ValueError, match=sentence):
            make()
    attention = StructuredAttention(structure, 64, gives_learned=True)
    with pytest.raises(ValueError, match="this layer has no module with them"):
        attention(*operands(64))
    with pytest.raises(ValueError, match="for all heads, of which this rank has 2"):
        attention.of_heads((0, 1))


PACKED = {"cu_seqlens": torch.tensor([0, 32])}
BIASED, DROPPING = {"rpe": torch.zeros(32, 32)}, {"dropout_p": 0.1}


@pytest.mark.parametrize(
    ("structure", "options", "sentence"),
    [
        (INDEXER, BIASED, "rpe: IndexerSparsityConfig does not compute it"),
        (INDEXER, DROPPING, r"dropout of attention .0.1.: .*; set it to 0\.$"),
        (INDEXER, {"sinks": torch.zeros(4)}, "sinks: "),
        (INDEXER, PACKED | {"document_layout": "row"}, "document_layout='row'"),
        (MOBA, BIASED, "rpe: MobaSparsityConfig .* take a structure with a layout"),
        (MOBA, DROPPING, 'dropout of attention .0.1.: .* set it to 0, or take selection "block"'),
        (MOBA, DROPPING | {"causal": True}, r"dropout of attention .0.1.: .* set it to 0\.$"),
        (MOBA, PACKED | {"document_layout": "row"}, "document_layout='row'"),
        (BY_BLOCK, {"query_offset": 4}, 'query_offset, as of cached keys: .* take selection "token"'),
        (BY_BLOCK, {"causal": True}, 'a causal layer, whose tokens would choose .* take selection "token"'),
        (BY_BLOCK, PACKED, 'cu_seqlens of packed documents: .* take selection "token"'),
    ],
)
def test_what_is_not_computed_is_refused(structure: Any, options: dict[str, Any], sentence: str):
    layer = SparseSelfAttention(structure, max_seq_length=32, head_dim=16, num_key_heads=2)
    with pytest.raises(ValueError, match=sentence):
        layer.attention(*operands(32, batch=1), learned=layer._modules.get("sparse_attention"), **options)


def test_nsa_is_refused_where_tokens_see_later_ones():
    structure = NativeSparsityConfig(4)
    with pytest.raises(ValueError, match='NativeSparsityConfig is for causal models.*mode "indexer"'):
        BertSparseSelfAttention(SimpleNamespace(hidden_size=64, num_attention_heads=4), structure)


@pytest.mark.parametrize(
    ("cls", "fields", "sentence"),
    [
        (NativeSparsityConfig, {"compressed_stride": 12}, "multiples of the stride"),
        (NativeSparsityConfig, {"num_chosen_blocks": 2}, "take 3 blocks whatever they score"),
        (NativeSparsityConfig, {"window": 0}, "greater than or equal to 1"),
        (IndexerSparsityConfig, {"index_heads": "some"}, "'group', 'head' or 'one'"),
        (IndexerSparsityConfig, {"loss_weight": 0.0}, "greater than 0"),
        (IndexerSparsityConfig, {"strict_causal": True}, "strict_causal"),
        (MobaSparsityConfig, {"block": 8}, "Input should be 16, 32, 64, 128, 256, 512 or 1024"),
        (MobaSparsityConfig, {"num_chosen_blocks": 2, "num_first_blocks": 2}, "take 3 blocks whatever they score, and"),
        (MobaSparsityConfig, {"num_chosen_blocks": 2, "num_sliding_window_blocks": 3}, "take 3 blocks"),
        (MobaSparsityConfig, {"block": 512, "selection": "block"}, "block is 512, and blocks of queries that choose"),
        (MobaSparsityConfig, {"strict_causal": True}, "strict_causal"),  # cuts layouts, and seeds draw them
        (MobaSparsityConfig, {"seed": 0}, "seed"),
        (MobaSparsityConfig, {"selection": "block", "causal": True}, 'selection is "block" and causal true'),
    ],
)
def test_fields_that_do_not_fit(cls: Any, fields: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        cls(4, **fields)


def test_parameters_are_drawn_once():
    dense, config = torch.nn.Module(), SimpleNamespace(hidden_size=64, num_attention_heads=4)
    for name in ("query", "key", "value"):
        dense.add_module(name, nn.Linear(64, 64))
    torch.manual_seed(0)
    layer: Any = BertSparseSelfAttention(config, INDEXER, max_seq_length=96, projections_of=dense)
    torch.manual_seed(0)
    alone: Any = SparseSelfAttention(INDEXER, max_seq_length=96, head_dim=16)
    found = layer.sparse_self_attention.sparse_attention.query_weight
    assert torch.equal(found, alone.sparse_attention.query_weight)


@pytest.mark.parametrize(
    ("structure", "name"),
    [(NSA, "NativeSparseAttention"), (INDEXER, "IndexerAttention"), (MOBA, "MobaSparsityConfig")],
)
def test_samples_of_vmap_belong_into_the_batch(structure: Any, name: str):
    layer = SparseSelfAttention(structure, max_seq_length=96, head_dim=16, num_key_heads=2)
    with pytest.raises(ValueError, match=f"{name} is called under torch.vmap, .* put samples into the batch"):
        torch.func.vmap(layer.attend)(*(x[None] for x in operands(50)))


@EACH
def test_heads_that_are_too_large_are_not_sent_to_operations_of_layouts(structure: Any):
    layer: Any = SparseSelfAttention(structure, max_seq_length=96, head_dim=300)
    with pytest.raises(ValueError, match="Head size is 300; it has to be from 1 to 256. Of a layout, MatMul and"):
        layer.attend(*[torch.zeros(1, 4, 32, 300)] * 3)


@EACH
def test_the_repr_has_the_sizes(structure: Any):
    shown = repr(module_of(structure))
    assert "num_heads=4, num_key_heads=2, head_dim=16, " in shown
    assert f"block=16, k={structure.num_chosen_blocks}, " in shown and "first=1, local=1" in shown


def test_an_indexer_that_is_larger_than_heads_is_refused():
    with pytest.raises(
        ValueError, match="The indexer's heads have 64 numbers, their index_dim, and those of attention 16"
    ):
        SparseSelfAttention(IndexerSparsityConfig(4), head_dim=16)


def test_the_share_that_is_computed():
    assert IndexerSparsityConfig(4, block=16, num_chosen_blocks=2).computed_share(64) == 8 / 16
    nsa = NativeSparsityConfig(
        4, block=16, num_chosen_blocks=2, num_first_blocks=0, num_sliding_window_blocks=1, window=16,
        compressed_stride=8, compressed_length=16,
    )  # fmt: skip
    assert nsa.computed_share(64) == 7 / 16 + 1 / 16 + 1 / 4
    assert nsa.computed_share(16) == 1
    assert MOBA.computed_share(64) == 8 / 16 and MOBA.computed_share(16) == 1
    assert MobaSparsityConfig(4, block=16, num_chosen_blocks=2, causal=True).computed_share(64) == 7 / 16


@pytest.mark.parametrize(
    ("mode", "cls"), [("nsa", NativeSparsityConfig), ("indexer", IndexerSparsityConfig), ("moba", MobaSparsityConfig)]
)
def test_a_structure_goes_through_its_block(mode: str, cls: Any):
    block = {"mode": mode, "block": 32, "num_first_blocks": 2, "num_chosen_blocks": 5}
    structure = ds_sparse.parse_sparse_attention(block, num_heads=4)
    assert type(structure) is cls
    assert (structure.block, structure.num_first_blocks, structure.num_chosen_blocks) == (32, 2, 5)


def trained(made: nn.Module, call: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    """The output, the loss of a module that has one, and the gradients of operands and parameters."""
    leaves = [*given, *made.parameters()]
    for x in leaves:
        x.grad = None
    output = call(*given)
    output.square().sum().backward()
    losses = [made.loss.clone()] if hasattr(made, "loss") else []
    return [output.detach(), *losses, *(x.grad for x in leaves)]


def leaves_as(given: list[Tensor], *to: Any) -> list[Tensor]:
    return [x.detach().to(*to).requires_grad_() for x in given]


@EACH
@pytest.mark.parametrize("way", ["reentrant", "without", "compiled", "dynamic", "compiled without"])
def test_checkpoints_and_compiled_graphs_give_the_same(structure: Any, way: str):
    torch._dynamo.reset()
    made, given = module_of(structure), leaves_as(operands(61))
    call: Callable[..., Tensor] = made
    if "without" in way or way == "reentrant":
        call = lambda *x: checkpoint(made, *x, use_reentrant=way == "reentrant")  # noqa: E731
    if "compiled" in way or way == "dynamic":
        call = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=way == "dynamic")
    expected = trained(made, made, given)
    if hasattr(made, "loss"):
        made.loss.fill_(7)
    torch.testing.assert_close(trained(made, call, given), expected)


@EACH
def test_bf16_and_autocast(device: str, structure: Any):
    """Of so few tokens that roundings choose no other blocks."""
    exact, given = module_of(structure).double(), leaves_as(operands(30), torch.float64)
    expected = trained(exact, exact, given)
    low, cast = (copy.deepcopy(exact).to(device, dtype) for dtype in (torch.bfloat16, torch.float32))

    def under_autocast(*x: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return cast(*x)

    for made, call, dtype in ((low, low, torch.bfloat16), (cast, under_autocast, torch.float32)):
        results = trained(made, call, leaves_as(given, device, dtype))
        assert results[0].dtype == torch.bfloat16 and all(x.dtype == dtype for x in results[1:])
        for x, y in zip(results, expected, strict=True):
            error = (x.cpu().double() - y).norm() / y.norm()
            assert error < 0.05


@EACH
def test_autocast_casts_an_operand_once(device: str, structure: Any):
    """Each branch of nsa casts none of its own, nor do gates, the choice of blocks and the two calls of the loss."""
    made, given = module_of(structure).to(device), leaves_as(operands(61), device)
    with torch.autocast(device, torch.bfloat16), CountedOperators() as counted:
        output = made(*given)
    if structure is INDEXER:  # what is chosen is read once
        assert counted.of["ds_sparse::selected_attention_forward"] == 3
        assert counted.of["ds_sparse::index_bits_of_blocks"] == 1
    with counted:
        output.sum().backward()
    of_the_loss = structure is INDEXER and device == "cuda"  # the gradient of its means
    for shape, number in Counter(x.shape for x in given).items():
        assert counted.casts[shape] in (2 * number, 2 * number + of_the_loss)  # and its gradient


@EACH
def test_the_state_dict_brings_a_module_back_without_the_loss(structure: Any):
    made, given = module_of(structure), operands(40)
    expected = made(*given)
    assert made.state_dict().keys() == dict(made.named_parameters()).keys()
    other = SparseSelfAttention(structure, max_seq_length=96, head_dim=16, num_key_heads=2).sparse_attention
    other.load_state_dict(made.state_dict())
    assert torch.equal(other(*given), expected)
    assert torch.equal(copy.deepcopy(made)(*given), expected)
