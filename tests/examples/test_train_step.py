"""Parts of the trainer without an engine: an optimizer step, and the JSON that a run is built from."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from deepspeed_train import arguments_of, train_step

pytestmark = pytest.mark.usefixtures("one_rank")


class Engine:
    """Two micro-batches a step; keeps what dropout would draw in each."""

    def __init__(self):
        self.drawn = []

    def __call__(self, batch):
        self.drawn.append(torch.rand(()).item())
        return {name: torch.tensor(batch) for name in ("loss", "mlm_loss", "nsp_loss")}

    def train(self): ...
    def step(self): ...
    def backward(self, loss): ...

    def gradient_accumulation_steps(self):
        return 2

    def fp16_enabled(self):
        return False


def test_each_micro_batch_of_each_step_has_a_dropout_of_its_own_and_the_loss_is_their_mean():
    engine, losses = Engine(), (SimpleNamespace(to=lambda _, loss=loss: loss) for loss in (1.0, 3.0) * 4)
    for seed, step in ((1, 0), (1, 1), (2, 0)):
        assert train_step(engine, losses, seed, step) == (2, 2)
    assert len(set(engine.drawn)) == 6
    train_step(engine, losses, 1, 1)
    assert engine.drawn[6:] == engine.drawn[2:4]


def test_a_run_that_continues_draws_its_layout_with_the_seed_that_it_began_with():
    block, args = {"mode": "bigbird", "num_random_blocks": 1}, Namespace(compare_dense=False)
    config = {"sparse_attention": block}
    assert arguments_of(args, config, "sparse").deepspeed_config == config
    assert arguments_of(args, config, "sparse", 7).deepspeed_config["sparse_attention"] == block | {"seed": 7}
