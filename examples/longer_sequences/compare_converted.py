"""Says how far a converted model is from the Longformer or BigBird that it was made of, on texts of your own.

For each text: the cosine of the two embeddings (the means over tokens), and the distance of the last hidden states,
relative to the original's. Both models evaluate; texts are cut at the longest sequence, and shorter ones padded to it,
since a BigBird's last block is where a sequence ends.

    ds_sparse convert ./longformer ./roberta
    python examples/longer_sequences/compare_converted.py ./longformer ./roberta a.txt b.txt
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import cosine_similarity

import ds_sparse  # noqa: F401  registers attn_implementation="ds_sparse"


@torch.no_grad()
def differences(original: Any, converted: Any, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """The cosine of the means of hidden states, and their relative distance."""
    kept = batch["attention_mask"][0] != 0
    truth, ours = (model(**batch).last_hidden_state[0, kept].double() for model in (original, converted))
    return cosine_similarity(truth.mean(0), ours.mean(0), dim=0).item(), ((ours - truth).norm() / truth.norm()).item()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("original", help="folder of the Longformer or BigBird")
    parser.add_argument("converted", help="folder that ds_sparse convert has written")
    parser.add_argument("texts", nargs="+", type=Path, metavar="text", help="files")
    args = parser.parse_args(argv)

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.converted)
    original = transformers.AutoModel.from_pretrained(args.original).eval()
    converted = transformers.AutoModel.from_pretrained(args.converted, attn_implementation="ds_sparse").eval()
    longest = converted.config.sparse_attention_max_seq_length
    rows = []
    for path in args.texts:
        how = {"truncation": True, "max_length": longest, "padding": "max_length", "return_tensors": "pt"}
        batch = tokenizer(path.read_text(errors="replace"), **how)
        rows.append(differences(original, converted, {name: batch[name] for name in ("input_ids", "attention_mask")}))
        print(f"{path.name}: {int(batch['attention_mask'].sum())} tokens, cosine {rows[-1][0]:.5f}, "
              f"distance {rows[-1][1]:.2%}", flush=True)  # fmt: skip
    cosines, distances = zip(*rows, strict=True)
    print(f"least cosine {min(cosines):.5f}, greatest distance {max(distances):.2%}")


if __name__ == "__main__":
    main()
