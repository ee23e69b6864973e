import pytest

from ds_sparse.sparsity import BSLongformerSparsityConfig


def test_window_and_global_rows_and_columns(picture):
    structure = BSLongformerSparsityConfig(1, global_block_indices=[4, 7])
    assert picture(structure, 5) == ["11001", "11101", "01111", "00111", "11111"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"global_block_indices": [0, 5], "global_block_end_indices": []},
            "Global block start indices length, 2, must be same as global block end indices length, 0!",
        ),
        (
            {"global_block_indices": [4], "global_block_end_indices": [2]},
            "Global block start index, 4, must be smaller than global block end index, 2!",
        ),
        ({"attention": "both"}, 'only "uni/bi-directional" attentions are supported for now!'),
        ({"num_sliding_window_blocks": -1}, "greater than or equal to 0"),
    ],
)
def test_wrong_options_are_value_errors(options, sentence):
    with pytest.raises(ValueError) as caught:
        BSLongformerSparsityConfig(4, **options)
    assert sentence in str(caught.value)


def test_rows_too_short_are_value_errors():
    with pytest.raises(ValueError, match="Number of sliding window blocks, 3, must be smaller than overall"):
        BSLongformerSparsityConfig(1).make_layout(32)
