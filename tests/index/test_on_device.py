"""What every index has: a device, copies on others, and the tensors that it keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ds_sparse import BlockIndex, PackedIndex, TokenIndex, WindowIndex

LAYOUT = torch.ones(4, 4)
MAKE: dict[str, Callable] = {
    "blocks": lambda: BlockIndex.build(LAYOUT, 16),
    "documents": lambda: PackedIndex.build(LAYOUT, torch.tensor([0, 40, 64]), 16),
    "window": lambda: WindowIndex.build(64, 3, dilation=[1, 2]),
    "pairs": lambda: TokenIndex.from_mask(torch.eye(64, dtype=torch.bool)),
}


@pytest.mark.parametrize("kind", MAKE)
def test_it_is_where_its_tensors_are_and_no_copy_is_made_of_it_there(device: str, kind: str):
    index = MAKE[kind]().to(device)
    assert index.device.type == device and {x.device for x in index._held()} == {index.device}
    assert index.to(device) is index and index.to(index.device) is index and index.ready() is index


@pytest.mark.parametrize("kind", ["documents", "window"])
def test_what_an_index_holds_is_counted_with_the_blocks_in_it(kind: str):
    index = MAKE[kind]()
    held = {id(x) for x in index._held()}
    assert {id(x) for x in index.blocks._held()} < held
    assert {id(x) for x in vars(index).values() if isinstance(x, torch.Tensor)} < held
