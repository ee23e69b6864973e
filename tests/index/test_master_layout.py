"""MasterLayout: the indices of a layout's parts, and the text that graphs hold it by."""

import copy
import gc
import pickle

import pytest
import torch
from helpers import seeded

from ds_sparse.index import BlockIndex
from ds_sparse.index.cache import captured
from ds_sparse.index.master_layout import MasterLayout
from ds_sparse.layout import crop


def random_layout(heads=3, blocks=11, seed=0):
    return torch.rand(heads, blocks, blocks, generator=seeded(seed)) < 0.4


def test_the_index_of_a_part_is_that_of_the_cropped_layout(device: str):
    layout = random_layout()
    master = MasterLayout(layout, 16)
    for tokens, blocks in ((1, 1), (50, 4), (176, 11)):
        for causal in (False, True):
            index = master.index(tokens, torch.device(device), causal)
            expected = BlockIndex.build(crop(layout, blocks, blocks).to(device), 16)
            expected = expected.causal() if causal else expected
            assert torch.equal(index.bits, expected.bits) and index.device.type == device
            assert master.index(tokens, torch.device(device), causal) is index


def test_a_text_finds_the_layout_in_use():
    master = MasterLayout(random_layout(), 16)
    assert MasterLayout.read(master.text) is master
    assert copy.deepcopy(master) is master
    assert pickle.loads(pickle.dumps(master)).text == master.text


@pytest.mark.parametrize(("heads", "blocks"), [(1, 1), (3, 11), (2, 64)])
def test_a_text_holds_the_whole_layout(heads: int, blocks: int):
    layout = random_layout(heads, blocks, seed=7)
    text = MasterLayout(layout, 32).text
    gc.collect()
    read = MasterLayout.read(text)
    assert torch.equal(read.layout, layout) and read.block == 32 and read.text == text
    assert MasterLayout.read(text) is read


def test_layouts_that_differ_have_texts_that_differ():
    layout = random_layout()
    other = layout.clone()
    other[1, 2, 3] ^= True
    assert len({MasterLayout(x, block).text for x in (layout, other, layout[:1]) for block in (16, 32)}) == 6


def test_an_index_is_built_under_the_callers_modes_as_without():
    master, expected = (MasterLayout(random_layout(), 16) for _ in range(2))
    with torch.inference_mode(), torch.device("meta"), torch._subclasses.FakeTensorMode():
        index = master.index(90, torch.device("cpu"))
    assert torch.equal(index.bits, expected.index(90, torch.device("cpu")).bits) and not index.bits.is_inference()


@pytest.mark.gpu
def test_an_index_that_a_cuda_graph_reads_is_kept(device: str):
    if device == "cpu":
        pytest.skip("no CUDA graphs")
    device = torch.device("cuda", 0)
    master = MasterLayout(random_layout(), 16)
    wanted = "call once with this length before the capture"
    with pytest.raises(RuntimeError, match=wanted), torch.cuda.graph(torch.cuda.CUDAGraph()):
        master.index(176, device)
    index = master.index(176, device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert master.index(176, device) is index
    for blocks in range(1, 11):
        for causal in (False, True):
            master.index(blocks * 16, device, causal)
    address, bits = index.bits.data_ptr(), index.bits.clone()
    del index, master
    gc.collect()
    kept = [x for x in captured if isinstance(x, BlockIndex)]
    assert any(x.bits.data_ptr() == address and torch.equal(x.bits, bits) for x in kept)
