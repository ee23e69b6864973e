"""The machines and numbers of ranks that a user names for DeepSpeed's launcher, checked before it reaches any."""

from __future__ import annotations

import os
import re
from typing import Any

from ds_sparse.tools.extras import optional_imports

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
        ValueError: a host that is no name; more ranks than any machine has, or fewer than none; no such port; what is
            included or excluded is not there, leaves nothing, or stands beside options that it does not go with.
    """
    _check_number("--num_gpus", given.num_gpus, -1, MOST_RANKS, "the accelerators of one machine")
    _check_number("--master_port", given.master_port, 0, 65535, "a port")
    for option, nodes in (("--include", given.include), ("--exclude", given.exclude)):
        for node in nodes.split("@") if nodes else ():
            _check_host(option, node.partition(":")[0])
    if given.master_addr:
        _check_host("--master_addr", given.master_addr)
    slots_of = _read(given.hostfile) if os.path.isfile(given.hostfile) else {}
    for host, slots in slots_of.items():
        _check_host(given.hostfile, host)
        _check_number(f"{given.hostfile}: slots of {host}", slots, 0, MOST_RANKS, "the accelerators of one machine")
    _check_choice(given, slots_of)


def _check_choice(given: Any, slots_of: dict[str, int]) -> None:
    """Checks which of the machines are to be used; `slots_of` is empty without a hostfile."""
    if given.num_nodes > 1 and not slots_of:
        raise ValueError(f"--num_nodes is {given.num_nodes}, and {given.hostfile}, the hostfile, is not there.")
    chosen = [option for option in ("--include", "--exclude") if getattr(given, option[2:])]
    counts = [option for option in ("--num_nodes", "--num_gpus") if getattr(given, option[2:]) >= 0]
    if not chosen:
        return
    if len([*chosen, *counts]) > 1:
        raise ValueError(f"{' and '.join([*chosen, *counts])} do not go together; give one of them.")
    known = slots_of or {"localhost": runner.get_accelerator().device_count()}
    text, listed = getattr(given, chosen[0][2:]), ", ".join(f"{host} with {slots}" for host, slots in known.items())
    try:
        left = runner.parse_inclusion_exclusion(known, given.include, given.exclude)
    except ValueError as error:
        raise ValueError(f"{chosen[0]} is {text!r}: {error}. Machines and their ranks: {listed}.") from error
    if not left:
        raise ValueError(f"{chosen[0]} is {text!r}, and leaves no machine. Machines and their ranks: {listed}.")


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
