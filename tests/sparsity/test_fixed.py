import pytest

from ds_sparse.layout import density
from ds_sparse.sparsity import FixedSparsityConfig


def test_unidirectional_stripes_start_at_the_first_global_row_and_strict_causal_cuts_them(picture):
    options = {"num_local_blocks": 2, "num_global_blocks": 2, "attention": "unidirectional"}
    assert picture(FixedSparsityConfig(1, **options), 4) == ["1100", "1100", "1111", "1111"]
    assert picture(FixedSparsityConfig(1, **options, strict_causal=True), 4) == ["1000", "1100", "1110", "1111"]


def test_density_tends_to_the_share_of_global_blocks():
    densities = [density(FixedSparsityConfig(1).make_bool_layout(length)) for length in (128, 512, 2048, 16384)]
    assert [round(value, 3) for value in densities] == [0.625, 0.344, 0.273, 0.253]


@pytest.mark.parametrize(
    "options",
    [{}, {"attention": "unidirectional"}, {"horizontal_global_attention": True}],
    ids=["bidirectional", "unidirectional", "horizontal"],
)
@pytest.mark.parametrize(("local", "global_blocks"), [(10**30, 1), (10**30, 10**30), (4 * 10**12, 10**12)])
def test_numbers_beyond_the_row_do_as_those_just_beyond_it(picture, options, local, global_blocks):
    huge = FixedSparsityConfig(1, num_local_blocks=local, num_global_blocks=global_blocks, **options)
    near = FixedSparsityConfig(1, num_local_blocks=80, num_global_blocks=min(global_blocks, 20), **options)
    assert picture(huge, 6) == picture(near, 6)
