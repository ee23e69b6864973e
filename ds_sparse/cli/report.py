from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from ..tools.terminal import Terminal
from ..tools.wording import counted, listed

if TYPE_CHECKING:
    from ._facts import Facts, Library
    from ._problems import Problem


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Says what an issue has to say of a machine: versions, chip, driver, libraries; what serves each "
        "operation, and why not something else; and what to do about each problem. It names no folder, user or host."
    )
    parser.epilog = "exit status: 0, whatever it finds; 2 for wrong usage."
    parser.add_argument(
        "--json", action="store_true", help="print an object: the facts by name, and problems (what, do)"
    )


def run(args: argparse.Namespace) -> int:
    facts, found = _gathered()
    if args.json:
        named = [gpu._asdict() for gpu in facts.gpus]
        print(json.dumps(asdict(facts) | {"gpus": named, "problems": [x._asdict() for x in found]}, indent=2))
        return 0
    terminal = Terminal()
    for line, style in _styled(facts, found):
        terminal.line(line, style)
    return 0


def report() -> str:
    """The text that the command prints of this machine."""
    return "\n".join(line for line, _ in _styled(*_gathered()))


def _gathered() -> tuple[Facts, list[Problem]]:
    # Here and not above: it imports torch, which help does without.
    from ._facts import gather
    from ._problems import problems

    facts = gather()
    return facts, problems(facts)


def _styled(facts: Facts, found: list[Problem]) -> Iterator[tuple[str, str]]:
    """The lines, each with what rich is told of it."""
    for line in lines(facts):
        yield line, "" if line.startswith(" ") else "bold"
    for problem in found:
        yield f"problem: {problem.what}", "red"
        yield f"  do: {problem.do}", ""
    if not found:
        yield "no problem found", "green"


def lines(facts: Facts) -> Iterator[str]:
    """The report but for problems; headings begin at the margin."""
    yield f"ds_sparse {facts.version}, Python {facts.python}, {facts.system}"
    yield "  " + ", ".join(f"{name} {version or 'not installed'}" for name, version in facts.packages.items())
    yield f"CPU: {facts.processor}"
    counts = f"{counted(facts.cores, 'core')}, {counted(facts.threads, 'thread')}"
    yield (
        f"  {counts}; kernels use {facts.instruction_set or 'nothing'}, of"
        + (f" {' '.join(facts.features)}" if facts.features else " unknown features")
    )
    yield f"GPU: {', '.join(sorted({gpu.name for gpu in facts.gpus})) or facts.gpu or 'none'}"
    yield f"  {_cuda(facts)}"
    if facts.libraries:
        yield "libraries"
    for name, library in facts.libraries.items():
        yield f"  {name}: {_library(library)}"
    for device, table in facts.operations.items():
        yield f"operations on {facts.gpu if device == 'cuda' else 'the CPU'}"
        yield from _served(table)
        for name, why in facts.others[device].items():
            yield f"  not by {name}: {why}"


def _cuda(facts: Facts) -> str:
    torch = f"torch of CUDA {facts.torch_cuda}" if facts.torch_cuda else "torch without CUDA"
    served = (
        f", which serves CUDA {facts.driver_cuda // 1000}.{facts.driver_cuda % 1000 // 10}" if facts.driver_cuda else ""
    )
    capability = f"compute capability {facts.gpu_capability}; " if facts.gpu_capability else ""
    count = f"{len(facts.gpus)} of {facts.gpus[0].memory}; " if facts.gpus else ""
    driver = f"driver {facts.driver}" if facts.driver != "unknown" else "no NVIDIA driver found"
    return f"{count}{capability}{driver}{served}; {torch}"


def _library(library: Library) -> str:
    if library.state:
        return library.state
    return f"loaded, without {', '.join(library.missing)}" if library.missing else "loaded, with all operators"


def _served(table: dict[str, dict[str, list[str]]]) -> Iterator[str]:
    """A line for operations that the same implementations serve."""
    alike: dict[str, list[str]] = {}
    for operation, by_dtype in table.items():
        groups: dict[str, list[str]] = {}
        for dtype, names in by_dtype.items():
            groups.setdefault(", else ".join(names), []).append(dtype)
        words = "; ".join(f"{listed(dtypes, 'and')} by {names}" for names, dtypes in groups.items())
        alike.setdefault(words, []).append(operation)
    for words, operations in alike.items():
        yield textwrap.fill(f"  {', '.join(operations)}: {words}", 120, subsequent_indent="    ")
