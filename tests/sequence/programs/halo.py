"""`SequenceParallelAttention` where each rank computes the queries of its own tokens, against one rank."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import cases
import torch
from cases import WIDE, assert_same, case, drawn, operands_of, refusal, run_all, slow_case
from torch import distributed
from torch.utils.checkpoint import checkpoint

import ds_sparse
from ds_sparse.modules.local_attention import LocalAttention
from ds_sparse.sequence import halo_plan as module
from ds_sparse.sequence.exchange import Exchange, RanksOfSequence
from ds_sparse.sequence.halo_plan import part_lengths

BLOCK = 16
TOKENS, LONGEST = 1100, 1104  # it ends inside a block


@contextmanager
def without_heads(pays_below: float = 0.5) -> Iterator[None]:
    """Fails where ranks exchange heads."""
    never = mock.patch.object(Exchange, "to_heads", side_effect=AssertionError("heads were exchanged"))
    pays = mock.patch.object(module, "PAYS_BELOW", pays_below)
    with never, pays, mock.patch.object(module, "TOLERANCE", 1.0):
        yield


def longformer(heads, **options):
    return ds_sparse.BSLongformerSparsityConfig(heads, block=BLOCK, num_sliding_window_blocks=3, **options)


def sliding(heads, attention="bidirectional"):
    return ds_sparse.LocalSlidingWindowSparsityConfig(
        heads, block=BLOCK, num_sliding_window_blocks=5, attention=attention
    )


def parts(tokens=TOKENS):
    lengths = part_lengths(tokens, distributed.get_world_size(), BLOCK, whole_blocks=True)
    rank = distributed.get_rank()
    return lengths, slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))


def compare(of_one, attention, heads, key_heads=None, dtype=WIDE, **more):
    lengths, own = parts()
    operands = operands_of(heads, key_heads or heads, TOKENS, dtype)
    cases.compare(of_one, attention, own, operands, lengths=lengths, **more)


def compare_structure(config, key_heads=None, pays_below=0.5, causal=False, **more):
    layout = config.make_bool_layout(LONGEST)

    def of_one(*operands, **options):
        return ds_sparse.block_sparse_attention(*operands, layout, block=BLOCK, **options)

    with without_heads(pays_below):
        attention = ds_sparse.SequenceParallelAttention(config, LONGEST)
        compare(of_one, attention, config.num_heads, key_heads, causal=causal, **more)


@case
def windows_and_global_tokens():
    compare_structure(longformer(4))
    compare_structure(longformer(4, global_block_indices=[0, 7, 68]), key_heads=2, with_mask=True)


@case
def windows_of_causal_and_grouped_heads():
    compare_structure(sliding(4, "unidirectional"), key_heads=2, causal=True, with_mask=True)
    compare_structure(longformer(4), causal=True, pays_below=1e9)


@case
def sinks_of_windows_and_of_global_tokens():
    compare_structure(sliding(4), with_sinks=True)
    compare_structure(longformer(4), with_sinks=True, pays_below=1e9)


@case
def sixteen_bits():
    compare_structure(longformer(4), dtype=torch.bfloat16, with_mask=True)


@case
def a_layout_for_each_head_whose_rows_see_keys_of_all_ranks():
    config = ds_sparse.BigBirdSparsityConfig(
        4, block=BLOCK, num_random_blocks=2, different_layout_per_head=True, seed=1
    )
    compare_structure(config, pays_below=1e9, with_mask=True)


@case
def more_ranks_than_heads():
    compare_structure(longformer(1))
    bigbird = ds_sparse.BigBirdSparsityConfig(1, block=BLOCK, num_random_blocks=2, seed=1)
    compare_structure(bigbird, with_mask=True)
    compare_structure(ds_sparse.FixedSparsityConfig(1, block=BLOCK, attention="unidirectional"), causal=True)


@case
def the_window_of_a_layer_of_its_own():
    for window, causal in ((20, False), (20, True), (300, False), (300, True)):
        alone = LocalAttention(window)
        attention = ds_sparse.SequenceParallelAttention.around(alone, RanksOfSequence())
        with without_heads(pays_below=1e9):
            compare(alone, attention, 4, 2, with_mask=True, causal=causal)
        with without_heads():
            compare(alone, attention, 1, with_sinks=True, causal=causal)


@case
def activation_checkpointing_and_outputs_that_are_written_over():
    _, own = parts()
    mine = [drawn(1, 2, TOKENS, 8, seed=i)[:, :, own].requires_grad_() for i in range(3)]
    grad = drawn(1, 2, TOKENS, 8, seed=9)[:, :, own]
    window = ds_sparse.SequenceParallelAttention.around(LocalAttention(20), RanksOfSequence())
    causal = functools.partial(ds_sparse.SequenceParallelAttention(sliding(2, "unidirectional"), LONGEST), causal=True)
    for attention in (*(ds_sparse.SequenceParallelAttention(x, LONGEST) for x in (longformer(2), sliding(2))), causal,
                      window):  # fmt: skip
        with without_heads():
            once = torch.autograd.grad(attention(*mine), mine, grad)
            again = torch.autograd.grad(checkpoint(attention, *mine, use_reentrant=False), mine, grad)
            twice = torch.autograd.grad(attention(*mine).mul_(2), mine, grad)
        for x, y, z in zip(once, again, twice, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)
            assert_same(2 * x, z)


@case
def gradients_of_gradients_are_refused():
    _, own = parts()
    mine = [drawn(1, 2, TOKENS, 8, seed=i)[:, :, own].requires_grad_() for i in range(3)]
    attention = ds_sparse.SequenceParallelAttention(longformer(2), LONGEST)
    with without_heads():
        wanted = torch.autograd.grad(attention(*mine).sum(), mine)
        found = torch.autograd.grad(attention(*mine).sum(), mine, create_graph=True)
        for x, y in zip(found, wanted, strict=True):
            assert_same(x, y)
        said = refusal(lambda: torch.autograd.grad(found[0].sum(), mine), RuntimeError)
    assert "SequenceParallelAttention" in said, said


@slow_case("compiles for 4 seconds on each rank")
def attention_in_a_compiled_function():
    _, own = parts()
    mine = [drawn(1, 2, TOKENS, 8, seed=i)[:, :, own] for i in range(3)]
    for config in (longformer(2), ds_sparse.FixedSparsityConfig(2, block=BLOCK)):
        attention = ds_sparse.SequenceParallelAttention(config, LONGEST)
        compiled = torch.compile(lambda *x, attend=attention: attend(*x) + 1, backend="eager")
        assert_same(compiled(*mine), attention(*mine) + 1)


@case
def a_layout_of_documents_without_documents_is_refused():
    lengths, own = parts()
    mine = [drawn(1, 4, TOKENS, 8, seed=i)[:, :, own] for i in range(3)]
    attention = ds_sparse.SequenceParallelAttention(longformer(4), LONGEST)
    for layout in ("row", "nonsense"):
        refusal(lambda layout=layout: attention(*mine, lengths=lengths, document_layout=layout))


@case
def random_blocks_dropout_and_packed_documents_exchange_heads():
    lengths, own = parts()
    mine = [drawn(1, 4, TOKENS, 8, seed=i)[:, :, own] for i in range(3)]
    bigbird = ds_sparse.BigBirdSparsityConfig(4, block=BLOCK, num_random_blocks=3, seed=1)
    edges = torch.tensor([0, 300, TOKENS])
    with mock.patch.object(Exchange, "to_heads", side_effect=ArithmeticError):
        for config, options in (
            (bigbird, {}), (longformer(4), {"dropout_p": 0.1}), (longformer(4), {"cu_seqlens": edges})
        ):  # fmt: skip
            attention = ds_sparse.SequenceParallelAttention(config, LONGEST)
            try:
                attention(*mine, lengths=lengths, **options)
            except ArithmeticError:
                continue
            raise AssertionError(f"{config} with {options} exchanged keys")


run_all()
