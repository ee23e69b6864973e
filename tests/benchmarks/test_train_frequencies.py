import math

import numpy as np
import pytest
import torch

from benchmarks.train.dna_models import make_masked
from benchmarks.train.frequencies import log_frequencies, unigram_cross_entropy
from benchmarks.train.masked import MaskedTask
from benchmarks.train.models import Attention, make_bert
from benchmarks.train.settings import Settings

SETTINGS = Settings("quality", "tiny", "fp32", "cpu", True, 1024, 2e-3, 512)


def test_each_label_counts_once_more_than_it_is_there():
    found = log_frequencies([np.array([[0, 0], [0, 1]], np.uint16), np.array([2], np.uint8)], classes=4)
    assert found.exp().tolist() == pytest.approx([4 / 9, 2 / 9, 2 / 9, 1 / 9])
    labels = np.array([[0, 3]], np.uint16)
    assert unigram_cross_entropy(found, labels) == pytest.approx(-(math.log(4 / 9) + math.log(1 / 9)) / 2)


def test_a_task_knows_the_loss_of_frequencies_alone():
    tokens = np.random.default_rng(0).choice(8, size=(4, 64), p=[0.5, 0.3, 0.2, 0, 0, 0, 0, 0]).astype(np.uint16)
    frequencies = log_frequencies([tokens], 9)

    class Frequencies(torch.nn.Module):
        """Knows nothing else."""

        def forward(self, input_ids):
            return torch.zeros(*input_ids.shape, 9)

        base_model = property(lambda self: lambda input_ids: type("", (), {"last_hidden_state": self(input_ids)}))
        cls = staticmethod(lambda hidden: hidden + frequencies)

    task = MaskedTask(Frequencies(), 64, tokens, tokens[:2], frequencies, 8, 128, 0, torch.device("cpu"))
    assert task.unigram() == pytest.approx(task.evaluate())


@pytest.mark.parametrize("make", [make_bert, make_masked])
def test_a_new_model_begins_with_the_frequencies(make):
    counts = np.zeros(8, np.int64)
    counts[5] = 1000
    frequencies = log_frequencies([np.repeat(np.arange(8), counts)], 8)
    model = make(Attention("dense", 64), SETTINGS, frequencies, 0, torch.device("cpu"))
    logits = model(input_ids=torch.randint(8, (2, 64))).logits
    assert (logits.argmax(-1) == 5).all()
    torch.testing.assert_close(logits.mean((0, 1)).log_softmax(0), frequencies, atol=1.0, rtol=0)
