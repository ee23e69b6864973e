"""What the pages for contributors name is there: files, tests, pages and their headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *("CONTRIBUTING.md", "SECURITY.md", "csrc/cuda/README.md"),
    *(f"docs/{name}.md" for name in ("architecture", "contributing", "kernels", "lab-notebook", "semantics")),
]
FOLDERS = ("ds_sparse", "csrc", "tests", "docs", "configs", "launcher", "examples", "benchmarks", ".ci")


def text(page: str) -> str:
    return (ROOT / page).read_text()


def names_of_tests(path: Path) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """Those of its headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page: str):
    named = re.findall(rf"`((?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]*\w)`", text(page))
    # Libraries are built.
    missing = [name for name in named if not (ROOT / name).exists() and not name.startswith("ds_sparse/lib")]
    assert not missing, f"{page} names {missing}"


def test_tests_that_pages_name_are_there():
    there = set().union(*map(names_of_tests, (ROOT / "tests").rglob("test_*.py")))
    named = {name: page for page in PAGES for name in re.findall(r"`(test_\w+)`", text(page))}
    assert named
    missing = {name: page for name, page in named.items() if name not in there}
    assert not missing, f"rename them on the pages, too: {missing}"


def test_tests_are_in_the_files_that_semantics_gives_for_them():
    """`tests/ops/test_softmax.py`: `test_a`, `test_b`."""
    given = re.findall(r"`(tests/[\w/]+\.py)`:\s((?:`test_\w+`(?:,\s|))+)", text("docs/semantics.md"))
    assert given
    for file, names in given:
        missing = set(re.findall(r"test_\w+", names)) - names_of_tests(ROOT / file)
        assert not missing, f"{file} has no {sorted(missing)}"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_pages_and_headings(page: str):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text(page)):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page} leads to {target}"
        assert not anchor or anchor in anchors(path), f"{page} leads to {target}#{anchor}"
