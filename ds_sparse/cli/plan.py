from __future__ import annotations

import argparse
import json
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..tools.arguments import UsageError, chance, positive, positive_number
from ..tools.terminal import Terminal, width, wrong

if TYPE_CHECKING:
    from ..plan.plan import Plan
    from ..plan.untimed import Untimed

AUTO, HERE, H200 = "auto", "here", "h200"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Says what a training run will cost, from rates that were measured: first whether it fits, how much faster "
        "than dense attention it is and what would be better, then time and memory. Nothing is trained."
    )
    parser.epilog = (
        "exit status: 0 if the plan is made; 1 if a step does not fit the GPU, or something is wrong in a file; 2 for "
        "wrong usage."
    )
    parser.add_argument("file", help="DeepSpeed JSON with a sparse_attention block")
    parser.add_argument(
        "--model",
        required=True,
        help="bert-base, bert-large, modernbert-base, bing_bert-base or neox-small (those of the examples), or a "
        "config.json of Transformers",
    )
    parser.add_argument("--model-type", help="the model_type that the config.json counts as")
    parser.add_argument("--seq", type=positive, required=True, help="tokens of a sequence")
    parser.add_argument(
        "--micro-batch",
        type=positive,
        help="sequences of a pass on one GPU, or on those that share them (default: the JSON's)",
    )
    parser.add_argument(
        "--gpus", type=positive, help="all of them (default: as many as share a sequence, by sequence_parallel_size)"
    )
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], help="(default: the JSON's)")
    parser.add_argument("--dropout", type=chance, help="of the model, in attention too (default: the model's)")
    parser.add_argument(
        "--checkpoint-activations",
        action=argparse.BooleanOptionalAction,
        help="layers are computed again in the backward pass (default: if the JSON has activation_checkpointing)",
    )
    parser.add_argument("--document-tokens", type=positive, metavar="N", help="mean tokens of a sequence that are text")
    parser.add_argument("--memory", type=positive_number, metavar="GIB", help="of the GPU (default: what it has)")
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument(
        "--on",
        choices=[AUTO, HERE, H200],
        default=AUTO,
        help="whose rates: committed ones of an H200, or of this machine, measured now, which takes some minutes "
        "(default: h200 where no other GPU is here)",
    )
    whose.add_argument(
        "--rates",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="take rates from what was written on another machine by `ds_sparse bench attention --json` and, of a "
        "clone, `python -m benchmarks bert --json` and, for several GPUs, `python -m benchmarks sequence --json`",
    )
    parser.add_argument(
        "--details",
        action="store_true",
        help="each kind of layers, where time and memory go, other lengths, and all that is assumed",
    )
    parser.add_argument("--json", action="store_true", help="print all numbers: milliseconds, bytes, FLOPs, tokens")


def run(args: argparse.Namespace) -> int:
    from ..bench.runs import WIDTH
    from ..plan.plan import Plan
    from ..plan.text import UNCERTAIN, as_json, lines_of

    notices: list[str] = []
    try:
        made = _made(args, notices)
    except (ValueError, ImportError, OSError, MemoryError) as error:
        return wrong(error)
    if args.json:
        print(json.dumps(as_json(made), indent=2))
    else:
        terminal = Terminal()
        verdict, *others = lines_of(made, args.details, min(WIDTH, width(WIDTH)))
        is_slower = isinstance(made, Plan) and made.gain < 1 - UNCERTAIN
        terminal.line(verdict, "bold red" if made.fits is False or is_slower else "bold green")
        for line in others:
            terminal.line(line)
    for notice in notices:
        print(textwrap.fill(notice, width(len(notice))), file=sys.stderr)
    return 1 if made.fits is False else 0


def _made(args: argparse.Namespace, notices: list[str]) -> Plan | Untimed:
    """The plan; what is to be said beside it is appended to `notices`."""
    import torch

    from ..config import load_config
    from ..plan.model import find_model
    from ..plan.plan import make_plan
    from ..plan.rates import H200 as COMMITTED
    from ..plan.rates import MEMORY_GIB, committed_rates
    from ..plan.settings import read_settings
    from ..plan.untimed import plan_untimed

    model = find_model(args.model, args.model_type, dropout=args.dropout, attention_dropout=args.dropout)
    deepspeed, block = load_config(args.file)
    settings = read_settings(deepspeed, args.file, args.micro_batch, args.gpus, args.dtype, args.checkpoint_activations)
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    rates = None
    if args.rates:
        from ..plan.fitting import from_files, rates_of

        rates = rates_of(from_files(args.rates))
        machine = rates.machine
    elif args.on == HERE or (args.on == AUTO and gpu is not None and gpu.name != COMMITTED):
        machine = "this CPU" if gpu is None else gpu.name
    else:
        rates = committed_rates()
        machine = rates.machine
    memory = args.memory or MEMORY_GIB.get(machine)
    if args.memory is None and gpu is not None and gpu.name == machine:
        memory = gpu.total_memory / 2**30
    of_run = block, args.file, model, settings
    untimed = plan_untimed(*of_run, args.seq, args.document_tokens, memory)
    if gpu is None and args.on == AUTO and not args.rates:
        here = " --on here measures this CPU." if untimed is None else ""
        notices.append(f"No GPU here: planned for an {COMMITTED}.{here}")
    if untimed is not None:
        return untimed
    of_rates = "fp32" if (gpu is None if rates is None else rates.itemsize == 4) else "bf16"
    _require_dtype(args, settings.dtype, of_rates, machine)
    plan = partial(make_plan, *of_run, seq_len=args.seq, document_tokens=args.document_tokens, memory_gib=memory)
    if rates is None:
        from ..plan.measure import measured_rates

        plan(committed_rates())  # what is wrong is said before anything is measured
        why = "" if args.on == HERE else f"Rates of {machine} do not come with ds_sparse. "
        print(f"{why}Measuring those of {machine}, which takes some minutes ...", file=sys.stderr)
        rates = measured_rates("cpu" if gpu is None else "cuda")
    made = plan(rates)
    if block is None:
        notices.append(f"{args.file}: no sparse_attention block; this is the plan of dense training.")
    return made


def _require_dtype(args: argparse.Namespace, dtype: str, of_rates: str, machine: str) -> None:
    """Raises ValueError where the rates are of other numbers than those of the training; UsageError where --dtype says
    these."""
    if (dtype == "fp32") == (of_rates == "fp32"):
        return
    if args.dtype is not None:
        raise UsageError(f"--dtype {dtype}: the rates of {machine} are of {of_rates}; give --dtype {of_rates}.")
    turn = "turn off bf16 and fp16" if of_rates == "fp32" else "turn on bf16"
    raise ValueError(
        f"The training is in {dtype}, and the rates of {machine} are of {of_rates}; {turn} in the JSON, or pass "
        f"--dtype {of_rates}."
    )
