"""What the native libraries serve, the sentence where they do not, and what operators refuse from a direct caller."""

from __future__ import annotations

import pytest
import torch

from ds_sparse.index import BlockIndex
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
def test_cuda_has_every_kernel():
    assert missing_kernels("cuda") == []


OFFSETS = ("offsets have to ascend from 0 to the 3 entries", [0, 2, 4], [1, 2, 3], [0, 4, 3])
INDICES = ("ascend within a line, from 0 or more to below 2", [0, 2, 1], [-1, 1, 1], [1, 0, 1])
SLOTS = ("slots have to be 0 or more and below the 3 entries", [0, 3, 1], [0, -1, 1])
LISTS = {
    "matmul_sdd": {"offsets": OFFSETS, "indices": INDICES},
    "matmul_dsd": {"offsets": OFFSETS, "indices": INDICES, "slots": SLOTS},
    "softmax_forward": {"offsets": OFFSETS, "indices": INDICES},
    "softmax_backward": {"offsets": ("offsets have to ascend", [0, 4, 3], [1, 2, 3])},
    "softmax_bias_backward": {"offsets": OFFSETS, "indices": INDICES},
}


@pytest.mark.parametrize(
    ("operator", "name", "spoiled", "sentence"),
    [
        (operator, name, spoiled, sentence)
        for operator, lists in LISTS.items()
        for name, (sentence, *cases) in lists.items()
        for spoiled in cases
    ],
)
def test_lists_that_lead_outside_are_refused(operator: str, name: str, spoiled: list[int], sentence: str):
    index = BlockIndex.build(torch.tensor([[1, 1], [0, 1]]), 16)
    lists = {"offsets": index.row_offsets, "indices": index.row_columns, "slots": torch.arange(3, dtype=torch.int32)}
    dense, values, bias = torch.zeros(1, 1, 32, 8), torch.zeros(1, 3, 16, 16), torch.zeros(1, 1, 1, 32)

    def call(offsets: torch.Tensor, indices: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        arguments = {
            "matmul_sdd": (dense, dense.mT, offsets, indices, 1, 16, False),
            "matmul_dsd": (values, dense, offsets, indices, slots, 1, 16, False, False),
            "softmax_forward": (values, bias, None, None, offsets, indices, 1, 16, 1.0, False),
            "softmax_backward": (values, values, offsets, 1, 16, 1.0),
            "softmax_bias_backward": (values, offsets, indices, 1, 1, 16, [1, 1, 32, 32]),
        }
        return getattr(torch.ops.ds_sparse, operator)(*arguments[operator])

    call(**lists)
    lists[name] = torch.tensor(spoiled, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=sentence):
        call(**lists)


def test_a_bias_narrower_than_the_layout_is_refused():
    index = BlockIndex.build(torch.tensor([[1, 1], [0, 1]]), 16)
    lists = (index.row_offsets, index.row_columns, 1, 16, 1.0, False)
    for bias in ((torch.zeros(1, 1, 32, 16), None, None), (None, torch.zeros(1, 16), torch.zeros(1, 1, 1, 32))):
        with pytest.raises(RuntimeError, match="to below 1"):
            torch.ops.ds_sparse.softmax_forward(torch.zeros(1, 3, 16, 16), *bias, *lists)
