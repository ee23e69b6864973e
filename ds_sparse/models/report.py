"""The report of what `sparsify` changed in a model, and the way back."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from ..modules.structured_attention import StructuredAttention
from ..picture import in_notebook
from ..tools.wording import counted

NULL = 'null in "layers" of the block'
"""Why a layer stays dense."""


class Kind(NamedTuple):
    """Attention layers of a model that compute the same.

    Attributes:
        layers: the dense ones, by name.
        was, now: what each of them is, before and after, for the report.
        what: what they compute afterwards; of layers that stay dense, why.
        sparse: whether they become sparse.
        attention: what computes in them, where it has a layout.
    """

    layers: Mapping[str, nn.Module]
    was: Sequence[str]
    now: Sequence[str]
    what: str
    sparse: bool = True
    attention: StructuredAttention | None = None


class Change:
    """Attention layers that `on` makes sparse and `off` dense again, and those beside them that stay dense."""

    kinds: Sequence[Kind] = ()

    def on(self) -> None: ...

    def off(self) -> None: ...


class StayDense(Change):
    """A change that is none: layers that stay dense."""

    def __init__(self, layers: Mapping[str, nn.Module], why: str):
        names = [type(layer).__name__ for layer in layers.values()]
        self.kinds = [Kind(layers, names, names, why, sparse=False)]


def describe(attention: StructuredAttention, learned: Iterable[nn.Module | None] = ()) -> str:
    """Describes what computes in layers, in a few words.

    Args:
        learned: the modules with parameters that the structure adds to them.
    """
    structure, tokens = attention.sparsity_config, attention.max_seq_length
    added = sum(parameter.numel() for module in learned if module is not None for parameter in module.parameters())
    more = f", {added:,} parameters added" if added else ""
    return (
        f"{type(structure).__name__}, block {structure.block}, density {attention.density:.1%} at {tokens} tokens{more}"
    )


class Dense(NamedTuple):
    """An attention layer that `sparsify` left dense."""

    name: str
    was: str
    why: str


class Replaced(NamedTuple):
    """An attention layer that `sparsify` made sparse."""

    name: str
    was: str
    now: str


class SparsifyReport:
    """The changes of `sparsify`: `replaced` has an entry a layer, `str()` is a table, `undo()` puts the model back.

    The table has a heading for each kind of layers. `dense` has an entry for each layer that stays dense.

    After `undo()`, `replaced` is empty and the table says what became dense again.

    Args:
        changes: those of the model, which are on. `sparsify` gives them.

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

    def __init__(self, changes: list[Change]):
        self._changes, self._on = changes, True

    @property
    def replaced(self) -> list[Replaced]:
        """The attention layers that are sparse by this: the name of each in the model, what it was, what it is now."""
        kinds = [kind for kind in self._kinds() if kind.sparse and self._on]
        return [Replaced(*entry) for kind in kinds for entry in zip(kind.layers, kind.was, kind.now, strict=True)]

    @property
    def dense(self) -> list[Dense]:
        """The attention layers that this left dense: the name of each in the model, what it is, and why."""
        kinds = [kind for kind in self._kinds() if not kind.sparse]
        return [Dense(name, was, kind.what) for kind in kinds for name, was in zip(kind.layers, kind.was, strict=True)]

    @property
    def headings(self) -> list[str]:
        """A line for each kind of layers."""
        return [self._heading(kind) for kind in self._shown()]

    def undo(self) -> None:
        """Puts modules, config and attention implementation back. A second call changes nothing."""
        if self._on:
            for change in reversed(self._changes):
                change.off()
        self._on = False

    def __str__(self) -> str:
        lines = []
        for kind in self._shown():
            before, after = (kind.was, kind.now) if self._on else (kind.now, kind.was)
            columns = [list(kind.layers), before, after] if kind.sparse else [list(kind.layers), before]
            widths = [max(map(len, column)) for column in columns]
            rows = zip(*columns, strict=True)
            padded = [[f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)] for row in rows]
            lines += [self._heading(kind)]
            lines += [f"  {row[0]}  {'  ->  '.join(row[1:])}".rstrip() for row in padded]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The table, and a picture of each layout, for a notebook."""

        def picture(attention: StructuredAttention) -> str:
            block = attention.sparsity_config.block
            return in_notebook(lambda: (attention.layout, block), describe(attention)) or ""

        layouts = {id(kind.attention): kind.attention for kind in self._shown() if kind.attention is not None}
        pictures = [picture(attention) for attention in layouts.values() if not attention.chooses]
        return f"<pre>{html.escape(str(self))}</pre>{''.join(pictures)}"

    def _kinds(self) -> list[Kind]:
        return [kind for change in self._changes for kind in change.kinds]

    def _shown(self) -> list[Kind]:
        return [kind for kind in self._kinds() if kind.sparse or self._on]

    def _heading(self, kind: Kind) -> str:
        count = len(kind.layers)
        layers = counted(count, "attention layer")
        if not kind.sparse:
            return f"{layers} stay{'s' if count == 1 else ''} dense: {kind.what}"
        return f"{f'{layers} made sparse' if self._on else f'undone: {layers} dense again, no longer'}: {kind.what}"
