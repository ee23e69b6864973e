"""A small genome with genes in it, for a run of seconds that needs no package."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

SEQUENCES, BASES, GENE, GAP = 5, 4096, 360, 300
"""Sequences of so many bases, with a gene of `GENE` after about every `GAP`."""

CODONS = [f"G{second}{third}" for second in "ACGT" for third in "GC"]
"""Of genes, which say their strand; the rest is mostly A and T."""

COMPLEMENT = str.maketrans("ACGT", "TGCA")


def write_genome(folder: Path) -> None:
    """Writes synthetic.fa.gz and synthetic.gff3 into a folder, the same at every call."""
    generator = np.random.default_rng(0)
    fasta, gff3 = [], ["##gff-version 3"]
    for number in range(1, SEQUENCES + 1):
        bases, genes = sequence(generator)
        fasta += [f">chr{number}", *(bases[start : start + 60] for start in range(0, len(bases), 60))]
        gff3 += [
            f"chr{number}\tsynthetic\tgene\t{start + 1}\t{start + GENE}\t.\t{strand}\t.\tID=gene{number}.{start}"
            for start, strand in genes
        ]
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(folder / "synthetic.fa.gz", "wt") as file:
        file.write("\n".join(fasta) + "\n")
    (folder / "synthetic.gff3").write_text("\n".join(gff3) + "\n")


def sequence(generator: np.random.Generator) -> tuple[str, list[tuple[int, str]]]:
    """Bases, and where genes begin on which strand."""
    bases, genes = "", list[tuple[int, str]]()
    while True:
        gap = generator.integers(GAP // 2, GAP * 3 // 2)
        bases += "".join(generator.choice(list("ACGT"), gap, p=[0.4, 0.1, 0.1, 0.4]))
        if len(bases) + GENE > BASES:
            return f"{bases:T<{BASES}}"[:BASES], genes
        strand = "+-"[generator.integers(2)]
        gene = "ATG" + "".join(generator.choice(CODONS, GENE // 3 - 2)) + "TAA"
        genes.append((len(bases), strand))
        bases += gene if strand == "+" else gene.translate(COMPLEMENT)[::-1]
