"""Parts of the trainer without an engine: an optimizer step, and the JSON that a run is built from."""

from argparse import Namespace
from types import SimpleNamespace

import deepspeed
import pytest
import torch

from deepspeed_train import arguments_of, train_step, was_skipped

pytestmark = pytest.mark.usefixtures("one_rank")


class Engine:
    """Two micro-batches a step; keeps what dropout would draw in each."""

    def __init__(self):
        self.drawn = []

    def __call__(self, batch):
        self.drawn.append(torch.rand(()).item())
        return {name: torch.tensor(batch) for name in ("loss", "mlm_loss", "nsp_loss")}

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


class Rooted(torch.nn.Module):
    """Of its two groups of parameters one has a gradient that is not finite, that of a root at 0."""

    def __init__(self):
        super().__init__()
        self.at_zero, self.at_one = (torch.nn.Parameter(torch.full((4,), x)) for x in (0.0, 1.0))

    def forward(self):
        return self.at_zero.sqrt().sum() + self.at_one.sum()


@pytest.mark.parametrize("checks", [True, False])
def test_a_step_with_gradients_that_are_not_finite_is_skipped_or_ends_the_run(checks, monkeypatch):
    """DeepSpeed's own look at each gradient is an option of the JSON."""
    model = Rooted()
    config = {
        "train_batch_size": 1,
        "bf16": {"enabled": True, "check_grad_overflow": checks},
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    monkeypatch.setenv("LOCAL_RANK", "0")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    loss = engine()
    engine.backward(loss)
    engine.step()
    if checks:
        assert was_skipped(engine, loss.item(), 7) and model.at_zero.count_nonzero() == 0
    else:
        with pytest.raises(ValueError, match="gradient of step 8 is not finite; start a new run with a lower learning"):
            was_skipped(engine, loss.item(), 7)
    with pytest.raises(ValueError, match="The loss is nan after step 7; start a new run with a lower learning rate"):
        was_skipped(engine, float("nan"), 7)
