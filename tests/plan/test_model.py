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


@pytest.mark.parametrize("name", OWN)
def test_a_named_model_is_that_of_transformers_defaults(name, tmp_path):
    OWN[name].save_pretrained(tmp_path)
    found = vars(find_model(str(tmp_path))) | {"name": name}
    if name == "modernbert-base":
        found["tied"] = True
    assert found == vars(NAMED[name])


@pytest.mark.parametrize(
    "name, file", [("bing_bert-base", "bing_bert/bert_base"), ("neox-small", "gpt_neox/neox_small")]
)
def test_a_model_of_the_examples_is_that_of_its_file(name, file, request):
    path = str(request.config.rootpath / "examples" / f"{file}.json")
    found = vars(find_model(path, "gpt_neox" if name == "neox-small" else None))
    own = vars(NAMED[name])
    assert {key for key in own if own[key] != found[key]} <= {"name", "positions"}


def test_fields_are_replaced_where_they_are_given():
    model = find_model("bert-base", dropout=0.0, attention_dropout=None)
    assert (model.dropout, model.attention_dropout) == (0.0, 0.1)


def written(folder, **changes):
    content = {
        "model_type": "bert",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 100,
    } | changes
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return str(path)


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
    path = written(tmp_path, **changes)
    with pytest.raises(ValueError) as raised:
        find_model(path)
    assert str(raised.value).startswith(f"--model {path}: {sentence}")


def test_a_name_that_is_none_is_answered_with_all_names():
    with pytest.raises(ValueError, match="--model bert-bse: no such file, and not one of bert-base, bert-large,"):
        find_model("bert-bse")
