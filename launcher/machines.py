"""The machines and numbers of ranks that a user names for DeepSpeed's launcher, checked before it reaches any."""

from __future__ import annotations

import os
import re
from typing import Any

from ds_sparse.extras import optional_imports

with optional_imports():
    from deepspeed.launcher import runner

MOST_RANKS = 4096
"""On one machine. The launcher lists them all, and hands the list on as one word of a command."""

_HOST = re.compile(r"([\w.][\w.-]*@)?[\w.:\[][\w.:%\[\]-]*")
"""A name or an address, perhaps with a user before it. What begins with "-" would be an option of ssh or pdsh, such as
-oProxyCommand, which runs a command here; quotes and other signs mean something to them or to a shell."""


def check(given: Any) -> None:
    """Checks what DeepSpeed's parser has read, and the hostfile that it names.

    Raises:
        ValueError: a host that is no name; more ranks than any machine has, or fewer than none; no such port.
    """
    _check_number("--num_gpus", given.num_gpus, -1, MOST_RANKS, "the accelerators of one machine")
    _check_number("--master_port", given.master_port, 0, 65535, "a port")
    for option, nodes in (("--include", given.include), ("--exclude", given.exclude)):
        for node in nodes.split("@") if nodes else ():
            _check_host(option, node.partition(":")[0])
    if given.master_addr:
        _check_host("--master_addr", given.master_addr)
    if os.path.isfile(given.hostfile):
        for host, slots in _read(given.hostfile).items():
            _check_host(given.hostfile, host)
            _check_number(f"{given.hostfile}: slots of {host}", slots, 0, MOST_RANKS, "the accelerators of one machine")


def _read(hostfile: str) -> dict[str, int]:
    try:
        slots_of: dict[str, int] = runner.fetch_hostfile(hostfile)
    except OSError as error:
        raise ValueError(f"{hostfile}: cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(
            f'{hostfile}: no hostfile, which has a line such as "worker-0 slots=4" for each machine: {error}.'
        ) from error
    return slots_of


def _check_host(where: str, host: str) -> None:
    if not _HOST.fullmatch(host):
        raise ValueError(
            f"{where}: {host!r} is no name or address of a machine, which has letters, digits and . - _ : alone and "
            "does not begin with -; ssh or a shell would take it for something else."
        )


def _check_number(what: str, given: int, least: int, most: int, wanted: str) -> None:
    if not least <= given <= most:
        shown = str(given) if abs(given) < 10**20 else f"a number of {len(str(abs(given)))} digits"
        raise ValueError(f"{what} is {shown}; give {wanted}, {max(least, 0)} to {most}.")
