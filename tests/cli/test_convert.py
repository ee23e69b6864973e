import json

import pytest
import transformers
from tokenizers import Tokenizer, models

from ds_sparse.cli import main

SIZES = {"vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With a checkpoint of Longformer."""
    monkeypatch.chdir(tmp_path)
    config = transformers.LongformerConfig(
        **SIZES, max_position_embeddings=258, attention_window=64, sep_token_id=2, pad_token_id=1
    )
    transformers.LongformerModel(config).save_pretrained("longformer")
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained("longformer")
    return tmp_path


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


def test_another_structure_can_be_given(folder, capsys):
    (folder / "ds.json").write_text(json.dumps({"sparse_attention": {"mode": "fixed", "block": 16}}))
    assert main(["convert", "longformer", "roberta", "--config", "ds.json"]) == 0
    assert "FixedSparsityConfig, block 16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["longformer", "longformer"], "longformer: there is something already, and nothing is overwritten"),
        (["longfrmer", "roberta"], "longfrmer: no such folder, and no model of this name in the hub's cache"),
        (["longformer", "roberta", "--config", "no.json"], "no.json: no such file"),
    ],
)
def test_what_is_refused_is_a_sentence(words, sentence, folder, capsys):
    before = sorted(folder.rglob("*"))
    assert main(["convert", *words]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(sentence) and printed.err.count("\n") == 1
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"block_size": 20}, "BigBirdModel has config.block_size 20, and blocks have 8, 16, 32, 64 or 128 tokens"),
        ({"num_random_blocks": -1}, "bigbird: sparse_attention.num_random_blocks: got -1; wanted an integer"),
    ],
)
def test_a_checkpoint_whose_own_structure_there_is_not_is_refused_in_a_sentence(changes, sentence, folder, capsys):
    config = transformers.BigBirdConfig(**SIZES | {"max_position_embeddings": 256, "block_size": 16} | changes)
    transformers.BigBirdModel(config).save_pretrained("bigbird")
    transformers.AutoTokenizer.from_pretrained("longformer").save_pretrained("bigbird")
    capsys.readouterr()  # Transformers' progress
    assert main(["convert", "bigbird", "bert"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(sentence) and printed.count("\n") == 1 and not (folder / "bert").exists()
