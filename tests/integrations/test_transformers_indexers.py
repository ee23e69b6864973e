"""Models of Transformers whose own indexer chooses blocks of keys, under attn_implementation="ds_sparse"."""

import copy
from unittest import mock

import pytest
import torch
import transformers
from integrations import families
from integrations.families import DECODER, VOCABULARY, newest

import ds_sparse
from ds_sparse.integrations.transformers import attention, functions, structure_of
from ds_sparse.modules import chosen_blocks
from ds_sparse.tools.notices import _said

MODEL = newest("MiniMaxM3VLForCausalLM")
pytestmark = pytest.mark.skipif(MODEL is None, reason="this Transformers has no MiniMax-M3")

BLOCK, TOKENS = 16, 70
SIZES = DECODER | {
    "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 4, "intermediate_size": 32,
    "dense_intermediate_size": 32, "shared_intermediate_size": 16, "num_local_experts": 2, "num_experts_per_tok": 1,
    "mlp_layer_types": ["dense", "sparse", "dense"], "index_n_heads": 2, "index_head_dim": 8, "index_topk_blocks": 2,
    "index_block_size": BLOCK, "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
}  # fmt: skip


def make(seed: int = 0, **changes):
    """A model in fp64, in the manner of `families.make`, whose experts are computed in any dtype."""
    config = MODEL.config_class(**SIZES | changes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MODEL._from_config(config, experts_implementation="batched_mm")
        for parameter in model.eval().parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return model.double()


def with_implementation(model, name: str):
    """A copy of the model."""
    model = copy.deepcopy(model)
    model.set_attn_implementation(name)
    return model


def make_batch(tokens: int = TOKENS, left: int = 0, right: int = 0) -> dict[str, torch.Tensor]:
    """As in `families`, where no token of padding is to say the first of the text: its gradient is that of the lowest
    scores, all alike, in Transformers."""
    batch = families.make_batch(tokens, left, right)
    batch["labels"][0, left] = -100
    return batch


def prompts(tokens: int, left: int) -> dict[str, torch.Tensor]:
    return {name: x for name, x in make_batch(tokens, left).items() if name != "labels"}


def step(model, batch, run=None):
    """Logits of the tokens that are no padding, the loss, and the gradients of all parameters."""
    model.zero_grad()
    output = (model if run is None else run)(**batch)
    output.loss.backward()
    logits = output.logits.detach()
    kept = logits[batch["attention_mask"] != 0] if "attention_mask" in batch else logits.flatten(0, 1)
    return torch.cat([kept.flatten(), output.loss.detach()[None]]), families.gradients(model)


def assert_same(ours, truth) -> None:
    """Some parts of the model are in fp32 in any dtype."""
    near = 1e-6 if truth[0].dtype == torch.float64 else 1e-4
    families.assert_close(ours, truth, near, near)


@pytest.mark.parametrize(("left", "right"), [(0, 0), (0, 20), (30, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_is_that_of_the_masks_of_transformers(left, right, dtype):
    model, batch = make().to(dtype), make_batch(left=left, right=right)
    if not left and not right:
        del batch["attention_mask"]
    truth = step(model, batch)
    ours = with_implementation(model, "ds_sparse")
    indexer = type(ours.model.layers[1].self_attn.indexer)
    with (
        mock.patch.object(indexer, "build_block_mask") as build,
        mock.patch.object(chosen_blocks, "selected_attention", wraps=ds_sparse.selected_attention) as attend,
    ):
        found = step(ours, batch)
    assert attend.call_count == 2 and not build.called
    assert_same(found, truth)
    if not left:  # there, eager and sdpa make different things of padding
        eager = step(with_implementation(model, "eager"), batch)
        families.assert_close(found, eager, 1e-3, 1e-4)  # its softmax is in fp32


@pytest.mark.parametrize("seed", range(4))
def test_indexers_choose_by_what_padding_becomes_and_choose_alike(seed):
    model, batch = make(seed), prompts(TOKENS, 30)
    keep = batch["attention_mask"] != 0
    with torch.no_grad():
        truth, found = (with_implementation(model, x)(**batch).logits[keep] for x in ("sdpa", "ds_sparse"))
    torch.testing.assert_close(found, truth, rtol=1e-6, atol=1e-6)


def test_checkpointing_repeats_the_choice():
    model, batch = make(), make_batch(right=20)
    truth = step(model, batch)
    ours = with_implementation(model, "ds_sparse").train()
    ours.gradient_checkpointing_enable()
    assert_same(step(ours, batch), truth)


@pytest.mark.slow("compiles two models for 10 seconds")
def test_a_compiled_model_is_one_graph():
    model, batch = make(mlp_layer_types=["dense"] * 3), make_batch(right=20)
    ours = with_implementation(model, "ds_sparse")
    for given in (batch, {name: x for name, x in batch.items() if name != "attention_mask"}):
        truth = step(model, given, torch.compile(model, fullgraph=True, backend="aot_eager"))
        assert_same(step(ours, given, torch.compile(ours, fullgraph=True, backend="aot_eager")), truth)


LARGER = {"hidden_size": 128, "head_dim": 64, "rotary_dim": 32, "index_head_dim": 64, "index_block_size": 64}


def test_it_trains_and_generates_on_each_device(device):
    model, batch = make(**LARGER).float(), make_batch(300, right=40)
    for parameter in model.parameters():  # choices that do not hang on the last bits of a score
        parameter.data.mul_(0.3)
    model, batch = model.to(device), {name: x.to(device) for name, x in batch.items()}
    ours = with_implementation(model, "ds_sparse")
    assert_same(step(ours, batch), step(model, batch))

    texts = {name: x[:, :200] for name, x in batch.items() if name != "labels"}
    truth, found = (x.generate(**texts, **OPTIONS) for x in (model, ours))
    assert torch.equal(found, truth)

    ours = ours.bfloat16().train()
    optimizer = torch.optim.AdamW(ours.parameters(), 1e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = ours(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


OPTIONS = {"max_new_tokens": 30, "do_sample": False}


@pytest.mark.parametrize("left", [0, 7, 15])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_beams": 3},
        {"use_cache": False},
        {"prefill_chunk_size": 9},
        {"cache_implementation": "static", "disable_compile": True},
    ],
    ids=lambda x: next(iter(x), "default"),
)
def test_generation_is_that_of_the_masks_of_transformers(left, more):
    model, batch = make(), prompts(40, left)
    truth = model.generate(**batch, **OPTIONS, **more)
    assert torch.equal(with_implementation(model, "ds_sparse").generate(**batch, **OPTIONS, **more), truth)
    assert len(truth[0].unique()) > 10


def test_left_padding_of_a_block_is_refused_and_goes_with_positions_that_count_it():
    model, batch = make(), prompts(40, 20)
    ours = with_implementation(model, "ds_sparse")
    for more in ({}, {"cache_implementation": "static", "disable_compile": True}):
        with pytest.raises(ValueError, match=r"20 tokens of padding on the left, .* than 16 tokens.*torch.arange\(tok"):
            ours.generate(**batch, **OPTIONS, **more)
    places = {"position_ids": torch.arange(40)[None]}
    found, truth = (x.generate(**batch, **OPTIONS, **places) for x in (ours, model))
    assert torch.equal(found, truth)


def test_no_mask_of_pairs_is_made():
    model = with_implementation(make(layer_types=["minimax_m3_sparse"] * 3), "ds_sparse")
    with mock.patch.object(functions, "_attend_causal", wraps=functions._attend_causal) as attend:
        model(make_batch()["input_ids"])
    assert [tuple(call.args[0].mask.shape) for call in attend.call_args_list] == 3 * [(2, TOKENS)]


def test_layers_without_an_indexer_take_the_structure_or_stay_dense(tmp_path, capsys):
    model, batch = make(), make_batch(right=20)
    truth = step(model, batch)
    dense = copy.deepcopy(model)
    report = ds_sparse.sparsify(dense, {"mode": "fixed", "block": 16, "layers": {"0": None}})
    assert report.dense[0].name == "model.layers.0.self_attn"
    assert "2 attention layers made sparse: the model's own choice of blocks, of 16 keys" in report.headings
    assert_same(step(dense, batch), truth)
    report.undo()
    assert dense.config._attn_implementation == "sdpa"

    block = {"mode": "local_sliding_window", "block": 16, "num_sliding_window_blocks": 3}
    ds_sparse.sparsify(model, block)
    structures = [structure_of(layer.self_attn) for layer in model.model.layers]
    assert isinstance(structures[0], ds_sparse.LocalSlidingWindowSparsityConfig) and structures[1:] == [None, None]
    found = step(model, batch)
    assert not torch.allclose(found[0], truth[0], atol=1e-3)
    model.save_pretrained(tmp_path)
    named = {"attn_implementation": "ds_sparse", "dtype": torch.float64, "experts_implementation": "batched_mm"}
    assert_same(step(MODEL.from_pretrained(tmp_path, **named), batch), found)

    _said.clear()
    capsys.readouterr()
    ds_sparse.sparsify(make(layer_types=["minimax_m3_sparse"] * 3), block)
    assert "chooses the blocks of all its attention layers itself; none uses the structure" in capsys.readouterr().out


def test_a_model_that_is_loaded_by_name_needs_no_structure(tmp_path, capsys):
    model, batch = make(), make_batch()
    model.save_pretrained(tmp_path)
    _said.clear()
    named = {"attn_implementation": "ds_sparse", "dtype": torch.float64, "experts_implementation": "batched_mm"}
    ours = MODEL.from_pretrained(tmp_path, **named)
    assert "1 of 3 attention layers stay dense: their model chooses no blocks for them" in capsys.readouterr().out
    assert_same(step(ours, batch), step(model, batch))


def test_the_texts_of_a_model_of_pictures_and_texts():
    cls = transformers.MiniMaxM3SparseForConditionalGeneration
    vision = families.VISION | {"image_size": 56}
    sizes = {"projector_hidden_size": 32, "image_token_index": VOCABULARY - 1, "video_token_index": VOCABULARY - 2}
    config = cls.config_class(text_config=SIZES, vision_config=vision, **sizes)
    model = cls._from_config(config, experts_implementation="batched_mm").double()
    batch = make_batch() | {"input_ids": make_batch()["input_ids"].clamp(max=VOCABULARY - 3)}
    assert_same(step(with_implementation(model, {"text_config": "ds_sparse"}), batch), step(model, batch))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"index_block_size": 8}, "block is 8; selected_attention takes 16, 32, 64"),
        (
            {"index_n_heads": 2, "num_key_value_heads": 1},
            r"block_indices has shape \(2, 2, 8, 1\); for 8 tokens of 4 h",
        ),
        (
            {"attention_dropout": 0.1},
            r"indexer chooses blocks of \d+ keys is given dropout_p.* set attention dropout to 0",
        ),
        ({"output_attentions": True, "attn_implementation": "eager"}, "has config.output_attentions"),
    ],
)
def test_what_is_not_computed_is_refused_before_a_step(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(**changes).set_attn_implementation("ds_sparse")


def test_structures_for_layers_that_have_an_indexer_alone_are_refused():
    with pytest.raises(ValueError, match='layers."1-2": layers of MiniMaxM3VLTextModel whose blocks the model choos'):
        ds_sparse.sparsify(make(), {"mode": "fixed", "layers": {"1-2": {"num_local_blocks": 2}}})


@pytest.mark.parametrize("cumulative", [False, True])
def test_packed_documents_are_refused(cumulative):
    model, ids = with_implementation(make(), "ds_sparse"), make_batch()["input_ids"]
    borders = torch.tensor([0, 30, TOKENS, 2 * TOKENS])
    packed = {"position_ids": torch.cat([torch.arange(30), torch.arange(TOKENS - 30)])[None].expand(2, -1)}
    with pytest.raises(
        ValueError, match="packed documents .* has an indexer that chooses blocks of a row.*Give each doc"
    ):
        model(ids, **({"cu_seq_lens_q": borders, "cu_seq_lens_k": borders} if cumulative else packed))


LATENT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 32, "moe_intermediate_size": 16, "n_routed_experts": 2,
    "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "index_head_dim": 16, "index_n_heads": 2,
    "index_topk": 4,
}  # fmt: skip
GROUPED = {name: LATENT[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
GROUPED |= {"num_key_value_heads": 2, "head_dim": 8}
OF_TOKENS = {
    "DeepseekV32Model": LATENT,
    "GlmMoeDsaModel": LATENT,
    "DeepseekV4Model": GROUPED | {"layer_types": ["compressed_sparse_attention"] * 2},
    "Qwen4ExpTextModel": GROUPED | {"layer_types": ["indexed_attention"] * 2}
    | {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8}
    | {"indexer_compress_ratio": 4},
}  # fmt: skip


@pytest.mark.parametrize("name", OF_TOKENS)
def test_models_whose_indexer_chooses_tokens_are_refused(name):
    cls = newest(name)
    if cls is None:
        pytest.skip(f"this Transformers has no {name}")
    sentence = f"{name} has an indexer that chooses tokens .*ndexer.* makes a mask of pairs; .*; train it as it is"
    with torch.device("meta"):
        with pytest.raises(ValueError, match=sentence):
            cls._from_config(cls.config_class(**OF_TOKENS[name]), attn_implementation="ds_sparse")
        with pytest.raises(ValueError, match=sentence):
            ds_sparse.sparsify(cls(cls.config_class(**OF_TOKENS[name])), {"mode": "fixed"})


def test_choices_that_a_layer_is_not_known_to_make_are_refused():
    layers = [x.self_attn for x in with_implementation(make(), "ds_sparse").model.layers]
    query, key = torch.randn(1, 4, 32, 8), torch.randn(1, 2, 32, 8)
    chosen = torch.zeros(1, 2, 32, 1, dtype=torch.long)
    with pytest.raises(ValueError, match=r"layers.0.self_attn .* has no indexer .* and gives the attention block_ind"):
        attention(layers[0], query, key, key, None, block_indices=chosen)
    with pytest.raises(ValueError, match=r"layers.1.self_attn .* has an indexer .* gives the attention no block_ind"):
        attention(layers[1], query, key, key, None)
    with pytest.raises(ValueError, match="asks the attention for indices, which ds_sparse does not compute"):
        attention(layers[0], query, key, key, None, indices=chosen[:, 0])
    with pytest.raises(ValueError, match="has 4 heads and its attention is called with 2"):
        attention(layers[1], query[:, :2], key[:, :1], key[:, :1], None, block_indices=chosen[:, :1])
