import json
import sys
from dataclasses import replace

import pytest
import torch

from ds_sparse.bench import bert, bert_results, cases
from ds_sparse.cli import main

CPU = torch.device("cpu")
CASE = bert_results.Case(seq_len=1024, dropout=0.0, dtype="fp32", device="cpu")
SHORT = bert_results.Case(seq_len=64, dropout=0.3, dtype="fp32", device="cpu")


def measured(case, *names, device=CPU):
    return {row.attention: row for row in bert.run_case(case, names, {}, device, repeats=3, seconds=1)}


@pytest.fixture
def wrong_layout(monkeypatch):
    """A function after which the layouts that sparse steps are held to are others."""
    right = bert.to_token_mask
    return lambda: monkeypatch.setattr(
        bert, "to_token_mask", lambda layout, block: right(layout.roll(1, dims=-1), block)
    )


def test_steps_compare_with_the_one_without_attention():
    rows = measured(CASE, "sdpa", "bigbird-16")
    assert list(rows) == ["none", "sdpa", "bigbird-16"]
    for row in rows.values():
        assert row.of_ceiling == pytest.approx(rows["none"].milliseconds / row.milliseconds)
        assert row.rounds >= 3 and row.peak_gib is None


def test_logits_of_labelled_tokens_give_the_same_loss():
    model = bert.make_model(replace(SHORT, dropout=0.0), CPU, num_hidden_layers=1)
    data = bert.batch(2, 64, model.config.vocab_size, CPU)
    predicted = []
    model.cls.register_forward_hook(lambda module, inputs, output: predicted.append(inputs[0].shape[:-1].numel()))
    of_all, of_labelled = (bert.loss_of(model, data, predicts_all) for predicts_all in (True, False))
    assert predicted == [2 * 64, len(data.labelled)] and 0 < len(data.labelled) < 64
    torch.testing.assert_close(of_all, of_labelled)


def test_dropout_is_that_of_attention_and_everything_else():
    config = bert.make_model(SHORT, CPU, num_hidden_layers=1).config
    assert (config.attention_probs_dropout_prob, config.hidden_dropout_prob) == (0.3, 0.3)


def test_without_attention_the_value_is_the_output():
    model = bert.make_model(SHORT, CPU, num_hidden_layers=1)
    bert.switch(model, "none")
    attention = model.bert.encoder.layer[0].attention.self
    hidden = torch.randn(2, 64, model.config.hidden_size)
    torch.testing.assert_close(attention(hidden)[0], attention.value(hidden))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_wrong_structure_is_known(wrong_layout, dtype):
    assert bert.wrong_ones(["none", "sdpa", *cases.IN_BERT], dtype, CPU) == {}
    wrong_layout()
    wrong = bert.wrong_ones(["none", "sdpa", *cases.IN_BERT], dtype, CPU)
    assert list(wrong) == list(cases.IN_BERT)
    for reason in wrong.values():
        assert "the gradient of the first layer's query weight has an RMS error" in reason


def test_a_wrong_structure_is_not_timed(wrong_layout, capsys):
    wrong_layout()
    assert main("bench bert --peers bigbird-16 --repeats 3 --seconds 1".split()) == 1
    printed = capsys.readouterr()
    assert "bigbird-16       no time: bigbird-16: the gradient of the first layer's query weight" in printed.out
    assert "ds_sparse itself was wrong" in printed.err


@pytest.mark.parametrize("fails", ["make_model", "train_step"])
def test_what_fails_is_named_in_the_table(monkeypatch, fails):
    def out_of_memory(*arguments, **options):
        raise RuntimeError("out of memory\nin many lines")

    monkeypatch.setattr(bert, fails, out_of_memory)
    rows = list(measured(CASE, "sdpa").values())
    assert [row.reason for row in rows] == ["RuntimeError: out of memory"] * 2
    assert [line.split()[1:3] for line in list(bert_results.table(CASE, rows))[2:]] == [["no", "time:"]] * 2


def test_command_prints_a_table_and_writes_the_rows(tmp_path, printed_again):
    path = tmp_path / "rows.json"
    arguments = (
        "bench bert --seq-len 1024,2048 --peers bigbird-64 --dropout 0.1 --labelled-only --repeats 3 --seconds 1"
    )
    assert main([*arguments.split(), "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert [(row["seq_len"], row["batch"], row["attention"]) for row in written["rows"]] == [
        (1024, 2, "none"), (1024, 2, "bigbird-64"), (2048, 1, "none"), (2048, 1, "bigbird-64"),
    ]  # fmt: skip
    assert {row["predicts_all"] for row in written["rows"]} == {False} and written["transformers"]
    printed = printed_again(path)
    assert "of ceiling" in printed and "labelled tokens predicted" in printed


def test_too_short_sequences_are_refused_before_anything_is_measured(capsys):
    assert main("bench bert --seq-len 1024,128 --peers bigbird-16,longformer-64".split()) == 1
    printed = capsys.readouterr()
    assert not printed.out
    assert "--seq-len: longformer-64 has no layout of 128 tokens" in printed.err
    assert "Give longer sequences, or leave it out." in printed.err


def test_without_transformers_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "ds_sparse.bench.bert")
    monkeypatch.delattr("ds_sparse.bench.bert")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["bench", "bert"]) == 1
    assert "pip install 'ds_sparse[transformers]'" in capsys.readouterr().err


@pytest.mark.parametrize("dropout", ["1", "-0.1", "much"])
def test_dropout_is_a_probability(capsys, dropout):
    with pytest.raises(SystemExit):
        main(["bench", "bert", f"--dropout={dropout}"])
    assert "is not a probability from 0 to below 1" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_peak_memory_is_that_of_one_model_and_its_step():
    device, case = torch.device("cuda"), bert_results.Case(seq_len=2048, dropout=0.0, dtype="bf16", device="cuda")
    alone, beside = measured(case, "bigbird-64", device=device), measured(case, "sdpa", "bigbird-64", device=device)
    # Parameters and gradients of BERT-base alone are 0.4 GiB.
    assert 0.4 < alone["bigbird-64"].peak_gib == pytest.approx(beside["bigbird-64"].peak_gib, rel=0.1)
