"""Transformers: attn_implementation="ds_sparse" on real, tiny models."""

import copy
import pickle
import random
from unittest import mock

import pytest
import torch
import transformers
from helpers import CountedOperators, assert_as_accurate
from integrations import families
from integrations.families import (
    ENCODERS,
    HEADS,
    MASKED,
    MODERN,
    PICTURE,
    SIZES,
    SMALL,
    T5,
    VISION,
    VOCABULARY,
    Family,
    assert_close,
    gradients,
    known,
    make_batch,
    make_inputs,
    newest,
)
from integrations.pairs import pairs
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ds_sparse
from ds_sparse.integrations import transformers as interface
from ds_sparse.integrations.transformers import binding, functions
from ds_sparse.layout import to_token_mask
from ds_sparse.models.layers import attention_layers
from ds_sparse.modules.structured_attention import StructuredAttention
from ds_sparse.tools.notices import _said

BLOCK = 16
SIZES_256 = MASKED["bert"]._replace(sizes=SIZES | {"max_position_embeddings": 256})
RANDOM = {
    "mode": "bigbird",
    "num_random_blocks": 1,
    "num_sliding_window_blocks": 1,
    "different_layout_per_head": True,
    "seed": 3,
}


@pytest.fixture(params=MASKED)
def family(request):
    return MASKED[request.param]


def make(family=MASKED["bert"], **changes):
    return families.make(family, **changes)


def run(model, batch, mask=None):
    """Logits of the tokens that are no padding, and the gradients of all parameters."""
    model.zero_grad()
    output = model(**batch if mask is None else batch | {"attention_mask": mask})
    output.loss.backward()
    return output.logits[batch["attention_mask"] != 0].detach(), gradients(model)


@pytest.mark.parametrize("tokens", [50, 64])
def test_a_sparse_layout_gives_what_the_untouched_model_gives_under_its_mask(family, tokens, device):
    model, batch = make(family).to(device), make_batch(tokens, device=device)
    whole_blocks = -(-model.config.max_position_embeddings // BLOCK) * BLOCK
    layout = ds_sparse.parse_sparse_attention(RANDOM, HEADS).make_bool_layout(whole_blocks)
    live = to_token_mask(layout, BLOCK)[None, :, :tokens, :tokens].to(device)
    dense = run(model, batch)
    truth = run(model, batch, mask=live & batch["attention_mask"][:, None, None, :].bool())
    ds_sparse.sparsify(model, RANDOM)
    ours = run(model, batch)
    assert_close(ours, truth)
    assert not torch.allclose(ours[0], dense[0], atol=1e-4)


def test_parameters_and_checkpoint_keys_stay_and_undo_puts_everything_back(family):
    model, batch = make(family).eval(), make_batch()
    before, parameters, modules = model(**batch).logits, list(model.parameters()), list(model.modules())
    keys, config = list(model.state_dict()), model.config.to_dict()
    report = ds_sparse.sparsify(model, RANDOM)
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    assert list(model.modules()) == modules and list(model.state_dict()) == keys
    assert not torch.equal(model(**batch).logits, before)
    for _ in range(2):
        report.undo()
        assert torch.equal(model(**batch).logits, before)
        assert model.config._attn_implementation == "sdpa" and model.config.to_dict() == config
    assert not any(module._forward_hooks for module in model.modules())
    ds_sparse.sparsify(model, RANDOM)


def test_the_report_names_every_layer():
    report = ds_sparse.sparsify(make(), {"mode": "fixed", "block": BLOCK, "num_local_blocks": 2})
    names = [f"bert.encoder.layer.{layer}.attention.self" for layer in range(2)]
    assert report.replaced == [(name, "BertSelfAttention, sdpa", "BertSelfAttention, ds_sparse") for name in names]
    assert str(report).startswith(
        "2 attention layers made sparse: FixedSparsityConfig, block 16, density 75.0% at 64 tokens"
    )
    assert all(name in str(report) for name in names)
    report.undo()
    assert report.replaced == [] and repr(report) == str(report)
    assert str(report).startswith("undone: 2 attention layers dense again, no longer: FixedSparsityConfig, block 16")
    assert f"{names[0]}  BertSelfAttention, ds_sparse  ->  BertSelfAttention, sdpa" in str(report)


SAVED = {
    "random": {key: RANDOM[key] for key in RANDOM if key != "seed"},
    "random, seeded": RANDOM,
    "fixed": {"mode": "fixed"},
    "by layer": {key: RANDOM[key] for key in RANDOM if key != "seed"} | {"layers": {"0": {"num_random_blocks": 2}}},
}


@pytest.mark.parametrize("name, saved", pairs(MASKED, SAVED))
def test_a_saved_model_is_loaded_with_its_structure_by_name_and_by_sparsify(name, saved, tmp_path):
    family, block = MASKED[name], SAVED[saved]
    model, batch = make(family).eval(), make_batch()
    dense = model(**batch).logits
    ds_sparse.sparsify(model, block, max_seq_length=128)
    model.save_pretrained(tmp_path)
    named = family.cls.from_pretrained(tmp_path, attn_implementation="ds_sparse").eval()
    loaded = family.cls.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(**batch).logits, dense)
    ds_sparse.sparsify(loaded)
    for again in (named, loaded):
        assert torch.equal(again(**batch).logits, model(**batch).logits)
        for key in ("sparse_attention", "sparse_attention_max_seq_length"):
            assert getattr(again.config, key) == getattr(model.config, key)


def test_random_blocks_follow_the_seed_that_was_saved(tmp_path, capsys):
    model, batch = make().eval(), make_batch()
    block = {key: RANDOM[key] for key in RANDOM if key != "seed"}
    ds_sparse.sparsify(model, block)
    model.save_pretrained(tmp_path)
    capsys.readouterr()
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path).eval()
    ds_sparse.sparsify(loaded, block)
    assert torch.equal(loaded(**batch).logits, model(**batch).logits) and "seed" not in capsys.readouterr().out
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path).eval()
    ds_sparse.sparsify(loaded, block | {"seed": model.config.sparse_attention["seed"] + 1})
    assert not torch.equal(loaded(**batch).logits, model(**batch).logits)


def test_the_layout_of_a_model_without_a_longest_sequence_doubles_with_the_batch(monkeypatch):
    monkeypatch.setattr(binding, "FIRST_LENGTH", 32)
    model = make(ENCODERS["t5_encoder"]).eval()
    report = ds_sparse.sparsify(model, {**RANDOM, "num_global_blocks": 1})
    assert "at 32 tokens" in str(report) and not hasattr(model.config, "sparse_attention_max_seq_length")
    layout = ds_sparse.parse_sparse_attention({**RANDOM, "num_global_blocks": 1}, HEADS).make_bool_layout(128)
    live = to_token_mask(layout, BLOCK)[None, :, :70, :70]
    batch = {name: x for name, x in make_batch(70).items() if name != "labels"}
    keep = batch["attention_mask"] != 0
    ours = model(**batch).last_hidden_state[keep]
    attention = vars(model.encoder.block[0].layer[0].SelfAttention)["_ds_sparse"].attention
    for tokens in (20, 100, 128):
        assert torch.isfinite(model(torch.ones(1, tokens, dtype=torch.long)).last_hidden_state).all()
    assert list(attention._master.longer) == [8]
    report.undo()
    masked = model(batch["input_ids"], attention_mask=live & keep[:, None, None, :]).last_hidden_state[keep]
    torch.testing.assert_close(ours, masked, rtol=1e-4, atol=1e-5)


def test_the_length_of_the_layout_can_be_given():
    model = make()
    report = ds_sparse.sparsify(model, RANDOM, max_seq_length=40)
    assert "at 48 tokens" in str(report) and model.config.sparse_attention_max_seq_length == 40
    for tokens in (40, 64):
        assert torch.isfinite(model(**make_batch(tokens)).loss)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant):
    model, batch = make(attention_probs_dropout_prob=0.3, hidden_dropout_prob=0.1).train(), make_batch()
    ds_sparse.sparsify(model, RANDOM)
    torch.manual_seed(1)
    plain = run(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    torch.manual_seed(1)
    again = run(model, batch)
    assert torch.equal(again[0], plain[0])
    assert all(torch.equal(again[1][name], gradient) for name, gradient in plain[1].items())


def test_dropout_drops_attention_in_training_only():
    model, batch = make(attention_probs_dropout_prob=0.5), make_batch()
    ds_sparse.sparsify(model, RANDOM)
    model.train()
    assert not torch.equal(model(**batch).logits, model(**batch).logits)
    model.eval()
    assert torch.equal(model(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_low_precision_is_as_accurate_as_the_untouched_model(dtype, autocast, device):
    batch = make_batch(device=device)

    def logits(model):
        model = model if autocast else model.to(dtype)
        with torch.no_grad(), torch.autocast(device, dtype, enabled=autocast):
            return model(**batch).logits[batch["attention_mask"] != 0].cpu()

    exact = make().eval().double().to(device)(**batch).logits[batch["attention_mask"] != 0].detach().cpu()
    plain = logits(make().eval().to(device))
    model = make().eval().to(device)
    ds_sparse.sparsify(model, {"mode": "dense", "block": BLOCK})
    assert_as_accurate("logits", logits(model), plain, exact)


def test_masks_of_every_form_mean_the_same():
    model, batch = make().eval(), make_batch()
    ds_sparse.sparsify(model, RANDOM)
    truth = model(**batch).logits
    keep = batch["attention_mask"].bool()
    added = torch.zeros(keep.shape).masked_fill(~keep, float("-inf"))
    pairs = keep[:, None, None, :].expand(2, 1, 50, 50)
    for mask in (
        keep,
        batch["attention_mask"].float(),
        keep[:, None, None],
        added[:, None, None],
        pairs,
        added[:, None, None].expand(2, 1, 50, 50),
    ):
        torch.testing.assert_close(model(**batch | {"attention_mask": mask}).logits, truth)
    without = make_batch(right=0)
    assert torch.equal(model(**without).logits, model(**without | {"attention_mask": None}).logits)


@pytest.mark.parametrize("kind", ["modernbert", "embedding_gemma"])
def test_a_local_layer_that_is_given_what_a_window_does_not_compute_is_named(kind):
    make_model, sizes, _ = ENCODERS[kind]
    model = make_model(make_model.config_class(**sizes)).eval()
    ds_sparse.sparsify(model, {"mode": "dense", "block": BLOCK})
    ids, layer = torch.randint(5, 20, (2, 50)), r"layer layers.1.(attn|self_attn) \(\w+Attention\) is local"
    for mask in (torch.ones(2, 1, 50, 50, dtype=torch.bool), torch.zeros(2, 1, 1, 50)):
        with pytest.raises(ValueError, match=rf"{layer}, .* given a mask of shape .*\(batch, tokens\)"):
            model(ids, attention_mask=mask)


def test_copies_and_pickles_are_sparse_too():
    model, batch = make().eval(), make_batch()
    report = ds_sparse.sparsify(model, RANDOM)
    sparse, copied = model(**batch).logits, copy.deepcopy(model)
    pickled = pickle.loads(pickle.dumps(model))
    report.undo()
    assert torch.equal(copied(**batch).logits, sparse) and torch.equal(pickled(**batch).logits, sparse)


LAYERS = {"num_hidden_layers": 5}
BY_LAYER = RANDOM | {"layers": {"1,3": {"mode": "dense"}, "2": {"num_random_blocks": 2}, "3-4": None}}


def test_layers_have_structures_of_their_own_and_equal_ones_one_layout(device):
    model, batch = make(**LAYERS).to(device), make_batch(50, device=device)
    report = ds_sparse.sparsify(model, BY_LAYER)
    layers = [layer.attention.self for layer in model.bert.encoder.layer]
    kinds = [getattr(interface.structure_of(layer), "num_random_blocks", None) for layer in layers]
    assert kinds == [1, None, 2, None, None]
    assert isinstance(interface.structure_of(layers[1]), ds_sparse.DenseSparsityConfig)
    assert [line for line in str(report).splitlines() if not line.startswith(" ")] == report.headings
    assert [line.partition(":")[0] for line in report.headings] == [
        "1 attention layer made sparse", "1 attention layer made sparse", "1 attention layer made sparse",
        "2 attention layers stay dense",
    ]  # fmt: skip
    assert [name for name, *_ in report.dense] == [f"bert.encoder.layer.{n}.attention.self" for n in (3, 4)]
    names, dense, _ = attention_layers(model)
    assert len(names) == 3 and len(dense) == 2 and torch.isfinite(model(**batch).loss)


def test_another_layer_or_number_of_layers_builds_no_layout_anew():
    model, batch = make(**LAYERS).eval(), make_batch()
    ds_sparse.sparsify(model, BY_LAYER)
    layers = [layer.attention.self for layer in model.bert.encoder.layer]
    before = [vars(layer)["_ds_sparse"].attention for layer in layers]
    with mock.patch.object(StructuredAttention, "_build", side_effect=AssertionError("a layout is built")):
        model.config.sparse_attention["layers"]["4"] = {}
        model(**batch)
        ds_sparse.sparsify(other := make(num_hidden_layers=7), {**model.config.sparse_attention})
    after = [vars(layer)["_ds_sparse"].attention for layer in layers]
    assert after[:4] == before[:4] and after[4] is after[0]
    assert vars(other.bert.encoder.layer[6].attention.self)["_ds_sparse"].attention is before[0]


def assert_refused_by_both_doors(model, block, sentence):
    before = model.config._attn_implementation, model.config.to_dict()
    with pytest.raises(ValueError, match=sentence):
        ds_sparse.sparsify(model, block)
    assert before == (model.config._attn_implementation, model.config.to_dict())
    model.config.sparse_attention = block
    with pytest.raises(ValueError, match=sentence):
        model.set_attn_implementation("ds_sparse")
    assert model.config._attn_implementation == before[0]


@pytest.mark.parametrize(
    "layers, sentence",
    [
        ({"4-5": None}, 'layers."4-5": names layer 5, and Bert.* has 5 attention layers, 0 to 4'),
        ({"0": {"mode": "bigbrid"}}, 'layers."0".mode: got "bigbrid"'),
    ],
)
def test_wrong_layers_are_refused_by_both_doors(layers, sentence):
    assert_refused_by_both_doors(make(**LAYERS), RANDOM | {"layers": layers}, sentence)


def test_a_model_whose_heads_accelerate_exchanges_is_refused_by_both_doors(monkeypatch):
    def exchange(module, query, key, value, attention_mask, **more): ...

    exchange.__module__ = "accelerate.utils.sequence_parallel"
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", exchange)
    sentence = "accelerate's sequence parallelism exchanges heads around .* 'sdpa'"
    assert_refused_by_both_doors(make(), RANDOM, sentence)


def test_a_config_that_changes_is_followed():
    model, batch = make(sparse_attention={"mode": "dense"}).eval(), make_batch()
    model.set_attn_implementation("ds_sparse")
    dense = model(**batch).logits
    model.config.sparse_attention.update(RANDOM)
    changed = model(**batch).logits
    ds_sparse.sparsify(untouched := make().eval(), RANDOM)
    assert not torch.equal(changed, dense) and torch.equal(changed, untouched(**batch).logits)


@pytest.mark.usefixtures("registry")
def test_a_structure_that_cannot_be_saved_works_and_says_so():
    class Nameless(ds_sparse.SparsityConfig):
        def make_layout(self, seq_len):
            return self.setup_layout(seq_len) + torch.eye(seq_len // self.block, dtype=torch.int64)

    @ds_sparse.register_sparsity("drawn_anew")
    class DrawnAnew(ds_sparse.SparsityConfig):
        def make_layout(self, seq_len):
            return (torch.rand(self.setup_layout(seq_len).shape) < 0.5).long()

    for structure, sentence in (
        (Nameless(HEADS), "it has no mode"),
        (DrawnAnew(HEADS), "draws other blocks each time"),
    ):
        model, batch = make().eval(), make_batch()
        with pytest.warns(ds_sparse.SparsityWarning, match=f"The structure is not saved with the model: .*{sentence}"):
            report = ds_sparse.sparsify(model, structure)
        assert not hasattr(model.config, "sparse_attention")
        first = model(**batch).logits
        assert torch.equal(model(**batch).logits, first)
        ds_sparse.SparseAttentionUtils.extend_position_embedding(model, 128)
        assert torch.equal(model(**batch).logits, first)
        report.undo()
        assert not torch.equal(model(**batch).logits, first)


def scatter(block_of=lambda structure: structure.sampler(0)):
    """Registers a structure of a user's with two random blocks a row."""

    @ds_sparse.register_sparsity("scatter")
    class Scatter(ds_sparse.SparsityConfig):
        def make_layout(self, seq_len):
            layout, sample = self.setup_layout(seq_len), block_of(self)
            for row in range(layout.shape[1]):
                layout[:, row, sample(range(layout.shape[2]), 2)] = 1
            return layout

    return Scatter


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("as_dict", [False, True])
def test_blocks_that_a_users_structure_draws_by_the_sampler_get_a_seed_that_is_saved(as_dict, tmp_path, capsys):
    structure = scatter()(HEADS)
    model, batch = make(SIZES_256).eval(), make_batch()
    ds_sparse.sparsify(model, {"mode": "scatter"} if as_dict else structure)
    seed = model.config.sparse_attention["seed"]
    assert structure.seed is None and f"drawn with seed {seed}" in capsys.readouterr().out
    model.save_pretrained(tmp_path)
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path, attn_implementation="ds_sparse").eval()
    again = make(SIZES_256).eval()
    ds_sparse.sparsify(again, {"mode": "scatter", "seed": seed})
    truth = model(**batch).logits
    assert torch.equal(loaded(**batch).logits, truth) and torch.equal(again(**batch).logits, truth)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    "block_of, more, sentence",
    [
        (lambda structure: structure.sampler(0), {}, 'Scatter has random blocks and no seed.* such as "seed": 0'),
        (lambda structure: random.sample, {}, "Scatter draws other blocks each time.* draw them with self.sampler"),
        (lambda structure: random.sample, {"seed": 3}, "Scatter draws other blocks each time"),
    ],
)
def test_the_name_alone_is_refused_where_a_users_structure_draws_other_blocks_each_time(block_of, more, sentence):
    scatter(block_of)
    model = make(SIZES_256, sparse_attention={"mode": "scatter"} | more)
    with pytest.raises(ValueError, match=sentence):
        model.set_attn_implementation("ds_sparse")
    assert model.config._attn_implementation == "sdpa"


ONE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64}
ITSELF = "computes its attention itself.* and would stay dense; use BERT, RoBERTa"
CLIP = {"text_config": SMALL | {"bos_token_id": 1, "eos_token_id": 2}, "vision_config": VISION}
LED = {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "attention_window": 8}
LED |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS)
REFUSED = known(
    {
        "deberta": (transformers.DebertaForMaskedLM, SMALL, ITSELF),
        "deberta_v2": (transformers.DebertaV2Model, SMALL, ITSELF),
        "longformer": (transformers.LongformerModel, SMALL | {"attention_window": 16}, ITSELF),
        "big_bird": (transformers.BigBirdModel, SMALL, ITSELF),
        "mpnet": (transformers.MPNetModel, SMALL, ITSELF),
        "megatron_bert": (transformers.MegatronBertModel, SMALL, ITSELF),
        # It has a dict of its layers' classes by implementation.
        "falcon": (transformers.FalconModel, ONE | {"num_attention_heads": HEADS}, ITSELF),
        "fnet": (transformers.FNetModel, ONE, "FNetModel has no attention layer that ds_sparse knows"),
        "gpt2": (
            transformers.GPT2Model,
            {"n_embd": 32, "n_layer": 1, "n_head": 4, "add_cross_attention": True},
            "GPT2Model has cross-attention",
        ),
        "mistral": (
            transformers.MistralModel,
            SMALL | {"num_key_value_heads": 2, "attention_dropout": 0.1},
            r"layer layers.0.self_attn \(MistralAttention\) is local, .*dropout=0.1, .*no attention dropout",
        ),
        "bart_decoder": (
            transformers.BartForCausalLM,
            {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": VOCABULARY},
            r"BartDecoder has cross-attention \(layer model.decoder.layers.0.encoder_attn \(BartAttention\)\)",
        ),
        "led": (transformers.LEDModel, LED, "LED(Encoder|Model) " + ITSELF),
        "modernbert_dropping": (
            transformers.ModernBertModel,
            MODERN | {"attention_dropout": 0.1},
            r"layer layers.1.attn \(ModernBertAttention\) is local, .*dropout=0.1, .*no attention dropout",
        ),
        "large_heads": (
            newest("EmbeddingGemma2TextModel"),
            MODERN | {"global_head_dim": 512},
            r"layer layers.1.self_attn .* gives the attention what it does not take. Head size is 512; .* 1 to 256",
        ),
        "different_heads": (
            transformers.SwinModel,
            {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "image_size": 32, "window_size": 2},
            "SwinEncoder",
        ),
        "output_attentions": (transformers.BertModel, SMALL | {"output_attentions": True}, "set it to False"),
        "qwen2_vl": (
            transformers.Qwen2VLModel,
            {"text_config": SMALL, "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4}},
            "Qwen2VisionTransformer.* argument: 'grid_thw'.*; give ds_sparse.sparsify a part of the model without this",
        ),
        "siglip2": (
            newest("Siglip2VisionModel"),
            VISION | {"num_patches": 16},
            "Siglip2VisionModel did not run on inputs that ds_sparse made up, without data.* and 'spatial_shapes'",
        ),
    }
)


BART = {"vocab_size": VOCABULARY, "d_model": 32, "dropout": 0.0, "pad_token_id": 0, "max_position_embeddings": 64}
for side in ("encoder", "decoder"):
    BART |= {f"{side}_layers": 2, f"{side}_attention_heads": HEADS, f"{side}_ffn_dim": 64}
WHISPER = {key: value for key, value in BART.items() if key != "max_position_embeddings"}
WHISPER |= {"num_mel_bins": 8, "max_source_positions": 30, "max_target_positions": 20, "decoder_start_token_id": 1}
LATER, HEARD = ("decoder_input_ids",), ("input_features", 8, 60)
SIGLIP = {"text_config": CLIP["text_config"] | {"projection_size": 32}, "vision_config": VISION}
CROSSING = "4 attention layers stay dense: {} has cross-attention"
BESIDE_OTHERS = {
    "bart": (transformers.BartModel, BART, (("input_ids",), LATER), CROSSING.format("BartDecoder")),
    "siglip": (
        transformers.SiglipModel,
        SIGLIP,
        (("input_ids",), PICTURE),
        "1 attention layer stays dense: cross-attention: its keys are of another sequence than its queries",
    ),
    "t5": (transformers.T5Model, T5, (("input_ids",), LATER), CROSSING.format("T5Stack")),
    "whisper": (transformers.WhisperModel, WHISPER, (HEARD, LATER), CROSSING.format("WhisperDecoder")),
}


def states_of_both(model, inputs):
    """What the two halves of a model give in the end, and the gradients of all parameters."""

    def states(output):
        embedded = hasattr(output, "image_embeds")
        return torch.cat([output.text_embeds, output.image_embeds]) if embedded else output.last_hidden_state

    return families.run(model, inputs, states)


@pytest.mark.parametrize("name", BESIDE_OTHERS)
def test_encoders_are_sparse_beside_what_attends_to_another_sequence(name, tmp_path, capsys):
    cls, sizes, kinds, heading = BESIDE_OTHERS[name]
    dense, inputs = make(Family(cls, sizes)).double().train(), {}
    for kind in kinds:
        inputs |= {LATER[0]: make_batch(9)["input_ids"]} if kind == LATER else make_inputs(kind)
    truth = states_of_both(dense, inputs)
    model = copy.deepcopy(dense)
    report = ds_sparse.sparsify(model, {"mode": "dense", "block": BLOCK})
    assert heading in report.headings
    sparse, others, _ = attention_layers(model)
    assert list(sparse) == [entry.name for entry in report.replaced] and len(sparse) == (4 if name == "siglip" else 2)
    assert set(others) == {entry.name for entry in report.dense} and others
    with mock.patch.object(functions, "attention_of", wraps=functions.attention_of) as asked:
        assert_close(states_of_both(model, inputs), truth)
    assert {call.args[0] for call in asked.call_args_list} == set(sparse.values())
    capsys.readouterr()
    model.save_pretrained(tmp_path)
    loaded = cls.from_pretrained(tmp_path, attn_implementation="ds_sparse", dtype=torch.float64).train()
    assert "stay dense" in capsys.readouterr().out
    assert list(attention_layers(loaded)[0]) == list(sparse)
    states, gradients = states_of_both(loaded, inputs)
    assert_close((states, {key: gradients[key] for key in truth[1]}), truth)  # Whisper's positions train when loaded
    report.undo()
    assert not attention_layers(model)[0] and not hasattr(model.config, "sparse_attention")
    assert_close(states_of_both(model, inputs), truth)


def test_a_causal_tower_is_sparse_beside_a_bidirectional_one(capsys):
    model = make(Family(transformers.CLIPModel, CLIP)).double().train()
    inputs = {**make_inputs(), **make_inputs(PICTURE)}
    truth = states_of_both(model, inputs)
    _said.clear()
    report = ds_sparse.sparsify(model, {"mode": "dense", "block": BLOCK})
    assert len(report.replaced) == 4 and not report.dense
    assert capsys.readouterr().out.count("CLIPTextModel is causal: DenseSparsityConfig has blocks above") == 1
    with mock.patch.object(functions, "_attend_causal", wraps=functions._attend_causal) as attend:
        assert_close(states_of_both(model, inputs), truth)
    assert {call.args[0].layer for call in attend.call_args_list} == {
        layer.self_attn for layer in model.text_model.encoder.layers
    }


def test_a_sparse_encoder_generates_with_its_decoder():
    sizes = BESIDE_OTHERS["bart"][1]
    model = make(Family(transformers.BartForConditionalGeneration, sizes)).eval()
    inputs = {name: make_batch(50)[name] for name in ("input_ids", "attention_mask")}
    truth = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    ds_sparse.sparsify(model, {"mode": "dense"})
    assert torch.equal(model.generate(**inputs, max_new_tokens=5, do_sample=False), truth)


def states_and_gradients(model, inputs):
    """The last states, which are returned in a tuple, and the gradients of all parameters."""
    return families.run(model, inputs, lambda output: output[0], return_dict=False)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_of_every_kind_are_sparse_by_both_doors(name):
    cls, sizes, kind = ENCODERS[name]
    dense, inputs = make(Family(cls, sizes)).double().train(), make_inputs(kind)
    truth = states_and_gradients(dense, inputs)
    model = copy.deepcopy(dense)
    report = ds_sparse.sparsify(model, {"mode": "dense", "block": BLOCK}, max_seq_length=128)
    with mock.patch.object(functions, "attention_of", wraps=functions.attention_of) as asked:
        sparse = states_and_gradients(model, inputs)
    layers = {model.get_submodule(entry.name) for entry in report.replaced}
    assert len(layers) == 2 and {call.args[0] for call in asked.call_args_list} == layers
    assert_close(sparse, truth)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_close(states_and_gradients(model, inputs), truth)
    named = cls._from_config(copy.deepcopy(model.config), attn_implementation="ds_sparse").double().train()
    named.load_state_dict(dense.state_dict())
    assert_close(states_and_gradients(named, inputs), truth)
    report.undo()
    assert torch.equal(model.eval()(**inputs)[0], dense.eval()(**inputs)[0])


@pytest.mark.parametrize("name", [x for x in ("modernbert", "embedding_gemma", "embedding_gemma2") if x in ENCODERS])
def test_local_layers_have_the_models_own_window_and_global_ones_the_structure(name, device):
    cls, sizes, _ = ENCODERS[name]
    model, batch = make(Family(cls, sizes)).eval().to(device), make_batch(50, device=device)
    keep, ids = batch["attention_mask"] != 0, batch["input_ids"]
    place = torch.arange(50, device=device)
    window = 8 if name == "embedding_gemma" else 7
    near = (place[:, None] - place).abs() <= window
    live = to_token_mask(ds_sparse.parse_sparse_attention(RANDOM, HEADS).make_bool_layout(64), BLOCK)[None, :, :50, :50]
    model.set_attn_implementation("eager")
    eager = model(ids, attention_mask=batch["attention_mask"]).last_hidden_state[keep]
    model.set_attn_implementation("sdpa")
    seen = {"full_attention": live.to(device), "sliding_attention": near}
    seen = {kind: mask & keep[:, None, None] for kind, mask in seen.items()}
    truth = model(ids, attention_mask=seen).last_hidden_state[keep]
    report = ds_sparse.sparsify(model, RANDOM, max_seq_length=64)
    assert f"1 attention layer made sparse: the model's own window, {window} tokens on each side" in report.headings
    ours = model(ids, attention_mask=batch["attention_mask"]).last_hidden_state[keep]
    torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5)
    report.undo()
    ds_sparse.sparsify(model, {"mode": "dense"})
    ours = model(ids, attention_mask=batch["attention_mask"]).last_hidden_state[keep]
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


def test_a_window_that_a_layer_does_not_tell_the_mask_is_refused():
    model = make(ENCODERS["modernbert"])
    model.layers[1].attn.sliding_window = 5
    sentence = r"layer layers.1.attn .* not the same window \(7 and 4 tokens on a side"
    with pytest.raises(ValueError, match=sentence):
        ds_sparse.sparsify(model, RANDOM)


def test_an_entry_for_local_layers_alone_is_refused():
    model = make(ENCODERS["modernbert"])
    with pytest.raises(ValueError, match='layers."1": local layers of ModernBertModel, which keep the window'):
        ds_sparse.sparsify(model, RANDOM | {"layers": {"1": {"block": 32}}})
    report = ds_sparse.sparsify(model, RANDOM | {"layers": {"0-1": {"block": 32}}})
    assert "block 32" in report.headings[0] and "7 tokens on each side" in report.headings[1]


@pytest.mark.parametrize(
    "arguments, error, sentence",
    [
        ({"sparsity_config": {"mode": "bigbrid"}}, ValueError, 'Did you mean "bigbird"'),
        (
            {"sparsity_config": ds_sparse.FixedSparsityConfig(num_heads=12)},
            ValueError,
            "4 attention heads and the sparsity config num_heads=12",
        ),
        ({"sparsity_config": "ds.json"}, TypeError, "sparsity_config is str; it has to be a sparsity config"),
        ({"sparsity_config": {"sparse_attention": {}}}, ValueError, "a whole DeepSpeed JSON; give its block alone"),
        ({"sparsity_config": ds_sparse.FixedSparsityConfig}, TypeError, "it has to be a sparsity config"),
        (
            {"sparsity_config": {"mode": "bigbird", "num_sliding_window_blocks": 9}},
            ValueError,
            r"no layout of 64 tokens \(Number of sliding window blocks, 9, .*\); give a longer max_seq_length",
        ),
        ({"max_seq_length": 0}, ValueError, "max_seq_length, .* is 0; it has to be an integer of 1 or more"),
    ],
)
def test_a_wrong_structure_is_refused_before_anything_changes(arguments, error, sentence):
    model = make()
    with pytest.raises(error, match=sentence):
        ds_sparse.sparsify(model, **arguments)
    assert model.config._attn_implementation == "sdpa" and not hasattr(model.config, "sparse_attention")


@pytest.mark.parametrize("door", ["sparsify", "name"])
def test_other_models_of_the_family_compute_as_before(door):
    """DINOv3's positions are kept in a cache of functools."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    config = transformers.DINOv3ViTConfig(image_size=32, patch_size=8 if door == "name" else 4, **sizes)
    model, untouched = (transformers.DINOv3ViTModel(copy.deepcopy(config)).eval() for _ in range(2))
    if door == "sparsify":
        ds_sparse.sparsify(model, {"mode": "dense"})
    else:
        model.config.sparse_attention = {"mode": "dense"}
        model.set_attn_implementation("ds_sparse")
    model.load_state_dict(untouched.state_dict())
    pictures = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        outputs = [each(pixel_values=pictures).last_hidden_state for each in (model, untouched)]
    assert outputs[0].isfinite().all().item()
    torch.testing.assert_close(*outputs)


def test_a_layer_that_runs_without_its_sparse_attention_is_named():
    for forwards in range(2):
        model = make()
        ds_sparse.sparsify(model, RANDOM)
        for _ in range(forwards):
            model(**make_batch())
        model.set_attn_implementation("sdpa")
        with pytest.raises(
            RuntimeError, match=r"layer bert.encoder.layer.0.attention.self \(BertSelfAttention\) ran without"
        ):
            model(**make_batch())


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({}, "BertConfig has no sparse_attention; set it before the model takes the name ds_sparse"),
        ({"sparse_attention": {"mode": "bigbrid"}}, 'BertConfig: sparse_attention.mode: got "bigbrid"'),
        ({"sparse_attention": ["fixed"]}, "wanted an object"),
        ({"sparse_attention": {"mode": "bigbird", "num_random_blocks": 1}}, "random blocks and no seed"),
        ({"sparse_attention": {"mode": "bigbird", "num_sliding_window_blocks": 99}}, "must be smaller"),
    ],
)
def test_the_name_alone_is_refused_without_a_structure_that_can_be_built(changes, sentence):
    config = transformers.BertConfig(**SMALL | changes)
    with pytest.raises(ValueError, match=sentence):
        transformers.BertModel._from_config(config, attn_implementation="ds_sparse")
    model = transformers.BertModel(transformers.BertConfig(**SMALL | changes))
    with pytest.raises(ValueError, match=sentence):
        model.set_attn_implementation("ds_sparse")
    assert model.config._attn_implementation == "sdpa"


def with_structure(config):
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        part.sparse_attention, part.sparse_attention_max_seq_length = {"mode": "fixed", "block": BLOCK}, 64
    return config


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow("takes 7 seconds; MimiModel has a part of this kind"))
        if name == "qwen2_vl"
        else name
        for name in REFUSED
    ],
)
def test_models_that_cannot_be_sparse_are_refused_before_anything_changes(name, tmp_path):
    cls, sizes, sentence = REFUSED[name]
    config = with_structure(cls.config_class(**sizes))
    with pytest.raises(ValueError, match=sentence):
        cls._from_config(copy.deepcopy(config), attn_implementation="ds_sparse")
    model = cls(config)
    before = model.config.to_dict(), model.config._attn_implementation
    with pytest.raises(ValueError, match=sentence):
        ds_sparse.sparsify(model, {"mode": "fixed"})
    with pytest.raises(ValueError, match=sentence):
        model.set_attn_implementation("ds_sparse")
    assert model.config.to_dict() == before[0]
    assert {part.config._attn_implementation for part in model.modules() if hasattr(part, "config")} == {before[1]}
    if name != "output_attentions":  # which Transformers does not save
        model.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=sentence):
            cls.from_pretrained(tmp_path, attn_implementation="ds_sparse")


def test_the_name_is_set_for_a_part_of_a_model():
    model = transformers.CLIPModel(with_structure(transformers.CLIPConfig(**CLIP)))
    model.set_attn_implementation({"vision_config": "ds_sparse"})
    ours, theirs = model.vision_model.config._attn_implementation, model.text_model.config._attn_implementation
    assert (ours, theirs) == ("ds_sparse", "sdpa")
    output = model(**make_inputs(), pixel_values=torch.randn(2, 3, 32, 32))
    assert torch.isfinite(output.logits_per_image).all()
    sizes = with_structure(transformers.BertConfig(**SMALL)).to_dict()
    both = {"encoder": sizes, "decoder": sizes | {"is_decoder": True, "add_cross_attention": True}}
    model = transformers.EncoderDecoderModel(transformers.EncoderDecoderConfig(**both))
    with pytest.raises(ValueError, match="BertModel has cross-attention"):
        model.set_attn_implementation({"decoder": "ds_sparse"})
    assert model.decoder.config._attn_implementation == "sdpa"


def test_a_trial_leaves_the_model_its_hooks_and_the_random_numbers_alone():
    model, seen = make().train(), []
    model.bert.encoder.layer[0].register_forward_hook(lambda *_: seen.append("ran"))
    before = torch.get_rng_state(), {name: x.clone() for name, x in model.state_dict().items()}
    ds_sparse.sparsify(model, RANDOM)
    assert not seen and model.training and torch.equal(torch.get_rng_state(), before[0])
    assert all(torch.equal(x, before[1][name]) for name, x in model.state_dict().items())
    model(**make_batch())
    assert seen == ["ran"]


def test_a_model_that_takes_other_inputs_or_reads_a_number_of_a_tensor_is_refused_with_that():
    class TakesMore(transformers.BertModel):
        def forward(self, input_ids, weather, **more):
            return super().forward(input_ids, **more)

    class Reads(transformers.BertModel):
        def forward(self, input_ids, **more):
            return super().forward(input_ids % int(self.embeddings.word_embeddings.weight.sum()), **more)

    with pytest.raises(ValueError, match=r"TakesMore did not run on inputs that ds_sparse made up.*'weather'"):
        ds_sparse.sparsify(TakesMore(transformers.BertConfig(**SMALL)), RANDOM)
    with pytest.raises(ValueError, match=r"reads a number of a tensor, as \.item\(\) does.*if it is a part of a model"):
        ds_sparse.sparsify(Reads(transformers.BertConfig(**SMALL)), RANDOM)


MIMI = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": HEADS, "intermediate_size": 32}
MIMI |= {"head_dim": 8, "num_filters": 4, "upsample_groups": 32, "codebook_dim": 8, "codebook_size": 32}


def test_a_model_that_works_on_the_memory_of_its_tensors_is_refused_with_that():
    model = make(Family(transformers.MimiModel, MIMI))
    sentence = r"MimiEncoderModel did not run on .*\(its forward works on the memory of its.*; give .* without this one"
    with pytest.raises(ValueError, match=sentence):
        ds_sparse.sparsify(model, {"mode": "fixed"})


def test_an_encoder_that_only_its_model_gives_inputs_is_tried_with_it():
    model, inputs = make(Family(transformers.DINOv3ViTModel, VISION)).eval(), make_inputs(PICTURE)
    truth = model.double()(**inputs)[0]
    report = ds_sparse.sparsify(model, {"mode": "dense", "block": BLOCK}, max_seq_length=32)
    assert len(report.replaced) == 2
    torch.testing.assert_close(model(**inputs)[0], truth)


def test_a_layer_that_does_not_call_the_attention_function_is_named():
    class OwnWay(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config = config
            self.query, self.key, self.value = (torch.nn.Linear(32, 32) for _ in range(3))

        def forward(self, states, *_, **__):
            return self.value(states), None

    model = make()
    model.bert.encoder.layer[1].attention.self = OwnWay(model.config)
    with pytest.raises(
        ValueError, match=r"layer bert.encoder.layer.1.attention.self \(OwnWay\) of BertModel did not call"
    ):
        ds_sparse.sparsify(model, RANDOM)


def test_the_structure_is_saved_where_an_encoder_has_a_copy_of_the_config(tmp_path):
    model, inputs = make(ENCODERS["umt5_encoder"]).eval(), make_inputs()
    report = ds_sparse.sparsify(model, RANDOM, max_seq_length=64)
    model.save_pretrained(tmp_path)
    loaded = transformers.UMT5EncoderModel.from_pretrained(tmp_path, attn_implementation="ds_sparse").eval()
    assert torch.equal(loaded(**inputs)[0], model(**inputs)[0])
    report.undo()
    assert not hasattr(model.config, "sparse_attention") and not hasattr(model.encoder.config, "sparse_attention")


def test_another_model_made_with_the_same_config_stays_dense():
    config = transformers.BertConfig(**SIZES)
    first, second, other = (transformers.BertForMaskedLM(config).eval() for _ in range(3))
    batch = make_batch()
    before = [model(**batch).logits for model in (first, second, other)]
    report = ds_sparse.sparsify(torch.nn.ModuleList([first, second]), RANDOM)
    assert not torch.equal(first(**batch).logits, before[0]) and not torch.equal(second(**batch).logits, before[1])
    assert torch.equal(other(**batch).logits, before[2]) and other.config is config
    assert first.config is first.bert.config and first.config.sparse_attention == second.config.sparse_attention
    report.undo()
    assert torch.equal(first(**batch).logits, before[0]) and torch.equal(second(**batch).logits, before[1])
    assert first.config.to_dict() == second.config.to_dict() == config.to_dict()


def test_what_the_attention_function_does_not_compute_is_an_error():
    model, batch = make(), make_batch()
    ds_sparse.sparsify(model, RANDOM)
    layer, query = model.bert.encoder.layer[0].attention.self, torch.randn(1, HEADS, 20, 8)
    with pytest.raises(ValueError, match=r"\(BertSelfAttention\) asks the attention for output_attentions"):
        model(**batch, output_attentions=True)
    for asked in ({"sliding_window": 4}, {"cu_seq_lens_q": torch.tensor([0, 20])}):
        with pytest.raises(ValueError, match=f"asks the attention for {next(iter(asked))}"):
            interface.attention(layer, query, query, query, None, **asked)
    with pytest.raises(ValueError, match="is cross-attention, or has cached keys"):
        interface.attention(layer, query, query[:, :, :16], query[:, :, :16], None)
    with pytest.raises(ValueError, match="attn_mask is torch.int64; it has to be bool"):
        model(**batch | {"attention_mask": batch["attention_mask"][:, None, None, :]})


def test_masks_that_are_no_padding_are_an_error_where_a_layer_takes_them():
    model = make()
    ds_sparse.sparsify(model, RANDOM)
    layer, query = model.bert.encoder.layer[0].attention.self, torch.randn(2, HEADS, 20, 8)
    sizes = {"batch_size": 2, "q_length": 20, "kv_length": 20}
    bidirectional = bidirectional_mask_function
    for wrong in (
        {"mask_function": lambda *_: True},
        {"mask_function": bidirectional, "attention_mask": torch.ones(2, 20, 20, dtype=torch.bool)},
        {"mask_function": bidirectional, "allow_is_bidirectional_skip": False},
    ):
        mask = interface.key_padding_mask(**sizes | wrong)
        assert mask.is_meta  # nothing of tokens by tokens is stored
        with pytest.raises(ValueError, match="a mask that is causal, packed, with an overlay or for cross-attention"):
            interface.attention(layer, query, query, query, mask)
    mask = interface.key_padding_mask(**sizes | {"mask_function": bidirectional, "kv_length": 30})
    with pytest.raises(ValueError, match="has 20 tokens and is given a mask of 30; give attention_mask as many"):
        interface.attention(layer, query, query, query, mask)
    mask = interface.key_padding_mask(**sizes, mask_function=causal_mask_function)
    with pytest.raises(ValueError, match="is bidirectional and given a mask that is causal"):
        interface.attention(layer, query, query, query, mask)
    assert interface.key_padding_mask(**sizes, mask_function=bidirectional) is None
    del sizes["q_length"]  # as Transformers 5.0 calls it
    assert interface.key_padding_mask(**sizes, mask_function=bidirectional, cache_position=torch.arange(20)) is None


def test_the_attention_function_scales_as_it_is_told():
    model = make()
    ds_sparse.sparsify(model, {"mode": "dense"})
    layer = model.bert.encoder.layer[0].attention.self
    query, key, value = torch.randn(3, 2, HEADS, 20, 8)
    for scaling in (0.1, None):
        output, _ = interface.attention(layer, query, key, value, None, scaling=scaling)
        truth = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling)
        torch.testing.assert_close(output, truth.transpose(1, 2))


@pytest.mark.parametrize("key_heads", [HEADS, 2])
def test_strided_inputs_and_those_of_fewer_heads_are_not_copied(key_heads):
    model = make()
    ds_sparse.sparsify(model, RANDOM)
    layer = model.bert.encoder.layer[0].attention.self
    query, key, value = (torch.randn(2, 64, heads, 8).transpose(1, 2) for heads in (HEADS, key_heads, key_heads))
    mask = torch.ones(2, 64, dtype=torch.bool)
    interface.attention(layer, query, key, value, mask)
    with CountedOperators() as counted, torch.no_grad():
        output, weights = interface.attention(layer, query, key, value, mask)
    copies = [name for name in counted.of.elements() if "clone" in name or "copy" in name or "contiguous" in name]
    assert len(copies) == 1  # the output, which has to be contiguous
    assert output.shape == (2, 64, HEADS, 8) and output.is_contiguous() and weights is None


@pytest.mark.parametrize("name", ["SmolVLM", "Idefics3"])
def test_pictures_and_text_of_a_dense_layout_give_what_the_untouched_model_gives(name):
    text = SMALL | {"num_key_value_heads": 2, "pad_token_id": 0, "model_type": "llama"}
    sizes = {"vision_config": VISION | {"image_size": 64}, "text_config": text, "image_token_id": 98, "scale_factor": 2}
    model = make(Family(getattr(transformers, f"{name}ForConditionalGeneration"), sizes)).double()
    ids = make_batch(50, right=0)["input_ids"] % 98
    ids[:, 11:27] = 98  # a quarter of 8 x 8 patches
    seen = torch.ones(2, 1, 64, 64, dtype=torch.long)
    seen[1, :, 32:] = 0
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_attention_mask": seen}
    inputs["pixel_values"] = torch.randn(2, 1, 3, 64, 64, dtype=torch.float64)
    truth = families.run(model, inputs, lambda output: output.logits)
    assert len(ds_sparse.sparsify(model, {"mode": "dense", "block": BLOCK}).replaced) == 4
    assert_close(families.run(model, inputs, lambda output: output.logits), truth)


@pytest.mark.parametrize(
    ("module", "name"), [("switch", "_check_is_switched"), ("trial", "Window"), ("distances", "_make")]
)
def test_pickles_of_models_that_the_first_release_made_sparse_find_what_they_name(module: str, name: str):
    place = f"ds_sparse.integrations.transformers.{module}"
    found = pickle.loads(f"c{place}\n{name}\n.".encode())
    assert found.__name__ == name
