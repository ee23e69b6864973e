"""help() of a structure describes its fields, as they are declared."""

from __future__ import annotations

import pydoc
import re

import pytest
from pydantic import Field

import ds_sparse
from ds_sparse.config import json_schema
from ds_sparse.sparsity import sparsity_class, sparsity_modes


def shown(cls: type) -> str:
    """What help() shows, on one line."""
    lines = pydoc.render_doc(cls, renderer=pydoc.plaintext).splitlines()
    return " ".join(line.removeprefix(" |").strip() for line in lines)


STRUCTURES = [ds_sparse.SparsityConfig, *map(sparsity_class, sparsity_modes())]


@pytest.mark.parametrize("cls", STRUCTURES, ids=lambda cls: cls.__name__)
def test_help_has_each_field_with_its_description_and_default(cls: type):
    fields = {name: field for name, field in cls.__pydantic_fields__.items() if field.init is not False}
    assert len(fields) > 4
    for name, field in fields.items():
        assert field.description
        assert f" {name}: {field.description}" in shown(cls)
        described = shown(cls).split(f" {name}: {field.description}")[1]
        assert field.is_required() or re.match(
            rf"(One of .*?\.)?\s*Default: {re.escape(repr(field.default))}\.", described.strip()
        )


def test_help_has_the_values_of_a_choice_and_no_field_that_is_no_argument():
    assert "One of 8, 16, 32, 64, 128. Default: 16." in shown(ds_sparse.SparsityConfig)
    assert "One of 'bidirectional', 'unidirectional'. Default: 'bidirectional'." in shown(ds_sparse.FixedSparsityConfig)
    assert "different_layout_per_head" not in ds_sparse.LocalSlidingWindowSparsityConfig.__doc__


def test_fields_of_ones_own_stand_before_the_errors_and_arguments_by_name_alone_last():
    @ds_sparse.declared
    class Stripes(ds_sparse.SparsityConfig):
        """Every so-many-th column.

        Raises:
            ValueError: a field out of bounds.
        """

        every: int = Field(default=4, ge=1, description="Columns from one live one to the next.")

    assert Stripes.__doc__.startswith("Every so-many-th column.\n\nArgs:\n    num_heads: ")
    assert Stripes.__doc__.endswith("\n\nRaises:\n    ValueError: a field out of bounds.")
    places = [Stripes.__doc__.index(text) for text in ("    every: Columns from one", "    seed: ", "Raises:")]
    assert places == sorted(places)


def test_a_docstring_with_arguments_stays_as_it_is():
    @ds_sparse.declared
    class Stripes(ds_sparse.SparsityConfig):
        """Stripes.

        Args:
            every: columns.
        """

        every: int = 4

    assert Stripes.__doc__ == "Stripes.\n\nArgs:\n    every: columns."


@pytest.mark.usefixtures("registry")
def test_without_a_docstring_the_schema_has_the_name():
    @ds_sparse.register_sparsity("stripes")
    @ds_sparse.declared
    class Stripes(ds_sparse.SparsityConfig):
        every: int = 4

        def lay_out(self, h, layout):
            return layout

    assert json_schema()["$defs"]["stripes"]["description"] == "Stripes"
