"""Writes the tables of keys of docs/structures.md, from the fields of the structures, between the comments
`<!-- keys: MODE -->` and `<!-- end -->`: .venv/bin/python website/structure_keys.py"""

import json
import re
from pathlib import Path

from ds_sparse.sparsity._fields import json_fields
from ds_sparse.sparsity._registry import sparsity_class

PAGE = Path(__file__).resolve().parent.parent / "docs" / "structures.md"


def table(mode: str) -> str:
    """The keys that a mode adds; of "dense", which adds none, those of all."""
    fields = json_fields(sparsity_class(mode))
    if mode != "dense":
        fields = {name: field for name, field in fields.items() if name not in json_fields(sparsity_class("dense"))}
    rows = [
        f"| `{name}` | `{json.dumps(field.get_default(call_default_factory=True))}` | {field.description} |"
        for name, field in fields.items()
    ]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])


def with_tables(page: str) -> str:
    """The page with all its tables made anew."""
    return re.sub(
        r"<!-- keys: (\w+) -->\n.*?<!-- end -->",
        lambda found: f"<!-- keys: {found[1]} -->\n\n{table(found[1])}\n\n<!-- end -->",
        page,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
