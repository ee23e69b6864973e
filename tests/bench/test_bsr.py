import pytest
import torch

from ds_sparse.bench import matmul
from ds_sparse.bench.bsr import bsr_operations
from ds_sparse.bench.layouts import make_layout
from ds_sparse.bench.reasons import Unsupported


def test_without_a_gpu_it_says_so():
    with pytest.raises(Unsupported, match="on a GPU only"):
        bsr_operations(make_layout("fixed", 16, 256), 16, 2, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("name", matmul.DENSE)
def test_they_do_what_ours_do(name):
    pytest.importorskip("triton")
    case = matmul.Case("random-25", 32, "bf16", batch=2, heads=2, seq_len=512, head_dim=64)
    competitors, absent = matmul.make_competitors(case, make_layout("random-25", 32, 512).cuda(), [name])
    assert absent == []
    assert f"torch.sparse {name}" in {runner.name for runner in competitors}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_small_blocks_are_refused():
    pytest.importorskip("triton")
    with pytest.raises(Unsupported, match="16 and more"):
        bsr_operations(make_layout("fixed", 8, 256).cuda(), 8, 2, torch.bfloat16)
