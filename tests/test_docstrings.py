"""Docstrings of public names: each has the sections that its signature asks for, and its examples run."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import os
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import deepspeed  # noqa: F401  says once which accelerator it takes, and not amid an example
import pytest
import torch
from snippets import ROOT

from ds_sparse import reference

OF_REFERENCE = [
    f"{reference.__name__}.{name}"
    for name, value in vars(reference).items()
    if name[0] != "_" and getattr(value, "__module__", None) == reference.__name__
]
PAGES_OF_API = sorted((ROOT / "docs").glob("api*.md"))
SHOWN = [name for page in PAGES_OF_API for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]
"""Names on the pages of the API; test_docs.py finds each public name there."""

NAMES = [name for path in SHOWN for name in (OF_REFERENCE if path == reference.__name__ else [path])]

SECTIONS = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Examples):$", re.MULTILINE)


def found(path: str) -> Any:
    """The object that a path such as `ds_sparse.ops.MatMul` names."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def faults(what: Callable[..., Any], arguments: set[str]) -> list[str]:
    """Parts that a docstring lacks: the summary, and a line about each of the arguments, and about no other."""
    docstring = inspect.getdoc(what)
    if not docstring:
        return ["a docstring"]
    first, *rest = docstring.splitlines()
    lacks = [] if first.endswith(".") and (not rest or not rest[0]) else ["a summary of one line"]
    parts = SECTIONS.split(docstring)
    named = {
        section: {
            name for entry in re.findall(r"^ {4}(\w+(?:, \w+)*): ", text, re.MULTILINE) for name in entry.split(", ")
        }
        for section, text in zip(parts[1::2], parts[2::2])
    }
    described = named.get("Args", set())
    lacks += [f"argument {name}" for name in sorted(arguments - described - named.get("Attributes", set()))]
    return lacks + [f"argument {name} in the signature" for name in sorted(described - arguments)]


def faults_of_function(function: Callable[..., Any]) -> list[str]:
    """Parts that the docstring of a function lacks; one that returns something says what."""
    signature = inspect.signature(function)
    lacks = faults(function, signature.parameters.keys() - {"self"})
    says = re.search(r"^(Returns|Yields):$", inspect.getdoc(function) or "", re.MULTILINE)
    return lacks if says or signature.return_annotation in (None, "None") else [*lacks, "Returns"]


def arguments_of(cls: type) -> set[str]:
    """Arguments of a class's constructor, or the fields of what other methods make."""
    if dataclasses.is_dataclass(cls) and "__pydantic_fields__" not in vars(cls):
        return {field.name for field in dataclasses.fields(cls) if field.name[0] != "_"}
    return set() if isinstance(cls.__init__, type(object.__init__)) else set(inspect.signature(cls).parameters)


def faults_of_class(cls: type) -> list[str]:
    """Parts that docstrings of a class, of the ways to make one and of its call lack; other methods need one."""
    lacks = faults(cls, arguments_of(cls))
    for name, member in vars(cls).items():
        function = getattr(cls, name) if isinstance(member, (classmethod, staticmethod)) else member
        if not callable(function) or isinstance(function, type) or (name[0] == "_" and name != "__call__"):
            continue
        if function is not member or name in ("__call__", "forward"):
            lacks += [f"{fault} of {name}" for fault in faults_of_function(function)]
        elif not inspect.getdoc(getattr(cls, name)):
            lacks.append(f"a docstring of {name}")
    return lacks


@pytest.fixture
def environment(one_rank: None) -> Iterator[None]:
    """Takes back what an example that begins a process group writes into the environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("environment", "registry")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_docstring_has_what_the_signature_asks_for_and_an_example_that_runs(name: str):
    what = found(name)
    lacks = faults_of_class(what) if isinstance(what, type) else faults_of_function(what)
    assert not lacks, f"the docstring of {name} lacks {', '.join(lacks)}"
    torch.manual_seed(0)
    tests = doctest.DocTestFinder().find(what, name, module=False, globs={"__name__": "__main__"})
    tests = [test for test in tests if test.examples]
    assert name in [test.name for test in tests], f"the docstring of {name} has no example"
    said: list[str] = []
    for test in tests:
        doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert not said, "".join(said)
