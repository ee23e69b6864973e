import gzip
import lzma
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.program import main
from benchmarks.train import dna, dna_data, dna_files, dna_genes, dna_genomes, dna_synthetic
from benchmarks.train.dna_data import Annotated, Stretches, Windows
from benchmarks.train.dna_genes import BOTH, FORWARD, OUTSIDE, REVERSE
from benchmarks.train.dna_genomes import A, C, Contig, G, Gene, N, T
from ds_sparse.bench.show import load

FASTA = ">Species:chr1:1:+:12\nACGTac\nnryTTT\n>chr2 rest of the line\nGG\n"
GFF3 = (
    "##gff-version 3\n"
    "chr1\tx\tCDS\t2\t3\t.\t+\t0\tParent=a\n"
    "chr1\tx\tmRNA\t2\t4\t.\t+\t.\tID=a;Note=one\n"
    "chr1\tx\tmRNA\t6\t9\t.\t-\t.\tID=b\n"
    "chr1\tx\tmRNA\t2\t4\t.\t+\t.\tID=another transcript of a\n"
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "one.fasta.gz").write_bytes(gzip.compress(FASTA.encode()))
    (tmp_path / "one.gff3.xz").write_bytes(lzma.compress(GFF3.encode()))
    (tmp_path / "two.fa").write_text(">a\nACGT\n")
    return tmp_path


def test_sequences_and_genes_are_read_from_compressed_files(folder):
    one, two = dna_files.genomes_of_folder(folder)
    assert (one.name, two.name, two.gff3) == ("one", "two", None)
    bases = dna_files.read_fasta(one.fasta)
    assert {name: of.tolist() for name, of in bases.items()} == {
        "chr1": [A, C, G, T, A, C, N, N, N, T, T, T],
        "chr2": [G, G],
    }
    # Positions in GFF3 count from 1, and its ends are inside.
    assert dna_files.read_gff3(one.gff3) == {"chr1": [Gene(1, 4, "+"), Gene(5, 9, "-")]}


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.fa", "ACGT\n", "is no FASTA: its first line is 'ACGT'"),
        ("a.fa", "", "is no FASTA: it is empty"),
        ("a.fa", ">a\nA\n>a\nC\n", "has two sequences called a"),
        ("a.fa.gz", ">a\nA\n", "cannot be read: Not a gzipped file"),
        ("a.gff3", "chr1 x gene 1 2\n", "is no GFF3: a line of it is 'chr1 x gene 1 2'"),
        ("a.gff3", "chr1\tx\tCDS\t1\t2\t.\t+\t0\tID=a\n", "has no feature that is a gene or an mRNA"),
    ],
)
def test_a_file_that_is_something_else_says_so(tmp_path, name, text, sentence):
    (tmp_path / name).write_text(text)
    read = dna_files.read_gff3 if "gff3" in name else dna_files.read_fasta
    with pytest.raises(ValueError, match=re.escape(sentence)):
        read(tmp_path / name)


def test_genes_of_another_genome_say_so(folder):
    with pytest.raises(ValueError, match=r"has genes on chr1, and .*two\.fa has no such sequence: it has a "):
        dna_files.read_genome(dna_files.Files("two", folder / "two.fa", folder / "one.gff3.xz"), least=1)


@pytest.mark.parametrize("start, end", [(0, 3), (7, 3), (5, 13)])
def test_genes_lie_on_their_sequence(folder, start, end):
    (folder / "one.gff3").write_text(f"chr1\tx\tgene\t{start}\t{end}\t.\t+\t.\tID=a\n")
    with pytest.raises(ValueError, match=f"has a gene from {start} to {end} on chr1, which has 12 bases"):
        dna_files.read_genome(dna_files.Files("one", folder / "one.fasta.gz", folder / "one.gff3"), least=1)


def test_missing_genomes_say_what_to_install(tmp_path):
    with pytest.raises(ValueError, match="apt-get install maffilter-examples"):
        dna_files.installed_genomes(tmp_path)
    with pytest.raises(ValueError, match="has 0 FASTA files and no genes"):
        dna_files.genomes_of_folder(tmp_path)
    with pytest.raises(ValueError, match="there is no such folder"):
        dna_files.genomes_of_folder(tmp_path / "nothing")


def test_genomes_of_packages_that_are_installed_are_found(tmp_path):
    for path in ("maffilter/examples/Umaydis/Umaydis.fasta.gz", "maffilter/examples/Umaydis/Umaydis.gff3.gz"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert [files.name for files in dna_files.installed_genomes(tmp_path)] == ["ustilago-maydis"]


def contigs(number, bases=100, genes=()):
    return [Contig(f"chr{i}", np.full(bases, A, np.uint8), genes) for i in range(1, number + 1)]


def test_every_fifth_sequence_is_held_out():
    genome = dna_genomes.split("x", contigs(11), least=10)
    assert [contig.name for contig in genome.held_out] == ["chr5", "chr10"]
    assert len(genome.training) == 9
    assert str(genome) == "x: 900 bases train, 200 with 0 known genes are held out"


def test_the_end_of_few_sequences_is_held_out_with_the_genes_that_lie_in_it():
    genes = [Gene(10, 20, "+"), Gene(75, 85, "+"), Gene(82, 90, "-")]
    genome = dna_genomes.split("x", contigs(1, 100, genes), least=20)
    (training,), (held_out,) = genome.training, genome.held_out
    assert (training.name, len(training.bases), training.genes) == ("chr1:1-80", 80, [Gene(10, 20, "+")])
    assert (held_out.name, held_out.genes) == ("chr1:81-100", [Gene(2, 10, "-")])
    with pytest.raises(ValueError, match="too few to hold any out"):
        dna_genomes.split("x", contigs(1), least=60)


def test_classes_of_bases_and_back():
    contig = Contig("a", np.full(2000, A, np.uint8), [Gene(100, 400, "+"), Gene(390, 700, "-"), Gene(900, 1200, "-")])
    labels = dna_genes.labels_of(contig)
    borders = {place: labels[place] for place in (99, 100, 389, 390, 399, 400, 699, 700, 1199, 1200)}
    assert list(borders.values()) == [
        *(OUTSIDE, FORWARD, FORWARD, BOTH, BOTH),
        *(REVERSE, REVERSE, OUTSIDE, REVERSE, OUTSIDE),
    ]
    labels[1000:1049] = OUTSIDE  # a gap that is closed
    labels[1500:1649] = FORWARD  # too short for a gene
    assert dna_genes.genes_in(labels) == [Gene(100, 390, "+"), Gene(400, 700, "-"), Gene(900, 1200, "-")]
    labels[1000:1050] = OUTSIDE
    assert dna_genes.genes_in(labels)[2:] == [Gene(1050, 1200, "-")]
    assert dna_genes.genes_in(np.zeros(10, np.uint8)) == []


def test_f1_of_bases_counts_the_strand():
    labels = np.array([OUTSIDE, FORWARD, FORWARD, REVERSE, BOTH], np.uint8)
    found = dna_genes.bases_found(np.array([FORWARD, FORWARD, REVERSE, OUTSIDE, FORWARD], np.uint8), labels)
    assert (found.predicted, found.there, found.right) == (3, 3, 1)
    assert found.f1 == pytest.approx(1 / 3)


def test_f1_of_genes_counts_each_gene_once():
    genes = [Gene(0, 100, "+"), Gene(200, 300, "+"), Gene(400, 500, "-"), Gene(600, 700, "+")]
    predicted = [
        Gene(10, 60, "+"),  # half of the first
        Gene(0, 100, "+"),  # the first again, which is found already
        Gene(200, 301, "-"),  # the other strand
        Gene(400, 549, "-"),  # found: 100 of 149
        Gene(649, 700, "+"),  # 51 of 100
    ]
    found = dna_genes.genes_found(predicted, genes)
    assert (found.predicted, found.there, found.right) == (5, 4, 3)
    assert found.f1 == pytest.approx(6 / 9)
    assert dna_genes.genes_found([Gene(0, 49, "+")], genes).right == 0
    assert dna_genes.genes_found([], []).f1 == 0


@pytest.mark.parametrize("bases", [8, 9, 12, 100, 101])
def test_each_base_is_said_by_the_window_in_which_it_lies_deepest(bases):
    window = 8
    starts = dna_genes.window_starts(bases, window)
    owned = list(dna_genes.owned(starts, window, bases))
    assert [place for own in owned for place in range(*own)] == list(range(bases))

    def depth(place, start):
        return min(place - start, start + window - 1 - place)

    for start, own in zip(starts, owned, strict=True):
        for place in range(*own):
            assert depth(place, start) == max(depth(place, other) for other in starts) >= 0


def test_the_other_strand_is_read_backwards():
    bases, labels = np.array([[A, C, G, N]], np.uint8), np.array([[OUTSIDE, FORWARD, REVERSE, BOTH]], np.uint8)
    other = dna_data.reverse_complement(bases, labels)
    assert [part.tolist() for part in other] == [[[N, C, G, T]], [[BOTH, FORWARD, REVERSE, OUTSIDE]]]
    assert all((again == part).all() for again, part in zip(dna_data.reverse_complement(*other), (bases, labels)))


def annotated(length, is_annotated=True, seed=0):
    bases = np.random.default_rng(seed).integers(A, T + 1, length, dtype=np.uint8)
    contig = Contig("a", bases, [Gene(10, 60, "+"), Gene(70, 90, "-")])
    return Annotated(contig, dna_genes.labels_of(contig), is_annotated)


def test_windows_lie_in_one_sequence_with_their_classes_on_both_strands():
    sequences = [annotated(100), annotated(130, seed=1)]
    windows = Windows(sequences, 100)
    assert windows.ends.tolist() == [1, 32]
    bases, labels = windows.drawn(64, np.random.default_rng(0))
    inside = {
        (of.contig.bases[i : i + 100].tobytes(), of.labels[i : i + 100].tobytes())
        for of in sequences
        for i in range(len(of.labels) - 99)
    }
    read = [(one.tobytes(), of.tobytes()) for one, of in zip(bases, labels, strict=True)]
    turned = [tuple(part.tobytes() for part in dna_data.reverse_complement(*one)) for one in zip(bases, labels)]
    on_the_first = [one in inside for one in read]
    assert 16 < sum(on_the_first) < 48
    assert all(first or other in inside for first, other in zip(on_the_first, turned, strict=True))


def test_known_bases_alone_are_masked():
    bases = np.random.default_rng(0).integers(N, T + 1, (4, 5000), dtype=np.uint8)
    given, labels = dna_data.masked(bases, np.random.default_rng(1))
    asked = labels != dna_data.IGNORED
    assert asked.mean() == pytest.approx(0.15 * 0.8, abs=0.01)
    assert (labels[asked] == bases[asked]).all() and (bases[asked] > N).all()
    assert (given == np.where(asked, dna_genomes.MASK, bases)).all()


def test_held_out_stretches_are_the_same_at_every_call_and_labels_those_of_known_genes():
    sequences = [annotated(1000), annotated(90, False), annotated(100, False, seed=1)]
    stretches, again = (Stretches.of(sequences, 100) for _ in range(2))
    assert stretches.bases.shape == (9, 100)
    assert stretches.are_annotated.sum() == 8
    assert all((one == other).all() for one, other in zip(stretches.masked, again.masked))
    assert stretches.classes[0].shape == (8, 100)
    assert set(np.unique(stretches.classes[1])) == {OUTSIDE, FORWARD, REVERSE}


EVEN = torch.full((8,), 1 / 8).log()


class ClassOfBase(torch.nn.Module):
    """Says that C is in a gene on "+" and G in one on "-"; keeps how many sequences it is given."""

    def forward(self, input_ids):
        self.sequences = len(input_ids)
        classes = (input_ids == C) * FORWARD + (input_ids == G) * REVERSE
        return torch.nn.functional.one_hot(classes, dna_genes.CLASSES).float()


def test_genes_are_found_over_whole_sequences():
    bases = np.full(5003, A, np.uint8)
    bases[300:900], bases[2000:2400], bases[4000:5003] = C, G, C
    genes = [Gene(300, 900, "+"), Gene(2000, 2400, "-"), Gene(3000, 3500, "-"), Gene(4000, 5003, "+")]
    contig = Contig("a", bases, genes)
    one = Annotated(contig, dna_genes.labels_of(contig), True)
    sequences = dna.Sequences(window=64, per_step=512, device=torch.device("cpu"))
    model = ClassOfBase()
    task = dna.Genes(model, sequences, Windows([one], 512), Stretches.of([one], 512).classes, EVEN, [0], known=[one])
    assert (task.predicted(bases) == np.where(bases == A, OUTSIDE, np.where(bases == C, FORWARD, REVERSE))).all()
    assert task.measures() == pytest.approx({"base_f1": 2 * 2003 / (2003 + 2503), "gene_f1": 2 * 3 / 7})
    task.loss(0)
    assert model.sequences == 8


def test_all_lengths_are_asked_for_the_same_bases():
    one = annotated(5000)
    losses = []
    for window in (64, 512):
        sequences = dna.Sequences(window, per_step=1024, device=torch.device("cpu"))
        held_out = Stretches.of([one], 512).masked
        task = dna.MaskedBases(OfEachBase(), sequences, Windows([one], 512), held_out, EVEN, [0])
        losses.append((float(task.loss(3)), task.evaluate()))
    assert losses[0] == pytest.approx(losses[1])
    assert losses[0][0] != pytest.approx(losses[0][1])


class OfEachBase(torch.nn.Module):
    """Logits of a base that follow from it and the one before, in whichever window."""

    def forward(self, input_ids):
        table = torch.randn(dna_genomes.VOCABULARY, dna_genomes.VOCABULARY, generator=torch.Generator().manual_seed(0))
        return SimpleNamespace(logits=table[input_ids])


QUICK = ["train", "--experiment", "dna", "--quick", "--tokens", "4096", "--arms"]


@pytest.mark.slow("trains every arm")
def test_a_quick_run_says_loss_and_f1_of_each_arm(tmp_path):
    assert main([*QUICK, "dense-64,bigbird-512", "--json", str(tmp_path / "out.json")]) == 0
    cases, rows = zip(*load(str(tmp_path / "out.json"))[2])
    assert [case.arm for case in cases] == ["dense-64", "bigbird-512"]
    for row in rows:
        assert set(row.measures) == {"masked_loss", "base_f1", "gene_f1"}
        assert 1 < row.measures["masked_loss"] < 2.5
        assert row.measures["masked_loss"] == pytest.approx(row.curve[0].held_out)
        assert [point.asked for point in row.curve] == ["masked bases", "genes"]


@pytest.mark.slow("trains every arm")
def test_a_run_takes_genomes_of_a_folder_and_says_where_they_are_missing(tmp_path, capsys):
    dna_synthetic.write_genome(tmp_path / "mine")
    dna_synthetic.write_genome(tmp_path / "other")
    dna_synthetic.write_genome(tmp_path / "few")
    (tmp_path / "few" / "synthetic.gff3").write_text("chr1\tx\tgene\t1\t9\t.\t+\t.\tID=a\n")
    (tmp_path / "other" / "synthetic.fa.gz").write_bytes(gzip.compress(FASTA.encode()))
    assert main([*QUICK, "dense-64", "--genomes", str(tmp_path / "mine")]) == 0
    capsys.readouterr()
    for wrong, sentence in (
        (["dense-64", "--genomes", str(tmp_path)], "has 0 FASTA files"),
        (["dense-64", "--genomes", str(tmp_path / "other")], "has no such sequence"),
        (["dense-64", "--genomes", str(tmp_path / "few")], "No held-out sequence has a gene that is known"),
        (["dense-100"], "sequences of 100 tokens do not divide documents of 512"),
        (["dense-1"], "has windows of 1 base; give at least 2"),
        (["longformer-64"], "is no arm of dna"),
        (["dense-64", "--genomes", str(tmp_path), "--experiment", "documents"], "documents reads none"),
    ):
        assert main([*QUICK, *wrong]) == 1
        assert sentence in capsys.readouterr().err


@pytest.mark.slow("trains in processes that are killed")
def test_a_run_that_is_killed_amid_genes_goes_on_and_keeps_what_it_said_of_masked_bases(tmp_path, monkeypatch):
    command = [*QUICK, "dense-64", "--tokens", "16384", "--save-seconds", "0", "--folder"]
    assert main([*command, str(tmp_path / "whole"), "--json", str(tmp_path / "whole.json")]) == 0
    right, steps = dna.Genes.loss, []

    def killed(task, step):
        steps.append(step)
        if len(steps) == 2 + 4:  # two are tried before four
            raise KeyboardInterrupt
        return right(task, step)

    monkeypatch.setattr(dna.Genes, "loss", killed)
    assert main([*command, str(tmp_path / "killed")]) == 130
    monkeypatch.setattr(dna.Genes, "loss", right)
    assert main([*command, str(tmp_path / "killed"), "--json", str(tmp_path / "killed.json")]) == 0
    ((_, whole),), ((_, other),) = (load(str(tmp_path / name))[2] for name in ("whole.json", "killed.json"))
    assert (other.weights, other.measures) == (whole.weights, whole.measures)
