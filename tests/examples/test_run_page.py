"""The page at the end of a run, looked at in headless Chromium, and its curves."""

import argparse
from types import SimpleNamespace

import pytest
from browser import chromium
from matplotlib import figure

import run_page
from modeling import BertConfig
from training_run import Outcome, Position, TrainingRun

UNIGRAM = 5.0
CONFIG = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "sparse_attention": {
        "mode": "bigbird", "block": 16, "num_random_blocks": 1, "layers": {"1": {"block": 32}, "2": None},
    },
    "comet": {"api_key": "abc"},
}  # fmt: skip
MODEL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
SPEED = {"tokens_per_second": 2000.0, "model_tflops": 0.5, "mfu": 0.25, "memory_gib": 1.5}
STEPS = [{"step": n, "mlm_loss": 6 - n / 40, "learning_rate": n / 1e5} | SPEED for n in range(1, 41)]
EVALUATED = {"step": 0, "held_out_mlm_loss": 5.5}


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


def ended(folder, name="sparse", step=40, records=(EVALUATED, *STEPS), layout_seed=7):
    args = argparse.Namespace(
        deepspeed_config="<b>.json", config_file="model.json", max_seq_length=256, checkpoint_activations=False
    )
    data = SimpleNamespace(max_predictions_per_seq=38, describe=lambda: "Corpus <stdlib>: 12 documents")
    run = TrainingRun(name, args, CONFIG, BertConfig(**MODEL), data, folder / name)
    return Outcome(run, Position(step, held_out_loss=4.25, layout_seed=layout_seed), list(records))


def write(folder, *outcomes):
    run_page.draw_curves(folder / "loss.png", {outcome.run.name: outcome.records for outcome in outcomes}, UNIGRAM)
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    run_page.write_page(folder / "report.html", outcomes, folder / "loss.png", UNIGRAM, "a [MASK] <line>")
    return folder / "report.html"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a comparison."""
    folder = tmp_path_factory.mktemp("page") / "0001"
    (folder / "sparse" / "checkpoints" / "step40").mkdir(parents=True)
    return write(folder, ended(folder), ended(folder, "dense", 14))


def test_it_shows_all_of_a_run_and_asks_for_nothing_from_a_network(browser, page):
    browser.requests.clear()
    browser.call("Page.navigate", url=page.as_uri())
    loaded = "new Promise((done) => { const look = () => document.readyState === 'complete' && "
    frame = "document.querySelector('iframe')"
    assert browser.value(
        f"{loaded} {frame}?.contentDocument?.body?.dataset.drawn ? done(true) : setTimeout(look, 20); look(); }})"
    )
    assert browser.value("document.querySelector('.curves img').naturalWidth") > 500
    layouts = browser.value(f"[...{frame}.contentDocument.getElementById('left').options].map((one) => one.text)")
    assert layouts == ["<b>.json: layers 0", "<b>.json: layers 1"]
    assert '"seed": 7' in browser.value(f"{frame}.contentDocument.querySelector('.about').textContent")
    browser.value("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert '"train_batch_size": 4' in browser.value("document.body.innerText")
    wide = browser.value("document.documentElement.scrollWidth > document.documentElement.clientWidth")
    assert not wide and browser.errors == []
    assert {address.split(":")[0] for address in browser.requests} <= {"file", "about", "data"}


def test_it_has_the_figures_of_each_run_and_no_keys_of_monitors(page):
    text = page.read_text()
    for words in (
        "sparse after 40 steps and dense after 14 steps</", "4.2500", "5.0000", "40,960", "25.0%", "1.50", "step40",
        "a [MASK] &lt;line&gt;", "Corpus &lt;stdlib&gt;: 12 documents", "ds_sparse", "CPU:", "hidden_size",
    ):  # fmt: skip
        assert words in text, words
    assert "api_key" not in text


def test_the_picture_has_each_curve_of_each_run(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path, dpi: drawn.append(self))
    run_page.draw_curves(tmp_path / "loss.png", {"sparse": [EVALUATED, *STEPS], "dense": [EVALUATED]}, UNIGRAM)
    curves = [{line.get_label(): line.get_xydata().tolist() for line in panel.lines} for panel in drawn[0].axes]
    kinds = (*(f"{run}, {part}" for part in ("training", "held out") for run in ("sparse", "dense")),)
    assert [*curves[0]] == [*kinds, "unigram cross-entropy, held out"]
    assert curves[0]["sparse, training"] == [[step["step"], step["mlm_loss"]] for step in STEPS]
    assert curves[0]["dense, held out"] == [[0, 5.5]]
    assert [panel.get_ylim()[0] for panel in drawn[0].axes[1:]] == [0, 0]
    assert curves[1]["sparse"][-1] == [40, 40 / 1e5] and curves[2]["sparse"][-1] == [40, 2000]


def test_a_dense_run_without_figures_says_so(tmp_path):
    one = ended(tmp_path, "dense", records=[EVALUATED], layout_seed=None)
    figures = run_page.figures_of(one, UNIGRAM)
    assert figures["tokens/s, median step"] == figures["checkpoints"] == "-"
    assert "Attention is dense: there is no layout." in write(tmp_path, one).read_text()
