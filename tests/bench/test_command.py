"""The command lines of `ds_sparse bench`: the same options for the same things, and what is printed fits."""

import pytest

from ds_sparse.bench import OPERATIONS
from ds_sparse.cli import main

WIDEST = (1.23e-5, 0.123, 123.4, 98765.4)


def options_of(name, capsys):
    with pytest.raises(SystemExit):
        main(["bench", name, "--help"])
    return {word.strip(",") for word in capsys.readouterr().out.split() if word.startswith("--")}


def test_the_same_thing_has_the_same_name_in_all_operations(capsys):
    options = {name: options_of(name, capsys) for name in OPERATIONS}
    sizes = {"--seq-len", "--heads", "--head-dim", "--batch"}
    own = {
        "matmul": sizes | {"--operations", "--layout", "--block"},
        "attention": {"--peers", "--cases", "--break-even", "--growth", "--quick"},
        "window": sizes | {"--peers", "--window"},
        "packed": {"--peers", "--cases"},
        "selected": {"--peers", "--cases"},
        "tokens": sizes | {"--peers", "--sparsity", "--pairs", "--profile"},
        "index": {"--peers", "--cases"},
    }
    for name, these in options.items():
        assert {"--device", "--dtype", "--repeats", "--seconds", "--json"} | own[name] <= these, name


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        *((f"{name} --dtype=fp32,fp8", "'fp8' is not one of fp32, bf16, fp16") for name in OPERATIONS),
        *((f"{name} --repeats=0", "'0' is not an integer of at least 1") for name in OPERATIONS),
        *((f"{name} --device=tpu", "invalid choice: 'tpu'") for name in OPERATIONS),
        *((f"{name} --peers=nobody", "'nobody' is not one of ") for name in OPERATIONS if name != "matmul"),
        ("tokens --sparsity 100", "'100' is not a percentage from 0 to below 100"),
        ("tokens --steps=sdpa", "unrecognized arguments"),
        ("matmul --block 16,24", "argument --block: '24' is not one of 8, 16, 32, 64, 128"),
        ("attention --growth --break-even", "not allowed with argument"),
    ],
)
def test_a_wrong_value_is_a_sentence(capsys, line, sentence):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *line.split()])
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and not printed.out and sentence in printed.err


def test_results_that_are_there_are_not_overwritten(capsys, tmp_path):
    file = tmp_path / "rows.json"
    file.write_text("measured for hours")
    assert main(["bench", "window", "--json", str(file)]) == 1
    assert f"{file} is there already" in capsys.readouterr().err and file.read_text() == "measured for hours"


@pytest.mark.parametrize(
    ("name", "first"), [("attention", "fixed-16"), ("packed", "bigbird-2048"), ("selected", "msa-32k")]
)
def test_a_case_that_is_not_there_is_a_sentence(capsys, name, first):
    assert main(["bench", name, "--cases", "nothing-*"]) == 2
    assert f"--cases nothing-*: none of {first}, " in capsys.readouterr().err
