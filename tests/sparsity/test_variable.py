import pytest

from ds_sparse.sparsity import VariableSparsityConfig


def test_sizes_and_indices_beyond_the_row_do_as_those_just_beyond_it(picture):
    huge, near = (
        VariableSparsityConfig(
            1,
            local_window_blocks=[1, much],
            global_block_indices=[0, 2, much, -much],
            global_block_end_indices=[1, much, much + 1, 1],
        )
        for much in (10**30, 6)
    )
    assert picture(huge, 6) == picture(near, 6)


def test_unidirectional_random_blocks_and_ranges_reach_ahead_unless_strict():
    options = {"num_random_blocks": 3, "attention": "unidirectional", "seed": 5, "global_block_indices": [0]}
    plain = VariableSparsityConfig(1, **options).make_bool_layout(320)
    assert plain.triu(1).any()
    assert not VariableSparsityConfig(1, **options, strict_causal=True).make_bool_layout(320).triu(1).any()


def test_every_row_draws_its_random_blocks():
    structure = VariableSparsityConfig(2, num_random_blocks=3, seed=5, different_layout_per_head=True)
    layout = structure.set_random_layout(1, structure.setup_layout(160))
    assert layout[1].sum(-1).tolist() == [3] * 10
    assert not layout[0].any()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"global_block_indices": [0, 5], "global_block_end_indices": [1]},
            "Global block start indices length, 2, must be same as global block end indices length, 1!",
        ),
        (
            {"global_block_indices": [3], "global_block_end_indices": [3]},
            "Global block start index, 3, must be smaller than global block end index, 3!",
        ),
        (
            {"attention": "unidirectional", "horizontal_global_attention": True},
            'only "bi-directional" attentions can support horizontal global attention!',
        ),
        ({"attention": None}, 'only "uni/bi-directional" attentions are supported for now!'),
        ({"local_window_blocks": []}, "at least 1 item"),
        ({"local_window_blocks": [4, 0]}, "greater than or equal to 1"),
        ({"global_block_indices": [1.0]}, "valid integer"),
        ({"num_random_blocks": -1}, "greater than or equal to 0"),
    ],
)
def test_wrong_options_are_value_errors(options, sentence):
    with pytest.raises(ValueError) as caught:
        VariableSparsityConfig(4, **options)
    assert sentence in str(caught.value)


def test_rows_too_short_are_value_errors():
    with pytest.raises(
        ValueError, match="Number of random blocks, 3, must be smaller than overall number of blocks in a row, 2!"
    ):
        VariableSparsityConfig(1, num_random_blocks=3).make_layout(32)
    VariableSparsityConfig(1, num_random_blocks=2).make_layout(32)
    with pytest.raises(ValueError, match="Global block index -3 counts from the end, but a row has only 2 blocks!"):
        VariableSparsityConfig(1, global_block_indices=[-3]).make_layout(32)
