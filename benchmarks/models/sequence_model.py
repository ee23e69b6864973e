"""The model that `python -m benchmarks sequence` trains: BERT whose loss takes logits of labelled tokens alone, under
DeepSpeed, with what long sequences ask for."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from benchmarks.models import bert_results
from benchmarks.models.bert import bert_config, built
from benchmarks.models.sequence_results import KEPT, OFFLOADED, SEQUENCE, Case
from ds_sparse.bench.cases import IN_BERT
from ds_sparse.config.block import sparse_attention_block
from ds_sparse.extras import optional_imports

with optional_imports():
    import deepspeed
    import transformers
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
    from transformers import BertConfig, BertForMaskedLM
    from transformers.modeling_outputs import MaskedLMOutput

from ds_sparse.integrations.deepspeed import initialize

FLAG = argparse.Namespace(deepspeed_sparse_attention=True)

IGNORED = -100
"""The label of a token that is not in the loss."""


class LabelledBertForMaskedLM(BertForMaskedLM):
    """BERT whose logits are those of tokens with a label alone, in some chunks. Each chunk but a single one is computed
    again in backward, so that logits of one are there at a time."""

    chunks = 1

    def forward(self, input_ids: Tensor, labels: Tensor, **rest: Any) -> MaskedLMOutput:
        hidden = self.bert(input_ids, **rest).last_hidden_state
        places = (labels.flatten() != IGNORED).nonzero()[:, 0]
        chosen, answers = hidden.flatten(0, 1)[places], labels.flatten()[places]
        call = partial(checkpoint, self.sum_of_losses, use_reentrant=False) if self.chunks > 1 else self.sum_of_losses
        losses = [call(*both) for both in zip(chosen.chunk(self.chunks), answers.chunk(self.chunks), strict=True)]
        return MaskedLMOutput(loss=torch.stack(losses).sum() / len(places))

    def sum_of_losses(self, hidden: Tensor, answers: Tensor) -> Tensor:
        return cross_entropy(self.cls(hidden).float(), answers, reduction="sum")


def require_heads(ranks: int, device: str) -> None:
    """Raises ValueError where ranks that share a sequence are more than the model's heads."""
    heads = BertConfig(**bert_results.MODEL[device]).num_attention_heads
    if ranks > heads:
        raise ValueError(
            f"--ranks {ranks}: the model has {heads} heads, and each rank that shares a sequence wants one; give "
            f"{heads} ranks or fewer, or --parallel data."
        )


def make_model(case: Case, device: torch.device) -> LabelledBertForMaskedLM:
    """In training mode, without dropout, the same numbers at every call."""
    config = bert_config(bert_results.Case(case.seq_len, 0.0, case.dtype, case.device))
    model = built(LabelledBertForMaskedLM, config, case, device)
    if case.activations != KEPT:
        # The reentrant way hands a layer's input to autograd, where `saved` meets it; the other keeps it to itself.
        model.gradient_checkpointing_enable({"use_reentrant": case.activations == OFFLOADED})
    if case.tiles > 1:
        model.chunks = case.tiles
        for layer in model.bert.encoder.layer:
            # A method, whose layer is copied with it where a copy of the model is tried.
            layer.tiles, layer.feed_forward_chunk = case.tiles, MethodType(tiled_mlp, layer)
    return model


def tiled_mlp(layer: Any, hidden: Tensor) -> Tensor:
    """A BERT layer's MLP over parts of the tokens, one after the other, and again in backward, as DeepSpeed has it."""
    parameters = [*layer.intermediate.parameters(), *layer.output.parameters()]
    return TiledMLP.apply(type(layer).feed_forward_chunk, layer, hidden, layer.tiles, parameters)


def saved(case: Case) -> AbstractContextManager[Any]:
    """Around a forward: where what it saves for backward goes."""
    if case.activations == OFFLOADED:
        return torch.autograd.graph.save_on_cpu(pin_memory=case.device == "cuda")
    return nullcontext()


def make_engine(model: BertForMaskedLM, case: Case, ranks: int, parallel: str) -> Any:
    """DeepSpeed's engine around a model, its sequences shared or not."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case.sequences,
        "gradient_accumulation_steps": case.micro_batches,
        "bf16": {"enabled": case.dtype == "bf16"},
        "zero_optimization": {"stage": case.zero_stage},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True, "fused": True}},
        "sparse_attention": sparse_attention_block(IN_BERT[case.structure](model.config.num_attention_heads)),
    }
    if parallel == SEQUENCE:
        config["sequence_parallel_size"] = ranks
    engine, *_ = initialize(FLAG, model, model_parameters=model.parameters(), config=config)
    return engine


def versions() -> dict[str, str]:
    return {"transformers": transformers.__version__, "deepspeed": deepspeed.__version__}
