import pytest
import torch

from ds_sparse.sequence import chunks
from ds_sparse.sequence.chunks import HeadChunks, most_chunks
from ds_sparse.sequence.deal import deal_heads


@pytest.mark.parametrize("lengths, is_cut", [((49152, 49152), True), ((90000, 8304), True), ((32768, 32768), False)])
def test_sequence_parallel_ranks_agree_from_how_many_tokens_on_heads_are_cut(lengths, is_cut, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNKS_FROM", {"meta": chunks.CHUNKS_FROM["cuda"]})
    for length in lengths:  # each rank's own
        query = torch.empty(1, 12, length, 64, dtype=torch.bfloat16, device="meta")
        assert most_chunks(query, query, lengths) == (chunks.CHUNKS if is_cut else 1)
        assert most_chunks(torch.empty(1, 12, 1, 64), query, lengths) == 1, "there is no such bound on a CPU"


class Rank:
    def __init__(self, rank):
        self.rank = rank


@pytest.mark.parametrize(
    "heads, key_heads, most, wanted",
    [
        (12, 12, 3, [[(0, 1), (2, 3), (4, 5)], [(6, 7), (8, 9), (10, 11)]]),
        (12, 4, 3, [[(0, 1, 2), (3, 4, 5)], [(6, 7, 8), (9, 10, 11)]]),
        (5, 5, 3, [[(0,), (2, 4)], [(1,), (3,)]]),
        (4, 1, 3, [[(0, 1)], [(2, 3)]]),
    ],
)
def test_sequence_parallel_chunks_have_key_heads_with_all_their_query_heads_on_every_rank(
    heads, key_heads, most, wanted
):
    deal = deal_heads([1] * heads, key_heads, 2)
    assert [HeadChunks(deal, (5, 5), Rank(rank), most).own for rank in range(2)] == wanted
