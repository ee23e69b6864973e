"""record_choices: what it keeps is what attention sees, of every kind of layer that chooses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import random, seeded
from torch import Tensor, nn

import ds_sparse
from ds_sparse import IndexerAttention, MobaSparsityConfig, NativeSparseAttention, record_choices
from ds_sparse.modules.chosen_blocks import ChosenBlocks
from ds_sparse.modules.structured_attention import StructuredAttention

TOKENS = 70
HEADS = 4


class Layer(nn.Module):
    """A layer that calls what is no module."""

    def __init__(self, attention: Any):
        super().__init__()
        vars(self)["attention"] = attention

    def forward(self, *operands: Tensor, **options: Any) -> Tensor:
        return self.attention(*operands, **options)


def moba(**more: Any) -> nn.Module:
    structure = MobaSparsityConfig(HEADS, block=16, num_chosen_blocks=2, **more)
    return Layer(StructuredAttention(structure, 128))


def indexer(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    return IndexerAttention(HEADS, 2, TOKENS, index_dim=8, block=16, k=2, **more)


def native() -> nn.Module:
    torch.manual_seed(0)
    return NativeSparseAttention(HEADS, 2, TOKENS, block=16, k=3, length=16, stride=8, window=5)


def of_blocks() -> dict[str, Tensor]:
    """Gates that leave of NSA the branch of blocks."""
    return {"gates": torch.tensor([0.0, 1.0, 0.0]).expand(2, HEADS, TOKENS, 3)}


def operands(queries: int = TOKENS, batch: int = 2) -> list[Tensor]:
    """Values with a number of its own for each key: what is not 0 of an output is seen."""
    query = random(seeded(1), batch, HEADS, queries, TOKENS, dtype=torch.float32)
    key = random(seeded(2), batch, 2, TOKENS, TOKENS, dtype=torch.float32)
    return [query, key, torch.eye(TOKENS).expand(batch, 2, -1, -1)]


KEEP = torch.rand(2, TOKENS, generator=seeded(3)) < 0.7
PACKED = torch.tensor([0, 21, 21, 70])
CALLS: dict[str, tuple[nn.Module, dict[str, Any], list[Tensor]]] = {
    "moba": (moba(causal=True), {}, operands()),
    "moba, both ways": (moba(chosen_by_group=True), {"key_padding_mask": KEEP}, operands()),
    "moba, by blocks": (moba(selection="block"), {"key_padding_mask": KEEP}, operands()),
    "moba, packed": (moba(causal=True), {"cu_seqlens": PACKED}, operands(batch=1)),
    "indexer, one head for all": (indexer(index_heads=1), {}, operands()),
    "indexer, cached keys": (indexer(), {"query_offset": 67}, operands(3)),
    "indexer, by sequence": (indexer(), {"query_offset": torch.tensor([30, 67])}, operands(3)),
    "indexer, packed both ways": (indexer(), {"cu_seqlens": PACKED, "causal": False}, operands(batch=1)),
    "nsa": (native(), {**of_blocks(), "key_padding_mask": KEEP}, operands()),
    "a model's own": (
        Layer(ChosenBlocks(16)),
        {"block_indices": torch.randint(-1, 5, (2, 2, TOKENS, 2), generator=seeded(4)), "causal": True},
        operands(),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_rows_are_the_keys_that_are_seen(name: str):
    layer, options, given = CALLS[name]
    with record_choices(layer) as choices:
        output = layer(*given, **options)
    (choice,) = choices.values()
    for sequence, of_sequence in enumerate(output):
        rows = choice.rows(sequence)
        seen = torch.stack([torch.cat([part for _, part in rows.pieces(head)]) for head in range(rows.heads)])
        assert torch.equal(seen.expand(len(of_sequence), -1, -1), of_sequence != 0)
    assert 0 < rows.density() < 1


def llama(block: dict[str, Any]) -> Any:
    families = pytest.importorskip("integrations.families")
    model = families.make(families.DECODERS["llama"], num_hidden_layers=3)
    ds_sparse.sparsify(model, block)
    return model


def number_of_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


IDS = torch.arange(40).remainder(7)[None]


@pytest.mark.parametrize(
    ("block", "inside"),
    [
        ({"mode": "moba", "block": 16, "num_chosen_blocks": 2}, ""),
        ({"mode": "indexer", "block": 16, "num_chosen_blocks": 2, "index_dim": 8}, ".sparse_attention"),
    ],
)
def test_layers_of_a_model_are_known_by_name_and_only_while_it_is_asked_for(block: dict[str, Any], inside: str):
    model = llama(block | {"layers": {"1": None}})
    hooks = number_of_hooks(model)
    with record_choices(model) as choices:
        model(IDS)
        last = model(IDS[:, :30]).logits
    assert list(choices) == [f"model.layers.{number}.self_attn{inside}" for number in (0, 2)]
    assert all(choice.tokens == 30 and choice.local == 1 for choice in choices.values())
    kept = dict(choices)
    torch.testing.assert_close(model(IDS[:, :30]).logits, last)
    assert choices == kept
    assert number_of_hooks(model) == hooks


def test_a_part_of_a_model_is_recorded_and_another_model_is_not():
    model, other = (llama({"mode": "moba", "block": 16}) for _ in range(2))
    with record_choices(model.model.layers[2]) as choices:
        model(IDS)
        other(IDS)
    assert list(choices) == ["self_attn"]


def test_an_error_inside_leaves_nothing_behind():
    layer = CALLS["moba"][0]
    with record_choices(layer) as choices:
        with pytest.raises(ValueError, match="attn_mask"):
            layer(*operands(), attn_mask=torch.zeros(TOKENS, TOKENS))
        layer(*operands())
    assert list(choices) == [""]


def test_a_compiled_model_is_recorded():
    model = llama({"mode": "moba", "block": 16, "num_chosen_blocks": 2}).eval()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(IDS)
        with record_choices(model) as choices:
            compiled(IDS)
    assert len(choices) == 3


def test_minimax_m3_is_recorded_by_what_its_indexer_chooses():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MiniMaxM3VLTextConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        rotary_dim=4, dense_intermediate_size=32, mlp_layer_types=["dense", "dense"],
        layer_types=["full_attention", "minimax_m3_sparse"], index_n_heads=2, index_head_dim=8, index_block_size=16,
        index_topk_blocks=1, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ds_sparse")
    with record_choices(model) as choices:
        model(IDS)
    assert list(choices) == ["model.layers.1.self_attn"]
    assert "chosen by the model's own indexer" in choices["model.layers.1.self_attn"].explain(39)


def test_a_query_is_explained():
    layer, options, given = CALLS["moba, packed"]
    with record_choices(layer) as choices:
        layer(*given, **options)
    assert choices[""].explain(20).splitlines() == [
        "Token 20, head 0, sees keys of 2 blocks:",
        "  0 to 15, block 0: chosen",
        "  16 to 20, block 1: its own",
    ]
    assert choices[""].explain(21) == "Token 21, head 0, sees keys of 1 block:\n  21 to 21, block 0: its own"
    with pytest.raises(IndexError, match="token is 70; it has to be from 0 to 69"):
        choices[""].explain(70)
    with pytest.raises(IndexError, match="sequence is 1; it has to be from 0 to 0"):
        choices[""].rows(sequence=1)
    layer, options, given = CALLS["nsa"]
    with record_choices(layer) as choices:
        layer(*given, gates=of_blocks()["gates"])
    assert choices[""].explain(69, head=3).splitlines()[1::2] == [
        "  0 to 15, block 0: one of the first", "  64 to 69, block 4: its own",
    ]  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_operands_are_kept_where_they_are_asked_for(name: str):
    layer, options, (query, key, value) = CALLS[name]
    with record_choices(layer, keep_operands=True) as choices:
        layer(query, key, value, **options, scale=0.3)
    (choice,) = choices.values()
    assert choice.scale == 0.3 and choice.query is not None and choice.key is not None
    assert not choice.query.requires_grad and torch.equal(choice.key, key)
    assert choice.query.shape == query.shape


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match="model is a dict"), record_choices({}):  # type: ignore[arg-type]
        pass
