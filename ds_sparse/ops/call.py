"""One call of attention: its operands and options, validated in one place and handed on as one record."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..index.kernels import require_kernel
from ._autograd import differentiable_once_in
from ._library import check_inputs, check_scale, check_softcap, under_autocast
from .operands import check_attention_operands, check_bias, check_dropout, wide_dtype
from .sinks import check_sinks


class AttentionCall(NamedTuple):
    """Operands and options as `block_sparse_attention` takes them; `checked` is the call once it is valid."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: Any = None  # a number; 1 / sqrt(D) once it is checked, where it is None
    causal: bool = False
    key_padding_mask: Tensor | None = None
    attn_mask: Tensor | None = None
    rpe: Tensor | None = None
    distance_bias: Tensor | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0  # of 0.0, a default, torch.compile makes a symbol where shapes are dynamic
    softcap: float = 0  # of the scaled scores; 0: none

    def checked(self, operator: str = "block_attention_forward") -> AttentionCall:
        """Validates a call but for its index, and casts operands where autocast is on.

        Raises:
            TypeError: operands that are no tensors; a scale that is no number.
            ValueError: operands, masks, biases or numbers that do not fit together.
            RuntimeError: a device without the operator.
        """
        query, key, value, scale, _, key_padding_mask, attn_mask, rpe, distance_bias, sinks, dropout_p, _ = self
        check_inputs(query=query, key=key, value=value)
        query, key, value = under_autocast(query, key, value)
        check_attention_operands(query, key, value)
        scale = query.shape[3] ** -0.5 if scale is None else check_scale(scale)
        check_dropout("dropout_p", dropout_p)
        if not key_padding_mask is attn_mask is rpe is distance_bias is sinks is None:
            check_inputs(rpe=rpe, attn_mask=attn_mask, key_padding_mask=key_padding_mask, sinks=sinks)
            check_inputs(distance_bias=distance_bias)
            keys = key.shape[2]
            pairs = (*query.shape[:3], keys)
            check_bias("rpe", rpe, query, pairs, (2, 3, 4))
            check_bias("attn_mask", attn_mask, query, pairs, (2, 4))
            check_bias("key_padding_mask", key_padding_mask, query, (query.shape[0], keys), (2,))
            check_sinks(sinks, query)
        if not query.is_cpu:
            require_kernel(operator, query.device)
        return AttentionCall(query, key, value, scale, *self[4:-1], self._checked_softcap())

    def _checked_softcap(self) -> float:
        softcap = check_softcap(self.softcap)
        if softcap and self.adds_floats:
            raise ValueError(
                f"softcap is {softcap}, and a mask or bias adds numbers to scores; beside a soft cap give bool masks "
                "alone, or compute attention in parts, by MatMul and Softmax."
            )
        return softcap

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def biases(self) -> tuple[Tensor | None, ...]:
        """All that is added to scores, or masks them."""
        return self.key_padding_mask, self.attn_mask, self.rpe, self.distance_bias

    @property
    def adds_floats(self) -> bool:
        return any(x is not None and x.dtype != torch.bool for x in self.biases)

    def of_sequences(self, part: slice) -> AttentionCall:
        """Restricts the call to some sequences of the batch."""

        def of(x: Tensor | None, dims: int) -> Tensor | None:
            return x if x is None or x.dim() < dims or len(x) == 1 else x[part]

        return self._replace(
            query=self.query[part], key=self.key[part], value=self.value[part],
            key_padding_mask=of(self.key_padding_mask, 2), attn_mask=of(self.attn_mask, 4), rpe=of(self.rpe, 4),
        )  # fmt: skip

    def of_keys(self, part: slice, by: int = 0) -> AttentionCall:
        """Restricts keys, masks and biases to a range of keys, and moves the middle of the bias by distance: the first
        key is `by` further from the first query than it was."""
        bias = self.distance_bias
        return self._replace(
            key=self.key[:, :, part], value=self.value[:, :, part],
            key_padding_mask=_of_keys(self.key_padding_mask, part), attn_mask=_of_keys(self.attn_mask, part),
            rpe=_of_keys(self.rpe, part),
            distance_bias=bias if bias is None or by == 0 else pad(bias, (-by, by)),
        )  # fmt: skip

    def with_queries_in_front(self, number: int) -> AttentionCall:
        """Pads queries in front, which nobody uses: they see no key that others do not, as it may be NaN."""

        def of(x: Tensor | None) -> Tensor | None:
            if x is None or x.shape[-2] == 1:
                return x
            return pad(x, (0, 0, number, 0), value=False if x.dtype == torch.bool else float("-inf"))

        query, mask = self.query, self.attn_mask
        if self.distance_bias is not None and (mask is None or mask.shape[-2] == 1):
            # Its -inf go by distance.
            there = torch.ones(query.shape[2], 1, dtype=torch.bool, device=query.device)
            mask = there if mask is None else mask.expand(*mask.shape[:-2], query.shape[2], -1)
        return self._replace(query=pad(query, (0, 0, number, 0)), attn_mask=of(mask), rpe=of(self.rpe))

    def with_causality_in_mask(self, offset: int) -> AttentionCall:
        """Makes causality of queries from position `offset` on a part of attn_mask."""
        query = self.query
        positions = torch.arange(offset, offset + query.shape[2], device=query.device)
        seen = torch.arange(self.key.shape[2], device=query.device) <= positions[:, None]
        mask, rpe = self.attn_mask, self.rpe
        if mask is not None and mask.dtype != torch.bool and rpe is None and self.distance_bias is None:
            # rpe may be the same for all queries, and then it stays so; a mask that has the order, too, may not.
            mask, rpe = None, mask
        if mask is None or mask.dtype == torch.bool:
            mask = seen if mask is None else mask & seen
        else:
            mask = mask.masked_fill(~seen, float("-inf"))
        return self._replace(causal=False, attn_mask=mask, rpe=rpe)

    def with_wide_gradients(self) -> AttentionCall:
        """Makes gradients of biases and sinks, of several calls and sequences, add up in fp32 or wider."""
        if self.rpe is self.distance_bias is self.sinks is None:
            return self
        wide = wide_dtype(self.query.dtype)

        def of(x: Tensor | None) -> Tensor | None:
            return x if x is None or not x.requires_grad else x.to(torch.promote_types(x.dtype, wide))

        return self._replace(rpe=of(self.rpe), distance_bias=of(self.distance_bias), sinks=of(self.sinks))

    def differentiable_once(self, operation: str) -> AttentionCall:
        """Ends derivatives of an operation made of PyTorch's own where those of kernels end."""
        given = self.query, self.key, self.value, self.rpe, self.distance_bias, self.sinks
        query, key, value, rpe, bias, sinks = differentiable_once_in(operation, *given)
        return self._replace(query=query, key=key, value=value, rpe=rpe, distance_bias=bias, sinks=sinks)


def _of_keys(x: Tensor | None, part: slice) -> Tensor | None:
    """A mask or bias for a range of keys. No closure: Dynamo takes a range in one for constant, and each for another
    graph."""
    return x if x is None or x.shape[-1] == 1 else x[..., part]
