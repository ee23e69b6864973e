"""A small decoder in the GPT-NeoX manner, trained through DeepSpeed, its attention block-sparse or dense.

The model is Transformers' GPTNeoXForCausalLM, its tokens are bytes. Corpora, the DeepSpeed JSON, the device and what a
run shows are those of examples/bing_bert. `main` trains once, or twice with --compare-dense, and prints held-out losses
and text that each model generates.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers

import ds_sparse
from ds_sparse.plan.model import model_of_config
from ds_sparse.plan.settings import read_settings
from ds_sparse.plan.utilisation import StepWork

sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "bing_bert"))

from device import DEVICE, DEVICE_SENTENCE, device_name  # before DeepSpeed, as it sets what that will use

# isort: split
from byte_text import Text, readable
from corpus import load_corpus
from deepspeed_json import read_deepspeed_config
from deepspeed_train import STARTED, agree, arguments_of, engine_of, exit_status, mean_loss, parsed
from report import Progress, forget_peak_memory, how_long, peak_memory_gib, run_folder, say, speed_in_words

HERE = Path(__file__).resolve().parent


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="train.py",
        usage="%(prog)s --deepspeed_config FILE [--deepspeed_sparse_attention] [options]",
        description="Trains a small GPT-NeoX decoder on bytes with DeepSpeed. The structure of its attention is the "
        '"sparse_attention" block of the DeepSpeed JSON; without the flag the same JSON trains dense.',
    )
    add = parser.add_argument
    add("--corpus", metavar="NAME", default="stdlib", help="as of examples/bing_bert (default: stdlib)")
    add("--config-file", metavar="FILE", default=str(HERE / "neox_tiny.json"), help="a GPTNeoXConfig as JSON")
    add("--max-seq-length", metavar="N", type=int, default=1024, help="bytes in a sequence (default: 1024)")
    add("--max-minutes", metavar="M", type=float, default=5.0, help="minutes to end after, in all (default: 5)")
    add("--max-steps", metavar="N", type=int, help="optimizer steps to end after")
    add("--compare-dense", action="store_true", help="train sparse in half of the time, then dense for as many steps")
    add("--warmup-steps", metavar="N", type=int, default=100, help="then inverse square root (default: 100)")
    add("--eval-sequences", metavar="N", type=int, default=32, help="held-out sequences (default: 32)")
    add("--generate", metavar="N", type=int, default=200, help="bytes to generate at the end (default: 200)")
    add("--print-steps", metavar="N", type=int, default=10, help="steps between lines where no bar is (default: 10)")
    add("--output-dir", metavar="DIR", default="runs/gpt_neox", help="for models (default: runs/gpt_neox)")
    add("--seed", metavar="N", type=int, default=42, help="of weights and data order (default: 42)")
    positive = ("max_seq_length", "max_minutes", "max_steps", "warmup_steps", "eval_sequences", "print_steps")
    args = parsed(parser, positive)
    if not 0 <= args.generate <= args.max_seq_length // 2:
        parser.error(f"--generate is {args.generate}; it has to be from 0 to half of --max-seq-length")
    return args


def check_json(source: str) -> None:
    """Raises ValueError for what this script does not train with, in a JSON that is right."""
    config, _ = ds_sparse.load_config(source)
    if config.get("fp16", {}).get("enabled"):
        raise ValueError(f"{source}: fp16 is not for this example; take bf16.")
    if config.get("zero_optimization", {}).get("stage", 0) == 3:
        raise ValueError(f"{source}: ZeRO stage 3 keeps no whole weights to generate with; take stage 2 at most.")


class Outcome(NamedTuple):
    steps: int
    held_out_loss: float
    speed: str
    text: str
    """Text that the model generates after the prompt."""


def train(
    name: str,
    args: argparse.Namespace,
    config: dict[str, Any],
    model_config: transformers.GPTNeoXConfig,
    text: Text,
    folder: Path,
    max_steps: int | None,
    deadline: float,
) -> Outcome:
    """One training run, to `max_steps`, or until a step could pass `deadline` (seconds of time.monotonic)."""
    forget_peak_memory()
    torch.manual_seed(args.seed)
    model = transformers.GPTNeoXForCausalLM(copy.deepcopy(model_config))
    schedule = partial(transformers.get_inverse_sqrt_schedule, num_warmup_steps=args.warmup_steps)
    engine = engine_of(arguments_of(args, config, name), model, schedule)
    torch.manual_seed(args.seed + dist.get_rank())

    batches = text.batches(engine.train_micro_batch_size_per_gpu(), dist.get_rank(), dist.get_world_size())
    progress = Progress(name, 0, max_steps, deadline - time.monotonic(), args.print_steps)
    block = config.get("sparse_attention") if name == "sparse" else None
    counted = model_of_config(args.config_file, "gpt_neox", model_config.to_dict())
    settings = read_settings(config, args.deepspeed_config, gpus=dist.get_world_size())
    work = StepWork.of(block, args.deepspeed_config, counted, settings, args.max_seq_length, device_name())
    all_figures: list[dict[str, float]] = []
    step, slowest_step, finished = 0, 0.0, False
    while not finished:
        began = time.monotonic()
        loss = train_step(engine, batches)
        if not math.isfinite(loss):
            raise ValueError(f"The loss is {loss} after step {step}; lower the learning rate in the JSON.")
        step, seconds = step + 1, time.monotonic() - began
        slowest_step = max(slowest_step, seconds)
        all_figures.append(work.figures(seconds))
        progress.show(step, loss, all_figures[-1], peak_memory_gib())
        finished, _ = agree(time.monotonic() + 3 * slowest_step > deadline or step == max_steps)
    progress.close()
    if dist.get_rank() == 0:
        engine.module.save_pretrained(folder / name)
    return Outcome(step, held_out_loss(engine, text), speed_in_words(all_figures), generated(engine, text, args))


def train_step(engine: Any, batches: Any) -> float:
    """One optimizer step; the loss before it, in nats a byte, a mean over all ranks."""
    total, accumulation = torch.zeros((), device=DEVICE), engine.gradient_accumulation_steps()
    engine.train()
    for _ in range(accumulation):
        tokens = next(batches).to(DEVICE)
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        total += loss.detach().float() / accumulation
    dist.all_reduce(total)
    return (total / dist.get_world_size()).item()


def held_out_loss(engine: Any, text: Text) -> float:
    """Mean loss of all held-out bytes, in nats."""
    micro_batch = engine.train_micro_batch_size_per_gpu()
    batches = text.held_out_batches(micro_batch, dist.get_rank(), dist.get_world_size())
    engine.eval()
    with torch.no_grad():
        tokens = (batch.to(DEVICE) for batch in batches)
        return mean_loss((engine.module(input_ids=x, labels=x, use_cache=False).loss, len(x)) for x in tokens)


def generated(engine: Any, text: Text, args: argparse.Namespace) -> str:
    """Text of a model after the first half of a held-out sequence, of which it reads the cached keys of its layout
    alone."""
    if not args.generate:
        return ""
    prompt = text.held_out[:1, : args.max_seq_length // 2].long().to(DEVICE)
    torch.manual_seed(args.seed)
    tokens = engine.module.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=args.generate, do_sample=True, top_k=20,
        temperature=0.7, eos_token_id=None,
    )  # fmt: skip
    return readable(tokens[0, prompt.shape[1] :])


def main() -> int:
    args = parse_arguments()
    say(DEVICE_SENTENCE)
    model_config = transformers.GPTNeoXConfig.from_json_file(args.config_file)
    model_config.max_position_embeddings = args.max_seq_length
    config = read_deepspeed_config(args, model_config.num_attention_heads, model_config.num_hidden_layers, DEVICE)
    check_json(args.deepspeed_config)
    ds_sparse.init_distributed(verbose=False)
    say(f"{how_long(args.max_steps, args.max_minutes)}.")
    text = Text(load_corpus(args.corpus).split(), args.max_seq_length, args.seed, args.eval_sequences)
    say(text.describe())

    names = ["sparse" if args.deepspeed_sparse_attention else "dense"] + ["dense"] * args.compare_dense
    folder, outcomes = run_folder(Path(args.output_dir)), {}
    for number, name in enumerate(names):
        now = time.monotonic()
        deadline = now + (STARTED + args.max_minutes * 60 - now) / (len(names) - number)
        max_steps = outcomes["sparse"].steps if number else args.max_steps
        outcomes[name] = train(name, args, config, model_config, text, folder, max_steps, deadline)
    show_results(outcomes, text, args, folder)
    dist.barrier()
    return 0


def show_results(outcomes: dict[str, Outcome], text: Text, args: argparse.Namespace, folder: Path) -> None:
    unigram = text.unigram_cross_entropy()
    for name, outcome in outcomes.items():
        say(
            f"{name}: held-out loss {outcome.held_out_loss:.4f} nats a byte after {outcome.steps} steps, "
            f"{outcome.speed}, a token being a byte; the unigram cross-entropy is {unigram:.4f}"
        )
    if args.generate:
        prompt = readable(text.held_out[0, : args.max_seq_length // 2])
        say(f"The end of a held-out prompt:\n{prompt[-200:]}")
        for name, outcome in outcomes.items():
            say(f"What {name} writes after it:\n{outcome.text}")
    say(f"Models, for from_pretrained: {folder}")


if __name__ == "__main__":
    sys.exit(exit_status(main))
