"""What the pages for contributors name is there: files, tests, pages and their headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from snippets import PAGES, ROOT

FOR_CONTRIBUTORS = [
    *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "csrc/cuda/README.md")),
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("architecture", "contributing", "kernels", "lab-notebook", "semantics")
    ),
]
FOLDERS = r"ds_sparse|csrc|tests|docs|configs|launcher|examples|benchmarks|\.ci"


def names_of_tests(path: Path) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", FOR_CONTRIBUTORS, ids=lambda page: page.stem)
def test_files_that_a_page_names_are_there(page: Path):
    named = re.findall(rf"`((?:{FOLDERS})/[\w./-]*\w)`", page.read_text())
    missing = [
        name for name in named if not (ROOT / name).exists() and not name.startswith("ds_sparse/lib")
    ]  # is built
    assert not missing, f"{page} names {missing}"


def test_tests_that_pages_name_are_there():
    there = set().union(*map(names_of_tests, (ROOT / "tests").rglob("test_*.py")))
    named = {name: page for page in FOR_CONTRIBUTORS for name in re.findall(r"`(test_\w+)`", page.read_text())}
    missing = {name: page.name for name, page in named.items() if name not in there}
    assert named and not missing, f"rename them on the pages, too: {missing}"


@pytest.mark.parametrize("page", [*FOR_CONTRIBUTORS[:3], *PAGES], ids=lambda page: page.stem)
def test_links_lead_to_pages_and_headings(page: Path):
    """This needs no site; test_docs.py checks the links of the built one."""
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), f"{page} leads to {target}"
        known = anchor in anchors(path) or anchor.startswith("ds_sparse.")  # the API's names
        assert not anchor or known, f"{page} leads to {target}#{anchor}"
