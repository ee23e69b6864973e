"""Which implementation runs what: the choice, the reasons, the one that is forced."""

from __future__ import annotations

import pickle

import pytest
import torch
from helpers import as_on_hopper, implementation_on, is_hopper, seeded
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

import ds_sparse
from ds_sparse import BlockIndex, TokenIndex, WindowIndex
from ds_sparse.dispatch import IMPLEMENTATIONS, Call, choice, choose, forced_implementation, implementations, reasons
from ds_sparse.dispatch.strides import readable_in_boxes

GPU = torch.device("cuda:0")
HALF = torch.float16


def call(**changed) -> Call:
    """What Hopper's own implementations take, of every operation."""
    x = torch.zeros(4, 40, 256, 64, dtype=HALF)
    return Call(GPU, HALF, 64, operands=(x, x), value_dim=64, window=64, lists=Lists(True))._replace(**changed)


class Lists:
    def __init__(self, filled: bool):
        self.tiles = "tiles" if filled else None


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch):
    """Sets the first number of the compute capability of a GPU that this machine may not have."""

    def of(major: int) -> None:
        choice._known_shortlist.cache_clear()
        monkeypatch.setattr(implementations, "chip_of", lambda device: major if device.type == "cuda" else 0)
        monkeypatch.setattr(implementations, "multiprocessors", lambda device: 132)

    of(9)
    yield of
    choice._known_shortlist.cache_clear()


@pytest.mark.parametrize("operation", IMPLEMENTATIONS)
def test_each_kind_of_device_is_served_and_the_best_comes_first(operation: str, chip):
    assert choose(operation, call(device=torch.device("cpu"))).name == "cpu"
    names = [i.name for i in IMPLEMENTATIONS[operation]]
    assert choose(operation, call()).name == names[0]
    for major in (8, 10, 12):
        chip(major)
        assert choose(operation, call()).name == "portable"


TRANSPOSED = torch.zeros(4, 40, 64, 256, dtype=HALF).mT
EXPANDED = torch.zeros(4, 1, 256, 64, dtype=HALF).expand(-1, 40, -1, -1)
NOT_ALIGNED = torch.zeros(4 * 40 * 256 * 64 + 8, dtype=HALF)[4:-4].view(4, 40, 256, 64)
LIMITS = [
    ("block_sparse_attention", {"dtype": torch.float32}, "Tensors are float32, and it takes float16 and bfloat16."),
    ("block_sparse_attention", {"head_dim": 136}, "Head size is 136, and it takes 1 to 128."),
    ("block_sparse_attention", {"block": 8}, "block is 8, and it takes 16, 32, 64 and 128."),
    ("sparse_attn", {"value_dim": 32}, "The head sizes of keys and values are 64 and 32; it takes equal ones."),
    ("sparse_attn", {"operands": (torch.zeros(0, 1, 5, 64),)}, "An operand has no numbers."),
    ("sparse_attn", {"lists": Lists(False)}, "The lists do not fill tiles"),
    ("sdd", {"block": 256}, "block is 256, and it takes 16, 32, 64 and 128."),
    ("sdd", {"operands": (TRANSPOSED, TRANSPOSED)}, "an operand's strides are (655360, 16384, 1, 256)"),
    ("dsd", {"head_dim": 20}, "Head size is 20, and it takes 1 to 128, a multiple of 8."),
    ("dsd", {"operands": (EXPANDED,)}, "are not expanded, and an operand's strides are (16384, 0, 64, 1)."),
    ("dsd", {"operands": (NOT_ALIGNED,)}, "begin at multiples of 16 bytes"),
    ("window_matmul", {"window": 65}, "The window is 65, and it takes multiples of 32 from 64"),
    ("window_matmul", {"window": 32}, "The window is 32"),
    (
        "window_matmul",
        {"operands": (torch.zeros(1, 1, 2048, 64),)},
        "There are 16 tiles of 128 tokens, and it is for 132 and more, one for each multiprocessor.",
    ),
]


@pytest.mark.parametrize(("operation", "changed", "sentence"), LIMITS)
def test_what_hopper_does_not_take_runs_by_the_portable_one_and_the_reason_is_said(
    operation: str, changed: dict, sentence: str, chip
):
    changed = call(**changed)
    assert choose(operation, changed).name == "portable"
    why = reasons(operation, changed)
    assert len(why["hopper"]) == 1 and sentence in why["hopper"][0]
    assert why["portable"] == [] and why["cpu"] == ["Tensors are on cuda:0, and it is for the CPU."]


def test_reasons_name_the_chip_and_what_comes_first(chip):
    assert reasons("sdd", call())["portable"] == ["hopper comes before it."]
    chip(8)
    assert reasons("sdd", call())["hopper"] == ["cuda:0 has compute capability 8, and it is for 9 (Hopper)."]


def test_what_none_takes_is_a_sentence_with_each_reason(chip):
    sentence = r"No implementation takes this call of block_sparse_attention\. hopper: Tensors "
    with pytest.raises(ValueError, match=sentence):
        choose("block_sparse_attention", call(dtype=torch.float64))


def test_a_forced_implementation_is_taken_or_says_why_not(chip):
    with ds_sparse.force_implementation("portable"):
        assert choose("sdd", call()).name == "portable"
        assert reasons("sdd", call())["hopper"] == ["force_implementation names 'portable'."]
        sentence = r"'cpu', which force_implementation names, does not take .*dsd\. cpu: Tensors are on cuda:0"
        with ds_sparse.force_implementation("cpu"), pytest.raises(ValueError, match=sentence):
            choose("dsd", call())
        assert choose("dsd", call()).name == "portable"
    assert choose("sdd", call()).name == "hopper"
    # Forward's name is backward's, wherever that is called, and also where forward had none.
    assert choose("sdd", call(), forced="portable").name == "portable"
    with ds_sparse.force_implementation("portable"):
        assert forced_implementation() == "portable"
        assert choose("sdd", call(), forced="").name == "hopper"
    assert forced_implementation() == ""
    with ds_sparse.force_implementation("hopper"):
        assert choose("gradient of rpe", call()).name == "portable", "the only one that a GPU has"
        # What would only be slower is not asked.
        assert choose("dsd", call(operands=(EXPANDED,))).name == "hopper"
        assert reasons("dsd", call(operands=(EXPANDED,)))["hopper"] == []
        assert choose("window_matmul", call(operands=(torch.zeros(1, 1, 256, 64),))).name == "hopper"


def test_a_name_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="no implementation 'hoper'; there are hopper, portable and cpu"):
        ds_sparse.force_implementation("hoper").__enter__()


def test_an_index_has_the_tiles_that_implementations_on_its_device_walk():
    layout = torch.rand(1, 9, 9, generator=seeded()) < 0.5
    for block, heights in ((8, {64}), (16, {64, 128}), (64, {64, 128}), (128, {64, 128}), (256, {64})):
        with as_on_hopper():
            made = BlockIndex.build(layout, block)._made
        assert {tile for _, tile in made} == heights
        assert {tile for _, tile in BlockIndex.build(layout, block)._made} == {64}


@pytest.mark.parametrize(("dynamic", "graphs"), [(None, 3), (True, 2)], ids=str)
def test_the_choice_is_traced_with_a_graph_more_where_it_changes(dynamic: bool | None, graphs: int):
    """Of windows, where there are too few tokens to fill the GPU."""
    counter = CompileCounter()

    def run(x: torch.Tensor) -> torch.Tensor:
        given = Call(x.device, x.dtype, x.shape[-1], operands=(x, x), window=64, lists=Lists(True), value_dim=64)
        names = [choose(operation, given).name for operation in IMPLEMENTATIONS]
        return x + names.count("hopper")

    compiled = torch.compile(run, fullgraph=True, backend=counter, dynamic=dynamic)
    with as_on_hopper():
        for tokens in (4096, 5120, 8192, 16384, 1024, 2048):
            x = torch.zeros(2, 4, tokens, 64, dtype=HALF)
            with_hopper = sum(any(i.name == "hopper" for i in those) for those in IMPLEMENTATIONS.values())
            expected = with_hopper - (tokens < 4096)
            assert compiled(x).max() == run(x).max() == expected
    assert counter.frame_count == graphs


def test_exported_programs_take_any_size():
    class Band(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return ds_sparse.window_matmul(a, b.mT, 3)

    sizes = {0: torch.export.Dim("batch"), 2: torch.export.Dim("tokens"), 3: torch.export.Dim("head_dim")}
    a, b = (torch.randn(2, 2, 20, 8, generator=seeded()) for _ in range(2))
    program = torch.export.export(Band(), (a, b), dynamic_shapes=(sizes, sizes)).module()
    for shape in ((3, 2, 30, 16), (2, 2, 7, 300)):
        a, b = (torch.randn(shape, generator=seeded()) for _ in range(2))
        assert torch.equal(program(a, b), Band()(a, b))


def test_samples_of_vmap_are_counted_together():
    """Of window_matmul, whose choice depends on how much there is to do."""
    chosen = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if operator is torch.ops.ds_sparse.window_matmul.default:
                chosen.append(args[-1])
                args = (*args[:-1], "cpu")
            return operator(*args, **(kwargs or {}))

    x, b = torch.randn(40, 1, 1, 1024, 8).half(), torch.randn(1, 1, 1024, 8).half()
    with as_on_hopper(), Record():
        torch.vmap(lambda x: ds_sparse.window_matmul(x, b.mT, 64))(x)
        ds_sparse.window_matmul(x[0], b.mT, 64)
    assert chosen == ["hopper", "portable"]


@pytest.fixture
def hopper(device: str) -> None:
    if not is_hopper(device):
        pytest.skip("not a Hopper GPU")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_hopper_gpu_has_its_own_for_each_operation(device: str):
    x = torch.zeros(4, 40, 2048, 64, dtype=HALF, device=device)
    for operation in IMPLEMENTATIONS:
        found = choose(operation, call(device=x.device, operands=(x, x)))
        assert found.name == ("portable" if operation.startswith("gradient of") else "hopper")


@pytest.mark.parametrize("wrong", ["hopper", "portable", "no such", ""])
def test_an_operator_refuses_what_its_device_does_not_have(wrong: str):
    x = torch.zeros(1, 1, 64, 8)
    torch.ops.ds_sparse.window_matmul(x, x, 2, "cpu")
    with pytest.raises(RuntimeError, match=f'implementation is "{wrong}"; on this device it has to be "cpu"'):
        torch.ops.ds_sparse.window_matmul(x, x, 2, wrong)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_an_operator_refuses_what_hopper_does_not_take(device: str):
    x = torch.zeros(1, 1, 128, 8, device=device)
    index = BlockIndex.build(torch.ones(8, 8), 16).to(device).with_lists()
    products = (index.row_offsets, index.row_columns, *(None,) * 4, 1, 16, False, "hopper")
    for tensor in (x, x.half()):
        with pytest.raises(RuntimeError, match="needs tile_"):
            torch.ops.ds_sparse.matmul_sdd(tensor, tensor.mT, *products)
        with pytest.raises(RuntimeError, match="fp16 and bf16, up to 128 numbers a token and windows of 64"):
            torch.ops.ds_sparse.window_matmul(tensor, tensor, 2, "hopper")
    tiles = index.row_tiles
    lists = (tiles.lines, tiles.entries, tiles.units, tiles.cuts, 1, 16, 64, 1.0, False, 0.0, "hopper")
    with pytest.raises(RuntimeError, match="tile has to be 128"):
        torch.ops.ds_sparse.block_attention_forward(*(x.half(),) * 3, *(None,) * 4, *lists)


def test_an_index_that_is_loaded_on_a_hopper_gpu_has_what_is_walked_there():
    layout = torch.rand(1, 9, 9, generator=seeded()) < 0.5
    saved = pickle.dumps(BlockIndex.build(layout, 16).with_lists())
    with as_on_hopper():
        loaded, built = pickle.loads(saved), BlockIndex.build(layout, 16).with_lists()
        assert loaded._made.keys() == built._made.keys()
        assert loaded.lists.slots.keys() == built.lists.slots.keys()
    assert not pickle.loads(saved).lists.slots


FULL = torch.ones(4, 4, dtype=torch.bool)


def operands(device: str, dtype: torch.dtype = torch.float32, **sizes) -> list[torch.Tensor]:
    shape = tuple(({"batch": 1, "heads": 2, "tokens": 64, "head_dim": 16} | sizes).values())
    return [torch.randn(shape, generator=seeded()).to(device, dtype).requires_grad_() for _ in range(3)]


def test_explain_prints_what_runs_and_why_nothing_else_does(device: str, capsys: pytest.CaptureFixture):
    name = implementation_on(device)
    query, key, value = operands(device)
    index = BlockIndex.build(FULL, 16).to(query.device)
    found = ds_sparse.explain(query, key, value, FULL)
    assert (found.operation, found.implementation, found.reasons[name]) == ("block_sparse_attention", name, [])
    printed = capsys.readouterr().out
    assert printed == found.text + "\n"
    assert f"block_sparse_attention of query (1, 2, 64, 16), torch.float32, on {query.device}" in printed
    assert f"  {name:<9} runs: " in printed
    assert "4 x 4 blocks of 16, any heads, density 100.0%" in printed and repr(index) in printed
    assert not found.notes


def test_explain_says_what_is_copied(device: str):
    query, key, value = operands(device)
    found = ds_sparse.explain(query, key.mT.contiguous().mT, value, FULL, block=16)
    (note,) = found.notes
    assert note.startswith("key is copied at each call") and note.endswith("its strides (2048, 1024, 1, 64).")
    assert note in found.text
    short = [x[..., :12] for x in (query, key, value)]
    assert [note.split()[0] for note in ds_sparse.explain(*short, FULL).notes] == ["query", "key", "value"]


def test_explain_says_what_the_gradient_of_rpe_takes(device: str):
    rpe = torch.zeros(1, 2, 64, 64, device=device, requires_grad=True)
    (note,) = ds_sparse.explain(*operands(device), FULL, rpe=rpe).notes
    name = implementation_on(device)
    assert note == f"The gradient of rpe is a kernel of its own, by the implementation {name}."


def test_explain_says_how_the_gradient_of_a_bias_by_distance_is_made(device: str):
    bias = torch.zeros(2, 127, device=device)
    given = *operands(device), FULL
    assert not [note for note in ds_sparse.explain(*given, distance_bias=bias).notes if "distance" in note]
    *_, note = ds_sparse.explain(*given, distance_bias=bias.requires_grad_()).notes
    assert note.startswith("The gradient of distance_bias is not a kernel")
    assert note.endswith(f"by the products (sdd) of the implementation {implementation_on(device)}.")
    with pytest.raises(ValueError, match="has 1 distances, up to 0"):
        ds_sparse.explain(*given, distance_bias=bias[:, :1])


def test_explain_refuses_what_the_operation_refuses(device: str):
    query, key, value = operands(device)
    rpe = torch.zeros(1, 2, 64, 64, device=device)
    window = WindowIndex.build(32, 5, device=device)
    pairs = TokenIndex.from_mask(torch.ones(32, 64, dtype=torch.bool)).to(query.device)
    for layout, options, sentence in (
        (torch.ones(3, 4, 4, dtype=torch.bool), {}, "query has 2 heads and the layout 3"),
        (window, {}, "The WindowIndex is for 32 tokens"),
        (window, {"rpe": rpe}, "attention on a WindowIndex takes none"),
        (window, {"causal": True}, "causal is given, and attention on a WindowIndex takes none"),
        (pairs, {"block": 16}, "block is given, and attention on a TokenIndex takes none"),
        (pairs, {}, "The lists are for 32 query and 64 key tokens"),
    ):
        with pytest.raises(ValueError, match=sentence):
            ds_sparse.explain(query, key, value, layout, **options)
    with pytest.raises(TypeError, match="query is a list; it has to be a tensor"):
        ds_sparse.explain([1.0], key, value, window)


def test_explain_takes_the_blocks_that_tokens_have_chosen(device: str):
    query, key, value = (torch.randn(2, heads, 64, 16, device=device) for heads in (8, 2, 2))
    chosen = torch.zeros(2, 2, 64, 3, dtype=torch.int64, device=device)
    found = ds_sparse.explain(query, key, value, block_indices=chosen, block=16)
    assert (found.operation, found.implementation) == ("selected_attention", implementation_on(device))
    assert "3 of 4 blocks of 16 keys, 4 heads together" in found.text
    assert ds_sparse.explain(query, key, value, block_indices=chosen, block=24).implementation is None
    refused = {
        "Give a layout, or the block_indices": {},
        "takes a block beside block_indices": {"block_indices": chosen},
        "it has to be an int32 or int64 tensor": {"block_indices": chosen.float(), "block": 16},
        "block is 0; it has to be an integer": {"block_indices": chosen, "block": 0},
    }
    for sentence, options in refused.items():
        with pytest.raises((TypeError, ValueError), match=sentence):
            ds_sparse.explain(query, key, value, **options)


def test_explain_takes_the_indices_of_windows_and_of_tokens(device: str):
    given = operands(device, head_dim=20)
    window = WindowIndex.build(64, 5, device=device)
    assert ds_sparse.explain(*given, window).implementation == implementation_on(device)
    found = ds_sparse.explain(*given, TokenIndex.from_mask(torch.ones(64, 64, dtype=torch.bool, device=device)))
    assert (found.operation, found.implementation) == ("sparse_attn", implementation_on(device))
    assert not found.notes, "each query gathers from operands as they are"


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_the_forced_implementation_computes_outputs_and_gradients(device: str, where: str):
    """Backward belongs to its forward, on autograd's thread too, and also where it is called after the block."""
    rng = seeded()
    index = BlockIndex.build(torch.rand(1, 8, 8, generator=rng) < 0.5, 64).to("cuda")
    inputs = operands(device, torch.bfloat16, tokens=512, head_dim=64)

    def names(profile: torch.profiler.profile) -> str:
        return " ".join(event.name for event in profile.events())

    def run(name: str) -> tuple[list[torch.Tensor], str]:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            with ds_sparse.force_implementation(name):
                output = ds_sparse.block_sparse_attention(*inputs, index)
                scores = ds_sparse.MatMul(index, 64, "sdd", trans_b=True)(*inputs[:2])
                loss = output.float().square().sum() + scores.float().square().sum()
                grads = torch.autograd.grad(loss, inputs) if where == "inside" else None
            if where == "outside":
                grads = torch.autograd.grad(loss, inputs)
        return [output, scores, *grads], names(profile)

    (by_hopper, of_hopper), (portable, of_portable) = run("hopper"), run("portable")
    for found, expected in zip(portable, by_hopper, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03 * expected.abs().max().item())
    of_its_own = ("forward_on_hopper", "columns_on_hopper", "sdd_on_hopper", "dsd_of_large_blocks")
    assert all(kernel in of_hopper for kernel in of_its_own)
    assert not any(kernel in of_portable for kernel in of_its_own)


def test_operands_that_the_copy_engine_reads():
    assert readable_in_boxes(torch.zeros(2, 3, 5, 16)) and readable_in_boxes(torch.zeros(2, 5, 3, 16).transpose(1, 2))
    assert readable_in_boxes(torch.zeros(1, 3, 5, 16).expand(1, 3, 5, 16))
    for x in (TRANSPOSED, EXPANDED, NOT_ALIGNED, torch.zeros(2, 3, 5, 20)):
        assert not readable_in_boxes(x)
