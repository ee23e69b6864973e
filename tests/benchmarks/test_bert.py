import json
import re
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.models import bert, bert_longest, bert_models, bert_results
from benchmarks.models.own_processes import Failure
from benchmarks.program import main
from ds_sparse.bench import cases
from ds_sparse.bench.commands import bert as commands
from ds_sparse.bench.runs import Run
from ds_sparse.bench.show import load

CPU = torch.device("cpu")
CASE = bert_results.Case(seq_len=1024, dropout=0.0, dtype="fp32", device="cpu")
CONDITIONS = dict.fromkeys(("machine", "torch", "commit", "date"), "")
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


@pytest.mark.slow("verifies and times steps of every attention")
def test_every_attention_is_measured_or_says_why_not(monkeypatch):
    monkeypatch.setitem(bert_results.MODEL, "cpu", bert_results.MODEL["cpu"] | {"num_hidden_layers": 1})
    monkeypatch.setitem(bert_results.TOKENS, "cpu", 1024)
    rows = {row.attention: row for row in bert.run_case(CASE, cases.BERT_ATTENTIONS, {}, CPU, repeats=1, seconds=1)}
    assert list(rows) == list(cases.BERT_ATTENTIONS)
    without = {name: row.reason for name, row in rows.items() if row.reason}
    assert without == dict.fromkeys(cases.FLEX_IN_BERT, "on a CPU it is forward only")
    assert all(row.milliseconds > 0 and row.peak_gib is None for name, row in rows.items() if name not in without)


def test_steps_compare_with_no_attention_with_the_floor_and_with_dense():
    times = {"none": 40.0, "floor": 45.0, "sdpa": 200.0, "bigbird-64": 50.0}
    rows = [bert_results.Row(name, ms, 8.5, 3) for name, ms in times.items()]
    *_, sparse = bert_results.table(CASE, rows)
    assert sparse.split() == ["bigbird-64", "50.0", "80%", "90%", "0.250", "8.5"]
    *_, sparse = bert_results.table(CASE, [rows[0], replace(rows[3], rounds=1)])
    assert sparse.split() == ["bigbird-64", "50.0", "80%", "-", "-", "8.5", "timed", "once"]


def test_transformers_own_models_have_the_sizes_of_bert_and_their_sparse_attention():
    case = replace(CASE, model="large", dropout=0.3)
    of_bert = bert_models.make_model(case, CPU).config
    for name, kind in (
        ("transformers-longformer", "LongformerSelfAttention"),
        ("transformers-bigbird", "BigBirdBlock"),
    ):
        model = bert_models.model_with(name, case, CPU)
        assert all(
            getattr(model.config, key) == value
            for key, value in bert_models.sizes_of(case).items()
            if key != "max_position_embeddings"
        )
        kinds = [type(module).__name__ for module in model.modules()]
        assert sum(one.startswith(kind) for one in kinds) == of_bert.num_hidden_layers == 4


@pytest.mark.slow("verifies and times steps")
def test_bigbird_of_transformers_is_left_out_where_it_would_be_dense():
    (*_, row) = bert.run_case(replace(CASE, seq_len=704), ["transformers-bigbird"], {}, CPU, repeats=1, seconds=1)
    assert row.reason == "up to 704 tokens it is dense"


def test_the_floor_keeps_the_backward_of_query_and_key():
    for name, has in (("none", False), ("floor", True)):
        model = bert_models.model_with(name, replace(SHORT, dropout=0.0), CPU)
        data = bert.batch(1, 64, model.config.vocab_size, CPU)
        bert.loss_of(model, data, predicts_all=True).backward()
        attention = model.bert.encoder.layer[0].attention.self
        assert [x.weight.grad is not None for x in (attention.query, attention.key, attention.value)] == [
            has,
            has,
            True,
        ]


def test_a_whole_step_moves_the_weights_and_leaves_no_gradients():
    step = bert.make_step("bigbird-16", replace(CASE, whole_step=True, checkpointed=True, predicts_all=False), CPU)
    model = step.args[0]
    before = model.bert.encoder.layer[0].attention.self.query.weight.detach().clone()
    step()
    assert model.is_gradient_checkpointing
    assert not torch.equal(model.bert.encoder.layer[0].attention.self.query.weight, before)
    assert all(x.grad is None for x in model.parameters())


def test_what_was_slow_or_out_of_memory_is_not_tried_at_longer_lengths(monkeypatch):
    def rows(case, names, wrong, *_):
        times = {"sdpa": 900.0 * case.seq_len / 512, "bigbird-64": 50.0}
        found = [bert_results.Row(name, ms, rounds=3) for name, ms in times.items() if name not in wrong]
        found += [bert_results.Row(name, reason=reason) for name, reason in wrong.items()]
        return [*found, bert_results.Row("eager", reason="OutOfMemoryError: CUDA out of memory.")]

    monkeypatch.setattr(bert, "run_case", rows)
    grid = [replace(CASE, seq_len=seq_len) for seq_len in (512, 1024, 2048)]
    last = {row.attention: row for _, rows in bert.results(grid, ["bigbird-64"], {}, CPU, 3, 1.0) for row in rows[:-1]}
    assert last["sdpa"].reason == "not tried: a step of 1,024 tokens took 1.8 s" and last["bigbird-64"].milliseconds
    assert last["eager"].reason == "not tried: a shorter sequence ran out of memory"


def test_logits_of_labelled_tokens_give_the_same_loss():
    model = bert_models.make_model(replace(SHORT, dropout=0.0), CPU, num_hidden_layers=1)
    data = bert.batch(2, 64, model.config.vocab_size, CPU)
    predicted = []
    model.cls.register_forward_hook(lambda module, inputs, output: predicted.append(inputs[0].shape[:-1].numel()))
    of_all, of_labelled = (bert.loss_of(model, data, predicts_all) for predicts_all in (True, False))
    assert predicted == [2 * 64, len(data.labelled)] and 0 < len(data.labelled) < 64
    torch.testing.assert_close(of_all, of_labelled)


def test_dropout_is_that_of_attention_and_everything_else():
    config = bert_models.make_model(SHORT, CPU, num_hidden_layers=1).config
    assert (config.attention_probs_dropout_prob, config.hidden_dropout_prob) == (0.3, 0.3)


def test_without_attention_the_value_is_the_output():
    model = bert_models.make_model(SHORT, CPU, num_hidden_layers=1)
    bert_models.switch(model, "none")
    attention = model.bert.encoder.layer[0].attention.self
    hidden = torch.randn(2, 64, model.config.hidden_size)
    torch.testing.assert_close(attention(hidden)[0], attention.value(hidden))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.slow("verifies steps of every attention")
def test_a_wrong_structure_is_known(wrong_layout, dtype):
    assert bert.wrong_ones(["none", "sdpa", *cases.IN_BERT], dtype, CPU) == {}
    wrong_layout()
    wrong = bert.wrong_ones(["none", "sdpa", *cases.IN_BERT], dtype, CPU)
    assert list(wrong) == list(cases.IN_BERT)
    for reason in wrong.values():
        assert "the gradient of the first layer's query weight has an RMS error" in reason


@pytest.mark.slow("verifies steps of every attention")
def test_a_wrong_structure_is_not_timed(wrong_layout, capsys):
    wrong_layout()
    assert main("bert --peers bigbird-16 --repeats 3 --seconds 1".split()) == 1
    printed = capsys.readouterr()
    assert (
        "bigbird-16                       no time: bigbird-16: the gradient of the first layer's query weight"
        in printed.out
    )
    assert "ds_sparse itself was wrong" in printed.err


def test_what_fails_is_named_in_the_table(monkeypatch):
    def out_of_memory(*arguments, **options):
        raise RuntimeError("out of memory\nin many lines")

    monkeypatch.setattr(bert, "model_with", out_of_memory)
    rows = list(measured(CASE, "sdpa").values())
    assert [row.reason for row in rows] == ["RuntimeError: out of memory"] * 3
    assert [line.split()[1:3] for line in list(bert_results.table(CASE, rows))[2:]] == [["no", "time:"]] * 3


@pytest.mark.slow("verifies and times steps of every attention")
def test_command_prints_a_table_and_writes_the_rows(tmp_path, printed_again):
    path = tmp_path / "rows.json"
    arguments = "bert --seq-len 2048,1024 --peers bigbird-64 --dropout 0.1 --labelled-only --repeats 3 --seconds 1"
    assert main([*arguments.split(), "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert [(row["seq_len"], row["batch"], row["attention"]) for row in written["rows"]] == [
        (1024, 2, "none"), (1024, 2, "floor"), (1024, 2, "bigbird-64"),
        (2048, 1, "none"), (2048, 1, "floor"), (2048, 1, "bigbird-64"),
    ]  # fmt: skip
    assert {row["predicts_all"] for row in written["rows"]} == {False} and written["transformers"]
    printed = printed_again(path)
    assert "of ceiling" in printed and "labelled tokens predicted" in printed


@pytest.mark.slow("verifies and times steps")
def test_lengths_without_a_layout_are_named_and_are_no_failure(capsys):
    assert main("bert --seq-len 128 --peers longformer-64,flex-longformer-64 --repeats 1 --seconds 1".split()) == 0
    printed = capsys.readouterr()
    assert printed.out.count("no time: not tried: longformer-64 has no layout of 128 tokens") == 2


@pytest.mark.slow("verifies steps of two modes")
def test_random_blocks_of_modes_are_the_same_at_every_call():
    assert bert.wrong_ones(["bigbird-default-64", "transformers_bigbird-default-64"], "fp32", CPU) == {}


def test_the_longest_sequence_is_looked_for_attention_by_attention(monkeypatch, tmp_path):
    def results_of(work, arguments, waits, *_):
        ((name, case, _),) = arguments
        peak = case.seq_len / (400 if name == "eager" else 40_000)
        small = peak <= 100
        yield bert_results.Row(name, 1500.0, peak, 1) if small else Failure("OutOfMemoryError: CUDA out of memory.")

    properties = type("Properties", (), {"total_memory": 100 * 2**30})
    monkeypatch.setattr(bert_longest, "results_of", results_of)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(commands, "begin", lambda args, *_, **__: Run("bert", args.arguments, CONDITIONS))
    path = tmp_path / "rows.json"
    arguments = f"bert --device cuda --peers eager,bigbird-64 --longest 60 --labelled-only --json {path}"
    assert main(arguments.split()) == 0
    printed = json.loads(path.read_text())["rows"]
    assert {row["batch"] for row in printed} == {1} and [row["seq_len"] for row in printed][:2] == [4096, 8192]
    _, _, results = load(str(path))
    last = [line for lines in bert_results.report(results) for line in lines][-2:]
    tokens = [int(re.search(r": ([\d,]+) tokens;", line)[1].replace(",", "")) for line in last]
    assert 37_000 < tokens[0] <= 40_000 and 3_700_000 < tokens[1] <= 4_000_000
    assert last[1].startswith("the longest that fits, bigbird-64, dropout 0, bf16, labelled tokens predicted:")


@pytest.mark.slow("starts a process that trains a step")
def test_a_try_is_a_step_in_a_process_of_its_own():
    case = replace(CASE, seq_len=0, whole_step=True, is_try=True)
    tried, row = bert_longest.attempt("bigbird-64", case, CPU, 1024, 60)
    assert (tried.seq_len, tried.batch) == (1024, 1) and row.attention == "bigbird-64" and row.milliseconds > 0


def test_a_cpu_has_no_longest_sequence(capsys):
    assert main("bert --longest 10".split()) == 1
    printed = capsys.readouterr()
    assert not printed.out and "a CPU's memory is not filled by trying" in printed.err


def test_without_transformers_it_says_what_to_install(monkeypatch, capsys):
    for name in ("bert", "bert_models", "bert_longest", "no_attention"):
        monkeypatch.delitem(sys.modules, f"ds_sparse.bench.{name}", raising=False)
        monkeypatch.delattr(f"ds_sparse.bench.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["bert"]) == 1
    assert "pip install 'ds_sparse[transformers]'" in capsys.readouterr().err


@pytest.mark.parametrize("dropout", ["1", "-0.1", "much"])
def test_dropout_is_a_probability(capsys, dropout):
    with pytest.raises(SystemExit):
        main(["bert", f"--dropout={dropout}"])
    assert "is not a probability from 0 to below 1" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_peak_memory_is_that_of_one_model_and_its_step():
    device, case = torch.device("cuda"), bert_results.Case(seq_len=2048, dropout=0.0, dtype="bf16", device="cuda")
    alone, beside = measured(case, "bigbird-64", device=device), measured(case, "sdpa", "bigbird-64", device=device)
    # Parameters and gradients of BERT-base alone are 0.4 GiB.
    assert 0.4 < alone["bigbird-64"].peak_gib == pytest.approx(beside["bigbird-64"].peak_gib, rel=0.1)
