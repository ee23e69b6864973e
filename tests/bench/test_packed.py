import json
import re
import sys
import time
import types
from dataclasses import replace

import pytest
import torch

from ds_sparse.bench import packed, packed_peers
from ds_sparse.bench.machine import FORWARD, TRAIN
from ds_sparse.bench.packed_cases import TABLE, Case
from ds_sparse.cli import main
from ds_sparse.verify.accuracy import random_tensors

CPU = torch.device("cpu")
NAMES = ("padded", "sdpa-padded", "sdpa-mask")
CASES = [
    Case("equal", 128, "bigbird", 8, False, 384, 2, 16),
    Case("short-last", 100, "bigbird", 8, True, 384, 2, 16),
    Case("corpus", None, "longformer", 16, False, 700, 2, 16),
    Case("windows", None, "window", 20, False, 700, 2, 16),
    Case("causal-windows", 150, "window", 20, True, 384, 2, 16),
]


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request, monkeypatch):
    """Its corpus has documents that are short, long, and a token."""
    monkeypatch.setattr("ds_sparse.bench.packed_cases.corpus_lengths", lambda tokens: [[1, 37, tokens - 100, 62]])
    return request.param


def measure(case, names=NAMES):
    return packed.run_case(case, names, CPU, "fp32", repeats=3, seconds=60)


def on_cpu(mask_function):
    """FlexAttention is for a GPU's problems: this puts one back before its mask is made."""

    def back(problem):
        problem.device = CPU
        return mask_function(problem)

    return back


def mask_of_row(problem):
    case = problem.case
    return torch.block_diag(*(case.mask(problem.layout, length, CPU) for length in problem.lengths)).bool()


def test_live_scores_are_those_of_the_masks(case):
    layout = case.layout()
    total = sum(int(case.mask(layout, length, CPU).sum()) for length in case.lengths)
    assert case.live_scores(layout, case.lengths) == total


def test_everything_that_is_measured_is_verified(case):
    rows = measure(case).rows
    alike = len(set(case.lengths)) == 1
    assert {row.peer for row in rows if row.reason} == ({"padded"} if alike else set())
    assert {row.peer for row in rows} == {"ds_sparse", "unpacked", *NAMES}
    assert all(row.rounds == 3 for row in rows if not row.reason)


def test_numbers_are_ratios_of_the_times(case):
    result = measure(case)
    layout, (batch, tokens) = case.layout(), case.unpacked(case.layout())
    scores = case.live_scores(layout, case.lengths)
    for way in packed.DIRECTIONS:
        ours, unpacked = result.row("ds_sparse", way), result.row("unpacked", way)
        rate = batch * case.live_scores(layout, [tokens]) / unpacked.milliseconds
        assert unpacked.of_unpacked == 1 and unpacked.to_ours is None
        assert unpacked.tokens_per_second == pytest.approx(batch * tokens / unpacked.milliseconds * 1e3)
        for row in (ours, result.row("sdpa-mask", way)):
            assert row.of_unpacked == pytest.approx(scores / row.milliseconds / rate)
            assert row.to_ours == pytest.approx(row.milliseconds / ours.milliseconds)
            assert row.tokens_per_second == pytest.approx(case.tokens / row.milliseconds * 1e3)
        assert packed.of_left(result, way) == pytest.approx(ours.of_unpacked / result.about.left)
    assert result.about.index_ms >= 0


@pytest.mark.parametrize(("slow", "counts"), [("PackedIndex", True), ("filled_part", False)])
def test_an_index_costs_what_is_made_for_a_batch_alone(monkeypatch, slow, counts):
    right = getattr(packed_peers, slow)
    late = types.SimpleNamespace(build=lambda *given: time.sleep(0.1) or right.build(*given))
    monkeypatch.setattr(packed_peers, slow, late if counts else lambda *given: time.sleep(0.1) or right(*given))
    assert (measure(CASES[0], []).about.index_ms > 90) == counts


def test_partial_blocks_are_what_rounding_up_costs(monkeypatch):
    """Documents of 24 tokens in blocks of 16, all live: 24 * 24 of 32 * 32 scores; and the plain batch likewise."""
    monkeypatch.setattr(Case, "layout", lambda case: torch.ones(1, 2, 2, dtype=torch.bool))
    case = Case("", 24, "longformer", 16, False, 96, 1, 16)
    about = measure(case, []).about
    assert (about.filled, about.left) == (24 * 24 / (32 * 32), 1)
    assert (about.batch, about.sequence, about.documents) == (4, 24, 4)
    cut = replace(case, length=32, tokens=72)  # 32, 32 and 8 tokens beside two sequences of 32
    about = measure(cut, []).about
    assert (about.filled, about.left) == ((2 * 32 * 32 + 8 * 8) / (2 * 32 * 32 + 16 * 16),) * 2


def test_a_plain_batch_beside_other_lengths_has_as_many_scores_a_token(monkeypatch):
    monkeypatch.setattr("ds_sparse.bench.packed_cases.corpus_lengths", lambda tokens: [[100] * 30 + [1000] * 3])
    case = Case("", None, "longformer", 16, False, 6000, 1, 16)
    layout = case.layout()
    _, tokens = case.unpacked(layout)
    wanted = case.live_scores(layout, case.lengths) / 6000
    found, shorter, longer = (case.live_scores(layout, [n]) / n for n in (tokens, tokens - 16, tokens + 16))
    assert 100 < tokens < 1000 and tokens % 16 == 0
    assert abs(found - wanted) <= min(abs(shorter - wanted), abs(longer - wanted))


def test_tiles_of_a_document_mask(case):
    problem = packed_peers.Problem(case, CPU)
    live = packed_peers.mask_function(problem)
    token = torch.arange(case.tokens)
    expected = mask_of_row(problem)
    assert torch.equal(live(None, None, token[:, None], token), expected)
    some, full = packed_peers.tiles_of(live, 0, case.tokens, 32, CPU)
    rest = -case.tokens % 32
    tiles = torch.nn.functional.pad(expected, (0, rest, 0, rest)).unflatten(1, (-1, 32)).unflatten(0, (-1, 32))
    assert torch.equal(some[0], tiles.any(3).any(1)) and torch.equal(full[0], tiles.all(3).all(1))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gets_the_documents(monkeypatch, case):
    # Not compiled, FlexAttention goes by the mask function alone.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    problem = packed_peers.Problem(case, CPU)
    monkeypatch.setattr(packed_peers, "mask_function", on_cpu(packed_peers.mask_function))
    problem.device = types.SimpleNamespace(type="cuda")
    inputs = random_tensors(3, (1, 2, case.tokens, 16), torch.float32, CPU)
    found, expected = (packed_peers.PEERS[name](problem).call(*inputs) for name in ("flex", "sdpa-mask"))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("structure", ["bigbird", "window"])
def test_cases_that_differ_in_numbers_share_what_flex_attention_compiled(monkeypatch, structure):
    torch._dynamo.reset()
    compiled, compile = [], torch.compile

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, backend=backend, **options))
    inputs = random_tensors(3, (1, 1, 512, 16), torch.float32, CPU)
    monkeypatch.setattr(packed_peers, "mask_function", on_cpu(packed_peers.mask_function))
    with torch._dynamo.config.patch(recompile_limit=1):  # `flex` has a limit of its own
        for length in (128, 200, None):
            problem = packed_peers.Problem(Case("", length, structure, 8, False, 512, 1, 16), CPU)
            expected = packed_peers.sdpa_mask(problem).call(*inputs)
            problem.device = types.SimpleNamespace(type="cuda")
            torch.testing.assert_close(packed_peers.flex(problem).call(*inputs), expected)
    assert len(compiled) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("structure", ["bigbird", "window"])
def test_peers_of_a_gpu_are_right(structure):
    case = Case("", 300, structure, 64, False, 2048, 2, 64)
    if structure == "bigbird":
        case = replace(case, length=1000)
    rows = packed.run_case(case, ["padded", "varlen", "flex"], torch.device("cuda"), "bf16", repeats=3, seconds=1).rows
    assert [row.reason for row in rows if row.reason] == []


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
    problem = packed_peers.Problem(case, CPU)
    *inputs, grad = random_tensors(4, (1, 2, case.tokens, 16), torch.float32, CPU)
    references = packed.References(problem, inputs, grad)
    with pytest.raises(packed_peers.Unsupported, match="on CUDA only"):
        packed_peers.PEERS["varlen"](problem)
    problem.device = types.SimpleNamespace(type="cuda")
    peer = packed_peers.PEERS["varlen"](problem)
    problem.device = CPU
    packed.verify(peer, references)
    assert called and peer.dense == (not case.is_window)


@pytest.mark.parametrize("name", ["ds_sparse", "unpacked", "padded", "sdpa-mask"])
def test_who_is_wrong_is_not_timed(monkeypatch, name):
    right = packed_peers.PEERS[name]

    def wrong(problem):
        peer = right(problem)
        return replace(peer, call=lambda *inputs: peer.call(*inputs) * 1.001)

    monkeypatch.setitem(packed_peers.PEERS, name, wrong)
    rows = [row for row in measure(CASES[1]).rows if row.reason]
    assert {row.peer for row in rows} == {name}
    assert all(re.match(r"output, head 0, part \d of \d, has an RMS error", row.reason) for row in rows)


def test_a_document_that_sees_another_is_found(monkeypatch):
    monkeypatch.setitem(
        packed_peers.PEERS,
        "sdpa-mask",
        lambda problem: packed_peers.Peer(torch.nn.functional.scaled_dot_product_attention),
    )
    case = Case("", 64, "window", 500, False, 128, 1, 16)
    assert "output, head 0" in next(row.reason for row in measure(case).rows if row.peer == "sdpa-mask")


def test_who_fails_while_it_is_timed_is_named_and_not_called_again(monkeypatch):
    calls = []

    def fails(*given):
        calls.append(given)
        raise RuntimeError("no more\nmemory")

    monkeypatch.setattr(packed.machine, "time_of", fails)
    result = measure(CASES[0])
    assert {row.reason for row in result.rows if row.peer != "padded"} == {"RuntimeError: no more"}
    assert len(calls) == 4  # ours, unpacked and two of dense attention, once each
    assert list(packed.summary([result]))[1].split() == ["equal", "forward", "-"]


def test_names_of_the_table_differ_and_cases_are_cut_for_a_cpu():
    small = [case.small() for case in TABLE]
    assert len({case.name for case in TABLE}) == len({case.name for case in small}) == len(TABLE)
    assert {(case.tokens, case.heads) for case in small} == {(4096, 2)}
    assert all(case.name.endswith("-4k") for case in small)
    assert all(sum(case.lengths) == case.tokens for case in (*TABLE, *small))


def test_command_prints_tables_and_writes_the_rows(monkeypatch, tmp_path, printed_again):
    small = Case.small
    monkeypatch.setattr(Case, "small", lambda case: replace(small(case), heads=1, tokens=1024))
    path = tmp_path / "rows.json"
    arguments = "bench packed --dtype fp32,bf16 --cases window-corpus --repeats 2 --peers padded"
    assert main([*arguments.split(), "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert {(row["name"], row["dtype"], row["peer"]) for row in written["rows"]} == {
        ("window-corpus-4k", dtype, peer) for dtype in ("fp32", "bf16") for peer in ("ds_sparse", "unpacked", "padded")
    }
    assert {row["direction"] for row in written["rows"]} == {FORWARD, TRAIN}
    printed = printed_again(path)
    assert "of unpacked" in printed and "partial blocks leave" in printed and "index of a batch" in printed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--cases nothing-*", "--cases nothing-*: none of bigbird-2048, "),
        ("--peers everyone", "'everyone' is not one of padded, sdpa-padded, "),
    ],
)
def test_names_that_are_not_there_are_refused(capsys, arguments, sentence):
    try:
        status = main(["bench", "packed", *arguments.split()])
    except SystemExit as stopped:
        status = stopped.code
    assert status and sentence in capsys.readouterr().err
