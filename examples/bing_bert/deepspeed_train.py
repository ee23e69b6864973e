"""Pretrains a BERT encoder on long documents with DeepSpeed, its attention block-sparse or dense.

    bash examples/bing_bert/run.sh                                       everything set up, a small model on this machine
    deepspeed examples/bing_bert/deepspeed_train.py --deepspeed_sparse_attention --deepspeed_config configs/bigbird.json

The structure is the "sparse_attention" block of the DeepSpeed JSON; without the flag the same JSON trains dense.
Read from the bottom: `main` prepares the data and runs `pretrain` once, or twice with --compare-dense.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from pydantic import ValidationError

from device import DEVICE  # sets what DeepSpeed will use, so it comes before everything that imports DeepSpeed

import deepspeed

import ds_sparse
from ds_sparse.layout import draw, save_drawing

import checkpoints
from data import Batch, PretrainingData, open_corpus
from modeling import BertConfig, BertForPreTrainingPreLN, parameter_groups
from report import Metrics, Progress, draw_loss_curve, peak_memory_gib, say

STARTED = time.monotonic()
HERE = Path(__file__).resolve().parent


def parse_arguments() -> argparse.Namespace:
    """The options; each may be spelled with - or _. DeepSpeed's and ours for the JSON and the flag come last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def option(name: str, *aliases: str, **settings: Any) -> None:
        names = dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}", *aliases])
        parser.add_argument(*names, dest=name, **settings)

    option("config_file", "--cf", default=str(HERE / "bert_tiny.json"), help="model JSON (default: bert_tiny.json)")
    option("output_dir", default="runs/bing_bert", help="each run gets a numbered folder here (default: runs/bing_bert)")
    option("resume", action="store_true", help="continue the newest run of output_dir exactly where its last checkpoint is")
    option("corpus", default="stdlib", help="stdlib, site-packages, sotu, a .txt/.jsonl/.parquet file or folder, or a `datasets` name")
    option("text_column", help="column that holds the text, for .jsonl, .parquet and `datasets`")
    option("max_seq_length", type=int, default=2048, help="tokens in a sequence (default: 2048)")
    option("max_predictions_per_seq", type=int, help="tokens to predict in each sequence (default: 15 %%)")
    option("max_steps", type=int, help="optimizer steps to end after")
    option("max_minutes", type=float, default=10.0, help="minutes to end after, all included (default: 10)")
    option("warmup_steps", type=int, default=50, help="steps of linear warm-up, then inverse square root (default: 50)")
    option("checkpoint_activations", action="store_true", help="recompute activations in backward to save memory")
    option("compare_dense", action="store_true", help="also train dense from the same JSON, in half the time each")
    option("eval_steps", type=int, default=100, help="steps between held-out losses (default: 100)")
    option("eval_sequences", type=int, default=32, help="held-out sequences (default: 32)")
    option("save_steps", type=int, default=100, help="steps between checkpoints (default: 100)")
    option("print_steps", type=int, default=10, help="steps between lines where there is no terminal (default: 10)")
    option("seed", type=int, default=42, help="seed of weights, dropout, data order and masks (default: 42)")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    ds_sparse.add_config_arguments(parser)
    args = parser.parse_args()
    if args.deepspeed_config is None:
        parser.error("--deepspeed_config FILE is needed, for example configs/bslongformer.json")
    for name in ("max_steps", "eval_steps", "save_steps", "print_steps", "warmup_steps", "max_minutes"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            parser.error(f"--{name} is {getattr(args, name)}; it has to be above 0")
    return args


def read_model_config(path: str) -> BertConfig:
    """The `bert_model_config` of a model JSON.

    Raises:
        ValueError: no such file, not JSON, or a wrong key, named.
    """
    try:
        return BertConfig.model_validate(json.loads(Path(path).read_text())["bert_model_config"])
    except FileNotFoundError as error:
        raise ValueError(f"{path}: no such file; give a model JSON such as {HERE / 'bert_tiny.json'}.") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON: {error}.") from error
    except KeyError as error:
        raise ValueError(f"{path}: the key {error} is missing; see {HERE / 'bert_tiny.json'}.") from error
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']} (given {e['input']!r})" for e in error.errors())
        raise ValueError(f"{path}: bert_model_config: {wrong}.") from error


def adapt_to_device(config: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The JSON with an optimizer and a precision that the device has; says a sentence for each thing that it changes."""
    optimizer = config.get("optimizer") or {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}
    if "optimizer" not in config:
        say("The JSON has no optimizer: AdamW with lr 1e-3 and weight_decay 0.01 is used.")
    params = dict(optimizer.get("params", {}))
    kind = optimizer["type"]
    if device.type == "cpu" and kind.lower() == "lamb":
        params = {name: params[name] for name in ("weight_decay", "betas", "eps") if name in params} | {"lr": 1e-3}
        kind = "AdamW"
        say("The JSON asks for Lamb, which DeepSpeed has on GPUs only: AdamW with lr 1e-3 is used on the CPU.")
    if device.type == "cpu" and kind.lower() in ("adam", "adamw") and "torch_adam" not in params:
        params["torch_adam"] = True
        say(f"{kind} runs as PyTorch's own on the CPU (torch_adam), so that DeepSpeed does not compile one.")
    adapted = {**config, "optimizer": {"type": kind, "params": params}}
    if config.get("fp16", {}).get("enabled") and not deepspeed.get_accelerator().is_fp16_supported():
        del adapted["fp16"]
        say("The JSON asks for fp16, which DeepSpeed does not support on this CPU: fp32 is used.")
    return adapted


def learning_rate_factor(warmup_steps: int, step: int) -> float:
    """Linear warm-up, then inverse square root: needs no end that is known beforehand."""
    return min((step + 1) / warmup_steps, math.sqrt(warmup_steps / (step + 1)))


class Outcome(NamedTuple):
    records: list[dict[str, Any]]
    step: int
    held_out_loss: float
    """Nats; not a number where the run was stopped."""
    signal: int
    """What stopped the run, or 0."""


def pretrain(
    label: str,
    args: argparse.Namespace,
    model_config: BertConfig,
    deepspeed_config: dict[str, Any],
    data: PretrainingData,
    folder: Path,
    seconds: float,
) -> Outcome:
    """One training run into `folder`, from its start or from its last checkpoint, for at most `seconds`."""
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), DEVICE
    checkpoint_folder = folder / "checkpoints"
    checkpoint_folder.mkdir(parents=True, exist_ok=True)
    terms = {
        "sparse": args.deepspeed_sparse_attention,
        "deepspeed_config": deepspeed_config,
        "model": model_config.model_dump(),
        "data": data.manifest()["cache_entry"],
        "max_seq_length": args.max_seq_length,
        "max_predictions_per_seq": data.max_predictions_per_seq,
        "warmup_steps": args.warmup_steps,
        "seed": args.seed,
        "ranks": world_size,
    }
    state = {"step": 0, "samples": 0, "layout_seed": None, "finished": False}
    resuming = args.resume and checkpoints.latest(checkpoint_folder) is not None
    if resuming:
        state = checkpoints.read_state(checkpoint_folder, terms)
        if state["layout_seed"] is not None:
            block = {**deepspeed_config["sparse_attention"], "seed": state["layout_seed"]}
            deepspeed_config = {**deepspeed_config, "sparse_attention": block}
    args = argparse.Namespace(**{**vars(args), "deepspeed_config": deepspeed_config})

    torch.manual_seed(args.seed)
    model = BertForPreTrainingPreLN(model_config, args)
    structure = model.bert.sparse_attention_config
    if structure is not None:
        show_layout(model, args.max_seq_length, folder)
    has_schedule = "scheduler" in deepspeed_config
    engine, _, _, schedule = ds_sparse.initialize(
        args=args,
        model=model,
        model_parameters=parameter_groups(model, deepspeed_config["optimizer"]["params"].get("weight_decay", 0.0)),
        lr_scheduler=None if has_schedule else lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(args.warmup_steps, step)
        ),
    )  # fmt: skip
    torch.manual_seed(args.seed + rank)
    if resuming:
        checkpoints.load(engine, checkpoint_folder)
        say(f"{label}: continuing after step {state['step']} of {folder}")

    micro_batch, global_batch = engine.train_micro_batch_size_per_gpu(), engine.train_batch_size()
    accumulation = engine.gradient_accumulation_steps()
    batches = data.batches(global_batch, micro_batch, first_sample=state["samples"], rank=rank, world_size=world_size)
    step = state["step"]
    metrics = Metrics(folder / "metrics.jsonl", step) if rank == 0 else None
    progress = Progress(label, step, args.max_steps, seconds, args.print_steps) if rank == 0 else None
    started = time.monotonic()

    def evaluate() -> float:
        loss = held_out_loss(engine, data, micro_batch, rank, world_size, device)
        if metrics is not None:
            metrics.add(step=step, held_out_mlm_loss=loss)
        return loss

    held_out = state["held_out_loss"] if resuming else evaluate()
    evaluation_seconds = time.monotonic() - started
    slowest_step, finished, stopped_by = 0.0, state["finished"], 0
    while not finished and not stopped_by:
        step_started = time.monotonic()
        losses = torch.zeros(2, device=device)
        engine.train()
        for _ in range(accumulation):
            result = engine(to_device(next(batches), device))
            engine.backward(result["loss"])
            engine.step()
            losses += torch.stack([result["mlm_loss"].detach(), result["nsp_loss"].detach()]).float() / accumulation
        dist.all_reduce(losses)
        mlm_loss, nsp_loss = (losses / world_size).tolist()
        if not math.isfinite(mlm_loss):
            raise ValueError(f"The loss is {mlm_loss} after step {step}; lower the learning rate in the JSON, or use bf16 for fp16.")
        step += 1
        step_seconds = time.monotonic() - step_started
        slowest_step = max(slowest_step, step_seconds)
        if metrics is not None:
            tokens_per_second, memory = global_batch * args.max_seq_length / step_seconds, peak_memory_gib()
            metrics.add(
                step=step, mlm_loss=mlm_loss, nsp_loss=nsp_loss, learning_rate=schedule.get_last_lr()[0],
                tokens_per_second=round(tokens_per_second, 1), memory_gib=round(memory, 3),
            )  # fmt: skip
            progress.show(step, mlm_loss, tokens_per_second, memory)
        out_of_time = time.monotonic() - started + 2 * slowest_step + evaluation_seconds > seconds
        finished, stopped_by = agree(step == args.max_steps or out_of_time)
        finished = finished and not stopped_by
        if finished or step % args.eval_steps == 0:
            held_out = evaluate()
        if finished or stopped_by or step % args.save_steps == 0:
            checkpoints.save(
                engine, checkpoint_folder, step,
                {
                    **terms, "step": step, "samples": step * global_batch, "finished": finished, "held_out_loss": held_out,
                    "layout_seed": getattr(structure, "seed", None),
                },
            )  # fmt: skip
    records = []
    if metrics is not None:
        progress.close()
        metrics.close()
        records = metrics.records
    return Outcome(records, step, held_out, stopped_by)


def held_out_loss(
    engine: Any, data: PretrainingData, micro_batch: int, rank: int, world_size: int, device: torch.device
) -> float:
    """Mean masked-LM loss over all predicted positions of the held-out sequences, in nats."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    engine.eval()
    with torch.no_grad():
        for batch in data.held_out_batches(micro_batch, rank, world_size):
            predictions = len(batch.input_ids) * data.eval_predictions_per_seq
            mean = engine(to_device(batch, device))["mlm_loss"].double()
            total += torch.stack([mean * predictions, mean.new_tensor(predictions)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def to_device(batch: Batch, device: torch.device) -> Batch:
    return Batch(*(tensor.to(device) for tensor in batch))


def show_layout(model: BertForPreTrainingPreLN, max_seq_length: int, folder: Path) -> None:
    """Prints the layout that the first layer uses, and writes it as layout.png."""
    attention = next(module for module in model.modules() if isinstance(module, ds_sparse.SparseSelfAttention))
    block = attention.sparsity_config.block
    layout = attention.get_layout(math.ceil(max_seq_length / block) * block)
    say(draw(layout, block))
    if dist.get_rank() == 0:
        save_drawing(layout, block, folder / "layout.png")


_signal = 0


def _remember_signal(number: int, frame: Any) -> None:
    global _signal
    _signal = number


def agree(finished: bool) -> tuple[bool, int]:
    """What all ranks do next: rank 0 says whether the run is finished, any rank's signal interrupts it."""
    decision = torch.tensor([int(finished and dist.get_rank() == 0), _signal], device=DEVICE)
    dist.all_reduce(decision, op=dist.ReduceOp.MAX)
    return bool(decision[0]), int(decision[1])


def run_folder(output_dir: Path, resume: bool) -> Path:
    """The newest numbered folder of output_dir to resume, or the next one, the same on every rank.

    Raises:
        ValueError: there is nothing to resume.
    """
    numbers = sorted(int(path.name) for path in output_dir.glob("[0-9]*") if path.name.isdigit())
    if resume and not numbers:
        raise ValueError(f"There is no run in {output_dir} to resume; start one without --resume.")
    number = [numbers[-1] if resume else (numbers or [0])[-1] + 1]
    dist.broadcast_object_list(number, src=0)
    folder = output_dir / f"{number[0]:04d}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def main() -> int:
    args = parse_arguments()
    model_config = read_model_config(args.config_file)
    config, block = ds_sparse.load_config(args.deepspeed_config)
    if block is not None:
        ds_sparse.parse_sparse_attention(block, model_config.num_attention_heads, source=args.deepspeed_config)
    if args.compare_dense and not args.deepspeed_sparse_attention:
        raise ValueError("--compare-dense compares with a sparse run; add --deepspeed_sparse_attention.")
    ds_sparse.init_distributed(verbose=False)
    config = adapt_to_device(config, DEVICE)
    if block is not None:
        config["sparse_attention"] = block

    corpus = open_corpus(args.corpus, model_config.vocab_size, args.text_column)
    data = PretrainingData(corpus, args.max_seq_length, args.seed, args.max_predictions_per_seq, args.eval_sequences)
    model_config = model_config.model_copy(update={"vocab_size": corpus.padded_vocabulary_size})
    say(data.describe())
    folder = run_folder(Path(args.output_dir), args.resume)
    if dist.get_rank() == 0:
        data.write_manifest(folder)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _remember_signal)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False

    names = ["sparse" if args.deepspeed_sparse_attention else "dense"] + ["dense"] * args.compare_dense
    unigram = data.held_out_unigram_cross_entropy
    outcomes: dict[str, Outcome] = {}
    for done, name in enumerate(names):
        arguments = argparse.Namespace(**vars(args))
        arguments.deepspeed_sparse_attention = name == "sparse"
        seconds = (args.max_minutes * 60 - (time.monotonic() - STARTED)) / (len(names) - done)
        outcome = pretrain(name, arguments, model_config, config, data, folder / name, seconds)
        outcomes[name] = outcome
        if outcome.signal:
            say(f"Stopped by signal {outcome.signal} after step {outcome.step}; continue with --resume.")
            return 128 + outcome.signal
    for name, outcome in outcomes.items():
        beside = "below" if outcome.held_out_loss < unigram else "not below"
        say(
            f"{name}: held-out masked-LM loss {outcome.held_out_loss:.4f} nats after {outcome.step} steps, {beside} the unigram "
            f"cross-entropy {unigram:.4f} of the same positions"
        )
    if dist.get_rank() == 0:
        draw_loss_curve(folder / "loss.png", {name: outcome.records for name, outcome in outcomes.items()}, unigram)
        say(f"Loss curve: {folder / 'loss.png'}; figures by step: {folder}/*/metrics.jsonl")
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    try:
        sys.exit(main())
    except ValueError as error:
        rank = os.environ.get("RANK", "0")
        sys.exit(f"deepspeed_train.py{'' if rank == '0' else f' (rank {rank})'}: {error}")
