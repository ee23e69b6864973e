import pytest

from ds_sparse.cli import main


def test_families_that_are_asked_for(capsys):
    assert main(["families", "ALBERT", "CLIP"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("ALBERT: sparse; on Transformers' attention interface.\nCLIP: sparse, part stays dense; ")
    assert "CLIPTextModel is causal" in out and max(map(len, out.splitlines())) <= 100
    assert main(["families", "--markdown", "ALBERT"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "| family | what happens | why |"


@pytest.mark.parametrize("family", ["Bert", "x"])
def test_an_unknown_family_is_a_sentence(capsys, family):
    assert main(["families", family]) == 1
    assert capsys.readouterr().err.startswith(f"ds_sparse families: '{family}' is none of BERT, RoBERTa, ")
