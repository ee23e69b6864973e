"""The attention of a layer whose indexer chooses blocks."""

import pytest
import torch

import ds_sparse
from ds_sparse.modules.chosen_blocks import ChosenBlocks


def operands():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 40, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 40, 8, generator=generator, dtype=torch.float64)
    return query, key, value, torch.randint(-1, 3, (2, 2, 40, 2), generator=generator)


def test_it_is_selected_attention_but_for_rows_without_a_key_beside_padding():
    query, key, value, chosen = operands()
    keep = torch.ones(2, 40, dtype=torch.bool)
    keep[0, :20] = False
    options = {"causal": True, "key_padding_mask": keep}
    found = ChosenBlocks(16)(query, key, value, block_indices=chosen, **options)
    wanted, lse = ds_sparse.selected_attention(query, key, value, chosen, 16, return_lse=True, **options)
    empty = lse.isneginf()
    assert empty[0, :, :20].all() and not empty.all()
    mean = value.mean(2).repeat_interleave(2, 1)[:, :, None].expand_as(query)
    torch.testing.assert_close(found[empty], mean[empty])
    assert torch.equal(found[~empty], wanted[~empty])


@pytest.mark.parametrize("given", [{"dropout_p": 0.1}, {"rpe": torch.zeros(1)}, {"cu_seqlens": torch.tensor([0, 40])}])
def test_what_is_not_computed_is_refused(given):
    query, key, value, chosen = operands()
    with pytest.raises(ValueError, match=f"indexer chooses blocks of 16 keys is given {next(iter(given))}"):
        ChosenBlocks(16)(query, key, value, block_indices=chosen, **given)
