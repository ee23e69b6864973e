"""Options that operations of `ds_sparse bench` share, and the types of their values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...arguments import positive
from ...block_sizes import BLOCK_SIZES
from .. import machine

BF16_ON_A_GPU = {"cpu": ["fp32"], "cuda": ["bf16"]}

NO_FLOOR = (
    "A CPU has no floor: dense results of hundreds of megabytes get new memory at every call, which takes longer than "
    "computing them, so that density times the dense time bounds nothing."
)


def add_shared(parser: argparse.ArgumentParser, dtype_of: dict[str, list[str]], seconds: int | None = 60) -> None:
    """The options of operations that time rounds; `dtype_of` are the dtypes that a device measures by itself."""
    parser.add_argument(
        "--dtype",
        type=listed(one_of(machine.DTYPES)),
        help=f"{', '.join(machine.DTYPES)} (default: {by_device(dtype_of)})",
    )
    parser.add_argument("--repeats", type=positive, default=20, help="rounds; times are their medians (default: 20)")
    if seconds is not None:
        help = f"no new round of a case after this long (default: {seconds})"
        parser.add_argument("--seconds", type=positive, default=seconds, help=help)
    add_device_and_json(parser, dtype_of)


def add_device_and_json(parser: argparse.ArgumentParser, dtype_of: Mapping[str, object]) -> None:
    """The options that all operations have."""
    parser.set_defaults(dtype_of=dtype_of)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: cpu)")
    parser.add_argument("--json", metavar="OUT", help="write the rows to this file")


def add_sizes(parser: argparse.ArgumentParser, seq_len: str, heads: str) -> None:
    """Sizes that are varied: each option takes a list."""
    lists = {
        "--seq-len": (seq_len, "tokens"),
        "--heads": (heads, "of each sequence"),
        "--head-dim": ("64", "numbers in a head's vector"),
        "--batch": ("1", "sequences"),
    }
    for option, (default, help) in lists.items():
        type = listed(positive)
        parser.add_argument(option, type=type, default=type(default), help=f"{help} (default: {default})")


def add_cases(parser: argparse.ArgumentParser, grid: Iterable[Any], such_as: str) -> None:
    """Which cases of a grid, by name."""
    parser.add_argument(
        "--cases",
        metavar="NAMES",
        type=lambda text: text.split(","),
        default=["*"],
        help=f"patterns, such as {such_as}: {', '.join(case.name for case in grid)} (default: all)",
    )


def add_labelled_only(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--labelled-only",
        action="store_true",
        help="logits of tokens with a label alone, as bing_bert computes them (default: of all, as Transformers does)",
    )


def by_device(values: Mapping[str, object]) -> str:
    """Defaults as help says them."""
    on_cpu, on_gpu = in_option(values["cpu"]), in_option(values["cuda"])
    return on_cpu if on_cpu == on_gpu else f"{on_cpu}; on a GPU {on_gpu}"


def in_option(value: object) -> str:
    """A default as it would be written."""
    if value is None:
        return "as many as have 48 x 4096 x 4096 scores"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def listed(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """argparse type: comma-separated values of another type."""
    return lambda text: [parse(part) for part in text.split(",")]


def block(text: str) -> int:
    """argparse type: a block size that layouts can have."""
    return int(one_of(list(map(str, BLOCK_SIZES)))(text))


def natural(text: str) -> int:
    """argparse type: an integer of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return int(text)


def positive_number(text: str) -> float:
    """argparse type: above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def percent(text: str) -> float:
    """argparse type: a part of 1, from 0 to below 100 %."""
    return number_below(100, "a percentage", text) / 100


def probability(text: str) -> float:
    """argparse type: from 0 to below 1."""
    return number_below(1, "a probability", text)


def number_below(end: int, what: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < end:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what} from 0 to below {end}")
    return number


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """argparse type: one of some names."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return parse
