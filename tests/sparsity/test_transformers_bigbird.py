import numpy
import pytest
import torch
import transformers
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

from ds_sparse import block_sparse_attention
from ds_sparse.sparsity import TransformersBigBirdSparsityConfig

HEADS = 3


def drawn_by_transformers(tokens, block, num_random_blocks, seed):
    """The random blocks that a layer in training draws: (heads, blocks - 2, num_random_blocks)."""
    sizes = {"hidden_size": 8 * HEADS, "num_attention_heads": HEADS, "max_position_embeddings": tokens}
    config = transformers.BigBirdConfig(**sizes, block_size=block, num_random_blocks=num_random_blocks)
    layer = BigBirdBlockSparseAttention(config).train()
    state = numpy.random.get_state()
    numpy.random.seed(seed)
    if tokens in (1024, 3072, 4096):
        of_a_head = tokens, tokens, block, block, num_random_blocks, 1024
        rows = [layer._bigbird_block_rand_mask(*of_a_head) for _ in range(HEADS)]
    else:
        plan = layer._get_rand_attn_plan(tokens, block, num_random_blocks)
        rows = layer._bigbird_block_rand_mask_with_head(tokens, tokens, block, block, HEADS, *plan)
    numpy.random.set_state(state)
    return torch.from_numpy(numpy.stack(rows)).long()


@pytest.mark.parametrize("seed", [0, 11])
@pytest.mark.parametrize(
    ("tokens", "block", "num_random_blocks"),
    [(192, 16, 1), (320, 16, 3), (1024, 16, 3), (1024, 64, 3), (2048, 64, 3), (3072, 64, 3), (4096, 64, 3)],
)
def test_it_is_the_layout_that_transformers_trains_with(tokens, block, num_random_blocks, seed):
    blocks = tokens // block
    at = torch.arange(blocks)
    expected = ((at[:, None] - at).abs() <= 1).repeat(HEADS, 1, 1)
    expected[:, [0, -1]] = True
    expected[:, :, [0, -1]] = True
    expected[:, 1:-1].scatter_(2, drawn_by_transformers(tokens, block, num_random_blocks, seed), True)
    structure = TransformersBigBirdSparsityConfig(HEADS, block, num_random_blocks, seed=seed)
    assert torch.equal(structure.make_bool_layout(tokens), expected)


def test_attention_on_it_is_that_of_the_layer_in_training():
    config = transformers.BigBirdConfig(
        hidden_size=8 * HEADS,
        num_attention_heads=HEADS,
        max_position_embeddings=192,
        block_size=16,
        num_random_blocks=2,
    )
    layer = BigBirdBlockSparseAttention(config, seed=5).double().train()
    hidden = torch.randn(2, 192, 8 * HEADS, dtype=torch.float64, requires_grad=True)
    kept = torch.ones(2, 192, dtype=torch.float64)
    kept[1, 150:] = 0
    blocked, *masks = transformers.BigBirdModel.create_masks_for_block_sparse_attn(kept, 16)
    state = numpy.random.get_state()
    theirs = layer(hidden, *masks, blocked, blocked)[0]
    numpy.random.set_state(state)

    q, k, v = (f(hidden).unflatten(-1, (HEADS, 8)).transpose(1, 2) for f in (layer.query, layer.key, layer.value))
    layout = TransformersBigBirdSparsityConfig(HEADS, 16, 2, seed=5).make_layout(192)
    out = block_sparse_attention(q, k, v, layout, key_padding_mask=kept.bool()).transpose(1, 2).flatten(2)
    ours, theirs = (x[kept.bool()] for x in (out, theirs))
    torch.testing.assert_close(ours, theirs)
    inputs, grad = [hidden, *layer.parameters()], torch.randn_like(ours)
    torch.testing.assert_close(*(torch.autograd.grad(x, inputs, grad) for x in (ours, theirs)))


def test_numpys_own_numbers_stay_as_they_are():
    numpy.random.seed(5)
    expected = numpy.random.random()
    numpy.random.seed(5)
    TransformersBigBirdSparsityConfig(HEADS, seed=987654).make_layout(512)
    assert numpy.random.random() == expected


def test_without_random_blocks_a_window_and_both_edges_are_left(picture):
    found = picture(TransformersBigBirdSparsityConfig(1, num_random_blocks=0), 6)
    assert found == ["111111", "111001", "111101", "101111", "100111", "111111"]


def test_where_transformers_attends_to_all_there_is_no_layout():
    with pytest.raises(ValueError, match="A row of 11 blocks is too short .* 11 blocks Transformers attends to all"):
        TransformersBigBirdSparsityConfig(1).make_layout(11 * 16)


def test_more_random_blocks_than_there_are_to_draw_from_are_an_error():
    with pytest.raises(ValueError, match="A row has 4 blocks to draw from, and 5 random blocks are wanted"):
        TransformersBigBirdSparsityConfig(1, 128, 5).make_layout(4096)
