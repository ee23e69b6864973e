import json

import pytest
import torch

from ds_sparse.bench import bert, cases
from ds_sparse.cli import main

CPU = torch.device("cpu")
CASE = bert.Case(seq_len=1024, dropout=0.0, dtype="fp32", device="cpu")


def measured(case, *names):
    return {row.attention: row for row in bert.run_case(case, names, CPU, repeats=3, seconds=60)}


def test_steps_compare_with_the_one_without_attention():
    rows = measured(CASE, "sdpa", "bigbird-16")
    assert list(rows) == ["none", "sdpa", "bigbird-16"]
    for row in rows.values():
        assert row.of_ceiling == pytest.approx(rows["none"].milliseconds / row.milliseconds)
        assert row.rounds == 3 and row.peak_gib is None


def test_the_loss_of_labelled_tokens_is_that_of_all():
    model = bert.make_model(CASE, CPU, seq_len=64, num_hidden_layers=1)
    data = bert.batch(2, 64, model.config.vocab_size, CPU)
    assert 0 < len(data.labelled) < data.tokens.numel()
    torch.testing.assert_close(bert.loss_of(model, data, True), bert.loss_of(model, data, False))


def test_without_attention_the_value_is_the_output():
    model = bert.make_model(CASE, CPU, seq_len=64, num_hidden_layers=1)
    bert.switch(model, "none", 64)
    attention = model.bert.encoder.layer[0].attention.self
    hidden = torch.randn(2, 64, model.config.hidden_size)
    torch.testing.assert_close(attention(hidden)[0], attention.value(hidden))


@pytest.mark.parametrize("name", cases.IN_BERT)
def test_a_wrong_structure_is_not_timed(monkeypatch, name):
    right = bert.to_token_mask
    monkeypatch.setattr(bert, "to_token_mask", lambda layout, block: right(layout.roll(1, dims=-1), block))
    row = measured(CASE, name)[name]
    assert row.milliseconds is None
    assert "the gradient of the first layer's query weight has an RMS error" in row.reason


def test_what_fails_is_named_in_the_table(monkeypatch):
    monkeypatch.setitem(bert.MODEL["cpu"], "num_attention_heads", 3)
    rows = bert.run_case(CASE, ["sdpa"], CPU, repeats=3, seconds=60)
    assert all("not a multiple of the number of attention" in row.reason for row in rows)
    assert [line.split()[1:3] for line in list(bert.table(CASE, rows))[2:]] == [["no", "time:"]] * 2


def test_command_prints_a_table_and_writes_the_rows(tmp_path, capsys):
    path = tmp_path / "rows.json"
    arguments = (
        "bench bert --seq-len 1024,2048 --attentions bigbird-64 --dropout 0.1 --labelled-only --repeats 3 --seconds 1"
    )
    assert main([*arguments.split(), "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert [(row["seq_len"], row["batch"], row["attention"]) for row in written["rows"]] == [
        (1024, 2, "none"), (1024, 2, "bigbird-64"), (2048, 1, "none"), (2048, 1, "bigbird-64"),
    ]  # fmt: skip
    assert written["transformers"]
    printed = capsys.readouterr().out
    assert "of ceiling" in printed and "labelled tokens predicted" in printed


def test_a_structure_that_fails_is_the_status(capsys):
    assert main("bench bert --seq-len 128 --attentions longformer-64 --repeats 3 --seconds 1".split()) == 1
    assert "longformer-64    no time" in capsys.readouterr().out


@pytest.mark.parametrize("dropout", ["1", "-0.1", "much"])
def test_dropout_is_a_probability(capsys, dropout):
    with pytest.raises(SystemExit):
        main(["bench", "bert", f"--dropout={dropout}"])
    assert "is not a probability from 0 to below 1" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_peak_memory_on_a_gpu_is_that_of_the_step():
    case = bert.Case(seq_len=2048, dropout=0.0, dtype="bf16", device="cuda")
    rows = bert.run_case(case, ["bigbird-64"], torch.device("cuda"), repeats=3, seconds=1)
    # 16 sequences: at least parameters, gradients and a layer's results, each 2 bytes a number.
    assert all(1 < row.peak_gib < 40 for row in rows)
