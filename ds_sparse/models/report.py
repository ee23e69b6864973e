"""What `sparsify` changed in a model, and the way back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from torch import nn

from ..layout import density
from ..modules.structured_attention import StructuredAttention


class Change(Protocol):
    """Attention layers, alike, that `on` makes sparse and `off` dense again.

    Attributes:
        layers: the dense ones by name.
        was, now: what each of them is, dense and sparse, for the report.
        attention: what computes when they are sparse.
    """

    @property
    def layers(self) -> Mapping[str, nn.Module]: ...

    @property
    def was(self) -> Sequence[str]: ...

    @property
    def now(self) -> Sequence[str]: ...

    @property
    def attention(self) -> StructuredAttention: ...

    def on(self) -> None: ...

    def off(self) -> None: ...


class Replaced(NamedTuple):
    """An attention layer that `sparsify` made sparse."""

    name: str
    was: str
    now: str


class SparsifyReport:
    """What `sparsify` changed: `replaced` has an entry a layer, `str()` is a table, `undo()` puts the model back.

    Then `replaced` is empty, and the table says what became dense again.

    `left_dense` has the layers of cross-attention by name, for which there is no structure.

    Args:
        changes: those of the model, which are on. `sparsify` gives them.
        left_dense: layers of cross-attention by name, which stay dense.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> class Attention(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.query, self.key, self.value = (torch.nn.Linear(32, 32) for _ in range(3))
        ...         self.num_attention_heads = 4
        >>> model = torch.nn.ModuleDict({"attention": Attention()})
        >>> report = ds_sparse.sparsify(model, {"mode": "bslongformer", "block": 16}, max_seq_length=128)
        >>> print(report)
        1 attention layer made sparse: BSLongformerSparsityConfig, block 16, density 53.1% at 128 tokens
          attention  Attention  ->  BertSparseSelfAttention
        >>> report.replaced[0].name, type(model["attention"]).__name__
        ('attention', 'BertSparseSelfAttention')
        >>> report.undo()
        >>> type(model["attention"]).__name__
        'Attention'
    """

    def __init__(self, changes: list[Change], left_dense: Mapping[str, nn.Module] = MappingProxyType({})):
        self._changes, self._on = changes, True
        self.left_dense = dict(left_dense)

    @property
    def replaced(self) -> list[Replaced]:
        """The attention layers that are sparse by this: the name of each in the model, what it was, what it is now."""
        return [replaced for change in self._changes for replaced in _replaced(change)] if self._on else []

    def undo(self) -> None:
        """Puts modules, config and attention implementation back. A second call changes nothing."""
        if self._on:
            for change in reversed(self._changes):
                change.off()
        self._on = False

    def __str__(self) -> str:
        lines = []
        for change in self._changes:
            attention, count = change.attention, len(change.layers)
            structure = attention.sparsity_config
            layers = f"{count} attention layer{'s' if count > 1 else ''}"
            lines.append(
                f"{f'{layers} made sparse' if self._on else f'undone: {layers} dense again, no longer'}: "
                f"{type(structure).__name__}, block {structure.block}, density {density(attention.layout):.1%} at "
                f"{attention.max_seq_length} tokens"
            )
            rows = [(name, was, now) if self._on else (name, now, was) for name, was, now in _replaced(change)]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines += [f"  {name:{widths[0]}}  {was:{widths[1]}}  ->  {now}" for name, was, now in rows]
        if self.left_dense and self._on:
            count = len(self.left_dense)
            lines.append(f"{count} layer{'s' if count > 1 else ''} of cross-attention left dense")
            lines += [f"  {name}  {type(layer).__name__}" for name, layer in self.left_dense.items()]
        return "\n".join(lines)

    __repr__ = __str__


def _replaced(change: Change) -> list[Replaced]:
    return [Replaced(*entry) for entry in zip(change.layers, change.was, change.now, strict=True)]
