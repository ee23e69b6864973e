import pytest

from ds_sparse.sparsity import BigBirdSparsityConfig


def test_every_row_draws_its_random_blocks_in_every_head():
    structure = BigBirdSparsityConfig(2, num_random_blocks=4, seed=1, different_layout_per_head=True)
    layout = structure.setup_layout(320)
    for h in range(2):
        structure.set_random_layout(h, layout)
    assert (layout.sum(-1) == 4).all()
    assert not layout[0].equal(layout[1])


def test_two_random_blocks_unidirectional_need_strict_causal():
    with pytest.raises(ValueError, match="^Sample larger than population or is negative$"):
        BigBirdSparsityConfig(1, num_random_blocks=2, attention="unidirectional").make_layout(160)
    structure = BigBirdSparsityConfig(1, num_random_blocks=3, attention="unidirectional", strict_causal=True, seed=2)
    layout = structure.set_random_layout(0, structure.setup_layout(160))
    assert layout[0].sum(-1).tolist() == [1, 2, *[3] * 8]
    assert not structure.make_bool_layout(160).triu(1).any()
