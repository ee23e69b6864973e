import json

import pytest
from pydantic import Field

from ds_sparse import SparsityConfig, declared, register_sparsity
from ds_sparse.cli import main
from ds_sparse.sparsity import sparsity_class, sparsity_modes
from ds_sparse.sparsity._fields import json_fields


@pytest.fixture(autouse=True)
def terminal_of_today(monkeypatch):
    monkeypatch.setenv("LC_ALL", "en_US.UTF-8")
    monkeypatch.setenv("COLUMNS", "100")


def test_each_mode_has_its_picture_and_its_keys(capsys):
    assert main(["modes"]) == 0
    out = capsys.readouterr().out
    assert out.count("24 x 24 blocks") == len(sparsity_modes()) - 3
    assert out.count("No picture: each call chooses its blocks.") == 3
    for mode in sparsity_modes():
        assert f"\n{mode}\n" in f"\n{out}"
        for key, field in json_fields(sparsity_class(mode)).items():
            assert f"  {key}: " in out
            assert field.description.split(".")[0][:60] in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 100
    assert "\x1b" not in out
    assert out.endswith("\npictures: █ live block, blank: no block; rows are queries, columns keys\n")
    assert out.count("pictures: ") == 1
    assert main(["modes", "moba", "nsa", "indexer"]) == 0
    out = capsys.readouterr().out
    assert "  causal: " in out and "  seed: " not in out and "strict_causal" not in out


def test_modes_that_are_asked_for_have_all_of_their_keys_and_pictures_that_stay(capsys):
    assert main(["modes", "local_sliding_window", "bigbird"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "local_sliding_window"
    assert lines[lines.index("  24 x 24 blocks") + 1 :][:2] == ["  █▄", "   ▀█▄"]
    assert lines.count("  block: default 16; 8, 16, 32, 64 or 128") == 2
    assert '  attention: default "unidirectional"; "bidirectional" or "unidirectional"' in lines
    assert "  24 x 24 blocks, seed 0, num_random_blocks 1" in lines, "a mode that can draw draws"
    assert "  num_random_blocks: default 0; an integer of at least 0" in lines, "that of JSON"
    assert main(["modes", "local_sliding_window", "bigbird"]) == 0
    assert capsys.readouterr().out == out


def test_json_has_the_same_for_programs(capsys):
    assert main(["modes", "--json"]) == 0
    found = {mode["mode"]: mode for mode in json.loads(capsys.readouterr().out)}
    assert list(found) == sparsity_modes()
    assert [mode for mode, said in found.items() if said["default"]] == ["fixed"]
    key = found["fixed"]["keys"]["num_local_blocks"]
    assert (key["takes"], key["required"], key["default"]) == ("an integer of at least 1", False, 4)
    assert key["schema"]["minimum"] == 1 and key["about"] == "Size of a local window in blocks."


@pytest.mark.usefixtures("registry")
def test_a_structure_of_ones_own_is_shown_and_one_without_a_picture_says_why(capsys):
    @register_sparsity("stripes")
    @declared
    class Stripes(SparsityConfig):
        """Columns at equal distances."""

        every: int = Field(kw_only=True, ge=1, description="Columns from one live one to the next.")

        def lay_out(self, h, layout):
            layout[h, :, :: self.every] = 1
            return layout

    assert main(["modes", "stripes"]) == 0
    out = capsys.readouterr().out
    assert "  Columns at equal distances.\n" in out
    assert "  every: required; an integer of at least 1\n" in out
    assert "no picture: the options: sparse_attention.every: missing; wanted an integer of at least 1." in out


def test_an_unknown_mode_is_a_sentence(capsys):
    assert main(["modes", "bigbrid"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("ds_sparse modes: 'bigbrid' is no mode; wanted ")
    assert err.endswith('Did you mean "bigbird"?\n')
