"""Python sources that say which package they belong to by what they do alone: names of packages are taken out."""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from itertools import islice
from pathlib import Path

from .texts import INSTALLED, SKIPPED, files_below, is_held_out, text_of

NAME = "NAME"
"""Word in the place of a name that was taken out."""

HELD_OUT_ONE_IN = 5

MOST_FILES = 120
"""Most files of a package, so that the largest are no more than some times the smallest."""

COPIED = {"_vendor", "_vendored", "vendor", "vendored", "extern", "externals", "third_party"}
"""Folders with sources of another package."""

IDENTIFIER = re.compile(r"[^\W\d]\w*")
IMPORT = re.compile(r"^[ \t>.]*(?:from\s+[\w.]+\s+)?import\b(?:\s*\([^)]*\)|(?:.*\\\n)*.*)$", re.MULTILINE)
"""An import, over several lines too, and in examples of docstrings."""
LICENCE = re.compile(r"^.*(copyright|licen[cs]e|spdx-|all rights reserved|authors?\b).*$", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class Text:
    """A file without names of packages; `package` is the top-level one that it belongs to."""

    package: str
    text: str

    @property
    def is_held_out(self) -> bool:
        return is_held_out(self.text, HELD_OUT_ONE_IN)


Sources = Mapping[str, Mapping[str, Path]]
"""Files by the top-level package that they belong to, each with its path from the folder that the package is in."""


def installed_sources() -> Sources:
    """Sources of the running interpreter: its standard library, and what is installed beside it."""
    paths = sysconfig.get_paths()
    files: dict[str, dict[str, Path]] = defaultdict(dict)
    for root in map(Path, sorted({paths["stdlib"], paths["purelib"], paths["platlib"]})):
        for path in files_below(root, SKIPPED | INSTALLED | COPIED):
            where = path.relative_to(root)
            if len(where.parts) > 1:
                files[where.parts[0]][where.as_posix()] = path
    return files


@dataclass(frozen=True)
class Wanted:
    """Bounds on files and packages that become texts.

    Attributes:
        least_files: that a package has to have.
        least_characters: of a file, before and after names are taken out.
        most_characters: that are read of a file.
        most_packages: the largest.
    """

    least_files: int
    least_characters: int
    most_characters: int
    most_packages: int | None = None


def texts_of(sources: Sources, wanted: Wanted) -> list[Text]:
    """Files without names and without duplicates, of a package `MOST_FILES` at most.

    Raises:
        ValueError: fewer than two packages have as many.
    """
    least = wanted.least_characters
    long = {
        package: [files[where] for where in sorted(files, key=drawn) if files[where].stat().st_size >= least]
        for package, files in sources.items()
    }
    largest = sorted(long, key=lambda package: (-len(long[package]), package))
    packages = [package for package in largest if len(long[package]) >= wanted.least_files][: wanted.most_packages]
    removal = Removal.of(packages, sources)
    taken: set[str] = set()
    found = {package: list(cleaned(package, long[package], removal, wanted, taken)) for package in packages}
    classes = {package: texts for package, texts in found.items() if len(texts) >= wanted.least_files}
    if len(classes) < 2:
        raise ValueError(
            f"Of the installed packages {len(classes)} have {wanted.least_files} files of {least:,} characters, and it "
            "takes two to tell them apart; install some large ones, such as sympy and pandas."
        )
    return [text for package in sorted(classes) for text in classes[package]]


def drawn(where: str) -> str:
    """A key that puts files in an order by chance, the same on every machine."""
    return hashlib.sha256(where.encode()).hexdigest()


def cleaned(package: str, paths: Iterable[Path], removal: Removal, wanted: Wanted, taken: set[str]) -> Iterator[Text]:
    """The first `MOST_FILES` that are long enough without names, and are not `taken`: there they go."""
    texts = (removal.cleaned(text_of(path)[: wanted.most_characters]) for path in paths)
    fresh = (text for text in texts if len(text) >= wanted.least_characters and text not in taken)
    for text in islice(fresh, MOST_FILES):
        taken.add(text)
        yield Text(package, text)


@dataclass(frozen=True)
class Removal:
    """Takes names out of sources.

    Attributes:
        own: finds names of the packages to be told apart, and of what they are installed from, anywhere.
        names: whole identifiers, of all packages and all their modules.
    """

    own: re.Pattern[str]
    names: frozenset[str]

    @classmethod
    def of(cls, packages: Iterable[str], sources: Sources) -> Removal:
        distributions = metadata.packages_distributions()
        own = {name.lower() for package in packages for name in (package, *distributions.get(package, ()))}
        longest_first = sorted((name.strip("_") for name in own), key=len, reverse=True)
        patterns = ("[-_. ]?".join(map(re.escape, re.split("[-_.]", name))) for name in longest_first)
        parts = (part for files in sources.values() for path in files for part in Path(path).with_suffix("").parts)
        return cls(re.compile("|".join(patterns), re.IGNORECASE), frozenset(parts) - {"__init__", "__main__"})

    def cleaned(self, source: str) -> str:
        """A source without its first comments, its imports, lines about licences and names of packages."""
        text = self.own.sub(NAME, LICENCE.sub("", IMPORT.sub("", without_header(source))))
        return IDENTIFIER.sub(lambda found: NAME if found[0] in self.names else found[0], text)


def without_header(source: str) -> str:
    """A source from its first line on that is no comment."""
    lines = source.split("\n")
    begin = next((number for number, line in enumerate(lines) if line.strip() and not line.startswith("#")), 0)
    return "\n".join(lines[begin:])
