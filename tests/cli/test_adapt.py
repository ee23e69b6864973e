import json

import pytest
import transformers
from tokenizers import Tokenizer, models

from ds_sparse.cli import main

SIZES = {"vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With a dense checkpoint and a DeepSpeed JSON, and left as it is by what a command refuses."""
    monkeypatch.chdir(tmp_path)
    transformers.BertModel(transformers.BertConfig(**SIZES, max_position_embeddings=64)).save_pretrained("dense")
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained("dense")
    (tmp_path / "ds.json").write_text(json.dumps({"sparse_attention": {"mode": "bslongformer", "block": 16}}))
    (tmp_path / "dense.json").write_text("{}")
    (tmp_path / "wrong.json").write_text(json.dumps({"sparse_attention": {"mode": "fixd"}}))
    return tmp_path


def test_a_checkpoint_is_continued_at_a_longer_length(folder, capsys):
    assert main(["adapt", "dense", "long", "--max-position", "256", "--config", "ds.json"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "ds_sparse: extended position embeddings from 64 to 256 tokens.",
        "ds_sparse: updated tokenizer model maximum length to 256.",
        "1 attention layer made sparse: BSLongformerSparsityConfig, block 16, density 28.9% at 256 tokens",
        "  encoder.layer.0.attention.self  BertSelfAttention, sdpa  ->  BertSelfAttention, ds_sparse",
        'long: saved. Load it with attn_implementation="ds_sparse".',
    ]
    assert "Loading weights" not in printed.err
    model = transformers.AutoModel.from_pretrained("long", attn_implementation="ds_sparse")
    assert model.config.sparse_attention["mode"] == "bslongformer" and model.config.max_position_embeddings == 256


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["dense", "dense", "--config", "ds.json"], "dense: there is something already, and nothing is overwritten"),
        (["dense", "long", "--config", "no.json"], "no.json: no such file"),
        (
            ["dense", "long", "--config", "dense.json"],
            "dense.json: no sparse_attention block, so there is no structure",
        ),
        (["dense", "long", "--config", "wrong.json"], 'wrong.json: sparse_attention.mode: got "fixd"'),
        (["dnse", "long", "--config", "ds.json"], "dnse: no such folder, and no model of this name in the hub's cache"),
    ],
)
def test_what_is_refused_is_a_sentence(words, sentence, folder, capsys):
    before = sorted(folder.rglob("*"))
    assert main(["adapt", *words, "--max-position", "256"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(sentence) and printed.err.count("\n") == 1
    assert sorted(folder.rglob("*")) == before


def test_its_help_has_examples_that_it_takes(capsys):
    with pytest.raises(SystemExit) as left:
        main(["adapt", "--help"])
    assert left.value.code == 0
    assert "ds_sparse adapt roberta-base roberta-4096 --max-position 4096 --config ds.json" in capsys.readouterr().out
