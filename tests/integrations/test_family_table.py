"""The table of families: what the documentation says is what the models say."""

from pathlib import Path

import pytest
from transformers.utils import logging

from ds_sparse.integrations.transformers.family_table import FAMILIES, markdown, rows

DOCS = Path(__file__).parents[2] / "docs" / "transformers.md"


@pytest.mark.slow("tries a model of each family that the documentation lists")
def test_the_table_of_the_documentation_is_what_the_models_say():
    assert markdown(rows()) in DOCS.read_text(), "run: ds_sparse families --markdown"


def test_what_stays_dense_and_what_is_refused_has_its_reason():
    bart, led = rows(["BART", "LED"])
    assert bart == ("BART", "sparse, part stays dense", "BartDecoder has cross-attention")
    assert led.what == "refused" and led.why.startswith("LEDEncoder computes its attention itself")


def test_a_family_that_this_transformers_does_not_have_is_said(monkeypatch):
    monkeypatch.setitem(FAMILIES, "Tomorrow", ("TomorrowModel", {}))
    (row,) = rows(["Tomorrow"])
    assert row.what == "unknown" and "has no TomorrowModel" in row.why


def test_nothing_is_left_behind(capsys):
    verbosity = logging.get_verbosity()
    list(rows(["T5"]))
    assert capsys.readouterr() == ("", "") and logging.get_verbosity() == verbosity
