"""The program that DeepSpeed's launcher starts as each worker: it becomes the user's, as that would run by itself.

    python child.py [--local_rank=N] [--deepspeed_sparse_attention] {script,module,program} -- WORDS

The arguments carry everything, since the workers of other nodes do not inherit the environment. Below this process the
environment does, so that shell scripts and launchers inside the program pass it on.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

CHECKOUT = [] if find_spec("ds_sparse") else [str(Path(__file__).resolve().parents[1])]
"""The project's folder, where it is not installed and was found by the folder that `ds_sparse run` was started in."""
sys.path += CHECKOUT

from ds_sparse.integrations.flag import FLAG, RUN_VARIABLE, WORKER_VARIABLE  # noqa: E402

STARTUP = Path(__file__).with_name("startup")

INTERPRETERS = {"script": [sys.executable, "-u"], "module": [sys.executable, "-u", "-m"], "program": []}
"""Kind of program to the words before it; DeepSpeed's launcher starts Python with -u, too."""


def arguments(kind: str, sparse: bool, program: Sequence[str]) -> list[str]:
    """The words after the child's own name. DeepSpeed's launcher puts `--local_rank=N` before them.

    The -- keeps its parsers from taking options of the program for theirs. Right after the child they would drop it.
    """
    return [*([f"--{FLAG}"] if sparse else []), kind, "--", *program]


def command(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The program's command line and environment."""
    end = argv.index("--")
    parser = argparse.ArgumentParser(prog="ds_sparse run")
    parser.add_argument("--local_rank")
    parser.add_argument(f"--{FLAG}", action="store_true")
    parser.add_argument("kind", choices=INTERPRETERS)
    args = parser.parse_args(argv[:end])
    program, *rest = argv[end + 1 :]
    local_rank = [] if args.local_rank is None else [f"--local_rank={args.local_rank}"]

    inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(STARTUP), *inherited, *CHECKOUT]),
        RUN_VARIABLE: "sparse" if getattr(args, FLAG) else "dense",
        WORKER_VARIABLE: str(os.getpid()),
    }
    return [*INTERPRETERS[args.kind], program, *local_rank, *rest], environment


def main() -> None:
    words, environment = command(sys.argv[1:])
    try:
        os.execvpe(words[0], words, environment)
    except OSError as error:
        sys.exit(f"ds_sparse run: {words[0]} cannot be started: {error.strerror}.")


if __name__ == "__main__":
    main()
