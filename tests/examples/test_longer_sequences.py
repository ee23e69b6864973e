"""Programs beside a model that was made longer: how far it is from the original, and how it ranks documents."""

import runpy
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import ds_sparse

SCRIPTS = Path(__file__).parents[2] / "examples" / "longer_sequences"
SIZES = {"vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
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


def save(model, folder, longest):
    """With a tokenizer of few words."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 1, "apples": 3, "pears": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", model_max_length=longest
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


@pytest.mark.parametrize("window, equal", [(256, True), (8, False)])
def test_how_far_a_converted_model_is_is_printed(window, equal, tmp_path, capsys):
    more = {"attention_window": window, "pad_token_id": 1, "sep_token_id": 2, "initializer_range": 1.0}
    config = transformers.LongformerConfig(**SIZES, max_position_embeddings=66, **more)
    save(transformers.LongformerModel(config), tmp_path / "longformer", 64)
    ds_sparse.convert(tmp_path / "longformer", tmp_path / "roberta")
    (tmp_path / "text.txt").write_text("apples pears apples figs " * 12)
    capsys.readouterr()
    names = ("longformer", "roberta", "text.txt")
    runpy.run_path(str(SCRIPTS / "compare_converted.py"))["main"]([str(tmp_path / name) for name in names])
    of_text, worst = capsys.readouterr().out.splitlines()
    assert of_text.startswith("text.txt: 48 tokens, cosine ")
    assert worst.endswith("distance 0.00%") is equal


@pytest.fixture(scope="module")
def ranking():
    return runpy.run_path(str(SCRIPTS / "rank_long_documents.py"))


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in ("apples", "pears"):
        (folder / f"{name}.py").write_text(MODULE.format(name=name))
    (folder / "plain.py").write_text("x = 1\n")
    return folder


def test_documents_are_without_what_they_are_asked_for_by(ranking, sources):
    apples, pears = ranking["documents"](sources)
    assert apples.purpose == "Purpose of apples."
    assert pears.detail == "What the second function of pears does, in more than sixty characters."
    assert "Purpose" not in apples.text and "What the second" not in apples.text
    assert apples.text.splitlines()[-1] == '    return "apples"'


def test_the_mean_reciprocal_rank(ranking):
    queries = torch.tensor([[1.0, 0.5, 0.0], [0.5, 0.2, 0.0], [0.1, 0.2, 0.0]])
    assert ranking["mean_reciprocal_rank"](queries, torch.eye(3)) == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)


def test_both_models_are_printed(ranking, sources, tmp_path, capsys):
    save(transformers.BertModel(transformers.BertConfig(**SIZES, max_position_embeddings=16)), tmp_path / "short", 16)
    block = {"mode": "dense", "block": 16}
    ds_sparse.adapt(tmp_path / "short", tmp_path / "long", max_position=64, sparsity_config=block)
    capsys.readouterr()
    ranking["main"]([str(tmp_path / "short"), str(tmp_path / "long"), "--sources", str(sources), "--tokens", "9"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 documents of at least 9 tokens in sources"
    assert lines[2].startswith("  original,    16 tokens") and lines[3].startswith("  adapted ,    64 tokens")
