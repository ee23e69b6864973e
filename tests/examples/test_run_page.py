"""The page at the end of a run, looked at in headless Chromium, and its curves."""

import argparse
import math
import re
from types import SimpleNamespace

import pytest
from browser import chromium

import run_page
from curves import MOST, curves_svg, draw_loss_curve
from modeling import BertConfig
from training_run import Outcome, Position, TrainingRun

UNIGRAM = 5.0
CONFIG = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "sparse_attention": {
        "mode": "bigbird", "block": 16, "num_random_blocks": 1, "layers": {"1": {"block": 32}, "2": None},
    },
}  # fmt: skip
MODEL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


def ended(folder, name="sparse", step=40, records=None, layout_seed=7):
    args = argparse.Namespace(
        deepspeed_config="<b>.json", config_file="model.json", max_seq_length=256, checkpoint_activations=False
    )
    data = SimpleNamespace(max_predictions_per_seq=38, describe=lambda: "Corpus <stdlib>: 12 documents")
    run = TrainingRun(name, args, CONFIG, BertConfig(**MODEL), data, folder / name)
    position = Position(step, held_out_loss=4.25, layout_seed=layout_seed)
    return Outcome(run, position, records or [{"step": 0, "held_out_mlm_loss": 5.5}, *steps()])


def steps():
    speed = {"tokens_per_second": 2000.0, "model_tflops": 0.5, "mfu": 0.25, "memory_gib": 1.5}
    return [{"step": n, "mlm_loss": 6 - n / 40, "learning_rate": n / 1e5} | speed for n in range(1, 41)]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a comparison, and what was given."""
    folder = tmp_path_factory.mktemp("page") / "0001"
    (folder / "sparse" / "checkpoints" / "step40").mkdir(parents=True)
    (folder / "sparse" / "checkpoints" / "step40" / "state.json").write_text("{}")
    run_page.write_page(
        folder / "report.html",
        [ended(folder), ended(folder, "dense", 14)],
        UNIGRAM,
        "a [MASK] <line>",
    )
    return folder / "report.html"


def test_it_shows_all_of_a_run_and_asks_for_nothing_from_a_network(browser, page):
    browser.requests.clear()
    browser.call("Page.navigate", url=page.as_uri())
    loaded = "new Promise((done) => { const look = () => document.readyState === 'complete' && "
    frame = "document.querySelector('iframe')"
    assert browser.value(
        f"{loaded} {frame}?.contentDocument?.body?.dataset.drawn ? done(true) : setTimeout(look, 20); look(); }})"
    )
    said = browser.value("document.body.innerText")
    for words in (
        "sparse after 40 steps and dense after 14 steps", "4.2500", "5.0000", "40,960", "25.0%", "1.50",
        "step40, 0.0 MiB", "a [MASK] <line>", "Corpus <stdlib>: 12 documents", "ds_sparse", "CPU:", "learning rate",
        "tokens/s", "dense, held out",
    ):  # fmt: skip
        assert words in said, words
    layouts = browser.value(f"[...{frame}.contentDocument.getElementById('left').options].map((one) => one.text)")
    assert layouts == ["<b>.json: layers 0", "<b>.json: layers 1"]
    assert '"seed": 7' in browser.value(f"{frame}.contentDocument.querySelector('.about').textContent")
    browser.value("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    configuration = browser.value("document.body.innerText")
    assert '"train_batch_size": 4' in configuration and '"hidden_size": 32' in configuration
    wide = browser.value("document.documentElement.scrollWidth > document.documentElement.clientWidth")
    assert not wide and browser.errors == []
    assert {address.split(":")[0] for address in browser.requests} <= {"file", "about", "data"}


def test_its_title_has_the_steps_of_each_run(page):
    assert "sparse after 40 steps and dense after 14 steps</" in page.read_text()


def test_keys_of_monitors_are_not_on_the_page():
    given = {"comet": {"api_key": "abc", "project": "p"}, "tokens": "t", "runs": [{"token": "d"}]}
    found = run_page.without_secrets(given)
    gone = "(left out)"
    assert found == {"comet": {"api_key": gone, "project": "p"}, "tokens": "t", "runs": [{"token": gone}]}


def test_a_dense_run_without_figures_says_so(tmp_path):
    one = ended(tmp_path, "dense", records=[{"step": 0, "held_out_mlm_loss": 5.5}], layout_seed=None)
    figures = run_page.figures_of(one, UNIGRAM)
    assert figures["tokens/s, median step"] == figures["checkpoints"] == "-"
    run_page.write_page(tmp_path / "report.html", [one], UNIGRAM, "")
    assert "Attention is dense: there is no layout." in (tmp_path / "report.html").read_text()


RECORDS = [{"step": 0, "held_out_mlm_loss": 2.0}, {"step": 1, "mlm_loss": 1.5}]


def points(svg, run):
    """Points of the longest curve of a run's colour."""
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
