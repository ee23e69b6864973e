"""Pictures of results in the README are those of committed results."""

import matplotlib.image
import numpy as np
import pytest

from benchmarks.pages import pictures


@pytest.mark.parametrize("name", pictures.RESULTS)
def test_the_readme_shows_what_the_results_are_drawn_as(name, monkeypatch, tmp_path):
    committed = matplotlib.image.imread(pictures.PICTURES / f"{name}.png")
    monkeypatch.setattr(pictures, "PICTURES", tmp_path)
    pictures.save_results()
    drawn = matplotlib.image.imread(tmp_path / f"{name}.png")
    assert drawn.shape == committed.shape
    assert np.abs(drawn - committed).mean() < 0.01, "run `python -m benchmarks.pages.pictures`"
