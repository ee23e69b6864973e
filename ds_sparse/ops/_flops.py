"""What `torch.utils.flop_counter.FlopCounterMode` counts of operators: products, two operations a multiplication.

Attention counts whole blocks, as kernels walk them, whatever masks, causality and short last blocks leave of a block:
4 D operations a live score forward, 10 D backward, D the head size rounded up to a multiple of 8. The gradient of `rpe`
or `distance_bias` is computed apart, of scores and probabilities that are computed again: 4 D more. Lists of tokens
count their pairs, bands what belongs to a token that there is. Softmax counts nothing, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from .._ops import ops
from ..index.lookup import index_of_window
from ..index.master_layout import MasterLayout
from ..index.packing import MAX_LINES, owner_bit
from ..index.window_sizes import WindowNumbers

FORWARD, BACKWARD, BIAS_BACKWARD = 4, 10, 4
"""Operations of attention for each live score and number of a head."""


def attention_flops(query: Tensor, live_blocks: int, layout_heads: int, block: int, each: int) -> int:
    """Operations of attention of query (B, H, T, D), which are `each` for a live score and number of a head.

    Args:
        live_blocks: those of all the layout heads together, as `BlockIndex.live_blocks` has them.
    """
    batch, heads, _, head_dim = query.shape
    return each * head_dim * batch * heads * live_blocks * block**2 // layout_heads


def live_blocks(entries: Tensor) -> int:
    """The live blocks of tiles, one for each owner bit of their entries; waits for the device.

    Raises:
        RuntimeError: the entries have no values.
    """
    if isinstance(entries, FakeTensor) or entries.is_meta:
        raise RuntimeError(
            "FlopCounterMode has to know the live blocks of attention, and the layout's index has no values here; "
            "build it outside of FakeTensorMode, and give meta tensors an index on the CPU."
        )
    return sum(int(owner_bit(entries, line).sum()) for line in range(MAX_LINES))


def register_formulas() -> None:
    """Tells PyTorch's counter the formulas of all operators that have products."""
    for operator, formula in _FORMULAS.items():
        register_flop_formula(getattr(ops, operator), get_raw=True)(_of_names(operator, formula))


def _of_names(operator: str, formula: Callable[[dict], int]) -> Callable[..., int]:
    """The formula of an operator's arguments by name as one of its arguments."""
    names = [argument.name for argument in getattr(ops, operator).default._schema.arguments]
    return lambda *args, out_val=None, **by_name: formula(dict(zip(names, args)) | by_name)


def _of_attention(each: int) -> Callable[[dict], int]:
    def formula(given: dict) -> int:
        live = live_blocks(given["row_entries"])
        return attention_flops(given["query"], live, given["layout_heads"], given["block"], each)

    return formula


def _of_structured_attention(each: int) -> Callable[[dict], int]:
    """The same of the operators that compiled and exported graphs hold, which find their index when they run."""

    def formula(given: dict) -> int:
        layout = MasterLayout.read(given["layout"])
        index = layout.index(given["query"].shape[2], layout.device, given["causal"])
        return attention_flops(given["query"], index.live_blocks, index.layout_heads, index.block, each)

    return formula


def _of_window(each: int) -> Callable[[dict], int]:
    def formula(given: dict) -> int:
        query = given["query"]
        numbers = WindowNumbers.of(*(given[name] for name in WindowNumbers._fields))
        index = index_of_window(query.shape[2], numbers, query.device).blocks
        return attention_flops(query, index.live_blocks, index.layout_heads, index.block, each)

    return formula


def _of_distances(given: dict) -> int:
    live = given["row_columns"].shape[0]
    return attention_flops(given["query"], live, given["layout_heads"], given["block"], BIAS_BACKWARD)


def _of_pairs(in_scores: int, in_values: int) -> Callable[[dict], int]:
    """Attention over lists of pairs, of products with the head size of scores, and that of values."""

    def formula(given: dict) -> int:
        query, lists = given["query"], given["list_batch"] * given["list_heads"]
        pairs = given["columns"].shape[0] * query.shape[0] * query.shape[1] // lists
        return 2 * pairs * (in_scores * query.shape[3] + in_values * given["value"].shape[3])

    return formula


def _of_pairs_in_tiles(each: int) -> Callable[[dict], int]:
    def formula(given: dict) -> int:
        query, bits = given["query"], given["row_pairs"]
        lists = given["layout_heads"] * bits.shape[0]
        pairs = sum(int((bits >> bit & 1).sum()) for bit in range(32))
        return each * query.shape[3] * pairs * query.shape[0] * query.shape[1] // lists

    return formula


def _sdd(given: dict) -> int:
    a = given["a"]
    values = given["columns"].shape[0] * a.shape[1] // given["layout_heads"] * given["block"] ** 2
    return 2 * a.shape[0] * values * a.shape[3]


def _dsd(given: dict) -> int:
    return 2 * given["values"].numel() * given["dense"].shape[3]


def _band(tokens: Tensor, window: int) -> int:
    batch, heads, number, width = tokens.shape
    window = min(window, max(0, number - 1))
    return 2 * batch * heads * width * (number * (2 * window + 1) - window * (window + 1))


def _token_sdd(given: dict) -> int:
    query, lists = given["query"], given["list_batch"] * given["list_heads"]
    return 2 * given["columns"].shape[0] * query.shape[0] * query.shape[1] // lists * query.shape[3]


_FORMULAS = {
    "block_attention_forward": _of_attention(FORWARD),
    "block_attention_backward": _of_attention(BACKWARD),
    "block_attention_bias_backward": _of_attention(BIAS_BACKWARD),
    "layout_attention_forward": _of_structured_attention(FORWARD),
    "layout_attention_backward": _of_structured_attention(BACKWARD),
    "layout_attention_bias_backward": _of_structured_attention(BIAS_BACKWARD),
    "block_attention_distance_backward": _of_distances,
    "layout_distance_forward": _of_structured_attention(FORWARD),
    "layout_attention_distance_backward": _of_structured_attention(BIAS_BACKWARD),
    "window_attention_forward": _of_attention(FORWARD),
    "window_attention_backward": _of_attention(BACKWARD),
    "window_numbers_forward": _of_window(FORWARD),
    "window_numbers_backward": _of_window(BACKWARD),
    "packed_attention_forward": _of_attention(FORWARD),
    "packed_attention_backward": _of_attention(BACKWARD),
    "token_attention_forward": _of_pairs(1, 1),
    "token_attention_backward": _of_pairs(3, 2),
    "token_tiles_forward": _of_pairs_in_tiles(FORWARD),
    "token_tiles_backward": _of_pairs_in_tiles(BACKWARD),
    "matmul_sdd": _sdd,
    "matmul_dsd": _dsd,
    "window_matmul": lambda given: _band(given["a"], given["window"]),
    "unwindow_matmul": lambda given: _band(given["dense"], given["band"].shape[3] // 2),
    "token_matmul_sdd": _token_sdd,
    "token_matmul_dsd": lambda given: 2 * given["values"].numel() * given["dense"].shape[3],
}
