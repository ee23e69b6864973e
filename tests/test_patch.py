"""SparseAttentionUtils: padding to whole blocks and back."""

import pytest
import torch

from ds_sparse import SparseAttentionUtils

pad = SparseAttentionUtils.pad_to_block_size


def test_pads_every_input_by_its_kind():
    embeddings = torch.nn.Embedding(10, 4)
    ids = torch.ones(2, 20, dtype=torch.long)
    pad_len, input_ids, mask, types, positions, embeds = pad(
        16, ids, torch.ones(2, 20, dtype=torch.long), ids, ids, embeddings(ids), 7, embeddings
    )
    assert pad_len == 12
    assert (input_ids[:, 20:] == 7).all() and (input_ids[:, :20] == 1).all()
    assert (mask[:, 20:] == 0).all() and (types[:, 20:] == 0).all() and (positions[:, 20:] == 7).all()
    assert torch.equal(embeds[:, 20:], embeddings(torch.full((2, 12), 7)))


def test_an_additive_mask_is_filled_so_that_padding_is_masked():
    mask = torch.zeros(2, 1, 1, 20, dtype=torch.float16)
    _, _, padded, *_ = pad(16, torch.ones(2, 20, dtype=torch.long), mask, None, None, None, 0, None)
    assert (padded[..., 20:] == torch.finfo(torch.float16).min).all()


def test_none_stays_none_and_whole_blocks_stay_as_they_are():
    ids = torch.ones(2, 20, dtype=torch.long)
    assert pad(16, ids, None, None, None, None, 0, None)[2:] == (None, None, None, None)
    whole = torch.ones(2, 32, dtype=torch.long)
    pad_len, same, *_ = pad(16, whole, None, None, None, None, 0, None)
    assert pad_len == 0 and same is whole


def test_embeddings_alone_are_enough_and_nothing_is_an_error():
    embeddings = torch.nn.Embedding(10, 4)
    pad_len, *_, embeds = pad(16, None, None, None, None, torch.zeros(2, 17, 4), 0, embeddings)
    assert pad_len == 15 and embeds.shape == (2, 32, 4)
    with pytest.raises(ValueError, match="input_ids and inputs_embeds are both None"):
        pad(16, None, None, None, None, None, 0, None)


@pytest.mark.parametrize("pad_len", [0, 5])
def test_unpad_takes_off_what_was_added(pad_len):
    states = torch.randn(2, 16 + pad_len, 3)
    assert torch.equal(SparseAttentionUtils.unpad_sequence_output(pad_len, states), states[:, :16])
