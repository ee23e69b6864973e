"""Genomes: bases of FASTA files as tokens, genes of GFF3 files, and which sequences are held out."""

from __future__ import annotations

import gzip
import lzma
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TextIO

import numpy as np

PAD, MASK, N, A, C, G, T = range(7)
"""Tokens, one a base; N is any base that is not known. Nothing is padded, but models keep token 0 for padding."""

VOCABULARY = 8

TOKEN_OF: np.ndarray = np.full(256, N, np.uint8)
"""A byte of a FASTA file to its token."""
for token, letters in ((A, b"Aa"), (C, b"Cc"), (G, b"Gg"), (T, b"Tt")):
    TOKEN_OF[list(letters)] = token

OUTSIDE, FORWARD, REVERSE, BOTH = range(4)
"""Classes of a base: in no gene, in one on the strand "+", in one on "-". `BOTH` is no class: such a base counts
nowhere."""

CLASSES, STRANDS = 3, {"+": FORWARD, "-": REVERSE}

HELD_OUT_EVERY = 5
"""The last of so many sequences of a genome is held out."""

HELD_OUT_SHARE = 0.1
"""Held-out end of each sequence where a genome has fewer."""

INSTALLED = Path("/usr/share/doc")
"""The folder in which Debian's packages of examples put their files."""

PACKAGES: dict[str, tuple[str, ...]] = {
    "ustilago-maydis": (
        "maffilter/examples/Umaydis/Umaydis.fasta.gz",
        "maffilter/examples/Umaydis/Umaydis.gff3.gz",
    ),
    "human-x": ("smalt/test/data/hs37chrXtrunc.fa.gz",),
    "plasmodium-falciparum": ("smalt/test/data/genome_1.fa.gz",),
    "plasmodium-knowlesi": ("smalt/test/data/cigar_ref.fa.gz",),
}
"""Genomes of maffilter-examples, whose genes are known, and smalt-examples: a FASTA file and perhaps a GFF3 file."""

OPENED_BY: dict[str, Callable[..., TextIO]] = {".gz": gzip.open, ".xz": lzma.open}
FASTA, GFF3 = (".fa", ".fasta"), ".gff3"


@dataclass(frozen=True)
class Gene:
    """Bases `start` to `end` (half open, from 0) of a sequence, introns too, on the strand "+" or "-"."""

    start: int
    end: int
    strand: str


@dataclass(frozen=True, eq=False)
class Contig:
    """A sequence of a genome, (bases,) tokens in uint8, and its genes; those of others are not known."""

    name: str
    bases: np.ndarray
    genes: Sequence[Gene] = ()
    is_annotated: bool = False

    @cached_property
    def labels(self) -> np.ndarray:
        """The class of each base, uint8, introns included."""
        labels: np.ndarray = np.zeros(len(self.bases), np.uint8)
        for gene in self.genes:
            labels[gene.start : gene.end] |= STRANDS[gene.strand]
        return labels

    def part(self, start: int, end: int) -> Contig:
        """Some bases, with the genes that lie in them whole."""
        inside = (gene for gene in self.genes if start <= gene.start and gene.end <= end)
        genes = [Gene(gene.start - start, gene.end - start, gene.strand) for gene in inside]
        return Contig(f"{self.name}:{start + 1}-{end}", self.bases[start:end], genes, self.is_annotated)


def split(contigs: Sequence[Contig], least: int) -> tuple[list[Contig], list[Contig]]:
    """Training and held-out sequences: every fifth is held out, in the order of the file; the end of each where there
    are fewer than five, as far as both parts have `least` bases."""
    if len(contigs) >= HELD_OUT_EVERY:
        held_out = list(contigs[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
        return [one for one in contigs if one not in held_out], held_out
    cuts = [(one, len(one.bases) - max(least, round(HELD_OUT_SHARE * len(one.bases)))) for one in contigs]
    long = [(one, cut) for one, cut in cuts if cut >= least]
    return [one.part(0, cut) for one, cut in long], [one.part(cut, len(one.bases)) for one, cut in long]


def in_order(genes: Iterable[Gene]) -> list[Gene]:
    return sorted(genes, key=lambda gene: (gene.start, gene.end, gene.strand))


@dataclass(frozen=True)
class Files:
    """Files of a genome: FASTA, and GFF3 where its genes are known."""

    name: str
    fasta: Path
    gff3: Path | None = None


def installed_genomes(root: Path = INSTALLED) -> list[Files]:
    """The files of those of `PACKAGES` that are installed.

    Raises:
        ValueError: the one that has genes is not.
    """
    found = {name: [root / path for path in paths] for name, paths in PACKAGES.items()}
    files = [Files(name, *paths) for name, paths in found.items() if all(path.is_file() for path in paths)]
    if not any(one.gff3 for one in files):
        raise ValueError(
            "The genome of Ustilago maydis with its genes is in Debian's package maffilter-examples, which is not "
            "installed: apt-get install maffilter-examples (smalt-examples has three more genomes), or give a folder "
            "of your own with --genomes."
        )
    return files


def genomes_of_folder(folder: Path) -> list[Files]:
    """Every FASTA file of a folder, with the GFF3 file of the same name.

    Raises:
        ValueError: it has no FASTA file with its genes.
    """
    there = sorted(folder.iterdir()) if folder.is_dir() else []
    names = {Path(path.stem if path.suffix in OPENED_BY else path.name): path for path in there}
    paths = {(name.stem, name.suffix): path for name, path in names.items()}
    found = [Files(stem, path, paths.get((stem, GFF3))) for (stem, suffix), path in paths.items() if suffix in FASTA]
    if not any(files.gff3 for files in found):
        raise ValueError(
            f"--genomes {folder} has {len(found)} FASTA files and no genes for them: give NAME.fa or NAME.fasta with "
            f"NAME{GFF3} beside it; each may end in {' or '.join(OPENED_BY)}."
        )
    return found


def read_genome(files: Files, least: int) -> tuple[list[Contig], list[Contig]]:
    """Training and held-out sequences of a genome; those of fewer than `least` bases are left out.

    Raises:
        ValueError: genes lie on no sequence of the genome.
    """
    genes = read_gff3(files.gff3) if files.gff3 else {}
    bases = read_fasta(files.fasta)
    for name, of_name in genes.items():
        if of_name[-1].end > len(bases.get(name, ())):
            raise ValueError(f"{files.gff3} has genes on {name} that do not lie on that sequence of {files.fasta}.")
    long = {name: tokens for name, tokens in bases.items() if len(tokens) >= least}
    return split([Contig(name, tokens, genes.get(name, ()), bool(genes)) for name, tokens in long.items()], least)


def read_fasta(path: Path) -> dict[str, np.ndarray]:
    """Sequences by name, the first word after ">"; of MAF's SPECIES:NAME:START:STRAND:LENGTH the second part."""
    found = {}
    for record in "\n".join(["", *read_lines(path)]).split("\n>")[1:]:
        heading, *lines = record.split("\n")
        parts = heading.split()[0].split(":")
        name = parts[1] if len(parts) == 5 else heading.split()[0]
        found[name] = TOKEN_OF[np.frombuffer("".join(lines).encode("ascii", "replace"), np.uint8)]
    return found


def read_gff3(path: Path) -> Mapping[str, list[Gene]]:
    """The genes of each sequence in the order of their start: features "gene", or "mRNA" where a file has none; of
    several mRNAs with the same ends and strand, one."""
    by_type: dict[str, dict[str, set[Gene]]] = defaultdict(lambda: defaultdict(set))
    for line in read_lines(path):
        if not line.startswith("#"):
            name, _, kind, start, end, _, strand, *_ = line.split("\t")
            if strand in STRANDS:
                by_type[kind][name].add(Gene(int(start) - 1, int(end), strand))
    return {name: in_order(genes) for name, genes in (by_type["gene"] or by_type["mRNA"]).items()}


def read_lines(path: Path) -> Iterator[str]:
    """Lines that are not empty, of a file that its name says how to open."""
    with OPENED_BY.get(path.suffix, open)(path, "rt", encoding="ascii", errors="replace") as text:
        yield from filter(None, (line.rstrip("\r\n") for line in text))


SEQUENCES, BASES, GENE, GAP = 5, 4096, 360, 300
"""The genome that `write_genome` makes up: so many bases, with a gene of `GENE` after about every `GAP`."""

CODONS = [f"G{second}{third}" for second in "ACGT" for third in "GC"]
"""Codons of its genes, which say their strand; the rest is mostly A and T."""


def write_genome(folder: Path) -> None:
    """Writes made_up.fa and made_up.gff3 into a folder, the same at every call: for a run that needs no package."""
    generator = np.random.default_rng(0)
    fasta, gff3 = "", "##gff-version 3\n"
    for number in range(1, SEQUENCES + 1):
        bases = ""
        while len(bases) < BASES - GENE - 2 * GAP:
            gap = generator.integers(GAP // 2, GAP * 3 // 2)
            bases += "".join(generator.choice(list("ACGT"), gap, p=[0.4, 0.1, 0.1, 0.4]))
            strand = "+-"[generator.integers(2)]
            gff3 += f"chr{number}\tmade_up\tgene\t{len(bases) + 1}\t{len(bases) + GENE}\t.\t{strand}\t.\tID=gene\n"
            gene = "ATG" + "".join(generator.choice(CODONS, GENE // 3 - 2)) + "TAA"
            bases += gene if strand == "+" else gene.translate(str.maketrans("ACGT", "TGCA"))[::-1]
        fasta += f">chr{number}\n{bases:T<{BASES}}\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "made_up.fa").write_text(fasta)
    (folder / "made_up.gff3").write_text(gff3)
