"""What the native libraries serve, and the sentence where they do not."""

from __future__ import annotations

import pytest
import torch

from ds_sparse.ops import _library, missing_kernels


def test_the_cpu_has_every_kernel():
    assert missing_kernels("cpu") == []
    for operator in _library.OPERATORS:
        _library.require_kernel(operator, torch.device("cpu"))


def test_a_device_without_kernels_is_named_with_a_way_out():
    assert missing_kernels("xpu") == list(_library.OPERATORS)
    with pytest.raises(
        RuntimeError, match="Tensors are on xpu:0, and matmul_sdd has no xpu kernel yet; move model and data to the CPU"
    ):
        _library.require_kernel("matmul_sdd", torch.device("xpu:0"))


def test_without_the_cuda_library_the_sentence_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(_library, "CUDA_LIBRARY", tmp_path / "absent.so")
    monkeypatch.setattr(_library, "missing_kernels", lambda device_type: list(_library.OPERATORS))
    with pytest.raises(
        RuntimeError, match="CUDA library is not built; install nvcc and reinstall ds_sparse with DS_SPARSE_CUDA=1"
    ):
        _library.require_kernel("softmax_forward", torch.device("cuda:0"))


def test_every_operator_of_the_schema_is_listed():
    registered = {
        name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("ds_sparse::")
    }
    assert registered == set(_library.OPERATORS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_softmax_runs_on_cuda():
    assert not {"softmax_forward", "softmax_backward", "softmax_bias_backward"} & set(missing_kernels("cuda"))
