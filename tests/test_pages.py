"""What pages name is there: files, tests, pages and their headings. test_docs.py builds the site and runs its code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from snippets import PAGES, ROOT

AT_TOP = [ROOT / name for name in ("CONTRIBUTING.md", "README.md", "SECURITY.md", "csrc/cuda/README.md")]
FOLDERS = r"ds_sparse|csrc|tests|docs|configs|launcher|examples|benchmarks|\.ci"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*AT_TOP, *PAGES], ids=lambda page: page.stem)
def test_files_and_headings_that_a_page_names_are_there(page: Path):
    text = page.read_text()
    named = re.findall(rf"`((?:{FOLDERS})/[\w./-]*\w)`", text)
    missing = [name for name in named if not (ROOT / name).exists() and "lib/" not in name]  # libraries are built
    links = re.findall(r'(?:\]\(|src=")(?!https?:)([^)"#\s]*)#?([^)"\s]*)[)"]', text)
    for target, anchor in links:
        path = page.parent / target if target else page
        known = path.exists() and (not anchor or anchor in anchors(path) or anchor.startswith("ds_sparse."))
        missing += [] if known else [f"{target}#{anchor}"]
    assert not missing, f"{page} names {missing}"


def test_tests_that_pages_name_are_there():
    sources = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    there = {name for text in sources for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    named = {name: page for page in [*AT_TOP, *PAGES] for name in re.findall(r"`(test_\w+)`", page.read_text())}
    missing = {name: page.name for name, page in named.items() if name not in there}
    assert named and not missing, f"rename them on the pages, too: {missing}"
