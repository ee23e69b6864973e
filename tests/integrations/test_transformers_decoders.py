"""Transformers' decoders under attn_implementation="ds_sparse": causality, padding, windows, sinks, and generation."""

import copy
from unittest import mock

import pytest
import torch
import transformers
from integrations import families
from integrations.families import DECODERS, HEADS, VOCABULARY
from integrations.families import decoder as make
from integrations.pairs import pairs

import ds_sparse
from ds_sparse.integrations.transformers import functions, structure_of
from ds_sparse.integrations.transformers.masks import refuse_other_masks
from ds_sparse.layout import to_token_mask
from ds_sparse.tools.notices import _said

BLOCK = 8
STRUCTURES = {
    "dense": {"mode": "dense"},
    "fixed": {"mode": "fixed", "num_local_blocks": 2, "attention": "unidirectional"},
    "bslongformer": {"mode": "bslongformer", "num_sliding_window_blocks": 3},
    "bigbird": {"mode": "bigbird", "num_random_blocks": 1, "different_layout_per_head": True, "seed": 3},
    "local": {"mode": "local_sliding_window", "num_sliding_window_blocks": 3},
}


def dense_twin(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    twin = copy.deepcopy(model)
    if not twin._supports_sdpa or getattr(twin.config, "attn_logit_softcapping", None):  # which SDPA leaves out
        twin.set_attn_implementation("eager")
    return twin


def make_batch(tokens: int = 50, left: int = 7, right: int = 10) -> dict[str, torch.Tensor]:
    batch = families.make_batch(tokens, left, right)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def run(model, batch: dict[str, torch.Tensor], **changes):
    """Logits of the tokens that are no padding, and the gradients of all parameters."""
    return families.run(model, batch, lambda output: output.logits, use_cache=False, **changes)


def assert_close(ours, truth) -> None:
    near = (1e-8, 1e-10) if truth[0].dtype == torch.float64 else (1e-3, 1e-4)
    families.assert_close(ours, truth, *near)


@pytest.mark.parametrize("name", DECODERS)
def test_a_dense_structure_gives_what_the_untouched_model_gives(name):
    model, batch = make(name), make_batch()
    truth = run(dense_twin(model), batch)
    report = ds_sparse.sparsify(model, {"mode": "dense", "block": BLOCK})
    with mock.patch.object(functions, "_attend_causal", wraps=functions._attend_causal) as attend:
        ours = run(model, batch)
    layers = {model.get_submodule(entry.name) for entry in report.replaced}
    assert len(layers) == 2 and {call.args[0].layer for call in attend.call_args_list} == layers
    assert_close(ours, truth)
    without = {"input_ids": batch["input_ids"]}
    torch.testing.assert_close(model(**without).logits, dense_twin(make(name))(**without).logits, rtol=1e-3, atol=1e-4)
    report.undo()
    assert model.config._attn_implementation != "ds_sparse"


@pytest.mark.parametrize("name, structure", pairs(["llama", "gpt_neox"], STRUCTURES))
def test_a_structure_gives_what_the_untouched_model_gives_under_its_mask(name, structure):
    model, batch = make(name), make_batch()
    block = STRUCTURES[structure] | {"block": BLOCK}
    layout = ds_sparse.parse_sparse_attention(block, HEADS).make_bool_layout(96)
    live = to_token_mask(layout, BLOCK)[None, :, :50, :50].tril()
    live = live & batch["attention_mask"][:, None, None, :].bool()
    live = live | torch.eye(50, dtype=torch.bool)  # so that padding sees something
    truth = run(dense_twin(model), batch, attention_mask=live)
    dense = run(dense_twin(model), batch)
    ds_sparse.sparsify(model, block)
    ours = run(model, batch)
    torch.testing.assert_close(ours[0], truth[0], rtol=1e-8, atol=1e-10)
    assert structure == "dense" or not torch.allclose(ours[0], dense[0], atol=1e-3)


@pytest.mark.parametrize("name, structure", pairs(["gpt2", "gemma3"], STRUCTURES))
def test_a_token_changes_nothing_before_it(name, structure):
    model = make(name).float()
    ds_sparse.sparsify(model, STRUCTURES[structure] | {"block": BLOCK})
    ids = make_batch(40, 0, 0)["input_ids"]
    with torch.no_grad():
        before = model(ids).logits
        for changed in range(40):
            other = ids.clone()
            other[:, changed] = (other[:, changed] + 1) % VOCABULARY
            after = model(other).logits
            assert torch.equal(after[:, :changed], before[:, :changed])
            assert not torch.equal(after[:, changed], before[:, changed])


@pytest.mark.parametrize("name", [x for x in DECODERS if x != "llama_with_a_window_in_its_config"])
def test_generation_is_that_of_the_untouched_model_under_a_dense_structure(name):
    model, batch = make(name), make_batch(20, 6, 0)
    options = {"max_new_tokens": 25, "do_sample": False, "num_beams": 3 if name == "llama" else 1}
    truth = dense_twin(model).generate(**batch, **options)
    ds_sparse.sparsify(model, {"mode": "dense", "block": BLOCK})
    assert torch.equal(model.generate(**batch, **options), truth)
    assert len(truth[0].unique()) > 10


def test_capped_layers_that_stay_dense_beside_padding_on_the_left():
    """Their own attention gets a row that sees nothing from each token of padding."""
    model, batch = make("gemma2"), make_batch(40, 8, 0)
    truth = run(dense_twin(model), batch)
    ds_sparse.sparsify(model, {"mode": "dense", "block": BLOCK, "layers": {"1": None}})
    assert_close(run(model, batch), truth)


def test_a_copy_has_the_windows_of_its_original_under_another_structure_too():
    model, batch = make("exaone4"), make_batch()
    truth = dense_twin(model)(**batch).logits
    ds_sparse.sparsify(model, STRUCTURES["local"] | {"block": BLOCK})
    model = copy.deepcopy(model)
    model.config.sparse_attention = {"mode": "dense", "block": BLOCK}
    keep = batch["attention_mask"] != 0
    torch.testing.assert_close(model(**batch).logits[keep], truth[keep])


def test_a_cache_of_a_window_for_layers_without_one_is_refused():
    model = make("llama_with_a_window_in_its_config")
    ds_sparse.sparsify(model, {"mode": "dense", "block": BLOCK})
    options = make_batch(20, 6, 0) | {"max_new_tokens": 3, "do_sample": False}
    with pytest.raises(ValueError, match="where no layer reads config.sliding_window"):
        model.generate(**options)
    assert model.generate(**options, use_cache=False).shape == (2, 23)


@pytest.mark.parametrize("name, structure", pairs(["gpt_neox", "gemma3"], STRUCTURES))
def test_generation_with_a_cache_is_that_without(name, structure):
    model, batch = make(name), make_batch(20, 6, 0)
    ds_sparse.sparsify(model, STRUCTURES[structure] | {"block": BLOCK})
    options = {"max_new_tokens": 30, "do_sample": False}
    found = model.generate(**batch, **options)
    assert torch.equal(found, model.generate(**batch, **options, use_cache=False))


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_layers_of_a_decoder_stay_dense_where_the_block_says_so(name):
    model, batch, prompt = make(name), make_batch(), make_batch(20, 6, 0)
    options = {"max_new_tokens": 12, "do_sample": False}
    truth, text = run(dense_twin(model), batch), dense_twin(model).generate(**prompt, **options)
    report = ds_sparse.sparsify(model, {"mode": "dense", "block": BLOCK, "layers": {"1": None}})
    assert [entry.name for entry in report.dense] == ["model.layers.1.self_attn"]
    assert_close(run(model, batch), truth)
    assert torch.equal(model.generate(**prompt, **options), text)


def test_layers_of_a_decoder_generate_with_structures_of_their_own():
    model, batch = make("gpt_neox"), make_batch(20, 6, 0)
    ds_sparse.sparsify(model, STRUCTURES["fixed"] | {"block": BLOCK, "layers": {"1": {"num_local_blocks": 4}}})
    first, second = (layer.attention for layer in model.gpt_neox.layers)
    assert [structure_of(layer).num_local_blocks for layer in (first, second)] == [2, 4]
    options = {"max_new_tokens": 30, "do_sample": False}
    assert torch.equal(model.generate(**batch, **options), model.generate(**batch, **options, use_cache=False))


def logits_in_pieces(model, ids: torch.Tensor, lengths: list[int], cache=None) -> torch.Tensor:
    cache, logits, at = transformers.DynamicCache(config=model.config) if cache is None else cache, [], 0
    for length in lengths:
        logits.append(model(ids[:, at : at + length], past_key_values=cache).logits)
        at += length
    return torch.cat(logits, 1)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral_local", "gpt_oss"])
def test_pieces_of_a_text_give_what_the_whole_gives(name):
    model, ids = make(name), make_batch(70, 0, 0)["input_ids"]
    ds_sparse.sparsify(model, STRUCTURES["bslongformer"] | {"block": BLOCK})
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        found = logits_in_pieces(model, ids, [23, 1, 1, 17, 20, 3, 5])
    near = {"rtol": 1e-3, "atol": 1e-3} if name == "gpt_oss" else {"rtol": 1e-8, "atol": 1e-8}
    torch.testing.assert_close(found, whole, **near)


def test_a_static_cache_has_room_behind_its_keys():
    model, batch = make("llama"), make_batch(20, 6, 0)
    ds_sparse.sparsify(model, STRUCTURES["bslongformer"] | {"block": BLOCK})
    options = {"max_new_tokens": 25, "do_sample": False}
    truth = model.generate(**batch, **options)
    found = model.generate(**batch, **options, cache_implementation="static", disable_compile=True)
    assert torch.equal(found, truth)


def test_a_static_cache_of_windows_is_refused():
    model, batch = make("gemma3"), make_batch(20, 0, 0)
    ds_sparse.sparsify(model, {"mode": "dense", "block": BLOCK})
    with pytest.raises(
        ValueError,
        match=r"has \d+ queries and room for \d+ keys, as in a static cache of layers with a window.*the default cache",
    ):
        model.generate(**batch, max_new_tokens=4, cache_implementation="static", disable_compile=True)


def test_more_tokens_than_the_layout_has_are_refused_while_generating():
    model, batch = make("llama"), make_batch(20, 0, 0)
    ds_sparse.sparsify(model, {"mode": "fixed", "block": BLOCK}, max_seq_length=24)
    with pytest.raises(ValueError, match="has 25 tokens with those that are cached, .* made for 24; .* from the start"):
        model.generate(**batch, max_new_tokens=10, do_sample=False)


def test_learned_sinks_are_in_the_denominator_and_have_a_gradient():
    model, batch = make("gpt_oss"), make_batch()
    ds_sparse.sparsify(model, STRUCTURES["local"] | {"block": BLOCK})
    logits, gradients = run(model, batch)
    assert all(gradients[f"model.layers.{layer}.self_attn.sinks"].any() for layer in range(2))
    with torch.no_grad():
        model.model.layers[1].self_attn.sinks += 5
    assert not torch.allclose(run(model, batch)[0], logits)


def test_the_report_says_which_layers_keep_their_window():
    report = ds_sparse.sparsify(make("gemma3"), {"mode": "dense", "block": BLOCK})
    first, second = report.replaced
    assert {first.name[-18:], second.name[-18:]} == {"layers.0.self_attn", "layers.1.self_attn"}
    assert "1 attention layer made sparse: the model's own window, 10 tokens before each" in report.headings


def test_that_a_structure_is_cut_or_that_no_layer_uses_it_is_said_once(capsys):
    _said.clear()
    for _ in range(2):
        ds_sparse.sparsify(make("llama"), STRUCTURES["bslongformer"] | {"block": BLOCK})
    ds_sparse.sparsify(make("mistral_local"), {"mode": "dense", "block": BLOCK})
    said = capsys.readouterr().out
    assert said.count("LlamaModel is causal: BSLongformerSparsityConfig has blocks above the diagonal") == 1
    assert "All attention layers of MistralModel have a sliding window of their own" in said
    ds_sparse.sparsify(make("llama"), STRUCTURES["fixed"] | {"block": BLOCK})
    assert "above the diagonal" not in capsys.readouterr().out


def test_masks_of_pairs_are_refused_and_the_call_that_takes_them_is_named():
    model, batch = make("llama"), make_batch(20, 0, 0)
    ds_sparse.sparsify(model, {"mode": "dense", "block": BLOCK})
    said = r"a mask of pairs of tokens, \(2, 1, 20, 20\); .* takes \(batch, tokens\) there, .* layout, attn_mask=mask\)"
    with pytest.raises(ValueError, match=said):
        model(batch["input_ids"], attention_mask=torch.ones(2, 1, 20, 20, dtype=torch.bool))


@pytest.mark.parametrize("mask", [torch.empty(2, 1, 20, 20, device="meta"), torch.ones(2, 20, dtype=torch.bool)])
def test_masks_that_the_model_makes_of_documents_are_refused(mask):
    with pytest.raises(ValueError, match="makes a mask of more than causality and padding .* call without torch.comp"):
        refuse_other_masks(torch.nn.Identity(), mask)
