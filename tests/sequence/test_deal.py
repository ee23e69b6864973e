from itertools import product

import pytest

from ds_sparse.sequence.deal import TOLERANCE, deal_heads


def best_spread(costs, ranks):
    """By trying every deal that gives each rank a head."""
    deals = [d for d in product(range(ranks), repeat=len(costs)) if len(set(d)) == ranks]
    loads = [[sum(c for c, r in zip(costs, d, strict=True) if r == rank) for rank in range(ranks)] for d in deals]
    return min((max(load) - min(load)) / max(load) for load in loads)


def test_sequence_parallel_heads_that_cost_the_same_are_dealt_in_order():
    deal = deal_heads([7] * 8, key_heads=8, ranks=4)
    assert deal.queries == deal.keys == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert deal.spread == 0


def test_sequence_parallel_heads_of_unequal_costs_are_dealt_evenly_where_they_allow_it():
    costs = [100, 90, 80, 70, 40, 30, 20, 10]
    deal = deal_heads(costs, key_heads=8, ranks=4)
    assert deal.spread <= TOLERANCE
    assert sorted(head for heads in deal.queries for head in heads) == list(range(8))
    assert deal.loads == tuple(sum(costs[head] for head in heads) for heads in deal.queries)
    assert {len(heads) for heads in deal.queries} == {2}


@pytest.mark.parametrize("costs, ranks", [([9, 5, 5, 4, 4, 3], 2), ([50, 20, 20, 10, 10, 5], 3), ([8, 7, 6, 5, 4], 2)])
def test_sequence_parallel_the_best_deal_is_found_where_no_deal_is_even(costs, ranks):
    assert deal_heads(costs, len(costs), ranks).spread == pytest.approx(best_spread(costs, ranks), abs=TOLERANCE)


def test_sequence_parallel_query_heads_stay_with_the_key_head_that_they_share():
    deal = deal_heads([1] * 8, key_heads=4, ranks=2)
    assert deal.queries == ((0, 1, 2, 3), (4, 5, 6, 7)) and deal.keys == ((0, 1), (2, 3))


def test_sequence_parallel_more_ranks_than_key_heads_get_copies_of_them():
    deal = deal_heads([1] * 8, key_heads=2, ranks=4)
    assert deal.queries == ((0, 1), (2, 3), (4, 5), (6, 7)) and deal.keys == ((0,), (0,), (1,), (1,))


@pytest.mark.parametrize("heads, key_heads, ranks", [(12, 12, 8), (12, 4, 8), (6, 3, 4), (16, 8, 3), (5, 5, 5)])
def test_sequence_parallel_every_query_head_reads_its_own_key_head(heads, key_heads, ranks):
    deal = deal_heads([3 + head % 4 for head in range(heads)], key_heads, ranks)
    for queries, keys in zip(deal.queries, deal.keys, strict=True):
        shared = len(queries) // len(keys)
        assert queries and len(queries) == shared * len(keys)
        assert [keys[i // shared] for i in range(len(queries))] == [q // (heads // key_heads) for q in queries]
    assert sorted(head for part in deal.queries for head in part) == list(range(heads))


def test_sequence_parallel_fewer_heads_than_ranks_are_refused_with_the_largest_number():
    for key_heads in (4, 2, 1):  # of which ranks may get copies
        with pytest.raises(ValueError, match="Attention has 4 heads, and 8 ranks.* at most 4 ranks .*to 4 or less"):
            deal_heads([1] * 4, key_heads, ranks=8)


def test_sequence_parallel_heads_that_choose_together_stay_together():
    assert {len(heads) for heads in deal_heads([1] * 6, key_heads=3, ranks=2).queries} == {3}
    assert deal_heads([1] * 6, key_heads=3, ranks=2, whole=True).queries == ((0, 1, 4, 5), (2, 3))
    with pytest.raises(ValueError, match="4 ranks are to share 2 key heads; set sequence_parallel_size to 2 or less"):
        deal_heads([1] * 8, key_heads=2, ranks=4, whole=True)
