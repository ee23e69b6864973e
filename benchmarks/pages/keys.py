"""Tables of the JSON's keys, from the fields of structures."""

import json

from ds_sparse.sparsity._fields import json_fields
from ds_sparse.sparsity._registry import sparsity_class


def table(mode: str) -> str:
    """The keys that a mode adds; of "dense", which adds none, those of every mode."""
    fields = json_fields(sparsity_class(mode))
    if mode != "dense":
        fields = {name: field for name, field in fields.items() if name not in json_fields(sparsity_class("dense"))}
    rows = [
        f"| `{name}` | `{json.dumps(field.get_default(call_default_factory=True))}` | {field.description} |"
        for name, field in fields.items()
    ]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])
