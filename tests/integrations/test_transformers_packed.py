"""Documents packed in rows, as Transformers' collator packs them, under attn_implementation="ds_sparse"."""

from unittest import mock

import pytest
import torch
import transformers

import ds_sparse
from ds_sparse.index import PackedIndex, WindowIndex
from ds_sparse.integrations.transformers.packing import Packing, is_causal_within_documents, is_under_way

HEADS, BLOCK, VOCABULARY = 2, 16, 60
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": HEADS,
    "intermediate_size": 32, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODERN = {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 16, "global_attn_every_n_layers": 3}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": HEADS, "n_positions": 64}
GPT2 |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
GROUPED = SIZES | {"head_dim": 16, "num_key_value_heads": 1}
LOCAL = GROUPED | {"sliding_window": 8}
MIXED = LOCAL | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": {"rope_type": "default"}}
ENCODERS = {
    "bert": ("BertForMaskedLM", SIZES | NO_DROPOUT),
    "modernbert": ("ModernBertForMaskedLM", SIZES | MODERN),
    "eurobert": ("EuroBertForMaskedLM", SIZES | {"mask_token_id": 3}),
    "nomicbert": ("NomicBertForMaskedLM", SIZES | NO_DROPOUT),
}
DECODERS = {
    "gpt_neox": ("GPTNeoXForCausalLM", SIZES),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "llama": ("LlamaForCausalLM", GROUPED),
    "mistral": ("MistralForCausalLM", LOCAL),
    "qwen3": ("Qwen3ForCausalLM", GROUPED),
    "gemma3": ("Gemma3ForCausalLM", MIXED | {"query_pre_attn_scalar": 16}),
    "gpt_oss": ("GptOssForCausalLM", MIXED | EXPERTS),
}
STRUCTURE = {"mode": "bigbird", "block": BLOCK, "num_random_blocks": 1, "num_sliding_window_blocks": 1, "seed": 3}
LENGTHS = (20, 1, 47, 33)


def make(name: str, structure: dict = STRUCTURE) -> transformers.PreTrainedModel:
    cls, sizes = (ENCODERS | DECODERS)[name]
    if not hasattr(transformers, cls):
        pytest.skip(f"Transformers {transformers.__version__} has no {cls}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        cls = getattr(transformers, cls)
        model = cls(cls.config_class(**sizes))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    model = model if name == "gpt_oss" else model.double()  # whose experts are products in 32 bits
    ds_sparse.sparsify(model, structure)
    return model


def documents(*lengths: int) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()} for n in lengths]


def collated(*lengths: int, **options) -> dict[str, torch.Tensor]:
    """A batch of Transformers' own collator, without labels."""
    collator = transformers.DataCollatorWithFlattening(**options)
    return {name: x for name, x in collator(documents(*lengths)).items() if name != "labels"}


def run(model: transformers.PreTrainedModel, *batches: dict):
    """Logits of calls (tokens, vocabulary), one call's behind the other's, and the gradients of all parameters."""
    model.zero_grad()
    logits = torch.cat([model(**batch).logits.flatten(0, 1) for batch in batches])
    logits.sin().mean().backward()
    named = model.named_parameters()
    return logits.detach(), {name.removeprefix("_orig_mod."): p.grad.clone() for name, p in named if p.grad is not None}


def assert_same(found, wanted, name: str = "in 32 bits") -> None:
    exact = name not in ("gpt_oss", "gemma3", "in 32 bits")  # rotations and some norms are in 32 bits
    near = {"rtol": 1e-8, "atol": 1e-10} if exact else {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(found[0], wanted[0], **near)
    assert found[1].keys() == wanted[1].keys()
    for key, gradient in found[1].items():
        torch.testing.assert_close(gradient, wanted[1][key], **near, msg=lambda m, key=key: f"{key}: {m}")


def one_by_one(*lengths: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.tensor([doc["input_ids"]])} for doc in documents(*lengths)]


@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
def test_a_flattened_batch_is_as_each_document_alone(name: str, with_lengths: bool):
    model = make(name)
    batch = collated(*LENGTHS, return_flash_attn_kwargs=with_lengths)
    assert ("cu_seq_lens_q" in batch) == with_lengths
    assert_same(run(model, batch), run(model, *one_by_one(*LENGTHS)), name)
    assert not is_under_way()


@pytest.mark.parametrize("name", ["modernbert", "llama"])
def test_rows_of_a_batch_may_have_documents_each(name: str):
    model, lengths = make(name), (20, 12, 5, 27)
    ids = collated(*lengths)["input_ids"].view(2, 32)
    positions = torch.cat([torch.arange(n) for n in lengths]).view(2, 32)
    packed = run(model, {"input_ids": ids, "position_ids": positions})
    assert_same(packed, run(model, *one_by_one(*lengths)), name)
    same = torch.arange(16).repeat(2)[None]  # of both rows
    assert_same(
        run(model, {"input_ids": ids, "position_ids": same}),
        run(model, *({"input_ids": half} for half in ids.view(4, 1, 16))), name,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["modernbert", "gpt_neox"])
def test_gradient_checkpointing_sees_the_same_documents(name: str):
    model = make(name)
    batch = collated(*LENGTHS)
    expected = run(model, batch)
    model.gradient_checkpointing_enable()
    model.train()
    assert_same(run(model, batch), expected, name)


def test_layers_that_stay_dense_keep_to_documents():
    model = make("bert", STRUCTURE | {"layers": {"1": None}})
    assert_same(run(model, collated(*LENGTHS)), run(model, *one_by_one(*LENGTHS)), "bert")


def test_lengths_alone_are_enough():
    model, batch = make("llama"), collated(*LENGTHS, return_flash_attn_kwargs=True)
    del batch["position_ids"]  # rotary positions are relative
    assert_same(run(model, batch), run(model, *one_by_one(*LENGTHS)))


def test_all_layers_of_a_step_share_an_index():
    model = make("modernbert")
    with (
        mock.patch.object(PackedIndex, "build", wraps=PackedIndex.build) as of_blocks,
        mock.patch.object(WindowIndex, "build", wraps=WindowIndex.build) as of_windows,
    ):
        run(model, collated(*LENGTHS))
    assert of_blocks.call_count == 1 and of_windows.call_count == 1


def test_a_trainer_trains_on_flattened_batches(tmp_path):
    model = make("llama").float()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, report_to="none", use_cpu=True,
        learning_rate=1e-2, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    data = documents(*[23] * 16)
    trainer = transformers.Trainer(
        model, arguments, train_dataset=data, data_collator=transformers.DataCollatorWithFlattening()
    )
    before = sum(float(model(**batch, labels=batch["input_ids"]).loss) for batch in one_by_one(*[23] * 16))
    trainer.train()
    after = sum(float(model(**batch, labels=batch["input_ids"]).loss) for batch in one_by_one(*[23] * 16))
    assert after < before


def test_documents_longer_than_the_layout_are_refused_and_longer_rows_are_not():
    model = make("bert")
    assert model(**collated(*[64] * 3)).logits.shape[1] == 192
    llama = make("llama")  # whose layouts may be longer than it was made for, as its positions are computed
    assert llama(**collated(70, 3)).logits.shape[1] == 73


@pytest.mark.parametrize("name", ["modernbert", "llama"])
def test_positions_with_a_mask_are_of_one_text(name: str):
    """As in Transformers: a mask says what there is."""
    model, batch = make(name), collated(20, 20)
    mask = torch.ones_like(batch["input_ids"])
    assert not torch.equal(model(**batch).logits, model(**batch, attention_mask=mask, use_cache=False).logits)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"attention_mask": torch.ones(1, 40)}, "documents that are packed in a row, and attention_mask besides"),
        ({"use_cache": True}, "and use_cache=True besides. Leave that out"),
        ({"cu_seq_lens_k": torch.tensor([0, 21, 40])}, "cu_seq_lens_q and cu_seq_lens_k that are not the same"),
        ({"cu_seq_lens_q": None}, "cu_seq_lens_q and cu_seq_lens_k that are not the same"),
        ({"cu_seq_lens_q": None, "cu_seq_lens_k": None, "seq_idx": torch.zeros(1, 40)}, "seq_idx alone"),
        ({"cu_seq_lens_q": torch.tensor([0, 20]), "cu_seq_lens_k": None}, "The documents have 20 tokens together"),
        ({"output_attentions": True}, "asks the attention for output_attentions"),
    ],
)
def test_what_does_not_go_with_packed_documents_is_refused(given: dict, sentence: str):
    model, batch = make("llama"), collated(20, 20, return_flash_attn_kwargs=True)
    if "seq_idx" in given:
        del batch["position_ids"]
    with pytest.raises(ValueError, match=sentence):
        model(**batch | given)
    assert not is_under_way()
    assert torch.isfinite(model(**batch).logits).all()


def test_a_model_that_keeps_its_documents_to_itself_is_refused():
    model = make("bert")

    class Keeps(torch.nn.Module):
        def __init__(self, layer: torch.nn.Module):
            super().__init__()
            self.layer = layer

        def forward(self, *given, **_):
            return self.layer(*given)

    layers = model.bert.encoder.layer
    layers[0] = Keeps(layers[0])
    with pytest.raises(ValueError, match="is not told of the documents that are packed in its rows"):
        model(**collated(20, 20))


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_under_compile_lengths_are_needed(name: str):
    model, batch = make(name), collated(*LENGTHS, return_flash_attn_kwargs=True)
    compiled = torch.compile(model, backend="eager")
    assert_same(run(compiled, batch), run(model, batch))
    with pytest.raises(Exception, match=r"start again within a row.* has to be given their lengths too"):
        compiled(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    one = {"input_ids": batch["input_ids"][:, :50], "position_ids": torch.arange(50)[None]}
    assert_same(run(compiled, one), run(model, one))
    assert not is_under_way()


def test_positions_say_where_documents_begin():
    packing = Packing.of_positions(torch.tensor([[0, 1, 0, 0, 1, 2], [4, 5, 6, 9, 2, 3]]), 2)
    assert packing.cu_seqlens.tolist() == [0, 2, 3, 6, 9, 10, 12] and packing.longest == 3
    assert Packing.of_positions(torch.arange(3)[None], 2).cu_seqlens.tolist() == [0, 3, 6]


def test_masks_of_packed_documents_are_known_from_others():
    masking = transformers.masking_utils
    inside = masking.packed_sequence_mask_function(torch.zeros(1, 4))
    causal = masking.and_masks(masking.causal_mask_function, inside)
    assert is_causal_within_documents(causal)
    assert is_causal_within_documents(masking.and_masks(masking.sliding_window_causal_mask_function(3), inside))
    assert not is_causal_within_documents(masking.causal_mask_function)
    assert not is_causal_within_documents(masking.or_masks(causal, masking.bidirectional_mask_function))
    assert not is_causal_within_documents(masking.and_masks(causal, lambda *places: places[2] > 2))
