"""`ds_sparse adapt` and `ds_sparse convert`: checkpoints made of others."""

import json

import pytest
import transformers
from tokenizers import Tokenizer, models

from ds_sparse.cli import main

SIZES = {"vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
LONG = ["--max-position", "256", "--config"]


@pytest.fixture
def folder(tmp_path, monkeypatch, capsys):
    """With checkpoints of BERT, Longformer and BigBird, and DeepSpeed JSONs."""
    monkeypatch.chdir(tmp_path)
    bert = transformers.BertConfig(**SIZES, max_position_embeddings=64)
    transformers.BertModel(bert).save_pretrained("dense")
    longformer = transformers.LongformerConfig(
        **SIZES, max_position_embeddings=258, attention_window=64, sep_token_id=2, pad_token_id=1
    )
    transformers.LongformerModel(longformer).save_pretrained("longformer")
    for name, odd in (("bigbird-20", {"block_size": 20}), ("bigbird-1", {"num_random_blocks": -1})):
        config = transformers.BigBirdConfig(**SIZES | {"max_position_embeddings": 256, "block_size": 16} | odd)
        transformers.BigBirdModel(config).save_pretrained(name)
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    for name in ("dense", "longformer", "bigbird-20", "bigbird-1"):
        transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(name)
    blocks = {"ds": {"mode": "bslongformer", "block": 16}, "fixed": {"block": 16}, "wrong": {"mode": "f"}}
    for name, block in blocks.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"sparse_attention": block}))
    (tmp_path / "dense.json").write_text("{}")
    capsys.readouterr()  # Transformers' progress
    return tmp_path


def test_a_checkpoint_is_continued_at_a_longer_length(folder, capsys):
    assert main(["adapt", "dense", "long", *LONG, "ds.json"]) == 0
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


def test_a_longformer_becomes_a_roberta(folder, capsys):
    assert main(["convert", "longformer", "roberta"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("ds_sparse: the projections of global tokens, which differ from those of all tokens")
    assert printed[1:] == [
        "1 attention layer made sparse: BSLongformerSparsityConfig, block 32, density 34.4% at 256 tokens",
        "  encoder.layer.0.attention.self  RobertaSelfAttention, sdpa  ->  RobertaSelfAttention, ds_sparse",
        'roberta: saved. Load it with attn_implementation="ds_sparse".',
    ]
    model = transformers.AutoModel.from_pretrained("roberta", attn_implementation="ds_sparse")
    assert type(model).__name__ == "RobertaModel" and model.config.sparse_attention["block"] == 32
    assert main(["convert", "longformer", "other", "--config", "fixed.json"]) == 0
    assert "FixedSparsityConfig, block 16" in capsys.readouterr().out


NOTHING_THERE = "no such folder, and no model of this name in the hub's cache"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["adapt", "dense", "dense", *LONG, "ds.json"], "dense: there is something already, and nothing is"),
        (["adapt", "dense", "long", *LONG, "no.json"], "no.json: no such file"),
        (["adapt", "dense", "long", *LONG, "dense.json"], "dense.json: no sparse_attention block, so there is no"),
        (["adapt", "dense", "long", *LONG, "wrong.json"], 'wrong.json: sparse_attention.mode: got "f"'),
        (["adapt", "dnse", "long", *LONG, "ds.json"], f"dnse: {NOTHING_THERE}"),
        (["convert", "longformer", "longformer"], "longformer: there is something already, and nothing is overwritten"),
        (["convert", "longfrmer", "roberta"], f"longfrmer: {NOTHING_THERE}"),
        (["convert", "longformer", "roberta", "--config", "no.json"], "no.json: no such file"),
        (
            ["convert", "bigbird-20", "bert"],
            "BigBirdModel has config.block_size 20, and blocks have 8, 16, 32, 64 or 128 tokens",
        ),
        (
            ["convert", "bigbird-1", "bert"],
            "bigbird-1: sparse_attention.num_random_blocks: got -1; wanted an integer",
        ),
    ],
)
def test_what_is_refused_is_a_sentence(words, sentence, folder, capsys):
    before = sorted(folder.rglob("*"))
    assert main(words) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(sentence) and printed.err.count("\n") == 1
    assert sorted(folder.rglob("*")) == before


def test_help_has_examples_that_it_takes(capsys):
    with pytest.raises(SystemExit) as left:
        main(["adapt", "--help"])
    assert left.value.code == 0
    assert (
        "ds_sparse adapt ./all-MiniLM-L6-v2 ./minilm-4096 --max-position 4096 --config ds.json"
        in capsys.readouterr().out
    )
