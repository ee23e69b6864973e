import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import pytest

from ds_sparse.cli import main
from ds_sparse.sparsity import SparsityConfig, _registry, register_sparsity

FIXED = Path(__file__).parents[2] / "configs" / "fixed.json"
REST = f"; DeepSpeed {deepspeed.__version__} takes the rest"


@pytest.fixture
def write(tmp_path):
    def write_block(block, **others):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({"train_batch_size": 8, "sparse_attention": block} | others))
        return str(path)

    return write_block


@pytest.fixture
def check(write, capsys):
    """check(block, *options): the status, and what is said of the file, to standard output and to standard error."""

    def checked(block, *options, **others):
        path = write(block, **others)
        status = main(["check", path, *options])
        out, err = ([line.removeprefix(f"{path}: ") for line in x.splitlines()] for x in capsys.readouterr())
        return status, out, err

    return checked


def test_a_right_file_is_one_line(capsys):
    assert main(["check", str(FIXED)]) == 0
    assert capsys.readouterr() == (f"{FIXED}: mode fixed, block 16, density 27.3% at 2048 tokens{REST}.\n", "")


def test_mistakes_of_the_block_and_of_the_rest_come_together(check):
    assert check({"blok": 16}, zero_optimization={"bogus": 1}, steps_per_prin=3) == (
        1,
        ['steps_per_prin: DeepSpeed reads no such key, and ignores it. Did you mean "steps_per_print"?'],
        [
            'sparse_attention.blok: unknown key (given 16). Did you mean "block"?',
            "zero_optimization.bogus: DeepSpeed has no such key (given 1).",
        ],
    )
    assert check({"mode": "dense"}, "--block-only", zero_optimization={"bogus": 1})[0] == 0
    (result,) = json.loads("".join(check({}, "--json")[1]))
    assert result["ok"] and result["deepspeed"] == deepspeed.__version__


def test_standard_input(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"sparse_attention": {"mode": "dense"}}')))
    assert main(["check", "--block-only", "-"]) == 0
    assert capsys.readouterr().out == "standard input: mode dense, block 16.\n"


@pytest.mark.parametrize(
    "raised, sentence",
    [
        (
            ModuleNotFoundError("No module named 'deepspeed'", name="deepspeed"),
            "This part of ds_sparse needs deepspeed, which is not installed: pip install 'ds_sparse[deepspeed]'.",
        ),
        (ImportError("libmpi.so: not found"), "libmpi.so: not found"),
    ],
)
def test_without_deepspeed_one_line_says_what_was_not_checked(check, monkeypatch, raised, sentence):
    def refuse(name, *_):
        if name == "deepspeed":
            raise raised

    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=refuse), *sys.meta_path])
    status, (summary, line), _ = check({})
    assert status == 0 and summary.endswith("at 2048 tokens.")
    assert line == f"the rest of the file was not checked: {sentence}"


@pytest.mark.parametrize(
    "block, start, notices",
    [
        (
            {"num_random_blocks": 0, "attention": "unidirectional"},
            "mode fixed, block 16, density ",
            ["sparse_attention.num_random_blocks: ", "sparse_attention.attention: "],
        ),
        (
            {"mode": "bigbird", "block": 128, "num_sliding_window_blocks": 31},
            "mode bigbird, block 128;",
            ["sparse_attention: no layout at 2048 tokens (Number of sliding window blocks, 31"],
        ),
    ],
)
def test_notices_follow_and_leave_a_file_right(check, block, start, notices):
    status, (summary, *found), _ = check(block)
    assert status == 0 and summary.startswith(start)
    assert all(line.startswith(notice) for line, notice in zip(found, notices, strict=True))


@pytest.mark.parametrize(
    "content",
    [
        None, b"", b"{", b"\xff", b"[]", b'{"sparse_attention": null}', b'{"sparse_attention": 3}',
        b'{"x":' * 3000 + b"1" + b"}" * 3000,
    ],
    ids=lambda content: str(content)[:30],
)  # fmt: skip
def test_whatever_the_file_holds_there_is_a_sentence(tmp_path, capsys, content):
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_bytes(content)
    assert main(["check", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"{path}: ") and err.count("\n") == 1


def test_a_users_structure_that_fails_is_a_sentence(check, monkeypatch):
    monkeypatch.setattr(_registry, "_classes", dict(_registry._classes))

    @register_sparsity("failing")
    class Failing(SparsityConfig):
        def make_layout(self, seq_len):
            return [][seq_len]

    sentence = (
        'sparse_attention.mode: got "failing", but Failing has no layout at a sequence length of 64: '
        "IndexError: list index out of range"
    )
    assert check({"mode": "failing"}, "--seq", "64") == (1, [], [sentence])
    assert check({"mode": "failing"})[:2] == (
        0,
        [
            f"mode failing, block 16{REST}.",
            "sparse_attention: no layout at 2048 tokens (IndexError: list index out of range).",
        ],
    )


@pytest.mark.parametrize(
    "options",
    [["--seq", "100000000"], ["--seq", str(16 * 10**30)], ["--seq", "2048", "--heads", "9" * 30]],
    ids=["length", "longer", "heads"],
)
@pytest.mark.parametrize("mode", ["fixed", "variable", "bigbird", "bslongformer", "dense"])
def test_lengths_and_heads_beyond_all_memory_are_one_sentence(check, mode, options):
    status, out, (sentence,) = check({"mode": mode, "different_layout_per_head": True}, *options)
    assert (status, out) == (1, []) and sentence.startswith("sparse_attention.block: got 16, but ")


@pytest.mark.parametrize(("width", "counts", "reach"), [(0, 1, 0), (4, 5, 2)])
@pytest.mark.parametrize("mode", ["bigbird", "bslongformer", "local_sliding_window"])
def test_an_even_window_is_said_with_what_it_counts_as(check, mode, width, counts, reach):
    said = (
        f"sparse_attention.num_sliding_window_blocks: a sliding window of {width} blocks counts as one of {counts}, "
        f"as in DeepSpeed: it reaches {reach} blocks from the diagonal."
    )
    assert said in check({"mode": mode, "num_sliding_window_blocks": width}, "--block-only")[1]
    assert "counts as" not in str(check({"mode": mode, "num_sliding_window_blocks": 5}, "--block-only"))


@pytest.mark.parametrize("huge", [10**8, 10**12, 10**30])
@pytest.mark.parametrize(
    ("mode", "right", "wrong"),
    [
        ("fixed", ["num_local_blocks", "seed"], ["num_global_blocks", "num_different_global_patterns"]),
        (
            "variable",
            ["local_window_blocks", "global_block_indices", "global_block_end_indices"],
            ["num_random_blocks"],
        ),
        ("bigbird", ["seed"], ["num_random_blocks", "num_sliding_window_blocks", "num_global_blocks"]),
        ("bslongformer", ["global_block_indices", "global_block_end_indices"], ["num_sliding_window_blocks"]),
        ("local_sliding_window", [], ["num_sliding_window_blocks"]),
        ("dense", [], ["block"]),
    ],
)
def test_numbers_beyond_all_bounds_are_fine_or_get_sentences(check, mode, right, wrong, huge):
    for key in (*right, *wrong):
        value = huge if key.startswith("num") or key in ("seed", "block") else [huge]
        status, out, err = check({"mode": mode, key: value}, "--seq", "256")
        assert status == (key in wrong) and bool(err) == (key in wrong) != bool(out)
        start = f"sparse_attention.{key}: got {huge}" if key in wrong else f"mode {mode}, "
        assert (out or err)[0].startswith(start)


def test_keys_that_the_terminal_cannot_print(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"sparse_attention": {"blöck": 16}}', encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "ds_sparse", "check", "--block-only", str(path)],
        capture_output=True,
        check=False,
        cwd=FIXED.parents[1],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 1
    assert b'bl?ck: unknown key (given 16). Did you mean "block"?' in done.stderr
