"""Where the files of genomes are, and what stands in them: bases of FASTA, genes of GFF3."""

from __future__ import annotations

import gzip
import lzma
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from .dna_genomes import TOKEN_OF, Contig, Gene, Genome, in_order, split

INSTALLED = Path("/usr/share/doc")
"""Where Debian's packages of examples put their files."""

ANNOTATED, PLAIN = "maffilter-examples", "smalt-examples"

PACKAGES: dict[str, dict[str, tuple[str, ...]]] = {
    ANNOTATED: {
        "ustilago-maydis": (
            "maffilter/examples/Umaydis/Umaydis.fasta.gz",
            "maffilter/examples/Umaydis/Umaydis.gff3.gz",
        ),
    },
    PLAIN: {
        "human-x": ("smalt/test/data/hs37chrXtrunc.fa.gz",),
        "plasmodium-falciparum": ("smalt/test/data/genome_1.fa.gz",),
        "plasmodium-knowlesi": ("smalt/test/data/cigar_ref.fa.gz",),
    },
}
"""A Debian package to its genomes, each a FASTA file and perhaps a GFF3 file. Genes are those of `ANNOTATED`."""

OPENED_BY: dict[str, Callable[..., TextIO]] = {".gz": gzip.open, ".xz": lzma.open}
FASTA, GFF3 = (".fa", ".fasta"), ".gff3"


@dataclass(frozen=True)
class Files:
    """Of a genome: a FASTA file, and a GFF3 file where its genes are known."""

    name: str
    fasta: Path
    gff3: Path | None = None


def installed_genomes(root: Path = INSTALLED) -> list[Files]:
    """The files of those of `PACKAGES` that are installed.

    Raises:
        ValueError: the one that has genes is not.
    """
    found = [
        Files(name, *(root / path for path in paths))
        for genomes in PACKAGES.values()
        for name, paths in genomes.items()
        if all((root / path).is_file() for path in paths)
    ]
    if not any(files.gff3 for files in found):
        raise ValueError(
            f"The genome of Ustilago maydis with its genes is in Debian's package {ANNOTATED}, which is not installed: "
            f"apt-get install {ANNOTATED} ({PLAIN} has three more genomes), or give a folder of your own with "
            "--genomes."
        )
    return found


def genomes_of_folder(folder: Path) -> list[Files]:
    """Every FASTA file of a folder, with the GFF3 file of the same name.

    Raises:
        ValueError: there is no such folder, it has no FASTA file, or none of them has its genes.
    """
    if not folder.is_dir():
        raise ValueError(f"--genomes {folder}: there is no such folder.")
    paths = {(stem_of(path), suffix_of(path)): path for path in sorted(folder.iterdir())}
    found = [Files(stem, path, paths.get((stem, GFF3))) for (stem, suffix), path in paths.items() if suffix in FASTA]
    if not any(files.gff3 for files in found):
        raise ValueError(
            f"--genomes {folder} has {len(found)} FASTA files and no genes for them: give NAME.fa or NAME.fasta with "
            f"NAME{GFF3} beside it; each may end in {' or '.join(OPENED_BY)}."
        )
    return found


def suffix_of(path: Path) -> str:
    """The ending that says what a file holds, whichever way it is compressed."""
    return Path(path.stem if path.suffix in OPENED_BY else path.name).suffix


def stem_of(path: Path) -> str:
    return Path(path.stem if path.suffix in OPENED_BY else path.name).stem


def open_text(path: Path) -> TextIO:
    return OPENED_BY.get(path.suffix, open)(path, "rt", encoding="ascii", errors="replace")


def read_genome(files: Files, least: int) -> Genome:
    """Reads and splits a genome; sequences of fewer than `least` bases are left out.

    Raises:
        ValueError: a file is none of its kind, or no sequence is as long.
    """
    genes = read_gff3(files.gff3) if files.gff3 else {}
    bases = read_fasta(files.fasta)
    unknown = [name for name in genes if name not in bases]
    if unknown:
        raise ValueError(
            f"{files.gff3} has genes on {unknown[0]}, and {files.fasta} has no such sequence: it has "
            f"{', '.join(list(bases)[:3])} ... Give the genome that these genes are of."
        )
    for name, of_name in genes.items():
        for gene in of_name:
            if not 0 <= gene.start < gene.end <= len(bases[name]):
                raise ValueError(
                    f"{files.gff3} has a gene from {gene.start + 1} to {gene.end} on {name}, which has "
                    f"{len(bases[name]):,} bases; give genes that lie on it."
                )
    contigs = [Contig(name, tokens, genes.get(name, ())) for name, tokens in bases.items() if len(tokens) >= least]
    if not contigs:
        raise ValueError(f"{files.fasta} has no sequence of {least:,} bases, which the longest arm sees at once.")
    return split(files.name, contigs, least)


def read_fasta(path: Path) -> dict[str, np.ndarray]:
    """Sequences by name, the first word after ">"; of a name in MAF's manner, SPECIES:NAME:START:STRAND:LENGTH, NAME.

    Raises:
        ValueError: the file is no FASTA, or two of its sequences have one name.
    """
    found: dict[str, np.ndarray] = {}
    for name, lines in records(path):
        if name in found:
            raise ValueError(f"{path} has two sequences called {name}; name them apart.")
        found[name] = TOKEN_OF[np.frombuffer("".join(lines).encode("ascii", "replace"), np.uint8)]
    return found


def records(path: Path) -> Iterator[tuple[str, list[str]]]:
    name, lines = "", list[str]()
    for line in read_lines(path):
        if line.startswith(">"):
            if name:
                yield name, lines
            name, lines = name_of(line), []
        elif not name:
            raise ValueError(f"{path} is no FASTA: its first line is {line[:40]!r}, and does not begin with '>'.")
        else:
            lines.append(line)
    if not name:
        raise ValueError(f"{path} is no FASTA: it is empty.")
    yield name, lines


def name_of(line: str) -> str:
    word = line[1:].split()[0] if line[1:].split() else "unnamed"
    parts = word.split(":")
    return parts[1] if len(parts) == 5 else word


def read_gff3(path: Path) -> Mapping[str, list[Gene]]:
    """The genes of each sequence in the order of their start: features "gene", or "mRNA" where a file has none; of
    several mRNAs with the same ends and strand, one.

    Raises:
        ValueError: a line is none of GFF3, or no feature is a gene.
    """
    by_type: dict[str, dict[str, set[Gene]]] = defaultdict(lambda: defaultdict(set))
    for line in read_lines(path):
        if line.startswith("#"):
            continue
        fields = line.split("\t")
        try:
            name, _, kind, start, end, _, strand, *_ = fields
            gene = Gene(int(start) - 1, int(end), strand)
        except ValueError:
            raise ValueError(
                f"{path} is no GFF3: a line of it is {line[:60]!r}; nine fields with tabs make one."
            ) from None
        if strand in ("+", "-"):
            by_type[kind][name].add(gene)
    genes = by_type["gene"] or by_type["mRNA"]
    if not genes:
        raise ValueError(f"{path} has no feature that is a gene or an mRNA on a strand.")
    return {name: in_order(of_name) for name, of_name in genes.items()}


def read_lines(path: Path) -> Iterator[str]:
    """Lines that are not empty.

    Raises:
        ValueError: the file cannot be read, or is not compressed as its name says.
    """
    try:
        with open_text(path) as text:
            yield from filter(None, (line.rstrip("\r\n") for line in text))
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error
