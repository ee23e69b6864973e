"""Documents packed as Transformers packs them, under attn_implementation="ds_sparse": each is computed alone."""

from unittest import mock

import pytest
import torch
import transformers
from integrations import families
from integrations.families import DECODERS, LOCAL, MODERN, SIZES, VOCABULARY, assert_close, gradients, known
from integrations.pairs import pairs
from torch.nn.functional import cross_entropy

import ds_sparse
from ds_sparse.index import PackedIndex, WindowIndex, lookup, packed
from ds_sparse.integrations.transformers import packing
from ds_sparse.integrations.transformers.family_table import FAMILIES
from ds_sparse.tools.notices import _said

BLOCK = 8
MASKED = {
    "modernbert": (transformers.ModernBertForMaskedLM, MODERN | LOCAL | {"local_attention": 14}),
    "eurobert": (transformers.EuroBertForMaskedLM, MODERN | {"num_key_value_heads": 2, "mask_token_id": 3}),
    "bert": (transformers.BertForMaskedLM, SIZES),
    "roberta": (transformers.RobertaForMaskedLM, SIZES | {"max_position_embeddings": 65, "pad_token_id": 0}),
}
CAUSAL = ("gpt_neox", "gpt2", "llama", "mistral_local", "qwen3", "gemma3", "gpt_oss")
MODELS = known(MASKED) | {name: DECODERS[name] for name in CAUSAL}
BIGBIRD = {"mode": "bigbird", "block": BLOCK, "different_layout_per_head": True, "seed": 3}
LENGTHS = (37, 1, 8, 54, 20)
START_AGAIN = torch.cat([torch.arange(12), torch.arange(8)])[None]
EDGES = torch.tensor([0, 12, 20], dtype=torch.int32)


def make(name: str, device: str = "cpu", block=BIGBIRD, sparse: bool = True, **changes):
    """In eval mode, with weights so large that attention decides what is said."""
    model = families.make(MODELS[name], std=0.3, **changes).to(device)
    if sparse:
        ds_sparse.sparsify(model, block)
    return model if name == "gpt_oss" or device != "cpu" else model.double()  # whose experts are products in 32 bits


def first_position(name: str) -> int:
    return 1 if name == "roberta" else 0  # its padding_idx is 0


def documents(lengths=LENGTHS) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(5, VOCABULARY, (n,), generator=generator).tolist()} for n in lengths]


def collated(name: str, features, device: str = "cpu", **options) -> dict:
    collate = transformers.DataCollatorWithFlattening(position_ids_start=first_position(name), **options)
    batch = collate(features)
    return {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in batch.items()}


def run_packed(model, batch, compiled=None):
    """Loss, logits, and the gradients of all parameters."""
    model.zero_grad()
    output = (model if compiled is None else compiled)(**batch)
    output.loss.backward()
    return output.loss.detach(), output.logits.detach(), gradients(model)


def run_apart(model, features, device: str):
    """Loss of the separate documents, as the collator weighs it: all but the first token of each."""
    model.zero_grad()
    causal = "CausalLM" in type(model).__name__ or "LMHead" in type(model).__name__
    losses, all_logits, count = [], [], 0
    for feature in features:
        ids = torch.tensor([feature["input_ids"]], device=device)
        logits = model(ids, use_cache=False).logits[0] if causal else model(ids).logits[0]
        said = logits[:-1] if causal else logits[1:]
        losses.append(cross_entropy(said.float() if causal else said, ids[0, 1:], reduction="sum"))
        all_logits.append(logits)
        count += len(said)
    loss = sum(losses) / count
    loss.backward()
    return loss.detach(), torch.cat(all_logits)[None].detach(), gradients(model)


def assert_same(ours, truth) -> None:
    in_double = truth[1].dtype == torch.float64
    near = {"rtol": 1e-9, "atol": 1e-9} if in_double else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(ours[1], truth[1], **near)
    # Transformers computes the loss of causal models in 32 bits.
    near = {"rtol": 1e-4, "atol": 1e-5} if in_double else near
    assert_close((ours[0].to(truth[0]), ours[2]), (truth[0], truth[2]), **near)


HOW = {
    "positions": {},
    "cumulative": {"return_position_ids": False, "return_flash_attn_kwargs": True},
    "both": {"return_flash_attn_kwargs": True},
}


@pytest.mark.parametrize("name, how", pairs(MODELS, HOW))
def test_collated_documents_are_computed_as_each_alone(name, how, device):
    model, features = make(name, device), documents()
    batch = collated(name, features, device, **HOW[how])
    assert ("position_ids" in batch) == (how != "cumulative") and "attention_mask" not in batch
    assert_same(run_packed(model, batch), run_apart(model, features, device))


def test_a_training_step_is_captured_and_repeated_with_other_documents(device, monkeypatch):
    """The losses of a CUDA graph are those of steps without it. On a CPU, what a capture does runs at once."""
    borders = [(0, 37, 38, 46, 100, 120), (0, 60, 60, 100, 101, 120), (0, 10, 30, 50, 90, 120)]
    borders += [(0, 64, 120, 120, 120, 120)]
    generator = torch.Generator().manual_seed(2)
    ids, labels = (torch.randint(5, VOCABULARY, (1, 120), generator=generator).to(device) for _ in range(2))

    def losses(captured: bool) -> list[torch.Tensor]:
        model, edges = make("bert", device), torch.tensor(borders[0], dtype=torch.int32, device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=device == "cuda")

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=labels, cu_seq_lens_q=edges, cu_seq_lens_k=edges).loss
            loss.backward()
            optimizer.step()
            return loss.detach()

        graph, stream = None, torch.cuda.Stream() if device == "cuda" else None
        with torch.cuda.stream(stream):
            first = [step().clone() for _ in range(2)]
        if captured and device == "cuda":
            torch.cuda.synchronize()
            optimizer.zero_grad()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                loss = step()
        elif captured:
            for module in (packing, packed, lookup):
                monkeypatch.setattr(module, "is_in_graph", lambda x: True)
            monkeypatch.setattr(packed.Documents, "read", None)  # a capture reads none
        made = []
        for of_batch in borders:
            edges.copy_(torch.tensor(of_batch))
            if graph is None:
                loss = step()
            else:
                graph.replay()
            made.append(loss.clone())
        return first + made

    with torch.random.fork_rng():
        right = losses(captured=False)
        found = losses(captured=True)
    assert len(set(map(float, right))) == len(right)
    torch.testing.assert_close(torch.stack(found), torch.stack(right), rtol=1e-4, atol=1e-5)


def test_a_capture_takes_one_tensor_for_queries_and_keys(monkeypatch):
    monkeypatch.setattr(packing, "is_in_graph", lambda x: True)
    ids, edges = torch.ones(1, 20, dtype=torch.int64), EDGES.clone()
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured, .* give the same tensor as both"):
        make("bert")(input_ids=ids, cu_seq_lens_q=EDGES, cu_seq_lens_k=edges)


@pytest.mark.parametrize("name", MODELS)
def test_several_rows_may_be_packed(name, device):
    model, features = make(name, device), documents((30, 10, 15, 25))
    rows = [collated(name, features[:2], device), collated(name, features[2:], device)]
    batch = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
    truth = run_apart(model, features, device)
    ours = run_packed(model, batch)
    assert ours[1].shape[:2] == (2, 40)
    assert_same((ours[0], ours[1].flatten(0, 1)[None], ours[2]), truth)
    edges = torch.tensor([0, 30, 40, 55, 80], dtype=torch.int32, device=device)
    del batch["position_ids"]
    again = model(**batch, cu_seq_lens_q=edges, cu_seq_lens_k=edges)
    torch.testing.assert_close(again.logits.detach(), ours[1])


@pytest.mark.parametrize("name, first, rows", [("modernbert", 0, 3), ("llama", 30, 1)])
def test_one_row_of_positions_counts_for_all_and_a_jump_forward_begins_a_document(name, first, rows):
    model, ids = make(name), torch.randint(5, VOCABULARY, (rows, 20))
    positions = torch.cat([torch.arange(12), torch.arange(first, first + 8)])[None]
    with torch.no_grad():
        parts = zip(ids.split([12, 8], 1), positions.split([12, 8], 1), strict=True)
        apart = torch.cat([model(part, position_ids=those).logits for part, those in parts], 1)
        torch.testing.assert_close(model(ids, position_ids=positions).logits, apart)


def test_a_buffer_of_documents_may_be_written_anew_before_a_checkpoint_runs_again():
    model, ids, found = make("llama").train(), torch.randint(5, VOCABULARY, (1, 20)), []
    model.gradient_checkpointing_enable()
    for written in (False, True):
        buffer = EDGES.clone()
        loss = model(ids, cu_seq_lens_q=buffer, cu_seq_lens_k=buffer, labels=ids).loss
        if written:
            buffer[1] = 3  # those of the next batch
        model.zero_grad()
        loss.backward()
        found.append(gradients(model))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ["modernbert", "llama"])
def test_arguments_may_be_given_in_their_order(name):
    model, ids = make(name).base_model, torch.randint(5, VOCABULARY, (1, 20))
    with torch.no_grad():
        in_order = model(ids, None, START_AGAIN).last_hidden_state
        assert torch.equal(in_order, model(input_ids=ids, position_ids=START_AGAIN).last_hidden_state)
        embedded = model.get_input_embeddings()(ids)
        by_states = model(inputs_embeds=embedded, position_ids=START_AGAIN).last_hidden_state
    assert torch.equal(in_order, by_states)


def test_rows_of_one_document_are_what_they_were():
    model, ids = make("llama"), torch.randint(5, VOCABULARY, (2, 20))
    edges = torch.tensor([0, 20, 40])
    with mock.patch.object(packing, "PackedDocuments", side_effect=AssertionError), torch.no_grad():
        plain = model(ids).logits
        for given in (
            {"position_ids": torch.arange(20)[None]},
            {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges},
            # The numbers say that they see each other, whatever the positions.
            {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "position_ids": torch.arange(20).expand(2, -1)},
        ):
            assert torch.equal(model(ids, **given).logits, plain)


def test_explicit_numbers_count_more_than_positions():
    model, ids = make("llama", block={"mode": "dense", "block": BLOCK}), torch.randint(5, VOCABULARY, (1, 20))
    edges = torch.tensor([0, 20])
    dense = make("llama", sparse=False)
    with torch.no_grad():
        ours = model(ids, position_ids=START_AGAIN, cu_seq_lens_q=edges, cu_seq_lens_k=edges).logits
        truth = dense(ids, torch.ones_like(ids), position_ids=START_AGAIN).logits
    torch.testing.assert_close(ours, truth)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name, how", pairs(("modernbert", "gemma3", "llama"), HOW))
def test_layers_of_a_step_share_what_is_read_and_built(name, how, checkpointed):
    model, features = make(name).train(), documents()
    truth = run_apart(model, features, "cpu")
    if checkpointed:
        model.gradient_checkpointing_enable()
    batch = collated(name, features, **HOW[how])
    with (
        mock.patch.object(PackedIndex, "build", wraps=PackedIndex.build) as packed,
        mock.patch.object(WindowIndex, "build", wraps=WindowIndex.build) as windows,
        mock.patch.object(packing, "PackedDocuments", wraps=packing.PackedDocuments) as read,
    ):
        ours = run_packed(model, batch)
    assert_same(ours, truth)
    assert (read.call_count, packed.call_count, windows.call_count) == (1, 1, 0 if name == "llama" else 1)


@pytest.mark.parametrize(
    "name, layers, lengths",
    [
        ("modernbert", {"0": None}, LENGTHS),
        ("llama", {"1": None}, LENGTHS),
        ("gpt_oss", {"1": None}, LENGTHS),
        ("gpt_neox", {"1": {"mode": "fixed"}}, LENGTHS),
        ("gpt2", {}, (60, 50, 64)),  # a row that is longer than the model, which is made for 96 tokens
    ],
)
def test_structures_by_layer_dense_layers_and_long_rows_compute_each_document_alone(name, layers, lengths):
    model, features = make(name, block=BIGBIRD | {"layers": layers}), documents(lengths)
    assert_same(run_packed(model, collated(name, features)), run_apart(model, features, "cpu"))


def test_dropout_of_probabilities_stays_within_a_document():
    model = make("bert", attention_probs_dropout_prob=0.5).float()
    batch = collated("bert", documents((30, 20)))
    other = batch | {"input_ids": torch.cat([batch["input_ids"][:, :30], batch["input_ids"][:, 30:].flip(1)], 1)}
    evaluated = model(**batch).logits
    model.train()
    found = []
    for given in (batch, other):
        torch.manual_seed(2)
        found.append(model(**given).logits)
    assert torch.equal(found[0][:, :30], found[1][:, :30]) and not torch.equal(found[0][:, 30:], found[1][:, 30:])
    assert not torch.allclose(found[0], evaluated, atol=1e-2)
    found[0].sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_trainer_trains_on_packed_documents_as_on_separate_ones(tmp_path):
    features = documents((37, 20, 8))
    model = make("llama").float()
    expected = run_apart(model, features, "cpu")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=3, learning_rate=0.1, optim="sgd",
        max_grad_norm=0.0, use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    trainer = transformers.Trainer(model, arguments, data_collator=collate, train_dataset=features)
    loss = trainer.train().training_loss
    assert loss == pytest.approx(expected[0].item(), rel=1e-4)
    for name, p in model.named_parameters():
        torch.testing.assert_close(before[name] - p.detach(), 0.1 * expected[2][name], rtol=1e-2, atol=1e-4)


REFUSED = {"LayoutLM", "T5", "UMT5", "BART", "Pegasus", "MobileBERT", "MiniMax-M3"}
"""Families of texts in which documents cannot be told apart."""

BOTTLENECK = {"embedding_size": 16, "true_hidden_size": 16, "intra_bottleneck_size": 16}
TEXTS = {name: of for name, of in FAMILIES.items() if "vocab_size" in of[1] and name != "Whisper"}
TEXTS["MobileBERT"] = ("MobileBertModel", FAMILIES["BERT"][1] | BOTTLENECK)
TEXTS["MobileBERT, token by token"] = ("MobileBertModel", TEXTS["MobileBERT"][1] | {"trigram_input": False})


@pytest.mark.parametrize("family", TEXTS)
def test_in_every_family_documents_do_not_see_each_other_or_are_refused(family):
    name, sizes = TEXTS[family]
    cls = getattr(transformers, name, None)
    if cls is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = cls(cls.config_class(**sizes)).eval()
    try:
        ds_sparse.sparsify(model, {"mode": "dense", "block": BLOCK})
    except ValueError:
        return  # the family cannot be sparse
    ids = torch.randint(3, 20, (1, 24))
    other = torch.cat([ids[:, :10], (ids[:, 10:] - 2) % 17 + 3], 1)
    first = 1 if "oberta" in name.lower() or name == "CamembertModel" else 0
    positions = torch.cat([torch.arange(first, first + 10), torch.arange(first, first + 14)])[None]
    edges = torch.tensor([0, 10, 24])
    for given in ({"position_ids": positions}, {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges}):
        given |= {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        with torch.no_grad():
            if family in REFUSED:
                with pytest.raises(ValueError, match="given packed documents"):
                    model(ids, **given)
                continue
            found = [model(x, **given).last_hidden_state for x in (ids, other)]
        torch.testing.assert_close(found[0][:, :10], found[1][:, :10])
        assert not torch.allclose(found[0][:, 10:], found[1][:, 10:], atol=1e-4)


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"position_ids": START_AGAIN, "use_cache": True}, "packed documents .* and a cache.* Pass use_cache=False"),
        ({"cu_seq_lens_q": EDGES, "cu_seq_lens_k": EDGES, "use_cache": True}, "packed documents .* and a cache"),
        (
            {"cu_seq_lens_q": EDGES, "cu_seq_lens_k": EDGES, "attention_mask": torch.ones(1, 20, dtype=torch.long)},
            "of packed documents and an attention_mask. Leave the mask out",
        ),
        ({"cu_seq_lens_q": EDGES}, "cu_seq_lens_q without cu_seq_lens_k"),
        ({"cu_seq_lens_k": EDGES}, "cu_seq_lens_q without cu_seq_lens_k"),
        ({"cu_seq_lens_q": EDGES, "cu_seq_lens_k": EDGES + EDGES % 8}, "or with other numbers"),
        ({"cu_seq_lens_q": EDGES - 1, "cu_seq_lens_k": EDGES - 1}, "cu_seqlens goes from -1 to 19"),
        ({"cu_seq_lens_q": EDGES[:2], "cu_seq_lens_k": EDGES[:2]}, "end at 12, and query has 20 tokens"),
        ({"position_ids": START_AGAIN, "seq_idx": START_AGAIN}, "asks the attention for seq_idx"),
    ],
)
def test_what_does_not_go_with_packed_documents_is_refused(given, sentence):
    model = make("llama")
    with pytest.raises(ValueError, match=sentence):
        model(torch.randint(5, VOCABULARY, (1, 20)), **given)


def test_packed_documents_are_no_prompt():
    model, ids = make("llama"), torch.randint(5, VOCABULARY, (1, 20))
    with pytest.raises(ValueError, match="give each prompt a row, with an attention_mask"):
        model.generate(ids, position_ids=START_AGAIN, max_new_tokens=2)
    cache = transformers.DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="packed documents .* and a cache"):
        model(ids, past_key_values=cache, position_ids=20 + START_AGAIN)


def test_packed_documents_leave_no_cache_behind():
    model, batch = make("llama"), collated("llama", documents())
    assert model.config.use_cache and model(**batch).past_key_values is None


def test_a_layer_that_does_not_hear_of_the_documents_is_an_error():
    model = make("llama")
    layer = model.model.layers[1]
    forward = layer.forward

    def drop(*arguments, **named):
        return forward(*arguments, **{name: x for name, x in named.items() if name != packing.DOCUMENTS_KEYWORD})

    with mock.patch.object(layer, "forward", drop), pytest.raises(ValueError, match="1 of its attention layers"):
        model(torch.randint(5, VOCABULARY, (1, 20)), position_ids=START_AGAIN)


def test_a_model_that_hands_nothing_on_is_refused():
    model = make("llama")
    forward = model.model.forward

    def closed(input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None):
        return forward(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds)

    model.model.forward = closed
    with pytest.raises(ValueError, match="forward hands nothing on to its attention layers"):
        model.model(torch.randint(5, VOCABULARY, (1, 20)), position_ids=START_AGAIN)


@pytest.mark.parametrize("name", ["modernbert", "llama"])
def test_with_a_mask_a_row_is_one_sequence_as_in_transformers_and_a_line_says_so(name, capsys):
    model, dense = make(name, block={"mode": "dense", "block": BLOCK}), make(name, sparse=False)
    ids = torch.randint(5, VOCABULARY, (2, 20))
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    from_mask = (padded.cumsum(-1) - 1).clamp(min=0)  # starts again in the padding
    _said.clear()
    capsys.readouterr()
    with torch.no_grad():
        kept = padded.bool()
        ours = model(ids, attention_mask=padded, position_ids=from_mask).logits[kept]
        torch.testing.assert_close(ours, dense(ids, attention_mask=padded, position_ids=from_mask).logits[kept])
        assert "start again" not in capsys.readouterr().out
        packed = {"attention_mask": torch.ones_like(ids), "position_ids": START_AGAIN}
        torch.testing.assert_close(model(ids, **packed).logits, dense(ids, **packed).logits)
    assert "position_ids that start again and an attention_mask: with a mask a row is one" in capsys.readouterr().out


@pytest.mark.slow("compiles for 10 seconds and more")
@pytest.mark.parametrize("name, how", [("modernbert", "positions"), ("llama", "both")])
def test_compiled_models_compute_packed_documents_outside_of_graphs(name, how):
    torch._dynamo.reset()
    model = make(name, num_hidden_layers=2).float()
    compiled = torch.compile(model, backend="aot_eager")
    for lengths in (LENGTHS, (20, 30)):
        batch = collated(name, documents(lengths), **HOW[how])
        truth = run_packed(model, batch)
        assert_same(run_packed(model, batch, compiled), truth)


@pytest.mark.parametrize("name", ["eurobert", pytest.param("llama", marks=pytest.mark.slow("compiles for 3 seconds"))])
def test_one_graph_cannot_tell_documents_and_says_so(name):
    torch._dynamo.reset()
    model, ids = make(name, num_hidden_layers=1).float(), torch.randint(5, VOCABULARY, (1, 20))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for given in ({"position_ids": START_AGAIN}, {"cu_seq_lens_q": EDGES, "cu_seq_lens_k": EDGES}):
        with pytest.raises(Exception, match="compile without fullgraph=True. Or leave position_ids out"):
            compiled(ids, **given)
    plain = {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(20)[None]}
    plain |= {"use_cache": False} if name == "llama" else {}
    torch.testing.assert_close(compiled(ids, **plain).logits, model(ids, **plain).logits)


@pytest.mark.slow("exports; one graph of torch.compile says the same")
def test_exported_models_take_no_positions_without_a_mask():
    model, ids = make("eurobert").float(), torch.randint(5, VOCABULARY, (1, 20))
    with pytest.raises(Exception, match="outside of graphs"):
        torch.export.export(model, (ids,), {"position_ids": START_AGAIN}, strict=False)


@pytest.mark.parametrize("by_name", [False, True])
def test_undone_or_switched_the_model_is_transformers_own(by_name):
    model = families.make(MODELS["llama"], sparse_attention=BIGBIRD).eval()
    if by_name:
        model.set_attn_implementation("ds_sparse")
    else:
        report = ds_sparse.sparsify(model, BIGBIRD)
    batch = collated("llama", documents(), return_flash_attn_kwargs=True)
    apart = run_apart(model, documents(), "cpu")
    assert_same(run_packed(model, batch), apart)
    if by_name:
        model.set_attn_implementation("sdpa")
    else:
        report.undo()
        assert not model.model._forward_pre_hooks and not model.model._forward_hooks
    model(**batch)
