from __future__ import annotations

import re
from dataclasses import replace

import parallel_table
import pytest
from parallel_table import LENGTHS, MODEL, PAGE, STRUCTURE, row, with_table

from ds_sparse.plan.fitting import walk_in_bert
from ds_sparse.plan.layers import Walk
from ds_sparse.plan.rates import committed_rates

LAID_OUT = LENGTHS[-2]
"""The layout of a million tokens takes half a minute."""


def walk_of(seq_len: int) -> Walk:
    """That of a million tokens, as one of fewer with as many blocks a row."""
    walk, times = walk_in_bert(STRUCTURE, MODEL.heads, min(seq_len, LAID_OUT)), max(1, seq_len // LAID_OUT)
    forward, backward = (
        replace(side, **{name: times * value for name, value in vars(side).items()})
        for side in (walk.forward, walk.backward)
    )
    return replace(walk, seq_len=seq_len, live=times * walk.live, forward=forward, backward=backward)


def parts(text: str) -> tuple[str, list[float]]:
    """The text without its numbers, and these."""
    number = r"\d+\.\d+"
    return re.sub(number, "", text), [float(found) for found in re.findall(number, text)]


def test_the_table_is_what_the_rates_predict():
    made = with_table("<!-- predicted -->\n<!-- end -->", [row(committed_rates(), n, walk_of(n)) for n in LENGTHS])
    on_page = re.search(r"<!-- predicted -->.*?<!-- end -->", PAGE.read_text(), re.DOTALL)
    (words, numbers), (others, predicted) = parts(on_page[0]), parts(made)
    assert words == others and numbers == pytest.approx(predicted, rel=5e-3), "run website/parallel_table.py"


def test_what_is_advised_is_bold_and_fits():
    cells = row(committed_rates(), LENGTHS[-1], walk_of(LENGTHS[-1]))
    advised = [cell for cell in cells if cell.startswith("**")]
    assert len(advised) == len(parallel_table.GPUS) and "-" not in advised
