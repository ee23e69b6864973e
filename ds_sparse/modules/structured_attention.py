"""StructuredAttention: attention on the live blocks of a structure, in one operation or out of MatMul and Softmax."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cached_property
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch.nn.functional import dropout, pad

from ..index import BlockIndex, outside_transforms, unwrap_functorch
from ..index.cache import KEPT, Cache, refuse_traced
from ..index.lookup import is_built_anew
from ..index.master_layout import MasterLayout
from ..index.packed import Documents
from ..layout import as_bool_layout, crop, density, on_cpu, share_equal_heads
from ..ops import MatMul, Softmax, block_sparse_attention
from ..ops._library import check_softcap
from ..ops.call import AttentionCall
from ..ops.operands import capped, of_flash
from ..ops.softmax import as_additive
from ..sparsity import ChosenSparsityConfig, SparsityConfig, adds_parameters
from ..sparsity.declarations import declared_value
from ..sparsity.draws import without_seed
from ..tools.block_sizes import not_whole_blocks, rounded_up
from ..tools.notices import say_notices
from ..tools.ranks import from_rank_0, world_size
from ..tools.wording import kind, reason
from .chosen_attention import chosen_attention
from .layout_buffer import LayoutBuffer

IMPLEMENTATIONS = ("fused", "separate")


class SparseOps(NamedTuple):
    """The three operations of one layout, which store scores and probabilities."""

    scores: MatMul
    softmax: Softmax
    output: MatMul


_OTHER_OPTIONS = frozenset({"scale", "dropout_p", "causal", "distance_bias", "sinks", "softcap"})
"""Options of a call that it hands on as they are."""


def is_structure(given: Any) -> bool:
    """Tells if it has all that attention asks a structure for; it need be none of this package."""
    return not isinstance(given, type) and all(hasattr(given, name) for name in ("block", "num_heads", "make_layout"))


def check_structure(given: Any) -> None:
    """Raises TypeError for what is no structure."""
    if not is_structure(given):
        raise TypeError(
            f"sparsity_config is {kind(given)}; it has to be a sparsity config, such as FixedSparsityConfig("
            "num_heads=4). parse_sparse_attention(block, num_heads) makes one of a dict with the keys of the JSON's "
            "block."
        )


class StructuredAttention:
    """Attention on the live blocks of a structure, for sequences of any length: what all attention layers are made of.

    Where queries choose their blocks, the layout is of those that may be chosen: no call makes it, and none is taken.

    Layers that hold the same object share its layouts and their indices.

    Args:
        sparsity_config, max_seq_length, implementation: as `SparseSelfAttention` has them, and so are the layouts for
            other lengths and what ranks do about random blocks.
        doubles: longer sequences use the top-left part of a layout for twice `max_seq_length`, or four times, and so
            on, for models whose sequences have no longest; otherwise each has a layout of its length.
        gives_learned: the layer gives each call its module, where the structure adds parameters.

    Call:
        As `block_sparse_attention`, without `layout`, `block` and `return_lse`, for any T above 0; `causal` beside what
        the structure says. The layout is not made for longer sequences where there is a query_offset: what a row sees
        would change while they grow. Masks and rpe have all keys in their last dimension. `learned` is the layer's
        module with the parameters that the structure adds.

    Raises:
        TypeError: as `SparseSelfAttention`.
        ValueError: as `SparseSelfAttention`; in the call, as `block_sparse_attention`, a query_offset with more tokens
            than `max_seq_length`, and with `implementation="separate"` sinks, a query_offset, a distance_bias or
            cu_seqlens.
        NotImplementedError: in the call, as `SparseSelfAttention`: shapes that differ in more than the number of heads.
    """

    def __init__(
        self,
        sparsity_config: SparsityConfig,
        max_seq_length: int,
        implementation: str = "fused",
        doubles: bool = False,
        gives_learned: bool = False,
    ):
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(f"implementation is {implementation!r}; it has to be 'fused' or 'separate'.")
        check_structure(sparsity_config)
        if adds_parameters(sparsity_config) and not gives_learned:
            raise ValueError(
                f"{type(sparsity_config).__name__} adds parameters, a module a layer, and this kind of layer has no "
                "place for it; layers of Transformers' models have one, BertSparseSelfAttention, and "
                "SparseSelfAttention with head_dim. Take another structure here."
            )
        if implementation == "separate" and isinstance(sparsity_config, ChosenSparsityConfig):
            raise ValueError(
                f'implementation is "separate", and {type(sparsity_config).__name__} chooses blocks in each call; take '
                '"fused", and ds_sparse.reference.selected_attention to check it.'
            )
        self.sparsity_config = sparsity_config
        self.implementation = implementation
        self.doubles = doubles
        # Each head alone, as dropout over several ranks has it, and the deals of several lengths.
        self._parts: Cache[_OfHeads] = Cache(KEPT + sparsity_config.num_heads)
        if max_seq_length % sparsity_config.block:
            raise ValueError(not_whole_blocks(max_seq_length, sparsity_config.block))
        self._longest = max_seq_length
        if not self.chooses:
            self._master = self._build(max_seq_length)
        self._awaits_other_ranks = without_seed(sparsity_config)
        self.synchronize_layout()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._parts = Cache(KEPT + self.sparsity_config.num_heads)  # pickles of 0.1.0 have a dictionary

    @cached_property
    def _master(self) -> _Layout:
        return self._build(self._longest)

    @property
    def layout(self) -> torch.Tensor:
        """The layout for `max_seq_length` tokens: bool (H, R, R), H = 1 when all heads are equal. A copy at each call,
        as layers share theirs; assign to replace it."""
        return self._master.layout.clone()

    @layout.setter
    def layout(self, layout: torch.Tensor) -> None:
        if self.chooses:
            raise ValueError(f"{type(self.sparsity_config).__name__} chooses blocks in each call, and takes no layout.")
        if layout is self.layout_buffer():
            return
        self._replace(unwrap_functorch("master_layout", layout) if isinstance(layout, torch.Tensor) else layout)

    @outside_transforms
    def _replace(self, layout: torch.Tensor) -> None:
        replacement = _Layout(layout, self.sparsity_config.block, self.sparsity_config.num_heads)
        if not torch.equal(replacement.layout, self._master.layout):
            self._master = replacement

    @property
    def causal(self) -> bool:
        """Tells if the structure declares that it masks later tokens, whatever a call says."""
        return declared_value(self.sparsity_config, "causal")

    @property
    def chooses(self) -> bool:
        """Tells if queries choose their blocks in each call: the layout is of those that may be chosen."""
        return isinstance(self.sparsity_config, ChosenSparsityConfig)

    @property
    def density(self) -> float:
        """The share of scores that are computed, of `max_seq_length` tokens."""
        return self.sparsity_config.computed_share(self.max_seq_length) if self.chooses else density(self.layout)

    @property
    def max_seq_length(self) -> int:
        """Tokens that `layout` covers."""
        return self._longest if self.chooses else self._master.blocks * self.sparsity_config.block

    def layout_buffer(self) -> LayoutBuffer:
        """The layout as DeepSpeed kept it."""
        return LayoutBuffer.of(self._master, self.sparsity_config.num_heads)

    def layout_for(self, seq_len: int) -> torch.Tensor:
        """The layout for `seq_len` tokens: bool (1 or H, R, R), the last block perhaps short. A copy at each call."""
        blocks = -(-seq_len // self.sparsity_config.block)
        return crop(self.covering(seq_len).layout, blocks, blocks).clone()

    def index(self, seq_len: int, device: torch.device) -> BlockIndex:
        """The index for `seq_len` tokens, rounded up to whole blocks."""
        return self.covering(seq_len).index(seq_len, device)

    def ops(self, seq_len: int, device: torch.device) -> SparseOps:
        """The separate operations for `seq_len` tokens, rounded up to whole blocks; they share one index.

        Raises:
            ValueError: queries choose their blocks.
        """
        if self.chooses:
            raise ValueError(
                f"{type(self.sparsity_config).__name__} chooses blocks in each call, and separate operations have "
                "those of a layout; call the module."
            )
        return self.covering(seq_len).ops(seq_len, device)

    def of_heads(self, heads: tuple[int, ...]) -> StructuredAttention:
        """Attention of some of the heads on their part of the layouts, as a rank has them that shares them with others.

        Raises:
            RuntimeError: it has not been asked for before, and torch.compile traces.
            ValueError: the structure adds parameters, which are those of all heads.
        """
        if adds_parameters(self.sparsity_config):
            raise ValueError(
                f"{type(self.sparsity_config).__name__} adds parameters for all heads, of which this rank has "
                f"{len(heads)}; train it without ranks that share the heads of a layer."
            )

        def build() -> _OfHeads:
            refuse_traced("The layout of a rank's heads cannot be made", "call once with this length before.")
            return _OfHeads(self, heads)

        return self._parts.get(heads, build)

    def ops_made(self) -> dict[int, SparseOps]:
        """Operations that `ops` has made and still keeps, by length."""
        layouts = (self._master, *self._master.longer.values())
        return {blocks * layout.block: ops for layout in layouts for (blocks, _), ops in layout._ops.items()}

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        query_offset: int | torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        document_layout: str = "own",
        learned: torch.nn.Module | None = None,
        **options: Any,
    ) -> torch.Tensor:
        self.check(query, key, value, query_offset, **options)
        self.synchronize_layout()
        options["causal"] = options.get("causal", False) or self.causal
        if isinstance(self.sparsity_config, ChosenSparsityConfig):
            return chosen_attention(
                self.sparsity_config, learned, query, key, value, query_offset=query_offset, cu_seqlens=cu_seqlens,
                document_layout=document_layout, **options,
            )  # fmt: skip
        if self.implementation == "separate":
            return self._attend_separately(AttentionCall(query, key, value, **options), query_offset, cu_seqlens)
        layout: Any  # a MasterLayout too, which only modules give
        if cu_seqlens is not None:
            longest = query.shape[2]
            if document_layout == "own" and longest > self.max_seq_length:
                # In a graph nobody reads how long documents are: these have the layout of the longest sequence.
                of_graph = is_built_anew(cu_seqlens)
                longest = self.max_seq_length if of_graph else max(Documents.read(cu_seqlens).lengths)
            covering = self.covering(longest)
            # On the device already, where the index of each batch is made of it.
            layout = covering.index(covering.blocks * covering.block, query.device)
        else:
            layout = self.covering(query.shape[2]) if query_offset is None else self._for_cached(key.shape[2])
        return block_sparse_attention(
            query, key, value, layout, query_offset=query_offset, cu_seqlens=cu_seqlens,
            document_layout=document_layout, **options,
        )  # fmt: skip

    def _attend_separately(self, call: AttentionCall, query_offset: Any, cu_seqlens: Any) -> torch.Tensor:
        of_fused = {"distance_bias": call.distance_bias, "sinks": call.sinks}
        for name, given in (of_fused | {"query_offset": query_offset, "cu_seqlens": cu_seqlens}).items():
            if given is not None:
                raise ValueError(f'{name} is given, and only implementation="fused" takes it; build it so.')
        query, key, value, rpe, padding, mask = call.query, call.key, call.value, call.rpe, *call.biases[:2]
        heads, tokens, head_dim = query.shape[1:]
        if key.shape[1] != heads:
            key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
        missing = -tokens % self.sparsity_config.block
        if missing:
            query, key, value = (pad(x, (0, 0, 0, missing)) for x in (query, key, value))
            # What is said about pairs with padding does not matter: its keys are masked.
            rpe, mask = (
                x if x is None else pad(x, (0, missing, 0, missing if x.shape[-2] > 1 else 0)) for x in (rpe, mask)
            )
            padding = query.new_ones(1, tokens, dtype=torch.bool) if padding is None else padding
            padding = pad(padding, (0, missing), value=False if padding.dtype == torch.bool else float("-inf"))
        ops = self.ops(tokens, query.device)
        scores = ops.scores(query, key)
        scale = head_dim**-0.5 if call.scale is None else call.scale
        if check_softcap(call.softcap):
            scores, scale = capped(scores * scale, call.softcap), 1.0
        probs = ops.softmax(
            scores,
            scale=scale,
            rpe=None if rpe is None else rpe.to(scores.dtype),
            causal=call.causal,
            **_softmax_mask("key_padding_mask", padding, scores.dtype),
            **_softmax_mask("attn_mask", mask, scores.dtype),
        )
        if call.dropout_p:
            probs = dropout(probs, call.dropout_p)
        output = ops.output(probs, value)
        return output[:, :, :tokens] if missing else output

    def check(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_offset: int | torch.Tensor | None = None,
        *,
        rpe: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        **more: Any,
    ) -> None:
        """Raises what the call raises for operands and masks, and for options that it has not."""
        for name in more:  # not a difference of sets, which PyTorch 2.11 does not trace
            if name not in _OTHER_OPTIONS:
                raise TypeError(f"StructuredAttention.__call__() got an unexpected keyword argument {name!r}")
        dims = (0, 2, 3) if query_offset is None else (0, 3)
        alike = query.dim() == key.dim() == 4 and key.shape == value.shape
        alike = alike and all(key.shape[dim] == query.shape[dim] for dim in dims)
        if not alike or not key.shape[1] or query.shape[1] % key.shape[1]:
            raise NotImplementedError(
                f"only self-attention is supported for now: query, key and value have to be (B, H, T, D) alike, where "
                f"key and value may have fewer heads that divide H, and packed documents are one row, B 1; got "
                f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            )
        batch, heads, tokens, _ = query.shape
        if heads != self.sparsity_config.num_heads:
            raise ValueError(
                f"query has {heads} heads and the sparsity config num_heads={self.sparsity_config.num_heads}; "
                "build the sparsity config with the number of heads that reach this module."
                + of_flash(query, tokens == self.sparsity_config.num_heads)
            )
        if tokens == 0:
            raise ValueError(f"query has shape {tuple(query.shape)}, without a token; give at least one.")
        pairs = (batch, heads, tokens, key.shape[2])
        _check_fits("rpe", rpe, pairs)
        _check_fits("key_padding_mask", key_padding_mask, (batch, key.shape[2]))
        _check_fits("attn_mask", attn_mask, pairs)

    @outside_transforms
    @on_cpu()
    def _build(self, seq_len: int, first: _Layout | None = None) -> _Layout:
        config = self.sparsity_config
        make = getattr(config, "make_bool_layout", config.make_layout)
        try:
            layout = make(seq_len)
        except ValueError as error:
            raise ValueError(
                f"{type(config).__name__}, block {config.block}: no layout of {seq_len} tokens ({reason(error)}); give "
                "a longer max_seq_length, or change the structure."
            ) from error
        if isinstance(config, SparsityConfig):
            about = f"{type(config).__name__}, block {config.block}, at {seq_len} tokens"
            # What a longer layout leaves out, the first one does too, and has said.
            before = {} if first is None else dict(config.cautions_at(first.blocks))
            cautions = config.cautions_at(seq_len // config.block)
            say_notices(f"{about}: {key}: {said}" for key, said in cautions if key not in before)
        return _Layout(layout, config.block, config.num_heads)

    def covering(self, seq_len: int) -> _Layout:
        """The layout whose top-left part serves so many tokens."""
        if seq_len <= self.max_seq_length:
            return self._master
        longer, blocks = self._master.longer, -(-seq_len // self.sparsity_config.block)
        if self.doubles:
            blocks = self._master.blocks << ((blocks - 1) // self._master.blocks).bit_length()
        if blocks not in longer:
            seq_len = blocks * self.sparsity_config.block
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    f"The sequence has {seq_len} tokens, the layout was made for {self.max_seq_length}, and a longer "
                    f"one cannot be made under torch.compile; build the module with max_seq_length={seq_len}."
                )
            if world_size() > 1 and without_seed(self.sparsity_config):
                raise ValueError(
                    f"The sequence has {seq_len} tokens, the layout was made for {self.max_seq_length}, and a longer "
                    f"one would be drawn differently by each rank; build the module with max_seq_length={seq_len}, or "
                    "give the structure a seed."
                )
            longer[blocks] = self._build(seq_len, self._master)
        return longer[blocks]

    def _for_cached(self, seq_len: int) -> _Layout:
        if seq_len > self.max_seq_length:
            raise ValueError(
                f"The sequence has {seq_len} tokens with those that are cached, and the layout was made for "
                f"{self.max_seq_length}; what the cached ones have seen cannot change, so build it with "
                f"max_seq_length={seq_len} or more from the start."
            )
        return self._master

    def synchronize_layout(self) -> None:
        """Takes rank 0's layout where ranks may have drawn different ones (DeepSpeed PR 534)."""
        distributed = torch.distributed
        if self._awaits_other_ranks and distributed.is_available() and distributed.is_initialized():
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    "The random blocks have still to be taken from rank 0, which torch.compile cannot trace; call the "
                    "module once before, build it after torch.distributed is initialised, or give the structure a seed."
                )
            self.layout = from_rank_0(self._master.layout)
            self._awaits_other_ranks = False


class _OfHeads(StructuredAttention):
    """Some heads of another one, on its layouts."""

    def __init__(self, whole: StructuredAttention, heads: tuple[int, ...]):
        self._whole, self._heads, self._longest = whole, list(heads), whole.max_seq_length
        self._of_layouts: dict[int, tuple[_Layout, _Layout]] = {}
        self.sparsity_config = copy.copy(whole.sparsity_config)
        self.sparsity_config.num_heads = len(heads)
        self.implementation, self.doubles = whole.implementation, whole.doubles

    @property
    def _master(self) -> _Layout:
        return self._of(self._whole._master)

    def covering(self, seq_len: int) -> _Layout:
        return self._of(self._whole.covering(seq_len))

    def synchronize_layout(self) -> None:
        self._whole.synchronize_layout()

    def _held(self) -> Iterator[torch.Tensor]:
        for _, part in self._of_layouts.values():
            yield from part._held()

    def _of(self, layout: _Layout) -> _Layout:
        """The heads' part of a layout of all heads, made once."""
        of, part = self._of_layouts.get(layout.blocks, (None, None))
        if part is None or of is not layout:
            refuse_traced("The layout of a rank's heads cannot be made", "call once with this length before.")
            heads = layout.layout if len(layout.layout) == 1 else layout.layout[self._heads]
            part = _Layout(heads, layout.block, self.sparsity_config.num_heads)
            self._of_layouts[layout.blocks] = layout, part
        return part


class _Layout(MasterLayout):
    """A structure's layout with its separate operations, and the layouts of longer sequences, by their blocks. Copies
    of a module share it."""

    def __init__(self, layout: torch.Tensor, block: int, num_heads: int):
        layout = as_bool_layout(layout).cpu()
        heads, rows, columns = layout.shape
        if heads not in (1, num_heads) or rows != columns:
            raise ValueError(
                f"A layout of shape {tuple(layout.shape)} is given for {num_heads} heads; it has to be ({num_heads}, "
                "R, R)."
            )
        super().__init__(share_equal_heads(layout), block, num_heads)
        self.longer: dict[int, _Layout] = {}
        self._ops: Cache[SparseOps] = Cache()

    def ops(self, tokens: int, device: torch.device) -> SparseOps:
        def build() -> SparseOps:
            # With all heads that it stands for, as these operations say in `spdims` and `num_blocks`.
            index = self.index(tokens, device).for_heads(self.num_heads)
            return SparseOps(
                scores=MatMul(index, self.block, "sdd", trans_b=True),
                softmax=Softmax(index, self.block),
                output=MatMul(index, self.block, "dsd"),
            )

        return self._ops.get((-(-tokens // self.block), device), build)

    def __reduce__(self):
        return _Layout, (self.layout, self.block, self.num_heads), {"longer": self.longer}


def whole_blocks(tokens: int, block: int) -> int:
    """The tokens of the longest sequence, as a caller or a config says, rounded up to a multiple of the block.

    Raises:
        TypeError, ValueError: no integer; below 1.
    """
    check_tokens("max_seq_length, or what the model's config says of its longest sequence,", tokens)
    return rounded_up(int(tokens), block)


def check_tokens(name: str, tokens: object) -> None:
    """Raises TypeError or ValueError for a length that is no integer of 1 or more."""
    if isinstance(tokens, bool) or not isinstance(tokens, Integral) or tokens < 1:
        raise (ValueError if isinstance(tokens, Integral) else TypeError)(
            f"{name} is {tokens!r}; it has to be an integer of 1 or more, in tokens."
        )


def of_keys_or_pairs(mask: torch.Tensor | None) -> dict[str, Any]:
    """The argument of `StructuredAttention` for a mask that models give: (B, T) is about keys, any other about pairs of
    tokens."""
    return {} if mask is None else {"key_padding_mask" if mask.dim() == 2 else "attn_mask": mask}


def _softmax_mask(name: str, mask: torch.Tensor | None, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of Softmax for a mask that keeps where True, or is added."""
    if mask is None:
        return {}
    if mask.dtype == torch.bool:
        return {name: mask, f"{name}_mode": "mul"}
    return {name: as_additive(name, mask, dtype), f"{name}_mode": "add"}


def _check_fits(name: str, given: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `given` has this shape or its last two dimensions, of which all but the last may be 1,
    and, of a mask, a dtype that says what it means."""
    if given is None:
        return
    if name != "rpe" and given.dtype != torch.bool and not given.is_floating_point():
        raise ValueError(
            f"{name} is {given.dtype}; it has to be bool (keeps where True) or floating (added to the scores)."
        )
    sizes = tuple(given.shape)
    fits = len(sizes) in (2, len(shape)) and sizes[-1] == shape[-1]
    if not fits or any(size != 1 and size != full for size, full in zip(sizes, shape[-len(sizes) :], strict=True)):
        shorter = f", or {shape[2:]}" if len(shape) > 2 else ""
        raise ValueError(f"{name} has shape {sizes}; it has to be {shape}, where all but the last may be 1{shorter}.")
