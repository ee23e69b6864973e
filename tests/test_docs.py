"""The site: it builds, its links lead somewhere, and the code on its pages runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from functools import cache
from html import unescape
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from browser import chromium
from helpers import without_launcher
from snippets import PAGES, ROOT, fenced, run_python

import ds_sparse
from ds_sparse.cli import main
from ds_sparse.sparsity import sparsity_class, sparsity_modes
from ds_sparse.sparsity._fields import json_fields
from ds_sparse.sparsity._registry import ENTRY_POINT_GROUP


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    for name in ("zensical", "mkdocstrings", "latex2mathml"):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install 'ds_sparse[docs]'")
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    shutil.copytree(ROOT / "docs", folder / "docs")  # Zensical does not follow a link to it
    for name in ("benchmarks", "ds_sparse", "CHANGELOG.md", "SECURITY.md"):
        (folder / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    built = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env=os.environ | {"NO_COLOR": "1"}
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert "griffe" not in built.stdout + built.stderr, "docstrings do not fit their functions:\n" + built.stderr
    return folder / "site"


def test_each_page_is_in_the_navigation_and_each_entry_a_page():
    navigation = re.findall(r"^ +- ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(navigation) == [page.name for page in PAGES]


def test_nothing_is_loaded_from_elsewhere(site):
    html = {file.name: file.read_text() for file in site.rglob("*.html") if file.name != "404.html"}
    assert len(html) == len(PAGES)
    loaded = r'<(?:script|img|iframe)[^>]*\ssrc="?(?:https?:)?//|<link[^>]*rel="?(?:stylesheet|preconnect)[^>]*//'
    assert not [name for name, text in html.items() if re.search(loaded, text)]


RESULTS = """new Promise((done) => {
  const links = (node) => [...(node.shadowRoot ? links(node.shadowRoot) : []), ...[...node.children].flatMap(links),
    ...(node.tagName === "A" && node.getRootNode() !== document ? [node.getAttribute("href")] : [])];
  const look = (left) => { const found = links(document.body); found.length || !left ? done(found)
    : setTimeout(look, 50, left - 1); };
  look(200);
})"""
"""The pages that a search has found, once there are some."""


def test_the_search_finds_pages_from_a_folder(site):
    with chromium() as browser:
        browser.call("Page.navigate", url=(site / "index.html").as_uri())
        browser.value(
            "new Promise((done) => { const look = () => document.querySelector('.md-search__button') && "
            "document.readyState === 'complete' ? done() : setTimeout(look, 50); look(); })"
        )
        browser.value("document.querySelector('.md-search__button').click()")
        time.sleep(1)  # the field gets the focus after an animation
        browser.call("Input.insertText", text="sliding window")
        found = browser.value(RESULTS)
        assert any("structures.html" in page for page in found)
        assert not browser.errors
        assert not [address for address in browser.requests if not address.startswith(("file:", "data:", "about:"))]


def test_what_is_made_and_formulas_stand_in_the_pages(site):
    for page in PAGES:
        text, html = page.read_text(), (site / f"{page.stem}.html").read_text()
        assert html.count("</math>") == text.count("```math")
        assert "<!-- made: " not in html
        assert html.count("<table") >= text.count("<!-- made: table ")
        assert html.count("data:image/svg+xml") == text.count("<!-- made: gain ") + (page.stem == "benchmarks-models")


def test_the_api_has_each_public_name_and_the_fields_of_structures(site):
    pages = [page for page in PAGES if page.stem.startswith("api")]
    shown = [name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]
    assert {f"ds_sparse.{name}" for name in ds_sparse.__all__} <= set(shown) and len(shown) == len(set(shown))
    html = "".join((site / f"{page.stem}.html").read_text() for page in pages)
    linked = {name for page in PAGES for name in re.findall(r"#(ds_sparse\.[\w.]+)\)", page.read_text())}
    assert linked | set(shown) <= set(re.findall(r'\sid="?(ds_sparse[\w.]+)', html))
    page = " ".join(unescape(re.sub(r"<[^>]+>", "", html)).split())
    fields = [field for mode in sparsity_modes() for field in json_fields(sparsity_class(mode)).values()]
    assert not [field for field in fields if " ".join(field.description.split()) not in page]


def pages_with(language: str) -> list[Path]:
    """The pages that have code in a language."""
    return [page for page in PAGES if any(snippet.language == language for snippet in fenced(page))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_fence_is_read_and_code_fits_into_the_width_of_a_page(page):
    """A block without a language, or one that is indented, would be passed over. Output and console lines scroll."""
    assert len(re.findall(r"^\s*```", page.read_text(), re.MULTILINE)) == 2 * len(fenced(page))
    code = [snippet.code for snippet in fenced(page) if snippet.language in ("python", "json", "bash")]
    assert not [line for text in code for line in text.splitlines() if len(line) > 88]


@pytest.mark.parametrize("page", pages_with("python"), ids=lambda page: page.stem)
@pytest.mark.usefixtures("registry")
@pytest.mark.filterwarnings("ignore::ds_sparse.SparsityWarning")
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_python(page, {})


def test_the_code_for_a_gpu_runs(device):
    page = ROOT / "docs" / "getting-started.md"
    code = {snippet.title: snippet.code for snippet in fenced(page)}["on_a_gpu.py"]
    names: dict[str, Any] = {}
    run_python(page, names)
    exec(code.replace("cuda", device), names)
    assert names["out"].device.type == device and names["out"].shape == (1, 4, 2048, 64)


@pytest.mark.parametrize("page", pages_with("json"), ids=lambda page: page.stem)
@pytest.mark.usefixtures("registry")
def test_blocks_of_json_are_right(page):
    run_python(ROOT / "docs" / "writing-a-structure.md", {})
    for snippet in fenced(page):
        if snippet.language == "json":
            block = json.loads(snippet.code)["sparse_attention"]
            ds_sparse.parse_sparse_attention_layers(block, num_heads=4, num_layers=12, seq_len=1024)


def output_of(line: str, capfd: pytest.CaptureFixture[str]) -> str:
    """The output of a command. ds_sparse runs in this process, but for `run`, which starts others."""
    program, *words = shlex.split(line)
    if program == "ds_sparse" and words[0] != "run":
        status = main(words)
        output = "".join(capfd.readouterr())
    else:
        if program == "ds_sparse":
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                words = ["-m", "ds_sparse", "run", f"--master_port={probe.getsockname()[1]}", *words[1:]]
        environment = without_launcher() | {"DS_ACCELERATOR": "cpu"}
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
        status, output = done.returncode, done.stdout + done.stderr
    assert status == 0, f"{line}\n{output}"
    return output


LONG_RUNS = {
    "a-million-tokens": "trains on ranks of a sequence",
    "sequence-parallel": "trains on ranks of a sequence, and alone",
    "unchanged-scripts": "trains with DeepSpeed; tests of `ds_sparse run` do too",
}
"""Pages whose commands take long, and why."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow(LONG_RUNS[page.stem])] if page.stem in LONG_RUNS else [])
        for page in pages_with("console")
    ],
    ids=lambda page: page.stem,
)
def test_commands_run_and_print_what_the_page_says(page, tmp_path, monkeypatch, capfd):
    """In a folder with the files that have a title on the page; text blocks after them are among what they print."""
    monkeypatch.chdir(tmp_path)
    snippets = fenced(page)
    for snippet in snippets:
        if snippet.title is not None:
            (tmp_path / snippet.title).write_text(snippet.code)
    for snippet, following in zip(snippets, [*snippets[1:], None]):
        if snippet.language == "console":
            commands = re.findall(r"^\$ (.*)$", snippet.code, re.MULTILINE)
            printed = "\n".join(output_of(line, capfd) for line in commands)
            if following is not None and following.language == "text":
                assert not [line for line in following.code.splitlines() if line not in printed]


LONG_COMMANDS = [
    (page.name, snippet.code)
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES)
    for snippet in fenced(page)
    if snippet.language in ("bash", "sh")
]
"""Commands that would take minutes, or make environments and wheels: what they name is there."""


@cache
def help_of(*program: str) -> str:
    command = [sys.executable, *program, "--help"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("page", "code"), LONG_COMMANDS)
def test_what_a_long_command_names_is_there(page, code):
    assert subprocess.run(["bash", "-n"], input=code, text=True, check=False).returncode == 0
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        paths = [word for word in words if re.match(r"(examples|configs|tests|benchmarks|\.ci)/", word)]
        assert not [name for name in paths if not (ROOT / name).exists()], f"{page}: {line}"
        programs, called = {word.rsplit("/", 1)[-1] for word in words}, ()
        if {"deepspeed_train.py", "run.sh"} & programs and "tests/run.sh" not in words:
            called = ("examples/bing_bert/deepspeed_train.py",)
        elif words and words[0].rsplit("/", 1)[-1] == "ds_sparse" and words[1] != "run":
            called = ("-m", "ds_sparse", *words[1 : 3 if words[1] == "bench" else 2])
        elif words[1:3] == ["-m", "benchmarks"]:
            called = tuple(words[1:4])
        options = [word for word in words if word.startswith("--")] if called else []
        assert not [option for option in options if option not in help_of(*called)], f"{page}: {line}"
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"\[(\w+)\]", line)) <= extras.keys()


def test_layers_of_your_own(tmp_path, monkeypatch):
    """The code of the page on JSON and flag that makes some layers sparse, with its JSON."""
    snippets = {snippet.title: snippet.code for snippet in fenced(ROOT / "docs" / "json-and-flag.md")}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(snippets["ds.json"])
    layer = SimpleNamespace(attention=SimpleNamespace(self=None))
    names = {
        "ds_sparse": ds_sparse,
        "config": SimpleNamespace(hidden_size=48, num_attention_heads=12, attention_probs_dropout_prob=0.0),
        "model": SimpleNamespace(encoder=SimpleNamespace(layer=[layer])),
        "args": SimpleNamespace(deepspeed_config="ds.json", deepspeed_sparse_attention=True),
    }
    exec(snippets["layers.py"], names)
    assert layer.attention.self(torch.randn(1, 64, 48), torch.zeros(1, 1, 1, 64)).shape == (1, 64, 48)


def test_the_group_of_entry_points_is_the_one_that_is_read():
    snippets = fenced(ROOT / "docs" / "writing-a-structure.md")
    (settings,) = [tomllib.loads(snippet.code) for snippet in snippets if snippet.language == "toml"]
    assert list(settings["project"]["entry-points"]) == [ENTRY_POINT_GROUP]
