"""What the native libraries serve, the sentence where they do not, and what operators refuse from a direct caller."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ds_sparse.index import BlockIndex, WindowIndex, kernels
from ds_sparse.ops import MatMul, block_sparse_attention, missing_kernels


def test_the_cpu_has_every_kernel():
    on_cpu = kernels.OPERATORS + kernels.INDEX_OPERATORS
    assert missing_kernels("cpu", on_cpu) == []
    for operator in on_cpu:
        kernels.require_kernel(operator, torch.device("cpu"))


def test_a_device_without_kernels_is_named_with_a_way_out():
    assert missing_kernels("xpu") == list(kernels.OPERATORS)
    with pytest.raises(
        RuntimeError, match="Tensors are on xpu:0, and matmul_sdd has no xpu kernel yet; move model and data to the CPU"
    ):
        kernels.require_kernel("matmul_sdd", torch.device("xpu:0"))


@pytest.mark.parametrize("operator", ["softmax_forward", "window_matmul", "token_matmul_sdd", "index_bits"])
def test_without_the_cuda_library_the_sentence_says_how_to_build_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path, operator: str
):
    monkeypatch.setattr(kernels, "CUDA_LIBRARY", tmp_path / "absent.so")
    monkeypatch.setattr(kernels, "missing_kernels", lambda device_type, operators: list(operators))
    with pytest.raises(
        RuntimeError, match="CUDA library is not built; install nvcc and reinstall ds_sparse with DS_SPARSE_CUDA=1"
    ):
        kernels.require_kernel(operator, torch.device("cuda:0"))


def test_a_driver_older_than_the_library_is_told_before_a_kernel_is_started(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "missing_kernels", lambda device_type, operators: [])
    monkeypatch.setattr(kernels, "cuda_versions", lambda: (13000, 12080))
    with pytest.raises(RuntimeError, match=r"is of CUDA 13, and .* serves CUDA 12\.8 at most; update the driver, or"):
        kernels.require_kernel("matmul_sdd", torch.device("cuda:0"))
    monkeypatch.setattr(kernels, "cuda_versions", lambda: (13020, 13000))
    monkeypatch.setattr(kernels, "has_machine_code", lambda device: True)
    kernels.require_kernel("matmul_sdd", torch.device("cuda:0"))


def test_a_library_compiled_for_other_gpus_is_told_before_a_kernel_is_started(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "missing_kernels", lambda device_type, operators: [])
    monkeypatch.setattr(kernels, "cuda_versions", lambda: (13000, 13000))
    monkeypatch.setattr(kernels, "has_machine_code", lambda device: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(RuntimeError, match=r"for other GPUs than cuda:0, .* or with TORCH_CUDA_ARCH_LIST='8\.6' set"):
        kernels.require_kernel("matmul_sdd", torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(RuntimeError, match=r"has compute capability 7\.5, and .* for 8\.0 and later; move model"):
        kernels.require_kernel("matmul_sdd", torch.device("cuda:0"))


def test_every_operator_of_the_schema_is_listed():
    registered = {
        name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("ds_sparse::")
    }
    ways = ("forward", "backward", "bias_backward")
    in_python = {f"layout_attention_{way}" for way in ways} | {"layout_distance_forward", "window_order"}
    in_python |= {"block_attention_distance_backward", "layout_attention_distance_backward"}
    in_python |= {"window_numbers_forward", "window_numbers_backward"}
    in_python |= {"select_blocks", "select_blocks_by_compression"}
    in_python |= {"topk_attention_forward", "topk_attention_backward"}
    native = kernels.OPERATORS + kernels.INDEX_OPERATORS + kernels.HOPPER_OPERATORS + kernels.GPU_OPERATORS
    assert registered == {*native, *in_python}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_cuda_has_every_kernel():
    assert missing_kernels("cuda", kernels.OPERATORS + kernels.INDEX_OPERATORS + kernels.GPU_OPERATORS) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("name", ["sdd", "dsd", "attention"])
def test_a_thread_may_begin_with_it(name: str):
    """As autograd's does where the first gradient is ours: it has no CUDA context before."""
    index = BlockIndex.build(torch.ones(1, 4, 4, dtype=torch.bool, device="cuda"), 64)
    query, key, value = torch.randn(3, 1, 1, 256, 64, device="cuda", dtype=torch.bfloat16)
    sdd, dsd = MatMul(index, 64, "sdd", trans_b=True), MatMul(index, 64, "dsd")
    scores = sdd(query, key)
    calls = {
        "sdd": lambda: sdd(query, key),
        "dsd": lambda: dsd(scores, value),
        "attention": lambda: block_sparse_attention(query, key, value, index),
    }
    expected = calls[name]()
    with ThreadPoolExecutor(1) as thread:
        assert torch.equal(thread.submit(calls[name]).result(), expected)


OFFSETS = ("offsets have to ascend from 0 to the 3 entries", [0, 2, 4], [1, 2, 3], [0, 4, 3])
INDICES = ("ascend within a line, from 0 or more to below 2", [0, 2, 1], [-1, 1, 1], [1, 0, 1])
SLOTS = ("slots have to be 0 or more and below the 3 entries", [0, 3, 1], [0, -1, 1])
LISTS = {
    "matmul_sdd": {"offsets": OFFSETS, "indices": INDICES},
    "matmul_dsd": {"offsets": OFFSETS, "indices": INDICES, "slots": SLOTS},
    "softmax_forward": {"offsets": OFFSETS, "indices": INDICES},
    "softmax_backward": {"offsets": OFFSETS},
    "softmax_bias_backward": {"offsets": OFFSETS, "indices": INDICES},
}


@pytest.mark.parametrize(
    ("operator", "name", "spoiled", "sentence"),
    [
        (operator, name, spoiled, sentence)
        for operator, lists in LISTS.items()
        for name, (sentence, *cases) in lists.items()
        for spoiled in cases
    ],
)
def test_lists_that_lead_outside_are_refused(operator: str, name: str, spoiled: list[int], sentence: str):
    index = BlockIndex.build(torch.tensor([[1, 1], [0, 1]]), 16)
    lists = {"offsets": index.row_offsets, "indices": index.row_columns, "slots": torch.arange(3, dtype=torch.int32)}
    dense, values, bias = torch.zeros(1, 1, 32, 8), torch.zeros(1, 3, 16, 16), torch.zeros(1, 1, 1, 32)

    def call(offsets: torch.Tensor, indices: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        arguments = {
            "matmul_sdd": (dense, dense.mT, offsets, indices, *[None] * 4, 1, 16, False, "cpu"),
            "matmul_dsd": (values, dense, offsets, indices, slots, *[None] * 5, 1, 16, False, False, "cpu"),
            "softmax_forward": (values, bias, None, None, offsets, indices, None, 0, 1, 16, 1.0, False),
            "softmax_backward": (values, values, offsets, indices, None, 0, 1, 16, 1.0),
            "softmax_bias_backward": (values, offsets, indices, 1, 1, 16, [1, 1, 32, 32]),
        }
        return getattr(torch.ops.ds_sparse, operator)(*arguments[operator])

    call(**lists)
    lists[name] = torch.tensor(spoiled, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=sentence):
        call(**lists)


@pytest.mark.parametrize(
    ("name", "spoil", "sentence"),
    [
        ("units", lambda x: None, "have to be given together"),
        ("slots", lambda x: None, "have to be given together"),
        ("lines", lambda x: torch.cat([x, x]), "tile_lines has size (8|16) in dimension 0"),
        ("entries", lambda x: torch.cat([x, x]), "tile_slots has size 2 in dimension 0"),
        ("units", lambda x: x[:, :3].contiguous(), "tile_units has size 3 in dimension 1"),
        ("slots", lambda x: x.long(), "tile_slots has to be int32"),
        ("slots", lambda x: x[:, :3].contiguous(), "tile_slots has size 3 in dimension 1"),
        ("slots", lambda x: torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view_as(x), "a multiple of 16 bytes"),
    ],
)
@pytest.mark.parametrize(("operator", "tile"), [("matmul_sdd", 64), ("matmul_dsd", 128)])
def test_tiles_that_do_not_fit_are_refused(
    operator: str, tile: int, name: str, spoil: Callable[[torch.Tensor], torch.Tensor | None], sentence: str
):
    index = BlockIndex.build(torch.tensor([[1, 1], [0, 1]]), 16)
    dense, values = torch.zeros(1, 1, 32, 8), torch.zeros(1, 3, 16, 16)
    lists = (index.row_offsets, index.row_columns)
    shapes = {"lines": (tile // 16,), "entries": (2,), "units": (1, 4), "cuts": (0, 3), "slots": (2, tile // 16)}
    tiles = {given: torch.zeros(shape, dtype=torch.int32) for given, shape in shapes.items()}

    def call(lines, entries, units, cuts, slots) -> torch.Tensor:
        if operator == "matmul_sdd":
            arguments = (dense, dense.mT, *lists, lines, entries, units, slots, 1, 16, False, "cpu")
        else:
            arguments = (values, dense, *lists, None, lines, entries, units, cuts, slots, 1, 16, False, False, "cpu")
        return getattr(torch.ops.ds_sparse, operator)(*arguments)

    call(**tiles)
    with pytest.raises(RuntimeError, match=sentence):
        call(**{**tiles, name: spoil(tiles[name])})


@pytest.mark.parametrize(
    ("sentence", "offsets", "list_batch", "list_heads"),
    [
        ("offsets has to have one entry a line of each list, and one", [], 1, 1),
        ("have to be 1 or more", [0], 1, 0),
        ("a size below 0, or beyond 2[*][*]60", [0], 2**32, 2**32),
        ("a size below 0, or beyond 2[*][*]60", [0], 2**62, 4),
        ("have to be 1 or more", [0], -1, -1),
    ],
)
def test_numbers_of_lists_are_checked_before_they_are_multiplied(sentence, offsets, list_batch, list_heads):
    dense, lists = torch.randn(1, 1, 4, 8), torch.tensor(offsets, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=sentence):
        torch.ops.ds_sparse.token_matmul_dsd(torch.randn(1, 0), dense, lists, lists[:0], None, list_batch, list_heads)


def test_a_bias_narrower_than_the_layout_is_refused():
    index = BlockIndex.build(torch.tensor([[1, 1], [0, 1]]), 16)
    lists = (index.row_offsets, index.row_columns, None, 0, 1, 16, 1.0, False)
    for bias in ((torch.zeros(1, 1, 32, 16), None, None), (None, torch.zeros(1, 16), torch.zeros(1, 1, 1, 32))):
        with pytest.raises(RuntimeError, match="to below 1"):
            torch.ops.ds_sparse.softmax_forward(torch.zeros(1, 3, 16, 16), *bias, *lists)


ATTENTION = ("block_attention_forward", "block_attention_backward", "block_attention_bias_backward")


def attention_arguments(operator: str) -> dict[str, object]:
    """What an operator of attention takes, by name: two block rows and columns of 16, four heads on two of keys."""
    index = BlockIndex.build(torch.tensor([[1, 1], [0, 1]]), 16)
    names = ("lines", "entries", "units", "cuts")
    arguments = {
        "query": torch.zeros(1, 4, 32, 8),
        "key": torch.zeros(1, 2, 30, 8),
        "value": torch.zeros(1, 2, 30, 8),
        **dict.fromkeys(("rpe", "key_bias", "attn_mask", "dropout_seed")),
        **{f"row_{name}": getattr(index.row_tiles, name) for name in names},
        "layout_heads": 1,
        "block": 16,
        "tile": 64,
        "scale": 1.0,
        "causal": False,
        "dropout_p": 0.0,
    }
    if operator != "block_attention_forward":
        arguments |= {"grad_output": torch.zeros(1, 4, 32, 8), "output": torch.zeros(1, 4, 32, 8)}
        arguments |= {"grad_lse": None, "rows": torch.zeros(1, 4, 32, 2)}
    if operator == "block_attention_backward":
        arguments |= {f"column_{name}": getattr(index.column_tiles, name) for name in names}
        arguments |= {"deterministic": False}
    if operator == "block_attention_bias_backward":
        arguments |= {"shape": [1, 4, 32, 30]}
    else:
        arguments |= {"implementation": "cpu"}
    return arguments


def call_attention(operator: str, **changed: object) -> None:
    getattr(torch.ops.ds_sparse, operator)(**(attention_arguments(operator) | changed))


@pytest.mark.parametrize("operator", ATTENTION)
def test_attention_takes_what_the_tests_below_spoil(operator: str):
    seed = torch.tensor([1, 2])
    call_attention(operator)
    call_attention(operator, dropout_p=0.5, dropout_seed=seed, key_bias=torch.zeros(1, 30))
    call_attention(operator, rpe=torch.zeros(1, 1, 32, 30), attn_mask=torch.ones(1, 4, 1, 30, dtype=torch.bool))


ONE, BOTH = 1 << 24, 3 << 24
TILES = {
    "lines": (
        "lines have to name each of the 2 block rows or columns of a head once",
        [[0, 0, -1, -1], [0, 2, -1, -1], [0, -2, 1, -1]],
    ),
    "lines without a line of the entries": ("entries have to belong to lines that there are", [[0, -1, -1, -1]]),
    "entries": (
        "entries have to be blocks below 2, once in a tile, with the bits of its lines",
        [[BOTH, ONE | 2], [BOTH, ONE], [BOTH, ONE << 4 | 1], [BOTH | 2**23, ONE]],
    ),
    "entries of no line": ("entries have to belong to lines that there are", [[BOTH, ONE << 2 | 1]]),
    "units": (
        "units have to be ranges of the 2 entries, of tiles below 1",
        [[[1, 0, 2, -1]], [[-1, 0, 2, -1]], [[0, 0, 3, -1]], [[0, -1, 2, -1]], [[0, 1, -1, -1]]],
    ),
    "units with a gap": (
        "the units of a tile have to cut one range of entries",
        [[[0, 0, 1, 0], [0, 0, 1, 1], [0, 0, 2, 2]], [[0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 2, 2], [0, 1, 1, 3]]],
    ),
}


@pytest.mark.parametrize(
    ("operator", "name", "spoiled", "sentence"),
    [
        (operator, f"{side}_{name.split()[0]}", spoiled, sentence)
        for operator in ATTENTION
        for side in ("column" if operator == "block_attention_backward" else "row",)
        for name, (sentence, cases) in TILES.items()
        for spoiled in cases
    ],
)
def test_tiles_that_lead_outside_are_refused(operator: str, name: str, spoiled: list, sentence: str):
    with pytest.raises(RuntimeError, match=sentence):
        call_attention(operator, **{name: torch.tensor(spoiled, dtype=torch.int32)})


OPERANDS = [
    ("query has 3 dimensions", {"query": torch.zeros(4, 32, 8)}),
    ("key has to have the dtype", {"key": torch.zeros(1, 2, 30, 8, dtype=torch.float16)}),
    ("key has size 16 in dimension 3; it has to be 8", {"key": torch.zeros(1, 2, 30, 16)}),
    ("key has size 2 in dimension 0; it has to be 1", {"key": torch.zeros(2, 2, 30, 8)}),
    ("value has size 29 in dimension 2; it has to be 30", {"value": torch.zeros(1, 2, 29, 8)}),
    ("value has size 1 in dimension 1; it has to be 2", {"value": torch.zeros(1, 1, 30, 8)}),
    ("have to be a multiple of key's 3", dict.fromkeys(("key", "value"), torch.zeros(1, 3, 30, 8))),
    ("value has to have the numbers of a token adjacent", {"value": torch.zeros(1, 2, 8, 30).mT}),
    ("a multiple of 8, got 4", dict.fromkeys(("query", "key", "value"), torch.zeros(1, 2, 30, 4))),
    ("rpe has size 16 in dimension 3, where the scores have 30", {"rpe": torch.zeros(1, 4, 32, 16)}),
    ("rpe has size 1 in dimension 2, where the scores have 32", {"rpe": torch.zeros(1, 4, 1, 30)}),
    ("rpe has a dtype", {"rpe": torch.zeros(1, 4, 32, 30, dtype=torch.bool)}),
    ("attn_mask has size 2 in dimension 1, where the scores have 4", {"attn_mask": torch.zeros(1, 2, 32, 30)}),
    ("attn_mask has a dtype", {"attn_mask": torch.zeros(1, 4, 32, 30, dtype=torch.float16)}),
    ("key_bias has 4 dimensions", {"key_bias": torch.zeros(1, 1, 1, 30)}),
    ("key_bias has a dtype", {"key_bias": torch.ones(1, 30, dtype=torch.bool)}),
    ("key_bias has size 32 in dimension 1", {"key_bias": torch.zeros(1, 32)}),
    ("key_bias has to have its keys adjacent", {"key_bias": torch.zeros(1, 60)[:, ::2]}),
    ("needs a dropout_seed", {"dropout_p": 0.1}),
    ("dropout_p has to be 0 or more and below 1", {"dropout_p": 1.0}),
    ("dropout_seed has size 1", {"dropout_seed": torch.zeros(1, dtype=torch.int64)}),
    ("dropout_seed has to be int64", {"dropout_seed": torch.zeros(2, dtype=torch.int32)}),
    ("layout_heads is 3 for 4 heads; it has to be a divisor", {"layout_heads": 3}),
    ("block has to be a power of two", {"block": 12}),
    ("tile has to be a power of two, at least 8 and at most 8 blocks, got 256", {"tile": 256}),
    ("lines has size 4 in dimension 0; it has to be 8", {"tile": 128}),
    ("lines has size 3", {"row_lines": torch.zeros(3, dtype=torch.int32)}),
    ("entries has to be int32", {"row_entries": torch.zeros(2, dtype=torch.int64)}),
    ("units has size 3 in dimension 1", {"row_units": torch.zeros(1, 3, dtype=torch.int32)}),
    ("cuts has 1 dimensions", {"row_cuts": torch.zeros(0, dtype=torch.int32)}),
]
GRADIENTS = [
    ("grad_output has size 31 in dimension 2", {"grad_output": torch.zeros(1, 4, 31, 8)}),
    ("output has to have the dtype", {"output": torch.zeros(1, 4, 32, 8, dtype=torch.float64)}),
    ("rows has 3 dimensions", {"rows": torch.zeros(1, 4, 32)}),
    ("rows has size 2 in dimension 1", {"rows": torch.zeros(1, 2, 32, 2)}),
    ("rows has size 1 in dimension 3; it has to be 2", {"rows": torch.zeros(1, 4, 32, 1)}),
    ("rows has to be fp32, or fp64 for fp64", {"rows": torch.zeros(1, 4, 32, 2, dtype=torch.float16)}),
    ("rows has to be contiguous", {"rows": torch.zeros(1, 4, 2, 32).mT}),
    ("grad_lse has 2 dimensions", {"grad_lse": torch.zeros(4, 32)}),
    ("grad_lse has size 31 in dimension 2", {"grad_lse": torch.zeros(1, 4, 31)}),
    ("grad_lse has to be fp32, or fp64 for fp64", {"grad_lse": torch.zeros(1, 4, 32, dtype=torch.float64)}),
]
SHAPES = [("shape has to be", {"shape": shape}) for shape in ([1, 2, 32, 30], [1, 1, 1, 30], [1, 1, 32, 32], [32, 30])]


@pytest.mark.parametrize(
    ("operator", "sentence", "changed"),
    [("block_attention_forward", *case) for case in OPERANDS]
    + [(operator, *case) for operator in ATTENTION[1:] for case in [*OPERANDS, *GRADIENTS]]
    + [("block_attention_bias_backward", *case) for case in SHAPES],
)
def test_attention_refuses_operands_that_do_not_fit(operator: str, sentence: str, changed: dict[str, object]):
    with pytest.raises(RuntimeError, match=sentence):
        call_attention(operator, **changed)


def test_attention_in_a_dtype_without_arithmetic_is_refused():
    arguments = attention_arguments("block_attention_forward")
    integers = {name: arguments[name].long() for name in ("query", "key", "value")}
    with pytest.raises(RuntimeError, match="fp32, fp64, fp16 or bf16"):
        call_attention("block_attention_forward", **integers)


def window_arguments(operator: str) -> dict[str, object]:
    """What an operator of windows takes, by name: three heads, 20 tokens, a window of 2."""
    index = WindowIndex.build(20, 2)
    names = ("lines", "entries", "units", "cuts")
    x, band = torch.zeros(2, 3, 20, 8), torch.zeros(2, 3, 20, 5)
    attention = {
        **dict.fromkeys(("query", "key", "value"), x),
        **dict.fromkeys(("key_bias", "places")),
        "limits": index.limits,
        **{f"row_{name}": getattr(index.blocks.row_tiles, name) for name in names},
        "layout_heads": 1,
        "block": index.blocks.block,
        "tile": 64,
        "num_global": 0,
        "scale": 1.0,
        "causal": False,
        "implementation": "cpu",
    }
    columns = {f"column_{name}": getattr(index.blocks.column_tiles, name) for name in names}
    forward = {"grad_output": x, "output": x, "rows": torch.zeros(2, 3, 20, 2)}
    return {
        "window_matmul": {"a": x, "b": x, "window": 2, "implementation": "cpu"},
        "unwindow_matmul": {"band": band, "dense": x, "transposed": False},
        "window_softmax_forward": {"band": band, "key_bias": None, "windows": [2], "scale": 1.0, "causal": False},
        "window_softmax_backward": {"grad": band, "probs": band, "scale": 1.0},
        "window_attention_forward": attention,
        "window_attention_backward": attention | columns | forward | {"deterministic": False},
    }[operator]


WINDOW_ATTENTION = [
    ("key has size 19 in dimension 2; it has to be 20", dict.fromkeys(("key", "value"), torch.zeros(2, 3, 19, 8))),
    ("limits has to be of one head, or of all", {"limits": torch.zeros(2, 20, 2, dtype=torch.int32)}),
    ("limits has size 19 in dimension 1", {"limits": torch.zeros(1, 19, 2, dtype=torch.int32)}),
    ("limits has size 3 in dimension 2", {"limits": torch.zeros(1, 20, 3, dtype=torch.int32)}),
    ("limits has to be int32", {"limits": torch.zeros(1, 20, 2)}),
    ("limits has to be contiguous", {"limits": torch.zeros(1, 2, 20, dtype=torch.int32).mT}),
    ("places has 1 dimensions", {"places": torch.zeros(20, dtype=torch.int32)}),
    ("places has to be int32", {"places": torch.zeros(1, 20, dtype=torch.int64)}),
    ("key_bias has 2 dimensions", {"key_bias": torch.zeros(2, 20)}),
    ("key_bias has size 20 in dimension 2", {"key_bias": torch.zeros(2, 3, 20, 20)}),
    ("key_bias has a dtype", {"key_bias": torch.zeros(2, 1, 1, 20, dtype=torch.bool)}),
    ("num_global has to be between 0 and the tokens", {"num_global": 21}),
    ("num_global has to be between 0 and the tokens", {"num_global": -1}),
    ("lines has size 3", {"row_lines": torch.zeros(3, dtype=torch.int32)}),
]
WINDOWS = {
    "window_matmul": [
        ("b has size 19 in dimension 2", {"b": torch.zeros(2, 3, 19, 8)}),
        ("b has size 9 in dimension 3", {"b": torch.zeros(2, 3, 20, 9)}),
        ("b has size 1 in dimension 0", {"b": torch.zeros(1, 3, 20, 8)}),
        ("b has to have the dtype", {"b": torch.zeros(2, 3, 20, 8, dtype=torch.float16)}),
        ("a has 3 dimensions", {"a": torch.zeros(3, 20, 8)}),
        ("window has to be 0 or more", {"window": -1}),
        ("fp32, fp64, fp16 or bf16", dict.fromkeys(("a", "b"), torch.zeros(2, 3, 20, 8, dtype=torch.int32))),
    ],
    "unwindow_matmul": [
        (r"2 \* window \+ 1 numbers in the last dimension, got 4", {"band": torch.zeros(2, 3, 20, 4)}),
        ("band has size 19 in dimension 2", {"band": torch.zeros(2, 3, 19, 5)}),
        ("band has to have the dtype", {"band": torch.zeros(2, 3, 20, 5, dtype=torch.float64)}),
    ],
    "window_softmax_forward": [
        ("numbers in the last dimension, got 4", {"band": torch.zeros(2, 3, 20, 4)}),
        ("band has to be contiguous", {"band": torch.zeros(2, 3, 5, 20).mT}),
        ("windows has to have one number, or one a head", {"windows": [2, 2]}),
        ("windows has to have one number, or one a head", {"windows": []}),
        ("at most the band's 2", {"windows": [3]}),
        ("at most the band's 2", {"windows": [2, -1, 2]}),
        ("key_bias has size 19 in dimension 1", {"key_bias": torch.zeros(2, 19)}),
        ("key_bias has a dtype", {"key_bias": torch.zeros(2, 20, dtype=torch.float64)}),
        ("key_bias has to have its keys adjacent", {"key_bias": torch.zeros(2, 40)[:, ::2]}),
    ],
    "window_softmax_backward": [
        ("probs has size 3 in dimension 3", {"probs": torch.zeros(2, 3, 20, 3)}),
        ("grad has to be contiguous", {"grad": torch.zeros(2, 3, 5, 20).mT}),
    ],
    "window_attention_forward": [
        *WINDOW_ATTENTION,
        (
            "key_bias has to be fp32, fp64 for fp64, or on CUDA bool",
            dict.fromkeys(("query", "key", "value"), torch.zeros(2, 3, 20, 8).half())
            | {"key_bias": torch.zeros(2, 1, 1, 20).half()},
        ),
    ],
    "window_attention_backward": [
        *WINDOW_ATTENTION,
        ("rows has size 3 in dimension 3", {"rows": torch.zeros(2, 3, 20, 3)}),
        ("grad_output has size 19", {"grad_output": torch.zeros(2, 3, 19, 8)}),
        ("lines has size 3", {"column_lines": torch.zeros(3, dtype=torch.int32)}),
    ],
}


@pytest.mark.parametrize(
    ("operator", "sentence", "changed"),
    [(operator, *case) for operator, cases in WINDOWS.items() for case in cases],
)
def test_windows_refuse_operands_that_do_not_fit(operator: str, sentence: str, changed: dict[str, object]):
    call, arguments = getattr(torch.ops.ds_sparse, operator), window_arguments(operator)
    call(**arguments)
    with pytest.raises(RuntimeError, match=sentence):
        call(**(arguments | changed))


@pytest.mark.parametrize("limits", [[-100, 100], [2**31 - 1, -(2**31)], [5, 5]])
def test_limits_that_lead_outside_are_ranges_of_the_tokens_that_there_are(limits: list[int]):
    arguments = window_arguments("window_attention_forward")
    changed = {"limits": torch.tensor(limits, dtype=torch.int32).expand(1, 20, 2).contiguous()}
    output, *_ = torch.ops.ds_sparse.window_attention_forward(
        **(arguments | changed | {"value": torch.ones(2, 3, 20, 8)})
    )
    torch.testing.assert_close(output, torch.full_like(output, limits == [-100, 100]))
