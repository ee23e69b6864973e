"""What every public operation promises PyTorch: derivatives, dtypes, graphs, transforms, tensors without memory, and
sentences where it does not take something. The calls are those of public_operations.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from functorch.compile import make_boxed_func
from fuzz.operators import Recorder
from helpers import NEEDS_COMPILER, captured, deterministic_algorithms, nothing_waits, random, seeded
from public_operations import BATCH, NATIVE, Operation, few_queries, inputs, operations
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jvp, vmap

from ds_sparse import (
    BlockIndex,
    FixedSparsityConfig,
    MatMul,
    Softmax,
    SparseSelfAttention,
    TokenIndex,
    block_sparse_attention,
    gather_attention,
    jagged_attention,
    selected_attention,
    sparse_attn,
    sparse_matmul,
    torch_sparse_attention,
    unwindow_matmul,
    window_attention,
    window_matmul,
    window_softmax,
)
from ds_sparse.index import kernels
from ds_sparse.tools.torch_settings import cpu_threads

OPERATORS = kernels.OPERATORS
EVERY = list(operations("cpu"))
PREPARED = [name for name, operation in operations("cpu").items() if operation.is_prepared]
SHARED = [name for name, operation in operations("cpu").items() if operation.any_batch]


def leaves_of(operation: Operation, device: str = "cpu", dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    return [x.to(dtype or x.dtype).requires_grad_() for x in inputs(device, operation.shapes)]


def gradients(result: torch.Tensor, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(result.sin().sum(), leaves)


def on_a_gpu(device: str) -> None:
    if device == "cpu":
        pytest.skip("a matter of GPUs")


@pytest.mark.parametrize("name", NATIVE)
def test_gradcheck(name: str):
    operation = operations("cpu")[name]
    assert torch.autograd.gradcheck(operation.call, leaves_of(operation), fast_mode=True)


@pytest.mark.parametrize("name", EVERY)
def test_the_gradient_of_one_operand_alone(device: str, name: str):
    """As of all: none is computed that is not asked for, and none depends on another's being asked for."""
    operation = operations(device)[name]
    leaves = leaves_of(operation, device)
    with deterministic_algorithms():
        every = gradients(operation.call(*leaves), leaves)
        for place, expected in enumerate(every):
            alone = [x.detach().requires_grad_(i == place) for i, x in enumerate(leaves)]
            (found,) = gradients(operation.call(*alone), [alone[place]])
            torch.testing.assert_close(found, expected)
        with torch.no_grad():
            assert not operation.call(*leaves).requires_grad


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", EVERY)
def test_activation_checkpointing_gives_the_same_gradients(device: str, name: str, use_reentrant: bool):
    operation = operations(device)[name]
    found = []
    for checkpointed in (False, True):
        leaves = leaves_of(operation, device)
        with deterministic_algorithms():
            if checkpointed:
                result = torch.utils.checkpoint.checkpoint(operation.call, *leaves, use_reentrant=use_reentrant)
            else:
                result = operation.call(*leaves)
            result.square().sum().backward()
        found.append([x.grad for x in leaves])
    if name in NATIVE:
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", [name for name in EVERY if "lse" not in name])
def test_autocast_casts_the_operands(device: str, name: str):
    """But for softmaxes, which keep the dtype, and biases; gradients have the dtypes of what was given."""
    operation = operations(device)[name]
    leaves = leaves_of(operation, device, torch.float32)
    if operation.cast:
        leaves[1] = leaves[1].detach().half().requires_grad_()
    with deterministic_algorithms(), torch.autocast(device, dtype=torch.bfloat16):
        result = operation.call(*leaves)
        wide = operation.call(*leaves_of(operation, device, torch.float64)) if device == "cpu" else None
    cast = [x.bfloat16() if place < operation.cast else x for place, x in enumerate(leaves)]
    with deterministic_algorithms():
        # Autocast keeps PyTorch's own softmax, which others are made up of, in float32.
        tolerance = {"rtol": 0, "atol": 0} if name in NATIVE else {"rtol": 0.016, "atol": 0.02}
        torch.testing.assert_close(result, operation.call(*cast), **tolerance)
    assert result.dtype == (torch.bfloat16 if operation.cast else torch.float32)
    assert wide is None or wide.dtype == torch.float64
    found = torch.autograd.grad(result.float().square().sum(), leaves)
    assert [x.dtype for x in found] == [x.dtype for x in leaves] and all(x.any() for x in found)


@pytest.mark.parametrize("name", SHARED)
def test_no_sequence(device: str, name: str):
    operation = operations(device)[name]
    shapes = [(0, *shape[1:]) if len(shape) == 4 and shape[0] == BATCH else shape for shape in operation.shapes]
    leaves = [torch.zeros(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    result = operation.call(*leaves)
    assert 0 in result.shape and result.dtype == torch.bfloat16
    for found, x in zip(torch.autograd.grad(result.sum(), leaves), leaves, strict=True):
        assert found.shape == x.shape and found.dtype == x.dtype and not found.any()


@pytest.mark.parametrize("name", [name for name in EVERY if name != "attention of packed documents"])
def test_meta_tensors_give_the_shape(name: str):
    operation = operations("cpu", "meta")[name]
    given, expected = inputs("cpu", operation.shapes), operations("cpu")[name].call(*inputs("cpu", operation.shapes))
    found = operation.call(*(x.to("meta", torch.bfloat16) for x in given))
    assert (found.device.type, found.shape, found.dtype) == ("meta", expected.shape, torch.bfloat16)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", PREPARED)
def test_fake_tensors_give_the_shape_and_stay_where_they_are(name: str):
    """As tools that count memory and operations give them: they have no address, and nothing keeps them."""
    operation = operations("cpu", prepared=True)[name]
    given = inputs("cpu", operation.shapes)
    expected = operation.call(*given)
    with FakeTensorMode(allow_non_fake_inputs=True):
        leaves = [torch.empty(shape, requires_grad=True) for shape in operation.shapes]
        result = operation.call(*leaves)
        found = gradients(result, leaves)
    assert isinstance(result, FakeTensor) and result.shape == expected.shape
    assert [x.shape for x in found] == [x.shape for x in leaves]
    assert torch.equal(operation.call(*given), expected)


class Recording(torch.fx.Interpreter):
    """Runs a compiled graph, and keeps the calls of ds_sparse's operators."""

    def __init__(self, graph: torch.fx.GraphModule, calls: list) -> None:
        super().__init__(graph)
        self.calls = calls

    def call_function(self, target, args, kwargs):
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "ds_sparse":
            self.calls.append((target, torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, args)))
        return super().call_function(target, args, kwargs)


FOR_ANY_BATCH = {
    "attention, causal, with rpe", "window_attention, dilated", "sparse_attn, a list a head, with lse",
    "gather_attention",
}  # fmt: skip
ALIKE = {
    "selected_attention", "selected_attention, grouped heads of another size", "selected_attention with lse",
    "attention", "attention, shared rpe", "attention, grouped heads of another size", "attention, with sinks",
    "sparse_attn", "sparse_attn of odd sizes", "sparse_attn, a list a sequence",
    "sparse_attn, a list a sequence and head", "sparse_matmul", "gather_attention, a list a head",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow_on_cpu("its like is compiled always")) if name in ALIKE else name
        for name in PREPARED
    ],
)
def test_compiles_into_one_graph(device: str, name: str):
    """With the results of eager, some for any batch. The operators that only graphs hold, which find their index
    themselves, pass PyTorch's checks of operators."""
    torch._dynamo.reset()
    operation, calls = operations(device, prepared=True)[name], []

    def recorded(graph: torch.fx.GraphModule, _):
        return make_boxed_func(Recording(graph, calls).run)

    def run(*given: torch.Tensor) -> torch.Tensor:
        return operation.call(given[0] * 2, *given[1:]) * 2

    backend = aot_autograd(fw_compiler=recorded, bw_compiler=recorded)
    compiled = torch.compile(run, fullgraph=True, backend=backend, dynamic=name in FOR_ANY_BATCH or None)
    for batch in (BATCH, 3, 5) if name in FOR_ANY_BATCH else (BATCH,):
        shapes = [(batch, *s[1:]) if len(s) == 4 and s[0] == BATCH else s for s in operation.shapes]
        leaves = [x.requires_grad_() for x in inputs(device, shapes)]
        with deterministic_algorithms():
            expected, result = run(*leaves), compiled(*leaves)
            torch.testing.assert_close(result, expected)
            torch.testing.assert_close(gradients(result, leaves), gradients(expected, leaves))
    if name in NATIVE:
        assert len(calls) >= 2
    others = OPERATORS + kernels.INDEX_OPERATORS
    of_graphs = {target: args for target, args in calls if target._opname not in others}
    assert bool(of_graphs) == (name in IN_GRAPHS)
    for target, args in of_graphs.items():
        torch.library.opcheck(target, args)


@pytest.mark.parametrize("name", PREPARED)
def test_compiles_into_one_graph_where_nothing_wants_a_gradient(device: str, name: str):
    torch._dynamo.reset()
    operation = operations(device, prepared=True)[name]
    given = inputs(device, operation.shapes)
    result = torch.compile(lambda *x: operation.call(*x), fullgraph=True, backend="eager")(*given)
    torch.testing.assert_close(result, operation.call(*given))


IN_GRAPHS = {
    "attention of a module", "attention of a module by distance", "attention by distance", "window_attention",
    "window_attention, dilated", "topk_attention", "topk_attention of many heads", "topk_attention of packed documents",
    "topk_attention, a list a sequence, of pairs of keys, with sinks",
}  # fmt: skip
"""Operations whose graphs hold operators made in Python."""


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "name",
    [
        "sdd",
        *(
            pytest.param(name, marks=pytest.mark.slow("compiles C++; a product is compiled so always"))
            for name in PREPARED
            if name != "sdd"
        ),
    ],
)
def test_compiles_with_inductor(device: str, name: str):
    torch._dynamo.reset()
    operation = operations(device, prepared=True)[name]
    leaves = leaves_of(operation, device, torch.float32)

    def run(*given: torch.Tensor) -> torch.Tensor:
        return operation.call(given[0] * 2, *given[1:]) * 2

    expected, result = run(*leaves), torch.compile(run, fullgraph=True)(*leaves)
    # Sums of numbers up to the largest: Inductor's own kernels round them otherwise.
    for x, y in zip((result, *gradients(result, leaves)), (expected, *gradients(expected, leaves)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=2e-6 * y.abs().max().item())


def large(device: str) -> dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]]:
    """Calls of so many rows that several threads take part, with lists that are cut; the shapes of their operands."""
    live = torch.rand(2, 40, 40, generator=seeded()) < 0.05
    live[:, 0] = live[:, :, 0] = True
    q, values = (1, 2, 640, 24), (1, int(live.sum()), 16, 16)
    index = TokenIndex.from_mask(torch.rand(300, 300, generator=seeded()) < 0.3)

    def attention(q, k, v, rpe):
        torch.manual_seed(0)
        return block_sparse_attention(q, k[:, :1], v[:, :1], live, block=16, rpe=rpe, dropout_p=0.1)

    def by_distance(q, k, v, bias):
        return block_sparse_attention(q, k, v, live, block=16, distance_bias=bias)

    def in_windows(q, k, v):
        return unwindow_matmul(window_softmax(window_matmul(q, k.mT, 60), 60), v, 60)

    chosen = torch.randint(-1, 40, (1, 1, 640, 6), generator=seeded()).to(device)

    def in_blocks(q, k, v):
        return selected_attention(q, k[:, :1], v[:, :1], chosen, 16, causal=True)

    return {
        "attention": (attention, [q, q, q, (1, 1, 640, 640)]),
        "attention by distance": (by_distance, [q, q, q, (2, 2 * 640 - 1)]),
        "sdd": (lambda a, b: MatMul(live, 16, "sdd", trans_b=True)(a, b), [q, q]),
        "dsd": (lambda a, b: MatMul(live, 16, "dsd")(a, b), [values, q]),
        "dds": (lambda a, b: MatMul(live, 16, "dds", trans_a=True)(a, b), [q, values]),
        "softmax": (lambda x, m: Softmax(live, 16)(x, attn_mask=m), [values, (1, 1, 1, 640)]),
        "windows": (in_windows, [q] * 3),
        "window_attention": (lambda q, k, v: window_attention(q, k, v, 60, global_tokens=(7, 300)), [q] * 3),
        "selected_attention": (in_blocks, [q] * 3),
        "sparse_attn": (lambda q, k, v: sparse_attn(q, k, v, index), [(1, 3, 300, 72)] * 3),
        "sparse_matmul": (lambda q, k: sparse_matmul(q, k, index), [(1, 3, 300, 72)] * 2),
    }


@cache
def recorded(device: str, dtype: torch.dtype) -> dict[str, list[tuple]]:
    """Arguments of each operator in C++, one call for each choice of what is given."""
    recorder, calls = Recorder(), {name: {} for name in OPERATORS}
    given = [(operations(device)[name].call, operations(device)[name].shapes) for name in NATIVE]
    given += large(device).values() if device == "cuda" else []  # in tiles, where the GPU has kernels for these
    for call, shapes in given:
        leaves = [x.to(dtype).requires_grad_() for x in inputs(device, shapes)]
        with recorder:
            call(*leaves).sum().backward()
    decode = few_queries(device, dtype)
    with recorder:
        decode()
    for func, args in recorder.calls:
        given = tuple(x if isinstance(x, bool | str) else x is None for x in args)
        calls[func._opname].setdefault(given, tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in args))
    return {name: list(of_one.values()) for name, of_one in calls.items()}


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, marks=pytest.mark.slow_on_cpu("sums of bf16 have another dtype: it shows more")),
        torch.bfloat16,
    ],
    ids=str,
)
@pytest.mark.parametrize("operator", OPERATORS)
def test_opcheck(device: str, operator: str, dtype: torch.dtype):
    calls = recorded(device, dtype)[operator]
    assert calls, "no operation calls it"
    for arguments in calls:
        torch.library.opcheck(getattr(torch.ops.ds_sparse, operator).default, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", large("cpu"))
def test_same_bits_every_time_and_with_any_number_of_threads(device: str, name: str, dtype: torch.dtype):
    call, shapes = large(device)[name]

    def run() -> list[torch.Tensor]:
        leaves = [random(seeded(i), *shape, dtype=dtype).to(device).requires_grad_() for i, shape in enumerate(shapes)]
        result = call(*leaves)
        return [result, *torch.autograd.grad(result.square().sum(), leaves)]

    with deterministic_algorithms():
        first = run()
        for number in (1, 2, 3):
            with cpu_threads(number):
                assert all(torch.equal(x, y) for x, y in zip(first, run(), strict=True)), f"{number} threads"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in PREPARED if name in NATIVE])
def test_nothing_waits_for_the_device_and_a_cuda_graph_repeats_it(device: str, name: str, dtype: torch.dtype):
    on_a_gpu(device)
    operation = operations(device, prepared=True)[name]
    leaves = leaves_of(operation, device, dtype)

    def run() -> list[torch.Tensor]:
        with deterministic_algorithms():
            result = operation.call(*leaves)
            return [result.detach(), *torch.autograd.grad(result, leaves, torch.ones_like(result))]

    run()
    with nothing_waits():
        run()
    graph, results = captured(run)
    for seed in (1, 2):
        with torch.no_grad():
            for x in leaves:
                x.copy_(random(seeded(seed), *x.shape))
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(results, run(), strict=True))


@pytest.mark.parametrize("name", NATIVE)
def test_second_derivatives_are_refused(name: str):
    operation = operations("cpu")[name]
    given = leaves_of(operation)
    for loss in (operation.call(*given).sin().sum(), operation.call(*given).sum()):
        # Of a plain sum what comes into backward is constant, while the gradient is not.
        found = torch.autograd.grad(loss, given, create_graph=True)
        sentence = f"{operation.public} has first derivatives only.*without create_graph=True"
        with pytest.raises(RuntimeError, match=sentence):
            sum(x.square().sum() for x in found).backward()


@pytest.mark.parametrize("name", ["attention", "softmax", "sdd", "window_matmul", "sparse_attn"])
def test_second_derivatives_by_transforms_are_refused(name: str):
    operation = operations("cpu")[name]
    given = inputs("cpu", operation.shapes)

    def penalty(*given: torch.Tensor) -> torch.Tensor:
        return grad(lambda *given: operation.call(*given).sum())(*given).square().sum()

    samples = [x[None] for x in given]
    for transformed in (lambda: grad(penalty, 1)(*given), lambda: vmap(grad(penalty, 1))(*samples)):
        with pytest.raises(RuntimeError, match=f"{operation.public} has first derivatives only"):
            transformed()


@pytest.mark.parametrize("name", NATIVE)
def test_forward_mode_is_refused(name: str):
    operation = operations("cpu")[name]
    call, given = operation.call, inputs("cpu", operation.shapes)
    sentence = f"{operation.public} has no derivatives in forward mode.*Use torch.func.vjp or jacrev"
    with pytest.raises(NotImplementedError, match=sentence):
        jvp(call, given, given)
    with pytest.raises(NotImplementedError, match=sentence):
        vmap(lambda *given: jvp(call, given, given))(*(x[None] for x in given))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=sentence):
        call(*given[:-1], forward_ad.make_dual(given[-1], given[-1]))


def test_what_jacfwd_and_hessian_come_upon_is_the_same():
    operation = operations("cpu")["attention"]
    given = inputs("cpu", operation.shapes)
    for transformed in (jacfwd(operation.call), hessian(lambda *given: operation.call(*given).sum())):
        with pytest.raises(NotImplementedError, match="block_sparse_attention has no derivatives in forward mode"):
            transformed(*given)


@pytest.mark.parametrize("step", [jagged_attention, torch_sparse_attention])
def test_steps_of_pytorch_that_cannot_be_derived_twice_or_transformed_say_so(step: Callable):
    index = TokenIndex.from_mask(torch.ones(4, 4, dtype=torch.bool).tril())
    q, k, v = (random(seeded(i), 1, 4, 8).requires_grad_() for i in range(3))
    with pytest.raises(RuntimeError, match=f"{step.__name__} has first derivatives only"):
        torch.autograd.grad(step(q, k, v, index).sum(), q, create_graph=True)
    assert torch.autograd.gradgradcheck(lambda *given: gather_attention(*given, index), (q, k, v))
    sentence = f"{step.__name__} is made of .* which torch.func's transforms .* sparse_attn"
    with pytest.raises(RuntimeError, match=sentence):
        grad(lambda q: step(q, q, q, index).sum())(q)


@pytest.mark.parametrize("name", [name for name in EVERY if "module" not in name])
def test_what_is_no_ordinary_tensor_is_refused_with_a_way_out(name: str):
    operation = operations("cpu")[name]
    given = inputs("cpu", operation.shapes)
    parts = [torch.zeros(3, 8), torch.zeros(5, 8)]
    nested = r"is a nested tensor; give \w+\.to_padded_tensor\(0\.0\) .*\.unbind"
    nested += r"|give \w+, \w+ and \w+ all nested|is given for (packed documents|nested tensors)"  # of what takes those
    nested += r"|is that of 2 packed documents already"
    refused = [
        (r"is a tensor of layout torch\.sparse_csr; give \w+\.to_dense\(\)", torch.eye(8).to_sparse_csr()),
        (nested, torch.nested.nested_tensor(parts, layout=torch.jagged)),
        (nested, torch.nested.nested_tensor(parts)),
    ]
    for sentence, tensor in refused:
        for place in range(len(given)):
            if name == "window_matmul" and place == 1:
                continue  # transposed by the call, which such tensors are not
            with pytest.raises(ValueError, match=sentence):
                operation.call(*given[:place], tensor, *given[place + 1 :])
    with pytest.raises(TypeError, match="is a list; it has to be a tensor"):
        operation.call([1.0], *given[1:])


@pytest.mark.parametrize("name", EVERY)
def test_jit_trace_is_refused_before_it_records_one_length(name: str):
    operation = operations("cpu")[name]
    sentence = "torch.jit.trace cannot record ds_sparse.* Use torch.compile, or torch.export"
    with pytest.raises(RuntimeError, match=sentence):
        torch.jit.trace(operation.call, inputs("cpu", operation.shapes))


def test_jit_trace_of_a_model_is_refused():
    module = SparseSelfAttention(FixedSparsityConfig(2, 8), max_seq_length=64)
    with pytest.raises(RuntimeError, match="torch.jit.trace cannot record ds_sparse"):
        torch.jit.trace(module, tuple(torch.zeros(3, 1, 2, 32, 8)))


@pytest.mark.usefixtures("one_rank")
def test_distributed_tensors_are_asked_for_their_local_part():
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    for operation in operations("cpu").values():
        given = inputs("cpu", operation.shapes)
        with pytest.raises(ValueError, match=r"is a DTensor, .* give \w+\.to_local\(\)"):
            operation.call(distribute_tensor(given[0], mesh), *given[1:])
    layout = distribute_tensor(torch.ones(2, 2, dtype=torch.bool), mesh)
    with pytest.raises(TypeError, match=r"got one that is a DTensor; give layout\.full_tensor\(\)"):
        BlockIndex.build(layout, 16)
