"""The README's own code does what the README says."""

import json

import pytest
import torch
import transformers
from snippets import ROOT, fenced

import ds_sparse

README = ROOT / "README.md"


def code(word):
    """The Python of the README in which a word stands."""
    (found,) = [snippet.code for snippet in fenced(README) if snippet.language == "python" and word in snippet.code]
    return found


def test_the_block():
    (block,) = [json.loads(snippet.code) for snippet in fenced(README) if snippet.language == "json"]
    layout = ds_sparse.parse_sparse_attention(block["sparse_attention"], num_heads=2).make_layout(1024)
    assert layout.shape == (2, 32, 32)
    assert layout[:, 16].all() and layout[:, :, 16].all()


def test_your_own_script():
    """Its lines are lines of a script on a page, which the page's test starts."""
    scripts = fenced(ROOT / "docs" / "json-and-flag.md")
    (script,) = [snippet.code for snippet in scripts if snippet.title == "train.py"]
    lines = [line.split("  #")[0].rstrip() for line in script.splitlines()]
    assert set(code("initialize").splitlines()) <= set(lines)


def test_old_imports():
    pytest.importorskip("deepspeed")
    names = {}
    exec(code("deepspeed_ops"), names)
    assert names["FixedSparsityConfig"](num_heads=2).make_layout(64).shape == (2, 4, 4)


def test_transformers_model(tmp_path, capsys):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.RobertaConfig(vocab_size=99, max_position_embeddings=130, **sizes)
    transformers.RobertaForMaskedLM(config).save_pretrained(tmp_path)
    names = {"transformers": transformers, "ds_sparse": ds_sparse}
    exec(code("sparsify").replace("roberta-base", str(tmp_path)), names)
    assert "RobertaSelfAttention, ds_sparse" in capsys.readouterr().out
    assert names["model"].config._attn_implementation == "sdpa"


def test_the_operation():
    names = {name: torch.randn(1, 4, 1024, 16) for name in ("query", "key", "value")} | {"ds_sparse": ds_sparse}
    exec(code("block_sparse_attention"), names)
    mask = names["layout"].bool().repeat_interleave(64, 1).repeat_interleave(64, 2)
    operands = names["query"], names["key"], names["value"]
    expected = torch.nn.functional.scaled_dot_product_attention(*operands, attn_mask=mask)
    torch.testing.assert_close(names["out"], expected)
