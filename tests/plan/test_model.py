from __future__ import annotations

import json

import pytest

from ds_sparse.plan.model import FAMILIES, NAMED, find_model

transformers = pytest.importorskip("transformers")

OWN = {
    "bert-base": transformers.BertConfig(),
    "bert-large": transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
    "modernbert-base": transformers.ModernBertConfig(),
}
SMALL = {
    "model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 100,
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_a_named_model_is_that_of_transformers_defaults(name, tmp_path):
    OWN[name].save_pretrained(tmp_path)
    changes = {"tied": True} if name == "modernbert-base" else {}
    assert find_model(str(tmp_path), name=name, **changes) == NAMED[name]


@pytest.mark.parametrize(
    "name, file", [("bing_bert-base", "bing_bert/bert_base"), ("neox-small", "gpt_neox/neox_small")]
)
def test_a_model_of_the_examples_is_that_of_its_file(name, file, request):
    path, own = str(request.config.rootpath / "examples" / f"{file}.json"), NAMED[name]
    given = "gpt_neox" if name == "neox-small" else None  # the other file says what it is
    assert find_model(path, given, name=name, positions=own.positions, dropout=None) == own


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"model_type": "t5"}, f'model_type is "t5"; plan knows {", ".join(list(FAMILIES)[:-1])} and llama.'),
        ({"model_type": None}, "model_type is null; plan knows"),
        ({"vocab_size": None}, "the key 'vocab_size' is missing; a config.json of bert has it."),
        ({"hidden_size": "64"}, 'a size is no number: hidden_size is "64".'),
        ({"num_attention_heads": 5}, "hidden_size 64 is not a multiple of 5 heads."),
    ],
)
def test_a_file_that_says_too_little_ends_in_a_sentence(changes, sentence, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in (SMALL | changes).items() if value is not None}))
    with pytest.raises(ValueError) as raised:
        find_model(str(path))
    assert str(raised.value).startswith(f"--model {path}: {sentence}")
