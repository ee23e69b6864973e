"""The pretraining script: BERT on long documents through DeepSpeed, its attention block-sparse or dense.

`main` checks what the user gave, prepares the data, and calls `pretrain` once, or twice with --compare-dense.
"""

from __future__ import annotations

import argparse
import copy
import logging
import math
import os
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from device import DEVICE, DEVICE_SENTENCE  # sets what DeepSpeed will use, so it comes before imports of DeepSpeed

# isort: split
import ds_sparse
from ds_sparse.drawing import draw
from ds_sparse.sparsity.declarations import declared_value
from ds_sparse.tools.ranks import rank

import checkpoints
import dry_run
from data import DROPOUT, Batch, PretrainingData, draw_seed
from deepspeed_json import read_deepspeed_config
from masked_lines import MaskedLines
from modeling import BertConfig, BertForPreTrainingPreLN, parameter_groups
from report import (
    Metrics,
    Progress,
    forget_peak_memory,
    how_long,
    peak_memory_gib,
    read_metrics,
    run_folder,
    say,
    speed_in_words,
)
from run_page import draw_curves, write_page
from tokens import open_corpus
from training_run import DENSE, SPARSE, Outcome, Position, TrainingRun

STARTED = time.monotonic()
HERE = Path(__file__).resolve().parent


def parse_arguments() -> argparse.Namespace:
    """The options; ours may be spelled with - or _. The help shows one spelling."""
    parser = argparse.ArgumentParser(
        prog="deepspeed_train.py",
        usage="%(prog)s --deepspeed_config FILE [--deepspeed_sparse_attention] [options]",
        description="Pretrains a BERT encoder on long documents with DeepSpeed. The structure of its attention is the\n"
        '"sparse_attention" block of the DeepSpeed JSON; without the flag the same JSON trains dense.',
        epilog="examples:\n"
        "  deepspeed_train.py --deepspeed_config configs/bigbird.json --deepspeed_sparse_attention\n"
        "  deepspeed_train.py --deepspeed_config configs/bigbird.json --deepspeed_sparse_attention --resume\n"
        "  deepspeed_train.py --deepspeed_config configs/bigbird.json --corpus ~/texts --max-minutes 60\n"
        "torchrun and deepspeed start it on several ranks.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    number, flag = {"metavar": "N", "type": int}, {"action": "store_true"}
    group = parser.add_argument_group("data and model")

    def option(name: str, text: str, *aliases: str, **settings: Any) -> None:
        default = f" (default: {settings['default']})" if "default" in settings else ""
        dest = name.replace("-", "_")
        group.add_argument(f"--{name}", *aliases, dest=dest, help=f"{text}{default}", **settings)
        if dest != name:
            hidden = {"dest": dest, "help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
            group.add_argument(f"--{dest}", **{**settings, **hidden})

    corpora = "stdlib, site-packages, sotu, a .txt, .jsonl or .parquet file or a folder of them, or a `datasets` name"
    option("corpus", corpora, metavar="NAME", default="stdlib")
    option("text-column", "column that holds the text, for .jsonl, .parquet and `datasets`", metavar="NAME")
    option("config-file", "model JSON (default: bert_tiny.json)", "--cf", metavar="FILE")
    parser.set_defaults(config_file=str(HERE / "bert_tiny.json"))
    option("max-seq-length", "tokens in a sequence", default=2048, **number)
    option("max-predictions-per-seq", "tokens to predict in each (default: 15 %%)", **number)
    option("seed", "seed of weights, dropout, data order, masks", default=42, **number)

    group = parser.add_argument_group("training")
    option("max-minutes", "minutes to end after, in all, or inf", metavar="M", type=float, default=5)
    option("max-steps", "optimizer steps to end after, those before --resume included", **number)
    in_half = "train sparse in half of the time, then dense from the same JSON for as many steps, if the time allows"
    option("compare-dense", in_half, **flag)
    rises = "steps of linear warm-up, then inverse square root, where the JSON has no scheduler"
    option("warmup-steps", rises, default=100, **number)
    begins = (
        "begin with the weights of the last checkpoint of a run, such as runs/bing_bert/0001/dense, whose sequences "
        "may be shorter; optimizer and data begin anew"
    )
    option("weights-from", begins, metavar="RUN")
    option("checkpoint-activations", "recompute activations in backward to save memory", **flag)
    faster = (
        "let PyTorch take kernels whose sums differ a little from run to run, where they are faster: on GPUs, the "
        "backward of dense attention"
    )
    option("nondeterministic", faster, **flag)

    group = parser.add_argument_group("output and checkpoints")
    option("output-dir", "each run gets a numbered folder here", metavar="DIR", default="runs/bing_bert")
    continues = (
        "continue the newest run of --output-dir exactly where its last checkpoint is, to --max-steps or for another "
        "--max-minutes; a comparison continues with what it has not reached yet"
    )
    option("resume", continues, **flag)
    again = "--resume where --output-dir has a run, else start one: for jobs that a scheduler starts again"
    option("resume-or-start", again, **flag)
    says = "say what the run would do, and what it costs as far as that is known; train, write and download nothing"
    option("dry-run", says, **flag)
    option("save-steps", "steps between checkpoints", default=100, **number)
    option("eval-steps", "steps between held-out losses", default=100, **number)
    option("eval-sequences", "held-out sequences", default=32, **number)
    option("print-steps", "steps between lines where no bar is", default=10, **number)
    above_0 = ("max_seq_length", "max_steps", "max_minutes", "warmup_steps", "eval_steps", "save_steps", "print_steps")
    args = parsed(parser, above_0)
    args.resume = args.resume or args.resume_or_start
    return args


def parsed(parser: argparse.ArgumentParser, positive: Sequence[str]) -> argparse.Namespace:
    """The options of a parser and DeepSpeed's, checked; those in `positive` are above 0 where they are given."""
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    ds_sparse.add_config_arguments(parser)
    args = parser.parse_args()
    if args.deepspeed_config is None:
        parser.error("--deepspeed_config FILE is needed, for example configs/bslongformer.json")
    if args.compare_dense and not args.deepspeed_sparse_attention:
        parser.error("--compare-dense compares with a sparse run; add --deepspeed_sparse_attention")
    for name in positive:
        value = getattr(args, name)
        if value is not None and not value > 0:
            parser.error(f"--{name.replace('_', '-')} is {value}; it has to be above 0")
    return args


def pretrain(
    run: TrainingRun,
    lines: MaskedLines,
    checkpoint: checkpoints.Checkpoint | None,
    position: Position,
    max_steps: int | None,
    deadline: float,
) -> Outcome:
    """Trains from the start, or from `checkpoint`, which is at `position`.

    It ends after `max_steps`, or before a step that could pass `deadline` (seconds of time.monotonic).
    """
    forget_peak_memory()
    name, args, data, folder = run.name, run.args, run.data, run.folder
    engine, position.layout_seed = build_engine(run, position.layout_seed, checkpoint is not None)
    if checkpoint is not None:
        checkpoints.load(engine, checkpoint)
        say(f"{name}: continuing after step {position.step} of {folder}")
    position.max_steps = args.max_steps

    micro_batch, global_batch = engine.train_micro_batch_size_per_gpu(), engine.train_batch_size()
    first_sample, on_gpu = position.step * global_batch, DEVICE.type == "cuda"
    batches = data.batches(
        global_batch, micro_batch, first_sample, dist.get_rank(), dist.get_world_size(), ahead=on_gpu
    )
    # Whatever happens: Python would wait at its end for a process that makes batches ahead.
    with closing(batches):
        return trained(run, engine, batches, lines, position, max_steps, deadline, resumed=checkpoint is not None)


def trained(
    run: TrainingRun,
    engine: Any,
    batches: Iterator[Batch],
    lines: MaskedLines,
    position: Position,
    max_steps: int | None,
    deadline: float,
    resumed: bool,
) -> Outcome:
    """Trains from `position`, which it moves on; as `pretrain`."""
    name, args, folder = run.name, run.args, run.folder
    metrics = Metrics(folder / "metrics.jsonl", position.step if resumed else None, engine)
    progress = Progress(name, position.step, max_steps, deadline - time.monotonic(), args.print_steps)
    work = run.work()

    def evaluate() -> None:
        started = time.monotonic()
        position.held_out_loss, position.held_out_step = held_out_loss(engine, run.data), position.step
        position.filled_in = lines.filled_in(engine, DEVICE)
        engine.train()
        position.evaluation_seconds = time.monotonic() - started
        metrics.add(step=position.step, held_out_mlm_loss=position.held_out_loss)
        say(f"{name}: step {position.step}  held-out loss {position.held_out_loss:.4f}")

    def save() -> None:
        checkpoints.save(engine, run.checkpoints, position.step, run.terms(), asdict(position))

    position.finished = max_steps is not None and position.step >= max_steps
    if position.finished or not resumed:
        evaluate()
    if position.finished:
        save()
    slowest_step, stopped_by = 0.0, 0
    while not position.finished and not stopped_by:
        started = time.monotonic()
        mlm_loss, nsp_loss = train_step(engine, batches, args.seed, position.step)
        skipped = was_skipped(engine, mlm_loss, position.step)
        position.step += 1
        position.skipped_steps += skipped
        step_seconds = time.monotonic() - started
        slowest_step = max(slowest_step, step_seconds)
        figures, memory = work.figures(step_seconds), peak_memory_gib()
        metrics.add(
            step=position.step, mlm_loss=mlm_loss, nsp_loss=nsp_loss, learning_rate=engine.get_lr()[0],
            memory_gib=round(memory, 3), **figures,
            **({"skipped_steps": position.skipped_steps} if skipped or engine.fp16_enabled() else {}),
        )  # fmt: skip
        progress.show(position.step, mlm_loss, figures, memory)
        out_of_time = time.monotonic() + 2 * slowest_step + position.evaluation_seconds > deadline
        finished, stopped_by = agree(out_of_time or position.step == max_steps)
        position.finished = finished and not stopped_by
        if position.finished or position.step % args.eval_steps == 0:
            evaluate()
        if position.finished or stopped_by or position.step % args.save_steps == 0:
            save()
    progress.close()
    metrics.close()
    return Outcome(run, position, metrics.records, stopped_by)


def build_engine(run: TrainingRun, layout_seed: int | None, resumed: bool) -> tuple[Any, int | None]:
    """The DeepSpeed engine with a new model, or with the weights of --weights-from, and the seed of the model's layout.

    `layout_seed` is that of an earlier start of the run, whose random blocks are drawn again.
    """
    args = arguments_of(run.args, run.config, run.name, layout_seed)
    model = build_model(run, args)
    if args.weights_from is not None and not resumed:
        checkpoints.take_weights(model, Path(args.weights_from), run.terms_of_weights())
    structures = model.bert.sparse_attention_config
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    if structures is not None:
        show_layouts(model, args.max_seq_length)
    engine = engine_of(args, model, partial(warmed_up, warmup_steps=args.warmup_steps))
    seeds = [seed for seed in (declared_value(structure, "seed") for structure in structures or ()) if seed is not None]
    return engine, next(iter(seeds), None)


def warmed_up(optimizer: torch.optim.Optimizer, warmup_steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Linear warm-up, then inverse square root: needs no end that is known beforehand."""

    def factor(step: int) -> float:
        return min((step + 1) / warmup_steps, math.sqrt(warmup_steps / (step + 1)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def engine_of(args: argparse.Namespace, model: torch.nn.Module, schedule: Callable[..., Any]) -> Any:
    """DeepSpeed's engine, by `arguments_of`; `schedule` is for a JSON without a scheduler."""
    config = args.deepspeed_config
    engine, *_ = ds_sparse.initialize(
        args=args,
        model=model,
        model_parameters=parameter_groups(model, config["optimizer"]["params"].get("weight_decay", 0.0)),
        lr_scheduler=None if config.get("scheduler") else schedule,
    )
    return engine


def arguments_of(
    args: argparse.Namespace, config: dict[str, Any], name: str, layout_seed: int | None = None
) -> argparse.Namespace:
    """The options with the DeepSpeed JSON, as an object, of the sparse or the dense run."""
    config = copy.deepcopy(config)
    if layout_seed is not None:
        config["sparse_attention"]["seed"] = layout_seed
    if args.compare_dense and name == DENSE:
        config.pop("sparse_attention", None)  # the block is off by design: nobody needs a line about it
    return argparse.Namespace(**vars(args) | {"deepspeed_config": config, "deepspeed_sparse_attention": name == SPARSE})


def build_model(run: TrainingRun, args: argparse.Namespace) -> BertForPreTrainingPreLN:
    """A new model. It starts near the unigram cross-entropy, as the biases of its output are the unigram
    log-probabilities."""
    torch.manual_seed(args.seed)
    model = BertForPreTrainingPreLN(run.model_config, args)
    unigram = run.data.unigram_log_probabilities
    unused_rows = len(model.decoder_bias) - len(unigram)
    model.decoder_bias.data.copy_(F.pad(unigram, (0, unused_rows), value=unigram.min().item()))
    return model


def show_layouts(model: BertForPreTrainingPreLN, max_seq_length: int) -> None:
    """Prints the layouts that the layers use."""
    structures = model.bert.sparse_attention_config
    for structure in dict.fromkeys(filter(None, structures)):
        attention = model.bert.encoder.layer[structures.index(structure)].attention.self.sparse_self_attention
        layout = attention.get_layout(math.ceil(max_seq_length / structure.block) * structure.block)
        say(draw(layout, structure.block))


def train_step(engine: Any, batches: Iterator[Batch], seed: int, step: int) -> tuple[float, float]:
    """The optimizer step after `step` of them; the masked-LM and next-sentence losses before it, in nats, means over
    all ranks.

    What dropout draws follows from the seed and the number of the micro-batch, so a run goes on as it would have,
    on other ranks too.
    """
    losses = torch.zeros(2, device=DEVICE)
    accumulation = engine.gradient_accumulation_steps()
    # In fp16 without ZeRO, DeepSpeed takes the loss scale off gradients that never had it (its pull request 8393).
    lacks_scale = engine.fp16_enabled() and engine.zero_optimization_stage() == 0
    for turn in range(accumulation):
        number = (step * accumulation + turn) * dist.get_world_size() + dist.get_rank()
        torch.manual_seed(draw_seed(DROPOUT, seed, number))
        result = engine(next(batches).to(DEVICE))
        if lacks_scale:
            gradient = engine.optimizer.loss_scale / accumulation
            result["loss"].register_hook(partial(torch.full_like, fill_value=gradient))
        engine.backward(result["loss"])
        engine.step()
        losses += torch.stack([result["mlm_loss"].detach(), result["nsp_loss"].detach()]).float() / accumulation
    dist.all_reduce(losses)
    mlm_loss, nsp_loss = (losses / dist.get_world_size()).tolist()
    return mlm_loss, nsp_loss


def was_skipped(engine: Any, mlm_loss: float, step: int) -> bool:
    """Whether DeepSpeed left out the step after `step` of them, whose gradients overflowed.

    Raises ValueError if the loss was not finite, which it may be in fp16 while the loss scale is found, or if the norm
    of gradients was not and the step was done: a JSON may leave out DeepSpeed's own look at each gradient.
    """
    skipped, norm = not engine.was_step_applied(), engine.get_global_grad_norm()
    advice = (
        "start a new run with a lower learning rate in the JSON; --weights-from takes the weights of a checkpoint of "
        "this one."
    )
    if not math.isfinite(mlm_loss) and not (skipped and engine.fp16_enabled()):
        raise ValueError(f"The loss is {mlm_loss} after step {step}; {advice}")
    if not (skipped or norm is None or 0 <= norm < math.inf):
        raise ValueError(f"The gradient of step {step + 1} is not finite; {advice}")
    return skipped


def held_out_loss(engine: Any, data: PretrainingData) -> float:
    """Mean masked-LM loss over all predicted positions of the held-out sequences, in nats."""
    batches = data.held_out_batches(engine.train_micro_batch_size_per_gpu(), dist.get_rank(), dist.get_world_size())
    engine.eval()
    with torch.no_grad():
        return mean_loss((engine(batch.to(DEVICE))["mlm_loss"], len(batch.mlm_positions)) for batch in batches)


def mean_loss(losses: Iterable[tuple[torch.Tensor, int]]) -> float:
    """The mean over all predictions of all ranks, of means over so many of them; a mean of none counts for nothing."""
    total = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    for mean, predictions in losses:
        if predictions:
            mean = mean.double()
            total += torch.stack([mean * predictions, torch.full_like(mean, predictions)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


_signal = 0


def remember_signals() -> None:
    """From here on, Ctrl-C and SIGTERM are remembered until the step is done; a second Ctrl-C ends the process at once.

    A second SIGTERM is remembered too: the deepspeed launcher sends one to workers that a Ctrl-C has already reached.
    """

    def remember(number: int, frame: Any) -> None:
        global _signal  # noqa: PLW0603 - what a signal's handler says to the loop
        if not _signal and rank() == 0:
            sentence = f"\nSignal {number}: a checkpoint is written after this step; Ctrl-C now ends the run without.\n"
            os.write(sys.stdout.fileno(), sentence.encode())  # print may be what the signal interrupts
        _signal = number
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, remember)


def agree(finished: bool) -> tuple[bool, int]:
    """Agrees on what all ranks do next: rank 0 says whether the run is finished, any rank's signal interrupts it."""
    decision = torch.tensor([int(finished and dist.get_rank() == 0), _signal], device=DEVICE)
    dist.all_reduce(decision, op=dist.ReduceOp.MAX)
    return bool(decision[0]), int(decision[1])


def find_checkpoint(run: TrainingRun) -> tuple[checkpoints.Checkpoint | None, Position]:
    """The checkpoint that a run continues from, and where it is; None, and the start, where it begins.

    Raises:
        ValueError: the checkpoint is of other terms, or cannot be moved to this number of ranks.
    """
    if not run.args.resume:
        return None, Position(step=0)
    found = checkpoints.find(run.checkpoints, run.terms())
    if found is None:
        say(f"{run.name}: {run.folder.parent} has no checkpoint of it yet; it starts from step 0.")
        return None, Position(step=0)
    checkpoints.require_movable(run.config, found.state["ranks"], dist.get_world_size(), run.args.deepspeed_config)
    return found, Position(**found.state["position"])


def main() -> int:
    args = parse_arguments()
    say(DEVICE_SENTENCE)
    model_config = BertConfig.read(args.config_file)
    config = read_deepspeed_config(args, model_config.num_attention_heads, model_config.num_hidden_layers, DEVICE)
    ds_sparse.init_distributed(verbose=False)
    if not args.dry_run:
        say(f"{how_long(args.max_steps, args.max_minutes)}, and --resume continues it.")  # the corpus takes a while

    corpus = open_corpus(args.corpus, model_config.vocab_size, args.text_column, keeps=not args.dry_run)
    data = PretrainingData(corpus, args.max_seq_length, args.seed, args.max_predictions_per_seq, args.eval_sequences)
    model_config = model_config.model_copy(update={"vocab_size": corpus.padded_vocabulary_size})
    say(data.describe())

    names = [SPARSE if args.deepspeed_sparse_attention else DENSE] + [DENSE] * args.compare_dense
    if args.weights_from is not None and not args.resume:
        # Before there is a folder, which --resume would take for a run.
        run = TrainingRun(names[0], args, config, model_config, data, Path(args.output_dir))
        checkpoints.of_weights(Path(args.weights_from), run.terms_of_weights())
    folder = run_folder(Path(args.output_dir), args.resume, args.resume_or_start, makes=not args.dry_run)
    runs = [TrainingRun(name, args, config, model_config, data, folder / name) for name in names]
    found = [find_checkpoint(run) for run in runs]
    if args.dry_run:
        for run, (_, position) in zip(runs, found):
            with torch.device("meta"):
                model = build_model(run, arguments_of(args, config, run.name, position.layout_seed))
            for line in dry_run.description(run, model, position):
                say(f"{run.name}: {line}")
        return 0
    if dist.get_rank() == 0:
        data.write_manifest(folder)

    lines = MaskedLines.of(data)
    remember_signals()
    torch.use_deterministic_algorithms(not args.nondeterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False
    outcomes: list[Outcome] = []
    for run, (checkpoint, position) in zip(runs, found):
        now = time.monotonic()
        deadline = now + (STARTED + args.max_minutes * 60 - now) / (len(runs) - len(outcomes))
        max_steps = outcomes[0].position.step if outcomes else args.max_steps
        if position.is_end(run, max_steps):
            say(f"{run.name}: nothing left to train, {position.step} steps are done; a larger --max-steps continues.")
            outcomes.append(Outcome(run, position, read_metrics(run.folder / "metrics.jsonl", position.step)))
            continue
        outcomes.append(pretrain(run, lines, checkpoint, position, max_steps, deadline))
        if number := outcomes[-1].signal:
            by = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            say(f"Stopped by {by} after step {position.step}; resume with: {resuming_command(args)}")
            return 128 + number
    show_results(outcomes, lines, data.held_out_unigram_cross_entropy, folder)
    dist.barrier()
    return 0


def resuming_command(args: argparse.Namespace) -> str:
    """The command of this run with --resume, or words for it where a launcher started the ranks."""
    if dist.get_world_size() > 1 or args.local_rank >= 0:
        return "the same command and --resume"
    return shlex.join([sys.executable, *sys.argv, *([] if args.resume else ["--resume"])])


def show_results(outcomes: Sequence[Outcome], lines: MaskedLines, unigram: float, folder: Path) -> None:
    """Prints each run's held-out loss beside the unigram cross-entropy, its speed, and what it fills in; draws the loss
    curve, and writes the page of the run."""
    for run, position, records, _ in outcomes:
        distance = position.held_out_loss - unigram
        say(
            f"{run.name}: held-out masked-LM loss {position.held_out_loss:.4f} nats after {position.step} steps, "
            f"{abs(distance):.4f} {'below' if distance < 0 else 'above'} the unigram cross-entropy {unigram:.4f} of "
            "the same positions"
        )
        if speed := speed_in_words(records):
            say(f"{run.name}: {speed}")
        if position.skipped_steps:
            say(f"{run.name}: {position.skipped_steps} of the steps had gradients that overflowed, and were skipped.")
    filled_in = lines.beside({outcome.run.name: outcome.position.filled_in for outcome in outcomes})
    if filled_in:
        say(f"Held-out lines with masked words, and what fills them in:\n{filled_in}")
    steps = [outcome.position.step for outcome in outcomes]
    if steps[-1] < steps[0]:
        say(f"dense trained {steps[-1]} of the {steps[0]} steps of sparse in its time; --resume trains the rest.")
    if dist.get_rank() == 0:
        draw_curves(folder / "loss.png", {outcome.run.name: outcome.records for outcome in outcomes}, unigram)
        write_page(folder / "report.html", outcomes, folder / "loss.png", unigram, filled_in)
        say(f"Report: {folder / 'report.html'}; loss curve: {folder / 'loss.png'}; by step: {folder}/*/metrics.jsonl")


def exit_status(program: Callable[[], int]) -> int:
    """Runs a program of this folder; what it could not do ends in a sentence."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed calls collectives by names that torch is about to rename, in every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    try:
        code = program()
    except (OSError, ValueError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}{f' (rank {rank()})' if rank() else ''}: {error}")
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(exit_status(main))
