"""Steps of BERT and ModernBERT: each attention is what it says, is verified, and is timed or says why not."""

import json
import re
import sys
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import AttentionInterface

from benchmarks import running
from benchmarks.models import attentions, bert, modernbert, packed_bert, results, steps
from benchmarks.models.processes import Failure
from benchmarks.program import main
from ds_sparse import block_sparse_attention, window_attention
from ds_sparse.bench.show import load

CPU = torch.device("cpu")
CASE = results.Case(1024, "fp32", "cpu")
SHORT = replace(CASE, seq_len=64)
ON_CPU = ("ds_sparse-padded", "sdpa", "sdpa-padded")
"""What of ModernBERT has a backward on a CPU, but for the packed row of ours, of which a test below is."""


def small(family=modernbert, name="sdpa"):
    return steps.model_with(family, name, CASE, CPU)


@pytest.mark.slow("verifies and times steps of every attention")
def test_every_attention_is_measured_or_says_why_not(monkeypatch):
    monkeypatch.setitem(bert.MODELS["base"], "cpu", bert.SMALL | {"num_hidden_layers": 1})
    monkeypatch.setitem(results.TOKENS, "cpu", 1024)
    found = steps.run_case(bert, CASE, attentions.BERT_ATTENTIONS, {}, CPU, repeats=1, seconds=1)
    rows = {row.attention: row for row in found}
    assert list(rows) == list(attentions.BERT_ATTENTIONS)
    without = {name: row.reason for name, row in rows.items() if row.reason}
    assert without == dict.fromkeys(attentions.FLEX_IN_BERT, "on a CPU it is forward only")
    for row in (row for name, row in rows.items() if name not in without):
        assert row.tokens_per_second == pytest.approx(1024e3 / row.milliseconds) and row.peak_gib is None


def test_transformers_own_models_have_the_sizes_of_bert_and_their_sparse_attention():
    case = replace(CASE, model="large", dropout=0.3)
    of_bert = bert.make_model(case, CPU).config
    assert (of_bert.attention_probs_dropout_prob, of_bert.hidden_dropout_prob) == (0.3, 0.3)
    kinds = {"transformers-longformer": "LongformerSelfAttention", "transformers-bigbird": "BigBirdBlock"}
    for name, kind in kinds.items():
        model = steps.model_with(bert, name, case, CPU)
        sizes = {key: value for key, value in bert.sizes_of(case).items() if key != "max_position_embeddings"}
        assert {key: getattr(model.config, key) for key in sizes} == sizes
        modules = [type(module).__name__ for module in model.modules()]
        assert sum(one.startswith(kind) for one in modules) == of_bert.num_hidden_layers == 4
    with pytest.raises(bert.Unsupported, match="up to 704 tokens it is dense"):
        steps.model_with(bert, "transformers-bigbird", replace(CASE, seq_len=704), CPU)


@pytest.mark.parametrize(("name", "has"), [("none", False), ("floor", True)])
def test_without_attention_the_value_is_the_output_and_the_floor_keeps_the_backward_of_query_and_key(name, has):
    model = steps.model_with(bert, name, SHORT, CPU)
    attention = model.bert.encoder.layer[0].attention.self
    hidden = torch.randn(2, 64, model.config.hidden_size)
    torch.testing.assert_close(attention(hidden)[0], attention.value(hidden))
    steps.loss_of(model, bert.batch(1, 64, model.config.vocab_size, CPU), predicts_all=True).backward()
    grads = [x.weight.grad is not None for x in (attention.query, attention.key, attention.value)]
    assert grads == [has, has, True]


@pytest.mark.parametrize("family", [bert, modernbert])
def test_a_whole_step_moves_the_weights_and_leaves_no_gradients(family):
    case = replace(CASE, whole_step=True, checkpointed=True, predicts_all=False)
    step = steps.make_step(family, "floor", case, CPU)
    model = step.args[0]
    before = family.queries_of(model).detach().clone()
    step()
    assert model.is_gradient_checkpointing and not torch.equal(family.queries_of(model), before)
    assert all(x.grad is None for x in model.parameters())


@pytest.mark.parametrize("family", [bert, modernbert])
def test_logits_of_labelled_tokens_give_the_same_loss(family):
    model = small(family, "floor")
    (piece,) = family.pieces_of("floor", CASE, model.config, CPU)
    assert 0 < len(piece.labelled) < 0.4 * piece.labels.numel()
    torch.testing.assert_close(*(steps.loss_of(model, piece, predicts_all) for predicts_all in (True, False)))


def test_steps_are_timed_in_turns_and_what_fails_or_is_slow_is_named(monkeypatch):
    calls, late = [], []

    def fails():
        late.append(1)
        if len(late) > 3:
            raise RuntimeError("out of memory\nin many lines")

    made = {
        "none": lambda: calls.append("none"),
        "floor": lambda: calls.append("floor"),
        "slow": lambda: time.sleep(0.06),
        "late": fails,
    }
    monkeypatch.setattr(steps, "make_step", lambda family, name, case, device: made[name])
    found = steps.run_case(bert, CASE, ["slow", "late", "early", "wrong"], {"wrong": "it is wrong"}, CPU, 3, 0.05)
    rows = {row.attention: row for row in found}
    # Two each to prepare them, then two a round, one round more than counts.
    assert calls == ["none"] * 2 + ["floor"] * 2 + (["none"] * 2 + ["floor"] * 2) * 4 and rows["floor"].rounds == 3
    assert rows["slow"].milliseconds >= 60 and rows["slow"].rounds == 1
    reasons = {name: row.reason for name, row in rows.items() if row.reason}
    assert reasons == {"late": "RuntimeError: out of memory", "early": "KeyError: 'early'", "wrong": "it is wrong"}
    assert len(late) == 4


@pytest.mark.parametrize("milliseconds, calls", [(1, 8), (30, 3), (900, 1)])
def test_a_round_has_more_calls_of_what_is_short(monkeypatch, milliseconds, calls):
    monkeypatch.setattr(steps, "timed", lambda step, device, calls: calls)
    assert steps.Measured(lambda: None, results.Row("x", milliseconds=milliseconds)).time(CPU) == calls


def test_what_was_slow_or_out_of_memory_is_not_tried_at_longer_lengths(monkeypatch):
    def rows(family, case, names, wrong, *_):
        times = {"sdpa": 900.0 * case.seq_len / 512, "bigbird-64": 50.0}
        found = [results.Row(name, milliseconds=ms, rounds=3) for name, ms in times.items() if name not in wrong]
        found += [results.Row(name, reason=reason) for name, reason in wrong.items()]
        return [*found, results.Row("eager", reason="OutOfMemoryError: CUDA out of memory.")]

    monkeypatch.setattr(steps, "run_case", rows)
    monkeypatch.setattr(steps, "verify", lambda *_: None)
    grid = [replace(CASE, seq_len=seq_len) for seq_len in (512, 1024, 2048)]
    found = steps.results(bert, grid, ["bigbird-64"], CPU, 3, 1.0)
    last = {row.attention: row for _, rows in found for row in rows[:-1]}
    assert last["sdpa"].reason == "not tried: a step of 1,024 tokens took 1.8 s" and last["bigbird-64"].milliseconds
    assert last["eager"].reason == "not tried: a shorter sequence ran out of memory"


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.slow("verifies steps of every attention")
def test_a_wrong_structure_of_bert_is_known(monkeypatch, dtype):
    names = [*attentions.IN_BERT, "bigbird-default-64", "transformers_bigbird-default-64"]
    assert steps.wrong_ones(bert, names, replace(CASE, dtype=dtype), CPU) == {}, (
        "random blocks are the same at every call"
    )
    right = bert.to_token_mask
    monkeypatch.setattr(bert, "to_token_mask", lambda layout, block: right(layout.roll(1, dims=-1), block))
    wrong = steps.wrong_ones(bert, attentions.IN_BERT, replace(CASE, dtype=dtype), CPU)
    assert list(wrong) == list(attentions.IN_BERT)
    assert all("the gradient of the first layer's query weight has an RMS" in reason for reason in wrong.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.slow("verifies steps of every attention")
def test_attentions_on_other_documents_are_known(monkeypatch, dtype):
    case = replace(CASE, dtype=dtype)
    assert steps.wrong_ones(modernbert, ["floor", *ON_CPU], case, CPU) == {}
    right = modernbert.masks
    monkeypatch.setattr(
        modernbert, "masks", lambda kind, lengths, *others: right(kind, [row[::-1] for row in lengths], *others)
    )
    wrong = steps.wrong_ones(modernbert, ["ds_sparse-padded", "sdpa-padded"], case, CPU)
    assert list(wrong) == ["ds_sparse-padded", "sdpa-padded"]
    assert all("the gradient of the first layer's query weight has an RMS" in reason for reason in wrong.values())


@pytest.mark.parametrize("name", ["ds_sparse", "flash_attention_4"])
@pytest.mark.slow("trains steps for three seconds")
def test_the_flat_row_says_where_documents_are(monkeypatch, name):
    """An attention that goes by the edges alone is right, as FlashAttention's is; a dense one is not ours."""
    structure = attentions.IN_BERT[modernbert.STRUCTURE](2)
    layout = structure.make_bool_layout(1024) if name == "ds_sparse" else torch.ones(16, 16, dtype=torch.bool)

    def by_edges(module, query, key, value, mask, cu_seq_lens_q, cu_seq_lens_k, max_length_q, sliding_window, **_):
        assert mask is None and max_length_q == cu_seq_lens_q.diff().max()
        if sliding_window is None:
            output = block_sparse_attention(query, key, value, layout, block=64, cu_seqlens=cu_seq_lens_q)
        else:
            output = window_attention(query, key, value, sliding_window - 1, cu_seqlens=cu_seq_lens_q)
        return output.transpose(1, 2), None

    AttentionInterface.register("by_edges", by_edges)
    monkeypatch.setattr(modernbert, "switch", lambda model, name: model.set_attn_implementation("by_edges"))
    steps.verify(modernbert, name, CASE, CPU)
    other = {"ds_sparse": "flash_attention_4", "flash_attention_4": "ds_sparse"}[name]
    with pytest.raises(ArithmeticError, match=f"{other}: the gradient"):
        steps.verify(modernbert, other, CASE, CPU)
    right = modernbert.cu_seqlens_of
    monkeypatch.setattr(modernbert, "cu_seqlens_of", lambda lengths, device: right(lengths[::-1], device))
    with pytest.raises(ArithmeticError, match=f"{name}: the gradient"):
        steps.verify(modernbert, name, CASE, CPU)


def test_every_form_has_the_same_documents():
    model = small(name="sdpa")
    flat = [length for row in CASE.documents for length in row]
    (of_row,), (of_rows,), padded = (
        modernbert.pieces_of(name, CASE, model.config, CPU) for name in ("ds_sparse", "sdpa", "sdpa-padded")
    )
    inputs = of_row.inputs
    assert inputs["input_ids"].shape == (1, 2048) and of_rows.inputs["input_ids"].shape == (2, 1024)
    assert torch.equal(inputs["input_ids"].view(2, 1024), of_rows.inputs["input_ids"])
    assert inputs["cu_seq_lens_q"].diff().tolist() == flat and inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["max_length_q"] == inputs["max_length_k"] == max(flat)
    again = of_row.anew(torch.device("cpu", 0)).inputs["cu_seq_lens_q"]  # numbered, as a GPU's tensors are
    assert again is not inputs["cu_seq_lens_q"] and torch.equal(again, inputs["cu_seq_lens_q"])
    exists = [part.inputs["attention_mask"].bool() for part in padded]
    assert [n for part in exists for n in part.sum(1).tolist()] == flat
    for what in (lambda part: part.inputs["input_ids"], lambda part: part.labels):
        together = [what(part)[there] for part, there in zip(padded, exists, strict=True)]
        assert torch.equal(torch.cat(together), what(of_row)[0])
    losses = [sum(steps.share_of_loss(model, x, pieces, True).item() for x in pieces) for pieces in ([of_rows], padded)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_padded_batches_keep_the_order_and_end_where_they_would_be_too_large():
    flat = [length for row in results.Case(8192, "bf16", "cuda").documents for length in row]
    batches = modernbert.padded_batches(flat, 32768)
    assert [length for batch in batches for length in batch] == flat
    assert all(len(batch) * max(batch) <= 32768 for batch in batches)
    assert all((len(one) + 1) * max(*one, after[0]) > 32768 for one, after in pairwise(batches))


def test_masks_of_rows_by_hand():
    config = small().config
    config.local_attention = 2
    live = modernbert.masks("full_attention", [[2, 1], [1, 2]], config, CPU)
    assert live.int().tolist() == [[[[1, 1, 0], [1, 1, 0], [0, 0, 1]]], [[[1, 0, 0], [0, 1, 1], [0, 1, 1]]]]
    near = modernbert.masks("sliding_attention", [[4]], config, CPU)
    assert near[0, 0].int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]


@pytest.mark.parametrize("version", [2, 4])
def test_flash_attention_that_is_not_there_is_not_asked_for_elsewhere(monkeypatch, version):
    check, package = f"is_flash_attn_{version}_available", {2: "flash-attn", 4: "flash-attn-4"}[version]
    monkeypatch.setattr(modernbert.import_utils, check, lambda: False)
    with pytest.raises(modernbert.Unsupported, match=f"Transformers finds no {package} here"):
        small(name=f"flash_attention_{version}")
    monkeypatch.delattr(modernbert.import_utils, check)
    with pytest.raises(modernbert.Unsupported, match=f"does not know FlashAttention-{version}"):
        small(name=f"flash_attention_{version}")


PACKED = replace(CASE, whole_step=True, tokens=2048, packed=True)


def test_a_batch_always_has_as_many_documents_and_rows_end_where_they_end():
    drawn = [packed_bert.borders(PACKED, seed) for seed in range(3)]
    assert {len(edges) for edges in drawn} == {2048 // packed_bert.DOCUMENT + 3}
    assert all(edges.diff().min() > 0 and {0, 1024, 2048} <= set(edges.tolist()) for edges in drawn)
    assert not torch.equal(drawn[0], drawn[1])
    document, place = packed_bert.places(PACKED, drawn[0])
    assert (drawn[0][document] + place).flatten().tolist() == list(range(2048))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.slow("verifies steps of every attention")
def test_a_structure_on_other_packed_documents_is_known(monkeypatch, dtype):
    case, names = replace(PACKED, dtype=dtype), list(attentions.IN_BERT)
    assert steps.wrong_ones(packed_bert, names, case, CPU) == {}
    right = packed_bert.places
    monkeypatch.setattr(packed_bert, "places", lambda case, edges: right(case, packed_bert.borders(case, 1)))
    assert list(steps.wrong_ones(packed_bert, names, case, CPU)) == names


@pytest.mark.slow("trains steps for ten seconds")
def test_a_graph_that_keeps_its_first_borders_has_other_losses(monkeypatch):
    right, borders, released = packed_bert.make_step, packed_bert.borders, []
    monkeypatch.setattr(packed_bert, "make_step", lambda name, *others: right(name.removeprefix("graph-"), *others))
    monkeypatch.setattr(packed_bert, "BATCHES", 8)
    monkeypatch.setattr(packed_bert, "release_memory", released.append)
    packed_bert.require_same_losses("graph-longformer-64", PACKED, CPU)
    assert released == [CPU] * 3

    def kept(name, *others):
        monkeypatch.setattr(packed_bert, "borders", lambda case, seed: borders(case, seed * (name[:5] != "graph")))
        return right(name.removeprefix("graph-"), *others)

    monkeypatch.setattr(packed_bert, "make_step", kept)
    with pytest.raises(ArithmeticError, match="graph-longformer-64: losses of 8 steps are up to .*e-0. from those"):
        packed_bert.require_same_losses("graph-longformer-64", PACKED, CPU)


def test_a_step_on_the_clock_has_as_many_calls_in_a_row():
    calls = []
    found = steps.Measured(lambda: calls.append(time.sleep(0.002)), results.Row("x", milliseconds=1.0), on_clock=True)
    assert found.time(CPU) >= 2 and len(calls) == steps.CALLS_ON_CUDA


COMMANDS = {
    "bert --seq-len 2048,1024 --peers bigbird-64 --dropout 0.1 --labelled-only": [
        (1024, "none"), (1024, "floor"), (1024, "bigbird-64"), (2048, "none"), (2048, "floor"), (2048, "bigbird-64"),
    ],
    "bert --packed --peers bigbird-64,graph-bigbird-64 --labelled-only": [
        (1024, "bigbird-64"), (1024, "graph-bigbird-64"),
    ],
    "modernbert --peers ds_sparse-padded,sdpa --labelled-only": [
        (1024, "floor"), (1024, "ds_sparse-padded"), (1024, "sdpa"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("arguments", COMMANDS)
@pytest.mark.slow("verifies and times steps of every attention")
def test_a_command_prints_a_table_and_writes_the_rows(tmp_path, printed_again, arguments):
    path = tmp_path / "rows.json"
    assert main([*arguments.split(), "--repeats", "3", "--seconds", "1", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert [(row["seq_len"], row["attention"]) for row in written["rows"]] == COMMANDS[arguments]
    assert {row["predicts_all"] for row in written["rows"]} == {False} and written["transformers"]
    assert {row.get("rows") or row["batch"] for row in written["rows"]} <= {1, 2}
    assert "logits of labelled tokens alone" in printed_again(path)


@pytest.mark.slow("verifies and times steps")
def test_what_is_wrong_or_has_no_layout_is_named_and_not_timed(monkeypatch, capsys):
    arguments = "bert --seq-len 128 --peers longformer-64,flex-longformer-64 --repeats 1 --seconds 1"
    assert main(arguments.split()) == 0
    assert capsys.readouterr().out.count("no time: not tried: longformer-64 has no layout of 128 tokens") == 2
    monkeypatch.setattr(bert, "to_token_mask", lambda layout, block: torch.ones(1, 1024, 1024, dtype=torch.bool))
    assert main("bert --peers bigbird-16 --repeats 3 --seconds 1".split()) == 1
    printed = capsys.readouterr()
    assert "no time: bigbird-16: the gradient of the first layer's query weight" in printed.out
    assert "ds_sparse itself was wrong" in printed.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("bert --longest 10", "a CPU's memory is not filled by trying"),
        ("bert --peers sdpa,graph-bigbird-64", "--peers graph-bigbird-64: steps in CUDA graphs are those of --packed"),
        ("bert --packed --peers bigbird-64,sdpa", "--packed --peers sdpa: it is not one of longformer-64, bigbird-64"),
        ("modernbert --seq-len 128", "--seq-len: bigbird-64 has no layout of 128 tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(capsys, arguments, sentence):
    assert main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert not printed.out and sentence in printed.err


@pytest.mark.parametrize("operation", ["bert", "modernbert", "train --quick"])
def test_without_transformers_it_says_what_to_install(monkeypatch, capsys, operation):
    for name in [name for name in sys.modules if re.match(r"benchmarks\.(models|train)\.(?!.*results)", name)]:
        monkeypatch.delitem(sys.modules, name)
        package, _, module = name.rpartition(".")
        monkeypatch.delattr(sys.modules[package], module, raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(operation.split()) == 1
    assert "pip install 'ds_sparse[transformers]'" in capsys.readouterr().err


def test_the_longest_sequence_is_looked_for_attention_by_attention(monkeypatch, tmp_path):
    def result_of(work, arguments, seconds, preload):
        ((_, name, case, _),) = arguments
        peak = case.seq_len / (400 if name == "eager" else 40_000)
        fits = results.Row(name, milliseconds=1500.0, peak_gib=peak, rounds=1)
        return fits if peak <= 100 else Failure("OutOfMemoryError: CUDA out of memory.")

    properties = type("Properties", (), {"total_memory": 100 * 2**30})
    monkeypatch.setattr(steps, "result_of", result_of)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    about = dict.fromkeys(("machine", "torch", "commit", "date"), "")
    monkeypatch.setattr(running, "conditions", lambda device: about)
    path = tmp_path / "rows.json"
    arguments = f"bert --device cuda --peers eager,bigbird-64 --longest 60 --labelled-only --json {path}"
    assert main(arguments.split()) == 0
    printed = json.loads(path.read_text())["rows"]
    assert {row["batch"] for row in printed} == {1} and [row["seq_len"] for row in printed][:2] == [4096, 8192]
    last = [line for lines in results.report(load(str(path))[2]) for line in lines][-2:]
    tokens = [int(re.search(r": ([\d,]+) tokens;", line)[1].replace(",", "")) for line in last]
    assert 37_000 < tokens[0] <= 40_000 and 3_700_000 < tokens[1] <= 4_000_000
    assert last[1].startswith("the longest that fits, bigbird-64, bf16, logits of labelled tokens alone:")


@pytest.mark.slow("starts a process that trains a step")
def test_a_try_is_a_step_in_a_process_of_its_own():
    case = replace(CASE, seq_len=0, whole_step=True, is_try=True)
    tried, row = steps.attempt(bert, "bigbird-64", case, CPU, 1024, 60)
    assert (tried.seq_len, tried.batch) == (1024, 1) and row.attention == "bigbird-64" and row.milliseconds > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_steps_in_a_graph_have_the_losses_of_eager_ones(monkeypatch):
    monkeypatch.setitem(bert.MODELS["base"], "cuda", bert.SMALL)
    case, device = replace(PACKED, dtype="bf16", device="cuda"), torch.device("cuda")
    assert steps.wrong_ones(packed_bert, attentions.PACKED_ATTENTIONS, case, device) == {}
    rows = steps.run_case(packed_bert, case, attentions.PACKED_ATTENTIONS, {}, device, repeats=3, seconds=5)
    assert all(row.milliseconds > 0 and row.peak_gib > 0 for row in rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_peak_memory_is_that_of_one_model_and_its_step():
    def peak(*names):
        case = results.Case(2048, "bf16", "cuda")
        rows = steps.run_case(bert, case, names, {}, torch.device("cuda"), repeats=3, seconds=1)
        return next(row.peak_gib for row in rows if row.attention == "bigbird-64")

    # Parameters and gradients of BERT-base alone are 0.4 GiB.
    assert 0.4 < peak("bigbird-64") == pytest.approx(peak("sdpa", "bigbird-64"), rel=0.1)
