import torch
from torch.nn.functional import conv1d

from benchmarks.train.models import Attention, make_bert
from benchmarks.train.neighbours import Neighbours
from benchmarks.train.settings import Settings

SETTINGS = Settings("quality", "tiny", "fp32", "cpu", True, 1024, 2e-3, 512)


def test_neighbours_are_added_by_a_depthwise_convolution():
    module = Neighbours(3)
    x = torch.randn(2, 7, 3)
    before, after = module.weight[:2], module.weight[2:]
    kernel = torch.cat([before, torch.ones(1, 3), after]).T[:, None]
    expected = conv1d(x.transpose(1, 2), kernel, padding=2, groups=3).transpose(1, 2)
    torch.testing.assert_close(module(x), expected)


def test_a_model_has_them_in_its_embeddings_and_trains_them():
    model = make_bert(Attention("bigbird", 128), SETTINGS, torch.zeros(50), 0, torch.device("cpu"))
    embeddings = model.bert.embeddings
    ids = torch.randint(50, (2, 128))
    with_neighbours = embeddings(ids)
    torch.nn.init.zeros_(embeddings.neighbours.weight)
    assert not torch.allclose(embeddings(ids), with_neighbours)
    model(ids, labels=ids).loss.backward()
    assert embeddings.neighbours.weight.grad.abs().min() > 0
