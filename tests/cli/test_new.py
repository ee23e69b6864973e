import json

import pytest

from ds_sparse import load_config, parse_sparse_attention
from ds_sparse.cli import main
from ds_sparse.sparsity import sparsity_class, sparsity_modes
from ds_sparse.sparsity._fields import json_fields


@pytest.fixture
def new(tmp_path):
    """Writes a file with options, and returns its path."""

    def write(*options):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        assert main(["new", str(path), *options]) == 0
        return path

    return write


@pytest.mark.parametrize("mode", sparsity_modes())
def test_the_file_of_each_mode_passes_check_and_has_every_key_with_its_comment(mode, new, capsys):
    path = new("--mode", mode, "--block", "32")
    said = capsys.readouterr().out
    assert main(["check", str(path)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.startswith(said.removesuffix(".\n")), "the same density"
    block = load_config(path).block
    notices = (block.get("attention") == "unidirectional") + (mode in ("nsa", "indexer"))
    assert out.count("\n") == 1 + notices, "no notice but those about that, and about parameters"
    assert block.keys() == {"mode", *json_fields(sparsity_class(mode))}
    lines = [line.strip() for line in path.read_text().splitlines()]
    assert all(lines[lines.index(line) - 1].startswith("# ") for line in lines if line.startswith('"'))
    for field in json_fields(sparsity_class(mode)).values():
        assert field.description in " ".join(line.removeprefix("# ") for line in lines)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("zero", ["0", "1", "2", "3"])
def test_deepspeed_takes_every_precision_with_every_stage(dtype, zero, new, capsys):
    path = new("--dtype", dtype, "--zero", zero)
    capsys.readouterr()
    assert main(["check", str(path)]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    config = load_config(path).deepspeed
    assert {key for key in config if key in ("bf16", "fp16")} == {dtype} - {"fp32"}
    assert config["zero_optimization"] == {"stage": int(zero)}


def test_the_length_and_the_heads_give_the_density_that_is_said(new, capsys):
    heads = ("--set", "different_layout_per_head=true", "--set", "num_random_blocks=3")
    path = new("--mode", "bigbird", "--block", "16", "--seq", "512", "--heads", "5", *heads)
    layout = parse_sparse_attention(load_config(path).block, 5).make_layout(512)
    said = f"density {layout.double().mean():.1%} at 512 tokens"
    assert said in capsys.readouterr().out and said in path.read_text().replace("\n  # ", " ")


def test_without_comments_it_is_json_as_trainer_and_accelerate_read_it_and_says_the_same(new, capsys):
    commented, plain = new("--mode", "variable"), new("--mode", "variable", "--plain")
    config, block = load_config(commented)
    assert json.loads(plain.read_text()) == {**config, "sparse_attention": block}
    capsys.readouterr()
    assert main(["new", "-", "--mode", "variable", "--plain"]) == 0
    assert capsys.readouterr().out == plain.read_text()


def test_a_file_that_exists_is_overwritten_only_when_asked_to(new):
    path = new()
    path.write_text("mine")
    assert main(["new", str(path)]) == 1
    assert path.read_text() == "mine"
    assert main(["new", str(path), "--force"]) == 0
    assert load_config(path).block["mode"] == "fixed"


def test_what_is_wrong_is_a_sentence_and_nothing_is_written(tmp_path, capsys):
    assert main(["new", str(tmp_path / "ds.json"), "--mode", "bigbrid"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and 'Did you mean "bigbird"?' in err
    assert not list(tmp_path.iterdir())
