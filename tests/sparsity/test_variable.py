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
