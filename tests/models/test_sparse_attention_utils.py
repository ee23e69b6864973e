"""SparseAttentionUtils."""

import pytest
import torch
import transformers
from torch import nn

import ds_sparse
from ds_sparse import BertSparseSelfAttention, DenseSparsityConfig, FixedSparsityConfig, SparseAttentionUtils

pad = SparseAttentionUtils.pad_to_block_size


def test_pads_every_input_by_its_kind():
    embeddings = torch.nn.Embedding(10, 4)
    ids = torch.ones(2, 20, dtype=torch.long)
    pad_len, input_ids, mask, types, positions, embeds = pad(
        16, ids, torch.ones(2, 20, dtype=torch.long), ids, ids, embeddings(ids), 7, embeddings
    )
    assert pad_len == 12
    assert (input_ids[:, 20:] == 7).all() and (input_ids[:, :20] == 1).all()
    assert (mask[:, 20:] == 0).all() and (types[:, 20:] == 0).all() and (positions[:, 20:] == 7).all()
    assert torch.equal(embeds[:, 20:], embeddings(torch.full((2, 12), 7)))


def test_none_stays_none_and_whole_blocks_stay_as_they_are():
    ids = torch.ones(2, 20, dtype=torch.long)
    assert pad(16, ids, None, None, None, None, 0, None)[2:] == (None, None, None, None)
    whole = torch.ones(2, 32, dtype=torch.long)
    pad_len, same, *_ = pad(16, whole, None, None, None, None, 0, None)
    assert pad_len == 0 and same is whole


def test_embeddings_alone_are_enough_and_nothing_is_an_error():
    embeddings = torch.nn.Embedding(10, 4)
    pad_len, *_, embeds = pad(16, None, None, None, None, torch.zeros(2, 17, 4), 0, embeddings)
    assert pad_len == 15 and embeds.shape == (2, 32, 4)
    with pytest.raises(ValueError, match="input_ids and inputs_embeds are both None"):
        pad(16, None, None, None, None, None, 0, None)
    with pytest.raises(ValueError, match="inputs_embeds is given without model_embeddings"):
        pad(16, None, None, None, None, torch.zeros(2, 17, 4), 0, None)


def test_the_embeddings_go_by_both_names():
    embeddings = torch.nn.Embedding(10, 4)
    arguments = (16, None, None, None, None, torch.zeros(2, 17, 4), 3)
    for name in ("model_embeddings", "model_mbeddings"):
        *_, embeds = pad(*arguments, **{name: embeddings})
        assert torch.equal(embeds[:, 17:], embeddings(torch.full((2, 15), 3)))
    with pytest.raises(ValueError, match="model_embeddings and model_mbeddings are both given"):
        pad(*arguments, model_embeddings=embeddings, model_mbeddings=embeddings)


@pytest.mark.parametrize("pad_len", [0, 5])
def test_unpad_takes_off_what_was_added(pad_len):
    states = torch.randn(2, 16 + pad_len, 3)
    assert torch.equal(SparseAttentionUtils.unpad_sequence_output(pad_len, states), states[:, :16])


HEADS, BLOCK = 4, 16
SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 64,
}
BERT = (transformers.BertForMaskedLM, "bert", 64, 0)
ROBERTA = (transformers.RobertaForMaskedLM, "roberta", 66, 2)
WITH_TABLE = [
    BERT,
    ROBERTA,
    (transformers.XLMRobertaForMaskedLM, "roberta", 66, 2),
    (transformers.CamembertForMaskedLM, "roberta", 66, 2),
    (transformers.ElectraForMaskedLM, "electra", 64, 0),
    (transformers.DistilBertForMaskedLM, "distilbert", 64, 0),
    (transformers.AlbertForMaskedLM, "albert", 64, 0),
]
both = pytest.mark.parametrize("family", [BERT, ROBERTA], ids=["bert", "roberta"])


def make(family, implementation="sdpa"):
    cls, _, rows, _ = family
    torch.manual_seed(0)
    config = cls.config_class(**SIZES, max_position_embeddings=rows)
    return cls._from_config(config, attn_implementation=implementation).eval()


def make_batch(tokens=50):
    mask = torch.ones(2, tokens, dtype=torch.long)
    mask[1, tokens // 3 :] = 0
    return {"input_ids": torch.randint(5, 99, (2, tokens)).masked_fill(mask == 0, 1), "attention_mask": mask}


@pytest.mark.parametrize("family", WITH_TABLE, ids=[family[0].__name__ for family in WITH_TABLE])
@pytest.mark.parametrize("target", [65, 200])
def test_positions_are_extended_to_exactly_the_target(family, target, tmp_path):
    cls, prefix, _, reserved = family
    model = make(family)
    embeddings = getattr(model, prefix).embeddings
    before = embeddings.position_embeddings.weight.detach().clone()
    embeddings.position_embeddings.weight.requires_grad_(False)
    padding = embeddings.position_embeddings.padding_idx
    assert SparseAttentionUtils.extend_position_embedding(model, target) is model
    table = embeddings.position_embeddings
    assert torch.equal(table.weight[:reserved], before[:reserved])
    assert all(torch.equal(table.weight[reserved + p], before[reserved + p % 64]) for p in range(target))
    assert len(table.weight) == table.num_embeddings == model.config.max_position_embeddings == target + reserved
    assert isinstance(table.weight, nn.Parameter) and not table.weight.requires_grad and table.padding_idx == padding
    assert torch.equal(embeddings.position_ids, torch.arange(target + reserved)[None])
    if hasattr(embeddings, "token_type_ids"):
        assert torch.equal(embeddings.token_type_ids, torch.zeros(1, target + reserved, dtype=torch.long))
    batch = make_batch(target)
    output = model(**batch).logits
    model.save_pretrained(tmp_path)
    assert torch.equal(cls.from_pretrained(tmp_path).eval()(**batch).logits, output)


@both
def test_extending_keeps_the_dtype_and_short_sequences_as_they_were(family):
    model, batch = make(family).bfloat16(), make_batch()
    before = model(**batch).logits
    SparseAttentionUtils.extend_position_embedding(model, 100)
    assert torch.equal(model(**batch).logits, before) and before.dtype == torch.bfloat16


def test_a_base_model_is_extended_too_and_the_same_length_changes_nothing():
    model = make(BERT).bert
    parameter = model.embeddings.position_embeddings.weight
    SparseAttentionUtils.extend_position_embedding(model, 64)
    assert model.embeddings.position_embeddings.weight is parameter
    SparseAttentionUtils.extend_position_embedding(model, 80)
    assert len(model.embeddings.position_embeddings.weight) == 80


def test_what_cannot_be_extended_is_an_error():
    with pytest.raises(ValueError, match="max_position is 63, and there are 64 positions"):
        SparseAttentionUtils.extend_position_embedding(make(ROBERTA), 63)
    with pytest.raises(ValueError, match="Linear has no embeddings.position_embeddings, the table that"):
        SparseAttentionUtils.extend_position_embedding(nn.Linear(2, 2), 100)
    partitioned, gathered = make(BERT), make(BERT)
    partitioned.bert.embeddings.position_embeddings.weight.data = torch.empty(0)
    gathered.bert.embeddings.position_embeddings.weight.ds_id = 3  # ZeRO 3 keeps small parameters whole
    for model, shape in ((partitioned, r"\(0,\)"), (gathered, r"\(64, 32\)")):
        with pytest.raises(ValueError, match=rf"partitioned \(here {shape}, 64 rows in all\)"):
            SparseAttentionUtils.extend_position_embedding(model, 100)


@pytest.mark.parametrize(
    "cls, kind",
    [
        (transformers.ModernBertForMaskedLM, r"rotary positions \(model.rotary_emb\)"),
        (transformers.EuroBertModel, r"rotary positions \(rotary_emb\)"),
        (transformers.NomicBertModel, r"rotary positions \(rotary_emb\)"),
        (transformers.T5EncoderModel, r"relative positions \(encoder.block.0.*relative_attention_bias\)"),
    ],
)
def test_a_model_whose_positions_need_no_table_says_so(cls, kind):
    sizes = SIZES | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    if cls is transformers.T5EncoderModel:
        sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    model = cls(cls.config_class(**sizes))
    with pytest.raises(ValueError, match=rf"{cls.__name__} has {kind} and no table of positions, so it needs none"):
        SparseAttentionUtils.extend_position_embedding(model, 4096)


def test_the_tokenizers_length_is_updated_also_where_it_is_saved(tmp_path):
    from tokenizers import Tokenizer, models

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), model_max_length=512
    )
    assert SparseAttentionUtils.update_tokenizer_model_max_length(tokenizer, 4096) is tokenizer
    tokenizer.save_pretrained(tmp_path)
    loaded = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert tokenizer.model_max_length == loaded.model_max_length == 4096


@both
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("whole_model", [True, False])
def test_replaced_layers_compute_what_the_untouched_model_does(family, implementation, whole_model):
    model, batch = make(family, implementation), make_batch()
    keep = batch["attention_mask"] != 0
    before = model(**batch).logits[keep]
    parameters = list(model.parameters())
    layers, structure = getattr(model, family[1]).encoder.layer, DenseSparsityConfig(HEADS, BLOCK)
    if whole_model:
        replace = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention
        assert replace(model, 64, structure) is model
    else:
        replace = SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer
        assert replace(model.config, layers, structure) is layers
    assert all(isinstance(layer.attention.self, BertSparseSelfAttention) for layer in layers)
    assert {id(p) for p in model.parameters()} == {id(p) for p in parameters}
    torch.testing.assert_close(model(**batch).logits[keep], before, rtol=1e-4, atol=1e-5)
    model.train()
    model(**batch, labels=batch["input_ids"]).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "query" in name)


def test_replaced_layers_share_one_layout_of_the_length_asked_for_and_the_mode_of_the_model():
    model = make(BERT)
    structure = ds_sparse.BigBirdSparsityConfig(HEADS, BLOCK)
    SparseAttentionUtils.extend_position_embedding(model, 100)
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(model, 100, structure)
    first, second = (layer.attention.self for layer in model.bert.encoder.layer)
    assert first.sparse_self_attention.max_seq_length == 112 and not first.training and not second.training
    assert torch.equal(first.sparse_self_attention.master_layout, second.sparse_self_attention.master_layout)
    assert torch.isfinite(model(**make_batch(100)).logits).all()


def test_a_replaced_model_makes_no_mask_of_tokens_by_tokens():
    model = make(BERT)
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(model, 64)
    seen = []
    layer = model.bert.encoder.layer[0].attention.self
    layer.register_forward_pre_hook(lambda _, args, named: seen.append(named["attention_mask"].shape), with_kwargs=True)
    model(**make_batch())
    assert seen == [(2, 50)]


def test_what_cannot_be_replaced_is_an_error():
    replace = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention
    with pytest.raises(ValueError, match='It currently only supports "bert" & "roberta"! Linear has no encoder.layer'):
        replace(nn.Linear(2, 2), 64)
    with pytest.raises(
        ValueError, match="max_position is 100, and the model has 64 positions; extend_position_embedding"
    ):
        replace(make(ROBERTA), 100)
    with pytest.raises(ValueError, match="4 attention heads and the sparsity config num_heads=12"):
        replace(make(BERT), 64, FixedSparsityConfig(12))
    decoder = transformers.BertLMHeadModel(transformers.BertConfig(**SIZES, is_decoder=True))
    with pytest.raises(ValueError, match="this BertConfig is a decoder's"):
        replace(decoder, 64)
    asking = make(BERT, "eager")
    asking.config.output_attentions = True
    with pytest.raises(ValueError, match="this BertConfig has output_attentions"):
        replace(asking, 64)
    sparse = make(BERT)
    ds_sparse.sparsify(sparse, {"mode": "fixed"})
    with pytest.raises(ValueError, match="bert.encoder.layer.0.attention.self of BertForMaskedLM is sparse already"):
        replace(sparse, 64)


def test_replacing_leaves_another_model_with_the_same_config_alone():
    config = transformers.BertConfig(**SIZES, max_position_embeddings=64)
    model, other = transformers.BertModel(config).eval(), transformers.BertModel(config).eval()
    batch = make_batch()
    before = other(**batch).last_hidden_state
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(model, 64)
    assert torch.equal(other(**batch).last_hidden_state, before)


@pytest.mark.parametrize(
    ("mask", "filled"),
    [
        (torch.tensor([[1.0, 1.0, 0.0]]), 0.0),
        (torch.tensor([[1.0, 1.0, 1.0]], dtype=torch.float16), 0.0),
        (torch.tensor([[0.0, 0.0, 0.0]]), torch.finfo(torch.float32).min),
        (torch.zeros(1, 1, 1, 3, dtype=torch.float16), torch.finfo(torch.float16).min),
        (torch.tensor([[0.0, 0.0, -10000.0]], dtype=torch.bfloat16), torch.finfo(torch.bfloat16).min),
        (torch.tensor([[1, 1, 0]]), 0),
        (torch.tensor([[True, True, False]]), False),
    ],
)
def test_padding_of_a_mask_is_what_no_query_sees(mask, filled):
    """A float mask of 0 and 1 keeps where it is 1, as old scripts have it; the lowest number would keep, too."""
    _, _, padded, *_ = pad(4, torch.ones(1, 3, dtype=torch.long), mask, None, None, None, pad_token_id=0)
    assert padded.dtype == mask.dtype
    assert padded[..., :3].equal(mask) and (padded[..., 3] == filled).all()
