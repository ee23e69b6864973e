"""torch.compile and torch.export of sparse Transformers models: one graph, few for many lengths, eager's results."""

import copy

import pytest
import torch
import transformers
from integrations.families import SIZES, SMALL, TOKENS, make_batch
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config

import ds_sparse

BLOCK = {"mode": "bigbird", "block": 16, "different_layout_per_head": True, "seed": 1}
CONFIG = SIZES | {"num_hidden_layers": 1, "max_position_embeddings": 128}


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()


def made_sparse(**config):
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**CONFIG | config))
    ds_sparse.sparsify(model, BLOCK)
    return model


@pytest.fixture
def loaded_by_name(tmp_path):
    made_sparse().save_pretrained(tmp_path)
    return transformers.BertForMaskedLM.from_pretrained(tmp_path, attn_implementation="ds_sparse").train()


def batch(tokens: int, device: str = "cpu", padded: bool = True) -> dict[str, torch.Tensor]:
    found = make_batch(tokens, device=device, right=tokens // 4)
    return found if padded else {name: x for name, x in found.items() if name != "attention_mask"}


def assert_same_step(compiled, model, eager, **inputs) -> None:
    """The same loss and gradients."""
    losses = []
    for run, parameters in ((compiled, model), (eager, eager)):
        parameters.zero_grad()
        losses.append(run(**inputs).loss)
        losses[-1].backward()
    torch.testing.assert_close(*losses)
    for found, wanted in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-5)


def test_a_model_is_one_graph_and_many_lengths_are_two(device: str):
    model = made_sparse().to(device)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for tokens in (50, 64, 9, 127, 128):
        assert_same_step(compiled, model, eager, **batch(tokens, device))
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow("compiles for 4 seconds")
def test_a_model_loaded_by_name_is_one_graph_before_it_has_run(loaded_by_name):
    compiled = torch.compile(loaded_by_name, fullgraph=True, backend="aot_eager")
    assert_same_step(compiled, loaded_by_name, copy.deepcopy(loaded_by_name), **batch(64, padded=False))
    assert counters["stats"]["unique_graphs"] == 1
    loaded_by_name.config.sparse_attention = {"mode": "fixed", "block": 16}
    with pytest.raises(Exception, match="call the model once before"):
        compiled(**batch(64, padded=False))
    expected = loaded_by_name(**batch(64, padded=False)).logits
    torch.testing.assert_close(compiled(**batch(64, padded=False)).logits, expected)


TEXT = SMALL | TOKENS | {"max_position_embeddings": 128}
DECODER = TEXT | {"num_key_value_heads": 2, "sliding_window": 24, "use_cache": False}
OF_BOTH_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.slow("compiles each model for 10 seconds")
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("ModernBertForMaskedLM", TEXT | {"global_attn_every_n_layers": 2, "local_attention": 24}),
        ("MistralForCausalLM", DECODER | {"num_hidden_layers": 1}),
        ("Gemma3ForCausalLM", DECODER | OF_BOTH_KINDS | {"head_dim": 16}),
        ("Olmo3ForCausalLM", DECODER | OF_BOTH_KINDS),
        ("GPTNeoXForCausalLM", TEXT | {"use_cache": False, "num_hidden_layers": 1}),
        ("LlamaForCausalLM", TEXT | {"use_cache": False}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize("padded", [False, True])
def test_decoders_and_models_with_windows_of_their_own_are_one_graph(name: str, config: dict, padded: bool):
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, name).config_class(**config))
    ds_sparse.sparsify(model, BLOCK)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for tokens in (50, 64):
        assert_same_step(compiled, model, eager, **batch(tokens, padded=padded))
    if not padded:
        ids = batch(64)["input_ids"]
        torch.testing.assert_close(compiled(ids, None).logits, eager(ids, None).logits)


@pytest.mark.slow("compiles for 4 seconds")
@functorch_config.patch(graphsafe_rng_functionalization=False)  # else a GPU's numbers are of generators of the graph
def test_checkpointing_replays_dropout_in_a_compiled_model(device: str):
    model = made_sparse(attention_probs_dropout_prob=0.3, use_cache=False).to(device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        torch.manual_seed(5)
        compiled(**batch(64, device)).loss.backward()
        gradients.append([x.grad.clone() for x in model.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
def test_an_exported_model_equals_eager(loaded_by_name, strict: bool):
    model, inputs = loaded_by_name.eval(), batch(64)
    program = torch.export.export(model, (), inputs, strict=strict)
    torch.testing.assert_close(program.module()(**inputs).logits, model(**inputs).logits)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_model_trains_compiled_on_a_gpu_at_any_length(device: str, mode: str):
    if device == "cpu":
        pytest.skip("on the CPU a layer is compiled with inductor")
    model = made_sparse(hidden_size=128, num_hidden_layers=2).to(device)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    for tokens in (64, 64, 64, 80, 80, 80, 41, 41, 41, 128, 64):
        torch.compiler.cudagraph_mark_step_begin()
        assert_same_step(compiled, model, eager, **batch(tokens, device))
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["inductor"]["cudagraph_skips"]
