"""A program that uses public names, each result of which has a type. mypy reads it with the sources, and test_types.py
runs it."""

# mypy: disallow-untyped-defs, disallow-untyped-decorators, disallow-subclassing-any
# mypy: disallow-any-generics, no-implicit-reexport, warn-return-any

from __future__ import annotations

from types import SimpleNamespace
from typing import assert_type

import torch
from torch import Tensor

import ds_sparse
from ds_sparse.reference import to_sparse


@ds_sparse.register_sparsity("of_typed_client")
@ds_sparse.declared
class Corner(ds_sparse.SparsityConfig):
    """The first `corner` blocks attend to all."""

    corner: int = 1

    def lay_out(self, h: int, layout: Tensor) -> Tensor:
        layout[h, : self.corner] = 1
        return layout


def structures() -> Tensor:
    structure = ds_sparse.BigBirdSparsityConfig(num_heads=2, block=16, num_random_blocks=1, seed=0, causal=False)
    assert_type(structure.block, int)
    assert_type(structure.seed, int | None)
    assert_type(ds_sparse.parse_sparse_attention({"mode": "fixed"}, num_heads=2), ds_sparse.SparsityConfig)
    assert_type(Corner(num_heads=2, corner=2).corner, int)
    return assert_type(structure.make_layout(64), Tensor)


def operations(query: Tensor, key: Tensor, value: Tensor, layout: Tensor) -> None:
    index = assert_type(ds_sparse.BlockIndex.build(layout, 16), ds_sparse.BlockIndex)
    output = assert_type(ds_sparse.block_sparse_attention(query, key, value, index.causal(), causal=True), Tensor)
    pair = ds_sparse.block_sparse_attention(query, key, value, layout, return_lse=True)
    assert_type(pair, tuple[Tensor, Tensor])
    output.sum().backward()
    with ds_sparse.force_implementation("cpu"):
        assert_type(ds_sparse.explain(query, key, value, layout).implementation, str | None)

    scores = assert_type(ds_sparse.MatMul(layout, 16, "sdd", trans_b=True)(query, key), Tensor)
    probs = assert_type(ds_sparse.Softmax(layout, 16)(scores, scale=0.25), Tensor)
    assert_type(ds_sparse.MatMul(layout, 16, "dsd")(probs, value), Tensor)

    chosen = torch.zeros(1, 2, 64, 3, dtype=torch.int64)
    assert_type(ds_sparse.selected_attention(query, key, value, chosen, 16, causal=True), Tensor)
    both = ds_sparse.selected_attention(query, key, value, chosen, 16, return_lse=True)
    assert_type(both, tuple[Tensor, Tensor])
    assert_type(ds_sparse.topk_attention(query, key, value, chosen, causal=True), Tensor)
    assert_type(ds_sparse.topk_attention(query, key, value, chosen, 4, return_lse=True), tuple[Tensor, Tensor])

    windows = assert_type(ds_sparse.WindowIndex.build(64, [8, 16]), ds_sparse.WindowIndex)
    assert_type(ds_sparse.window_attention(query, key, value, windows), Tensor)
    band = assert_type(ds_sparse.window_matmul(query, key.mT, 8), Tensor)
    band = assert_type(ds_sparse.window_softmax(band, 8), Tensor)
    assert_type(ds_sparse.unwindow_matmul(band, value, 8), Tensor)

    pairs = assert_type(ds_sparse.TokenIndex.from_blocks(index), ds_sparse.TokenIndex)
    assert_type(ds_sparse.sparse_attn(query, key, value, pairs), Tensor)
    assert_type(ds_sparse.sparse_attn(query, key, value, pairs, return_lse=True), tuple[Tensor, Tensor])
    assert_type(ds_sparse.sparse_matmul(query, key, torch.tensor([[0, 1], [2, 0]])), Tensor)
    assert_type(ds_sparse.masked_attention(query, key, value, pairs.mask()), Tensor)
    assert_type(to_sparse(query @ key.mT, layout, 16), Tensor)


def modules(structure: ds_sparse.SparsityConfig) -> None:
    module = ds_sparse.SparseSelfAttention(structure, max_seq_length=64)
    assert_type(module.get_layout(32), Tensor)
    config = SimpleNamespace(hidden_size=16, num_attention_heads=2)
    layer = ds_sparse.BertSparseSelfAttention(config, structure, max_seq_length=64)
    assert_type(layer.transpose_for_scores(torch.randn(1, 64, 16)), Tensor)
    tokens = torch.ones(1, 20, dtype=torch.long)
    padded = ds_sparse.SparseAttentionUtils.pad_to_block_size(16, tokens, None, None, None, None, pad_token_id=0)
    assert_type(padded[:2], tuple[int, Tensor | None])


def main() -> None:
    query, key, value = (torch.randn(1, 2, 64, 8, requires_grad=True) for _ in range(3))
    operations(query, key, value, structures())
    modules(ds_sparse.DenseSparsityConfig(num_heads=2))


if __name__ == "__main__":
    main()
