"""Whether a tensor still holds what it held."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_sparse import BlockIndex, block_sparse_attention
from ds_sparse.index import contents
from ds_sparse.index.contents import Contents, can_tell


def never() -> bool:
    raise AssertionError("asked whether a graph is captured")


TENSORS = {
    "bools": torch.eye(3, dtype=torch.bool),
    "integers": torch.eye(3, dtype=torch.int64),
    "with a gradient": torch.eye(3).requires_grad_(),
    "bfloat16": torch.eye(3, dtype=torch.bfloat16),
    "transposed": torch.ones(3, 2).T,
    "a part": torch.zeros(4, 4)[1:3, ::2],
    "expanded": torch.zeros(1, 2, 2).expand(3, 2, 2),
    "one number": torch.tensor(0),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_every_value_counts(kind: str):
    x = TENSORS[kind]
    for place in range(x.numel()):
        held = Contents(x)
        assert held.are_of(x, never) and held.are_of(x.detach(), never)
        index = torch.unravel_index(torch.tensor(place), x.shape)
        x.data[index] = 1 - x.data[index].int()
        assert not held.are_of(x, never)


def test_a_tensor_of_nothing_holds_the_same():
    x = torch.empty(0, 2)
    assert Contents(x).are_of(x, never) and Contents(x).copy is None


def test_the_same_bytes_in_another_form_are_something_else():
    x = torch.tensor([[1, 0], [0, 1]])
    held = Contents(x)
    for other in (torch.tensor([[1, 0, 0, 1]]), x.T, x.to(torch.float64).view(torch.int64), x.view(torch.float64)):
        assert not held.are_of(other, never)
    across, down = torch.tensor([1, 0]).expand(2, 2), torch.tensor([[1], [0]]).expand(2, 2)
    assert not Contents(across).are_of(down, never)
    x.data = torch.tensor([[1, 0, 0, 1]])
    assert not held.are_of(x, never)


def test_a_look_is_made_inside_of_transforms_and_modes():
    x = torch.ones(3, 2).T
    held = Contents(x)
    seen = []

    def look(y: torch.Tensor) -> torch.Tensor:
        seen.append(held.are_of(x, never) and Contents(x).are_of(x, never))
        return y.sum()

    torch.func.grad(look)(torch.ones(2))
    torch.vmap(look)(torch.ones(2, 2))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        seen.append(held.are_of(x, never))
    assert seen == [True] * 3


def test_nothing_tells_of_a_tensor_without_memory():
    with FakeTensorMode():
        x = torch.ones(2)
    assert not can_tell(x)
    with torch.inference_mode():
        assert can_tell(torch.ones(2)) and not can_tell(torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match="Nothing tells"):
        Contents(x)


def test_elsewhere_than_on_the_cpu_the_count_of_changes_tells():
    x = torch.ones(2, device="meta")
    held = Contents(x)
    assert held.are_of(x, never) and held.copy is None
    x.add_(1)
    assert not held.are_of(x, never)


def test_the_environment_says_whether_a_gpu_is_looked_at():
    code = (
        "import importlib, os; from ds_sparse.index import contents\n"
        "for text in ('1', '0', '', None):\n"
        "    os.environ.pop('DS_SPARSE_CHECK_LAYOUTS', None)\n"
        "    os.environ |= {} if text is None else {'DS_SPARSE_CHECK_LAYOUTS': text}\n"
        "    print(importlib.reload(contents).COMPARED_ON_GPU)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["True", "False", "False", "False"]


def test_no_values_are_looked_at_in_a_capture(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(contents, "COMPARED_ON_GPU", True)
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    x = torch.ones(2, device="meta")
    held = Contents(x)
    assert held.copy is not None and held.are_of(x, lambda: True) and not held.are_of(x, lambda: False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_a_gpu_is_looked_at_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(contents, "COMPARED_ON_GPU", True)
    x, layout = torch.randn(1, 1, 32, 8, device="cuda"), torch.ones(2, 2, dtype=torch.bool, device="cuda")
    block_sparse_attention(x, x, x, layout)
    layout.data[0, 1] = False
    index = BlockIndex.build(layout, 16)
    assert torch.equal(block_sparse_attention(x, x, x, layout), block_sparse_attention(x, x, x, index))
    held = Contents(layout)
    layout.data[0, 0] = False
    assert held.are_of(layout, lambda: True) and not held.are_of(layout, lambda: False)
