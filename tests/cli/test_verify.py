"""`ds_sparse verify`: what it says and how it ends; a kernel that is spoiled on purpose is found, and named."""

from __future__ import annotations

import json
import time

import pytest
import torch

from ds_sparse.cli import main
from ds_sparse.ops import attention_function, matmul, token
from ds_sparse.tools import terminal as module
from ds_sparse.tools.terminal import Terminal
from ds_sparse.verify import faults, variants


class Spoiled:
    """The operators of the library, one of which is off in one result."""

    def __init__(self, ops, name, spoil):
        self._ops, self._name, self._spoil = ops, name, spoil

    def __getattr__(self, name):
        operator = getattr(self._ops, name)
        if name != self._name:
            return operator

        def run(*call):
            return self._spoil(operator(*call))

        run.default = run  # operators are called by their overload, too
        return run


def spoiled(monkeypatch, module, name, spoil) -> None:
    monkeypatch.setattr(module, "ops", Spoiled(module.ops, name, spoil))


def test_all_variants_of_an_operation_are_right(capsys):
    assert main(["verify", "--device", "cpu", "--operation", "window_softmax"]) == 0
    first, family, last = capsys.readouterr().out.splitlines()
    assert first.startswith("device cpu, repeats 3, machine ")
    assert family.startswith("window_softmax          cpu       right: 4 variants, ")
    assert last.startswith("4 variants in ")
    assert last.endswith("s: all as near to float64 as plain PyTorch, and the same bits each time.")


EVERY = pytest.param(
    (8, 16, 32, 64, 128), [False, True, False], marks=pytest.mark.slow("verifies all variants of two operations")
)


@pytest.mark.parametrize(("blocks", "are_named"), [((16,), [True]), EVERY])
def test_a_gradient_that_a_kernel_spoils_is_found_and_the_variant_named(monkeypatch, capsys, blocks, are_named):
    """A hundredth of one block of the values' gradient, in one of all the variants."""
    every = variants.variants
    monkeypatch.setattr(variants, "variants", lambda device: [x for x in every(device) if x.block in blocks])

    def spoil(grads):
        if grads[2].shape[2:] == (64, 40) and grads[2].dtype == torch.float32:
            grads[2][0, 1, 16:32] *= 1.01
        return grads

    spoiled(monkeypatch, attention_function, "block_attention_backward", spoil)
    assert main(["verify", "--device", "cpu", "--operation", "packed attention"]) == 0
    capsys.readouterr()
    assert main(["verify", "--device", "cpu", "--operation", "block_sparse_attention"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(
        f"block_sparse_attention  cpu       WRONG: {len(are_named)} of {36 * len(blocks)} variants"
    )
    named = "  block_sparse_attention, cpu, block 16, head size 40, float32, sums in a fixed order, seed 1: "
    assert [
        line.startswith(named + "gradient of value, part 2 of 2, has an RMS error") for line in lines[2:-1]
    ] == are_named
    assert f"{len(are_named)} wrong. Report it" in lines[-1]


def test_an_output_that_changes_once_is_a_race(monkeypatch, capsys):
    calls = []

    def spoil(result):
        calls.append(result)
        # After the calls for the shapes and for the comparison.
        if len(calls) == 4:
            result.view(-1)[5] += 1
        return result

    spoiled(monkeypatch, token, "token_matmul_sdd", spoil)
    assert main(["verify", "--device", "cpu", "--operation", "sparse_matmul", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"] and len(found["wrong"]) == 1 == found["families"][0]["wrong"]
    assert found["wrong"][0]["variant"].startswith("sparse_matmul, cpu, block 64, head size 8, float16")
    assert "differs in 1 of" in found["wrong"][0]["what"] and "of result 0" in found["wrong"][0]["what"]


def test_what_raises_is_wrong(monkeypatch, capsys):
    def fails(_):
        raise RuntimeError("no kernel image")

    spoiled(monkeypatch, matmul, "matmul_sdd", fails)
    assert main(["verify", "--device", "cpu", "--operation", "sdd", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {fault["what"] for fault in found["wrong"]} == {"RuntimeError: no kernel image"}
    assert found["families"] == [
        {"operation": "sdd", "implementation": "cpu", "variants": 180, "wrong": 180}
        | {"seconds": found["families"][0]["seconds"]}
    ]


def test_of_many_wrong_variants_the_first_are_named(monkeypatch, capsys):
    monkeypatch.setattr(faults, "fault", lambda *_: "off")
    assert main(["verify", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert printed.count(": off\n") == 20 and "The first 20 are named." in printed


def test_more_seconds_are_more_rounds_with_other_numbers(monkeypatch, capsys):
    seeds = set()
    monkeypatch.setattr(faults, "fault", lambda variant, device, seed, *_: seeds.add(seed) or "")
    words = ["verify", "--device", "cpu", "--operation", "window_softmax", "--seed", "7", "--seconds", "1"]
    assert main(words) == 0
    assert len(seeds) > 1 and min(seeds) == 7


def test_a_person_sees_a_bar_and_a_pipe_plain_lines(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with terminal.progress(2, "sdd") as done:
        done("dsd")
    assert capsys.readouterr().out == "", "what is quick has no bar"
    monkeypatch.setattr(module, "BAR_AFTER", 0.01)
    with terminal.progress(2, "sdd") as done:
        terminal.line("right", "red")
        done("dsd")
        time.sleep(0.3)
    shown = capsys.readouterr().out
    assert "\x1b[31mright" in shown and "dsd" in shown and "1/2" in shown
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    Terminal().line("right", "red")
    assert capsys.readouterr().out == "right\n"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_every_variant_of_the_gpu_is_right(capsys):
    assert main(["verify", "--device", "cuda"]) == 0, capsys.readouterr().out
