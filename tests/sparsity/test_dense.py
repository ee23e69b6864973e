from ds_sparse.sparsity import DenseSparsityConfig


def test_every_block_is_live(picture):
    assert picture(DenseSparsityConfig(2), 3) == ["111"] * 3


def test_one_head_is_enough_when_heads_may_differ_but_do_not():
    assert DenseSparsityConfig(4, different_layout_per_head=True).make_bool_layout(64).shape == (1, 4, 4)
