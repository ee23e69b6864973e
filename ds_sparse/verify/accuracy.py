"""What has to hold before anything is timed: outputs and gradients as near to float64 as plain PyTorch's are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

ERROR_ALLOWED = 4.0
"""Our RMS error may be this many times that of plain PyTorch at the same precision: sums run in another order."""

ROWS_AT_ONCE = 1024
"""Whose scores against a whole document are there at a time."""


def random_tensors(count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """The same numbers at every call on a device."""
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype, device=device) for _ in range(count)]


def output_and_gradients(call: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = call(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def require_as_accurate(
    what: str,
    ours: Tensor,
    plain: Tensor,
    exact: Tensor,
    parts: int = 1,
    terms: Tensor | None = None,
    least: float = 0.0,
) -> None:
    """Compares RMS errors, each of `parts` equal parts along the first dimension by itself: a mistake in one block is
    not lost among the others.

    Besides, half a rounding of the exact values is allowed, since plain PyTorch may be exact, and of fp32 numbers as
    large as `terms`, the sums of the absolute terms, since what is summed up one after the other may cancel. `least` is
    the relative error that is allowed at any rate.

    Raises:
        ArithmeticError: an error more than `ERROR_ALLOWED` times that of plain PyTorch at ours' dtype.
    """

    def rms(x: Tensor) -> Tensor:
        return x.double().reshape(parts, -1).square().mean(1).sqrt()

    error = rms(ours - exact)
    allowed = ERROR_ALLOWED * rms(plain - exact) + torch.finfo(ours.dtype).eps / 2 * rms(exact)
    allowed = allowed.maximum(least * rms(exact))
    if terms is not None:
        allowed += torch.finfo(torch.float32).eps / 2 * rms(terms)
    if not bool((error <= allowed).all()):
        worst = int((error - allowed).nan_to_num(float("inf")).argmax())
        where = f", part {worst + 1} of {parts}," if parts > 1 else ""
        raise ArithmeticError(
            f"{what}{where} has an RMS error of {error[worst]:.2e}; plain PyTorch allows {allowed[worst]:.2e}."
        )


def require_same_meaning(
    what: str,
    ours: Mapping[str, Callable[..., Tensor]],
    theirs: Mapping[str, Callable[..., Tensor]],
    inputs: Mapping[str, Sequence[Tensor]],
    device: torch.device,
) -> None:
    """Holds outputs and gradients of operations, by name, to those of their meaning, which is computed on `device` in
    float64 and at the precision of the inputs.

    Raises:
        ArithmeticError: an error larger than `require_as_accurate` allows.
    """
    for name, arguments in inputs.items():
        with torch.no_grad():
            grad = torch.randn_like(ours[name](*arguments))
        there = [x.to(device) for x in arguments]
        mine = output_and_gradients(ours[name], arguments, grad)
        exact = output_and_gradients(theirs[name], [x.double() for x in there], grad.to(device).double())
        plain = output_and_gradients(theirs[name], there, grad.to(device))
        for i, results in enumerate(zip(mine, plain, exact, strict=True)):
            part = f"gradient {i}" if i else "output"
            found, rounded, wanted = (x.to(device) for x in results)
            require_as_accurate(f"{what}: {part} of {name}", found, rounded, wanted)


def attention_by_block_rows(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, layout: Tensor, block: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Output of one head's attention on live blocks, and the gradients of query, key and value; (T, D) each.

    Every block row against its gathered keys, so that memory and time are those of the live blocks. It computes at the
    inputs' precision; what is added up from row to row, in fp32 or wider. layout: bool (R, C) on the CPU.

    Returns:
        Those four, and for each the sums of the absolute values of its terms.
    """
    sums, terms = zeros_for(query, key, value)
    for row, live in enumerate(layout):
        tokens = (live.nonzero() * block + torch.arange(block)).flatten().to(key.device)
        if len(tokens):
            mine = slice(row * block, (row + 1) * block)
            add_attention(sums, terms, query, key, value, grad, mine, tokens)
    return sums, terms


def attention_of_documents(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, lengths: Sequence[int], mask: Callable[[int], Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The same of one head's attention within documents that follow one another, `ROWS_AT_ONCE` rows at a time.

    mask: from a document's length to bool (length, length), what each token of it sees; every token sees one at least.
    """
    sums, terms = zeros_for(query, key, value)
    first = 0
    for length in lengths:
        live, document = mask(length), slice(first, first + length)
        for begin in range(0, length, ROWS_AT_ONCE):
            end = min(begin + ROWS_AT_ONCE, length)
            mine = slice(first + begin, first + end)
            add_attention(sums, terms, query, key, value, grad, mine, document, live[begin:end])
        first += length
    return sums, terms


def zeros_for(query: Tensor, key: Tensor, value: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """For the output and the gradients of query, key and value: sums in fp32 or wider, and sizes of their terms."""
    wide = torch.promote_types(query.dtype, torch.float32)
    sums = [torch.zeros_like(x, dtype=wide) for x in (query, query, key, value)]
    return sums, [torch.zeros_like(x) for x in sums]


def add_attention(
    sums: Sequence[Tensor],
    terms: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    mine: slice,
    tokens: slice | Tensor,
    live: Tensor | None = None,
) -> None:
    """Adds what the rows `mine` make of the keys `tokens`, of which they see those where `live`, or all."""
    scale = query.shape[1] ** -0.5
    keys, values = key[tokens], value[tokens]
    scores = query[mine] @ keys.mT * scale
    probs = (scores if live is None else scores.masked_fill(~live, float("-inf"))).softmax(-1)
    grad_probs = grad[mine] @ values.mT
    grad_scores = probs * (grad_probs - (grad_probs * probs).sum(-1, keepdim=True)) * scale
    products = (
        (mine, probs, values),
        (mine, grad_scores, keys),
        (tokens, grad_scores.mT, query[mine]),
        (tokens, probs.mT, grad[mine]),
    )
    for total, size, (place, a, b) in zip(sums, terms, products, strict=True):
        total[place] += a @ b
        size[place] += a.abs() @ b.abs()
