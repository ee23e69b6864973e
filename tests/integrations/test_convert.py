"""convert: Longformer, BigBird and LED beside the RoBERTa, BERT and BART that are made of them, in evaluation, with
padding."""

import math

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

import ds_sparse
from ds_sparse.integrations.transformers.converters import BigBirdConverter, LEDConverter, LongformerConverter
from ds_sparse.layout import to_token_mask

TOKENS, VOCABULARY, LAYERS, BLOCK = 256, 50, 2, 16
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "intermediate_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 1,
    "bos_token_id": 2, "eos_token_id": 3, "sep_token_id": 3,
    "initializer_range": 0.2,  # so that attention is not nearly even
}  # fmt: skip
LONGFORMER = SIZES | {"max_position_embeddings": TOKENS + 2, "attention_window": 64}
BIG_BIRD = SIZES | {"max_position_embeddings": TOKENS, "block_size": BLOCK, "num_random_blocks": 2}
LED = {name: SIZES[name] for name in SIZES if name.endswith("_id") or name == "vocab_size"} | {
    "d_model": 32, "attention_window": 64, "max_encoder_position_embeddings": TOKENS,
    "max_decoder_position_embeddings": 100, "init_std": 0.2, "dropout": 0.0, "decoder_start_token_id": 2,
}  # fmt: skip
for _side in ("encoder", "decoder"):
    LED |= {f"{_side}_layers": LAYERS, f"{_side}_attention_heads": 4, f"{_side}_ffn_dim": 64}
ALL_THERE_IS = {"attention_window": 2 * TOKENS, "max_encoder_position_embeddings": 2 * TOKENS}  # LED pads to a window
CLOSE = {"rtol": 1e-4, "atol": 1e-5}

CONFIGS = {"Longformer": LONGFORMER, "BigBird": BIG_BIRD, "LED": LED}


def make(name, **changes):
    """A model of Transformers with random weights, such as LongformerForMaskedLM."""
    config = next(c for family, c in CONFIGS.items() if name.startswith(family))
    cls = getattr(transformers, name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = cls(cls.config_class(**config | changes))
        for parameter in model.parameters():  # also biases and norms, of which a new model has zeros and ones
            torch.nn.init.normal_(parameter, parameter.mean().item(), 0.1) if parameter.dim() == 1 else None
    return model.eval()


def make_batch(tokens=TOKENS, last=150):
    ids = torch.randint(5, VOCABULARY, (2, tokens), generator=torch.Generator().manual_seed(tokens))
    mask = torch.ones_like(ids)
    mask[1, last:] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask}


def seen(outputs, batch):
    """The outputs about tokens that are no padding, or of a head that has one for each sequence, and which it is."""
    first = outputs[0]
    return first if first.shape[:2] != batch["input_ids"].shape else first[batch["attention_mask"] != 0]


def window(tokens, side, global_tokens=0):
    at = torch.arange(tokens)
    near = (at[:, None] - at).abs() <= side
    return near | (at < global_tokens) | (at[:, None] < global_tokens)


def and_padding(pairs, batch):
    return {"attention_mask": pairs[..., :, :] & batch["attention_mask"][:, None, None].bool()}


def sparse_as_itself(converter, model):
    """The converted model with the structure of the original."""
    converted = converter.convert(model)
    ds_sparse.sparsify(converted, converter.structure(model), max_seq_length=TOKENS)
    return converted


@pytest.mark.parametrize("head", [head for head in LongformerConverter.heads if head != "ForMultipleChoice"])
@torch.no_grad()
def test_longformer_is_the_sparse_roberta_under_the_mask_of_the_window(head):
    longformer, batch = make(f"Longformer{head}"), make_batch(200)
    roberta = sparse_as_itself(LongformerConverter(), longformer)
    assert type(roberta).__name__ == f"Roberta{head}" and not roberta.training
    local = {"global_attention_mask": torch.zeros_like(batch["input_ids"])}  # some heads make tokens global
    ours = roberta(**batch | and_padding(window(200, 32), batch))
    torch.testing.assert_close(seen(ours, batch), seen(longformer(**batch, **local), batch), **CLOSE)


@torch.no_grad()
def test_longformer_is_roberta_where_the_window_is_all_there_is():
    longformer, batch = make("LongformerForMultipleChoice", attention_window=2 * TOKENS), make_batch()
    roberta = sparse_as_itself(LongformerConverter(), longformer)
    assert roberta.config.sparse_attention["mode"] == "dense"
    batch = {name: x[:, None] for name, x in batch.items()}
    local = {"global_attention_mask": torch.zeros_like(batch["input_ids"])}
    torch.testing.assert_close(roberta(**batch).logits, longformer(**batch, **local).logits, **CLOSE)


@pytest.mark.parametrize(("side", "block"), [(32, 32), (64, 64), (24, 16), (2, 16)])
def test_blocks_cover_the_window_and_less_than_a_block_more(side, block):
    structure = LongformerConverter().structure(make("LongformerModel", attention_window=2 * side))
    layout = ds_sparse.parse_sparse_attention(structure, 4, seq_len=TOKENS).make_bool_layout(TOKENS)
    tokens = to_token_mask(layout, structure["block"])[0]
    assert structure["block"] == block
    assert (
        tokens[window(TOKENS, side)].all() and not tokens[~window(TOKENS, -(-side // block) * block + block - 1)].any()
    )


def share_global_projections(layers):
    for layer in layers:
        for kind in ("query", "key", "value"):
            getattr(layer, f"{kind}_global").load_state_dict(getattr(layer, kind).state_dict())


@pytest.mark.parametrize("shared", [True, False])
@torch.no_grad()
def test_global_tokens_are_the_same_while_their_projections_are_those_of_all(shared, capsys):
    longformer, batch = make("LongformerForSequenceClassification"), make_batch()
    if shared:
        share_global_projections(layer.attention.self for layer in longformer.longformer.encoder.layer)
    roberta = sparse_as_itself(LongformerConverter(), longformer)
    said = capsys.readouterr().out
    assert ("equal to those of all tokens, are left out. Nothing is lost by it." in said) == shared
    assert ("by up to" in said and "Sequences without global tokens lose nothing by it. With some," in said) != shared
    assert roberta.config.sparse_attention["global_block_indices"] == [0]
    ours = roberta(**batch | and_padding(window(TOKENS, 32, global_tokens=1), batch)).logits
    assert torch.allclose(ours, longformer(**batch).logits, **CLOSE) == shared


def test_windows_of_their_own_become_structures_by_layer():
    longformer = make("LongformerModel", num_hidden_layers=3, attention_window=[64, 32, 64])
    assert LongformerConverter().structure(longformer) == {
        "mode": "bslongformer",
        "block": 16,
        "num_sliding_window_blocks": 5,
        "global_block_indices": [],
        "layers": {"1": {"mode": "bslongformer", "num_sliding_window_blocks": 3, "global_block_indices": []}},
    }


@torch.no_grad()
def test_leds_encoder_is_the_sparse_barts_under_the_mask_of_the_window():
    led, batch = make("LEDModel"), make_batch(200)
    bart = sparse_as_itself(LEDConverter(), led)
    assert type(bart).__name__ == "BartModel" and not bart.training
    assert bart.config.sparse_attention["num_sliding_window_blocks"] == 3
    ours, theirs = bart.encoder(**batch | and_padding(window(200, 32), batch)), led.encoder(**batch)
    torch.testing.assert_close(seen(ours, batch), seen(theirs, batch), **CLOSE)
    given = {"encoder_outputs": theirs, "attention_mask": batch["attention_mask"]}
    given["decoder_input_ids"] = batch["input_ids"][:, :100]  # as many as LED's decoder has positions
    torch.testing.assert_close(bart(**given)[0], led(**given)[0], **CLOSE)


@pytest.mark.parametrize("head", LEDConverter.heads)
@torch.no_grad()
def test_led_is_bart_where_the_window_is_all_there_is(head):
    led, batch = make(f"LED{head}", **ALL_THERE_IS), make_batch()
    bart = sparse_as_itself(LEDConverter(), led)
    assert type(bart).__name__ == f"Bart{head}" and bart.config.sparse_attention["mode"] == "dense"
    more = {"decoder_input_ids": make_batch(60)["input_ids"]}
    torch.testing.assert_close(bart(**batch, **more)[0], led(**batch, **more)[0], **CLOSE)


@torch.no_grad()
def test_leds_global_tokens_are_the_same_while_their_projections_are_those_of_all(capsys):
    led, batch = make("LEDModel"), make_batch()
    LEDConverter().convert(led)
    assert "which differ from those of all tokens by up to" in capsys.readouterr().out
    share_global_projections(layer.self_attn.longformer_self_attn for layer in led.encoder.layers)
    bart = LEDConverter().convert(led)
    said = capsys.readouterr().out
    assert "equal to those of all tokens, are left out" in said
    assert "the decoder's 100 positions are repeated up to 256" in said
    block = LEDConverter().structure(led) | {"global_block_indices": [0]}
    ds_sparse.sparsify(bart, block, max_seq_length=TOKENS)
    first = {"global_attention_mask": (torch.arange(TOKENS) < 1).int().expand(2, -1)}
    ours = bart.encoder(**batch | and_padding(window(TOKENS, 32, global_tokens=1), batch))
    torch.testing.assert_close(seen(ours, batch), seen(led.encoder(**batch, **first), batch), **CLOSE)


def test_an_encoder_of_fewer_positions_than_the_decoder_is_repeated(capsys):
    led = make("LEDModel", max_encoder_position_embeddings=128, max_decoder_position_embeddings=300)
    bart = LEDConverter().convert(led)
    assert "the encoder's 128 positions are repeated up to 300" in capsys.readouterr().out
    table = led.encoder.embed_positions.weight
    assert torch.equal(bart.encoder.embed_positions.weight[2:], torch.cat([table, table, table])[:300])
    assert bart.config.max_position_embeddings == LEDConverter().longest(led) == 300


@torch.no_grad()
def test_a_converted_led_generates_what_it_generated(tmp_path):
    led, batch = make("LEDForConditionalGeneration", **ALL_THERE_IS), make_batch()
    led.generation_config.num_beams, led.generation_config.max_new_tokens = 2, 7
    save(led, tmp_path / "led")
    report = ds_sparse.convert(tmp_path / "led", tmp_path / "bart")
    assert len(report.replaced) == LAYERS and {layer.why for layer in report.dense} == {
        "BartDecoder has cross-attention"
    }
    load = transformers.AutoModelForSeq2SeqLM.from_pretrained
    bart = load(tmp_path / "bart", attn_implementation="ds_sparse").eval()
    assert bart.get_input_embeddings().weight is bart.get_output_embeddings().weight
    assert torch.equal(bart.generate(**batch), led.generate(**batch))


@pytest.mark.parametrize("head", [head for head in BigBirdConverter.heads if head != "ForMultipleChoice"])
@torch.no_grad()
def test_big_bird_with_full_attention_is_bert(head):
    big_bird, batch = make(f"BigBird{head}", attention_type="original_full", use_bias=False), make_batch(100, 60)
    bert = sparse_as_itself(BigBirdConverter(), big_bird)
    assert type(bert).__name__ == f"Bert{head}" and bert.config.sparse_attention["mode"] == "dense"
    torch.testing.assert_close(seen(bert(**batch), batch), seen(big_bird(**batch), batch), **CLOSE)


@torch.no_grad()
def test_big_bird_in_training_is_the_sparse_bert():
    """Dropout is 0 here; Transformers draws random blocks in training alone."""
    big_bird, batch = make("BigBirdForMaskedLM"), make_batch()
    bert = sparse_as_itself(BigBirdConverter(), big_bird)
    torch.testing.assert_close(seen(bert(**batch), batch), seen(big_bird.train()(**batch), batch), **CLOSE)


@torch.no_grad()
def test_big_bird_in_evaluation_is_the_window_with_the_first_block_counted_more_often():
    """Transformers draws no random blocks then, and sees the first block once more for each of them."""
    big_bird, batch = make("BigBirdModel"), make_batch()
    bert = BigBirdConverter().convert(big_bird)
    block = {"mode": "bslongformer", "block": BLOCK, "global_block_indices": [0, -1]}
    ds_sparse.sparsify(bert, block, max_seq_length=TOKENS)
    added = torch.zeros(TOKENS, TOKENS)
    added[BLOCK:-BLOCK, :BLOCK] = math.log(1 + BIG_BIRD["num_random_blocks"])
    added = added.masked_fill(batch["attention_mask"][:, None, None] == 0, -math.inf)
    ours = bert(**batch | {"attention_mask": added})
    torch.testing.assert_close(seen(ours, batch), seen(big_bird(**batch), batch), **CLOSE)


def test_big_bird_that_is_too_short_for_blocks_attends_to_all():
    assert BigBirdConverter().structure(make("BigBirdModel", max_position_embeddings=9 * BLOCK))["mode"] == "dense"


@pytest.mark.parametrize("size", [4, 20])
def test_big_bird_with_blocks_of_another_size_needs_a_structure(size):
    sentence = f"has config.block_size {size}, and blocks have 8, 16, 32, 64 or 128 tokens; give a structure"
    with pytest.raises(ValueError, match=sentence):
        BigBirdConverter().structure(make("BigBirdModel", block_size=size))


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("BigBirdForSequenceClassification", {}, "has a head that Bert does not have; convert its base model"),
        ("BigBirdModel", {"rescale_embeddings": True}, "no BERT scales its word embeddings"),
    ],
)
def test_what_bert_does_not_have_is_refused(name, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        BigBirdConverter().convert(make(name, **changes))


def test_what_a_head_was_made_for_stays_and_what_bert_does_not_have_is_said(capsys):
    labels = {0: "no", 1: "yes", 2: "perhaps"}
    roberta = LongformerConverter().convert(make("LongformerForTokenClassification", id2label=labels))
    assert roberta.config.id2label == labels and roberta.classifier.out_features == 3
    BigBirdConverter().convert(make("BigBirdForMaskedLM"))
    said = "left out, as BertForMaskedLM does not have it: bert.pooler.dense.weight, bert.pooler.dense.bias."
    assert said in capsys.readouterr().out


def save(model, folder):
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=TOKENS).save_pretrained(folder)


@pytest.mark.parametrize("name", ["LongformerForMaskedLM", "BigBirdForMaskedLM"])
@torch.no_grad()
def test_a_checkpoint_is_converted_with_its_tokenizer_and_its_weights_stay_tied(name, tmp_path):
    original, batch = make(name), make_batch()
    save(original, tmp_path / "original")
    report = ds_sparse.convert(tmp_path / "original", tmp_path / "converted")
    assert len(report.replaced) == LAYERS
    load = transformers.AutoModelForMaskedLM.from_pretrained
    converted = load(tmp_path / "converted", attn_implementation="ds_sparse").eval()
    assert converted.get_input_embeddings().weight is converted.get_output_embeddings().weight
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "converted").model_max_length == TOKENS
    converter = LongformerConverter() if name.startswith("Longformer") else BigBirdConverter()
    expected = sparse_as_itself(converter, original)
    assert torch.equal(seen(converted(**batch), batch), seen(expected(**batch), batch))


def test_the_dtype_stays():
    assert BigBirdConverter().convert(make("BigBirdModel").bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [False, True])
def test_word_embeddings_stay_tied_or_apart(tied):
    bert = BigBirdConverter().convert(make("BigBirdForMaskedLM", tie_word_embeddings=tied))
    assert (bert.get_input_embeddings().weight is bert.get_output_embeddings().weight) == tied


def test_another_structure_can_be_given_and_another_family_cannot(tmp_path):
    save(make("LongformerModel"), tmp_path / "longformer")
    block = {"mode": "fixed", "block": 64}
    report = ds_sparse.convert(tmp_path / "longformer", tmp_path / "fixed", sparsity_config=block)
    assert "FixedSparsityConfig, block 64" in str(report)
    save(transformers.BertModel(transformers.BertConfig(**SIZES)), tmp_path / "bert")
    with pytest.raises(
        ValueError, match="BertModel is neither a Longformer nor a BigBird nor an LED; sparsify and ds_sparse adapt"
    ):
        ds_sparse.convert(tmp_path / "bert", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["LongformerModel", "BigBirdModel", "LEDModel"])
def test_who_makes_them_sparse_as_they_are_is_told_of_convert(name):
    with pytest.raises(
        ValueError, match="computes its attention itself .* ds_sparse convert makes a (RoBERTa|BERT|BART) of"
    ):
        ds_sparse.sparsify(make(name), {"mode": "fixed", "block": BLOCK})
