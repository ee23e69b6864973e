import re
from argparse import Namespace

import pytest
import torch

from ds_sparse import reference
from ds_sparse.bench import matmul, window
from ds_sparse.bench.bsr import bsr_operations
from ds_sparse.bench.layouts import LAYOUTS, make_layout
from ds_sparse.bench.reasons import Unsupported
from ds_sparse.cli import main
from ds_sparse.layout import density

CPU = torch.device("cpu")
CASE = matmul.Case("bslongformer", 16, "fp32", batch=1, heads=2, seq_len=128, head_dim=16)
NONE = Namespace()


def outputs(operation, problem):
    """What each peer that runs here gives."""
    found = {}
    for name, build in operation.peers.items():
        if not name.startswith("torch.sparse"):
            peer = build(problem)
            found[name] = peer.call(*(problem.inputs if peer.inputs is None else peer.inputs))
    return found


def test_all_ways_to_an_operation_agree():
    problem = matmul.Problem(CASE, CPU, NONE)
    problem.layout = torch.ones(1, 8, 8, dtype=torch.bool)
    problem.ours = matmul.our_operations(problem.layout, 16, 16)
    found = outputs(matmul.OPERATION, problem)
    for name in ("SDPA dense", matmul.MASK, matmul.LOOP, matmul.IN_PARTS, "dense p @ v", "dsd"):
        torch.testing.assert_close(found["attention"], found[name])
    for name in ("dense v^T @ p^T", "dds"):
        torch.testing.assert_close(found["attention"].mT, found[name])


@pytest.mark.parametrize("reach", [1, 7, 25, 64, 150])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_all_windowed_attention_is_the_same_function(monkeypatch, reach):
    # Compiled or not, FlexAttention is the same function.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    found = outputs(window.OPERATION, window.Problem(window.Case(100, reach, "fp32", 1, 2, 16), CPU, NONE))
    expected = found["window_attention"]
    for name in ("attention in parts", "SDPA band mask", "sliding chunks", "FlexAttention"):
        torch.testing.assert_close(found[name], expected)
    assert torch.allclose(found["SDPA dense"], expected, atol=1e-5) == (reach >= 99)


@pytest.mark.parametrize("reach", [0, 7, 99, 500])
def test_density_of_a_window_is_that_of_the_mask(reach):
    mask = reference.window_mask(100, (reach,))
    assert window.Case(100, reach, "fp32").density == pytest.approx(mask.double().mean().item())


@pytest.mark.parametrize("wrong", [None, 0, -1])
def test_of_torch_sparse_the_call_that_is_timed_is_verified(measure, monkeypatch, wrong):
    """Wrong is one head of the first or the last of many sequences."""
    case = matmul.Case("fixed", 16, "fp32", batch=3, heads=2, seq_len=128, head_dim=16)

    def operations(layout, block, matrices, dtype):
        def spoiled(operation):
            def call(*inputs):
                output = operation(*inputs)
                if wrong is not None:
                    output.view(matrices, -1)[wrong] *= 1.001
                return output.detach()

            return call

        return {name: spoiled(call) for name, call in matmul.our_operations(layout, block, 16).items()}

    monkeypatch.setattr(matmul, "bsr_operations", operations)
    names = [*matmul.JOBS, *matmul.JOBS.values(), *(f"torch.sparse {name}" for name in matmul.JOBS)]
    result = measure(matmul.OPERATION, case, names)
    for name in matmul.JOBS:
        reasons = [row.reason for row in result.rows if row.name == f"torch.sparse {name}"]
        if wrong is None:
            assert reasons == ["", *["torch.sparse's block-sparse operations are forward only"] * 2]
        else:
            places = ("batch 0, head 0", "batch 2, head 1") if name == "attention" else ("part 1 of 2,", "part 2 of 2,")
            assert {reason.partition(" has")[0] for reason in reasons} == {f"output, {places[wrong]}"}


def test_torch_sparse_is_named_with_the_reason(measure):
    names = matmul.names(Namespace(operations=["sdd", "dsd"]))
    lines = list(matmul.lines([measure(matmul.OPERATION, CASE, names)]))
    assert lines[-1].startswith("torch.sparse sdd, torch.sparse dsd: no time: on a GPU only")
    with pytest.raises(Unsupported, match="on a GPU only"):
        bsr_operations(make_layout("fixed", 16, 256), 16, 2, torch.float32)


def test_on_a_gpu_as_many_sequences_as_there_is_room_for():
    def sizes(seq_len, head_dim, batch):
        options = {"layout": ["fixed"], "block": [64], "dtype": ["bf16"], "heads": [4], "batch": batch}
        cases = matmul.cases(Namespace(seq_len=seq_len, head_dim=head_dim, **options))
        return [(case.seq_len, case.head_dim, case.batch) for case in cases]

    assert sizes([4096, 16384], [64, 128], None) == [
        (4096, 64, 12), (4096, 128, 12), (16384, 64, 1), (16384, 128, 1),
    ]  # fmt: skip
    assert sizes([16384], [64], [2]) == [(16384, 64, 2)]


@pytest.mark.parametrize(
    "options",
    [
        "matmul --block 16 --seq-len 100",
        "matmul --layout random-1 --block 64 --seq-len 256",
        "window --window 9,64 --seq-len 64",
    ],
)
def test_sizes_without_a_layout_are_wrong_usage(options, capsys):
    assert main(["bench", *options.split()]) == 2
    assert re.search("100|Of 4 x 4 blocks|--window 64 is not below --seq-len 64", capsys.readouterr().err)


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_layout_for_all_heads_the_same_again(name):
    layout = make_layout(name, 16, 1024)
    assert layout.shape == (1, 64, 64) and layout.dtype == torch.bool
    assert torch.equal(layout, make_layout(name, 16, 1024))
    if name.startswith("random"):
        percent = int(name.removeprefix("random-"))
        assert density(make_layout(name, 16, 4096)) == pytest.approx(percent / 100, rel=0.05)


@pytest.mark.parametrize(("block", "reach"), [(16, 8), (64, 2), (128, 1)])
def test_dense_row_is_one_long_row_among_short_ones(block, reach):
    (layout,) = make_layout("dense-row", block, 4096)
    rows, live = len(layout), layout.sum(1)
    assert live[rows // 2] == rows and (live == rows).sum() == 1
    near = range(3 * rows // 4 - reach, 3 * rows // 4 + reach + 1)
    assert layout[3 * rows // 4].nonzero().flatten().tolist() == [*near]


@pytest.mark.parametrize(
    ("name", "block", "seq_len", "message"),
    [("random-1", 64, 256, "Of 4 x 4 blocks at a density of 1% none is live"), ("dense-row", 64, 100, "100")],
)
def test_a_layout_that_cannot_be_is_said(name, block, seq_len, message):
    with pytest.raises(ValueError, match=message):
        make_layout(name, block, seq_len)
