import json
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from benchmarks.models import modernbert, modernbert_results
from benchmarks.program import main
from ds_sparse import block_sparse_attention, window_attention
from ds_sparse.bench.cases import IN_BERT

CPU = torch.device("cpu")
CASE = modernbert_results.Case(1024, "fp32", "cpu")
ON_CPU = ("ds_sparse", "ds_sparse-padded", "sdpa", "sdpa-padded")
"""What has a backward on a CPU, but for the packed row of ours, of which the tests below are."""


def measured(*names, wrong=()):
    return {row.attention: row for row in modernbert.run_case(CASE, names, dict(wrong), CPU, repeats=3, seconds=1)}


def small(case=CASE, layers=2):
    return modernbert.make_model(case, CPU, num_hidden_layers=layers)


@pytest.fixture
def other_documents(monkeypatch):
    """A function after which everybody's documents but the reference's begin elsewhere."""
    right = modernbert.reference_masks
    return lambda: monkeypatch.setattr(
        modernbert,
        "reference_masks",
        lambda sparse, lengths, *others: right(sparse, [row[::-1] for row in lengths], *others),
    )


@pytest.mark.slow("verifies and times steps of every attention")
def test_steps_compare_with_the_floor():
    rows = measured("sdpa", "ds_sparse-padded")
    assert list(rows) == ["floor", "sdpa", "ds_sparse-padded"]
    for row in rows.values():
        assert row.of_floor == pytest.approx(rows["floor"].milliseconds / row.milliseconds)
        assert row.tokens_per_second == pytest.approx(2048 / row.milliseconds * 1e3)
        # What takes longer than the second that there is, as on a busy machine, is timed once.
        assert row.rounds >= (3 if row.milliseconds < 1000 else 1) and row.peak_gib is None


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.slow("verifies steps of every attention")
def test_all_attentions_are_verified(other_documents, dtype):
    assert modernbert.wrong_ones(["floor", *ON_CPU], dtype, CPU) == {}
    other_documents()
    wrong = modernbert.wrong_ones(["floor", *ON_CPU], dtype, CPU)
    assert list(wrong) == list(ON_CPU)
    for reason in wrong.values():
        assert "the gradient of the first layer's query weight has an RMS error" in reason


@pytest.mark.parametrize("name", ["ds_sparse", "flash_attention_4"])
@pytest.mark.slow("trains steps for three seconds")
def test_the_flat_row_says_where_documents_are(monkeypatch, name):
    """An attention that goes by the edges alone is right, as FlashAttention's is."""
    structure = IN_BERT[modernbert.STRUCTURE](2)
    layout = structure.make_bool_layout(1024) if name == "ds_sparse" else torch.ones(16, 16, dtype=torch.bool)

    def by_edges(module, query, key, value, mask, cu_seq_lens_q, cu_seq_lens_k, max_length_q, sliding_window, **_):
        assert mask is None and cu_seq_lens_q is cu_seq_lens_k and max_length_q == cu_seq_lens_q.diff().max()
        if sliding_window is None:
            output = block_sparse_attention(query, key, value, layout, block=64, cu_seqlens=cu_seq_lens_q)
        else:
            output = window_attention(query, key, value, sliding_window - 1, cu_seqlens=cu_seq_lens_q)
        return output.transpose(1, 2), None

    modernbert.AttentionInterface.register("by_edges", by_edges)
    monkeypatch.setattr(modernbert, "switch", lambda model, name: model.set_attn_implementation("by_edges"))
    modernbert.verify(name, "fp32", CPU, {})
    right = modernbert.cu_seqlens_of
    monkeypatch.setattr(modernbert, "cu_seqlens_of", lambda lengths, device: right(lengths[::-1], device))
    with pytest.raises(ArithmeticError, match=f"{name}: the gradient"):
        modernbert.verify(name, "fp32", CPU, {})


@pytest.mark.slow("verifies steps of every attention")
def test_a_dense_one_is_not_taken_for_the_structure():
    known = {}
    modernbert.verify("sdpa", "fp32", CPU, known)
    modernbert.verify("ds_sparse-padded", "fp32", CPU, known)
    known[True] = known[False]
    with pytest.raises(ArithmeticError, match="ds_sparse-padded: the gradient"):
        modernbert.verify("ds_sparse-padded", "fp32", CPU, known)


def test_every_form_has_the_same_documents():
    config, lengths = small().config, CASE.lengths
    flat = [length for row in lengths for length in row]
    (of_row,) = modernbert.pieces_of("ds_sparse", CASE, lengths, config, CPU)
    (of_rows,) = modernbert.pieces_of("sdpa", CASE, lengths, config, CPU)
    padded = modernbert.pieces_of("sdpa-padded", CASE, lengths, config, CPU)
    inputs = of_row.inputs
    assert inputs["input_ids"].shape == (1, 2048) and of_rows.inputs["input_ids"].shape == (2, 1024)
    assert torch.equal(inputs["input_ids"].view(2, 1024), of_rows.inputs["input_ids"])
    assert inputs["cu_seq_lens_q"].diff().tolist() == flat and inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["max_length_q"] == inputs["max_length_k"] == max(flat)
    assert (inputs["position_ids"] == 0).sum() == len(flat)
    exists = [part.inputs["attention_mask"].bool() for part in padded]
    assert [n for part in exists for n in part.sum(1).tolist()] == flat
    assert all(part.numel() <= 2048 for part in exists)
    together = [part.inputs["input_ids"][there] for part, there in zip(padded, exists, strict=True)]
    assert torch.equal(torch.cat(together), inputs["input_ids"][0])
    labels = [part.labels[there] for part, there in zip(padded, exists, strict=True)]
    assert torch.equal(torch.cat(labels), of_row.labels[0])
    for part in (of_row, of_rows, *padded):
        assert torch.equal(part.labels.flatten()[part.labelled], part.labels[part.labels >= 0])


def test_masks_of_rows_by_hand():
    config = small().config
    config.local_attention = 2
    live = modernbert.masks("full_attention", [[2, 1], [1, 2]], config, CPU)
    assert live.int().tolist() == [[[[1, 1, 0], [1, 1, 0], [0, 0, 1]]], [[[1, 0, 0], [0, 1, 1], [0, 1, 1]]]]
    near = modernbert.masks("sliding_attention", [[4]], config, CPU)
    assert near[0, 0].int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_tiles_for_flex_attention_are_those_of_the_masks(kind):
    config, lengths = small().config, [[200, 56], [130, 126]]
    mask = modernbert.block_mask(modernbert.sees(kind, lengths, config, CPU), 2, 256, CPU)
    tiles = modernbert.masks(kind, lengths, config, CPU).unflatten(3, (2, 128)).unflatten(2, (2, 128))
    assert torch.equal(mask.to_dense().bool(), tiles.any(5).any(3))
    assert torch.equal(mask.full_kv_num_blocks, tiles.all(5).all(3).sum(3, dtype=torch.int32))


def test_logits_of_labelled_tokens_give_the_same_loss():
    model = small()
    (part,) = modernbert.pieces_of("floor", CASE, CASE.lengths, model.config, CPU)
    modernbert.switch(model, "floor")
    of_all, of_labelled = (modernbert.loss_of(model, part, predicts_all) for predicts_all in (True, False))
    torch.testing.assert_close(of_all, of_labelled)


def test_the_loss_of_padded_batches_is_that_of_the_rows():
    model = small()
    modernbert.switch(model, "sdpa")
    losses = []
    for name in ("sdpa", "sdpa-padded"):
        pieces = modernbert.pieces_of(name, CASE, CASE.lengths, model.config, CPU)
        losses.append(sum(modernbert.share_of_loss(model, part, pieces, True).item() for part in pieces))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_floor_keeps_the_backward_of_all_projections():
    model = small(layers=1)
    modernbert.switch(model, "floor")
    attention = model.model.layers[0].attn
    outputs = []
    attention.Wo.register_forward_pre_hook(lambda module, inputs: outputs.append(inputs[0]))
    hidden, position = torch.randn(2, 8, 128), torch.arange(8)[None]
    cos, sin = model.model.rotary_emb(hidden, position, "full_attention")
    attention(hidden, position_embeddings=(cos, sin))[0].sum().backward()
    torch.testing.assert_close(outputs[0], attention.Wqkv(hidden)[..., -128:])
    by_projection = attention.Wqkv.weight.grad.unflatten(0, (3, 128))
    assert (by_projection != 0).flatten(1).any(1).tolist() == [True] * 3


def test_an_optimizer_steps_and_gradients_are_gone():
    step = modernbert.make_step("floor", CASE, CPU)
    model = step.args[0]
    before = model.decoder.weight.detach().clone()
    step()
    assert not torch.equal(model.decoder.weight, before)
    assert all(x.grad is None for x in model.parameters())


def test_indices_are_made_anew_in_every_step(monkeypatch):
    seen = []
    monkeypatch.setattr(
        modernbert, "loss_of", lambda model, part, _: seen.append(part.inputs) or model.decoder.weight.sum()
    )
    model = small()
    pieces = modernbert.pieces_of("ds_sparse", CASE, CASE.lengths, model.config, CPU)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        modernbert.train_step(model, pieces, optimizer, True)
    first, second = (inputs["cu_seq_lens_q"] for inputs in seen)
    assert first is not second and torch.equal(first, second)


def test_what_fails_is_named_in_the_table(monkeypatch):
    def out_of_memory(*arguments, **options):
        raise RuntimeError("out of memory\nin many lines")

    monkeypatch.setattr(modernbert, "make_model", out_of_memory)
    rows = list(measured("sdpa").values())
    assert [row.reason for row in rows] == ["RuntimeError: out of memory"] * 2
    assert [line.split()[1:3] for line in list(modernbert_results.table(CASE, rows))[3:]] == [["no", "time:"]] * 2


@pytest.mark.parametrize("version", [2, 4])
def test_flash_attention_that_is_not_there_is_not_asked_for_elsewhere(monkeypatch, version):
    check = f"is_flash_attn_{version}_available"
    monkeypatch.setattr(modernbert.import_utils, check, lambda: False)
    package = {2: "flash-attn", 4: "flash-attn-4"}[version]
    with pytest.raises(modernbert.Unsupported, match=f"Transformers finds no {package} here"):
        modernbert.switch(small(), f"flash_attention_{version}")
    monkeypatch.delattr(modernbert.import_utils, check)
    with pytest.raises(modernbert.Unsupported, match=f"does not know FlashAttention-{version}"):
        modernbert.switch(small(), f"flash_attention_{version}")


def test_padded_batches_keep_the_order_and_end_where_they_would_be_too_large():
    case = replace(CASE, seq_len=8192, device="cuda")
    batches = case.padded_batches
    assert [length for batch in batches for length in batch] == [length for row in case.lengths for length in row]
    assert all(len(batch) * max(batch) <= case.tokens for batch in batches)
    for batch, after in pairwise(batches):
        assert (len(batch) + 1) * max(*batch, after[0]) > case.tokens


@pytest.mark.slow("verifies and times steps of every attention")
def test_command_prints_a_table_and_writes_the_rows(tmp_path, printed_again):
    path = tmp_path / "rows.json"
    arguments = "modernbert --peers ds_sparse-padded,sdpa --labelled-only --repeats 3 --seconds 1"
    assert main([*arguments.split(), "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert [(row["seq_len"], row["rows"], row["attention"]) for row in written["rows"]] == [
        (1024, 2, "floor"), (1024, 2, "ds_sparse-padded"), (1024, 2, "sdpa"),
    ]  # fmt: skip
    assert {row["predicts_all"] for row in written["rows"]} == {False} and written["transformers"]
    printed = printed_again(path)
    assert "of floor" in printed and "labelled tokens predicted" in printed and "tokens/s" in printed


def test_too_short_rows_are_refused_before_anything_is_measured(capsys):
    assert main("modernbert --seq-len 128".split()) == 1
    printed = capsys.readouterr()
    assert not printed.out and "--seq-len: bigbird-64 has no layout of 128 tokens" in printed.err


def test_without_transformers_it_says_what_to_install(monkeypatch, capsys):
    for name in ("bert", "bert_models", "modernbert", "no_attention"):
        monkeypatch.delitem(sys.modules, f"ds_sparse.bench.{name}", raising=False)
        monkeypatch.delattr(f"ds_sparse.bench.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["modernbert"]) == 1
    assert "pip install 'ds_sparse[transformers]'" in capsys.readouterr().err
