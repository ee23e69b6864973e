import numpy as np
import pytest
import torch

from benchmarks.train.masked import MASKED, MaskedTask, Rows, make_batch, masked_places

MASK = 99
TOKENS = np.random.default_rng(1).integers(0, 90, (6, 64)).astype(np.uint16)


def test_every_length_has_the_same_tokens_masked_at_the_same_places():
    masked = masked_places((2, 64), 3, 5)
    long, short = (make_batch(TOKENS[:2], masked, MASK, length) for length in (64, 16))
    assert long.tokens.shape == (2, 64) and short.tokens.shape == (8, 16)
    for mine, theirs in zip(long, short, strict=True):
        assert torch.equal(mine.flatten(), theirs.flatten())
    assert torch.equal(long.tokens == MASK, torch.from_numpy(masked))
    assert torch.equal(long.labels.flatten()[long.labelled], torch.from_numpy(TOKENS[:2].astype(np.int64)[masked]))
    assert (long.labels >= 0).sum() == len(long.labelled) == masked.sum()


def test_tasks_of_two_lengths_train_on_the_same():
    seen = []

    class Model(torch.nn.Module):
        def forward(self, input_ids):
            seen.append(input_ids)
            raise KeyError

        base_model = property(lambda self: self)

    for length in (64, 16):
        task = MaskedTask(Model(), length, TOKENS, TOKENS[:2], torch.zeros(90), MASK, 128, 7, torch.device("cpu"))
        for call in (lambda task=task: task.loss(4), task.evaluate):
            with pytest.raises(KeyError):
                call()
    assert [x.shape for x in seen] == [(2, 64), (2, 64), (8, 16), (8, 16)]
    assert torch.equal(seen[0].flatten(), seen[2].flatten()) and torch.equal(seen[1].flatten(), seen[3].flatten())
    assert not torch.equal(seen[0], seen[1])


def test_masked_places_are_those_of_the_seed():
    places = masked_places((100, 100), 1, 2)
    assert np.array_equal(places, masked_places((100, 100), 1, 2))
    assert not np.array_equal(places, masked_places((100, 100), 1, 3))
    assert places.mean() == pytest.approx(MASKED, abs=0.02)


def test_an_epoch_has_every_piece_once_in_an_order_of_its_own():
    rows = Rows(7, 2, seed=0)
    first, second = ([rows.of(step).tolist() for step in steps] for steps in (range(3), range(3, 6)))
    for epoch in (first, second):
        assert len({number for step in epoch for number in step}) == 6
    assert first != second
    assert rows.of(1).tolist() == first[1], "a step's pieces are the same at each call, in any order"
    assert Rows(7, 2, seed=1).of(0).tolist() != first[0]
