"""The `ds_sparse run` command: DeepSpeed's own launcher, with each worker started through `child`."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ds_sparse.config import BLOCK_KEY, DEFAULT_MODE, SparseAttentionConfigError, load_config, read_block
from ds_sparse.integrations.flag import FLAG, KERNEL_EXCLUDED, TRANSFORMER_KERNEL
from ds_sparse.sparsity import sparsity_modes
from ds_sparse.tools.extras import optional_imports

from . import child, machines

with optional_imports():
    import psutil
    from deepspeed.launcher import runner

CONFIG_OPTIONS = ("--deepspeed_config", "--deepspeed_config_file", "--deepscale_config", "--deepspeed")
"""How scripts spell the path of their DeepSpeed JSON; the last is that of Transformers, elsewhere a switch."""


class Invocation(NamedTuple):
    """A user's words to `ds_sparse run`, read."""

    options: list[str]
    """DeepSpeed's own, without --module, --no_python and our flag."""
    kind: str
    """"script", or "module" (--module), or "program" (--no_python)."""
    sparse: bool
    """The flag stands before the program or after it."""
    program: str
    arguments: list[str]


def read(words: Sequence[str]) -> Invocation | None:
    """Tells DeepSpeed's options from the program and its arguments; None where they ask for help instead.

    Raises:
        ValueError: there is no program, or an option that DeepSpeed's launcher does not know.
    """
    flag = f"--{FLAG}"
    for place, word in enumerate(words):
        if word in ("-h", "--help"):
            return None
        options = [earlier for earlier in words[:place] if earlier != flag]
        # DeepSpeed's parser says where the program stands: it is content with the first words that hold one.
        given, _ = _parsed([*options, word])
        if word != flag and given is not None:
            rest = list(words[place + 1 :])
            plain = [option for option in options if not _says_what_the_program_is(option)]
            if given.module and given.no_python:
                raise ValueError("--module and --no_python are both given; a program is started by one of them.")
            kind = "module" if given.module else "program" if given.no_python else "script"
            return Invocation(plain, kind, flag in (*words[:place], *rest), word, rest)
    _, complaint = _parsed([word for word in words if word != flag])
    if complaint.startswith("the following arguments are required"):
        complaint = "no training script is given"
    raise ValueError(f"{complaint}; see ds_sparse run --help.")


def check(asked: Invocation) -> None:
    """Raises ValueError for what would fail on every rank, as far as it shows before they start."""
    if asked.kind == "program" and shutil.which(asked.program) is None:
        raise ValueError(f"{asked.program}: no such program, or not executable.")
    if asked.kind == "script" and not os.path.exists(asked.program):
        raise ValueError(f"{asked.program}: no such script; give its path, or --module and the name of a module.")
    machines.check(_parsed([*asked.options, asked.program])[0])
    if asked.sparse and f"--{TRANSFORMER_KERNEL}" in asked.arguments:
        raise ValueError(KERNEL_EXCLUDED)
    for path in _config_paths(asked.arguments):
        if asked.kind == "program" and not os.path.exists(path):
            continue  # it may change folders first
        _, block = load_config(path)
        if asked.sparse and block is not None:
            _check_block(block, path)


def start(asked: Invocation) -> None:
    """Runs the program on all ranks and waits; leaves by SystemExit where a rank fails, as `deepspeed` does."""
    program = child.arguments(asked.kind, asked.sparse, [asked.program, *asked.arguments])
    terminated: list[int] = []

    def end(number: int, frame: Any) -> None:
        _end_workers()
        terminated.append(number)

    signal.signal(signal.SIGTERM, end)
    # The child as a script, since DeepSpeed's --module goes neither with --launcher mpich nor with --autotuning.
    runner.main([*asked.options, child.__file__, *program])
    if terminated:
        # The runner takes it for success if what it had started was ended by the signal, before it started workers.
        sys.exit(128 + signal.SIGTERM)


def _check_block(block: Mapping[str, Any], path: str) -> None:
    """Raises ValueError for a wrong block; one whose mode only the program knows, which may register it, passes."""
    mode, modes = block.get("mode", DEFAULT_MODE), sparsity_modes()
    if isinstance(mode, str) and mode not in modes and not _is_mistyped(mode, modes):
        return
    try:
        read_block(block, source=path)
    except SparseAttentionConfigError as error:
        if mode in modes or not isinstance(mode, str):
            raise
        more = f"{path}: {BLOCK_KEY}.mode: rename it if your program registers it: too similar to a known one."
        raise SparseAttentionConfigError([*error.mistakes, more]) from error


def _is_mistyped(mode: str, modes: Sequence[str]) -> bool:
    """Tells whether a mode is a known one with a typo or other capitals. One that holds a known name whole, such as
    "fixed_2", is named after it."""
    word = mode.lower()
    if word in ("", *modes):
        return True
    return bool(difflib.get_close_matches(word, modes, cutoff=0.8)) and not any(known in word for known in modes)


def _parsed(words: list[str]) -> tuple[Any, str]:
    """Has DeepSpeed's parser read the words; None and its complaint where it does not."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            return runner.parse_args(words), ""
        except SystemExit:
            return None, said.getvalue().strip().rpartition("error: ")[2]


def _says_what_the_program_is(option: str) -> bool:
    """--module and --no_python, which DeepSpeed's parser also takes shortened, and a -- before the program."""
    return option == "--" or (len(option) > 3 and any(name.startswith(option) for name in ("--module", "--no_python")))


def _config_paths(arguments: Sequence[str]) -> list[str]:
    paths = []
    for word, following in zip(arguments, [*arguments[1:], "-"], strict=False):
        option, equals, value = word.partition("=")
        value = value if equals else following
        if (
            option in CONFIG_OPTIONS
            and not value.startswith("-")
            and (option != "--deepspeed" or value.endswith(".json"))
        ):
            paths.append(value)
    return paths


def _end_workers() -> None:
    """Hands SIGTERM on to what DeepSpeed's runner started, which ends the workers; the runner would leave them."""
    started = psutil.Process().children()
    for process in started:
        process.terminate()
    if not started:
        sys.exit(128 + signal.SIGTERM)
