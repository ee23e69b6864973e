"""The experiment on genes: reading genomes, windows and classes of bases, and finding genes."""

import gzip
import lzma
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.program import main
from benchmarks.train import copies, dna, genomes
from benchmarks.train.dna import Windows, stretches
from benchmarks.train.genomes import BOTH, FORWARD, OUTSIDE, REVERSE, A, C, Contig, Files, G, Gene, N, T
from benchmarks.train.results import Case
from ds_sparse.bench.show import load

FASTA = ">Species:chr1:1:+:12\nACGTac\nnryTTT\n>chr2 rest of the line\nGG\n"
GFF3 = (
    "##gff-version 3\n"
    "chr1\tx\tCDS\t2\t3\t.\t+\t0\tParent=a\n"
    "chr1\tx\tmRNA\t2\t4\t.\t+\t.\tID=a;Note=one\n"
    "chr1\tx\tmRNA\t6\t9\t.\t-\t.\tID=b\n"
    "chr1\tx\tmRNA\t2\t4\t.\t+\t.\tID=another transcript of a\n"
)
CPU = torch.device("cpu")
EVEN = torch.full((8,), 1 / 8).log()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "one.fasta.gz").write_bytes(gzip.compress(FASTA.encode()))
    (tmp_path / "one.gff3.xz").write_bytes(lzma.compress(GFF3.encode()))
    (tmp_path / "two.fa").write_text(">a\nACGT\n")
    return tmp_path


def test_sequences_and_genes_are_read_from_compressed_files(folder):
    one, two = genomes.genomes_of_folder(folder)
    assert (one.name, two.name, two.gff3) == ("one", "two", None)
    bases = {name: of.tolist() for name, of in genomes.read_fasta(one.fasta).items()}
    assert bases == {"chr1": [A, C, G, T, A, C, N, N, N, T, T, T], "chr2": [G, G]}
    # Positions in GFF3 count from 1, and its ends are inside.
    assert genomes.read_gff3(one.gff3) == {"chr1": [Gene(1, 4, "+"), Gene(5, 9, "-")]}


def test_genes_that_do_not_lie_on_their_genome_and_genomes_that_are_missing_say_so(folder, tmp_path):
    (folder / "far.gff3").write_text("chr1\tx\tgene\t5\t13\t.\t+\t.\tID=a\n")
    for fasta, gff3 in (("two.fa", "one.gff3.xz"), ("one.fasta.gz", "far.gff3")):
        with pytest.raises(ValueError, match=r"has genes on chr1 that do not lie on that sequence of .*" + fasta):
            genomes.read_genome(Files("one", folder / fasta, folder / gff3), least=1)
    for call, sentence in (
        (genomes.installed_genomes, "apt-get install maffilter-examples"),
        (genomes.genomes_of_folder, "has 0 FASTA files and no genes"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call(tmp_path / "nothing")


def contigs(number, bases=100, genes=()):
    return [Contig(f"chr{i}", np.full(bases, A, np.uint8), genes) for i in range(1, number + 1)]


def test_every_fifth_sequence_is_held_out_and_of_few_the_end_with_its_genes():
    training, held_out = genomes.split(contigs(11), least=10)
    assert [contig.name for contig in held_out] == ["chr5", "chr10"] and len(training) == 9
    genes = [Gene(10, 20, "+"), Gene(75, 85, "+"), Gene(82, 90, "-")]
    (training,), (held_out,) = genomes.split(contigs(1, 100, genes), least=20)
    assert (training.name, len(training.bases), training.genes) == ("chr1:1-80", 80, [Gene(10, 20, "+")])
    assert (held_out.name, held_out.genes) == ("chr1:81-100", [Gene(2, 10, "-")])
    assert genomes.split(contigs(1), least=60) == ([], [])


def test_classes_of_bases_and_back():
    genes = [Gene(100, 400, "+"), Gene(390, 700, "-"), Gene(900, 1200, "-")]
    labels = Contig("a", np.full(2000, A, np.uint8), genes).labels
    classes = [*(OUTSIDE, FORWARD, FORWARD, BOTH, BOTH), *(REVERSE, REVERSE, OUTSIDE, REVERSE, OUTSIDE)]
    assert [labels[place] for place in (99, 100, 389, 390, 399, 400, 699, 700, 1199, 1200)] == classes
    labels[1000:1049] = OUTSIDE  # a gap that is closed
    labels[1500:1649] = FORWARD  # too short for a gene
    assert dna.genes_in(labels) == [Gene(100, 390, "+"), Gene(400, 700, "-"), Gene(900, 1200, "-")]
    labels[1000:1050] = OUTSIDE
    assert dna.genes_in(labels)[2:] == [Gene(1050, 1200, "-")]


def test_f1_counts_the_strand_and_each_gene_once():
    labels = np.array([OUTSIDE, FORWARD, FORWARD, REVERSE, BOTH], np.uint8)
    found = dna.bases_found(np.array([FORWARD, FORWARD, REVERSE, OUTSIDE, FORWARD], np.uint8), labels)
    assert (found.predicted, found.there, found.right) == (3, 3, 1)
    genes = [Gene(0, 100, "+"), Gene(200, 300, "+"), Gene(400, 500, "-"), Gene(600, 700, "+")]
    predicted = [
        Gene(10, 60, "+"),  # half of the first
        Gene(0, 100, "+"),  # the first again, which is found already
        Gene(200, 301, "-"),  # the other strand
        Gene(400, 549, "-"),  # found: 100 of 149
        Gene(649, 700, "+"),  # 51 of 100
    ]
    found = dna.genes_found(predicted, genes)
    assert (found.predicted, found.there, found.right) == (5, 4, 3)
    assert dna.genes_found([Gene(0, 49, "+")], genes).right == 0


@pytest.mark.parametrize("bases", [8, 9, 12, 100, 101])
def test_each_base_is_said_by_the_window_in_which_it_lies_deepest(bases):
    window = 8
    starts = dna.window_starts(bases, window)
    owned = list(dna.owned(starts, window, bases))
    assert [place for own in owned for place in range(*own)] == list(range(bases))

    def depth(place, start):
        return min(place - start, start + window - 1 - place)

    for start, own in zip(starts, owned, strict=True):
        assert all(depth(place, start) == max(depth(place, other) for other in starts) >= 0 for place in range(*own))


def annotated(length, is_annotated=True, seed=0):
    bases = np.random.default_rng(seed).integers(A, T + 1, length, dtype=np.uint8)
    return Contig("a", bases, [Gene(10, 60, "+"), Gene(70, 90, "-")], is_annotated)


def test_windows_lie_in_one_sequence_with_their_classes_on_both_strands():
    sequences = [annotated(100), annotated(130, seed=1)]
    windows = Windows(sequences, 100)
    assert windows.ends.tolist() == [1, 32]
    bases, labels = windows.drawn(64, np.random.default_rng(0))
    inside = {
        (of.bases[i : i + 100].tobytes(), of.labels[i : i + 100].tobytes())
        for of in sequences
        for i in range(len(of.labels) - 99)
    }
    read = [(one.tobytes(), of.tobytes()) for one, of in zip(bases, labels, strict=True)]
    turned = [tuple(part.tobytes() for part in dna.reverse_complement(*one)) for one in zip(bases, labels)]
    on_the_first = [one in inside for one in read]
    assert 16 < sum(on_the_first) < 48
    assert all(first or other in inside for first, other in zip(on_the_first, turned, strict=True))
    other = dna.reverse_complement(np.array([A, C, G, N]), np.array([OUTSIDE, FORWARD, REVERSE, BOTH]))
    assert [part.tolist() for part in other] == [[N, C, G, T], [BOTH, FORWARD, REVERSE, OUTSIDE]]


def test_known_bases_alone_are_masked():
    bases = np.random.default_rng(0).integers(N, T + 1, (4, 5000), dtype=np.uint8)
    given, labels = dna.masked(bases, np.random.default_rng(1))
    asked = labels != dna.IGNORED
    assert asked.mean() == pytest.approx(0.15 * 0.8, abs=0.01)
    assert (labels[asked] == bases[asked]).all() and (bases[asked] > N).all()
    assert (given == np.where(asked, genomes.MASK, bases)).all()


def test_held_out_stretches_are_of_genomes_with_known_genes_and_of_others():
    sequences = [annotated(1000), annotated(90, False), annotated(100, False, seed=1)]
    (known, labels), (others, _) = (stretches(sequences, 100, is_annotated) for is_annotated in (True, False))
    assert known.shape == labels.shape == (8, 100) and others.shape == (1, 100)
    assert set(np.unique(labels)) == {OUTSIDE, FORWARD, REVERSE}
    assert stretches(sequences[:1], 100, False)[0].shape == (0, 100)


def task_of(kind, logits, window, held_out, **more):
    """A task whose model gives each base its row of `logits`, in whichever window."""
    encoder = lambda input_ids: SimpleNamespace(last_hidden_state=logits[input_ids])  # noqa: E731
    case = Case("dna", "tiny", "fp32", "cpu", True, 1024, 1e-3, 512)
    head = torch.nn.Identity()
    return kind("bases", head, encoder, head, window, lambda step: held_out, held_out, EVEN, case, CPU, **more)


def test_genes_are_found_over_whole_sequences():
    bases = np.full(5003, A, np.uint8)
    bases[300:900], bases[2000:2400], bases[4000:5003] = C, G, C
    genes = [Gene(300, 900, "+"), Gene(2000, 2400, "-"), Gene(3000, 3500, "-"), Gene(4000, 5003, "+")]
    one = Contig("a", bases, genes, True)
    of_bases = torch.eye(3)[[{C: FORWARD, G: REVERSE}.get(base, OUTSIDE) for base in range(genomes.VOCABULARY)]]
    task = task_of(dna.Genes, of_bases, 64, stretches([one], 512, True), known=[one])
    assert (task.predicted(bases) == np.where(bases == A, OUTSIDE, np.where(bases == C, FORWARD, REVERSE))).all()
    assert task.measures() == pytest.approx({"base_f1": 2 * 2003 / (2003 + 2503), "gene_f1": 2 * 3 / 7})


def test_all_lengths_are_asked_for_the_same_bases():
    held_out = dna.masked(stretches([annotated(5000)], 512, True)[0][:2], np.random.default_rng(0))
    logits = torch.randn(genomes.VOCABULARY, genomes.VOCABULARY, generator=torch.Generator().manual_seed(0))
    short, long = (task_of(dna.MaskedBases, logits, window, held_out) for window in (64, 512))
    assert short.evaluate() == pytest.approx(long.evaluate()) == pytest.approx(float(short.loss(3)))
    labels = held_out[1][held_out[1] != dna.IGNORED]
    expected = torch.nn.functional.cross_entropy(logits[genomes.MASK].expand(len(labels), -1), torch.tensor(labels))
    assert long.evaluate() == pytest.approx(float(expected))


def test_copies_stand_as_far_apart_as_is_said():
    case = Case("copies", "tiny", "fp32", "cpu", True, 2048, 1e-3, 512)
    bases = np.random.default_rng(0).integers(A, T + 1, (64, 512)).astype(np.uint8)
    changed, distances = copies.with_copies(bases, case, np.random.default_rng(1))
    length, *_ = found = copies.distances_of(case)
    assert found == [32, 64, 128, 256] == sorted({*np.unique(distances)} - {copies.ELSEWHERE})
    assert (changed == bases)[distances == copies.ELSEWHERE].all()
    for least in found:
        parts = pairs = 0
        for row, of in zip(changed, distances, strict=True):
            starts = np.flatnonzero(np.convolve(of == least, np.ones(length), "valid") == length)
            ends = np.minimum(2 * least, len(row) - length - starts + 1)
            pairs += sum(
                (row[start : start + length] == row[start + apart : start + apart + length]).all()
                for start, end in zip(starts, ends, strict=True)
                for apart in range(least, end)
            )
            parts += (of == least).sum() // length
        assert pairs >= parts / 2 > 0  # more where stretches touch


def test_copies_stand_at_every_distance_about_as_often():
    case = Case("copies", "small", "bf16", "cuda", False, 65536, 1e-3, 65536)
    bases = np.full((8, case.document_tokens), A, np.uint8)
    _, distances = copies.with_copies(bases, case, np.random.default_rng(0))
    counts = [(distances == least).sum() for least in copies.distances_of(case)]
    assert min(counts) > max(counts) / 2 > 0


def test_copies_count_masked_bases_by_distance():
    bases = np.array([[A, C, G, T]], np.uint8)
    held_out = dna.hidden(bases, np.array([[True, True, False, True]]), genomes.MASK)
    logits = torch.zeros(genomes.VOCABULARY, genomes.VOCABULARY)
    logits[genomes.MASK, C] = 1
    task = task_of(copies.Copies, logits, 4, held_out, distances=np.array([[32, 64, 64, copies.ELSEWHERE]]))
    measures = task.measures()
    assert {"copied_32": 0, "copied_64": 1, "copied_none": 0}.items() <= measures.items()
    assert measures["masked_loss"] == pytest.approx(task.evaluate())


@pytest.mark.slow("trains an arm")
def test_a_quick_run_of_copies_says_what_is_named_by_distance(tmp_path, capsys):
    command = ["train", "--experiment", "copies", "--quick", "--tokens", "2048", "--arms", "local_global-512"]
    assert main([*command, "--json", str(tmp_path / "out.json")]) == 0
    ((_, (row,)),) = load(str(tmp_path / "out.json"))[2]
    assert set(row.measures) == {"masked_loss", *(f"copied_{name}" for name in (32, 64, 128, 256, "none"))}
    assert "by how far away the same bases stand" in capsys.readouterr().out


@pytest.mark.slow("trains every arm")
def test_a_quick_run_says_loss_and_f1_of_each_arm_and_takes_genomes_of_a_folder(tmp_path, capsys):
    command = ["train", "--experiment", "dna", "--quick", "--tokens", "4096", "--arms"]
    genomes.write_genome(tmp_path / "mine")
    mine = ["--genomes", str(tmp_path / "mine")]
    assert main([*command, "dense-64,bigbird-512", *mine, "--json", str(tmp_path / "out.json")]) == 0
    cases, rows = zip(*load(str(tmp_path / "out.json"))[2])
    assert [case.arm for case in cases] == ["dense-64", "bigbird-512"]
    for (row,) in rows:
        assert set(row.measures) == {"masked_loss", "base_f1", "gene_f1"}
        assert row.measures["masked_loss"] == pytest.approx(row.curve[0].held_out) and row.held_out < 2.5
        assert [point.asked for point in row.curve] == ["masked bases", "genes"]
    (tmp_path / "mine" / "made_up.gff3").write_text("chr1\tx\tgene\t1\t9\t.\t+\t.\tID=a\n")
    for status, wrong, sentence in (
        (1, ["dense-64", *mine], "No held-out sequence has a gene that is known"),
        (2, ["dense-1"], "has windows of 1 base; give at least 2"),
        (2, ["longformer-64"], "is no arm of dna"),
    ):
        capsys.readouterr()
        assert main([*command, *wrong]) == status
        assert sentence in capsys.readouterr().err
