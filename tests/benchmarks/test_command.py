"""The command lines of `python -m benchmarks`: the same options for the same things, and what is printed fits."""

import pytest

from benchmarks.models import attentions, bert_results, modernbert_results, sequence_results
from benchmarks.program import main
from ds_sparse.bench.runs import WIDTH

WIDEST = (1.23e-5, 0.123, 123.4, 98765.4)


def options_of(operation, capsys):
    with pytest.raises(SystemExit):
        main([operation, "--help"])
    return {word.strip(",") for word in capsys.readouterr().out.split() if word.startswith("--")}


@pytest.mark.parametrize("operation", ["bert", "modernbert", "sequence"])
def test_the_same_thing_has_the_same_name_as_in_other_operations(operation, capsys):
    assert {"--device", "--dtype", "--repeats", "--seconds", "--json"} <= options_of(operation, capsys)


def test_the_operations_and_peers_of_the_package_are_there_too(capsys):
    assert {"--peers", "--cases"} <= options_of("attention", capsys)
    for operation, peer in (("attention", "fa4"), ("packed", "fa4-varlen"), ("tokens", "'C++ loop'")):
        with pytest.raises(SystemExit):
            main([operation, "--peers", "none"])
        assert peer.strip("'") in capsys.readouterr().err


def test_training_has_the_options_that_all_operations_have(capsys):
    assert {"--device", "--dtype", "--json"} <= options_of("train", capsys)
    for option, sentence in {
        "--tokens=0": "'0' is not an integer of at least 1",
        "--minutes=-1": "'-1' is not a number above 0",
        "--seeds=0,x": "'x' is not an integer of at least 0",
        "--experiment=chess": "invalid choice: 'chess'",
    }.items():
        with pytest.raises(SystemExit):
            main(["train", option])
        assert sentence in capsys.readouterr().err


def widest(lines):
    return max(lines, key=len)


@pytest.mark.parametrize("number", WIDEST)
def test_tables_of_models_fit(number):
    case = bert_results.Case(1 << 20, 0.125, "bf16", "cuda", predicts_all=False)
    of_bert = [bert_results.Row(name, number, number, rounds=20) for name in attentions.BERT_ATTENTIONS]
    of_bert.append(bert_results.Row(max(attentions.MODES_IN_BERT, key=len), number, number, rounds=1))
    assert len(widest(bert_results.table(case, of_bert))) <= WIDTH
    case = modernbert_results.Case(8192, "bf16", "cuda")
    steps = [
        modernbert_results.Row(name, number, 1, 1e3 * number, number, 20) for name in modernbert_results.ATTENTIONS
    ]
    assert len(widest(modernbert_results.table(case, steps))) <= WIDTH


@pytest.mark.parametrize("number", WIDEST)
def test_tables_of_sequences_fit(number):
    case = sequence_results.Case(1 << 20, "longformer-64", "bf16", "cuda", 2, sequence_results.CHECKPOINTED, 64)
    row = sequence_results.Row(
        8, sequence_results.DATA, number, 1e3 * number, 0.987, number, number, loss_alone=number, rounds=20
    )
    assert len(widest(sequence_results.table([(case, row)]))) <= WIDTH
    assert len(next(sequence_results.lines(case, row))) <= WIDTH
