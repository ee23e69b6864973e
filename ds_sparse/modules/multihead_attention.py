"""SparseMultiheadAttention: torch.nn.MultiheadAttention with a sparse core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from ..ops import check_inputs
from ..ops.operands import check_dropout
from ..sparsity import SparsityConfig
from ..sparsity.declarations import declared_value
from ..sparsity.draws import Draws, draws, why_unrepeatable
from .chosen_attention import refuse_options
from .structure_argument import for_all_layers, read_structures
from .structured_attention import StructuredAttention, whole_blocks


class SparseMultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` for self-attention on the live blocks of a structure.

    Its arguments, parameters and state dict are those of PyTorch's module, so checkpoints of either load into the
    other. Masks mean what they mean there: a bool one drops where True, which is the opposite of the operations of
    this package. A row with nothing left is zeros before the output projection. It runs in `nn.TransformerEncoderLayer`
    in training and in evaluation, where PyTorch's own fast path would not call it: that path is off for it.

    It differs in this: `need_weights` is False by default, and the second result is None, as no matrix of attention
    probabilities exists; `is_causal` needs no mask; hooks of `out_proj` run.

    Args:
        embed_dim, num_heads, dropout, bias, kdim, vdim, batch_first, device, dtype: as PyTorch has them. Key and value
            have as many tokens as query, also where `kdim` or `vdim` differ.
        add_bias_kv, add_zero_attn: False; a key that is no token has no place in a layout.
        sparsity_config: the structure, or a dict with the keys of the JSON block; by default `FixedSparsityConfig`.
        max_seq_length: tokens that the layout is built for, rounded up to whole blocks; longer sequences get a layout
            of their own.

    Raises:
        SparseAttentionConfigError: the dict is wrong (a ValueError).
        TypeError: a `sparsity_config` that is neither a structure nor a dict; a length that is no integer.
        ValueError: `add_bias_kv` or `add_zero_attn`; a structure for another number of heads, by layer, or with random
            blocks that no seed repeats, as the state dict keeps no layout; a length below 1; dropout outside of 0 to
            below 1.
        AssertionError: embed_dim is not a multiple of num_heads.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> block = {"mode": "bslongformer", "block": 16}
        >>> attention = ds_sparse.SparseMultiheadAttention(32, 4, batch_first=True, sparsity_config=block)
        >>> x = torch.randn(2, 100, 32)
        >>> padding = torch.zeros(2, 100, dtype=torch.bool)
        >>> padding[1, 60:] = True
        >>> output, weights = attention(x, x, x, key_padding_mask=padding)
        >>> output.shape, weights
        (torch.Size([2, 100, 32]), None)
        >>> attention.load_state_dict(torch.nn.MultiheadAttention(32, 4).state_dict())
        <All keys matched successfully>
    """

    attention: StructuredAttention
    """The attention that computes, with the layout."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        sparsity_config: SparsityConfig | Mapping[str, Any] | None = None,
        max_seq_length: int = 2048,
    ):
        refuse_added_keys("SparseMultiheadAttention", add_bias_kv, add_zero_attn)
        check_dropout("dropout", dropout)
        super().__init__(
            embed_dim, num_heads, dropout, bias,
            kdim=kdim, vdim=vdim, batch_first=batch_first, device=device, dtype=dtype,
        )  # fmt: skip
        structure = for_all_layers(read_structures(sparsity_config, num_heads))
        check_repeatable(structure)
        refuse_options(structure, dropout_p=dropout)
        self.attend_with(StructuredAttention(structure, whole_blocks(max_seq_length, structure.block)))

    def attend_with(self, attention: StructuredAttention) -> None:
        """Has `attention` compute, which layers of one structure share."""
        self.attention = attention
        # nn.TransformerEncoderLayer and nn.TransformerEncoder read this, and where it is True compute the layer
        # densely from the weights in evaluation, without a call of it.
        self._qkv_same_embed_dim = False

    def attend_densely(self) -> None:
        """Leaves what a `torch.nn.MultiheadAttention` has: the way back from `attend_with`."""
        del self.attention
        self._qkv_same_embed_dim = self.in_proj_weight is not None

    @property
    def max_seq_length(self) -> int:
        """Tokens that the layout covers."""
        return self.attention.max_seq_length

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = False,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """Self-attention of each token to the live blocks of its row.

        Args:
            query, key, value: (T, B, E), with `batch_first` (B, T, E), or (T, E) without a batch; E is `embed_dim`,
                `kdim`, `vdim`. One tensor as a rule; others are of the same tokens. Key and value that are one tensor
                beside another query are taken for cross-attention.
            key_padding_mask: (B, T), or (T,) without a batch; bool drops where True, a float is added.
            need_weights: False.
            attn_mask: (T, T) or (B * H, T, T); bool drops where True, a float is added, and may require a gradient.
            average_attn_weights: not used, as there are no weights.
            is_causal: whether a token sees itself and those before it alone; `attn_mask` is then not read, which
                PyTorch takes to say the same.

        Returns:
            The shape of query, and None.

        Raises:
            TypeError: operands that are no tensors.
            ValueError: `need_weights`; cross-attention; shapes or masks that do not fit; nested tensors.
        """
        _check_call(self, query, key, value, need_weights)
        check_inputs(key_padding_mask=key_padding_mask, attn_mask=attn_mask)
        unbatched, place_of_batch = query.dim() == 2, 0 if self.batch_first else 1
        to_heads, back = ((0, 2, 1, 3), (0, 2, 1, 3)) if self.batch_first else ((1, 2, 0, 3), (2, 0, 1, 3))
        projected = self._projected(query, key, value)
        if unbatched:
            projected = tuple(x.unsqueeze(place_of_batch) for x in projected)
        query, key, value = (x.unflatten(-1, (self.num_heads, -1)).permute(to_heads) for x in projected)
        masks = _masks(key_padding_mask, None if is_causal else attn_mask, query, unbatched)
        context = self.attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, causal=is_causal, **masks
        )
        output = self.out_proj(context.permute(back).flatten(2))
        return (output.squeeze(place_of_batch) if unbatched else output), None

    def _projected(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = operands
        weight: torch.Tensor | None = self.in_proj_weight
        if weight is not None and query is key and key is value:
            return linear(query, weight, self.in_proj_bias).chunk(3, dim=-1)
        weights: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = weights if weight is None else weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(linear(x, weight, bias) for x, weight, bias in zip(operands, weights, biases, strict=True))

    def _reset_parameters(self) -> None:
        # PyTorch's asks the attribute which weights there are.
        same, self._qkv_same_embed_dim = self._qkv_same_embed_dim, self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = same

    def extra_repr(self) -> str:
        structure = self.attention.sparsity_config
        return (
            f"{type(structure).__name__}, num_heads={self.num_heads}, block={structure.block}, "
            f"max_seq_length={self.max_seq_length}"
        )


def refuse_added_keys(what: str, add_bias_kv: bool, add_zero_attn: bool) -> None:
    """Raises ValueError for a key beside those of tokens."""
    asked = [name for name, given in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)) if given]
    if asked:
        raise ValueError(
            f"{what} has {' and '.join(asked)}, which add a key that is no token, and a layout has no place for one; "
            "leave them out, or keep torch.nn.MultiheadAttention."
        )


def check_repeatable(structure: SparsityConfig) -> None:
    """Raises ValueError for random blocks that would differ between ranks and after loading: a state dict of PyTorch's
    parameters does not keep them."""
    how = draws(structure)
    if how is Draws.UNREPEATABLY:
        raise ValueError(why_unrepeatable(structure))
    if how is Draws.BY_SEED and declared_value(structure, "seed") is None:
        raise ValueError(
            f"{type(structure).__name__} has random blocks and no seed, so they would differ between ranks and after "
            'loading, as the state dict does not keep them; give it one (seed=0, or "seed": 0 in a block).'
        )


def _check_call(
    module: SparseMultiheadAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, need_weights: bool
) -> None:
    if need_weights:
        raise ValueError(
            "need_weights is True, and SparseMultiheadAttention computes no matrix of attention probabilities; leave "
            "need_weights out, or keep torch.nn.MultiheadAttention where they are wanted."
        )
    if isinstance(query, torch.Tensor) and query.is_nested:
        raise ValueError(
            "query is a nested tensor, which nn.TransformerEncoder makes of a padded batch in evaluation; set "
            "use_nested_tensor = False on it (ds_sparse.sparsify does), or build it with enable_nested_tensor=False."
        )
    check_inputs(query=query, key=key, value=value)
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
        raise ValueError(f"Shapes are {shapes}; they have to be {_wanted(module)} alike.")
    if key.shape[:-1] != query.shape[:-1] or value.shape[:-1] != query.shape[:-1]:
        raise ValueError(
            f"Shapes are {shapes}; the layout is that of a sequence with itself, so key and value need query's batch "
            "and tokens. Keep torch.nn.MultiheadAttention for cross-attention and cached keys."
        )
    if key is value and query is not key:
        raise ValueError(
            "key and value are one tensor and query is another, as in cross-attention, and the layout is that of a "
            "sequence with itself; keep torch.nn.MultiheadAttention there. Where query is of the same tokens, give "
            "value.view_as(value)."
        )
    sizes = (module.embed_dim, module.kdim, module.vdim)
    if any(x.shape[-1] != size for x, size in zip((query, key, value), sizes, strict=True)):
        raise ValueError(f"Shapes are {shapes}; the last dimensions have to be {sizes}, as the module was built.")


def _wanted(module: SparseMultiheadAttention) -> str:
    return "(tokens, numbers), or " + ("(batch, tokens, numbers)" if module.batch_first else "(tokens, batch, numbers)")


def _masks(
    key_padding_mask: torch.Tensor | None, attn_mask: torch.Tensor | None, query: torch.Tensor, unbatched: bool
) -> dict[str, Any]:
    """PyTorch's masks, of which a bool one drops where True, as the arguments of `StructuredAttention`."""
    batch, heads, tokens, _ = query.shape
    _check_mask("key_padding_mask", key_padding_mask, [(tokens,)] if unbatched else [(batch, tokens)])
    _check_mask("attn_mask", attn_mask, [(tokens, tokens), (batch * heads, tokens, tokens)])
    bias = None
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.unflatten(0, (batch, heads))
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask.view(-1, tokens)
    # Operations give gradients to a bias, not to a mask.
    if attn_mask is not None and attn_mask.requires_grad:
        bias, attn_mask = attn_mask, None
    if key_padding_mask is not None and key_padding_mask.requires_grad:
        of_keys, key_padding_mask = key_padding_mask[:, None, None], None
        bias = of_keys if bias is None else bias + of_keys
    return {
        "key_padding_mask": _kept(key_padding_mask),
        "attn_mask": _kept(attn_mask),
        "rpe": None if bias is None else bias.to(query.dtype),
    }


def _check_mask(name: str, mask: torch.Tensor | None, shapes: list[tuple[int, ...]]) -> None:
    if mask is None:
        return
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"{name} is {mask.dtype}; it has to be bool (drops where True) or floating (is added).")
    if tuple(mask.shape) not in shapes:
        raise ValueError(f"{name} has shape {tuple(mask.shape)}; it has to be {' or '.join(map(str, shapes))}.")


def _kept(mask: torch.Tensor | None) -> torch.Tensor | None:
    return ~mask if mask is not None and mask.dtype == torch.bool else mask
