"""`SequenceParallelAttention` against `block_sparse_attention` of one rank."""

from __future__ import annotations

import cases
import torch
from cases import DEVICE, WIDE, assert_parts, assert_same, case, in_lines, operands_of, refusal, run_all
from torch import distributed
from torch.utils.checkpoint import checkpoint

import ds_sparse
from ds_sparse import reference
from ds_sparse.modules.structured_attention import StructuredAttention
from ds_sparse.ops import operands
from ds_sparse.ops.packed_operands import one_as_rows, rows_as_one

TOKENS = 165  # ends inside a block, and no number of ranks divides it


def bigbird(heads):
    """A layout for each head, of unequal costs."""
    return ds_sparse.BigBirdSparsityConfig(heads, block=16, num_random_blocks=2, different_layout_per_head=True, seed=1)


def uneven_lengths():
    others = distributed.get_world_size() - 1
    return (TOKENS - 30 * others, *[30] * others)


def own_part():
    lengths, rank = uneven_lengths(), distributed.get_rank()
    return slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))


def compare(config, key_heads=None, dtype=WIDE, causal_of_one=False, **more):
    layout = config.make_bool_layout(176)

    def of_one(*operands, causal=causal_of_one, **options):
        return ds_sparse.block_sparse_attention(*operands, layout, block=16, causal=causal, **options)

    attention = ds_sparse.SequenceParallelAttention(config, 176)
    operands = operands_of(config.num_heads, key_heads or config.num_heads, TOKENS, dtype)
    cases.compare(of_one, attention, own_part(), operands, **more)


@case
def layouts_per_head():
    compare(bigbird(4))


@case
def sixteen_bytes_at_a_time():
    with in_lines():
        compare(bigbird(4), with_mask=True)
        compare(bigbird(8), key_heads=2, dtype=torch.bfloat16)


@case
def single_precision():
    compare(bigbird(4), dtype=torch.float32)


@case
def sixteen_bits():
    compare(bigbird(4), dtype=torch.bfloat16, with_mask=True)


@case
def one_layout_for_all_heads_and_heads_that_ranks_do_not_divide():
    compare(ds_sparse.FixedSparsityConfig(5, block=16))


@case
def padding_and_sinks():
    compare(bigbird(4), with_mask=True, with_sinks=True)


@case
def causal_with_grouped_heads():
    compare(bigbird(8), key_heads=2, causal=True, lengths=uneven_lengths())


@case
def fewer_key_heads_than_ranks():
    compare(bigbird(4), key_heads=1, with_mask=True)


@case
def heads_that_choose_blocks_together_stay_together():
    ranks = distributed.get_world_size()
    for selection, key_heads in (("token", ranks), ("block", ranks), ("token", ranks + 1)):
        heads = 2 * key_heads
        structure = ds_sparse.MobaSparsityConfig(
            heads, block=16, num_chosen_blocks=3, selection=selection, chosen_by_group=True, causal=selection == "token"
        )
        attention = ds_sparse.SequenceParallelAttention(structure, 176)
        of_one, operands = StructuredAttention(structure, 176), operands_of(heads, key_heads, TOKENS)
        cases.compare(of_one, attention, own_part(), operands, with_mask=True)
    x = torch.ones(1, heads, 40, 8, device=DEVICE)
    said = refusal(lambda: attention(x, x[:, :1], x[:, :1]))
    assert f"{ranks} ranks are to share 1 key head;" in said, said
    assert "heads choose blocks by groups" in refusal(lambda: attention(x, x, x, dropout_p=0.5))


@case
def activation_checkpointing():
    *whole, grad = operands_of(4, 4, TOKENS)
    parts = [x[:, :, own_part()].clone().requires_grad_() for x in whole]
    attention = ds_sparse.SequenceParallelAttention(bigbird(4), 176)
    grad = grad[:, :, own_part()]
    torch.manual_seed(0)
    first = torch.autograd.grad(attention(*parts, dropout_p=0.25), parts, grad)
    torch.manual_seed(0)
    again = torch.autograd.grad(
        checkpoint(lambda *x: attention(*x, dropout_p=0.25), *parts, use_reentrant=False), parts, grad
    )
    for x, y in zip(first, again, strict=True):
        assert_same(x, y)


@case
def dropout_drops_the_pairs_that_seed_and_head_say():
    query, key, value, grad = operands_of(4, 2, TOKENS)
    whole = [x.clone().requires_grad_() for x in (query, key, value)]
    parts = [x[:, :, own_part()].clone().requires_grad_() for x in (query, key, value)]
    torch.manual_seed(distributed.get_rank())  # ranks take the first one's
    attention = ds_sparse.SequenceParallelAttention(bigbird(4), 176)
    output = attention(*parts, dropout_p=0.5)
    output.backward(grad[:, :, own_part()])
    torch.manual_seed(0)
    seed, offset = operands.dropout_seed(DEVICE).tolist()
    layout = bigbird(4).make_bool_layout(176).to(DEVICE)
    of_heads = [
        reference.attention(
            whole[0][:, h : h + 1], *(x[:, h // 2 : h // 2 + 1] for x in whole[1:]), layout[h : h + 1], 16,
            dropout_p=0.5, dropout_seed=(seed, offset + h),
        )
        for h in range(4)
    ]  # fmt: skip
    wanted = torch.cat(of_heads, 1)
    wanted.backward(grad)
    assert_parts(output, parts, wanted, whole, own_part())


def refused(*operands, **options):
    attention = ds_sparse.SequenceParallelAttention(bigbird(operands[0].shape[1]), 176)
    return refusal(lambda: attention(*operands, **options))


def compare_packed(cu_seqlens, rows=1, key_heads=4, causal=False, attend=None, **options):
    """Borders of ranks lie inside documents, and some have no token."""
    *whole, grad = operands_of(4, key_heads, TOKENS, rows=rows)
    parts = [x[:, :, own_part()].clone().requires_grad_() for x in whole]
    whole = [x.requires_grad_() for x in whole]
    cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32, device=DEVICE)
    layout = bigbird(4).make_bool_layout(176)
    of_one = attend or ds_sparse.block_sparse_attention
    wanted = of_one(*map(rows_as_one, whole), layout, block=16, cu_seqlens=cu_seqlens, causal=causal, **options)
    wanted = one_as_rows(wanted, rows)
    wanted.backward(grad)
    if attend is not None:
        options = {"dropout_p": 0.5}
    attention = ds_sparse.SequenceParallelAttention(bigbird(4), 176)
    torch.manual_seed(distributed.get_rank())
    output = attention(*parts, cu_seqlens=cu_seqlens, causal=causal, **options)
    output.backward(grad[:, :, own_part()])
    assert_parts(output, parts, wanted, whole, own_part())


@case
def packed_documents():
    compare_packed([0, 20, 20, 21, 100, TOKENS], causal=True, key_heads=2)
    compare_packed([0, 70, TOKENS, TOKENS + 30, 2 * TOKENS], rows=2)


@case
def packed_documents_with_the_layout_of_the_row():
    compare_packed([0, 20, 21, 100, TOKENS], document_layout="row")


@case
def packed_documents_drop_the_pairs_that_seed_and_head_say():
    def attend(query, key, value, layout, **options):
        torch.manual_seed(0)
        seed, outputs = operands.dropout_seed(DEVICE), []
        for head in range(4):
            with operands.dropout_seeded(seed + torch.tensor([0, head], device=DEVICE)):
                own = slice(head, head + 1)
                of_head = [x[:, own] for x in (query, key, value)]
                outputs.append(ds_sparse.block_sparse_attention(*of_head, layout[own], dropout_p=0.5, **options))
        return torch.cat(outputs, 1)

    compare_packed([0, 70, TOKENS], attend=attend)


@case
def outputs_may_be_written_over_and_there_may_be_no_batch():
    *parts, grad = (x[:, :, own_part()].clone().requires_grad_() for x in operands_of(4, 2, TOKENS))
    attention = ds_sparse.SequenceParallelAttention(bigbird(4), 176)
    wanted = torch.autograd.grad(attention(*parts), parts, 2 * grad)
    for found, of_twice in zip(torch.autograd.grad(attention(*parts).mul_(2), parts, grad), wanted, strict=True):
        assert_same(found, of_twice)
    assert attention(*(x[:0] for x in parts)).shape == (0, *parts[0].shape[1:])


@case
def a_causal_structure_is_causal():
    compare(ds_sparse.FixedSparsityConfig(4, block=16, causal=True), causal_of_one=True)


@case
def what_ranks_do_not_agree_on_is_refused_on_all():
    rank = distributed.get_rank()
    x = torch.ones(2 if rank else 1, 4, 40, 8, device=DEVICE)
    assert "Ranks give their parts of a sequence in different shapes" in refused(x, x, x)
    x = torch.ones(2, 4, 40, 8, device=DEVICE)
    mask = None if rank else torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
    assert "to all or to none" in refused(x, x, x, key_padding_mask=mask)
    assert "or with other options" in refused(x, x, x, causal=rank == 0)
    assert "or with other options" in refused(x, x, x, dropout_p=0.5 if rank else 0.0)
    assert "lengths are" in refused(x, x, x, lengths=(40,))
    tokens = 40 * distributed.get_world_size()
    others = torch.tensor([0, 30 + rank, tokens], device=DEVICE)
    x = x[:1]
    assert "rank 1: batch 1, 4 heads, 4 key heads, head size 8, no mask, 2 packed documents" in refused(
        x, x, x, cu_seqlens=others
    )


@case
def what_one_rank_cannot_compute_is_refused_on_all():
    rank = distributed.get_rank()
    x = torch.ones(1, 4, 40, 8, device=DEVICE)
    none, mask = x[:, :, :0], torch.ones(1, 40 if rank == 0 else 30, dtype=torch.bool, device=DEVICE)
    tokens = 40 * distributed.get_world_size()
    backwards = torch.tensor([0, 30, tokens] if rank == 0 else [0, 30, 20, tokens], device=DEVICE)
    for part, options, why in (
        ([x, x, x] if rank == 0 else [none, none, none], {}, "there has to be at least one token"),
        ([x, x, x] if rank == 0 else [x, x.half(), x], {}, "dtype"),
        ([x, x, x], {"key_padding_mask": mask}, "key_padding_mask has shape (1, 30); it has to be (batch or 1, 40)"),
        ([x, x, x], {"cu_seqlens": backwards}, "cu_seqlens"),
    ):
        said = refused(*part, **options)
        assert ("these refuse their parts: 1" if rank == 0 else why) in said, said


@case
def documents_that_do_not_fit_are_refused():
    x = torch.ones(2, 4, 40, 8, device=DEVICE)
    tokens = 40 * distributed.get_world_size()
    across = torch.tensor([0, 30, 2 * tokens])
    assert "have the end of each row" in refused(x, x, x, cu_seqlens=across)
    assert f"cu_seqlens ends with 40, and the ranks have 2 x {tokens} tokens" in refused(
        x, x, x, cu_seqlens=torch.tensor([0, 40])
    )
    rows = torch.tensor([0, tokens, 2 * tokens])
    mask = torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
    assert "leave the mask out" in refused(x, x, x, cu_seqlens=rows, key_padding_mask=mask)
    assert "one row of documents" in refused(x, x, x, cu_seqlens=rows, document_layout="row")
    assert "there are no packed documents" in refused(x, x, x, document_layout="row")
    assert "key_padding_mask has shape" in refused(x, x, x, key_padding_mask=mask[:, :30])


@case
def fewer_heads_than_ranks_are_refused():
    x = torch.ones(1, 1, 40, 8, device=DEVICE)
    assert "at most 1 ranks can hold a sequence" in refused(x, x, x)


@case
def batches_of_each_rank_reach_all():
    rank, size = distributed.get_rank(), distributed.get_world_size()
    loader = torch.utils.data.DataLoader(torch.arange(4) + 10 * rank, batch_size=2)
    batches = ds_sparse.sequence_batches(loader)
    wanted = [torch.tensor([10 * r + i, 10 * r + i + 1]) for i in (0, 2) for r in range(size)]
    for _ in range(2):
        assert torch.equal(torch.stack(list(batches)), torch.stack(wanted))
    assert len(batches) == 2 * size
    shorter = torch.utils.data.DataLoader(torch.arange(4 if rank else 2), batch_size=2)
    assert "different numbers of batches" in refusal(lambda: list(ds_sparse.sequence_batches(shorter)))


run_all()
