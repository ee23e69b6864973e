"""What a program under `ds_sparse run` finds in DeepSpeed."""

from __future__ import annotations

import argparse
import json
import sys
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from models.families.made import InTheManner, Loss
from transformers import Trainer, trainer

import ds_sparse
from ds_sparse.integrations import trainer as shared
from ds_sparse.launcher import hook

pytestmark = pytest.mark.usefixtures("installed")
CONFIG = {
    "train_batch_size": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "sparse_attention": {"mode": "bslongformer", "num_sliding_window_blocks": 1},
}


def make_model() -> Loss:
    return Loss(InTheManner())


@pytest.fixture
def installed(monkeypatch):
    """DeepSpeed as a program imports it there; `deepspeed.initialize`, the excepthook and the Trainer are put back."""
    monkeypatch.setattr(deepspeed, "initialize", deepspeed.initialize)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(Trainer, "get_train_dataloader", lambda self: self.loader)
    monkeypatch.setattr(trainer, "skip_first_batches", trainer.skip_first_batches)
    hook.install(deepspeed)


@pytest.mark.parametrize("flag", ["sparse", "dense"])
@pytest.mark.parametrize("args", [None, SimpleNamespace(deepspeed_sparse_attention=False)])
def test_initialize_follows_the_flag_of_the_launcher(flag, args, monkeypatch, capsys):
    """Beside that of the program's own parser too, as bing_bert's: given before the script, it does not get it."""
    monkeypatch.setenv("DS_SPARSE_RUN", flag)
    model = make_model()
    parameters = list(model.parameters())
    engine, *rest = deepspeed.initialize(args, model, model_parameters=parameters, config_params=dict(CONFIG))
    assert len(rest) == 3 and all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ds_sparse:")]
    if flag == "sparse":
        assert isinstance(model.layers[0], ds_sparse.BertSparseSelfAttention)
        assert said[-1] == "ds_sparse: sparse attention is on in 1 of 1 attention layers."
    else:
        assert isinstance(model.layers[0], InTheManner)
        assert len(said) == 1 and "it is off: training is dense" in said[0]
    engine.backward(engine(torch.randn(2, 64, 32).to(engine.device)))
    engine.step()


def test_a_program_that_uses_ds_sparse_itself_gets_the_flag_and_may_switch_it_off(monkeypatch, tmp_path):
    monkeypatch.setenv("DS_SPARSE_RUN", "sparse")
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    parser = ds_sparse.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed_config", str(tmp_path / "ds.json")])
    structure = ds_sparse.get_sparse_attention_config(args, num_heads=4)
    assert isinstance(structure, ds_sparse.BSLongformerSparsityConfig)
    model = make_model()
    config = SimpleNamespace(hidden_size=32, num_attention_heads=4)
    model.layers[0] = ds_sparse.BertSparseSelfAttention(config, structure, max_seq_length=64)
    engine, *_ = ds_sparse.initialize(args=args, model=model, model_parameters=model.parameters())
    engine.backward(engine(torch.randn(2, 64, 32).to(engine.device)))

    args.deepspeed_sparse_attention = False
    assert ds_sparse.get_sparse_attention_config(args, num_heads=4) is None
    dense = make_model()
    ds_sparse.initialize(args=args, model=dense, model_parameters=dense.parameters())
    assert isinstance(dense.layers[0], InTheManner)


def test_the_transformer_kernel_is_refused(monkeypatch):
    monkeypatch.setenv("DS_SPARSE_RUN", "sparse")
    with pytest.raises(ValueError, match="--deepspeed_transformer_kernel are both on"):
        deepspeed.initialize(SimpleNamespace(deepspeed_transformer_kernel=True), make_model(), config=dict(CONFIG))


def test_a_json_with_the_block_is_taken_everywhere(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG | {"zero_optimization": {"stage": 3}}))
    assert deepspeed.DeepSpeedConfig(str(path)).sparse_attention["mode"] == "bslongformer"
    ds_sparse.init_distributed()
    for config in (str(path), json.loads(path.read_text())):
        with deepspeed.zero.Init(config_dict_or_path=config):
            layer = torch.nn.Linear(4, 4)
        assert layer.weight.ds_shape == (4, 4)
    assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is False or torch.cuda.is_available()


@pytest.mark.parametrize("rank, waited", [("0", []), ("1", [hook.HEAD_START])])
def test_a_wrong_block_is_said_by_rank_0_and_by_others_that_outlive_it(monkeypatch, capsys, rank, waited):
    """The launcher ends all ranks when the first one fails: others have ended before their wait is over."""
    waits = []
    monkeypatch.setattr(hook, "rank", lambda: int(rank))
    monkeypatch.setattr(hook.time, "sleep", waits.append)
    error = ds_sparse.SparseAttentionConfigError(["ds.json: one thing.", "ds.json: another."])
    sys.excepthook(type(error), error, error.__traceback__)
    said = "ds_sparse: ds.json: one thing.\nds_sparse: ds.json: another.\n"
    assert (capsys.readouterr().err, waits) == (said, waited)


def test_what_else_a_program_raises_has_its_traceback(capsys):
    error = LookupError("of the program")
    sys.excepthook(type(error), error, error.__traceback__)
    assert capsys.readouterr().err.endswith("LookupError: of the program\n")


def test_programs_without_accelerate_import_the_trainers_module():
    """Where it is not installed, Transformers' module lacks what the hook wraps, and no Trainer can be made."""
    import transformers.trainer

    from ds_sparse.integrations.trainer import share_batches

    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(transformers.trainer, "skip_first_batches")
        before = transformers.trainer.Trainer.get_train_dataloader
        share_batches()
        assert transformers.trainer.Trainer.get_train_dataloader is before


def test_the_trainer_deals_its_batches_to_the_ranks_of_a_sequence(monkeypatch):
    monkeypatch.setattr(shared, "sequence_batches", lambda loader, size: ("dealt", loader, size))

    def loader_of(config):
        state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=config))
        those = SimpleNamespace(accelerator=SimpleNamespace(state=state), model=make_model(), loader=[1])
        return Trainer.get_train_dataloader(those)

    assert loader_of({"sequence_parallel_size": 2}) == ("dealt", [1], 2) and loader_of({}) == [1]
