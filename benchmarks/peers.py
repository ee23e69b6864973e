"""Packages that compute a case of `ds_sparse bench attention`, `packed` or `selected` and are not torch's, and a
learner's loop for `tokens`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.plain_loop import plain_loop
from ds_sparse.bench import attention, packed, selected, tokens
from ds_sparse.bench.attention import Problem
from ds_sparse.bench.flex import lists
from ds_sparse.bench.reasons import Unsupported
from ds_sparse.bench.registry import Peer, tokens_first

LOOP = "C++ loop"

PACKAGES = [
    "triton",
    "flash-attn-4",
    "nvidia-cudnn-frontend",
    "fastvideo-kernel",
    "flash-linear-attention",
    "native-sparse-attention-triton",
    "flash-moba",
]
"""Packages whose versions are printed."""


def flash_attention_4(problem: Problem) -> Peer:
    """`flash-attn-4`: lists of blocks in which every score is live, by rows, and by columns for the backward."""
    block = problem.case.block
    if block not in (64, 128):
        raise Unsupported("blocks of 64 and 128 only")
    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    def tensors(layout: Tensor) -> Any:
        counts, columns = lists(layout)
        return BlockSparseTensorsTorch(
            mask_block_cnt=torch.zeros_like(counts)[None],
            mask_block_idx=torch.zeros_like(columns)[None],
            full_block_cnt=counts[None],
            full_block_idx=columns[None],
            block_size=(block, block),
        )

    by_rows, by_columns = tensors(problem.layout), tensors(problem.layout.transpose(1, 2))

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        output, _ = flash_attn_func(
            query, key, value, block_sparse_tensors=by_rows, block_sparse_tensors_bwd=by_columns
        )
        return output.transpose(1, 2)

    return Peer(call, no_backward="" if block == 128 else "backward of blocks of 128 only", arranged=tokens_first)


def flash_attention_4_dense(problem: Problem) -> Peer:
    from flash_attn.cute import flash_attn_func

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output, _ = flash_attn_func(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        return output.transpose(1, 2)

    return Peer(call, dense=True, arranged=tokens_first)


def cudnn_frontend(problem: Problem) -> Peer:
    """`nvidia-cudnn-frontend`: the lists of each sequence and head."""
    case = problem.case
    if case.block not in (64, 128):
        raise Unsupported("blocks of 64 and 128 only")
    from cudnn.block_sparse_attention import block_sparse_attention_backward, block_sparse_attention_forward

    counts, columns = lists_of_each_head(problem)
    arguments = {"q2k_block_index": columns, "q2k_block_nums": counts, "sparse_block_size": case.block}
    some_empty = bool((counts == 0).any())

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            output, lse = block_sparse_attention_forward(
                query.detach(), key.detach(), value.detach(), allow_empty_block_nums=some_empty, **arguments
            )
            ctx.save_for_backward(query, key, value, output, lse)
            return output

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            query, key, value, output, lse = (x.detach() for x in ctx.saved_tensors)
            return tuple(block_sparse_attention_backward(grad, query, key, value, output, lse, **arguments))

    if case.head_dim != 128:
        missing = "backward of D 128 only"
    else:
        missing = "" if problem.dtype == torch.bfloat16 else "backward of bf16 only"
    return Peer(Attention.apply, no_backward=missing)


def video_sparse_attention(problem: Problem) -> Peer:
    """`fastvideo-kernel`: the lists of each sequence and head."""
    case = problem.case
    if case.block != 64:
        raise Unsupported("blocks of 64 only")
    if problem.dtype != torch.bfloat16:
        raise Unsupported("bf16 only")
    from fastvideo_kernel import block_sparse_attn_from_indices

    counts, columns = lists_of_each_head(problem)
    sizes = torch.full((problem.layout.shape[2],), case.block, dtype=torch.int32, device=problem.layout.device)
    return Peer(lambda query, key, value: block_sparse_attn_from_indices(query, key, value, columns, counts, sizes)[0])


def lists_of_each_head(problem: Problem) -> tuple[Tensor, ...]:
    """`lists` with a copy for each sequence and head: int32 (B, H, R) and (B, H, R, width)."""
    batch, heads = problem.case.batch, problem.case.heads
    return tuple(x.expand(batch, heads, *x.shape[1:]).contiguous() for x in lists(problem.layout))


def flash_attention_4_packed(problem: packed.Problem) -> Peer:
    """`flash-attn-4` on packed documents: with its own windows, or every document dense."""
    from flash_attn.cute import flash_attn_varlen_func

    case = problem.case
    window = (case.size, 0 if case.causal else case.size) if case.is_window else (None, None)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output: Any = flash_attn_varlen_func(
            *(x[0].transpose(0, 1) for x in (query, key, value)), cu_seqlens_q=problem.cu_seqlens,
            cu_seqlens_k=problem.cu_seqlens, max_seqlen_q=problem.longest, max_seqlen_k=problem.longest,
            causal=case.causal and not case.is_window, window_size=window,
        )  # fmt: skip
        return (output[0] if isinstance(output, tuple) else output).transpose(0, 1)[None]

    return Peer(call, arranged=tokens_first, dense=not case.is_window)


def flash_linear_attention(problem: selected.Problem) -> Peer:
    """`flash-linear-attention`: NSA without its compressed branch and its window, which leaves the chosen blocks."""
    case, group = problem.case, problem.group
    if not case.causal:
        raise Unsupported("causal only")
    if group < 16 or group & (group - 1):
        raise Unsupported("groups of 16 heads, or of 16 times a power of two, only")
    from fla.ops.nsa import parallel_nsa

    chosen = in_order(problem).transpose(1, 2).contiguous()

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        blocks: dict[str, Any] = {"block_indices": chosen, "block_counts": case.top, "block_size": case.block}
        return parallel_nsa(query, key, value, **blocks).transpose(1, 2)

    return Peer(call, arranged=tokens_first)


def native_sparse_attention(problem: selected.Problem) -> Peer:
    """`native-sparse-attention-triton`, of github.com/XunhaoLai: one document."""
    case = problem.case
    if not case.causal:
        raise Unsupported("causal only")
    if problem.dtype == torch.float32:
        raise Unsupported("bf16 and fp16 only")
    from native_sparse_attention.ops import topk_sparse_attention

    chosen = in_order(problem)[0].contiguous()
    edges = torch.tensor([0, case.seq_len], dtype=torch.int32, device=problem.device)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        return topk_sparse_attention(query, key, value, chosen, case.block, edges).transpose(0, 1)[None]

    return Peer(call, arranged=tokens_first)


def flash_moba(problem: selected.Problem) -> Peer:
    """FlashMoBA, of github.com/mit-han-lab/flash-moba, as one document. Its call takes the rows of each block in any
    order and sorts them, as its own does; what counts and lists them there is part of its choosing, which is left out.
    """
    case = problem.case
    if problem.dtype == torch.float32:
        raise Unsupported("bf16 and fp16 only")
    if case.block % 64:
        raise Unsupported("blocks of a multiple of 64 only")
    from flash_moba import flash_moba_interface as its

    chosen = problem.chosen.repeat_interleave(problem.group, 0)
    counts = chosen.sum(1, dtype=torch.int32)[None]
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
    # Rows of one block after those of another, each from the last to the first.
    rows = case.seq_len - 1 - chosen.flip(1).mT.nonzero()[:, 2].int()
    edges = torch.tensor([0, case.seq_len], dtype=torch.int32, device=problem.device)
    together = its.decide_lg_block_m(case.top, case.block, case.seq_len, case.causal)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        return its.flash_moba_attn_varlen_func(
            query, key, value, edges, edges, case.seq_len, case.seq_len, starts, counts,
            its._varlen_sort(starts, counts, rows), together, case.block, causal=case.causal,
        ).transpose(0, 1)[None]  # fmt: skip

    return Peer(call, arranged=tokens_first)


def in_order(problem: selected.Problem) -> Tensor:
    """The chosen blocks of each token in ascending order, and -1 after them."""
    chosen = problem.block_indices
    ordered = chosen.where(chosen >= 0, problem.columns).sort(-1).values
    return ordered.where(ordered < problem.columns, -1)


def register() -> None:
    """Adds these to the peers of torch, and those that measure what ours does to what a GPU runs by default."""
    attention.OPERATION.peers.update(
        {
            "fa4": flash_attention_4,
            "fa4-dense": flash_attention_4_dense,
            "cudnn-frontend": cudnn_frontend,
            "vsa": video_sparse_attention,
        }
    )
    attention.DEFAULTS["cuda"] += ["fa4", "cudnn-frontend", "vsa"]
    packed.OPERATION.peers["fa4-varlen"] = flash_attention_4_packed
    packed.DEFAULTS["cuda"].insert(packed.DEFAULTS["cuda"].index("varlen") + 1, "fa4-varlen")
    selected.OPERATION.peers.update(
        {"fla": flash_linear_attention, "nsa-triton": native_sparse_attention, "flash-moba": flash_moba}
    )
    selected.DEFAULTS["cuda"] += ["fla", "nsa-triton", "flash-moba"]
    for operation in (attention.OPERATION, packed.OPERATION, selected.OPERATION):
        operation.packages[:] = PACKAGES
    tokens.OPERATION.peers[LOOP] = lambda problem: Peer(
        plain_loop(problem.index), beside=tokens.DENSE, no_backward="forward only"
    )
