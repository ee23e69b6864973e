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
SHOWN = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
"""On the site; test_docs.py finds each public name there."""

NAMES = [name for path in SHOWN for name in (OF_REFERENCE if path == reference.__name__ else [path])]


def found(path: str) -> Any:
    """What a path such as `ds_sparse.ops.MatMul` names."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


SECTIONS = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Examples):$", re.MULTILINE)


def sections(docstring: str) -> dict[str, str]:
    """The text of each section, and of what stands before them under ""."""
    text, *rest = SECTIONS.split(docstring)
    return {"": text} | dict(zip(rest[::2], rest[1::2]))


def named(section: str) -> set[str]:
    """What the entries of a section are about: `query: ...` and `key, value: ...`."""
    entries = re.findall(r"^ {4}(\w+(?:, \w+)*): ", section, re.MULTILINE)
    return {name for entry in entries for name in entry.split(", ")}


def faults(what: Callable[..., Any], arguments: set[str]) -> list[str]:
    """What a docstring lacks: the summary, and a line about each of the arguments, and about no other."""
    docstring = inspect.getdoc(what)
    if not docstring:
        return ["a docstring"]
    first, *rest = docstring.splitlines()
    lacks = [] if first.endswith(".") and (not rest or not rest[0]) else ["a summary of one line"]
    parts = sections(docstring)
    described = named(parts.get("Args", ""))
    lacks += [f"argument {name}" for name in sorted(arguments - described - named(parts.get("Attributes", "")))]
    return lacks + [f"argument {name} in the signature" for name in sorted(described - arguments)]


def faults_of_function(function: Callable[..., Any]) -> list[str]:
    signature = inspect.signature(function)
    lacks = faults(function, signature.parameters.keys() - {"self"})
    gives_nothing = signature.return_annotation in (None, "None")
    said = sections(inspect.getdoc(function) or "").keys() & {"Returns", "Yields"}
    return lacks if gives_nothing or said else [*lacks, "Returns"]


def arguments_of(cls: type) -> set[str]:
    """Those of a class's constructor, or the fields of what other methods make."""
    if dataclasses.is_dataclass(cls) and "__pydantic_fields__" not in vars(cls):
        return {field.name for field in dataclasses.fields(cls) if field.name[0] != "_"}
    if isinstance(cls.__init__, type(object.__init__)):
        return set()
    return set(inspect.signature(cls).parameters)


def faults_of_class(cls: type) -> list[str]:
    """What the docstrings of a class, of the ways to make one and of its call lack; other methods need a docstring."""
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


@pytest.mark.parametrize("name", NAMES)
def test_a_docstring_has_what_the_signature_asks_for(name: str):
    what = found(name)
    lacks = faults_of_class(what) if isinstance(what, type) else faults_of_function(what)
    assert not lacks, f"the docstring of {name} lacks {', '.join(lacks)}"


def examples(name: str) -> list[doctest.DocTest]:
    """Those of a name and, of a class, of its methods; each with no names but what it imports."""
    tests = doctest.DocTestFinder().find(found(name), name, module=False, globs={"__name__": "__main__"})
    return [test for test in tests if test.examples]


@pytest.fixture
def environment(one_rank: None) -> Iterator[None]:
    """Takes back what an example that begins a process group writes into it."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.mark.usefixtures("environment", "registry")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_examples_run_and_print_what_they_say(name: str):
    torch.manual_seed(0)
    tests = examples(name)
    assert name in [test.name for test in tests], f"the docstring of {name} has no example"
    said: list[str] = []
    for test in tests:
        doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert not said, "".join(said)


def complete(query: int, key: int = 0) -> int:
    """Adds.

    Args:
        query, key: numbers.

    Returns:
        The sum.
    """
    return query + key


@pytest.mark.parametrize(
    "text, instead, fault",
    [
        ("Adds.\n", "Adds\n", "a summary of one line"),
        ("query, key: numbers", "query: a number", "argument key"),
        ("query, key:", "query, key, value:", "argument value in the signature"),
        ("Returns:", "It returns", "Returns"),
    ],
)
def test_a_missing_part_is_found(text: str, instead: str, fault: str, monkeypatch: pytest.MonkeyPatch):
    assert faults_of_function(complete) == []
    monkeypatch.setattr(complete, "__doc__", complete.__doc__.replace(text, instead))
    assert faults_of_function(complete) == [fault]
