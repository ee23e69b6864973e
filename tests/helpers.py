"""Inputs, oracles and tolerances shared by the tests of layouts, indices and operations."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ds_sparse.bench.machine import captured  # noqa: F401  # operations' tests take it from here
from ds_sparse.dispatch import choice
from ds_sparse.layout import as_bool_layout
from ds_sparse.tools.torch_settings import deterministic_algorithms, poisoned_memory  # noqa: F401  # operations' tests take them from here

# The same examples in every run, and no clock: a slow machine is not a failure.
EXAMPLES = settings(deadline=None, derandomize=True, database=None)

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
VIEWS = ("contiguous", "transposed", "sliced", "offset", "expanded")
OPERAND_VIEWS = (*VIEWS, "tokens_first", "packed")
"""Strides of operands (B, H, T, D)."""

NEEDS_COMPILER = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile needs a C++ compiler"
)


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Has what waits for the GPU raise."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def without_launcher() -> dict[str, str]:
    """The environment of a program that no launcher started, whatever other tests of this process began."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")
    return {name: value for name, value in os.environ.items() if name not in launcher}


def counted_waits():
    """Counts the waits of streams for events; they do wait."""
    wait_event = torch.cuda.Stream.wait_event
    return mock.patch.object(torch.cuda.Stream, "wait_event", autospec=True, side_effect=wait_event)


class CountedOperators(TorchDispatchMode):
    """Counts the operators that are called.

    Attributes:
        number: of all.
        of: of each name, such as 'aten::mul'.
        casts: of tensors of a shape to another dtype.
    """

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.of: Counter[str] = Counter()
        self.casts: Counter[torch.Size] = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.number += 1
        self.of[operator._schema.name] += 1
        result = operator(*args, **(kwargs or {}))
        if operator._schema.name == "aten::_to_copy" and result.dtype != args[0].dtype:
            self.casts[result.shape] += 1
        return result


def is_hopper(device: torch.device | str) -> bool:
    device = torch.device(device)
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def implementation_on(device: torch.device | str) -> str:
    """The name of what runs on a device where no chip's own implementation does."""
    return "portable" if torch.device(device).type == "cuda" else "cpu"


@contextmanager
def as_on_hopper() -> Iterator[None]:
    """What depends on the device is chosen as on a Hopper GPU, wherever it is: indices have its tiles."""
    hopper = {"kind_of": lambda device: "cuda", "chip_of": lambda device: 9, "multiprocessors": lambda device: 132}
    choice._known_shortlist.cache_clear()
    try:
        with mock.patch.multiple("ds_sparse.dispatch.implementations", **hopper):
            yield
    finally:
        choice._known_shortlist.cache_clear()


@dataclass(frozen=True)
class Layout:
    """A layout as a caller gives it, and what it stands for."""

    given: torch.Tensor
    live: torch.Tensor  # bool (H or 1, R, C)

    @property
    def heads(self) -> int:
        return self.live.shape[0]

    @property
    def rows(self) -> int:
        return self.live.shape[1]

    @property
    def columns(self) -> int:
        return self.live.shape[2]

    def num_values(self, heads: int) -> int:
        return int(self.live.expand(heads, -1, -1).sum())


def make_layout(live: torch.Tensor, dtype: torch.dtype = torch.bool) -> Layout:
    return Layout(live.to(dtype), as_bool_layout(live))


@st.composite
def layouts(draw: st.DrawFn, max_side: int = 4) -> Layout:
    """2-D and 3-D, every dtype, heads alike and different, with empty rows, columns and heads, all-empty ones too."""
    heads = draw(st.integers(1, 3))
    rows, columns = draw(st.integers(1, max_side)), draw(st.integers(1, max_side))
    live = torch.rand(heads, rows, columns, generator=generator(draw)) < draw(
        st.sampled_from((0.5, 0.2, 0.8, 1.0, 0.0))
    )
    if draw(st.booleans()):
        live[draw(st.integers(0, heads - 1))] = False
    if draw(st.booleans()):
        live[:, draw(st.integers(0, rows - 1))] = False
    if draw(st.booleans()):
        live = live[:1].repeat(heads, 1, 1)
    if draw(st.booleans()):
        live = live[0]
    return make_layout(live, draw(st.sampled_from((torch.bool, torch.int64, torch.int32, torch.uint8))))


@dataclass(frozen=True)
class Pairs:
    """Lists of token pairs, int64 (M, 2) each, in (batch, head) order; any order, perhaps some twice."""

    lists: tuple[torch.Tensor, ...]
    batch: int
    heads: int
    queries: int
    keys: int

    @property
    def counts(self) -> torch.Tensor:
        """(batch, heads, T, S), how often each pair is listed."""
        counts = torch.zeros(len(self.lists), self.queries, self.keys, dtype=torch.int64)
        for count, pairs in zip(counts, self.lists, strict=True):
            count.index_put_(pairs.cpu().unbind(1), torch.tensor(1), accumulate=True)
        return counts.view(self.batch, self.heads, self.queries, self.keys)

    def number(self, b: int, h: int) -> int:
        """Which list a sequence and a head have."""
        return (b % self.batch) * self.heads + h % self.heads

    def nested(self, lists: list) -> object:
        """Something of each list as callers give and get it: alone, a list of heads, or a list of such."""
        if len(lists) == 1:
            return lists[0]
        return [lists[b * self.heads :][: self.heads] for b in range(self.batch)] if self.batch > 1 else lists

    def stacked(self, lists: list[torch.Tensor], padding: int) -> torch.Tensor:
        """The same in one padded tensor, with the dimensions that are needed."""
        if len(lists) == 1:
            return lists[0]
        longest = max(map(len, lists)) + 2
        padded = [torch.cat((x, x.new_full((longest - len(x), *x.shape[1:]), padding))) for x in lists]
        return torch.stack(padded).view(*((self.batch,) if self.batch > 1 else ()), self.heads, *padded[0].shape)

    def csr(self, pointer: bool = False) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Values and offsets of each list: its pairs by rows, and otherwise in their order."""
        rows = [pairs[torch.argsort(pairs[:, 0], stable=True)] for pairs in self.lists]
        ends = [torch.bincount(pairs[:, 0], minlength=self.queries).cumsum(0) for pairs in rows]
        if pointer:
            ends = [torch.cat((end.new_zeros(1), end)) for end in ends]
        return [pairs[:, 1] for pairs in rows], ends


def random_pairs(
    rng: torch.Generator, queries: int, keys: int, batch: int = 1, heads: int = 1, density: float = 0.4, repeated=False
) -> Pairs:
    """Unsorted, with rows and columns without a pair."""
    lists = []
    for _ in range(batch * heads):
        live = torch.rand(queries, keys, generator=rng) < density
        live[torch.randint(queries, (1 + queries // 8,), generator=rng)] = False
        live[:, torch.randint(keys, (1 + keys // 8,), generator=rng)] = queries == 1 or keys == 1
        pairs = live.nonzero()
        if repeated and len(pairs):
            pairs = torch.cat((pairs, pairs[torch.randint(len(pairs), (1 + len(pairs) // 4,), generator=rng)]))
        lists.append(pairs[torch.randperm(len(pairs), generator=rng)])
    return Pairs(tuple(lists), batch, heads, queries, keys)


def generator(draw: st.DrawFn) -> torch.Generator:
    return torch.Generator().manual_seed(draw(st.integers(0, 2**20)))


def random(rng: torch.Generator, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)


@st.composite
def layouts_of_lines(draw: st.DrawFn, most_rows: int, most_columns: int) -> torch.Tensor:
    """Bool (heads, rows, columns): lines alike and different, long and empty lists, empty heads, heads alike."""
    heads, rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, most_rows)), draw(st.integers(1, most_columns))
    rng, chance = generator(draw), draw(st.sampled_from((0.0, 0.02, 0.05, 0.2, 0.3, 0.9, 1.0)))
    kinds = torch.rand(heads, draw(st.integers(1, rows)), columns, generator=rng) < chance
    live = kinds[:, torch.randint(kinds.shape[1], (rows,), generator=rng)]
    for _ in range(draw(st.integers(0, 3))):
        live[:, draw(st.integers(0, rows - 1))] = draw(st.booleans())
    if draw(st.booleans()):
        live[draw(st.integers(0, heads - 1))] = False
    if draw(st.booleans()):
        live = live[:1].repeat(heads, 1, 1)
    return live.mT.contiguous() if draw(st.booleans()) else live


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def needs_gpu_memory(device: str, gib: int) -> None:
    """Skips a test that is about large tensors where there is no room for them."""
    if device == "cpu":
        pytest.skip("too slow on a CPU")
    if torch.cuda.mem_get_info()[0] < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


def as_view(x: torch.Tensor, view: str) -> torch.Tensor:
    """The values of `x` behind other strides, NaN between them; 'expanded' repeats the first number of the first
    dimension that has several."""
    if view == "tokens_first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if view == "packed":
        # As a projection of query, key and value together gives them, here with room behind each head's numbers.
        batch, heads, tokens, width = x.shape
        storage = x.new_full((batch, tokens, 3, heads, width + 8), float("nan"))
        storage[:, :, 1, :, :width] = x.transpose(1, 2)
        return storage[:, :, 1, :, :width].transpose(1, 2)
    if view == "transposed" and x.dim() > 1:
        return x.mT.contiguous().mT
    if view == "sliced":
        storage = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 3), float("nan"))
        storage[..., 1 : 1 + 2 * x.shape[-1] : 2] = x
        return storage[..., 1 : 1 + 2 * x.shape[-1] : 2]
    if view == "offset":
        storage = x.new_full((x.numel() + 1,), float("nan"))
        storage[1:] = x.flatten()
        return storage[1:].view(x.shape)
    several = [dim for dim, size in enumerate(x.shape) if size > 1]
    if view == "expanded" and several and x.numel():
        return x.narrow(several[0], 0, 1).expand_as(x)
    return x.contiguous()


def on_device(x: torch.Tensor, device: str) -> torch.Tensor:
    """`x` there, strides and what lies between kept."""
    if device == "cpu":
        return x.detach()
    if not x.numel():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    if 0 in x.stride():  # overlapping strides cannot be copied into
        once = x.detach()[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]
        return once.to(device).expand_as(x)
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
    whole = x.detach().as_strided((x.storage_offset() + size,), (1,), 0).to(device)
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def leaf(x: torch.Tensor, device: str, requires_grad: bool = True) -> torch.Tensor:
    """`x` on the device, strides kept, as a leaf of its own."""
    return on_device(x, device).requires_grad_(requires_grad)


def gradients(output: torch.Tensor, inputs: list[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of those inputs that want one; zeros where an empty layout cuts the graph."""
    wanted = [x for x in inputs if x.requires_grad]
    found = (
        torch.autograd.grad(output, wanted, grad, allow_unused=True) if output.requires_grad else [None] * len(wanted)
    )
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]


def assert_as_accurate(
    name: str,
    ours: torch.Tensor,
    plain: torch.Tensor,
    exact: torch.Tensor,
    largest_term: float = 0.0,
    allowance: float = 0.0,
) -> None:
    """`ours` is as near to the float64 result as plain PyTorch at the same precision is.

    Twice its largest error is allowed, and a rounding of the largest value, since PyTorch may happen to be exact; four
    in float32, which is also what sums are kept in, one after the other where PyTorch adds pairwise. In float64, where
    PyTorch's result is the exact one, 1e-12 of the largest value. `largest_term` stands for the largest value where
    the result is a sum whose terms cancel; `allowance` is an error that comes on top.
    """
    ours = ours.detach().cpu()
    assert ours.shape == exact.shape and ours.dtype == plain.dtype, f"{name}: {ours.shape} {ours.dtype}"
    if ours.numel() == 0:
        return
    assert torch.isfinite(ours).all(), f"{name} is not finite"
    size = max(exact.abs().max().item(), largest_term, torch.finfo(ours.dtype).tiny)
    allowed = 2 * (plain.double() - exact).abs().max().item() + rounding(ours.dtype) * size + allowance
    error = (ours.double() - exact).abs().max().item()
    assert error <= allowed, f"{name}: error {error:.3g} is above {allowed:.3g}, largest value {size:.3g}"


def rounding(dtype: torch.dtype) -> float:
    """The error, relative to the largest value, that `assert_as_accurate` allows where PyTorch is exact."""
    return {torch.float64: 1e-12, torch.float32: 4 * 2**-23}.get(dtype, torch.finfo(dtype).eps)


def cells(text: str) -> list[list[str]]:
    """The rows of the tables of a text, after it was seen that each is as wide as its heading."""
    tables = re.findall(r"(?:^\|.*\|\n)+", f"{text}\n", re.MULTILINE)
    rows = []
    for table in tables:
        heading, line, *body = [[cell.strip() for cell in row[1:-1].split("|")] for row in table.splitlines()]
        assert line == ["---"] * len(heading)
        assert body and all(len(row) == len(heading) for row in body)
        rows += body
    return rows
