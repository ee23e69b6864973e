"""DeepSpeed: the flag, the block's way out of the JSON, initialize."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from models.families.made import Fused, InTheManner, Loss

import ds_sparse
from ds_sparse.tools import notices

BASE = {
    "train_batch_size": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "steps_per_print": 1000000,
}
BLOCK = {"mode": "bigbird", "block": 16, "num_random_blocks": 1}
BERT = {
    "vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32,
    "max_position_embeddings": 512, "initializer_range": 0.3,
}  # fmt: skip


@pytest.fixture
def make_args(tmp_path):
    def make(flag=True, block=BLOCK, **more):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(BASE if block is None else BASE | {"sparse_attention": block}))
        parser = ds_sparse.add_config_arguments(argparse.ArgumentParser())
        args = parser.parse_args(["--deepspeed_config", str(path)] + ["--deepspeed_sparse_attention"] * flag)
        return argparse.Namespace(**vars(args), **more)

    return make


@pytest.fixture
def refused(make_args):
    """Whether `initialize` refuses a model, in these words."""

    def assert_refused(model, sentence, error=ValueError, **arguments):
        with pytest.raises(error, match=sentence):
            ds_sparse.initialize(args=make_args(**arguments), model=model)

    return assert_refused


class Layer(torch.nn.Module):
    def __init__(self, sparsity_config=None):
        super().__init__()
        config = SimpleNamespace(hidden_size=32, num_attention_heads=4)
        self.self = ds_sparse.BertSparseSelfAttention(config, sparsity_config, max_seq_length=64)

    def forward(self, x):
        return self.self(x).square().mean()


@pytest.mark.parametrize(("flag", "structure"), [(True, None), (False, ds_sparse.FixedSparsityConfig(num_heads=4))])
def test_autosp_is_refused_where_layers_are_or_become_sparse(flag: bool, structure):
    config = BASE | {"compile": {"deepcompile": True, "passes": ["autosp"]}, "sparse_attention": BLOCK}
    args = argparse.Namespace(deepspeed_sparse_attention=flag)
    with pytest.raises(ds_sparse.SparseAttentionConfigError, match="AutoSP.*sequence_parallel_size"):
        ds_sparse.initialize(args, Layer(structure), config=config)


def test_the_parser_has_deepspeeds_options_and_the_flag():
    parser = ds_sparse.add_config_arguments(argparse.ArgumentParser())
    assert parser.parse_args([]).deepspeed_sparse_attention is False
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "x.json", "--deepspeed_sparse_attention"])
    assert args.deepspeed and args.deepspeed_sparse_attention and args.deepspeed_config == "x.json"


def test_the_structure_is_that_of_the_block_or_fixed_and_of_none_without_the_flag(make_args, capsys):
    assert ds_sparse.get_sparse_attention_config(make_args(flag=False), 4) is None
    config = ds_sparse.get_sparse_attention_config(make_args(block={"mode": "fixed", "num_local_blocks": 8}), 4)
    assert isinstance(config, ds_sparse.FixedSparsityConfig) and config.num_local_blocks == 8 and config.num_heads == 4
    assert "Fixed sparsity" not in capsys.readouterr().out
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
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match=r"call ds_sparse.init_distributed\(\) first"):
        ds_sparse.get_sparse_attention_config(make_args(), 4)


def test_a_wrong_block_names_the_file_and_the_flag_needs_one_and_excludes_the_transformer_kernel(make_args):
    for args, sentence in (
        (argparse.Namespace(deepspeed_sparse_attention=True), "add --deepspeed_config FILE"),
        (make_args(deepspeed_transformer_kernel=True), "--deepspeed_transformer_kernel are both on"),
        # The last to write the file.
        (make_args(block={"mode": "fixed", "num_local_block": 8}), r"ds\.json.*num_local_block.*num_local_blocks"),
    ):
        with pytest.raises(ValueError, match=sentence):
            ds_sparse.get_sparse_attention_config(args, 4)


BY_LAYER = {"mode": "dense", "layers": {"0": {"mode": "bigbird", "num_random_blocks": 1}, "1": None}}


def test_layers_of_the_block_are_given_one_by_one(make_args):
    first, second, third = ds_sparse.get_sparse_attention_layers(make_args(block=BY_LAYER), 4, 3)
    assert isinstance(first, ds_sparse.BigBirdSparsityConfig) and isinstance(first.seed, int)
    assert second is None and isinstance(third, ds_sparse.DenseSparsityConfig)
    assert ds_sparse.get_sparse_attention_layers(make_args(flag=False, block=BY_LAYER), 4, 3) is None
    with pytest.raises(
        ds_sparse.SparseAttentionConfigError, match='layers."1": names layer 1, and the model has 1 att'
    ):
        ds_sparse.get_sparse_attention_layers(make_args(block=BY_LAYER), 4, 1)
    with pytest.raises(ValueError, match="build each with ds_sparse.get_sparse_attention_layers"):
        ds_sparse.get_sparse_attention_config(make_args(block=BY_LAYER), 4)


def test_initialize_makes_each_layer_what_its_entry_says(make_args, capsys):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(InTheManner() for _ in range(3)))
    ds_sparse.initialize(make_args(block=BY_LAYER), model)
    assert [type(layer).__name__ for layer in model] == [
        "BertSparseSelfAttention", "InTheManner", "BertSparseSelfAttention",
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert '1 attention layer stays dense: null in "layers" of the block.' in out
    assert "sparse attention is on in 2 of 3 attention layers." in out


def test_layers_built_by_the_block_are_taken_and_others_are_named(make_args, refused, capsys):
    args = make_args(block=BY_LAYER)
    structures = ds_sparse.get_sparse_attention_layers(args, 4, 3)
    built = [InTheManner() if structure is None else Layer(structure) for structure in structures]
    ds_sparse.initialize(args, torch.nn.Sequential(*built))
    assert "sparse attention is on in 2 of 3 attention layers." in capsys.readouterr().out
    model = torch.nn.Sequential(built[0], Layer(structures[2]), built[2])
    refused(model, r"layer 1.self.* where the JSON says null, dense attention", block=BY_LAYER)
    model = torch.nn.Sequential(built[0], Layer(structures[2]), InTheManner())
    refused(model, r"2 of the model's 3 attention layers are sparse \(dense: 2\)", block=BY_LAYER)


def test_the_decoder_of_a_sparse_encoder_stays_dense(make_args, capsys):
    sizes = {"vocab_size": 20, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    for already in (False, True):
        model = transformers.T5Model(transformers.T5Config(**sizes))
        if already:
            ds_sparse.sparsify(model, {"mode": "dense"})
        ds_sparse.initialize(make_args(block={"mode": "dense"}), model)
        out = capsys.readouterr().out
        assert "sparse attention is on in 2 of 6 attention layers." in out
        assert already or "4 attention layers stay dense: T5Stack has cross-attention." in out


def test_a_checkpoint_keeps_the_seed_that_an_entry_was_drawn_with(make_args, tmp_path):
    engines = []
    for _ in range(2):
        model = transformers.BertModel(transformers.BertConfig(**BERT))
        engines.append(
            ds_sparse.initialize(make_args(block=BY_LAYER | {"layers": {"0": BY_LAYER["layers"]["0"]}}), model)[0]
        )
    blocks = [engine.module.config.sparse_attention for engine in engines]
    seeds = [block["layers"]["0"]["seed"] for block in blocks]
    assert seeds[0] != seeds[1]
    engines[0].save_checkpoint(tmp_path)
    engines[1].load_checkpoint(tmp_path)
    assert engines[1].module.config.sparse_attention == blocks[0]


def test_initialize_trains_sparse_and_hands_over_the_rest(make_args, capsys):
    args = make_args()
    model = Layer(ds_sparse.get_sparse_attention_config(args, 4))
    engine, optimizer, _, _ = ds_sparse.initialize(args=args, model=model, model_parameters=model.parameters())
    assert "sparse attention is on in 1 of 1 attention layers" in capsys.readouterr().out
    assert args.deepspeed_config.endswith("ds.json")
    before = model.self.query.weight.detach().clone()
    engine.backward(engine(torch.randn(2, 64, 32).to(engine.device)))
    engine.step()
    assert optimizer is not None and not torch.equal(before, model.self.query.weight)


@pytest.mark.parametrize("as_dict", [False, True])
def test_initialize_without_the_flag_trains_dense_from_the_same_json_and_says_so(make_args, capsys, as_dict):
    args = make_args(flag=False)
    config = None
    if as_dict:
        config, args.deepspeed_config = BASE | {"sparse_attention": BLOCK}, None
    model = Loss(InTheManner())
    engine, *_ = ds_sparse.initialize(args=args, model=model, config=config, model_parameters=model.parameters())
    assert "has a sparse_attention block and it is off: training is dense" in capsys.readouterr().out
    engine.backward(engine(torch.randn(2, 64, 32).to(engine.device)))
    engine.step()
    if as_dict:
        assert "sparse_attention" in config


def test_the_flag_makes_a_dense_model_sparse(make_args, capsys):
    model = Loss(InTheManner(), InTheManner())
    parameters = list(model.parameters())
    x = torch.randn(2, 64, 32)
    dense_loss = model(x).item()
    engine, *_ = ds_sparse.initialize(args=make_args(), model=model, model_parameters=parameters)
    said = capsys.readouterr().out
    assert "2 attention layers made sparse: BigBirdSparsityConfig, block 16" in said
    assert said.count("sparse attention is on in 2 of 2 attention layers.") == 1
    assert all(isinstance(layer, ds_sparse.BertSparseSelfAttention) for layer in model.layers)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    x = x.to(engine.device)
    first = engine(x)
    assert first.item() != dense_loss
    engine.backward(first)
    engine.step()
    assert engine(x) < first


def test_a_model_that_the_flag_made_sparse_can_be_initialized_again(make_args, refused, capsys):
    args = make_args(block=BLOCK | {"seed": 1})
    model = Loss(InTheManner(), InTheManner())
    for _ in range(2):
        ds_sparse.initialize(args=args, model=model, model_parameters=model.parameters())
    assert capsys.readouterr().out.count("sparse attention is on in 2 of 2 attention layers.") == 2
    sentence = "layer layers.0.sparse_self_attention has BigBirdSparsityConfig.*JSON says Fixed"
    refused(model, sentence, block={"mode": "fixed"})


def test_a_transformers_model_is_made_sparse_and_held_to_the_json(make_args, refused, capsys):
    model = transformers.BertModel(transformers.BertConfig(**BERT))
    keys = list(model.state_dict())
    ds_sparse.initialize(args=make_args(), model=model, model_parameters=model.parameters())
    assert model.config._attn_implementation == "ds_sparse" and list(model.state_dict()) == keys
    ds_sparse.initialize(args=make_args(), model=model, model_parameters=model.parameters())
    assert capsys.readouterr().out.count("sparse attention is on in 2 of 2 attention layers.") == 2
    sentence = r"layer encoder.layer.0.attention.self has BigBirdSparsityConfig\(num_random_blocks=1\)"
    refused(model, sentence, block=BLOCK | {"num_random_blocks": 2})


def test_a_model_is_tried_once(make_args):
    class Counted(Fused):
        ran = 0

        def forward(self, x):
            Counted.ran += 1
            return super().forward(x)

    model = torch.nn.Sequential(Counted(), Counted())
    ds_sparse.initialize(args=make_args(block={"mode": "fixed"}), model=model, model_parameters=model.parameters())
    assert Counted.ran == 2


def test_plain_pytorch_models_are_made_sparse_and_held_to_the_json(make_args, refused, capsys):
    decoder = torch.nn.TransformerDecoderLayer(32, 4, 64, batch_first=True)
    model = torch.nn.ModuleDict({"decoder": decoder, "calls": Fused()})
    args = make_args(block=BLOCK | {"seed": 1})
    for _ in range(2):
        ds_sparse.initialize(args=args, model=model, model_parameters=model.parameters())
    assert capsys.readouterr().out.count("sparse attention is on in 2 of 2 attention layers.") == 2
    for name in ("decoder.self_attn", "calls"):
        refused(model, f"layer {name} has BigBirdSparsityConfig.*JSON says Fixed", block={"mode": "fixed"})
        del model[name.partition(".")[0]]
    refused(torch.nn.ModuleList([Fused()]), 'no seed.*"seed": 0 in a block')


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_model_of_several_kinds_that_sparsify_made_sparse_is_taken_with_the_same_entries(make_args, number, capsys):
    encoder = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = torch.nn.Sequential(Fused(), encoder, Fused())
    block = {"mode": "fixed", "block": 16, "layers": {str(number): None, "2": {"mode": "dense"}}}
    ds_sparse.sparsify(model, block, max_seq_length=64)
    ds_sparse.initialize(args=make_args(block=block), model=model, model_parameters=model.parameters())
    sparse = 3 if number == 2 else 2
    assert f"sparse attention is on in {sparse} of 3 attention layers." in capsys.readouterr().out


@pytest.mark.parametrize("make_model", ["in the manner", "BertModel"])
def test_a_checkpoint_keeps_random_blocks_that_were_drawn(make_args, make_model, tmp_path):

    def start():
        torch.manual_seed(0)
        hf = make_model == "BertModel"
        model = (
            transformers.BertModel(transformers.BertConfig(**BERT)).eval() if hf else Loss(InTheManner(), InTheManner())
        )
        engine, *_ = ds_sparse.initialize(args=make_args(), model=model, model_parameters=model.parameters())
        x = torch.arange(512)[None] % 20 if hf else torch.linspace(-1, 1, 512 * 32).view(1, 512, 32)
        return engine, lambda: engine(x.to(engine.device))[0].detach() if hf else engine(x.to(engine.device)).detach()

    first, run_first = start()
    first.save_checkpoint(str(tmp_path), "a", client_state={"step": 7})
    second, run_second = start()
    assert not torch.equal(run_second(), run_first())
    _, client_state = second.load_checkpoint(str(tmp_path))
    assert client_state["step"] == 7 and not any("ds_sparse" in key for key in client_state)
    assert torch.equal(run_second(), run_first())


def test_the_flag_without_a_block_makes_it_fixed_and_says_so(make_args, capsys):
    model = Loss(InTheManner(), InTheManner())
    ds_sparse.initialize(args=make_args(block=None), model=model, model_parameters=model.parameters())
    said = capsys.readouterr().out
    assert "Fixed sparsity is used as default" in said and "made sparse: FixedSparsityConfig" in said


def test_a_notice_is_given_once_a_process(make_args, capsys, monkeypatch):
    monkeypatch.setattr(notices, "_said", set())
    args = make_args(block=BLOCK | {"local_window_blocks": [4]})
    for _ in range(2):
        ds_sparse.get_sparse_attention_config(args, 4)
    args.deepspeed_config = json.loads(Path(args.deepspeed_config).read_text())
    ds_sparse.get_sparse_attention_config(args, 4)
    ds_sparse.initialize(args=args, model=Loss(InTheManner(), InTheManner()))
    said = capsys.readouterr().out
    assert (
        said.count("sparse_attention.local_window_blocks: belongs to mode") == 1 and "ds.json: sparse_attention" in said
    )


def test_the_flag_with_a_model_that_it_cannot_serve_is_an_error(make_args, refused, monkeypatch):
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda *_, **__: pytest.fail("nothing is to be started")
    )
    sparse = Layer(ds_sparse.get_sparse_attention_config(make_args(), 4))
    refused(
        torch.nn.ModuleList([sparse, InTheManner()]),
        r"1 of the model's 2 attention layers are sparse \(dense: 1\); build all of them",
    )
    for names in ("q_proj", "k_proj", "v_proj"), ("q_lin", "k_lin", "v_lin"), ("query_key_value",), ("c_attn",):
        other = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in names})
        model = torch.nn.ModuleDict({"sparse": sparse, "other": other})
        refused(model, r"1 of the model's 2 attention layers are sparse \(dense: other\)")
    refused(torch.nn.Linear(2, 2), "Linear has no self-attention layer")
    own = type("Own", (torch.nn.MultiheadAttention,), {})(32, 4)
    refused(torch.nn.ModuleList([own]), r"attention layer 0 \(Own\) would stay dense")


def test_the_flag_with_another_structure_than_the_jsons_is_an_error(refused):
    error = ds_sparse.SparseAttentionConfigError  # which `ds_sparse run` says on rank 0 alone
    refused(Layer(), "layer self.sparse_self_attention has FixedSparsityConfig.* where the JSON says BigBird", error)
    other = ds_sparse.BigBirdSparsityConfig(num_heads=4, num_random_blocks=2)
    sentence = r"BigBirdSparsityConfig\(num_random_blocks=2\) where the JSON says .*num_random_blocks=1"
    refused(Layer(other), sentence, error)
    refused(Layer(), "bigbrid", error, block={"mode": "bigbrid"})


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("seed", [{}, {"seed": 3}])
@pytest.mark.parametrize("draws", [False, True])
def test_a_structure_of_the_users_that_draws_otherwise_or_not_at_all_gets_none(make_args, capsys, seed, draws):
    @ds_sparse.register_sparsity("scatter")
    class Scatter(ds_sparse.SparsityConfig):
        def make_layout(self, seq_len):
            layout = self.setup_layout(seq_len)
            return (torch.rand(layout.shape) < 0.5).long() if draws else layout + 1

    config = ds_sparse.get_sparse_attention_config(make_args(block={"mode": "scatter"} | seed), 4)
    assert isinstance(config, Scatter) and config.seed == seed.get("seed")
    said = "Scatter draws other blocks each time, and no seed repeats them; draw them with self.sampler(h)"
    printed = capsys.readouterr().out
    assert printed.count(said) == draws and "drawn with seed" not in printed


def test_layers_that_a_pipeline_module_calls_by_its_own_list_are_sparse():
    ds_sparse.init_distributed(dist_backend="gloo", verbose=False)
    from deepspeed.pipe import PipelineModule

    layers = [InTheManner(), torch.nn.LayerNorm(32), InTheManner()]
    model, x = PipelineModule(layers, num_stages=1), torch.randn(1, 64, 32)
    other = torch.cat([x[:, :-1], torch.randn(1, 1, 32)], 1)
    block = {"mode": "bslongformer", "block": 16, "num_sliding_window_blocks": 1, "global_block_indices": []}
    report = ds_sparse.sparsify(model, block, max_seq_length=64)
    assert [type(f).__name__ for f in model.forward_funcs[::2]] == ["BertSparseSelfAttention"] * 2
    assert torch.equal(model(x)[:, :48], model(other)[:, :48])
    report.undo()
    assert [type(f) for f in model.forward_funcs[::2]] == [InTheManner] * 2


def test_two_configurations_or_none_are_an_error(make_args):
    with pytest.raises(ValueError, match="2 DeepSpeed configurations are given"):
        ds_sparse.initialize(args=make_args(), model=Layer(), config=dict(BASE))
    with pytest.raises(ValueError, match="0 DeepSpeed configurations are given"):
        ds_sparse.initialize(model=Layer())
