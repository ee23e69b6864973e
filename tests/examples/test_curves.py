"""The curves of a run, as a picture and for its page."""

import math
import re

from curves import MOST, curves_svg, draw_loss_curve

RECORDS = [{"step": 0, "held_out_mlm_loss": 2.0}, {"step": 1, "mlm_loss": 1.5}]


def points(svg, run):
    """Of the longest curve of a run's colour."""
    paths = re.findall(rf'<path d="([^"]*)"[^>]*stroke: {run}', svg)
    return max(len(re.findall("[ML]", path)) for path in paths)


def test_the_loss_curve_is_a_picture_of_all_runs(tmp_path):
    draw_loss_curve(tmp_path / "loss.png", {"sparse": RECORDS, "dense": RECORDS}, unigram=1.0)
    draw_loss_curve(tmp_path / "loss.png", {"sparse": []}, unigram=1.0)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_a_page_has_loss_learning_rate_and_speed_of_each_run():
    speed = [{"step": n, "learning_rate": 1e-3, "tokens_per_second": 100 * (n % 2)} for n in range(1, 31)]
    svg = curves_svg({"sparse": [*RECORDS, *speed], "dense": RECORDS}, unigram=1.0)
    for words in ("sparse, training", "dense, held out", "unigram cross-entropy", "learning rate", "tokens/s"):
        assert words in svg
    assert points(svg, "#1f77b4") == 30
    assert svg == curves_svg({"sparse": [*RECORDS, *speed], "dense": RECORDS}, unigram=1.0)


def test_a_long_run_does_not_make_a_large_page():
    long = [{"step": n, "mlm_loss": math.sin(n) + n % 7} for n in range(1, 20 * MOST)]
    assert 100 < points(curves_svg({"sparse": long}, unigram=1.0), "#1f77b4") <= MOST
