"""Sequence-parallel models of Transformers against the same models on one rank."""

from __future__ import annotations

import copy
from unittest import mock

import cases
import torch
import transformers
from cases import BLOCK, DEVICE, WIDE, assert_same, case, case_on_cpu, in_lines, refusal, run_all, slow_case
from torch import distributed

import ds_sparse
from ds_sparse.integrations.transformers.sequence import EVALUATES_ALONE, MODEL_TYPES
from ds_sparse.sequence.exchange import Exchange, RanksOfSequence

TOKENS = 165
TEXT = cases.TEXT | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT = TEXT | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DISTILBERT = {
    "vocab_size": 50, "dim": 32, "hidden_dim": 32, "n_heads": 4, "n_layers": 2, "max_position_embeddings": 256,
    "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
GROUPED = TEXT | {"num_key_value_heads": 2, "head_dim": 8}
MODELS = {
    "BertForMaskedLM": BERT,
    "RobertaForMaskedLM": BERT,
    "XLMRobertaForTokenClassification": BERT,
    "CamembertForMaskedLM": BERT,
    "ElectraForMaskedLM": BERT | {"embedding_size": 16},
    "AlbertForMaskedLM": BERT | {"embedding_size": 16},
    "DistilBertForMaskedLM": DISTILBERT,
    "ModernBertForMaskedLM": TEXT | {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 32},
    "EuroBertForMaskedLM": TEXT | {"mask_token_id": 3},
    "GPTNeoXForCausalLM": TEXT | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "LlamaForCausalLM": TEXT | {"num_key_value_heads": 1},
    "MistralForCausalLM": GROUPED | {"sliding_window": None},
    "Qwen3ForCausalLM": GROUPED,
}
[getattr(transformers, name) for name in MODELS]  # imported before ranks are forks


def make(name="BertForMaskedLM", **more):
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**MODELS[name] | more)).to(DEVICE, WIDE)
    ds_sparse.sparsify(model, BLOCK)
    return model


def batch_of(name):
    """One row that is filled, and one whose second half is padding, so that the last rank has no label of it."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 50, (2, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 60:] = 0
    ids[1, 60:] = 0
    drawn = (torch.rand(ids.shape, generator=generator) < 0.2) & (mask == 1)
    labels = torch.where(drawn, ids % 2 if "Token" in name else ids, -100)
    return {name: x.to(DEVICE) for name, x in {"input_ids": ids, "attention_mask": mask, "labels": labels}.items()}


def step(model, batch):
    """The loss and the gradients of one backward."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def small(grads):
    """What a gradient that is zero but for rounding, as that of a key's bias, is held to."""
    return 0.05 * max(grad.abs().max().item() for grad in grads)


def assert_step_is(model, batch, wanted):
    loss, grads = step(model, batch)
    assert_same(loss, wanted[0])
    for grad, of_one in zip(grads, wanted[1], strict=True):
        assert_same(RanksOfSequence().sum_of(grad), of_one, at_least=small(wanted[1]))


@case
def models_have_the_loss_and_gradients_of_one_rank():
    types = set()
    for name in MODELS:
        model, batch = make(name), batch_of(name)
        wanted = step(model, batch)
        ds_sparse.sequence_parallel(model)
        assert_step_is(model, batch, wanted)
        types.add(model.config.model_type)
    assert types == set(MODEL_TYPES)


@case
def without_a_mask_and_where_a_rank_has_no_labels():
    for name in ("RobertaForMaskedLM", "GPTNeoXForCausalLM"):
        model, batch = make(name), batch_of(name)
        del batch["attention_mask"]
        batch["labels"][:, 70:] = -100
        wanted = step(model, batch)
        ds_sparse.sequence_parallel(model)
        assert_step_is(model, batch, wanted)


@case
def packed_documents_have_the_loss_and_gradients_of_one_rank():
    lengths = torch.tensor([100, 1, 30, 2 * TOKENS - 131])  # of two rows as one, whose border of ranks is in the last
    ids = torch.randint(3, 50, (1, 2 * TOKENS), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    starts = cu_seqlens[:-1].long().repeat_interleave(lengths)
    positions = (torch.arange(2 * TOKENS) - starts)[None].to(DEVICE)
    told = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 199, "max_length_k": 199}
    two_rows = {"input_ids": ids.view(2, -1), "position_ids": torch.arange(TOKENS, device=DEVICE)[None] % 60}
    for name in (
        "BertForMaskedLM",
        "RobertaForMaskedLM",
        "ModernBertForMaskedLM",
        "LlamaForCausalLM",
        "Qwen3ForCausalLM",
    ):
        model = make(name)
        packed = [
            {"input_ids": ids, **told},
            {"input_ids": ids, "position_ids": positions + 1 if "Roberta" in name else positions},
            two_rows,
        ]
        packed = [batch | {"labels": batch["input_ids"]} for batch in packed]
        wanted = [step(model, batch) for batch in packed]
        parallel = ds_sparse.sequence_parallel(model)
        for batch, of_one in zip(packed, wanted, strict=True):
            assert_step_is(model, batch, of_one)
        parallel.undo()


@case
def models_with_windows_exchange_keys_and_may_have_fewer_heads_than_ranks():
    tokens = 600  # in parts of whole blocks
    ids = torch.randint(3, 50, (2, tokens), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[1, 250:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    for name, heads in (("BertForMaskedLM", 1), ("LlamaForCausalLM", 4), ("ModernBertForMaskedLM", 4)):
        torch.manual_seed(0)
        cls = getattr(transformers, name)
        sizes = MODELS[name] | {"num_attention_heads": heads, "max_position_embeddings": tokens}
        model = cls(cls.config_class(**sizes)).to(DEVICE, WIDE)
        ds_sparse.sparsify(model, {"mode": "bslongformer", "block": 16})
        wanted = step(model, batch)
        ds_sparse.sequence_parallel(model)
        with mock.patch.object(Exchange, "to_heads", side_effect=AssertionError("heads were exchanged")):
            assert_step_is(model, batch, wanted)


@case
def base_models_take_packed_documents():
    model, ids = make().bert.eval(), torch.arange(TOKENS, device=DEVICE)[None] % 50
    with torch.no_grad():
        wanted = model(input_ids=ids, position_ids=ids).last_hidden_state
        ds_sparse.sequence_parallel(model)
        own = model(input_ids=ids, position_ids=ids).last_hidden_state
    first = 83 * distributed.get_rank()
    assert_same(own, wanted[:, first : first + own.shape[1]])


@case
def sixteen_bits():
    for name in ("BertForMaskedLM", "LlamaForCausalLM"):
        model, batch = make(name).bfloat16(), batch_of(name)
        wanted = step(model, batch)
        ds_sparse.sequence_parallel(model)
        assert_step_is(model, batch, wanted)


@case
def the_loss_is_divided_by_the_items_of_a_batch():
    for name, first in (("BertForMaskedLM", 0), ("LlamaForCausalLM", 1)):
        model, batch = make(name), batch_of(name)
        labelled = (batch["labels"][:, first:] != -100).sum()
        wanted = step(model, batch)[0] * labelled / 1000
        ds_sparse.sequence_parallel(model)
        assert_same(step(model, batch | {"num_items_in_batch": torch.tensor(1000.0)})[0], wanted)
        model.eval()  # where each rank may have a batch of its own
        other = batch | {"input_ids": (batch["input_ids"] + distributed.get_rank()) % 50}
        loss = model(**other).loss
        assert_same(model(**other, num_items_in_batch=1000).loss, loss * labelled / 1000)
        if distributed.get_rank() == 1:
            other["labels"] = torch.full_like(other["labels"], -100)
        loss = model(**other, num_items_in_batch=1000).loss
        assert (loss == 0) if distributed.get_rank() == 1 else (loss > 0)


@case
def activation_checkpointing_and_two_forwards_before_a_backward():
    model, batch = make(), batch_of("BertForMaskedLM")
    shorter = {key: value[:, :100].contiguous() for key, value in batch.items()}
    first, second = step(model, batch), step(model, shorter)
    ds_sparse.sequence_parallel(model)
    model.gradient_checkpointing_enable()
    with in_lines():
        assert_step_is(model, batch, first)
    model.zero_grad()
    (model(**batch).loss + model(**shorter).loss).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    for grad, *of_one in zip(grads, first[1], second[1], strict=True):
        assert_same(RanksOfSequence().sum_of(grad), sum(of_one), at_least=small(grads))


@case
def attention_dropout_trains_and_is_repeated_by_checkpoints():
    model, batch = make(), batch_of("BertForMaskedLM")
    model.config.attention_probs_dropout_prob = 0.3
    for module in model.modules():
        if hasattr(module, "dropout") and "SelfAttention" in type(module).__name__:
            module.dropout.p = 0.3
    ds_sparse.sequence_parallel(model)
    torch.manual_seed(distributed.get_rank())
    plain = step(model, batch)
    model.gradient_checkpointing_enable()
    torch.manual_seed(distributed.get_rank())
    again = step(model, batch)
    torch.manual_seed(7)
    other = step(model, batch)
    assert any((x - y).abs().max() > 0.01 * x.abs().max() for x, y in zip(plain[1], other[1], strict=True))
    for one, other in zip((plain[0], *plain[1]), (again[0], *again[1]), strict=True):
        assert_same(one, other, at_least=small(plain[1]))


@slow_case("compiles for 10 seconds on each rank")
def a_compiled_model_computes_attention_outside_of_its_graphs():
    model, batch = make(), batch_of("BertForMaskedLM")
    wanted = step(model, batch)
    ds_sparse.sequence_parallel(model)
    with in_lines():
        assert_step_is(torch.compile(model, backend="aot_eager"), batch, wanted)
    torch._dynamo.reset()
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    said = refusal(lambda: whole(**batch), torch._dynamo.exc.Unsupported)
    assert "outside of graphs: compile without fullgraph=True" in said


@case
def tuples_evaluation_and_undo():
    model, batch = make(), batch_of("BertForMaskedLM")
    loss, logits = model(**batch, return_dict=False)
    parallel = ds_sparse.sequence_parallel(model)
    own_loss, own_logits = model(**batch, return_dict=False)
    assert_same(own_loss, loss)
    model.eval()
    with torch.no_grad():
        own = model(batch["input_ids"], batch["attention_mask"]).logits
    first = 83 * distributed.get_rank()
    assert_same(own, logits[:, first : first + own.shape[1]])
    assert_same(own_logits, own)
    parallel.undo()
    assert_same(model(**batch).loss, loss)


@case
def a_model_that_evaluated_alone_shares_sequences_again_after_undo():
    model, batch = make().eval(), batch_of("BertForMaskedLM")
    vars(model)[EVALUATES_ALONE] = True  # as the Trainer's loader leaves it
    tokens = []
    for _ in range(2):
        parallel = ds_sparse.sequence_parallel(model)
        tokens.append(model(**batch).logits.shape[1])
        parallel.undo()
    assert tokens == [TOKENS, 83 - distributed.get_rank()]


@case
def batches_that_cannot_be_cut_are_refused_on_all_ranks():
    model, batch = make(), batch_of("BertForMaskedLM")
    ds_sparse.sequence_parallel(model)
    other = copy.deepcopy(batch)
    other["input_ids"] += distributed.get_rank()
    assert "given different batches" in refusal(lambda: model(**other))
    turned = {key: value.flip(0) if distributed.get_rank() else value for key, value in batch.items()}
    assert "given different batches" in refusal(lambda: model(**turned))
    types = torch.full_like(batch["input_ids"], distributed.get_rank())
    assert "given different batches" in refusal(lambda: model(**batch, token_type_ids=types))
    shorter = {key: value[:, : 160 - distributed.get_rank()] for key, value in batch.items()}
    assert "(of 2 x 160, 2 x 159 tokens)" in refusal(lambda: model(**shorter))
    ids, labels = batch["input_ids"], batch["labels"]
    packed = torch.arange(TOKENS, device=DEVICE)[None] % (50 + distributed.get_rank())
    assert "given different batches" in refusal(lambda: model(input_ids=ids, labels=labels, position_ids=packed))
    told = {"cu_seq_lens_q": torch.tensor([0, 100, 2 * TOKENS])}
    assert "without cu_seq_lens_k" in refusal(lambda: model(input_ids=ids, labels=labels, **told))
    edges = torch.tensor([0, 100 + distributed.get_rank(), 2 * TOKENS])
    told = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges}
    assert "given different batches" in refusal(lambda: model(input_ids=ids, labels=labels, **told))
    assert "without labels" in refusal(lambda: model(input_ids=ids))
    assert "no input_ids" in refusal(lambda: model(inputs_embeds=torch.ones(2, TOKENS, 32)))
    pairs = batch | {"attention_mask": torch.ones(2, 1, TOKENS, TOKENS)}
    assert "attention_mask has shape" in refusal(lambda: model(**pairs))
    short = {key: value[:, :1] for key, value in batch.items()}
    assert "sequences of 1 tokens for 2 ranks" in refusal(lambda: model(**short))
    assert "call the whole model" in refusal(lambda: model.bert(ids))


@case_on_cpu
def models_that_cannot_be_cut_are_refused():
    parallel = ds_sparse.sequence_parallel

    def sparse(cls, config):
        model = cls(config)
        ds_sparse.sparsify(model, {"mode": "fixed", "block": 16})
        return model

    config = transformers.BertConfig(**BERT)
    assert "is not sparse" in refusal(lambda: parallel(transformers.BertForMaskedLM(config)))
    pooled = sparse(transformers.BertModel, config)
    assert "not one of each token" in refusal(lambda: parallel(pooled))
    assert "not one of each token" in refusal(lambda: parallel(sparse(transformers.BertLMHeadModel, config)))
    esm = transformers.EsmConfig(**BERT, position_embedding_type="rotary")
    assert "a esm model" in refusal(lambda: parallel(sparse(transformers.EsmForMaskedLM, esm)))
    one_head = transformers.BertConfig(**BERT | {"num_attention_heads": 1})
    dense_layer = transformers.BertForMaskedLM(one_head)
    ds_sparse.sparsify(dense_layer, {"mode": "fixed", "block": 16, "layers": {"1": None}})
    assert "at most 1 ranks can hold a sequence" in refusal(lambda: parallel(dense_layer))
    dropping = transformers.BertConfig(**BERT | {"num_attention_heads": 1, "attention_probs_dropout_prob": 0.1})
    few = sparse(transformers.BertForMaskedLM, dropping)
    assert "without attention dropout" in refusal(lambda: parallel(few))
    ids = torch.full((1, 10), 7)
    few = sparse(transformers.BertForMaskedLM, one_head)
    parallel(few)
    assert "where every rank has whole blocks" in refusal(lambda: few(input_ids=ids, labels=ids))
    model = make()
    parallel(model)
    assert "it is already" in refusal(lambda: parallel(model))
    assert "holds 0 models" in refusal(lambda: parallel(torch.nn.Linear(2, 2)))


run_all()
