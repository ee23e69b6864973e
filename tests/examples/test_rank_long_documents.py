import runpy
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import ds_sparse

SCRIPT = Path(__file__).parents[2] / "examples" / "longer_sequences" / "rank_long_documents.py"
MODULE = '''"""Purpose of {name}.

More about it.
"""

def first():
    """Short."""

def second():
    """What the second function of {name} does, in more than sixty characters.

    And more.
    """
    return "{name}"
'''


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in ("apples", "pears"):
        (folder / f"{name}.py").write_text(MODULE.format(name=name))
    (folder / "plain.py").write_text("x = 1\n")
    return folder


def test_documents_are_without_what_they_are_asked_for_by(script, sources):
    apples, pears = script["documents"](sources)
    assert apples.purpose == "Purpose of apples."
    assert pears.detail == "What the second function of pears does, in more than sixty characters."
    assert "Purpose" not in apples.text and "What the second" not in apples.text
    assert apples.text.splitlines()[-1] == '    return "apples"'


def test_the_mean_reciprocal_rank(script):
    candidates = torch.eye(3)
    queries = torch.tensor([[1.0, 0.5, 0.0], [0.5, 0.2, 0.0], [0.1, 0.2, 0.0]])
    assert script["mean_reciprocal_rank"](queries, candidates) == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)


def test_both_models_are_printed(script, sources, tmp_path, capsys):
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "apples": 1, "pears": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    sizes = {"vocab_size": 3, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=16, max_position_embeddings=16)
    transformers.BertModel(config).save_pretrained(tmp_path / "short")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=16)
    tokenizer.save_pretrained(tmp_path / "short")
    block = {"mode": "dense", "block": 16}
    ds_sparse.adapt(tmp_path / "short", tmp_path / "long", max_position=64, sparsity_config=block)
    capsys.readouterr()
    script["main"]([str(tmp_path / "short"), str(tmp_path / "long"), "--sources", str(sources), "--tokens", "9"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 documents of at least 9 tokens in sources"
    assert lines[2].startswith("  original,    16 tokens") and lines[3].startswith("  adapted ,    64 tokens")
