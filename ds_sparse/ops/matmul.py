"""Block-sparse matrix products: one operand, or the result, lives on the blocks of a layout."""

from __future__ import annotations

from typing import Any

import torch

from .._ops import ops
from ..dispatch import Implementation, choose
from ..index import BlockIndex, as_index
from ..index.kernels import require_kernel
from ._autograd import Function, product_function
from ._library import check_dtype, check_inputs, under_autocast
from ._on_layout import OnLayout
from .operands import broadcasts, call_on
from .remembered import Remembered, Signature, Walk, signature

MODES = ("sdd", "dsd", "dds")

_known = Remembered()


class MatMul(OnLayout):
    """C = op(A) @ op(B), differentiable in both, with one of A, B, C block-sparse. Source: DeepSpeed's `MatMul`.

    | mode | A | B | C |
    |---|---|---|---|
    | sdd | dense (B, H, M, K) | dense (B, H, K, N) | sparse, layout (H, M/b, N/b) |
    | dsd | sparse, layout (H, R, C) | dense (B, H, K, N) | dense (B, H, M, N) |
    | dds | dense (B, H, M, K) | sparse, layout (H, R, C) | dense (B, H, M, N) |

    A sparse operand holds the live blocks as stored, before any transpose, as (B, V, b, b) in (head, block row, block
    column) order, row-major inside. `trans_a` and `trans_b` transpose the last two dimensions of an operand. fp16,
    bf16, fp32 and fp64; sums are kept in fp32 or wider and rounded once. Products of fp32 are as precise as fp32, on
    CUDA too unless `torch.backends.cuda.matmul.allow_tf32` is set. Operands of 2 to 4 dimensions are
    taken, missing leading ones are 1; batch and head dimensions of size 1 are broadcast. Under autocast both operands
    are cast.

    On a Hopper GPU fp16 and bf16 with blocks of 16 to 128 have kernels of their own, for up to 128 numbers a token, a
    multiple of 8, that are adjacent in memory (an operand whose tokens are adjacent is copied first); all else takes
    longer there. On every device infinities and NaNs of a dense operand reach those rows alone that have its blocks.

    Args:
        layout: tensor of bool, or of 0 and 1 in any type, (R, C) or (H or 1, R, C), one head shared by any number of
            heads; or a `BlockIndex` built from one (for torch.compile and CUDA graphs over several layouts). It is read
            here, once: operations that hand values to each other keep the blocks that they were made with.
        block: tokens on a block's side, a power of two, 8 or more.
        mode: 'sdd', 'dsd' or 'dds'.
        trans_a, trans_b: whether A, B are transposed first.
        bench: accepted for old callers; times are in `ds_sparse bench matmul`.

    Raises:
        NotImplementedError: another mode.
        TypeError: a layout that is no dense tensor, or of another dtype.
        ValueError: a layout or block that cannot be; an index that was built for another block.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> layout = torch.eye(4, dtype=torch.bool)
        >>> query, key, value = (torch.randn(2, 3, 64, 8) for _ in range(3))
        >>> scores = ds_sparse.MatMul(layout, 16, "sdd", trans_b=True)(query, key)
        >>> scores.shape
        torch.Size([2, 12, 16, 16])
        >>> ds_sparse.MatMul(layout, 16, "dsd")(scores, value).shape
        torch.Size([2, 3, 64, 8])
    """

    def __init__(
        self,
        layout: torch.Tensor | BlockIndex,
        block: int,
        mode: str,
        trans_a: bool = False,
        trans_b: bool = False,
        bench: bool = False,
    ):
        if mode not in MODES:
            raise NotImplementedError(f"Supported modes are: sdd, dsd, dds; got {mode!r}.")
        super().__init__(layout, as_index(layout, block).with_lists())
        self.mode, self.trans_a, self.trans_b = mode, trans_a, trans_b

    def __repr__(self) -> str:
        transposed = "".join(f", {name}" for name in ("trans_a", "trans_b") if getattr(self, name))
        return f"MatMul({self.mode}{transposed}, {self._index})"

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """op(a) @ op(b).

        Args:
            a: A of the mode, dense (B or 1, H or 1, M, K), or the sparse values (B or 1, V, b, b).
            b: B of the mode, alike; of a's dtype and device.

        Returns:
            C of the mode, in the operands' dtype, dense (B, H, M, N), or the sparse values (B, V, b, b); with as many
            dimensions as the operand that has more.

        Raises:
            TypeError: operands that are no tensors.
            ValueError: operands that do not fit the layout, or each other; nested and sparse ones; another dtype.
            RuntimeError: a device without the kernel.
        """
        like = signature(type(self), (a, b), (), (self.mode, self.trans_a, self.trans_b))
        known = None if like is None else _known.get(like)
        if known is not None:
            index = self._index_on(a.device)
            walk = known.walks.get(index)
            if walk is not None:
                return walk.apply(*self._taken(a, b, index, walk))
        check_inputs(a=a, b=b)
        if a.device != b.device:
            raise ValueError(
                f"Inputs must be on the same device; got {a.device} for tensor A and {b.device} for tensor B"
            )
        a, b = under_autocast(a, b)
        if a.dtype != b.dtype:
            raise ValueError(f"Inputs must be the same dtype; got {a.dtype} for A and {b.dtype} for B")
        check_dtype(a)
        for name, operand in (("A", a), ("B", b)):
            if not 2 <= operand.dim() <= 4:
                raise ValueError(
                    "Tensors with more than 4 dimensions are not currently supported, nor with fewer than 2; "
                    f"tensor {name} has {operand.dim()}."
                )
        index = self._index_on(a.device)
        added = 4 - max(a.dim(), b.dim())
        given = a, b = _four_dimensional(a), _four_dimensional(b)
        if self.mode == "sdd":
            a, b = self._dense(a, b, index)
        elif self.mode == "dsd":
            a, b = self._sparse_and_dense("A", a, "B", b, index)
        else:
            b, a = self._sparse_and_dense("B", b, "A", a, index)
        result = self._function.apply(*self._taken(a, b, index))
        if like is not None and added == 0 and given[0].shape == a.shape and given[1].shape == b.shape:
            self._remember(like, a, b, index, result)
        for _ in range(added):
            result = result.squeeze(0)
        return result

    @property
    def _function(self) -> type[Function]:
        return _SDD if self.mode == "sdd" else _DSD

    def _taken(self, a: torch.Tensor, b: torch.Tensor, index: BlockIndex, walk: Walk | None = None) -> tuple[Any, ...]:
        """The operands, which fit, and what says how they are multiplied, as the autograd function takes them."""
        a = a.mT if self.trans_a and self.mode == "sdd" else a
        if self.mode == "dds":
            return b, a if self.trans_a else a.mT, (index, not self.trans_b, True, walk)
        b = b.mT if self.trans_b else b
        return a, b, (index, walk) if self.mode == "sdd" else (index, self.trans_a, False, walk)

    def _remember(
        self, like: Signature, a: torch.Tensor, b: torch.Tensor, index: BlockIndex, result: torch.Tensor
    ) -> None:
        """Keeps that such a product has been checked, where no operand is copied first."""
        x, y, how = self._taken(a, b, index)
        is_sdd = self.mode == "sdd"
        if not (_reads_in_place("sdd", index, x, y.mT) if is_sdd else _reads_in_place("dsd", index, y)):
            return

        def walk() -> Walk:
            made = _walk_of_sdd(x, y.mT, index) if is_sdd else _walk_of_dsd(x.contiguous(), y, index, how[1])
            if result.requires_grad:
                made = made._replace(strides=result.stride(), gradients=_walks_of_gradients(x, y, how, result))
            return made.of_calls_like(self._function, (x, y))

        _known.keep(like, 1.0, None, index, walk)

    def _dense(self, a: torch.Tensor, b: torch.Tensor, index: BlockIndex) -> tuple[torch.Tensor, torch.Tensor]:
        """The operands of sdd, after a check that they fit, with as many sequences and heads."""
        (rows, inner), (of_b, columns) = (
            sizes[::-1] if transposed else sizes
            for sizes, transposed in ((a.shape[2:], self.trans_a), (b.shape[2:], self.trans_b))
        )
        if inner != of_b:
            raise ValueError(
                f"Size of tensor A along the {-2 if self.trans_a else -1} dim ({inner}) must match size of "
                f"tensor B along the {-1 if self.trans_b else -2} dim ({of_b})"
            )
        for name, size, blocks in (("rows", rows, index.rows), ("columns", columns, index.columns)):
            if size != blocks * index.block:
                raise ValueError(
                    f"The product has {size} {name}, and the layout {blocks} block {name} of {index.block}, which is "
                    f"{blocks * index.block}; build the layout for these operands."
                )
        heads = _heads(max(a.shape[1], b.shape[1]), index)
        batch = max(a.shape[0], b.shape[0])
        a, b = _expand("A", a, batch, heads), _expand("B", b, batch, heads)
        require_kernel("matmul_sdd", a.device)
        return a, b

    def _sparse_and_dense(
        self, sparse_name: str, values: torch.Tensor, dense_name: str, dense: torch.Tensor, index: BlockIndex
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The operands of dsd and dds, likewise."""
        if self.mode == "dsd":
            dim, blocks = 3 if self.trans_b else 2, index.rows if self.trans_a else index.columns
        else:
            dim, blocks = 2 if self.trans_a else 3, index.columns if self.trans_b else index.rows
        inner = blocks * index.block
        if dense.shape[dim] != inner:
            raise ValueError(f"Expected tensor {dense_name} to have size {inner} at dim {dim}, got {dense.shape[dim]}.")
        heads = _heads(dense.shape[1], index)
        if heads == 1 and index.num_heads == 1:
            heads = index.heads_of(values.shape[1]) or 1
        expected = (index.num_values(heads), index.block, index.block)
        if tuple(values.shape[1:]) != expected:
            raise ValueError(
                f"Expected tensor with trailing dimensions of shape {expected} for argument {sparse_name}, "
                f"got {tuple(values.shape[1:])}"
            )
        batch = max(values.shape[0], dense.shape[0])
        if not broadcasts(values.shape[:1], (batch,)):
            raise ValueError(
                f"Tensor {sparse_name} has batch {values.shape[0]} and tensor {dense_name} {dense.shape[0]}; give both "
                "the same, or 1."
            )
        require_kernel("matmul_dsd", dense.device)
        return values.expand(batch, -1, -1, -1), _expand(dense_name, dense, batch, heads)


def _four_dimensional(x: torch.Tensor) -> torch.Tensor:
    return x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))


def _heads(given: int, index: BlockIndex) -> int:
    """The number of heads of the product, from the dense operand's and the layout's."""
    if index.num_heads != 1 and not broadcasts((given,), (index.num_heads,)):
        raise ValueError(
            f"The dense operand has {given} heads and the layout {index.num_heads}; give the layout as many heads, "
            "or one."
        )
    return max(given, index.num_heads)


def _expand(name: str, x: torch.Tensor, batch: int, heads: int) -> torch.Tensor:
    if not broadcasts(x.shape[:2], (batch, heads)):
        raise ValueError(
            f"Tensor {name} has batch {x.shape[0]} and {x.shape[1]} heads, the other operand or the layout batch "
            f"{batch} and {heads} heads; give both the same, or 1."
        )
    return x.expand(batch, heads, -1, -1)


def _sdd(
    a: torch.Tensor, b: torch.Tensor, index: BlockIndex, walk: Walk | None = None, forced: str | None = None
) -> torch.Tensor:
    """a @ b on the live blocks. walk: that of a product which is remembered; forced: as of `dispatch.choose`."""
    if walk is None:
        columns = b.mT
        a, read = _token_by_token("sdd", a, index, forced), _token_by_token("sdd", columns, index, forced)
        b = b if read is columns else read.mT
        walk = _walk_of_sdd(a, read, index, forced)
    else:
        index.ready()
    return ops.matmul_sdd.default(a, b, *walk.rows, allow_tf32(), *walk.ends)


def _walk_of_sdd(a: torch.Tensor, columns: torch.Tensor, index: BlockIndex, forced: str | None = None) -> Walk:
    chosen, lists = choose("sdd", call_on(index, a, columns), forced), index.lists
    lines, entries, units, _, slots = _tiles(index, "rows", chosen)
    offsets = lists.row_offsets, lists.row_columns
    return Walk((*offsets, lines, entries, units, slots, index.layout_heads, index.block), (), (chosen.name,))


def _dsd(
    values: torch.Tensor,
    dense: torch.Tensor,
    index: BlockIndex,
    transposed: bool,
    transpose_result: bool,
    walk: Walk | None = None,
    forced: str | None = None,
) -> torch.Tensor:
    values = values.contiguous()
    if walk is None:
        dense = _token_by_token("dsd", dense, index, forced)
        walk = _walk_of_dsd(values, dense, index, transposed, forced)
    else:
        index.ready()
    return ops.matmul_dsd.default(values, dense, *walk.rows, transpose_result, allow_tf32(), *walk.ends)


def _walk_of_dsd(
    values: torch.Tensor, dense: torch.Tensor, index: BlockIndex, transposed: bool, forced: str | None = None
) -> Walk:
    chosen, lists = choose("dsd", call_on(index, dense, values), forced), index.lists
    of_side: tuple[torch.Tensor | None, ...]
    if transposed:
        side, of_side = "columns", (lists.column_offsets, lists.column_rows, lists.column_slots)
    else:
        side, of_side = "rows", (lists.row_offsets, lists.row_columns, None)
    return Walk((*of_side, *_tiles(index, side, chosen), index.layout_heads, index.block), (), (chosen.name,))


def _tiles(index: BlockIndex, side: str, chosen: Implementation) -> tuple[torch.Tensor | None, ...]:
    """Lines, entries, units, cuts and slots of the tiles of a side, where the implementation walks them."""
    if chosen.tiles is None:
        return (None,) * 5
    tile = chosen.tile(index.block)
    tiles = index.tiles(side, tile)
    return tiles.lines, tiles.entries, tiles.units, tiles.cuts, index.lists.slots[side, tile]


def _token_by_token(operation: str, x: torch.Tensor, index: BlockIndex, forced: str | None) -> torch.Tensor:
    """x, (B, H, tokens, D), with the numbers of each token adjacent in memory, where the operation then runs by kernels
    that read boxes: a copy costs less than the other kernels do. What is expanded is not copied."""
    return ops.transpose(x) if _is_copied(operation, x, index, forced) else x


def _is_copied(operation: str, x: torch.Tensor, index: BlockIndex, forced: str | None = None) -> bool:
    if x.stride(-1) == 1 or 0 in x.stride() or x.shape[-1] % 8 != 0:
        return False
    return choose(operation, call_on(index, x)._replace(operands=()), forced).reads_boxes


def _reads_in_place(operation: str, index: BlockIndex, *dense: torch.Tensor) -> bool:
    return not any(_is_copied(operation, x, index) for x in dense)


def allow_tf32() -> bool:
    """Tells if fp32 products on CUDA may round their operands to TF32, as torch's own may."""
    return torch.backends.cuda.matmul.allow_tf32


def _sdd_of_first(grad, a, b, index, walk, forced):
    return _dsd(grad, b.mT, index, False, False, walk and walk.of_gradient(0, grad), forced)


def _sdd_of_second(grad, a, b, index, walk, forced):
    # In b's order of memory: where b is a transposed view, so is its gradient, and nothing is copied.
    rows_are_contiguous = b.stride(-1) == 1
    grad_b = _dsd(grad, a, index, True, rows_are_contiguous, walk and walk.of_gradient(1, grad), forced)
    return grad_b if rows_are_contiguous else grad_b.mT


def _dsd_of_values(grad, values, dense, index, transposed, transpose_result, walk, forced):
    left, right = (dense, grad) if transposed else (grad, dense)
    return _sdd(left, right.mT, index, walk and walk.of_gradient(0, grad), forced)


def _dsd_of_dense(grad, values, dense, index, transposed, transpose_result, walk, forced):
    walk = walk and walk.of_gradient(1, grad)
    grad_dense = _dsd(values, grad, index, not transposed, transpose_result, walk, forced)
    return grad_dense.mT if transpose_result else grad_dense


def _walks_of_gradients(
    x: torch.Tensor, y: torch.Tensor, how: tuple[Any, ...], grad: torch.Tensor
) -> tuple[Walk | None, ...]:
    """The walks of both operands' gradients, of one of the product that lies in memory as `grad`. None where what they
    are made of is copied first, and where none is wanted."""
    index, *rest, _ = how
    of_x = of_y = None
    if not rest:
        if x.requires_grad and _reads_in_place("dsd", index, y.mT):
            of_x = _walk_of_dsd(grad, y.mT, index, False)
        if y.requires_grad and _reads_in_place("dsd", index, x):
            of_y = _walk_of_dsd(grad, x, index, True)
        return of_x, of_y
    transposed, transpose_result = rest
    if x.requires_grad and not transpose_result and _reads_in_place("sdd", index, y, grad):
        of_x = _walk_of_sdd(y if transposed else grad, grad if transposed else y, index)
    if y.requires_grad and not transpose_result and _reads_in_place("dsd", index, grad):
        of_y = _walk_of_dsd(x.contiguous(), grad, index, not transposed)
    return of_x, of_y


def _read(grad, index, transposed, transpose_result, walk, forced):
    return _token_by_token("dsd", grad.mT, index, forced) if transpose_result else grad


_SDD = product_function("_SDD", "MatMul", _sdd, _sdd_of_first, _sdd_of_second)
_DSD = product_function("_DSD", "MatMul", _dsd, _dsd_of_values, _dsd_of_dense, _read)
