"""The command lines of `ds_sparse bench`: the same options for the same things, and what is printed fits."""

import dataclasses
import itertools

import pytest

from ds_sparse.bench import attention, cases, layouts, matmul, packed, packed_cases, packed_peers, peers, tokens, window
from ds_sparse.bench.machine import DIRECTIONS, FORWARD, TRAIN
from ds_sparse.bench.operations import Row
from ds_sparse.bench.runs import WIDTH
from ds_sparse.cli import main

OPERATIONS = ("matmul", "attention", "window", "packed", "tokens")
"""Those that time rounds."""

WIDEST = (1.23e-5, 0.123, 123.4, 98765.4)


def options_of(operation, capsys):
    with pytest.raises(SystemExit):
        main(["bench", operation, "--help"])
    return {word.strip(",") for word in capsys.readouterr().out.split() if word.startswith("--")}


def test_the_same_thing_has_the_same_name_in_all_operations(capsys):
    options = {operation: options_of(operation, capsys) for operation in OPERATIONS}
    for operation, these in options.items():
        assert {"--device", "--dtype", "--repeats", "--seconds", "--json"} <= these, operation
    for operation in ("matmul", "window", "tokens"):
        assert {"--seq-len", "--heads", "--head-dim", "--batch"} <= options[operation]
    for operation in ("attention", "window", "packed", "tokens"):
        assert "--peers" in options[operation]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--dtype=fp32,fp8", "'fp8' is not one of fp32, bf16, fp16"),
        ("--repeats=0", "'0' is not an integer of at least 1"),
        ("--device=tpu", "invalid choice: 'tpu'"),
    ],
)
def test_a_wrong_value_of_a_shared_option_is_a_sentence(capsys, operation, option, sentence):
    with pytest.raises(SystemExit):
        main(["bench", operation, option])
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--models=64x1", "--steps=sdpa", "--attentions=sdpa"])
def test_spellings_of_before_are_gone(capsys, option):
    with pytest.raises(SystemExit):
        main(["bench", "tokens", option])
    assert "unrecognized arguments" in capsys.readouterr().err


def widest(lines):
    return max(lines, key=len)


@pytest.mark.parametrize("number", WIDEST)
def test_tables_of_attention_fit(number):
    name = max((case.small().name for case in (*cases.TABLE, *cases.BREAK_EVEN)), key=len)
    case = dataclasses.replace(cases.TABLE[0], name=name)
    rows = [
        attention.Row(peer, direction, number, 1234.5, number, number, rounds=20)
        for peer, direction in itertools.product(peers.PEERS, DIRECTIONS)
    ]
    result = attention.Result(case, "bf16", 0.25, dict.fromkeys(DIRECTIONS, number), {}, rows, {})
    assert len(widest(list(attention.table(result))[2:])) <= WIDTH
    assert len(widest(attention.summary([result]))) <= WIDTH
    assert len(widest(attention.growth([result]))) <= WIDTH


@pytest.mark.parametrize("number", WIDEST)
def test_tables_of_matmul_fit(number):
    case = matmul.Case(max(layouts.LAYOUTS, key=len), 128, "bf16", 64, 12, 1 << 20, 128)
    names = [*matmul.DENSE, *matmul.DENSE.values(), "dense attention in parts"]
    rows = [
        Row(name, direction, "", number, number, number, max(number, 0.5), "FLOPs", 20)
        for name, direction in itertools.product(dict.fromkeys(names), DIRECTIONS)
    ]
    result = matmul.Result(case, 0.25, rows)
    is_table = [line for line in matmul.table(result) if not line.startswith("break-even")][1:]
    assert len(widest(is_table)) <= WIDTH
    assert len(widest(matmul.summary([result]))) <= WIDTH
    of_cpu = [dataclasses.replace(row, to_dense=12.34, to_floor=None) for row in rows]
    assert len(widest(matmul.summary([matmul.Result(case, 0.25, of_cpu)]))) <= WIDTH


@pytest.mark.parametrize("number", WIDEST)
def test_tables_of_tokens_fit(number):
    results = []
    for sparsity in (0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 0.9999):
        rows = [tokens.Row(step, direction, number) for step in tokens.STEPS for direction in (FORWARD, TRAIN)]
        case = tokens.Case(1 << 20, 768, 12, sparsity)
        results.append(tokens.Result(case, 1 << 38, rows, {}, {FORWARD: number, TRAIN: number}))
    assert len(widest(line for line in tokens.table(results) if not line.startswith("beats"))) <= WIDTH


@pytest.mark.parametrize("number", WIDEST)
def test_tables_of_windows_fit(number):
    rows = [
        Row("attention in parts", direction, "", number, number, number, number, "memory", 20)
        for direction in DIRECTIONS
    ]
    assert len(widest(window.table(window.Case(1 << 20, 65536, "bf16", 128, 128, 128), rows))) <= WIDTH


@pytest.mark.parametrize("number", WIDEST)
def test_tables_of_packed_documents_fit(number):
    rows = [
        packed.Row(peer, direction, number, 1e3 * number, number, number, 20)
        for peer, direction in itertools.product(packed_peers.PEERS, packed.DIRECTIONS)
    ]
    for case in packed_cases.TABLE:
        about = packed.About("bf16", 99999, 1, 1 << 20, 99999, 1 << 20, 0.5, 1.0, number)
        result = packed.Result(case.small(), about, rows)
        # Sentences are wrapped; tables stand.
        assert len(widest(line for line in packed.table(result) if ": " not in line)) <= WIDTH
        assert len(widest(packed.summary([result]))) <= WIDTH
