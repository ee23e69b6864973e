"""What is counted of a model, held to what PyTorch counts of Transformers' own."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ds_sparse.plan.model import find_model
from ds_sparse.plan.operations import layer, whole_model

transformers = pytest.importorskip("transformers")

BATCH, TOKENS = 2, 128
SIZES = {
    "vocab_size": 200,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 160,
    "max_position_embeddings": TOKENS + 2,
    **{f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")},
}
CONFIGS = {
    "bert": transformers.BertConfig(**SIZES),
    "roberta": transformers.RobertaConfig(**SIZES),
    "modernbert": transformers.ModernBertConfig(**SIZES),
    "gpt_neox": transformers.GPTNeoXConfig(**SIZES),
    "llama": transformers.LlamaConfig(**SIZES, num_key_value_heads=2),
}


class Kernel(torch.autograd.Function):
    """In the place of attention: keeps what it keeps, and multiplies nothing."""

    @staticmethod
    def forward(ctx, query, key, value):
        ctx.shared = query.shape[1] // key.shape[1]
        out = (value.repeat_interleave(ctx.shared, 1) + 0 * query).transpose(1, 2).contiguous()
        ctx.save_for_backward(query, key, value, out, torch.zeros(query.shape[:3]))
        return out

    @staticmethod
    def backward(ctx, grad):
        grad = grad.transpose(1, 2).contiguous()
        of_key = grad.unflatten(1, (-1, ctx.shared)).sum(2)
        return grad, of_key, of_key.clone()


transformers.AttentionInterface.register("kernel_of_plan", lambda _, q, k, v, *a, **b: (Kernel.apply(q, k, v), None))


@pytest.mark.parametrize("family", CONFIGS)
def test_parameters_flops_and_what_waits_for_backward_are_those_of_the_model(family, tmp_path):
    config = CONFIGS[family]
    config.save_pretrained(tmp_path)
    mine = find_model(str(tmp_path))
    causal = family in ("gpt_neox", "llama")
    make = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForMaskedLM
    model = make.from_config(config, attn_implementation="kernel_of_plan").bfloat16().train()
    assert mine.parameters(TOKENS + 2 if family in ("bert", "roberta") else TOKENS) == model.num_parameters()

    own = {x.untyped_storage().data_ptr() for x in [*model.parameters(), *model.buffers()]}
    kept = {}

    def keep(x):
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x  # the tensor too, or its memory is used again
        return x

    tokens = torch.randint(4, 200, (BATCH, TOKENS))
    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(input_ids=tokens, labels=tokens).loss.backward()
    work = whole_model(mine).both
    assert (work.flops + work.odd_flops) * tokens.numel() == counter.get_total_flops()
    saved = sum(x.untyped_storage().nbytes() for x in kept.values()) / tokens.numel()
    assert whole_model(mine).saved == pytest.approx(saved, rel=0.1)


def test_without_attention_query_and_key_have_no_backward_pass():
    model = find_model("bert-base")
    with_it, without = layer(model), layer(model, attends=False)
    assert with_it.forward.flops == without.forward.flops
    assert with_it.backward.flops - without.backward.flops == 4 * 2 * model.hidden**2
