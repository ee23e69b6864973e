"""Cases of operations on the blocks of a layout: block_sparse_attention, MatMul, Softmax."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ds_sparse import BlockIndex, MatMul, PackedIndex, Softmax, block_sparse_attention
from ds_sparse.ops.operands import dropout_seed
from ds_sparse.reference import dropout_keep

from . import reference
from .cases import Case, Draw
from .documents import Documents, draw_documents
from .meanings import Attention, Product, RowSoftmax, Tensors
from .reference import as_bias, blocks_of, dense_of, kept, seen_tokens

HEAD_DIMS = (16, 16, 32, 64, 8, 1, 3, 20, 40, 72, 96, 128, 136, 256)
FORMS = (torch.bool, torch.bool, torch.int64, torch.uint8, torch.float32)


def sizes_of_layout(draw: Draw, block: int) -> tuple[int, int]:
    """Block rows and columns."""
    most = {8: 9, 16: 6, 32: 4, 64: 3}.get(block, 2)
    rows = draw.random.randint(1, most)
    return rows, rows if draw.maybe(0.5) else draw.random.randint(1, most)


def given_layout(draw: Draw, layout: Tensor, block: int) -> Callable[[str], Tensor | BlockIndex]:
    """The layout in one of the forms that operations take, on a device."""
    form = draw.pick("layout's dtype", FORMS)
    given = layout.to(form)
    if len(layout) == 1 and draw.maybe(0.5):
        given = given[0]
    kind = draw.random.choice(("tensor",) * 5 + ("BlockIndex", "BlockIndex", "BlockMask"))
    draw.words["layout as"] = f"{kind} {tuple(given.shape)}"
    if kind == "BlockMask":
        mask = block_mask(draw, layout, block)
        return lambda device: BlockIndex.from_flex(mask.to(device), partial="live")
    return lambda device: BlockIndex.build(given.to(device), block) if kind == "BlockIndex" else given.to(device)


def block_mask(draw: Draw, layout: Tensor, block: int) -> BlockMask:
    """A mask of flex attention made of lists: each row's blocks in any order, and anything behind them."""
    heads, rows, columns = layout.shape
    counts = layout.sum(-1)
    order = torch.where(layout, draw.uniform(heads, rows, columns), 2).argsort(-1)
    width = max(1, int(counts.max())) if draw.maybe(0.5) else columns
    filler = draw.pick("behind lists", (None, 0, -1, 99))
    if filler is not None:
        order = torch.where(torch.arange(columns) < counts[..., None], order, filler)
    return BlockMask.from_kv_blocks(
        counts[None].int(), order[None, ..., :width].int(), BLOCK_SIZE=block,
        seq_lengths=(rows * block, columns * block), compute_q_blocks=False,
    )  # fmt: skip


def attention(draw: Draw, skew: float, at_offset: bool = False) -> Case:
    """at_offset: of queries that begin at a position of their own, few and many."""
    dtype, block = draw.dtype(float64_on_cuda=False), draw.pick("block", (8, 16, 16, 32, 64, 128))
    rows, columns = sizes_of_layout(draw, block)
    if at_offset:
        tokens = min(draw.pick("queries", (1, 1, 3, 16, 17, 30, 64)), rows * block)
    else:
        tokens = rows * block - draw.pick("", (0, 0, 1, 5, block - 1))
    keys = columns * block - draw.pick("", (0, 0, 1, 6, block - 1))
    group, key_heads = draw.pick("group", (1, 1, 1, 2, 3)), draw.size("key heads", (1, 2, 2))
    batch, depth = draw.size("batch", (1, 1, 2, 2, 3)), draw.pick("head size", HEAD_DIMS)
    heads, full = group * key_heads, (batch, group * key_heads, tokens, keys)
    offset: Tensor | int | None = None
    if at_offset:
        several = batch > 0 and draw.maybe(0.5)
        offsets = [draw.random.randint(0, rows * block - tokens) for _ in range(batch if several else 1)]
        offset = torch.tensor(offsets) if several else offsets[0]
        draw.words["query_offset"] = str(offset)
    layout = draw.layout(heads, rows, columns, block)
    layout_of = given_layout(draw, layout, block)
    tensors: Tensors = {"query": draw.values("query", (batch, heads, tokens, depth), dtype)}
    for name in ("key", "value"):
        tensors[name] = draw.values(name, (batch, key_heads, keys, depth), dtype)
    bias_dtype = draw.pick("dtype of biases", (dtype, dtype, torch.float32, torch.float64))
    if draw.maybe(0.3):
        tensors["rpe"] = draw.bias("rpe", draw.subset(full, draw.pick("", (2, 3, 4))), bias_dtype, may_be_bool=False)
    elif draw.maybe(0.2):
        distances = 2 * (max((max(offsets) if at_offset else 0) + tokens, keys) + draw.pick("", (0, 0, 3))) - 1
        shape = (draw.pick("heads of distances", (1, heads)), distances)
        tensors["distance_bias"] = draw.bias("distance_bias", shape, bias_dtype, may_be_bool=False)
    if draw.maybe(0.3):
        tensors["attn_mask"] = draw.bias("attn_mask", draw.subset(full, draw.pick("", (2, 4))), bias_dtype)
    if draw.maybe(0.3):
        tensors["key_padding_mask"] = draw.bias("key_padding_mask", draw.subset((batch, keys), 2), bias_dtype)
    if draw.maybe(0.25):
        tensors["sinks"] = draw.values("sinks", (heads,), bias_dtype)
    scale, causal, with_lse = draw.scale(), draw.pick("causal", (False, False, True)), draw.pick("lse", (False, True))
    adds = any(x.dtype != torch.bool for name, x in tensors.items() if name not in ("query", "key", "value", "sinks"))
    softcap = 0.0 if adds else draw.softcap()
    is_clear = not at_offset and rows * columns > 1 and not fits_another(block, (rows, columns), tokens, keys)
    return attention_case(
        tensors, layout, block, draw.device, layout_of, skew=skew, scale=scale, causal=causal, offset=offset,
        dropout_p=0.0 if at_offset else draw.pick("dropout", (0.0, 0.0, 0.0, 0.1, 0.6)), return_lse=with_lse,
        softcap=softcap, give_block=not (is_clear and draw.maybe(0.5)), seed=draw.random.randrange(2**31),
        grads=draw.grads(), words=draw.words,
    )  # fmt: skip


def attention_case(
    tensors: Tensors, layout: Tensor, block: int, device: str,
    layout_of: Callable[[str], Tensor | BlockIndex] | None = None, *, scale: float | None = None, causal: bool = False,
    dropout_p: float = 0.0, softcap: float = 0.0, offset: Tensor | int | None = None, return_lse: bool = True,
    skew: float = 1.0, give_block: bool = True, seed: int = 7, **of_case: Any,
) -> Case:  # fmt: skip
    """Attention of operands, biases, masks and sinks by name, over a bool layout (1 or H, R, C)."""
    (batch, heads, tokens, depth), keys = tensors["query"].shape, tensors["key"].shape[2]
    offsets = offset.tolist() if isinstance(offset, Tensor) else [offset or 0]
    factor = depth**-0.5 if scale is None else scale
    options: dict[str, Any] = {"scale": factor * skew if skew != 1 else scale, "causal": causal}
    options |= {"dropout_p": dropout_p, "block": block if give_block else None, "return_lse": return_lse}
    options |= {"softcap": softcap}

    def call(given: Tensors) -> Tensors:
        torch.manual_seed(seed)
        on = str(given["query"].device)
        at = offset.to(on) if isinstance(offset, Tensor) else offset
        given_as = layout.to(on) if layout_of is None else layout_of(on)
        found = block_sparse_attention(**given, layout=given_as, **options, query_offset=at)
        return dict(zip(("output", "lse"), found)) if return_lse else {"output": found}

    def keep() -> Tensor:
        if dropout_p == 0 or 0 in (batch, heads):
            return torch.ones((), dtype=torch.float64)
        torch.manual_seed(seed)
        numbers = dropout_seed(torch.device(device)).tolist()
        share = round(dropout_p * 32768) / 32768
        return dropout_keep(*numbers, batch, heads, tokens, keys, dropout_p).double() / (1 - share)

    seen = torch.stack([seen_tokens(layout, block, tokens, keys, at) for at in offsets])
    seen = seen & torch.stack([reference.before(tokens, keys, at)[None] for at in offsets]) if causal else seen
    biases: dict[str, Callable[[Tensor], Tensor]] = {
        "rpe": as_bias, "attn_mask": as_bias, "key_padding_mask": over_keys,
        "distance_bias": lambda bias: torch.cat([by_distance(bias, tokens, keys, at) for at in offsets]),
    }  # fmt: skip
    wanted = tuple(name for name in tensors if name not in ("attn_mask", "key_padding_mask"))
    meaning = Attention(
        ("query", "key", "value"), seen, factor, {name: of for name, of in biases.items() if name in tensors}, keep,
        with_lse=return_lse, in_parts=offset is not None and causal and tokens > 16, sinks="sinks" in tensors,
        bias_dtype=next((x.dtype for name, x in tensors.items() if name in wanted[3:]), torch.float64),
        softcap=softcap,
    )  # fmt: skip
    name = "block_sparse_attention" if offset is None else "attention at an offset"
    return Case(name, tensors["query"].dtype, tensors, of_case.pop("wanted", wanted), call, meaning, **of_case)


def packed(draw: Draw, skew: float) -> Case:
    """Documents of a row, which end inside a block or not."""
    dtype, block = draw.dtype(float64_on_cuda=False), draw.pick("block", (8, 16, 16, 32, 64, 128))
    tokens, group, key_heads = draw.pick("tokens", (20, 33, 64, 1, 100, 129)), draw.pick("group", (1, 1, 2)), 2
    heads, depth = group * key_heads, draw.pick("head size", HEAD_DIMS)
    tensors: Tensors = {"query": draw.values("query", (1, heads, tokens, depth), dtype)}
    for name in ("key", "value"):
        tensors[name] = draw.values(name, (1, key_heads, tokens, depth), dtype)
    documents = draw_documents(draw, tokens)
    is_own, side = documents.layout == "own", -(-tokens // block)
    layout = draw.layout(heads, side, side, block)
    layout_of = given_layout(draw, layout, block)
    form = draw.pick("operands", ("rows", "tokens first", "nested"))
    with_lse = is_own and form != "nested" and draw.pick("lse", (False, True))
    scale, causal, softcap = draw.scale(), draw.pick("causal", (False, True)), draw.softcap()
    if draw.maybe(0.25):
        tensors["sinks"] = draw.values("sinks", (heads,), dtype)
    return packed_case(
        tensors, layout, block, documents, layout_of, form, scale=scale, causal=causal, softcap=softcap,
        return_lse=with_lse, skew=skew, as_index=is_own and form != "nested" and draw.maybe(0.3), grads=draw.grads(),
        words=draw.words,
    )  # fmt: skip


def packed_case(
    tensors: Tensors, layout: Tensor, block: int, documents: Documents,
    layout_of: Callable[[str], Tensor | BlockIndex] | None = None, form: str = "rows", *, scale: float | None = None,
    causal: bool = False, softcap: float = 0.0, return_lse: bool = False, as_index: bool = False, skew: float = 1.0,
    **of_case: Any,
) -> Case:  # fmt: skip
    """Attention over documents of a row; form: "rows" (1, H, T, D), "tokens first" (T, H, D) or "nested"."""
    factor = tensors["query"].shape[-1] ** -0.5 if scale is None else scale
    options: dict[str, Any] = {"scale": factor * skew if skew != 1 else scale, "causal": causal, "softcap": softcap}

    def folded(x: Tensor) -> Tensor:
        if form == "nested":
            edges = documents.cu_seqlens.to(x.device)
            return torch.nested.nested_tensor_from_jagged(x[0].transpose(0, 1), edges).transpose(1, 2)
        return x if form == "rows" else x[0].transpose(0, 1)

    def unfolded(x: Tensor) -> Tensor:
        return x.values()[None] if x.is_nested else x if form == "rows" else x.transpose(0, 1)[None]

    def call(given: Tensors) -> Tensors:
        device, own = str(given["query"].device), {}
        of_layout: Any = layout.to(device) if layout_of is None else layout_of(device)
        if as_index:
            of_layout = PackedIndex.build(of_layout, documents.cu_seqlens, block)
        else:
            own = {"block": block, "document_layout": documents.layout}
            if form != "nested":
                own["cu_seqlens"] = documents.cu_seqlens.to(device)
        operands = {name: x if name == "sinks" else folded(x) for name, x in given.items()}
        found = block_sparse_attention(**operands, layout=of_layout, **own, **options, return_lse=return_lse)
        results = dict(zip(("output", "lse"), found)) if return_lse else {"output": found}
        return {name: unfolded(x) for name, x in results.items()}

    covered = layout.shape[-1] * block
    as_one = seen_tokens(layout, block, covered, covered)
    as_one = as_one & reference.before(covered, covered) if causal else as_one
    names, sinks = ("query", "key", "value"), tensors.get("sinks")
    meaning = Attention(
        names, documents.of_row(as_one, False), factor, with_lse=return_lse, sinks=sinks is not None,
        bias_dtype=torch.float64 if sinks is None else sinks.dtype, softcap=softcap,
    )  # fmt: skip
    return Case("packed attention", tensors["query"].dtype, tensors, tuple(tensors), call, meaning, **of_case)


def by_distance(bias: Tensor, tokens: int, keys: int, offset: int = 0) -> Tensor:
    """A bias by distance (H or 1, 2M - 1) as one of pairs."""
    distance = torch.arange(keys) - torch.arange(tokens)[:, None] - offset
    return as_bias(bias[:, distance + bias.shape[1] // 2])[None]


def over_keys(mask: Tensor) -> Tensor:
    """A key padding mask (B or 1, S) as a bias."""
    return as_bias(mask)[:, None, None]


def fits_another(block: int, shape: tuple[int, int], tokens: int, keys: int) -> bool:
    """A smaller block would cover the tokens as well."""
    smaller = [b for b in (8, 16, 32, 64, 128) if b < block]
    return any((-(-tokens // b), -(-keys // b)) == shape for b in smaller)


def matmul(draw: Draw, skew: float) -> Case:
    dtype, mode = draw.dtype(), draw.pick("mode", ("sdd", "dsd", "dds"))
    block = draw.pick("block", (8, 16, 16, 32, 64, 128))
    rows, columns = sizes_of_layout(draw, block)
    trans_a, trans_b = draw.pick("trans_a", (False, True)), draw.pick("trans_b", (False, True))
    heads, batch = draw.pick("heads", (1, 2, 3)), draw.size("batch", (1, 2, 2))
    width = draw.size("width", (16, 32, 64, 8, 1, 3, 20, 72, 128, 136))
    layout = draw.layout(heads, rows, columns, block)
    layout_of = given_layout(draw, layout, block)
    of_a, of_b = (batch if draw.maybe(0.8) or not batch else 1 for _ in range(2))
    batch = of_a if of_b == 1 else of_b
    num_values = int(layout.expand(heads, -1, -1).sum())

    def dense(name: str, of_batch: int, size: tuple[int, int], transposed: bool) -> Tensor:
        own = 1 if len(layout) == heads and heads > 1 and draw.maybe(0.2) and mode != "sdd" else heads
        shape = (of_batch, own, *(size[::-1] if transposed else size))
        dims = 4 if of_batch != 1 or own != 1 else draw.pick("", (2, 3, 4))
        return draw.values(name, shape[4 - dims :], dtype)

    def sparse(name: str, of_batch: int) -> Tensor:
        shape = (of_batch, num_values, block, block)
        return draw.values(name, shape[1:] if of_batch == 1 and draw.maybe(0.3) else shape, dtype)

    tall, wide = rows * block, columns * block
    if mode == "sdd":
        a = dense("a", of_a, (tall, width), trans_a)
        b = dense("b", of_b, (width, wide), trans_b)
    elif mode == "dsd":
        a, b = sparse("a", of_a), dense("b", of_b, (tall if trans_a else wide, width), trans_b)
    else:
        a, b = dense("a", of_a, (width, wide if trans_b else tall), trans_a), sparse("b", of_b)

    return product_case(
        {"a": a, "b": b}, layout, block, heads, mode, trans_a, trans_b, layout_of, grads=draw.grads(), words=draw.words
    )


def product_case(
    tensors: Tensors, layout: Tensor, block: int, heads: int, mode: str, trans_a: bool, trans_b: bool,
    layout_of: Callable[[str], Tensor | BlockIndex] | None = None, **of_case: Any,
) -> Case:  # fmt: skip
    """MatMul of "a" and "b", of which one is sparse values in modes dsd and dds."""

    def product(operands: list[Tensor]) -> Tensor:
        left, right = (x.reshape((1,) * (4 - x.dim()) + tuple(x.shape)) for x in operands)
        left = dense_of(left, layout, block, heads) if mode == "dsd" else left
        right = dense_of(right, layout, block, heads) if mode == "dds" else right
        result = (left.mT if trans_a else left) @ (right.mT if trans_b else right)
        result = result.expand(-1, heads, -1, -1)
        result = blocks_of(result, layout, block) if mode == "sdd" else result
        for _ in range(4 - max(x.dim() for x in operands)):
            result = result.squeeze(0)
        return result

    def call(given: Tensors) -> Tensors:
        on = given["a"].device
        given_as = layout.to(on) if layout_of is None else layout_of(str(on))
        return {"result": MatMul(given_as, block, mode, trans_a, trans_b)(given["a"], given["b"])}

    wanted = of_case.pop("wanted", ("a", "b"))
    return Case("MatMul", tensors["a"].dtype, tensors, wanted, call, Product(("a", "b"), product), **of_case)


def softmax(draw: Draw, skew: float) -> Case:
    dtype, block = draw.dtype(), draw.pick("block", (8, 16, 16, 32, 64, 128))
    rows, columns = sizes_of_layout(draw, block)
    heads, batch = draw.pick("heads", (1, 2, 3)), draw.size("batch", (1, 2, 2))
    layout = draw.layout(heads, rows, columns, block)
    # Values of a shared layout without live blocks do not tell of how many heads they are.
    heads = heads if layout.any() else len(layout)
    layout_of = given_layout(draw, layout, block)
    full = (batch, heads, rows * block, columns * block)
    num_values = int(layout.expand(heads, -1, -1).sum())
    flat = batch == 1 and draw.maybe(0.4)
    tensors: Tensors = {
        "x": draw.values("x", (num_values, block, block) if flat else (batch, num_values, block, block), dtype)
    }
    modes = {name: draw.pick(f"mode of {name}", ("add", "mul")) for name in ("key_padding_mask", "attn_mask")}
    wanted = ["x"]
    if draw.maybe(0.3):
        tensors["rpe"] = draw.bias("rpe", draw.subset(full, draw.pick("", (2, 3, 4))), dtype, may_be_bool=False)
        wanted.append("rpe")
    for name, sizes, dims in (("attn_mask", full, (2, 4)), ("key_padding_mask", (batch, full[3]), (2,))):
        if draw.maybe(0.3):
            tensors[name] = draw.bias(name, draw.subset(sizes, draw.pick("", dims)), dtype)
            if modes[name] == "add" and tensors[name].dtype == dtype and draw.maybe(0.5):
                wanted.append(name)
    scale, causal = draw.scale(), draw.pick("causal", (False, False, True))
    return softmax_case(
        tensors, layout, block, heads, modes, layout_of, scale=1.0 if scale is None else scale, causal=causal,
        skew=skew, wanted=tuple(wanted), grads=draw.grads(), words=draw.words,
    )  # fmt: skip


def softmax_case(
    tensors: Tensors, layout: Tensor, block: int, heads: int, modes: dict[str, str] | None = None,
    layout_of: Callable[[str], Tensor | BlockIndex] | None = None, *, scale: float = 1.0, causal: bool = False,
    skew: float = 1.0, wanted: tuple[str, ...] = (), **of_case: Any,
) -> Case:  # fmt: skip
    """Softmax of "x", with biases and masks by name; modes: of masks, where they are not "add"."""
    modes, flat = {"key_padding_mask": "add", "attn_mask": "add"} | (modes or {}), tensors["x"].dim() == 3
    options = {f"{name}_mode": mode for name, mode in modes.items()} | {"causal": causal, "scale": scale * skew}

    def call(given: Tensors) -> Tensors:
        on = given["x"].device
        operation = Softmax(layout.to(on) if layout_of is None else layout_of(str(on)), block)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of bool masks that are added
            return {"probs": operation(**given, **options)}

    def spread(x: Tensor) -> Tensor:
        return dense_of(x[None] if flat else x, layout, block, heads)

    def gather(dense: Tensor) -> Tensor:
        values = blocks_of(dense, layout, block)
        return values[0] if flat else values

    biases = {name: added_or_kept(mode, over=name == "key_padding_mask") for name, mode in modes.items()}
    biases = {name: of for name, of in ({"rpe": as_bias} | biases).items() if name in tensors}
    tokens, keys = layout.shape[-2] * block, layout.shape[-1] * block
    seen = seen_tokens(layout, block, tokens, keys)
    seen = seen & reference.before(tokens, keys) if causal else seen
    meaning = RowSoftmax("x", spread, gather, seen, scale, biases)
    added = [name for name in biases if modes.get(name) != "mul" and tensors[name].dtype != torch.bool]
    wanted = wanted or ("x", *added)
    return Case("Softmax", tensors["x"].dtype, tensors, wanted, call, meaning, **of_case)


def added_or_kept(mode: str, over: bool) -> Callable[[Tensor], Tensor]:
    """A mask of Softmax as a bias: 'add' adds bools as numbers, 'mul' keeps what is not 0."""

    def bias(mask: Tensor) -> Tensor:
        mask = mask.double() if mode == "add" else kept(mask != 0)
        return mask[:, None, None] if over else mask

    return bias


OPERATIONS = {
    "block_sparse_attention": attention,
    "attention at an offset": lambda draw, skew: attention(draw, skew, at_offset=True),
    "packed attention": packed,
    "MatMul": matmul,
    "Softmax": softmax,
}
