import pytest
import torch

from ds_sparse import BigBirdSparsityConfig, BSLongformerSparsityConfig, LocalSlidingWindowSparsityConfig
from ds_sparse.sequence.deal import received_of_heads
from ds_sparse.sequence.halo_plan import part_lengths, plan_halo

BLOCK, TOKENS, HEADS = 16, 4096, 4


def plan_of(config, ranks, causal=False, key_heads=HEADS, tokens=TOKENS):
    lengths, may_be_wide = part_lengths(tokens, ranks, BLOCK), not causal
    layout = config.make_bool_layout(tokens)
    return plan_halo(layout, BLOCK, lengths, HEADS, key_heads, causal=causal, may_be_wide=may_be_wide)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_sequence_parallel_a_rank_fetches_what_windows_reach_and_global_blocks(ranks):
    window = LocalSlidingWindowSparsityConfig(
        HEADS, block=BLOCK, num_sliding_window_blocks=5, attention="bidirectional"
    )
    plan = plan_of(window, ranks)
    assert len(plan.wide) == 0
    for rank, fetched in enumerate(plan.fetched):
        own = plan.blocks(rank)
        around = [own.start - 2, own.start - 1, own.stop, own.stop + 1]
        assert fetched.tolist() == [x for x in around if 0 <= x < TOKENS // BLOCK]
    longformer = BSLongformerSparsityConfig(HEADS, block=BLOCK, num_sliding_window_blocks=3)
    plan = plan_of(longformer, ranks)
    assert plan.wide.tolist() == [0], "the global row alone is computed by all"
    assert all(0 in fetched.tolist() for fetched in plan.fetched[1:])
    assert max(map(len, plan.fetched)) <= 3


@pytest.mark.parametrize("ranks", [2, 4])
def test_sequence_parallel_ranks_that_exchange_keys_compute_every_live_block_once_and_evenly(ranks):
    layout = BSLongformerSparsityConfig(HEADS, block=BLOCK, global_block_indices=[0, 9]).make_bool_layout(TOKENS)
    plan = plan_halo(layout, BLOCK, part_lengths(TOKENS, ranks, BLOCK), HEADS, HEADS)
    assert sum(plan.loads) == int(layout.expand(HEADS, -1, -1).sum())
    assert max(plan.loads) < 1.03 * min(plan.loads)


def test_sequence_parallel_windows_receive_far_less_than_heads_and_random_blocks_do_not():
    of_heads = received_of_heads(TOKENS, 2, HEADS, HEADS)
    assert plan_of(BSLongformerSparsityConfig(HEADS, block=BLOCK), 2).received < 0.1 * of_heads
    random = BigBirdSparsityConfig(HEADS, block=BLOCK, num_random_blocks=3, seed=0)
    assert plan_of(random, 2).received > 0.5 * of_heads
    grouped = plan_of(random, 2, key_heads=1).received
    assert grouped < 0.5 * received_of_heads(TOKENS, 2, HEADS, 1), "queries are not sent"


def test_sequence_parallel_no_row_is_wide_and_nothing_ahead_is_fetched_where_tokens_are_causal():
    plan = plan_of(BSLongformerSparsityConfig(HEADS, block=BLOCK), 4, causal=True)
    assert len(plan.wide) == 0
    assert all((fetched < plan.bounds[rank]).all() for rank, fetched in enumerate(plan.fetched))


def test_sequence_parallel_parts_that_end_inside_blocks_have_no_plan():
    layout = torch.ones(1, 4, 4, dtype=torch.bool)
    assert plan_halo(layout, BLOCK, (30, 34), HEADS, HEADS) is None
    assert plan_halo(layout, BLOCK, (32, 20), HEADS, HEADS) is not None


@pytest.mark.parametrize("tokens, ranks", [(5, 5), (165, 4), (1000, 3), (65_536, 2), (100_001, 7)])
def test_sequence_parallel_parts_are_even_to_three_percent_and_end_at_blocks_where_they_can(tokens, ranks):
    lengths = part_lengths(tokens, ranks, BLOCK)
    assert sum(lengths) == tokens and min(lengths) >= 1
    assert max(lengths) <= max(1.03 * tokens / ranks, -(-tokens // ranks))
    if tokens > 10_000:
        assert all(length % BLOCK == 0 for length in lengths[:-1])


@pytest.mark.parametrize("tokens, ranks", [(60, 4), (165, 4), (1000, 3)])
def test_sequence_parallel_parts_end_at_blocks_where_they_have_to(tokens, ranks):
    lengths = part_lengths(tokens, ranks, BLOCK, whole_blocks=True)
    assert sum(lengths) == tokens and min(lengths) >= 1
    assert all(length % BLOCK == 0 for length in lengths[:-1])


def test_sequence_parallel_parts_that_end_at_blocks_are_even_enough_to_exchange_keys():
    longformer = BSLongformerSparsityConfig(HEADS, block=BLOCK)
    for tokens in range(2048, 4096, 176):
        lengths = part_lengths(tokens, 4, BLOCK)
        layout = longformer.make_bool_layout(-(-tokens // BLOCK) * BLOCK)
        plan = plan_halo(layout, BLOCK, lengths, HEADS, HEADS)
        if plan is not None:
            assert max(plan.loads) <= 1.03 * int(layout.expand(HEADS, -1, -1).sum()) / 4 + HEADS * 3
