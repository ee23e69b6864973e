import json
from pathlib import Path

from ds_sparse.cli import main


def test_it_prints_the_committed_schema(capsys):
    assert main(["schema"]) == 0
    committed = Path(__file__).parents[2] / "configs" / "sparse_attention.schema.json"
    assert capsys.readouterr().out == committed.read_text()
    assert json.loads(committed.read_text())["$defs"]
