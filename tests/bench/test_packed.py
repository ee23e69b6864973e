import argparse
import sys
import time
import types
from dataclasses import replace

import pytest
import torch

from ds_sparse.bench import flex, packed
from ds_sparse.bench.packed import OPERATION, Case
from ds_sparse.bench.reasons import Unsupported
from ds_sparse.bench.references import random_tensors

CPU = torch.device("cpu")
NAMES = ("ds_sparse", "unpacked", "padded", "sdpa-padded", "sdpa-mask")
CASES = [
    Case("equal", 128, "bigbird", 8, False, 384, 2, 16, "fp32"),
    Case("short-last", 100, "bigbird", 8, True, 384, 2, 16, "fp32"),
    Case("corpus", None, "longformer", 16, False, 700, 2, 16, "fp32"),
    Case("windows", None, "window", 20, False, 700, 2, 16, "fp32"),
    Case("causal-windows", 150, "window", 20, True, 384, 2, 16, "fp32"),
]


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request, monkeypatch):
    """Its corpus has documents that are short, long, and a token."""
    monkeypatch.setattr(packed, "corpus_lengths", lambda tokens: [[1, 37, tokens - 100, 62]])
    return request.param


@pytest.fixture
def on_gpu(monkeypatch):
    """on_gpu(case): a problem on the CPU that says it is a GPU's until its mask is made."""
    right = packed.mask_function

    def problem(case):
        made = packed.Problem(case, CPU, argparse.Namespace())
        made.device = types.SimpleNamespace(type="cuda")
        return made

    def back(problem):
        problem.device = CPU
        return right(problem)

    monkeypatch.setattr(packed, "mask_function", back)
    return problem


def problem_of(case):
    return packed.Problem(case, CPU, argparse.Namespace())


def test_live_scores_are_those_of_the_masks(case):
    problem = problem_of(case)
    total = sum(int(case.mask(problem.layout, length, CPU).sum()) for length in case.lengths)
    assert problem.live_scores(case.lengths) == total


def test_numbers_are_ratios_of_the_times_of_what_was_verified(case, measure):
    result = measure(OPERATION, case, NAMES)
    alike = len(set(case.lengths)) == 1
    assert {row.name for row in result.rows if row.reason} == ({"padded"} if alike else set())
    problem = problem_of(case)
    batch, tokens = problem.unpacked
    scores = problem.live_scores(case.lengths)
    for way in packed.DIRECTIONS:
        ours, unpacked = result.row("ds_sparse", way), result.row("unpacked", way)
        rate = batch * problem.live_scores([tokens]) / unpacked.milliseconds
        assert unpacked.of_unpacked == 1 and unpacked.to_ours is None
        assert unpacked.tokens_per_second == pytest.approx(batch * tokens / unpacked.milliseconds * 1e3)
        for row in (ours, result.row("sdpa-mask", way)):
            assert row.of_unpacked == pytest.approx(scores / row.milliseconds / rate)
            assert row.to_ours == pytest.approx(row.milliseconds / ours.milliseconds)
            assert row.tokens_per_second == pytest.approx(case.tokens / row.milliseconds * 1e3)
        assert packed.of_left(result, way) == pytest.approx(ours.of_unpacked / result.about.left)
    assert result.about.index_ms >= 0


@pytest.mark.parametrize(("slow", "counts"), [("PackedIndex", True), ("filled_part", False)])
def test_an_index_costs_what_is_made_for_a_batch_alone(measure, monkeypatch, slow, counts):
    right = getattr(packed, slow)
    late = types.SimpleNamespace(build=lambda *given: time.sleep(0.1) or right.build(*given))
    monkeypatch.setattr(packed, slow, late if counts else lambda *given: time.sleep(0.1) or right(*given))
    assert (measure(OPERATION, CASES[0], packed.ALWAYS).about.index_ms > 90) == counts


def test_partial_blocks_are_what_rounding_up_costs(measure, monkeypatch):
    """Documents of 24 tokens in blocks of 16, all live: 24 * 24 of 32 * 32 scores; and the plain batch likewise."""
    monkeypatch.setattr(Case, "layout", lambda case: torch.ones(1, 2, 2, dtype=torch.bool))
    case = Case("", 24, "longformer", 16, False, 96, 1, 16, "fp32")
    about = measure(OPERATION, case, packed.ALWAYS).about
    assert (about.filled, about.left) == (24 * 24 / (32 * 32), 1)
    assert (about.batch, about.sequence, about.documents) == (4, 24, 4)
    cut = replace(case, length=32, tokens=72)  # 32, 32 and 8 tokens beside two sequences of 32
    about = measure(OPERATION, cut, packed.ALWAYS).about
    assert (about.filled, about.left) == ((2 * 32 * 32 + 8 * 8) / (2 * 32 * 32 + 16 * 16),) * 2


def test_a_plain_batch_beside_other_lengths_has_as_many_scores_a_token(monkeypatch):
    monkeypatch.setattr(packed, "corpus_lengths", lambda tokens: [[100] * 30 + [1000] * 3])
    case = Case("", None, "longformer", 16, False, 6000, 1, 16, "fp32")
    problem = problem_of(case)
    _, tokens = problem.unpacked
    wanted = problem.live_scores(case.lengths) / 6000
    found, shorter, longer = (problem.live_scores([n]) / n for n in (tokens, tokens - 16, tokens + 16))
    assert 100 < tokens < 1000 and tokens % 16 == 0
    assert abs(found - wanted) <= min(abs(shorter - wanted), abs(longer - wanted))


def test_tiles_of_a_document_mask(case, monkeypatch):
    monkeypatch.setattr(flex, "TILE", 32)
    problem = problem_of(case)
    live = packed.mask_function(problem)
    token = torch.arange(case.tokens)
    documents = (case.mask(problem.layout, length, CPU) for length in problem.lengths)
    expected = torch.block_diag(*documents).bool()
    assert torch.equal(live(None, None, token[:, None], token), expected)
    mask = flex.of_scores(live, 1, case.tokens, CPU)
    rest = -case.tokens % 32
    tiles = torch.nn.functional.pad(expected, (0, rest, 0, rest)).unflatten(1, (-1, 32)).unflatten(0, (-1, 32))
    assert torch.equal(mask.to_dense()[0, 0].bool(), tiles.any(3).any(1))
    assert torch.equal(mask.full_kv_num_blocks[0, 0], tiles.all(3).all(1).sum(1, dtype=torch.int32))


@pytest.mark.parametrize("structure", ["bigbird", "window"])
def test_cases_that_differ_in_numbers_share_what_flex_attention_compiled(monkeypatch, structure, on_gpu):
    torch._dynamo.reset()
    compiled, compile = [], torch.compile

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    def on_backend(function, **options):
        return compile(function, backend=backend, **{name: x for name, x in options.items() if name != "mode"})

    monkeypatch.setattr(torch, "compile", on_backend)
    inputs = random_tensors(3, (1, 1, 512, 16), torch.float32, CPU)
    with torch._dynamo.config.patch(recompile_limit=1):  # `flex` has a limit of its own
        for length in (128, 200, None):
            case = Case("", length, structure, 8, False, 512, 1, 16, "fp32")
            expected = packed.OPERATION.peers["sdpa-mask"](problem_of(case)).call(*inputs)
            torch.testing.assert_close(packed.flex_attention(on_gpu(case)).call(*inputs), expected)
    assert len(compiled) == 1


def test_packed_attention_of_torch_is_called_as_it_wants(monkeypatch, case):
    """A stand-in computes what torch would with these arguments."""
    called = []

    def attend(query, key, value, edges, window):
        called.append(window)
        outputs = []
        for first, end in zip(edges[:-1].tolist(), edges[1:].tolist()):
            place = torch.arange(end - first)
            far = place - place[:, None]
            left, right = (end if reach in (None, -1) else reach for reach in window)
            live = (far >= -left) & (far <= right)
            q, k, v = (x[first:end].transpose(0, 1) for x in (query, key, value))
            outputs.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=live).transpose(0, 1))
        return torch.cat(outputs)

    def varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size):
        assert cu_q.dtype == torch.int32 and max_q == max_k == max(case.lengths)
        return attend(q, k, v, cu_q, window_size)

    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", types.SimpleNamespace(varlen_attn=varlen))
    problem = problem_of(case)
    with pytest.raises(Unsupported, match="on CUDA only"):
        OPERATION.peers["varlen"](problem)
    problem.device = types.SimpleNamespace(type="cuda")
    peer = OPERATION.peers["varlen"](problem)
    problem.device = CPU
    problem.verify("varlen", peer)
    assert called and peer.dense == (not case.is_window)
