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


@pytest.fixture
def write(tmp_path):
    def write_block(block, **others):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({"train_batch_size": 8, "sparse_attention": block} | others))
        return str(path)

    return write_block


def test_a_right_file_is_one_line(capsys):
    assert main(["check", str(FIXED)]) == 0
    out, err = capsys.readouterr()
    read = f"DeepSpeed {deepspeed.__version__} takes the rest"
    assert (out, err) == (f"{FIXED}: mode fixed, block 16, density 27.3% at 2048 tokens; {read}.\n", "")


def test_the_density_is_that_of_the_length_asked_for(capsys, write):
    path = write({"mode": "local_sliding_window", "attention": "bidirectional"})
    assert main(["check", "--block-only", path, "--seq", "64", "--heads", "2"]) == 0
    assert capsys.readouterr().out == f"{path}: mode local_sliding_window, block 16, density 62.5% at 64 tokens.\n"


def test_any_length_is_right_and_a_notice_says_what_wants_whole_blocks(capsys, write):
    path = write({"mode": "local_sliding_window", "attention": "bidirectional"})
    assert main(["check", "--block-only", path, "--seq", "1000", "--heads", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: mode local_sliding_window, block 16, density 4.7% at 1000 tokens.",
        f"{path}: sparse_attention.block: 1000 tokens end in a short block of 8. Fused attention takes any length; "
        "SparseSelfAttention, MatMul and Softmax want a multiple of 16, such as 1008.",
    ]


def test_the_block_alone_is_read_without_a_layout_unless_a_length_is_asked_for(capsys, write):
    path = write({"mode": "bslongformer"}, zero_optimization={"bogus": 1})
    assert main(["check", "--block-only", path]) == 0
    assert capsys.readouterr().out == f"{path}: mode bslongformer, block 16.\n"


def test_mistakes_of_the_block_and_of_the_rest_come_together(capsys, write):
    path = write({"blok": 16}, zero_optimization={"bogus": 1}, steps_per_prin=3)
    assert main(["check", path]) == 1
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        f'{path}: sparse_attention.blok: unknown key (given 16). Did you mean "block"?',
        f"{path}: zero_optimization.bogus: DeepSpeed has no such key (given 1).",
    ]
    assert out == (
        f'{path}: steps_per_prin: DeepSpeed reads no such key, and ignores it. Did you mean "steps_per_print"?\n'
    )


def test_structures_by_layer_are_named_and_checked(capsys, write):
    layers = {"0-1": {"num_local_blocks": 2}, "3": None, "4": {"mode": "bigbird", "num_random_blocks": 1}}
    path = write({"block": 32, "layers": layers})
    assert main(["check", "--block-only", "--seq", "1024", path]) == 0
    summary, notice = capsys.readouterr().out.splitlines()
    assert summary.startswith(
        f"{path}: mode fixed, block 32, density 34.4% at 1024 tokens; layers 0-1: mode fixed, block 32, density 53.1%; "
        "layers 3: dense, null; layers 4: mode bigbird, block 32, density "
    )
    assert notice.startswith(f'{path}: sparse_attention.layers."4".seed: not given')
    assert main(["check", "--block-only", "--json", path]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["layers"]["0-1"] == {"mode": "fixed", "block": 32, "density": None} and result["layers"]["3"] is None
    assert main(["check", "--block-only", "--layers", "4", path]) == 1
    assert capsys.readouterr().err == (
        f'{path}: sparse_attention.layers."4": names layer 4, and the model has 4 attention layers, 0 to 3.\n'
    )


def test_random_blocks_without_a_seed_get_a_notice(capsys, write):
    path = write({"mode": "bigbird", "num_random_blocks": 1})
    assert main(["check", "--block-only", path]) == 0
    _, notice = capsys.readouterr().out.splitlines()
    assert notice.startswith(f"{path}: sparse_attention.seed: not given: each run draws random blocks of its own")
    path = write({"mode": "bigbird", "num_random_blocks": 1, "seed": 3})
    assert main(["check", "--block-only", path]) == 0
    assert capsys.readouterr().out.count("\n") == 1


def test_several_files_and_standard_input(capsys, write, monkeypatch):
    wrong = write({"block": 17})
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"sparse_attention": {"mode": "dense"}}')))
    assert main(["check", "--block-only", str(FIXED), "-", wrong]) == 1
    out, err = capsys.readouterr()
    assert out == f"{FIXED}: mode fixed, block 16.\nstandard input: mode dense, block 16.\n"
    assert err == f"{wrong}: sparse_attention.block: got 17; wanted 8, 16, 32, 64 or 128.\n"


def test_json_has_the_same_for_programs(capsys, write):
    wrong = write({"block": 17})
    assert main(["check", "--json", str(FIXED), wrong]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    first, second = json.loads(out)
    assert first.pop("density") == pytest.approx(0.2734, abs=1e-4)
    assert first == {
        "file": str(FIXED), "ok": True, "mode": "fixed", "block": 16, "seq_len": 2048,
        "deepspeed": deepspeed.__version__, "mistakes": [], "notices": [], "layers": {},
    }  # fmt: skip
    assert second["file"] == wrong and second["ok"] is False
    assert second["mistakes"] == ["sparse_attention.block: got 17; wanted 8, 16, 32, 64 or 128."]


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
def test_without_deepspeed_one_line_says_what_was_not_checked(capsys, monkeypatch, raised, sentence):
    def refuse(name, *_):
        if name == "deepspeed":
            raise raised

    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=refuse), *sys.meta_path])
    assert main(["check", str(FIXED)]) == 0
    summary, line = capsys.readouterr().out.splitlines()
    assert summary.endswith("at 2048 tokens.")
    assert line == f"{FIXED}: the rest of the file was not checked: {sentence}"


def test_notices_follow(capsys, write):
    path = write({"num_random_blocks": 0, "attention": "unidirectional"})
    assert main(["check", path]) == 0
    summary, *notices = capsys.readouterr().out.splitlines()
    assert summary.startswith(f"{path}: mode fixed, block 16, density ")
    assert [notice.split(": ")[1] for notice in notices] == [
        "sparse_attention.num_random_blocks",
        "sparse_attention.attention",
    ]


def test_all_mistakes_go_to_standard_error(capsys, write):
    path = write({"blok": 16, "num_local_blocks": "4", "block": 32})
    assert main(["check", path, "--seq", "2000"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f'{path}: sparse_attention.blok: unknown key (given 16). Did you mean "block"?',
        f'{path}: sparse_attention.num_local_blocks: got "4"; wanted an integer of at least 1.',
    ]


def test_a_structure_wider_than_the_usual_length_is_right_when_no_length_is_asked_for(capsys, write):
    path = write({"mode": "bigbird", "block": 128, "num_sliding_window_blocks": 31})
    assert main(["check", path]) == 0
    assert "no layout at 2048 tokens (Number of sliding window blocks, 31" in capsys.readouterr().out
    assert main(["check", path, "--seq", "2048"]) == 1


def test_a_file_without_the_block_trains_dense(capsys, tmp_path):
    path = tmp_path / "dense.json"
    path.write_text('{"train_batch_size": 8}')
    assert main(["check", str(path)]) == 0
    assert "no sparse_attention block: it trains dense" in capsys.readouterr().out


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
    assert out == ""
    assert err.startswith(f"{path}: ")
    assert err.count("\n") == 1


def test_a_users_structure_that_fails_is_a_sentence(capsys, write, monkeypatch):
    monkeypatch.setattr(_registry, "_classes", dict(_registry._classes))

    @register_sparsity("failing")
    class Failing(SparsityConfig):
        def make_layout(self, seq_len):
            return [][seq_len]

    path = write({"mode": "failing"})
    assert main(["check", path, "--seq", "64"]) == 1
    assert capsys.readouterr() == (
        "",
        f'{path}: sparse_attention.mode: got "failing", but Failing has no layout at a sequence length of 64: '
        "IndexError: list index out of range\n",
    )
    assert main(["check", path]) == 0
    summary, notice = capsys.readouterr().out.splitlines()
    assert summary.startswith(f"{path}: mode failing, block 16;")
    assert notice == f"{path}: sparse_attention: no layout at 2048 tokens (IndexError: list index out of range)."


@pytest.mark.parametrize(
    "options",
    [["--seq", "100000000"], ["--seq", str(16 * 10**30)], ["--seq", "2048", "--heads", "9" * 30]],
    ids=["length", "longer", "heads"],
)
@pytest.mark.parametrize("mode", ["fixed", "variable", "bigbird", "bslongformer", "dense"])
def test_lengths_and_heads_beyond_all_memory_are_one_sentence(capsys, write, mode, options):
    path = write({"mode": mode, "different_layout_per_head": True})
    assert main(["check", path, *options]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"{path}: sparse_attention.block: got 16, but ") and err.count("\n") == 1


@pytest.mark.parametrize(("width", "counts", "reach"), [(0, 1, 0), (4, 5, 2)])
@pytest.mark.parametrize("mode", ["bigbird", "bslongformer", "local_sliding_window"])
def test_an_even_window_is_said_with_what_it_counts_as(capsys, write, mode, width, counts, reach):
    path = write({"mode": mode, "num_sliding_window_blocks": width})
    assert main(["check", path, "--block-only"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "num_sliding_window_blocks" in line]
    assert said == [
        f"{path}: sparse_attention.num_sliding_window_blocks: a sliding window of {width} blocks counts as one of "
        f"{counts}, as in DeepSpeed: it reaches {reach} blocks from the diagonal."
    ]
    assert main(["check", write({"mode": mode, "num_sliding_window_blocks": 5}), "--block-only"]) == 0
    assert "counts as" not in capsys.readouterr().out


@pytest.mark.parametrize("huge", [10**8, 10**12, 10**30])
@pytest.mark.parametrize(
    ("mode", "key", "fits"),
    [
        ("fixed", "num_local_blocks", True),
        ("fixed", "num_global_blocks", False),
        ("fixed", "num_different_global_patterns", False),
        ("fixed", "seed", True),
        ("variable", "local_window_blocks", True),
        ("variable", "global_block_indices", True),
        ("variable", "global_block_end_indices", True),
        ("variable", "num_random_blocks", False),
        ("bigbird", "num_random_blocks", False),
        ("bigbird", "num_sliding_window_blocks", False),
        ("bigbird", "num_global_blocks", False),
        ("bigbird", "seed", True),
        ("bslongformer", "num_sliding_window_blocks", False),
        ("bslongformer", "global_block_indices", True),
        ("bslongformer", "global_block_end_indices", True),
        ("local_sliding_window", "num_sliding_window_blocks", False),
        ("dense", "block", False),
    ],
)
def test_numbers_beyond_all_bounds_are_fine_or_get_sentences(capsys, write, mode, key, fits, huge):
    path = write({"mode": mode, key: huge if key.startswith("num") or key in ("seed", "block") else [huge]})
    assert main(["check", path, "--seq", "256"]) == (0 if fits else 1)
    out, err = capsys.readouterr()
    start = f"{path}: mode {mode}, " if fits else f"{path}: sparse_attention.{key}: got {huge}"
    assert (out == "") != fits and (err == "") == fits
    assert (out or err).startswith(start)
    assert all(line.startswith(f"{path}: ") for line in err.splitlines())


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
