import json
import re
from pathlib import Path

import pytest
import torch
from layout_pages import data_of
from tokenizers import Tokenizer, models, pre_tokenizers

import ds_sparse
from ds_sparse.cli import main
from ds_sparse.drawing import draw

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def terminal_of_today(monkeypatch):
    monkeypatch.setenv("LC_ALL", "en_US.UTF-8")


def test_a_layout_that_no_memory_holds_is_drawn(monkeypatch, capsys):
    def refuse(*_, rows=None):
        if rows is None:
            raise MemoryError("half a byte")

    monkeypatch.setattr("ds_sparse.sparsity._base.need_memory", refuse)
    assert main(["draw", str(CONFIGS / "bslongformer.json"), "--seq", str(1 << 18), "--heads", "64"]) == 0
    assert capsys.readouterr().out.startswith("all heads: 4096 x 4096 blocks of 64 tokens, density 0.2%")


@pytest.mark.parametrize("columns, tokens, wide", [(40, 8192, 32), (128, 8192, 128), (100, 1024, 96)])
def test_in_a_terminal_the_picture_is_as_wide_and_in_colour(columns, tokens, wide, monkeypatch, capsys):
    pytest.importorskip("rich")
    words = ["draw", str(CONFIGS / "bslongformer.json"), "--seq", str(tokens)]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "\x1b[34m" in shown
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    assert max(len(line) for line in lines if set(line) <= set(" ░▒▓█▀▄")) == wide
    assert max(map(len, lines)) <= columns
    assert re.search("density .*%", lines[0] + lines[1]) and lines[-1].endswith("columns keys")
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    assert main(words) == 0 and "\x1b[" not in capsys.readouterr().out


def test_a_layout_as_a_picture(tmp_path, capsys):
    out = tmp_path / "layout.png"
    assert main(["draw", str(CONFIGS / "bigbird.json"), "--seq", "512", "--heads", "2", "--out", str(out)]) == 0
    assert out.stat().st_size > 1000 and capsys.readouterr().out.endswith(f"drawn to {out}.\n")


BY_LAYER = str(Path(__file__).parent / "transcripts" / "layers.json")


def test_there_is_a_picture_of_every_structure_that_layers_have(tmp_path):
    out = tmp_path / "layout.svg"
    assert main(["draw", BY_LAYER, "--seq", "128", "--out", str(out)]) == 0
    names = [f"layout.{layers}.svg" for layers in ("layers-0-1,4", "layers-2", "other-layers")]
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == names


@pytest.mark.parametrize(
    ("words", "there"),
    [
        (["--out", "a.svg"], ["a.layers-2.svg", "a.other-layers.svg"]),
        (["--out", "a.svg", "--layer", "2"], ["a.svg"]),
        (["--out", "a.html"], ["a.html"]),
    ],
)
def test_a_file_that_exists_is_overwritten_only_when_asked_to(tmp_path, monkeypatch, capsys, words, there):
    monkeypatch.chdir(tmp_path)
    words = ["draw", BY_LAYER, "--seq", "128", *words]
    for name in there:
        Path(name).write_text("mine")
        assert main(words) == 1 and f"{name} is there already" in capsys.readouterr().err
        assert Path(name).read_text() == "mine" and [x.name for x in tmp_path.iterdir()] == [name]
        assert main([*words, "--force"]) == 0 and "mine" not in Path(name).read_text()
        for drawn in tmp_path.glob("a.*"):
            drawn.unlink()


def test_a_file_that_pictures_of_layers_are_only_named_after_is_no_obstacle(tmp_path, capsys):
    kept = tmp_path / "a.svg"
    kept.write_text("mine")
    assert main(["draw", BY_LAYER, "--seq", "128", "--out", str(kept)]) == 0
    assert kept.read_text() == "mine" and len(list(tmp_path.glob("a.*.svg"))) == 3


def test_a_page_has_every_structure_of_every_file(tmp_path, capsys):
    out = tmp_path / "layout.html"
    assert main(["draw", BY_LAYER, str(CONFIGS / "fixed.json"), "--seq", "128", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{BY_LAYER} and {CONFIGS / 'fixed.json'}: drawn to {out}.\n"
    data = data_of(out)
    assert [(sheet["file"], sheet["name"], sheet["block"]) for sheet in data["sheets"]] == [
        ("layers.json", "other layers", 16), ("layers.json", "layers 0-1,4", 16), ("layers.json", "layers 2", 32),
        ("fixed.json", "", 16),
    ]  # fmt: skip
    assert data["sheets"][0]["about"]["mode"] == "dense"
    assert data["notes"] == ["layers.json: layers 3 are null, the model's own dense attention, and have no layout."]
    assert "<h1>layers.json and fixed.json at 128 tokens</h1>" in out.read_text()


def test_a_page_of_one_head_and_one_layer_has_these_alone(tmp_path):
    out = tmp_path / "layout.html"
    assert main(["draw", BY_LAYER, "--seq", "128", "--layer", "4", "--head", "3", "--out", str(out)]) == 0
    (sheet,) = data_of(out)["sheets"]
    assert [head["name"] for head in sheet["heads"]] == ["head 3"] and sheet["about"]["mode"] == "bslongformer"


@pytest.fixture
def checkpoints(tmp_path, monkeypatch, capsys):
    """Folders with a dense decoder, and one that has learned to choose, with a text and a block beside them."""
    transformers, families = pytest.importorskip("transformers"), pytest.importorskip("integrations.families")
    monkeypatch.chdir(tmp_path)
    dense = families.make(families.DECODERS["llama"], vocab_size=11, num_hidden_layers=3)
    dense.save_pretrained("dense")
    config = dense.config
    config.sparse_attention = {"mode": "indexer", "block": 16, "num_chosen_blocks": 2, "index_dim": 8}
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ds_sparse")
    model.save_pretrained("indexer")
    words = Tokenizer(models.WordLevel({"[UNK]": 0, **{c: i for i, c in enumerate("abcdefghij", 1)}}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    for name in ("dense", "indexer"):
        transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(name)
    Path("text.txt").write_text("abcdefghij" * 9)
    block = {"mode": "moba", "block": 16, "num_chosen_blocks": 2, "layers": {"1": None}}
    Path("moba.json").write_text(json.dumps({"sparse_attention": block}))
    Path("fixed.json").write_text(json.dumps({"sparse_attention": {"block": 16}}))
    Path("wrong.json").write_text(json.dumps({"sparse_attention": {"mode": "moba", "blok": 16}}))
    Path("none.json").write_text("{}")
    Path("latin.txt").write_bytes("é".encode("latin-1"))
    capsys.readouterr()
    return model


OF_TEXT = ["--text", "text.txt"]


def test_what_layers_choose_for_a_text_is_drawn(checkpoints, capsys):
    assert main(["draw", "moba.json", "--model", "dense", *OF_TEXT, "--seq", "64", "--head", "1"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0] == "layer 0:" and lines[1].startswith("head 1: 64 x 64 tokens, density ")
    assert [line for line in lines if line.startswith("layer")] == ["layer 0:", "layer 2:"]
    assert lines[2] == "█▄" and lines[9] == "█" * 15 + "▄", "the first block sees itself"
    assert printed.err == ""


def test_a_checkpoint_that_has_learned_to_choose_needs_no_file(checkpoints, capsys):
    ids = torch.tensor([[*range(1, 11)] * 9])
    with torch.no_grad(), ds_sparse.record_choices(checkpoints.eval()) as choices:
        checkpoints(ids)
    assert main(["draw", "--model", "indexer", *OF_TEXT, "--layer", "2"]) == 0
    choice = choices["model.layers.2.self_attn.sparse_attention"]
    assert capsys.readouterr().out == draw(choice.rows(), 1) + "\n"
    assert main(["draw", "--model", "indexer", *OF_TEXT, "--out", "chosen.svg"]) == 0
    assert sorted(path.name for path in Path().glob("*.svg")) == [f"chosen.layer-{n}.svg" for n in range(3)]


def test_in_a_terminal_a_model_that_runs_for_long_has_a_bar(checkpoints, monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("ds_sparse.tools.terminal.BAR_AFTER", 0.01)
    assert main(["draw", "--model", "indexer", *OF_TEXT]) == 0
    assert "run indexer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        ([], 2, "ds_sparse draw: give a DeepSpeed JSON for its layout, or --model and --text"),
        (["--model", "indexer", *OF_TEXT, "--heads", "8"], 2, "ds_sparse draw: --heads 8 beside --model"),
        (["moba.json", *OF_TEXT], 2, "ds_sparse draw: give a DeepSpeed JSON"),
        (["moba.json"], 1, "moba.json: mode moba has no layout: each call chooses its blocks; give --model and --text"),
        (["fixed.json", "--model", "dense", *OF_TEXT], 1, "fixed.json: its layers choose no blocks. Give a file with"),
        (["wrong.json", "--model", "dense", *OF_TEXT], 1, "wrong.json: sparse_attention.blok: unknown key (given 16)"),
        (["fixed.json", "--seq", "99999999999"], 1, "blocks takes about"),
        (["none.json", "--model", "indexer", *OF_TEXT], 1, "none.json: no sparse_attention block; leave it out"),
        (["--model", "dense", *OF_TEXT], 1, "dense: its config has no sparse_attention; give a file with mode moba"),
        (["--model", "indexer", "--text", "no.txt"], 1, "no.txt cannot be read: No such file"),
        (["--model", "indexer", "--text", "latin.txt"], 1, "latin.txt cannot be read: it is no text in UTF-8."),
        (["--model", "indexer", *OF_TEXT, "--layer", "3"], 2, "--layer 3: layers that choose are 0, 1 and 2."),
        (["--model", "indexer", *OF_TEXT, "--head", "4"], 2, "--head 4: there are 4 heads, from 0 to 3."),
        (["--model", "indexer", *OF_TEXT, "--out", "x.html"], 2, "A layout is drawn as .png or .svg, got 'x.html'."),
        (["--model", "indxer", *OF_TEXT], 1, "indxer: no such folder"),
    ],
)
def test_what_cannot_be_drawn_is_said(words, status, sentence, checkpoints, capsys):
    assert main(["draw", *words]) == status
    assert sentence in capsys.readouterr().err
