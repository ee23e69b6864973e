import statistics

import pytest
import torch

from ds_sparse.bench import documents

CPU = torch.device("cpu")


@pytest.mark.parametrize(("tokens", "length", "lengths"), [(96, 32, [32] * 3), (100, 33, [33, 33, 33, 1]), (5, 9, [5])])
def test_equal_lengths_fill_the_row(tokens, length, lengths):
    assert documents.equal_lengths(tokens, length) == lengths


def test_lengths_of_a_corpus_are_skewed_and_fill_their_rows():
    rows = documents.corpus_lengths(100_000, rows=20)
    assert rows == documents.corpus_lengths(100_000, rows=20)
    assert len(set(map(tuple, rows))) == 20 and all(sum(row) == 100_000 for row in rows)
    drawn = [length for row in rows for length in row[:-1]]
    assert min(drawn) >= 1 and max(drawn) == documents.LONGEST
    assert statistics.median(drawn) == pytest.approx(documents.MEDIAN, rel=0.1)
    assert statistics.mean(drawn) > 1.8 * documents.MEDIAN
    long = [length for length in drawn if length > 4 * documents.MEDIAN]
    assert len(long) / len(drawn) == pytest.approx(1 / 8, abs=0.03)


def test_numbers_of_tokens_by_hand():
    lengths = [3, 1, 2]
    edges = documents.cu_seqlens_of(lengths, CPU)
    assert edges.tolist() == [0, 3, 4, 6] and edges.dtype == torch.int32
    number, place = documents.places_of(lengths, CPU)
    assert number.tolist() == [0, 0, 0, 1, 2, 2] and place.tolist() == [0, 1, 2, 0, 0, 1]
