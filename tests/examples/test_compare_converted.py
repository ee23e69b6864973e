import runpy
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import ds_sparse

SCRIPT = Path(__file__).parents[2] / "examples" / "longer_sequences" / "compare_converted.py"
SIZES = {"vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.parametrize("window, equal", [(256, True), (8, False)])
def test_how_far_a_converted_model_is_is_printed(window, equal, tmp_path, capsys):
    config = transformers.LongformerConfig(
        **SIZES,
        max_position_embeddings=66,
        attention_window=window,
        pad_token_id=1,
        sep_token_id=2,
        initializer_range=1.0,
    )
    transformers.LongformerModel(config).save_pretrained(tmp_path / "longformer")
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 1, "a": 3, "b": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    tokenizer.save_pretrained(tmp_path / "longformer")
    ds_sparse.convert(tmp_path / "longformer", tmp_path / "roberta")
    (tmp_path / "text.txt").write_text("a b a c " * 12)
    capsys.readouterr()
    names = ("longformer", "roberta", "text.txt")
    runpy.run_path(str(SCRIPT))["main"]([str(tmp_path / name) for name in names])
    of_text, worst = capsys.readouterr().out.splitlines()
    assert of_text.startswith("text.txt: 48 tokens, cosine ")
    assert worst.endswith("distance 0.00%") is equal
