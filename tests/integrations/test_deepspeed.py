"""DeepSpeed: the flag, the block's way out of the JSON, initialize."""

import argparse
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import ds_sparse

BASE = {
    "train_batch_size": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "steps_per_print": 1000000,
}
BLOCK = {"mode": "bigbird", "block": 16, "num_random_blocks": 1}


@pytest.fixture
def make_args(tmp_path):
    def make(flag=True, block=BLOCK, **more):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(BASE if block is None else BASE | {"sparse_attention": block}))
        parser = ds_sparse.add_config_arguments(argparse.ArgumentParser())
        args = parser.parse_args(["--deepspeed_config", str(path)] + ["--deepspeed_sparse_attention"] * flag)
        return argparse.Namespace(**vars(args), **more)

    return make


class Layer(torch.nn.Module):
    def __init__(self, sparsity_config=None):
        super().__init__()
        config = SimpleNamespace(hidden_size=32, num_attention_heads=4)
        self.self = ds_sparse.BertSparseSelfAttention(config, sparsity_config, max_seq_length=64)

    def forward(self, x):
        return self.self(x).square().mean()


class DenseLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        return (torch.softmax(self.query(x) @ self.key(x).mT, -1) @ self.value(x)).square().mean()


def test_the_parser_has_deepspeeds_options_and_the_flag():
    parser = ds_sparse.add_config_arguments(argparse.ArgumentParser())
    assert parser.parse_args([]).deepspeed_sparse_attention is False
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "x.json", "--deepspeed_sparse_attention"])
    assert args.deepspeed and args.deepspeed_sparse_attention and args.deepspeed_config == "x.json"


def test_without_the_flag_there_is_no_structure(make_args):
    assert ds_sparse.get_sparse_attention_config(make_args(flag=False), 4) is None


def test_with_the_flag_the_block_is_the_structure(make_args):
    config = ds_sparse.get_sparse_attention_config(make_args(block={"mode": "fixed", "num_local_blocks": 8}), 4)
    assert isinstance(config, ds_sparse.FixedSparsityConfig) and config.num_local_blocks == 8 and config.num_heads == 4


def test_the_flag_without_a_block_is_fixed_and_says_so(make_args, capsys):
    config = ds_sparse.get_sparse_attention_config(make_args(block=None), 4)
    assert isinstance(config, ds_sparse.FixedSparsityConfig) and config.num_heads == 4
    assert "Fixed sparsity is used as default" in capsys.readouterr().out


def test_random_blocks_without_a_seed_get_one_that_repeats_the_layout(make_args, capsys):
    config = ds_sparse.get_sparse_attention_config(make_args(), 4)
    assert f"seed {config.seed}" in capsys.readouterr().out
    assert torch.equal(config.make_layout(256), config.make_layout(256))
    again = ds_sparse.get_sparse_attention_config(make_args(block=BLOCK | {"seed": config.seed}), 4)
    assert torch.equal(again.make_layout(256), config.make_layout(256))


def test_several_ranks_cannot_draw_a_seed_before_they_can_talk(make_args, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"call ds_sparse.init_distributed\(\) first"):
        ds_sparse.get_sparse_attention_config(make_args(), 4)


def test_a_wrong_block_names_the_file(make_args):
    args = make_args(block={"mode": "fixed", "num_local_block": 8})
    with pytest.raises(ds_sparse.SparseAttentionConfigError, match=r"ds\.json.*num_local_block.*num_local_blocks"):
        ds_sparse.get_sparse_attention_config(args, 4)


def test_the_flag_needs_a_json_and_excludes_the_transformer_kernel(make_args):
    with pytest.raises(ValueError, match="add --deepspeed_config FILE"):
        ds_sparse.get_sparse_attention_config(argparse.Namespace(deepspeed_sparse_attention=True), 4)
    with pytest.raises(ValueError, match="--deepspeed_transformer_kernel are both on"):
        ds_sparse.get_sparse_attention_config(make_args(deepspeed_transformer_kernel=True), 4)


def test_initialize_trains_sparse_and_hands_over_the_rest(make_args, capsys):
    args = make_args()
    model = Layer(ds_sparse.get_sparse_attention_config(args, 4))
    engine, optimizer, _, _ = ds_sparse.initialize(args=args, model=model, model_parameters=model.parameters())
    assert "sparse attention is on in 1 of 1 attention layers" in capsys.readouterr().out
    assert args.deepspeed_config.endswith("ds.json")
    before = model.self.query.weight.detach().clone()
    engine.backward(engine(torch.randn(2, 64, 32)))
    engine.step()
    assert optimizer is not None and not torch.equal(before, model.self.query.weight)


@pytest.mark.parametrize("as_dict", [False, True])
def test_initialize_without_the_flag_trains_dense_from_the_same_json_and_says_so(make_args, capsys, as_dict):
    args = make_args(flag=False)
    config = None
    if as_dict:
        config, args.deepspeed_config = BASE | {"sparse_attention": BLOCK}, None
    model = DenseLayer()
    engine, *_ = ds_sparse.initialize(args=args, model=model, config=config, model_parameters=model.parameters())
    assert "has a sparse_attention block and it is off: training is dense" in capsys.readouterr().out
    engine.backward(engine(torch.randn(2, 64, 32)))
    engine.step()
    if as_dict:
        assert "sparse_attention" in config


def test_the_flag_with_a_dense_layer_is_an_error(make_args):
    model = torch.nn.ModuleList([Layer(), DenseLayer(), torch.nn.MultiheadAttention(32, 4)])
    with pytest.raises(ValueError, match=r"1 of the model's 3 attention layers are sparse \(dense: 1, 2\)"):
        ds_sparse.initialize(args=make_args(), model=model)
    with pytest.raises(ValueError, match="Linear has no self-attention layer"):
        ds_sparse.initialize(args=make_args(), model=torch.nn.Linear(2, 2))


def test_the_flag_with_another_structure_than_the_jsons_is_an_error(make_args):
    with pytest.raises(ValueError, match=r"layer self.sparse_self_attention has FixedSparsityConfig .*JSON says BigBird"):
        ds_sparse.initialize(args=make_args(), model=Layer())
    other = ds_sparse.BigBirdSparsityConfig(num_heads=4, num_random_blocks=2)
    with pytest.raises(ValueError, match=r"has num_random_blocks=2 where the JSON says BigBirdSparsityConfig num_random_blocks=1"):
        ds_sparse.initialize(args=make_args(), model=Layer(other))
    with pytest.raises(ds_sparse.SparseAttentionConfigError, match="bigbrid"):
        ds_sparse.initialize(args=make_args(block={"mode": "bigbrid"}), model=Layer())


@pytest.mark.parametrize("names", [("q_proj", "k_proj", "v_proj"), ("q_lin", "k_lin", "v_lin"), ("query_key_value",), ("c_attn",)])
def test_a_dense_layer_by_other_names_is_seen(make_args, names):
    dense = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in names})
    model = torch.nn.ModuleDict({"sparse": Layer(ds_sparse.get_sparse_attention_config(make_args(), 4)), "other": dense})
    with pytest.raises(ValueError, match=r"1 of the model's 2 attention layers are sparse \(dense: other\)"):
        ds_sparse.initialize(args=make_args(), model=model)


@pytest.mark.usefixtures("registry")
def test_a_structure_of_the_users_gets_no_seed(make_args, capsys):
    @ds_sparse.register_sparsity("every_other_column")
    class Stripes(ds_sparse.SparsityConfig):
        def make_layout(self, seq_len):
            layout = self.setup_layout(seq_len)
            layout[:, :, ::2] = 1
            return layout

    config = ds_sparse.get_sparse_attention_config(make_args(block={"mode": "every_other_column"}), 4)
    assert isinstance(config, Stripes) and config.seed is None and "seed" not in capsys.readouterr().out


def test_two_configurations_or_none_are_an_error(make_args):
    with pytest.raises(ValueError, match="2 DeepSpeed configurations are given"):
        ds_sparse.initialize(args=make_args(), model=Layer(), config=dict(BASE))
    with pytest.raises(ValueError, match="0 DeepSpeed configurations are given"):
        ds_sparse.initialize(model=Layer())


def test_importing_ds_sparse_brings_in_neither_deepspeed_nor_torch():
    code = "import sys, ds_sparse; print(sorted({'torch', 'deepspeed', 'transformers', 'matplotlib', 'datasets'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
