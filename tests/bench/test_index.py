import argparse

import pytest
import torch

from ds_sparse import PackedIndex, WindowIndex
from ds_sparse.bench import index
from ds_sparse.bench.index import CLOCK, FLEX, GRAPH, KINDS, OPERATION, Case, Problem
from ds_sparse.bench.registry import Peer
from ds_sparse.bench.tiles import tiles_of

CPU = torch.device("cpu")


@pytest.fixture
def eager(monkeypatch):
    """Compiled or not, a mask is the same."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def case_of(kind):
    return Case(f"{kind}-1k", kind, 1024, "fp32")


def problem_of(kind):
    return Problem(case_of(kind), CPU, argparse.Namespace())


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_a_case_has_is_right_and_timed(eager, measure, kind):
    result = measure(OPERATION, case_of(kind), KINDS[kind])
    assert result.measured == list(KINDS[kind])
    first = result.row(KINDS[kind][0], CLOCK)
    for row in result.rows:
        if row.direction == GRAPH:
            assert row.reason == "CUDA graphs are a GPU's"
        else:
            assert row.to_ours == pytest.approx(row.milliseconds / first.milliseconds)
    assert index.ways_of([result]) == [CLOCK]


@pytest.mark.parametrize("name", [name for those in KINDS.values() for name in those])
def test_who_is_wrong_is_named_and_not_timed(eager, measure, monkeypatch, name):
    kind = next(kind for kind in KINDS if name in KINDS[kind])
    right = OPERATION.peers[name]

    def build(problem):
        call = right(problem).call

        def wrong():
            made = call()
            if isinstance(made, list):
                return [x * 1.001 for x in made]
            if name == FLEX:
                made.kv_num_blocks[..., 0] += 1
            else:
                tiles_of(made, "columns", index.HEAD_DIM, torch.float32).entries[0] ^= 1 << 24
            return made

        return Peer(index.Repeated(wrong), no_backward="no GPU")

    monkeypatch.setitem(OPERATION.peers, name, build)
    result = measure(OPERATION, case_of(kind), [name])
    said = {FLEX: "blocks, and", index.FORWARD: "output, last head", index.TRAIN: "output, last head"}
    assert said.get(name, "its tiles of columns hold other blocks") in result.rows[0].reason and not result.measured


@pytest.mark.slow("compiles for seconds")
def test_a_mask_by_compiled_code_has_the_blocks_of_its_case():
    for kind in KINDS:
        problem = problem_of(kind)
        problem.verify(FLEX, OPERATION.peers[FLEX](problem))


def test_an_index_of_another_layout_is_named(measure, monkeypatch):
    causal = index.makes(lambda problem: index.BlockIndex.build(problem.live, index.BLOCK).causal())
    monkeypatch.setitem(OPERATION.peers, index.BOUNDED, causal)
    result = measure(OPERATION, case_of("layout"), [index.BOUNDED])
    assert result.rows[0].reason == "its layout is another"


def test_each_row_chooses_its_own_block_and_none_twice():
    problem = problem_of("blocks")
    chosen = problem.block_indices
    assert chosen.shape == (index.GROUPS, 16, index.TOP) and problem.live.diagonal(dim1=1, dim2=2).all()
    assert (problem.live.sum(2) == torch.arange(1, 17).clamp(max=index.TOP)).all()


def test_memory_is_that_of_the_index_and_its_formula():
    problem = problem_of("layout")
    peer = OPERATION.peers[index.BOUNDED](problem)
    about = index.about_of(problem, {index.BOUNDED: peer})
    assert about.live_blocks == int(problem.live.sum())
    # Tiles of 64 tokens are a block's: the capacity is what bounds them.
    assert about.entry_bytes == about.most_bytes == 2 * 4 * about.live_blocks < about.index_bytes
    assert index.about_of(problem, {}).index_bytes is None


def test_documents_are_those_of_their_index():
    problem = problem_of("documents")
    made = {name: OPERATION.peers[name](problem).call() for name in KINDS["documents"][:3]}
    assert [type(x) for x in made.values()] == [PackedIndex, PackedIndex, WindowIndex]
    document, place = problem.places
    edges = problem.cu_seqlens["host"]
    assert (edges[document] + place).tolist() == list(range(1024)) and int(document[-1]) == len(edges) - 2


def test_on_a_cpu_nothing_is_measured_twice():
    args = argparse.Namespace(device="cpu", peers=["flex"])
    assert index.PACKED_HERE not in index.names(args) and index.names(args)[-1] == FLEX
    args.device = "cuda"
    assert index.names(args) == list(OPERATION.peers)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_repeats_what_waits_for_nothing(kind):
    problem = Problem(Case("", kind, 8192, "bf16"), torch.device("cuda"), argparse.Namespace())
    for name in KINDS[kind][:-1]:  # whether PyTorch's is captured is up to its version
        peer = OPERATION.peers[name](problem)
        problem.verify(name, peer)
        assert bool(peer.no_backward) == (name in (index.EXACT, index.PACKED, index.WINDOWS))
        if not peer.no_backward:
            peer.call.graph.replay()
            problem.verify(name, Peer(lambda peer=peer: peer.call.kept))
