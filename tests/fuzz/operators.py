"""Direct calls of raw operators with spoiled arguments: each ends in an exception or a result, never in a dead process.

Calls that public operations make, forward and backward, are recorded; then one to three of their arguments are
spoiled: numbers at the edges of int64, lists that lead outside, empty, repeated, misaligned and transposed tensors,
other dtypes.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from public_operations import NATIVE, few_queries, inputs, operations
from torch.utils._python_dispatch import TorchDispatchMode

from ds_sparse._ops import ops
from ds_sparse.index import BlockIndex
from ds_sparse.index.kernels import INDEX_OPERATORS, OPERATORS

Call = tuple[Any, tuple[Any, ...]]

INTEGERS = (0, 1, -1, 2, 3, 7, 8, 16, 2**20, 2**31 - 1, 2**31, 2**32, 2**61, 2**62, 2**63 - 1, -(2**31), -(2**63))
ENTRIES = (0, 1, -1, 2, 3, 255, 2**24 - 1, 2**24, 2**31 - 1, -(2**31))
FLOATS = (0.0, -1.0, 0.5, 1.0, 1e300, float("inf"), float("-inf"), float("nan"))
WORDS = ("cpu", "portable", "hopper", "", "no such implementation")
DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
)
LARGEST_RESULT = 2**22
"""Numbers that an argument is let grow to, so that a case is quick."""

ADDRESSES = 2**36
"""Bytes that the process may ask for. What a machine lets it ask for it may not have, and then the kernel kills it."""


class Recorder(TorchDispatchMode):
    """Keeps the calls of ds_sparse's operators in C++, of which those in Python are made."""

    def __init__(self, operators: tuple[str, ...] = OPERATORS) -> None:
        super().__init__()
        self.operators, self.calls = operators, list[Call]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "ds_sparse" and func._opname in self.operators:
            self.calls.append((func, tuple(args)))
        return func(*args, **(kwargs or {}))


def recorded() -> list[Call]:
    """Calls of every operator on the CPU, with small operands."""
    recorder = Recorder(OPERATORS + INDEX_OPERATORS)
    with recorder:
        BlockIndex.build(torch.eye(40, dtype=torch.bool).expand(2, 40, 40), 16).causal()
        ops.index_bits_of_blocks(torch.arange(24).view(2, 4, 3), 40)
    for name in NATIVE:
        operation = operations("cpu")[name]
        for dtype in (torch.float64, torch.float32):
            leaves = [x.to(dtype).requires_grad_() for x in inputs("cpu", operation.shapes)]
            with recorder:
                operation.call(*leaves).sum().backward()
    for dtype in (torch.float64, torch.float32):
        decode = few_queries("cpu", dtype)
        with recorder:
            decode()
    return [(func, args) for func, args in recorder.calls if "layout_attention" not in func.name()]


def spoiled_tensor(x: torch.Tensor, rng: random.Random) -> torch.Tensor | None:
    dim = rng.randrange(x.dim()) if x.dim() else 0
    kind = rng.choice(
        ["entries"] * 4 * (x.dtype == torch.int32)
        + [
            "empty",
            "narrow",
            "longer",
            "repeat",
            "dtype",
            "transpose",
            "unsqueeze",
            "squeeze",
            "offset",
            "none",
            "huge",
        ]
    )
    if kind == "none":
        return None
    if kind == "dtype":
        return x.to(rng.choice(DTYPES))
    if kind == "unsqueeze":
        return x.unsqueeze(0)
    if x.dim() == 0 or x.numel() == 0:
        return x
    if kind == "entries":
        x = x.clone().contiguous()
        flat = x.view(-1)
        for _ in range(rng.randint(1, 3)):
            flat[rng.randrange(len(flat))] = rng.choice(ENTRIES)
        return flat.sort().values.view_as(x) if rng.random() < 0.3 else x
    if kind == "empty":
        return x.narrow(dim, 0, 0)
    if kind == "narrow":
        return x.narrow(dim, 0, rng.randint(1, x.size(dim)))
    if kind == "longer":
        return torch.cat([x, x.narrow(dim, 0, 1)], dim)
    if kind == "repeat":
        return x.narrow(dim, 0, 1).expand([x.size(d) if d != dim else rng.randint(1, 40) for d in range(x.dim())])
    if kind == "huge":  # without memory: a number repeated, or none
        shape = [*x.shape]
        shape[dim] = rng.choice((2**20, 2**33, 2**45))
        return x.narrow(dim, 0, 1).expand(shape) if rng.random() < 0.5 else x.new_empty([0, *shape[1:]])
    if kind == "transpose":
        return x.transpose(dim, rng.randrange(x.dim()))
    if kind == "squeeze":
        return x.select(dim, 0)
    wider = torch.empty(x.numel() + 1, dtype=x.dtype)  # "offset": where a vector load would be misaligned
    wider[1:] = x.reshape(-1)
    return wider[1:].view(x.shape)


def spoiled(value: Any, rng: random.Random) -> Any:
    if isinstance(value, torch.Tensor):
        return spoiled_tensor(value, rng)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((*INTEGERS, value + 1, value - 1, 2 * value))
    if isinstance(value, float):
        return rng.choice(FLOATS)
    if isinstance(value, str):
        return rng.choice(WORDS)
    if isinstance(value, list):
        return [spoiled(x, rng) for x in value] if rng.random() < 0.5 else value[: rng.randint(0, len(value))]
    return torch.zeros(rng.randint(0, 4), dtype=rng.choice(DTYPES))  # in the place of None


def case(calls: list[Call], seed: str) -> Call:
    """The call of one case, by its seed."""
    rng = random.Random(seed)
    func, args = rng.choice(calls)
    changed = list(args)
    for place in rng.sample(range(len(args)), k=min(len(args), rng.randint(1, 3))):
        changed[place] = spoiled(changed[place], rng)
    return func, tuple(changed)


def is_small(args: tuple[Any, ...]) -> bool:
    """A size that only asks for memory or time is no finding, where the call would be right. AddressSanitizer ends the
    process where memory is refused, so it gets none of the sizes that no memory has."""
    numbers = [math.prod(x.shape) for x in args if isinstance(x, torch.Tensor)]
    return all(count <= LARGEST_RESULT or (count >= 2**33 and "ASAN_OPTIONS" not in os.environ) for count in numbers)


def run(seed: int, cases: float, seconds: float, first: int) -> None:
    """Prints the number of each case before it runs: the last line names the one that ended the process."""
    torch.set_num_threads(1)
    if "ASAN_OPTIONS" not in os.environ:  # which asks for all addresses there are
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
    calls, end, number, refused = recorded(), time.monotonic() + seconds, first, 0
    while number < first + cases and time.monotonic() < end:
        print(f"case {seed}/{number}", flush=True)
        func, args = case(calls, f"{seed}/{number}")
        number += 1
        if not is_small(args):
            continue
        try:
            func(*args)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, MemoryError):
            refused += 1
    count = len({func for func, _ in calls})
    print(f"{number - first} calls of {count} operators, {refused} of them refused", flush=True)


def describe(seed: str) -> str:
    """One case in words, to be read by whoever mends it."""

    def word(x: Any) -> str:
        if not isinstance(x, torch.Tensor):
            return repr(x)
        values = f" {x.flatten().tolist()}" if x.dtype == torch.int32 and x.numel() <= 24 else ""
        return f"{x.dtype}{tuple(x.shape)} strides {x.stride()}{values}"

    func, args = case(recorded(), seed)
    names = [argument.name for argument in func._schema.arguments]
    return "\n".join([str(func), *(f"  {name} = {word(x)}" for name, x in zip(names, args))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("show", nargs="?", metavar="SEED/NUMBER", help="show this case in place of running any")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="the case to begin with")
    parser.add_argument("--cases", type=float, default=math.inf)
    parser.add_argument("--seconds", type=float, default=math.inf)
    args = parser.parse_args()
    if args.show:
        print(describe(args.show))
    elif math.isinf(min(args.cases, args.seconds)):
        parser.error("give --cases N or --seconds S, after which it ends")
    else:
        run(args.seed, args.cases, args.seconds, args.first)


if __name__ == "__main__":
    main()
