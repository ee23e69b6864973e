import statistics

import pytest
import torch

from ds_sparse.bench import documents
from ds_sparse.bench.cases import BREAK_EVEN, TABLE
from ds_sparse.bench.floors import Ceilings, Size
from ds_sparse.bench.machine import BACKWARD, FORWARD
from ds_sparse.layout import density

CASES = {case.name: case for case in TABLE}

# name: density, and floors forward and forward+backward in milliseconds, published for an H200.
PUBLISHED = {
    "fixed-16": (0.262, 0.26, 0.94),
    "fixed-16-16k": (0.253, 1.02, 3.6),
    "bigbird-16": (0.023, 0.06, 0.19),
    "bigbird-64": (0.150, 0.15, 0.54),
    "bigbird-64-16k": (0.0385, 0.16, 0.55),
    "longformer-64": (0.084, 0.17, 0.60),
    "longformer-128-d128": (0.084, 0.54, 2.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_densities_and_floors_are_the_published_ones(name):
    case = CASES[name]
    live, forward, both = PUBLISHED[name]
    found = density(case.layout())
    assert found == pytest.approx(live, rel=0.02)
    h200 = Ceilings(bytes_per_ms=4.3e9, flops_per_ms=790e9, hopper=True)
    size = Size(case.batch, case.heads, case.seq_len, case.head_dim, found, itemsize=2)
    floors = [h200.attention_floor(size.attention(way), case.head_dim, way) for way in (FORWARD, BACKWARD)]
    assert floors[0] == pytest.approx(forward, abs=0.006)
    assert sum(floors) == pytest.approx(both, abs=0.06 if both >= 2 else 0.012)


def test_random_layouts_have_their_density_and_are_the_same_again():
    for case in (CASES["random-64"], CASES["random-128-d128"], *BREAK_EVEN[9:36]):
        assert density(case.layout()) == pytest.approx(case.options["density"], abs=0.01)
    layout = CASES["random-64"].layout()
    assert layout.shape == (16, 128, 128)
    assert (layout == CASES["random-64"].layout()).all()
    assert (layout[0] != layout[1]).any()


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
    edges = documents.cu_seqlens_of(lengths, torch.device("cpu"))
    assert edges.tolist() == [0, 3, 4, 6] and edges.dtype == torch.int32
    number, place = documents.places_of(edges, 6)
    assert number.tolist() == [0, 0, 0, 1, 2, 2] and place.tolist() == [0, 1, 2, 0, 0, 1]
