"""Models whose layers get parameters by their structure: modes "nsa" and "indexer"."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import seeded
from integrations import families
from integrations.families import DECODERS, MASKED, VOCABULARY, assert_close

import ds_sparse
from ds_sparse import sparsify

INDEXER = {"mode": "indexer", "block": 16, "num_chosen_blocks": 2, "index_dim": 8}
NSA = {
    "mode": "nsa", "block": 16, "num_chosen_blocks": 4, "num_sliding_window_blocks": 1, "compressed_length": 16,
    "compressed_stride": 8, "window": 20,
}  # fmt: skip
BOTH = pytest.mark.parametrize("block", [NSA, INDEXER], ids=["nsa", "indexer"])


def llama(**more: Any) -> Any:
    return families.make(DECODERS["llama"], **more)


def tokens(length: int = 70) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, length), generator=seeded(0))


def trained(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a model, and all gradients."""
    return families.run(model, {"input_ids": ids, "labels": ids}, lambda output: output.loss)


def learned(model: Any) -> dict[str, torch.Tensor]:
    return {name: x for name, x in model.named_parameters() if "sparse_attention" in name}


@BOTH
def test_a_decoder_learns_is_saved_and_becomes_dense_again(block: dict[str, Any], tmp_path: Path):
    model, ids = llama(), tokens()
    dense, keys = model(ids).logits, list(model.state_dict())
    report = sparsify(model, block)
    count = sum(x.numel() for x in learned(model).values())
    assert count and f"{count:,} parameters added" in str(report)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    before = copy.deepcopy(learned(model))
    model.train()(ids, labels=ids).loss.backward()
    optimizer.step()
    assert not any(torch.equal(x, before[name]) for name, x in learned(model).items())
    trained = model.eval()(ids).logits
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="ds_sparse")
    torch.testing.assert_close(loaded(ids).logits, trained)
    report.undo()
    assert list(model.state_dict()) == keys
    assert not torch.equal(model(ids).logits, dense)  # the optimizer's step


@BOTH
def test_a_dense_checkpoint_is_loaded_with_new_parameters(block: dict[str, Any], tmp_path: Path):
    llama().save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.sparse_attention = block
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, config=config, attn_implementation="ds_sparse", dtype=torch.bfloat16, output_loading_info=True
    )
    new = learned(model)
    assert found["missing_keys"] == set(new) and all(x.dtype == torch.bfloat16 for x in new.values())
    torch.manual_seed(0)
    made = llama()
    sparsify(made, block)
    for name, x in learned(made).items():  # drawn as the module draws them, and not by the model
        torch.testing.assert_close(new[name].float().std(), x.std(), rtol=0.3, atol=0.02)
    assert model(tokens()).logits.isfinite().all()


def test_a_checkpoint_that_has_some_of_the_parameters_gives_these(tmp_path: Path):
    model = llama()
    sparsify(model, INDEXER)
    weights = {name: x for name, x in model.state_dict().items() if "1.self_attn.sparse_attention.key" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="ds_sparse")
    theirs = learned(loaded)
    equal = {name for name, x in learned(model).items() if torch.equal(x, theirs[name])}
    assert len(equal) == 3 and not any("1.self_attn.sparse_attention.key" in name for name in equal)


def test_the_name_makes_parameters_once(capsys, recwarn):
    config = llama().config
    config.sparse_attention = INDEXER
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ds_sparse")
    mine = learned(model)
    model.set_attn_implementation("sdpa")
    model.set_attn_implementation("ds_sparse")
    again = learned(model)
    assert len(mine) == 4 and all(again[name] is x for name, x in mine.items())
    model.config.sparse_attention = INDEXER | {"index_dim": 4}
    with pytest.raises(ValueError, match="has changed.*call model.set_attn_implementation"):
        model(tokens())
    model.set_attn_implementation("ds_sparse")
    assert all(x.shape[-1] == 4 for x in learned(model).values())
    model.config.sparse_attention = {"mode": "moba", "block": 16}
    model.set_attn_implementation("ds_sparse")
    assert not learned(model)
    model(tokens())
    assert not capsys.readouterr().out and not recwarn.list  # a trial that leaves tensors behind says so


def test_an_indexer_that_takes_all_blocks_gives_the_dense_model():
    model, ids = llama().eval(), tokens()
    dense = model(ids).logits
    sparsify(model, INDEXER | {"num_chosen_blocks": 5})
    torch.testing.assert_close(model(ids).logits, dense, atol=1e-4, rtol=1e-4)


@BOTH
def test_packed_documents_see_their_own(block: dict[str, Any]):
    model = llama().eval()
    sparsify(model, block)
    ids = tokens()[:1]
    places = torch.cat([torch.arange(30), torch.arange(40)])[None]
    packed = model(input_ids=ids, position_ids=places).logits
    for begin, end in ((0, 30), (30, 70)):
        alone = model(input_ids=ids[:, begin:end]).logits
        torch.testing.assert_close(packed[:, begin:end], alone, atol=1e-4, rtol=1e-4)


@BOTH
def test_a_decoder_generates_as_it_trains(block: dict[str, Any]):
    model, ids = llama().eval(), tokens()
    sparsify(model, block)
    whole = model(ids).logits
    cache = transformers.DynamicCache(config=model.config)
    first = model(input_ids=ids[:, :50], past_key_values=cache)
    rest = [model(input_ids=ids[:, at : at + 1], past_key_values=cache).logits for at in range(50, 70)]
    torch.testing.assert_close(torch.cat([first.logits, *rest], 1), whole, atol=1e-4, rtol=1e-4)
    assert not any(getattr(layer.self_attn.sparse_attention, "loss", 0) for layer in model.model.layers)


@BOTH
@pytest.mark.parametrize(
    "cache", [{}, {"cache_implementation": "static", "disable_compile": True}], ids=["own", "static"]
)
def test_a_text_is_the_same_with_a_cache(block: dict[str, Any], cache: dict[str, Any]):
    """Of two prompts, one of which is padded on the left."""
    model, ids = llama().double().eval(), tokens(40)
    sparsify(model, block)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    options = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    truth = model.generate(ids, **options, use_cache=False)
    assert torch.equal(model.generate(ids, **options, **cache), truth)


@BOTH
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(block: dict[str, Any], reentrant: bool):
    model, ids = llama().train(), tokens()
    sparsify(model, block)
    plain = trained(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_close(trained(model, ids), plain, rtol=1e-6)


@BOTH
def test_a_graph_of_torch_compile_has_it_all(block: dict[str, Any]):
    model, ids = llama().train(), tokens()
    sparsify(model, block)
    wanted = trained(model, ids)
    model.compile(backend="aot_eager", fullgraph=True)
    found = trained(model, ids)
    torch.testing.assert_close(found[0], wanted[0])
    assert_close(found, wanted)


def test_an_encoder_learns_by_an_indexer_and_not_by_nsa():
    model, ids = families.make(MASKED["bert"]).train(), tokens(64)
    with pytest.raises(ValueError, match=r"layer bert.encoder.* cannot be sparse. NativeSparsityConfig is for causal"):
        sparsify(model, NSA)
    assert not learned(model) and model.config._attn_implementation == "sdpa"
    sparsify(model, INDEXER)
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert all(x.grad.any() for x in learned(model).values())
    other = families.make(MASKED["bert"], is_decoder=False).train()
    sparsify(other, NSA | {"causal": True})
    other(ids, labels=ids).loss.backward()
    assert all(x.grad is not None for x in learned(other).values())


@pytest.mark.parametrize("block", [NSA, INDEXER, {"mode": "moba", "block": 16}], ids=["nsa", "indexer", "moba"])
def test_a_model_that_asks_for_what_is_not_computed_is_refused_at_the_door(block: dict[str, Any]):
    """Dropout of attention, relative positions, and sinks, which MoBA computes."""
    model, sinks = llama(attention_dropout=0.1), block["mode"] != "moba"
    with pytest.raises(
        ValueError, match=r"layer model.layers.0.self_attn .* cannot be sparse. dropout of attention \(0.1\): "
    ):
        sparsify(model, block)
    assert model.config._attn_implementation == "sdpa"
    model.config.sparse_attention = block
    with pytest.raises(ValueError, match=r"dropout of attention \(0.1\): "):
        model.set_attn_implementation("ds_sparse")
    config = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, dropout_rate=0.0
    )
    block = block | {"causal": block["mode"] == "nsa"}
    with pytest.raises(ValueError, match=r"T5Attention\) cannot be sparse. rpe: .* take a structure with a layout"):
        sparsify(transformers.T5EncoderModel(config), block)
    config = transformers.GptOssConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=32, num_local_experts=2, num_experts_per_tok=1, layer_types=["full_attention"],
    )  # fmt: skip
    oss = transformers.GptOssForCausalLM(config)
    if sinks:
        with pytest.raises(ValueError, match=r"GptOssAttention\) cannot be sparse. sinks: "):
            sparsify(oss, block)
    else:
        sparsify(oss, block)


def test_layers_have_structures_of_their_own():
    model, ids = llama(), tokens()
    sparsify(model, {"mode": "fixed", "block": 16, "layers": {"1": INDEXER}})
    assert len(learned(model)) == 2 and all(name.startswith("model.layers.1.") for name in learned(model))
    model(ids, labels=ids).loss.backward()
    assert all(x.grad.any() for x in learned(model).values())


def test_ranks_that_share_sequences_or_have_parts_of_parameters_are_refused(monkeypatch: pytest.MonkeyPatch):
    model = llama()
    model.model.layers[0].self_attn.q_proj.weight.ds_id = 0  # as ZeRO 3 marks its parameters
    with pytest.raises(ValueError, match=r"of which each rank has a part.*outside of deepspeed.zero.Init"):
        sparsify(model, INDEXER)
    del model.model.layers[0].self_attn.q_proj.weight.ds_id
    sparsify(model, INDEXER)
    ds_sparse.init_distributed()
    with pytest.raises(ValueError, match="its structure adds parameters to layers"):
        ds_sparse.sequence_parallel(model)


CONFIG = {
    "train_batch_size": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "steps_per_print": 1000000,
    "sparse_attention": INDEXER,
}
ON = argparse.Namespace(deepspeed_sparse_attention=True)


def without_optimizer() -> dict[str, Any]:
    return {key: x for key, x in CONFIG.items() if key != "optimizer"}


def trained_by(model: Any, **arguments: Any) -> Any:
    """Initializes and takes a step, after which all parameters of the structure have to differ."""
    pytest.importorskip("deepspeed")
    config = without_optimizer() if "optimizer" in arguments else CONFIG
    engine, *_ = ds_sparse.initialize(ON, model, config=config, **arguments)
    before = copy.deepcopy(learned(model))
    assert len(before) == 4
    ids = tokens().to(engine.device)
    engine.train()
    engine.backward(engine(ids, labels=ids).loss)
    engine.step()
    assert not any(torch.equal(x, before[name]) for name, x in learned(model).items())
    return engine


def groups_of(model: Any) -> list[dict[str, Any]]:
    matrices = [x for x in model.parameters() if x.dim() > 1]
    return [{"params": iter(matrices)}, {"params": [x for x in model.parameters() if x.dim() < 2], "weight_decay": 0.0}]


@pytest.mark.parametrize("given", ["nothing", "iterator", "list", "groups", "function"])
def test_deepspeed_trains_the_parameters_that_the_flag_adds(given: str):
    model = llama()
    arguments: dict[str, Any] = {
        "nothing": {},
        "iterator": {"model_parameters": model.parameters()},
        "list": {"model_parameters": list(model.parameters())},
        "groups": {"model_parameters": groups_of(model)},
        "function": {"model_parameters": list(model.parameters()), "optimizer": lambda x: torch.optim.AdamW(x, 0.01)},
    }[given]
    trained_by(model, **arguments)


def test_checkpoints_of_deepspeed_have_the_parameters(tmp_path: Path):
    engine = trained_by(llama())
    engine.save_checkpoint(str(tmp_path), tag="one")
    other = llama()
    again, *_ = ds_sparse.initialize(ON, other, config=CONFIG)
    again.load_checkpoint(str(tmp_path), tag="one")
    for name, x in learned(engine.module).items():
        assert torch.equal(x, learned(other)[name])


def test_an_optimizer_that_was_made_before_is_refused(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("deepspeed")
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with pytest.raises(ValueError, match=r"AdamW was made before IndexerSparsityConfig adds.*Call ds_sparse.sparsify"):
        ds_sparse.initialize(ON, model, config=CONFIG, optimizer=optimizer)
    assert not learned(model)
    old = list(model.parameters())
    sparsify(model, INDEXER)
    ds_sparse.initialize(ON, model, config=CONFIG, model_parameters=old)
    assert "not given to the optimizer, and so not trained: 4 parameters" in capsys.readouterr().out
    ds_sparse.initialize(ON, model, config=without_optimizer(), optimizer=torch.optim.AdamW(old, 0.01))
    assert "not given to the optimizer, and so not trained: 4 parameters" in capsys.readouterr().out
    ds_sparse.initialize(ON, model, config=without_optimizer(), optimizer=torch.optim.AdamW(model.parameters(), 0.01))
    assert "not given to the optimizer" not in capsys.readouterr().out
