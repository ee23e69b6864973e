"""The table of families of Transformers models: `sparsify` is asked of a tiny model of each."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from ...models.report import SparsifyReport
from ...models.sparsify import sparsify
from .binding import makes_positions
from .checkpoint import quiet

_TEXT = {
    "vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MODERN = _TEXT | {"cls_token_id": 1, "sep_token_id": 2}
_PICTURE = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
_T5 = {"vocab_size": 20, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
_TWO_SIDES = {"vocab_size": 20, "d_model": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
for _side in ("encoder", "decoder"):
    _TWO_SIDES |= {f"{_side}_layers": 2, f"{_side}_attention_heads": 2, f"{_side}_ffn_dim": 16}
_WHISPER = {"num_mel_bins": 8, "max_source_positions": 30, "max_target_positions": 20, "decoder_start_token_id": 1}
_TOWERS = {"text_config": _TEXT, "vision_config": _PICTURE}
_WAVES = {"conv_dim": [8, 8], "conv_kernel": [10, 8], "conv_stride": [8, 8], "num_feat_extract_layers": 2}
_WAVES |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
_LOCAL = {"head_dim": 8, "num_key_value_heads": 1, "sliding_window": 4}
_CHOOSING = {"layer_types": ["full_attention", "minimax_m3_sparse"], "num_key_value_heads": 1, "head_dim": 8}
_CHOOSING |= {"rotary_dim": 4, "index_n_heads": 1, "index_head_dim": 8, "mlp_layer_types": ["dense"] * 2}
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_LATENT |= {"moe_intermediate_size": 8, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
_LATENT |= {"index_head_dim": 16, "index_n_heads": 2}
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": {"rope_type": "default"}}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("BertModel", _TEXT),
    "RoBERTa": ("RobertaModel", _TEXT),
    "XLM-RoBERTa": ("XLMRobertaModel", _TEXT),
    "CamemBERT": ("CamembertModel", _TEXT),
    "ELECTRA": ("ElectraModel", _TEXT | {"embedding_size": 16}),
    "DistilBERT": ("DistilBertModel", {"vocab_size": 20, "dim": 16, "hidden_dim": 16, "n_heads": 2, "n_layers": 2}),
    "ALBERT": ("AlbertModel", _TEXT | {"embedding_size": 16}),
    "ESM-2": ("EsmModel", _TEXT | {"position_embedding_type": "rotary"}),
    "GTE": ("GteModel", _TEXT),
    "NomicBERT": ("NomicBertModel", _TEXT),
    "Jina v3": ("JinaEmbeddingsV3Model", _TEXT),
    "EuroBERT": ("EuroBertModel", _TEXT | {"mask_token_id": 3}),
    "ModernBERT": ("ModernBertModel", _MODERN),
    "UltraBERT": ("UltrabertModel", _MODERN),
    "EmbeddingGemma": ("Gemma3TextModel", _TEXT | _LOCAL | {"use_bidirectional_attention": True}),
    "EmbeddingGemma 2": ("EmbeddingGemma2TextModel", _TEXT | _LOCAL | {"global_head_dim": 8}),
    "LayoutLM": ("LayoutLMModel", _TEXT),
    "T5": ("T5Model", _T5),
    "UMT5": ("UMT5Model", _T5),
    "BART": ("BartModel", _TWO_SIDES),
    "Pegasus": ("PegasusModel", _TWO_SIDES),
    "LED": ("LEDModel", _TWO_SIDES | {"attention_window": 8}),
    "Whisper": ("WhisperModel", _TWO_SIDES | _WHISPER),
    "Wav2Vec2": ("Wav2Vec2Model", _PICTURE | _WAVES),
    "ViT": ("ViTModel", _PICTURE),
    "CLIP": ("CLIPModel", _TOWERS),
    "SigLIP": ("SiglipModel", _TOWERS),
    "Swin": ("SwinModel", {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "image_size": 32, "window_size": 2}),
    "DeBERTa": ("DebertaModel", _TEXT),
    "Longformer": ("LongformerModel", _TEXT | {"attention_window": 8}),
    "BigBird": ("BigBirdModel", _TEXT),
    "MPNet": ("MPNetModel", _TEXT),
    "Megatron-BERT": ("MegatronBertModel", _TEXT),
    "FNet": ("FNetModel", {key: _TEXT[key] for key in ("vocab_size", "hidden_size", "intermediate_size")}),
    "GPT-NeoX": ("GPTNeoXModel", _TEXT),
    "GPT-2": ("GPT2Model", {"vocab_size": 20, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "Llama": ("LlamaModel", _TEXT),
    "Mistral": ("MistralModel", _TEXT | {"head_dim": 8, "num_key_value_heads": 1}),
    "Qwen3": ("Qwen3Model", _TEXT | {"head_dim": 8, "num_key_value_heads": 1}),
    "Gemma 2": ("Gemma2Model", _TEXT | _LOCAL),
    "Gemma 3": ("Gemma3TextModel", _TEXT | _LOCAL),
    "GPT-OSS": ("GptOssModel", _TEXT | _LOCAL | _EXPERTS),
    "MiniMax-M3": ("MiniMaxM3VLTextModel", _TEXT | _CHOOSING),
    "DeepSeek-V3.2": ("DeepseekV32Model", _TEXT | _LATENT),
    "GLM-5": ("GlmMoeDsaModel", _TEXT | _LATENT),
}
"""Family to a class of Transformers and a small config for it."""


class Row(NamedTuple):
    """A family's name, what happens to it, and why."""

    family: str
    what: str
    why: str


def rows(families: Iterable[str] = FAMILIES) -> Iterator[Row]:
    """Tries each of these families, by the models of the Transformers that is installed."""
    for family in families:
        name, sizes = FAMILIES[family]
        cls = getattr(transformers, name, None)
        if cls is None:
            yield Row(family, "unknown", f"transformers {transformers.__version__} has no {name}")
        else:
            yield Row(family, *_what_and_why(cls, sizes))


def markdown(table: Iterable[Row]) -> str:
    """The rows as a table of the documentation, a line for all families of which the same is said."""
    families: dict[tuple[str, str], list[str]] = {}
    for row in table:
        families.setdefault((row.what, row.why), []).append(row.family)
    lines = ["| family | what happens | why |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {', '.join(names)} | {what} | {why} |" for (what, why), names in families.items())])


def _what_and_why(cls: type[Any], sizes: dict[str, Any]) -> tuple[str, str]:
    with quiet(), warnings.catch_warnings(action="ignore"), redirect_stdout(StringIO()), torch.device("meta"):
        model = cls(cls.config_class(**sizes))
        try:
            report = sparsify(model, {"mode": "dense"})
        except ValueError as error:
            return "refused", _short(str(error))
    return _what(report), "; ".join(_notes(model, report)) or "on Transformers' attention interface"


def _short(refusal: str) -> str:
    """Why a model is refused, and what it may be converted to, without what else there is."""
    why, _, others = refusal.partition("; ")
    _, command, made = others.partition("ds_sparse convert")
    return f"{why}; {command}{made.rstrip('.')}" if command else why


def _what(report: SparsifyReport) -> str:
    windows, choices = (any(own in heading for heading in report.headings) for own in ("own window", "own choice"))
    parts = ["sparse", *(["local layers in the model's own window"] if windows else [])]
    parts += ["layers with an indexer in the blocks that it chooses"] if choices else []
    return ", ".join([*parts, *(["part stays dense"] if report.dense else [])])


def _notes(model: nn.Module, report: SparsifyReport) -> Iterator[str]:
    yield from dict.fromkeys(layer.why for layer in report.dense)
    if any(map(makes_positions, model.modules())):
        yield "its relative positions are a bias by distance, with gradient"
    if any("2048 tokens" in heading for heading in report.headings):
        yield "it knows no longest sequence, so layouts double with the batch"
