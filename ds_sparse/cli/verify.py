from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import count, groupby
from typing import TYPE_CHECKING, Any

from ..tools.arguments import positive
from ..tools.terminal import Terminal, wrong
from ..tools.wording import counted

if TYPE_CHECKING:
    import torch

    from ..verify.faults import Outcome
    from ..verify.variants import Variant

SHOWN = 20
"""Wrong variants that are named; the others are counted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Calls every kernel variant of this machine, forward and backward: each implementation, block, head size, "
        "dtype and order of sums. Results have to be as near to float64 as plain PyTorch's, and the same bits each "
        "time while memory is busy. The numbers are the same in every run."
    )
    parser.epilog = (
        "exit status: 0 if all variants are right; 1 if one is wrong, or the device is not there; 2 for wrong usage."
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: the GPU where there is one")
    parser.add_argument(
        "--operation", metavar="NAME", help="this one alone, such as block_sparse_attention; a wrong name lists them"
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=0,
        help="go round again with other numbers until they are over (default: once)",
    )
    parser.add_argument("--repeats", type=positive, default=3, help="of each call, compared bit by bit (default: 3)")
    parser.add_argument("--seed", type=positive, default=1, help="of the first round's numbers (default: 1)")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print an object: ok, device, repeats, seconds, machine and versions; families (operation, "
        "implementation, variants, wrong, seconds); wrong (variant and its parts, seed, what)",
    )


def run(args: argparse.Namespace) -> int:
    try:
        import torch

        from ..bench.machine import conditions
        from ..verify.variants import variants
    except (ImportError, OSError) as error:
        return wrong(f"ds_sparse verify: {error}\nds_sparse report says what to do.")
    has_gpu = torch.cuda.is_available()
    if args.device == "cuda" and not has_gpu:
        return wrong("--device cuda: torch finds no CUDA GPU; ds_sparse report says why.")
    device = torch.device(args.device or ("cuda" if has_gpu else "cpu"))
    everything = variants(device)
    names = list(dict.fromkeys(variant.operation for variant in everything))
    if args.operation not in (None, *names):
        return wrong(f"--operation {args.operation}: there are {', '.join(names)}.", 2)
    chosen = [variant for variant in everything if args.operation in (None, variant.operation)]
    about = {"device": str(device), "repeats": args.repeats, **conditions(device)}
    return _verify(args, chosen, device, about)


def _verify(args: argparse.Namespace, chosen: list[Variant], device: torch.device, about: dict[str, Any]) -> int:
    terminal, start = Terminal(), time.monotonic()
    if not args.json:
        terminal.line(", ".join(f"{name} {value}" for name, value in about.items()), "bold")
    families: dict[str, dict[str, Any]] = {}
    wrong: list[dict[str, Any]] = []
    for round_ in count():
        for outcomes in _families(args, chosen, device, args.seed + round_, terminal):
            family, faults = _summary(outcomes), [_in_words(outcome) for outcome in outcomes if outcome.wrong]
            if not args.json:
                _say(family, faults, len(wrong), terminal)
            wrong += faults
            known = families.setdefault(f"{family['operation']}, {family['implementation']}", family)
            if known is not family:  # another round
                known.update({key: round(known[key] + family[key], 1) for key in ("variants", "wrong", "seconds")})
        if time.monotonic() - start >= args.seconds:
            break
    seconds = round(time.monotonic() - start, 1)
    if args.json:
        done = {"ok": not wrong, "seconds": seconds, **about, "families": list(families.values()), "wrong": wrong}
        print(json.dumps(done, indent=2))
    else:
        number = sum(family["variants"] for family in families.values())
        terminal.line(
            f"{counted(number, 'variant')} in {seconds} s: {_verdict(len(wrong))}", "red" if wrong else "green"
        )
    return 1 if wrong else 0


def _families(
    args: argparse.Namespace, chosen: list[Variant], device: torch.device, seed: int, terminal: Terminal
) -> Iterator[list[Outcome]]:
    """The outcomes of one operation by one implementation, when they are there."""
    from ..verify.faults import verify

    for name, family in groupby(chosen, key=lambda variant: variant.family):
        variants, outcomes = list(family), []
        with terminal.progress(0 if args.json else len(variants), name) as done:
            for outcome in verify(variants, device, seed, args.repeats):
                outcomes.append(outcome)
                done(name)
        yield outcomes


def _summary(outcomes: list[Outcome]) -> dict[str, Any]:
    variant = outcomes[0].variant
    return {
        "operation": variant.operation,
        "implementation": variant.implementation,
        "variants": len(outcomes),
        "wrong": sum(bool(outcome.wrong) for outcome in outcomes),
        "seconds": round(sum(outcome.seconds for outcome in outcomes), 1),
    }


def _in_words(outcome: Outcome) -> dict[str, Any]:
    about = outcome.variant._asdict() | {"dtype": str(outcome.variant.dtype).removeprefix("torch.")}
    return {"variant": str(outcome.variant), **about, "seed": outcome.seed, "what": outcome.wrong}


def _say(family: dict[str, Any], faults: list[dict[str, Any]], before: int, terminal: Terminal) -> None:
    verdict = f"WRONG: {family['wrong']} of " if faults else "right: "
    name = f"{family['operation']:<23} {family['implementation']:<9}"
    terminal.line(
        f"{name} {verdict}{counted(family['variants'], 'variant')}, {family['seconds']} s", "red" if faults else ""
    )
    for fault in faults[: max(0, SHOWN - before)]:
        terminal.line(f"  {fault['variant']}, seed {fault['seed']}: {fault['what']}")


def _verdict(wrong: int) -> str:
    if not wrong:
        return "all as near to float64 as plain PyTorch, and the same bits each time."
    more = f" The first {SHOWN} are named." if wrong > SHOWN else ""
    return f"{wrong} wrong.{more} Report it with this output and that of ds_sparse report; do not train on it."
