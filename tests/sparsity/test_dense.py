from ds_sparse.sparsity import DenseSparsityConfig


def test_every_block_is_live(picture):
    assert picture(DenseSparsityConfig(2), 3) == ["111"] * 3


def test_strict_causal_is_the_lower_triangle(picture):
    assert picture(DenseSparsityConfig(2, strict_causal=True), 3, head=1) == ["100", "110", "111"]


def test_one_head_is_enough_when_heads_may_differ_but_do_not():
    assert DenseSparsityConfig(4, different_layout_per_head=True).make_bool_layout(64).shape == (1, 4, 4)
