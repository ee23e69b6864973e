"""Peers that other packages bring: what they do not take, and that they are called as they want."""

import argparse
import shutil
import sys
import types
from dataclasses import replace

import pytest
import torch

from benchmarks.peers import LOOP, lists_of_each_head
from benchmarks.program import register
from ds_sparse.bench import attention, packed, selected, tokens
from ds_sparse.bench.cases import Case
from ds_sparse.bench.machine import FORWARD, TRAIN
from ds_sparse.bench.reasons import Unsupported
from ds_sparse.bench.run import run_case

register()
CPU = torch.device("cpu")
NONE = argparse.Namespace()
CASES = [
    packed.Case("", 100, structure, size, causal, 300, 2, 16, "fp32")
    for structure, size, causal in (("window", 8, False), ("window", 8, True), ("bigbird", 16, True))
]


def test_each_sequence_and_head_gets_the_lists_of_a_shared_layout():
    case = Case(
        "toy", "random", block=16, batch=2, heads=3, seq_len=128, head_dim=16, options={"density": 0.4}, dtype="fp32"
    )
    shared = attention.Problem(case, CPU, NONE)
    shared.layout = shared.layout[:1]
    counts, columns = lists_of_each_head(shared)
    assert counts.shape == (2, 3, 8) and columns.shape[:3] == (2, 3, 8)
    assert counts.is_contiguous() and columns.is_contiguous()
    assert (counts == shared.layout.sum(2)).all()


@pytest.mark.parametrize(
    ("name", "block", "reason"),
    [
        ("fa4", 32, "blocks of 64 and 128 only"),
        ("cudnn-frontend", 16, "blocks of 64 and 128 only"),
        ("vsa", 128, "blocks of 64 only"),
        ("vsa", 64, "bf16 only"),
    ],
)
def test_what_a_peer_does_not_take(name, block, reason):
    case = Case("toy", "random", block, 1, 1, 256, 16, {"density": 0.5}, "fp32")
    with pytest.raises(Unsupported, match=reason):
        attention.OPERATION.peers[name](attention.Problem(case, CPU, NONE))


@pytest.mark.parametrize("case", CASES, ids=[case.structure for case in CASES])
def test_flash_attention_4_is_called_as_it_wants_for_documents(monkeypatch, case):
    """A stand-in computes what FlashAttention would with these arguments."""
    called = []

    def attend(query, key, value, edges, window, causal):
        called.append(window)
        outputs = []
        for first, end in zip(edges[:-1].tolist(), edges[1:].tolist()):
            place = torch.arange(end - first)
            far = place - place[:, None]
            left, right = (end if reach in (None, -1) else reach for reach in window)
            live = (far >= -left) & (far <= right) & ((far <= 0) if causal else True)
            q, k, v = (x[first:end].transpose(0, 1) for x in (query, key, value))
            outputs.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=live).transpose(0, 1))
        return torch.cat(outputs)

    def fa4(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size):
        assert cu_seqlens_q.dtype == torch.int32 and max_seqlen_q == max_seqlen_k == max(case.lengths)
        return attend(q, k, v, cu_seqlens_q, window_size, causal), None

    modules = {
        "flash_attn": types.ModuleType("flash_attn"),
        "flash_attn.cute": types.SimpleNamespace(flash_attn_varlen_func=fa4),
    }
    for module, stand_in in modules.items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    problem = packed.Problem(case, CPU, NONE)
    peer = packed.OPERATION.peers["fa4-varlen"](problem)
    problem.verify("fa4-varlen", peer)
    assert called and peer.dense == (not case.is_window)


CHOICE = selected.Case("", 32, 2, 96, 16, 16, 4, "random", True, "fp32")


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("fla", {"causal": False}, "causal only"),
        ("fla", {"heads": 16}, "groups of 16 heads"),
        ("fla", {"heads": 48}, "groups of 16 heads"),
        ("nsa-triton", {"causal": False}, "causal only"),
        ("nsa-triton", {}, "bf16 and fp16 only"),
        ("flash-moba", {}, "bf16 and fp16 only"),
        ("flash-moba", {"dtype": "bf16"}, "blocks of a multiple of 64 only"),
    ],
)
def test_what_a_peer_of_chosen_blocks_does_not_take(name, changes, reason):
    problem = selected.Problem(replace(CHOICE, **changes), CPU, NONE)
    with pytest.raises(Unsupported, match=reason):
        selected.OPERATION.peers[name](problem)


@pytest.mark.parametrize(("name", "dtype"), [("fla", "fp32"), ("nsa-triton", "bf16")])
def test_peers_of_chosen_blocks_are_called_as_they_want(monkeypatch, name, dtype):
    """Stand-ins compute what these would with their arguments; they want numbers first, and -1 after them."""

    def attend(query, key, value, chosen, block):
        """(T, H, D), chosen (groups, T, k)."""
        assert (chosen.diff() > 0).logical_or(chosen[..., 1:] == -1).all() and (chosen[..., 0] >= 0).all()
        tokens = torch.arange(len(query))
        live = (tokens[:, None] // block == chosen[:, :, None]).any(3) & (tokens <= tokens[:, None])
        mask = live.repeat_interleave(query.shape[1] // key.shape[1], 0)
        heads = (x.transpose(0, 1) for x in (query, key, value))
        output = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
        return output.transpose(0, 1)

    def fla(q, k, v, *, block_indices, block_counts, block_size):
        assert block_counts == block_indices.shape[-1] and block_indices.shape[:3] == k.shape[:3]
        return attend(q[0], k[0], v[0], block_indices[0].transpose(0, 1), block_size)[None]

    def nsa(q, k, v, chosen, block, edges):
        assert edges.tolist() == [0, len(q)] and edges.dtype == chosen.dtype == torch.int32
        return attend(q, k, v, chosen, block)

    modules = {
        "fla": types.ModuleType("fla"),
        "fla.ops": types.ModuleType("fla.ops"),
        "fla.ops.nsa": types.SimpleNamespace(parallel_nsa=fla),
        "native_sparse_attention": types.ModuleType("native_sparse_attention"),
        "native_sparse_attention.ops": types.SimpleNamespace(topk_sparse_attention=nsa),
    }
    for module, stand_in in modules.items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    problem = selected.Problem(replace(CHOICE, dtype=dtype), CPU, NONE)
    problem.verify(name, selected.OPERATION.peers[name](problem))


@pytest.mark.parametrize("causal", [True, False])
def test_flash_moba_is_called_as_it_wants(monkeypatch, causal):
    """A stand-in computes what FlashMoBA would; the rows of a block ascend, as it searches them."""

    def sort(starts, counts, rows):
        assert starts.dtype == torch.int64 and counts.dtype == rows.dtype == torch.int32
        parts = [rows[at : at + n].sort().values for at, n in zip(starts.flatten(), counts.flatten())]
        return torch.cat(parts)

    def attend(q, k, v, edges, keys, most, most_keys, starts, counts, rows, together, block, *, causal):
        tokens = len(q)
        assert edges.tolist() == keys.tolist() == [0, tokens] and most == most_keys == tokens and together == 128
        live = torch.zeros(q.shape[1], tokens, counts.shape[2], dtype=torch.bool)
        for head, column in torch.cartesian_prod(*map(torch.arange, counts.shape[1:])).tolist():
            mine = rows[starts[0, head, column] :][: counts[0, head, column]].long()
            assert (mine.diff() > 0).all()
            live[head, mine, column] = True
        mask = live.repeat_interleave(block, 2)[..., :tokens]
        if causal:
            mask = mask.tril()
        heads = (x.transpose(0, 1) for x in (q, k, v))
        output = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
        return output.transpose(0, 1)

    interface = types.SimpleNamespace(
        _varlen_sort=sort, decide_lg_block_m=lambda *_: 128, flash_moba_attn_varlen_func=attend
    )
    monkeypatch.setitem(sys.modules, "flash_moba", types.SimpleNamespace(flash_moba_interface=interface))
    case = replace(CHOICE, heads=4, seq_len=300, block=64, top=3, causal=causal, dtype="bf16")
    problem = selected.Problem(case, CPU, NONE)
    problem.verify("flash-moba", selected.OPERATION.peers["flash-moba"](problem))


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")
def test_a_learners_loop_is_right_and_timed_forward():
    case = tokens.Case(seq_len=96, d_model=32, heads=2, sparsity=0.9)
    options = argparse.Namespace(repeats=3, seconds=60, profile=0)
    rows = run_case(tokens.OPERATION, case, [tokens.OURS, LOOP], CPU, options).rows
    loop = {row.direction: row for row in rows if row.name == LOOP}
    assert loop[FORWARD].milliseconds > 0 and not loop[FORWARD].reason
    assert loop[TRAIN].reason == "forward only"
