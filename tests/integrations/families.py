"""Tiny models of Transformers by family, and how tests make, run and compare them: the one table for all files here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers

HEADS, VOCABULARY = 4, 99


class Family(NamedTuple):
    """A class of Transformers, the sizes of a tiny model, and what it takes: a name, and the shape of a sequence."""

    cls: Any
    sizes: dict[str, Any]
    inputs: tuple = ("input_ids",)


def newest(name: str) -> type | None:
    """A class that older versions of Transformers, of those that serve, do not have."""
    return getattr(transformers, name, None)


def known(families: dict[str, tuple]) -> dict[str, Family]:
    """Those whose class the installed Transformers has."""
    return {name: Family(*family) for name, family in families.items() if family[0] is not None}


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
SIZES = SMALL | NO_DROPOUT
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODERN = SMALL | TOKENS | {"cls_token_id": 1, "sep_token_id": 2}
LAYERS = {"n_heads": HEADS, "n_layers": 2}
DISTILBERT = {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 64, **LAYERS, "max_position_embeddings": 64}
DISTILBERT |= {"dropout": 0.0, "attention_dropout": 0.0}
RESERVING = SIZES | {"max_position_embeddings": 66}
MASKED = known(
    {
        "bert": (transformers.BertForMaskedLM, SIZES),
        "roberta": (transformers.RobertaForMaskedLM, RESERVING),
        "xlm_roberta": (transformers.XLMRobertaForMaskedLM, RESERVING),
        "electra": (transformers.ElectraForMaskedLM, SIZES | {"embedding_size": 16}),
        "distilbert": (transformers.DistilBertForMaskedLM, DISTILBERT),
        "albert": (transformers.AlbertForMaskedLM, SIZES | {"embedding_size": 16}),
    }
)
"""Encoders with a head and padding, whose layers are all sparse."""

LOCAL = {"layer_types": ["full_attention", "sliding_attention"]}
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 64}
VISION |= {"image_size": 32, "patch_size": 8}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": HEADS, "dropout_rate": 0.0}
T5 |= {"num_layers": 2}
GEMMA = MODERN | LOCAL | {"num_key_value_heads": 2, "head_dim": 8}
CONVOLUTIONS = {"conv_dim": [16, 16], "conv_kernel": [10, 8], "conv_stride": [8, 8], "num_conv_pos_embeddings": 16}
WAVES = VISION | CONVOLUTIONS | {"num_feat_extract_layers": 2, "num_conv_pos_embedding_groups": 4}
WAVES |= dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0)
WAVES |= {"layerdrop": 0.0, "mask_time_prob": 0.0, "mask_feature_prob": 0.0}
PICTURE, SOUND = ("pixel_values", 3, 32, 32), ("input_values", 4000)
ENCODERS = known(
    {
        "embedding_gemma": (
            transformers.Gemma3TextModel,
            GEMMA | {"sliding_window": 16, "use_bidirectional_attention": True},
        ),
        "embedding_gemma2": (
            newest("EmbeddingGemma2TextModel"),
            GEMMA | {"global_head_dim": 8, "sliding_window": 7, "layer_types": LOCAL["layer_types"][::-1]},
        ),
        "esm": (transformers.EsmModel, SIZES | {"pad_token_id": 1, "position_embedding_type": "rotary"}),
        "eurobert": (transformers.EuroBertModel, MODERN | {"num_key_value_heads": 2}),
        "gte": (newest("GteModel"), SIZES),
        "layoutlm": (transformers.LayoutLMModel, SIZES),
        "mistral": (
            transformers.MistralModel,
            MODERN | {"num_key_value_heads": 2, "sliding_window": 9, "is_causal": False},
        ),
        "modernbert": (transformers.ModernBertModel, MODERN | LOCAL | {"local_attention": 14}),
        "modernbert_global": (transformers.ModernBertModel, MODERN | {"layer_types": ["full_attention"] * 2}),
        "nomic_bert": (newest("NomicBertModel"), MODERN),
        "neomme": (newest("NeoMMEModel"), MODERN | LOCAL),
        "mt5_encoder": (transformers.MT5EncoderModel, T5),
        "t5_encoder": (transformers.T5EncoderModel, T5),
        "vit": (transformers.ViTModel, VISION, PICTURE),
        "ultrabert": (newest("UltrabertModel"), MODERN | LOCAL | {"sliding_window": 9}),
        "umt5_encoder": (transformers.UMT5EncoderModel, T5),
        "wav2vec2": (transformers.Wav2Vec2Model, WAVES, SOUND),
    }
)
"""Encoders of every kind, two sparse layers each."""

DECODER = SMALL | {"max_position_embeddings": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
GROUPED = DECODER | {"num_key_value_heads": 2, "head_dim": 8}
CAUSAL_LOCAL = {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"]}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": HEADS, "n_positions": 96}
GPT2 |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
GPT2 |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
EXPERTS |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
DECODERS = known(
    {
        "gpt_neox": (transformers.GPTNeoXForCausalLM, DECODER),
        "gpt2": (transformers.GPT2LMHeadModel, GPT2),
        "llama": (transformers.LlamaForCausalLM, GROUPED),
        "llama_with_a_window_in_its_config": (transformers.LlamaForCausalLM, GROUPED | {"sliding_window": 11}),
        "exaone4": (transformers.Exaone4ForCausalLM, GROUPED | CAUSAL_LOCAL),
        "mistral": (transformers.MistralForCausalLM, GROUPED | {"sliding_window": None}),
        "mistral_local": (transformers.MistralForCausalLM, GROUPED | {"sliding_window": 11}),
        "qwen3": (transformers.Qwen3ForCausalLM, GROUPED),
        "gemma3": (transformers.Gemma3ForCausalLM, GROUPED | CAUSAL_LOCAL | {"query_pre_attn_scalar": 8}),
        "gemma2": (
            transformers.Gemma2ForCausalLM,
            GROUPED | CAUSAL_LOCAL | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 0.5},
        ),
        "gpt_oss": (transformers.GptOssForCausalLM, GROUPED | CAUSAL_LOCAL | EXPERTS),
        "moshi": (transformers.MoshiForCausalLM, DECODER | {"head_dim": 8, "ffn_dim": 64}),
        "bert_decoder": (transformers.BertLMHeadModel, DECODER | NO_DROPOUT | {"is_decoder": True}),
    }
)
"""Decoders, two sparse layers each."""


def make(family: Family, std: float | None = None, **changes: Any) -> Any:
    """A model of a family; with `std`, weights so large that attention decides what is said, in evaluation."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = family.cls(family.cls.config_class(**family.sizes | changes))
        for parameter in () if std is None else model.eval().parameters():
            torch.nn.init.normal_(parameter, std=std)
    return model


def decoder(name: str, **changes: Any) -> Any:
    """A decoder in fp64, but for two that compute in 32 bits: products of experts, and an eager softmax."""
    model = make(DECODERS[name], std=0.3, **changes)
    return model if name in ("gemma2", "gpt_oss") else model.double()


def make_batch(tokens: int = 50, left: int = 0, right: int | None = None, device: str = "cpu") -> dict[str, Any]:
    """Two sequences: one padded on the left, one on the right, by default from a third on; and labels."""
    generator = torch.Generator().manual_seed(tokens)
    mask = torch.ones(2, tokens, dtype=torch.long)
    mask[0, :left], mask[1, tokens // 3 if right is None else tokens - right :] = 0, 0
    ids = torch.randint(5, VOCABULARY, (2, tokens), generator=generator)
    batch = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    batch["labels"] = ids.masked_fill(mask == 0, -100)
    return {name: x.to(device) for name, x in batch.items()}


def make_inputs(kind: tuple = ("input_ids",), tokens: int = 50) -> dict[str, torch.Tensor]:
    """What a family takes, by its `inputs`: a padded batch of texts, or pictures and sounds in fp64."""
    name, *shape = kind
    if shape:
        return {name: torch.randn(2, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}
    return {key: x for key, x in make_batch(tokens).items() if key != "labels"}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def run(model: Any, inputs: dict[str, Any], pick: Callable[[Any], Any], **changes: Any) -> tuple[torch.Tensor, dict]:
    """What is picked of a model's output, for tokens that are no padding, and the gradients of all parameters."""
    model.zero_grad()
    found = pick(model(**inputs | changes))
    if "attention_mask" in inputs and found.shape[:2] == inputs["attention_mask"].shape:
        found = found[inputs["attention_mask"] != 0]
    found.sin().mean().backward()
    return found.detach(), gradients(model)


def assert_close(ours: tuple, truth: tuple, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Compares outputs, and the gradients of the same parameters."""
    torch.testing.assert_close(ours[0], truth[0], rtol=rtol, atol=atol)
    assert ours[1].keys() == truth[1].keys() and ours[1]
    for name, gradient in ours[1].items():
        torch.testing.assert_close(gradient, truth[1][name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
