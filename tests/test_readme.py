"""The README's own code does what the README says."""

import json

import pytest
import torch
import transformers
from snippets import ROOT, indented

import ds_sparse

README = (ROOT / "README.md").read_text()


def section(title):
    return README.split(f"## {title}\n")[1].split("\n## ")[0]


@pytest.mark.usefixtures("registry")
def test_write_your_own_structure():
    code, block = indented(section("Write your own structure"))
    exec(code, {"ds_sparse": ds_sparse})
    block = json.loads("{" + block + "}")["sparse_attention"]
    layout = ds_sparse.parse_sparse_attention(block, num_heads=2).make_layout(512)
    assert layout.shape == (2, 16, 16)
    assert (layout[:, :, ::8] == 1).all() and layout.sum() == 2 * 16 * 2
    with pytest.raises(ValueError, match='Did you mean "every"'):
        ds_sparse.parse_sparse_attention(block | {"evry": 4}, num_heads=2)


def test_attention_over_token_pairs():
    names = {"torch": torch, "ds_sparse": ds_sparse}
    (code,) = indented(section("Attention over token pairs"))
    exec(code, names)
    operands = [names[name] for name in ("query", "key", "value")]
    expected = ds_sparse.masked_attention(*operands, names["mask"])
    torch.testing.assert_close(names["out"], expected)
    assert torch.equal(names["same"], names["out"])
    for found, right in zip((x.grad for x in operands), torch.autograd.grad(expected.sum(), operands), strict=True):
        torch.testing.assert_close(found, right)
    scores = (operands[0] @ operands[1].mT).masked_fill(~names["mask"], 0)
    torch.testing.assert_close(names["matrices"].to_dense(), scores)


def test_transformers_models(tmp_path, capsys):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.RobertaConfig(vocab_size=99, max_position_embeddings=130, **sizes)
    transformers.RobertaForMaskedLM(config).save_pretrained(tmp_path)
    first, second = indented(section("Transformers models"))
    names = {"transformers": transformers, "ds_sparse": ds_sparse}
    exec(first.replace("roberta-base", str(tmp_path)), names)
    assert "RobertaSelfAttention, ds_sparse" in capsys.readouterr().out
    assert names["model"].config._attn_implementation == "sdpa"
    ds_sparse.sparsify(names["model"], {"mode": "bslongformer", "block": 32})
    names["model"].save_pretrained(tmp_path)
    sparse, ids = names["model"].eval(), torch.arange(100)[None] % 99
    exec(second, names | {"folder": tmp_path}, names)
    assert names["model"] is not sparse and torch.equal(names["model"].eval()(ids).logits, sparse(ids).logits)


def test_windows():
    attention, parts = indented(section("Windows"))
    names = {name: torch.randn(2, 3, 300, 16) for name in ("query", "key", "value")}
    names |= {"ds_sparse": ds_sparse, "head_dim": 16}
    exec(attention, names)
    in_one = names["out"]
    exec(parts, names)
    assert names["scores"].shape == names["probs"].shape == (2, 3, 300, 257)
    assert in_one.shape == names["out"].shape == (2, 3, 300, 16)
    # The global token is what the parts do not have: beyond its window nothing else differs.
    tokens, mask = torch.arange(300), torch.ones(300, 300).tril(128).triu(-128).bool()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    operands = names["query"], names["key"], names["value"]
    torch.testing.assert_close(names["out"], sdpa(*operands, attn_mask=mask))
    torch.testing.assert_close(in_one, sdpa(*operands, attn_mask=mask | (tokens == 0) | (tokens == 0)[:, None]))
