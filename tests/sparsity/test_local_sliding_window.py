import pytest

from ds_sparse.sparsity import LocalSlidingWindowSparsityConfig


def test_bidirectional(picture):
    structure = LocalSlidingWindowSparsityConfig(1, 16, 4, "bidirectional")
    assert picture(structure, 4) == ["1110", "1111", "1111", "0111"]


@pytest.mark.parametrize("attention", ["unidirectional", "bidirectional"])
def test_a_window_of_0_blocks_is_the_diagonal(picture, attention):
    structure = LocalSlidingWindowSparsityConfig(1, 16, 0, attention)
    assert picture(structure, 3) == ["100", "010", "001"]


def test_all_heads_share_one_layout():
    assert LocalSlidingWindowSparsityConfig(4).num_layout_heads == 1
    with pytest.raises(ValueError, match="different_layout_per_head"):
        LocalSlidingWindowSparsityConfig(4, different_layout_per_head=True)


@pytest.mark.parametrize("options", [{"attention": "both"}, {"num_sliding_window_blocks": -1}])
def test_wrong_options_are_value_errors(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        LocalSlidingWindowSparsityConfig(4, **options)
