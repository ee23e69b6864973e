import dataclasses
import sys

import pytest
import torch

from ds_sparse.bench import floors
from ds_sparse.bench.cases import Case
from ds_sparse.bench.floors import Ceilings, Size, Work, operation_floor, tokens_loaded
from ds_sparse.bench.machine import BACKWARD, FORWARD, TRAIN

SIZE = Size(batch=1, heads=1, seq_len=128, head_dim=16, density=0.25, itemsize=4)


def size_of(layout, batch, heads, head_dim, itemsize):
    """The size of a case with blocks of 32."""
    case = Case("", "random", 32, batch, heads, 32 * layout.shape[1], head_dim, dtype="fp32")
    return dataclasses.replace(Size.of(case, layout), itemsize=itemsize)


def test_floors_of_the_operations_are_the_bytes_and_flops_of_live_blocks():
    """By hand: one head of 128 tokens with 16 numbers in fp32, a quarter live; 1 byte and 1000 FLOPs a millisecond."""
    by_bytes = Ceilings(bytes_per_ms=1, flops_per_ms=1e9)
    dense, sparse = 128 * 16 * 4, 128 * 128 // 4 * 4
    assert operation_floor(by_bytes, SIZE, "dense q @ k^T", FORWARD) == (2 * dense + sparse, "copy")
    assert operation_floor(by_bytes, SIZE, "dense p @ v", TRAIN) == (3 * (2 * dense + sparse), "copy")
    assert operation_floor(by_bytes, SIZE, "dense softmax", TRAIN) == (5 * sparse, "copy")
    assert operation_floor(by_bytes, SIZE, "SDPA dense", TRAIN) == (12 * dense, "copy")
    flops = 2 * 128 * 128 / 4 * 16
    by_flops = Ceilings(bytes_per_ms=1e12, flops_per_ms=1000)
    assert operation_floor(by_flops, SIZE, "SDPA dense", FORWARD) == (pytest.approx(2 * flops / 1000), "FLOPs")
    assert operation_floor(by_flops, SIZE, "SDPA dense", BACKWARD) == (pytest.approx(5 * flops / 1000), "FLOPs")


@pytest.mark.parametrize(
    ("job", "forward", "backward"),
    [
        # Tiles load 3 blocks of 32 by rows and 6 by columns; an operand is 8 blocks, the sparse one 6 * 32 * 32 scores.
        ("dense q @ k^T", [(8 + 3) * 32 * 16], [6 * 1024 + 3 * 32 * 16, 6 * 1024 + 6 * 32 * 16]),
        ("dense p @ v", [6 * 1024 + 3 * 32 * 16], [(8 + 3) * 32 * 16, 6 * 1024 + 6 * 32 * 16]),
        ("dense v^T @ p^T", [6 * 1024 + 3 * 32 * 16], [(8 + 3) * 32 * 16, 6 * 1024 + 6 * 32 * 16]),
    ],
)
def test_products_bring_from_l2_what_their_tiles_ask_for(job, forward, backward):
    layout = torch.zeros(1, 8, 8, dtype=torch.bool)
    layout[0, [0, 2], 3] = layout[0, [1, 3], 4] = layout[0, [4, 5], 7] = True
    size = size_of(layout, batch=1, heads=1, head_dim=16, itemsize=1)
    from_l2 = Ceilings(bytes_per_ms=1e12, flops_per_ms=1e12, l2_bytes_per_ms=1)
    assert operation_floor(from_l2, size, job, FORWARD) == (sum(forward), "L2")
    assert operation_floor(from_l2, size, job, BACKWARD) == (sum(backward), "L2")
    unknown = Ceilings(bytes_per_ms=1e12, flops_per_ms=1e12)
    assert operation_floor(unknown, size, job, FORWARD)[1] != "L2"


def test_attention_is_held_to_the_best_dense_attention_and_to_the_bytes():
    h200 = Ceilings(bytes_per_ms=4.3e9, flops_per_ms=790e9, hopper=True)
    assert h200.attention_floor(Work(0, 546e9), 64, FORWARD) == 1
    assert h200.attention_floor(Work(0, 624e9), 128, BACKWARD) == 1
    assert h200.attention_floor(Work(0, 684e9), 96, FORWARD) == 1
    assert h200.attention_floor(Work(8.6e9, 546e9), 64, FORWARD) == 2


def test_another_gpu_has_the_same_share_of_its_matrix_product():
    half_as_fast = Ceilings(bytes_per_ms=4.3e9, flops_per_ms=395e9, hopper=False)
    assert half_as_fast.attention_floor(Work(0, 546e9), 64, FORWARD) == pytest.approx(2)


def test_neighbouring_rows_load_from_l2_what_one_of_them_wants():
    """By hand: 256 tokens in blocks of 32, hence tiles of 4 block rows; two heads with different layouts."""
    layout = torch.zeros(2, 8, 8, dtype=torch.bool)
    layout[0, 0:4, 5] = True  # one block column, shared by a tile's rows
    layout[1, [3, 4], [1, 2]] = True  # two rows on either side of the tiles' edge
    size = size_of(layout, batch=3, heads=2, head_dim=16, itemsize=2)
    assert (size.seq_len, size.density) == (256, 6 / 128)
    row = 2 * 16 * 2  # bytes of a key and a value
    assert size.attention(FORWARD).l2_bytes == 3 * (1 + 2) * 32 * row
    assert size.attention(BACKWARD).l2_bytes == 3 * (4 + 2) * 32 * row


def test_heads_that_share_a_layout_load_it_each_and_a_short_last_tile_counts():
    layout = torch.eye(5, dtype=torch.bool)[None]  # blocks of 32: tiles of 4 rows and of 1
    size = size_of(layout, batch=1, heads=6, head_dim=8, itemsize=2)
    assert size.attention(FORWARD).l2_bytes == 6 * 5 * 32 * 2 * 8 * 2


def test_blocks_larger_than_a_tile_are_loaded_by_each_tile():
    layout = torch.eye(3, dtype=torch.bool)[None]
    assert tokens_loaded(layout, 128) == 3 * 128
    assert tokens_loaded(layout, 256) == 2 * 3 * 256


def test_without_triton_reads_from_l2_are_not_measured(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "ds_sparse.bench.l2", raising=False)
    assert floors.l2_read_rate(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_ceilings_of_a_gpu():
    ceilings = Ceilings.measure(torch.device("cuda"), torch.bfloat16)
    assert ceilings.bytes_per_ms < ceilings.flops_per_ms
    if ceilings.l2_bytes_per_ms is not None:
        # Faster than memory, and no more than the 128 bytes a cycle that an SM's L1 could take.
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        assert ceilings.bytes_per_ms < ceilings.l2_bytes_per_ms < sms * 128 * 2.5e6
