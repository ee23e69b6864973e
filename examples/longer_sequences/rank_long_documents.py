"""Ranks long documents by sentence embeddings, of a model that cuts them off and of the same model made longer.

The documents are modules of Python's standard library. Each is asked for by its docstring, which tells its purpose,
and by the docstring of its last function or class, which is about what stands far behind; both are taken out of the
document first. Printed is the mean reciprocal rank of the module that a docstring belongs to, among all of them.

    ds_sparse adapt ./all-MiniLM-L6-v2 ./minilm-4096 --max-position 4096 --config ds.json
    python examples/longer_sequences/rank_long_documents.py ./all-MiniLM-L6-v2 ./minilm-4096
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from torch.nn.functional import normalize

import ds_sparse  # noqa: F401  registers attn_implementation="ds_sparse"


class Document(NamedTuple):
    text: str
    purpose: str
    """The module's docstring, its first paragraph."""
    detail: str
    """The docstring of the last function or class which has one."""


class Embedder:
    """Mean of the last hidden states, as all-MiniLM and many others pool; length 1."""

    def __init__(self, folder: str, **how: str):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModel.from_pretrained(folder, **how).eval()
        self.tokens = self.tokenizer.model_max_length

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> torch.Tensor:
        batches = (self.tokenizer(text, truncation=True, return_tensors="pt") for text in texts)  # one each: no padding
        means = [self.model(**batch).last_hidden_state[0].mean(0) for batch in batches]
        return normalize(torch.stack(means), dim=-1)

    def count(self, text: str) -> int:
        return len(self.tokenizer(text, truncation=False, verbose=False)["input_ids"])


def documents(folder: Path) -> Iterator[Document]:
    """The modules in a folder that have both docstrings, in the order of their names."""
    for path in sorted(folder.glob("*.py")):
        source = path.read_text(errors="replace")
        tree = ast.parse(source)
        inner = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        told = [node for node in inner if len(ast.get_docstring(node) or "") > 60]
        if told and ast.get_docstring(tree):
            last = max(told, key=lambda node: node.lineno)
            lines = source.splitlines()
            of_docstrings = [range(node.body[0].lineno, node.body[0].end_lineno + 1) for node in (tree, last)]
            kept = (line for number, line in enumerate(lines, 1) if not any(number in one for one in of_docstrings))
            text = "\n".join(line for line in kept if line.strip())
            yield Document(text, *(ast.get_docstring(node).split("\n\n")[0] for node in (tree, last)))


def mean_reciprocal_rank(queries: torch.Tensor, candidates: torch.Tensor) -> float:
    """The candidate of a query is at its own place; ranks are by cosine. Both (N, hidden), of length 1."""
    scores = queries @ candidates.T
    ranks = 1 + (scores > scores.diagonal()[:, None]).sum(1)
    return (1 / ranks).mean().item()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("original", help="folder of the model that cuts documents off")
    parser.add_argument("adapted", help="folder that ds_sparse adapt has written")
    parser.add_argument("--sources", type=Path, default=Path(sysconfig.get_path("stdlib")), help="folder of modules")
    parser.add_argument("--tokens", type=int, default=2048, help="documents have at least so many (default: 2048)")
    parser.add_argument("--documents", type=int, default=1000, help="at most so many (default: 1000)")
    args = parser.parse_args(argv)

    original = Embedder(args.original)
    adapted = Embedder(args.adapted, attn_implementation="ds_sparse")
    long = [document for document in documents(args.sources) if original.count(document.text) >= args.tokens]
    long = long[: args.documents]
    if not long:
        parser.error(f"{args.sources} has no module of {args.tokens} tokens or more with docstrings")
    print(f"{len(long)} documents of at least {args.tokens} tokens in {args.sources.name}")
    texts, purposes, details = zip(*long, strict=True)
    print("mean reciprocal rank by       purpose  detail")
    for name, embed in (("original", original), ("adapted", adapted)):
        candidates = embed(texts)
        found = [mean_reciprocal_rank(embed(queries), candidates) for queries in (purposes, details)]
        print(f"  {name:8}, {embed.tokens:5} tokens     {found[0]:.3f}   {found[1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
