"""The pretraining run as its users start it: one process and two, sparse and dense, killed and resumed."""

import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import without_launcher

from ds_sparse.ops import BLOCK_OPERATORS, missing_kernels

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
SCRIPT = ROOT / "examples" / "bing_bert" / "deepspeed_train.py"
TOKENS, STEPS, MANY_STEPS = 256, 6, 20

# As the commands of these names do, wherever they are installed.
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"],
    "deepspeed": [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators=2", "--master_port=29602"],
}

IN_ONE_PROCESS = """
import contextlib, io, json, sys
sys.path.insert(0, sys.argv[1])
import deepspeed_train
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
CPU_Accelerator.is_fp16_supported = lambda self: True  # PyTorch has it on every CPU, if slowly
deepspeed_train.save_drawing = deepspeed_train.draw_results = lambda *_: None  # they take longer than the training
for arguments in json.loads(sys.argv[2]):
    sys.argv, printed = ["deepspeed_train.py", *arguments], io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            ended = deepspeed_train.main()
    except SystemExit as error:
        ended = error.code
    except ValueError as error:
        ended = str(error)
    print(json.dumps([ended, printed.getvalue()]), flush=True)
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A small corpus, a small model, and a cache of their own."""
    folder = tmp_path_factory.mktemp("bing_bert")
    corpus = folder / "corpus"
    corpus.mkdir()
    source = (Path(os.__file__).parent / "argparse.py").read_text()
    words = source.split()
    for number in range(60):
        draw = random.Random(number)
        start = draw.randrange(len(words) - 900)
        (corpus / f"{number}.txt").write_text(" ".join(words[start : start + 800]))
    model = {
        "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "position_convolution": 3,
    }  # fmt: skip
    (folder / "model.json").write_text(json.dumps({"name": "small", "bert_model_config": model}))
    dropping = model | {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    (folder / "dropout.json").write_text(json.dumps({"name": "dropout", "bert_model_config": dropping}))
    return folder


def write_config(folder, name="ds.json", **changes):
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 1000000,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "sparse_attention": {"mode": "bigbird", "block": 16, "num_random_blocks": 1, "seed": 5},
    }
    path = folder / name
    path.write_text(json.dumps(config | changes))
    return path


def command(workplace, output, *more, config=None, model="model.json", launcher=(sys.executable,)):
    return [
        *launcher, str(SCRIPT), "--cf", str(workplace / model), "--corpus", str(workplace / "corpus"),
        "--max_seq_length", str(TOKENS), "--max_steps", str(STEPS), "--eval_sequences", "2", "--save_steps", "1",
        "--deepspeed_config", str(config or write_config(workplace)), "--output_dir", str(output), *more,
    ]  # fmt: skip


def environment(workplace, device="cpu"):
    """No launcher's variables, no compiler, no ninja: the run must not need them."""
    clean = without_launcher() | {
        "DS_SPARSE_CACHE": str(workplace / "cache"), "CXX": "/nonexistent", "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    return clean if device == "cuda" else clean | {"CUDA_VISIBLE_DEVICES": ""}


def run(workplace, *arguments, **settings):
    return execute(workplace, command(workplace, *arguments, **settings))


def run_in_one_process(workplace, runs, device="cpu"):
    """Runs `command`s one after the other, as starting a process takes far longer than they do.

    Returns, for each, what `main` returned, the sentence it raised or the status it left with; and what it printed.
    """
    arguments = json.dumps([run[2:] for run in runs])
    done = execute(workplace, [sys.executable, "-c", IN_ONE_PROCESS, str(SCRIPT.parent), arguments], device)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def execute(workplace, command, device="cpu", **settings):
    settings = {"env": environment(workplace, device), "timeout": 240} | settings
    return subprocess.run(command, capture_output=True, text=True, check=False, **settings)


def succeed(workplace, *arguments, **settings):
    done = run(workplace, *arguments, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


def interrupted(workplace, number, step, output, *arguments, **settings):
    """A run that gets signal `number` once `step` is in its metrics, and what it printed."""
    process = subprocess.Popen(
        command(workplace, output, *arguments, **settings), env=environment(workplace), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    metrics = output / "0001" / "sparse" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    try:
        while not (metrics.exists() and f'"step": {step}, "mlm_loss"' in metrics.read_text()):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, f"the run did not reach step {step}"
            time.sleep(0.01)
        process.send_signal(number)
        printed, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    return process.returncode, printed


def losses(output, name="sparse", number="0001"):
    lines = (output / number / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [(r["step"], r.get("mlm_loss"), r.get("nsp_loss"), r.get("held_out_mlm_loss")) for r in records]


def training_losses(output, name="sparse"):
    return [record[:3] for record in losses(output, name) if record[1] is not None]


def copied(run_folder, output):
    """A copy of a run, to continue it and leave the original alone."""
    shutil.copytree(run_folder, output)
    return output


@pytest.fixture(scope="module")
def finished(workplace):
    """A run of one rank that has ended: its folder, and what it printed."""
    output = workplace / "one_rank"
    return output, succeed(workplace, output, "--deepspeed_sparse_attention")


@pytest.fixture(scope="module")
def resumed(workplace, finished, stopped):
    """Runs that continue another, by name: the folder, and what was printed."""
    flags = ("--deepspeed_sparse_attention", "--resume")
    runs = {
        "from the start": (finished[0], "--max_steps", str(STEPS + 2)),
        "longer": (finished[0], "--max_steps", str(STEPS + 2)),
        "again": (finished[0],),
        "damaged": (finished[0], "--max_steps", str(STEPS + 2)),
        "stopped": (stopped[0], "--max_steps", "2"),
    }
    outputs = {name: copied(run[0], workplace / f"resumed {name}") for name, run in runs.items()}
    shutil.rmtree(outputs["from the start"] / "0001" / "sparse" / "checkpoints")
    damage(outputs["damaged"] / "0001" / "sparse")
    commands = [command(workplace, outputs[name], *flags, *more) for name, (_, *more) in runs.items()]
    commands.append(command(workplace, outputs["stopped"], *flags, "--max_steps", "2"))
    found = run_in_one_process(workplace, commands)
    assert [ended for ended, _ in found] == [0] * len(commands), found
    assert found[-1][1].count("nothing left to train") == 1
    return {name: (outputs[name], printed) for name, (_, printed) in zip(runs, found)}


def damage(folder):
    """Flips a bit of the weights that are in force, and spoils a line of the metrics."""
    weights = folder / "checkpoints" / f"step{STEPS}" / "mp_rank_00_model_states.pt"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[2] = "garbage"
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def many_steps(workplace):
    """An uninterrupted run with dropout."""
    output = workplace / "many_steps"
    succeed(workplace, output, "--deepspeed_sparse_attention", "--max_steps", str(MANY_STEPS), model="dropout.json")
    return output


@pytest.fixture(scope="module")
def stopped(workplace):
    """A run that SIGTERM stopped, and what it printed."""
    output = workplace / "stopped"
    code, printed = interrupted(
        workplace, signal.SIGTERM, 3, output, "--deepspeed_sparse_attention", "--max_steps", "100000"
    )
    assert code == 128 + signal.SIGTERM, printed
    return output, printed


@pytest.fixture(scope="module")
def comparison(workplace):
    """A comparison that ended by time, and what it printed."""
    output = workplace / "comparison"
    return output, succeed(workplace, output, *COMPARISON)


COMPARISON = ("--deepspeed_sparse_attention", "--compare-dense", "--max-steps", "100000", "--max-minutes", "0.08")


def test_a_run_shows_layout_losses_and_the_unigram_line(finished):
    output, printed = finished
    assert "density" in printed and "sparse attention is on in 2 of 2 attention layers" in printed
    assert f"after {STEPS} steps" in printed and "unigram cross-entropy" in printed
    assert "Training on the CPU" in printed
    assert f"\nThe run ends after step {STEPS} or 5 minutes at most; " in printed
    folder = output / "0001"
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG") and (folder / "sparse" / "layout.png").exists()
    page = (folder / "report.html").read_text()
    assert f"after {STEPS} steps" in page and "srcdoc" in page and "operations on the CPU" in page
    assert re.search(
        r"sparse: [\d,]+ tokens/s  [\d.]+ TFLOP/s a rank in the median step, [\d,]+ tokens/s in all steps", printed
    )
    assert json.loads((folder / "manifest.json").read_text())["sequence_length"] == TOKENS
    steps = [step for step, mlm_loss, *_ in losses(output) if mlm_loss is not None]
    assert steps == list(range(1, STEPS + 1))


def test_the_learning_rate_of_the_json_is_warmed_up(finished):
    records = map(json.loads, (finished[0] / "0001" / "sparse" / "metrics.jsonl").read_text().splitlines())
    rates = [record["learning_rate"] for record in records if "learning_rate" in record]
    assert rates == pytest.approx([1e-3 * (step + 1) / 100 for step in range(1, STEPS + 1)])  # of the step after


def test_a_run_starts_at_the_unigram_line(finished):
    output, printed = finished
    unigram = float(re.search(r"the unigram cross-entropy (\S+) of", printed)[1])
    assert losses(output)[0][3] == pytest.approx(unigram, abs=0.05)


@pytest.mark.slow("trains, continues and compares in several processes")
def test_a_run_ends_with_masked_lines_and_what_fills_them_in(finished, resumed, comparison):
    *_, lines = finished[1].partition("Held-out lines with masked words")
    assert lines.count("[MASK]") == 4 * lines.count("the text") > 0
    assert lines.count("\n    sparse    ") == lines.count("the text")
    assert lines.partition("Report: ")[0] in resumed["again"][1]  # kept with the checkpoint
    assert comparison[1].count("\n    sparse    ") == comparison[1].count("\n    dense     ") > 0


@pytest.mark.parametrize("launcher, stage", [("torchrun", 0), ("deepspeed", 2)])
@pytest.mark.slow("starts a launcher and two ranks")
def test_two_ranks_agree_with_one(workplace, finished, launcher, stage):
    output = workplace / f"{launcher}{stage}"
    config = write_config(workplace, f"{launcher}{stage}.json", zero_optimization={"stage": stage})
    printed = succeed(workplace, output, "--deepspeed_sparse_attention", config=config, launcher=LAUNCHERS[launcher])
    assert printed.count(f"after {STEPS} steps") == printed.count("The run ends after") == 1
    for mine, theirs in zip(losses(output), losses(finished[0]), strict=True):
        assert mine[0] == theirs[0]
        for ours, reference in zip(mine[1:], theirs[1:]):
            assert (ours is None) == (reference is None)
            assert ours is None or abs(ours - reference) < 1e-5


@pytest.mark.slow("starts a launcher and two ranks")
def test_zero_3_with_a_rank_that_has_no_held_out_sequence(workplace, finished):
    """ZeRO 3 gathers weights from all ranks in each forward, so one that does fewer of them would stop the others."""
    output, config = workplace / "one_sequence", write_config(workplace, "z3.json", zero_optimization={"stage": 3})
    more = ("--deepspeed_sparse_attention", "--max_steps", "2", "--eval_sequences", "1")
    assert "after 2 steps" in succeed(workplace, output, *more, config=config, launcher=LAUNCHERS["torchrun"])
    ours, theirs = (training_losses(folder)[1][1] for folder in (output, finished[0]))
    assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.slow("trains in three processes")
def test_a_killed_run_resumes_with_the_same_losses_bit_for_bit(workplace, many_steps):
    more = ("--deepspeed_sparse_attention", "--max_steps", str(MANY_STEPS))
    output, step = workplace / "killed", random.Random().randrange(2, 10)
    code, printed = interrupted(workplace, signal.SIGKILL, step, output, *more, model="dropout.json")
    assert code == -signal.SIGKILL, printed
    assert "continuing after step" in succeed(workplace, output, *more, "--resume", model="dropout.json")
    assert losses(output) == losses(many_steps), f"killed after step {step}"


@pytest.mark.slow("trains, is stopped and continues in three processes")
def test_a_resume_without_a_checkpoint_says_that_it_starts_again(finished, resumed):
    output, printed = resumed["from the start"]
    assert "has no checkpoint of it yet; it starts from step 0" in printed
    assert training_losses(output)[:STEPS] == training_losses(finished[0])
    assert len(losses(output)) == STEPS + 2 + 2


@pytest.fixture(scope="module")
def short_runs(workplace, finished):
    """Lists of runs that train few steps or none, in one process: how each `main` ended and what it printed."""
    kinds = {"monitored": monitored_runs(workplace), "refused": refused_runs(workplace, finished[0])}
    kinds["dry"] = dry_runs(workplace, finished[0])
    late = ("--deepspeed_sparse_attention", "--max_steps", "40", "--max-minutes", "0.001")  # over when they are read
    kinds["late"] = [command(workplace, workplace / "late", *late)]
    before = checkpoint_files(finished[0])
    found = iter(run_in_one_process(workplace, list(itertools.chain(*kinds.values()))))
    assert checkpoint_files(finished[0]) == before and not (workplace / "dry").exists()
    return {kind: [next(found) for _ in runs] for kind, runs in kinds.items()}


def monitored_runs(workplace):
    """A job that is started twice with the same command but for its steps, watched by DeepSpeed's monitor."""
    csv = {"enabled": True, "output_path": str(workplace / "monitor"), "job_name": "job"}
    config = write_config(workplace, "monitored.json", csv_monitor=csv)
    flags = ("--deepspeed_sparse_attention", "--resume-or-start", "--eval-steps", "2", "--max_steps")
    return [command(workplace, workplace / "monitored", *flags, steps, config=config) for steps in ("2", "4")]


@pytest.fixture(scope="module")
def monitored(workplace, short_runs):
    found = short_runs["monitored"]
    assert [ended for ended, _ in found] == [0, 0], found
    return workplace / "monitored", workplace / "monitor" / "job", [printed for _, printed in found]


def test_resume_or_start_starts_a_run_and_then_continues_it(finished, monitored):
    output, _, printed = monitored
    assert "continuing" not in printed[0] and "continuing after step 2" in printed[1]
    assert [path.name for path in output.iterdir()] == ["0001"]
    assert training_losses(output) == training_losses(finished[0])[:4], "as if it had never ended"


def test_a_run_says_its_held_out_loss_as_it_goes(monitored):
    output, _, printed = monitored
    held_out = {step: loss for step, *_, loss in losses(output) if loss is not None}
    assert sorted(held_out) == [0, 2, 4]
    assert f"sparse: step 0  held-out loss {held_out[0]:.4f}\n" in printed[0]
    assert f"sparse: step 4  held-out loss {held_out[4]:.4f}\n" in printed[1]


def test_a_run_that_is_out_of_time_ends_after_its_step_with_a_loss_and_a_checkpoint(workplace, short_runs):
    ((ended, printed),) = short_runs["late"]
    assert ended == 0 and "after 1 steps" in printed
    assert [step for step, *_ in losses(workplace / "late")] == [0, 1, 1]
    assert (workplace / "late" / "0001" / "sparse" / "checkpoints" / "latest").read_text() == "step1"


def test_the_monitors_of_the_json_get_the_figures_by_sequences(monitored):
    output, folder, _ = monitored
    lines = (folder / "sparse_held_out_mlm_loss.csv").read_text().splitlines()
    rows = [line for line in lines if not line.startswith("step")]  # the head, once a start
    wanted = [(4 * step, loss) for step, *_, loss in losses(output) if loss is not None]
    assert [(int(at), float(value)) for at, value in (row.split(",") for row in rows)] == wanted
    assert (folder / "sparse_mlm_loss.csv").exists() and (folder / "sparse_tokens_per_second.csv").exists()


@pytest.mark.slow("trains, is stopped and continues in three processes")
def test_a_finished_run_continues_with_more_steps(resumed):
    output, printed = resumed["longer"]
    assert f"continuing after step {STEPS}" in printed and f"after {STEPS + 2} steps" in printed
    assert training_losses(output) == training_losses(resumed["from the start"][0])
    assert losses(output)[-1] == losses(resumed["from the start"][0])[-1]


@pytest.mark.slow("trains, is stopped and continues in three processes")
def test_a_finished_run_has_nothing_left_to_do_and_writes_no_checkpoint(finished, resumed):
    output, printed = resumed["again"]
    assert f"nothing left to train, {STEPS} steps are done" in printed and f"after {STEPS} steps" in printed
    assert losses(output) == losses(finished[0])
    assert checkpoint_files(output) == checkpoint_files(finished[0])


def checkpoint_files(output):
    """When each file of the checkpoints was written, and what is in it."""
    folder = output / "0001" / "sparse" / "checkpoints"
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.slow("trains, is stopped and continues in three processes")
def test_a_damaged_run_says_what_is_damaged_and_continues_from_the_checkpoint_before(resumed):
    output, printed = resumed["damaged"]
    folder = output / "0001" / "sparse"
    weights = folder / "checkpoints" / f"step{STEPS}" / "mp_rank_00_model_states.pt"
    assert f"{weights} is damaged: its checksum is not that of what was written." in printed
    assert f"step{STEPS - 1} is whole and is taken instead; the 1 steps after it are trained again." in printed
    metrics = folder / "metrics.jsonl"
    assert f"{metrics}: 1 of {STEPS + 2} lines are no records, the first is line 3: left out." in printed
    assert f"{metrics} has no record of 1 of the {STEPS - 1} steps so far" in printed
    expected = training_losses(resumed["longer"][0])
    assert training_losses(output) == expected[:1] + expected[2:]


@pytest.mark.slow("trains in a process that is stopped")
def test_a_stopped_run_saves_and_says_how_to_continue(stopped):
    output, printed = stopped
    step = losses(output)[-1][0]
    assert "a checkpoint is written after this step; Ctrl-C now ends the run without one" in printed
    assert f"after step {step}; continue with --resume" in printed
    assert (output / "0001" / "sparse" / "checkpoints" / "latest").read_text() == f"step{step}"


@pytest.mark.slow("trains, is stopped and continues in three processes")
def test_a_stopped_run_that_has_its_steps_only_gets_its_held_out_loss(stopped, resumed):
    output, printed = resumed["stopped"]
    step = losses(stopped[0])[-1][0]
    assert f"after {step} steps" in printed
    assert losses(output)[:-1] == losses(stopped[0])
    assert losses(output)[-1][0] == step and losses(output)[-1][3] is not None
    before, after = checkpoint_files(stopped[0]), checkpoint_files(output)
    assert before["latest"][1] == f"step{step}".encode() and after["latest"][1] == f"step{step}.1".encode()
    kept = {name for name in before if name.startswith(f"step{step}/")}
    assert kept and all(after[name] == before[name] for name in kept)  # not written over


@pytest.mark.slow("starts the script for three seconds")
def test_a_second_interrupt_ends_the_process_at_once(workplace):
    """In the deepspeed launcher a SIGTERM follows the terminal's Ctrl-C; that is no second one."""
    code = (
        "import os, signal, deepspeed_train\n"
        "deepspeed_train.remember_signals()\n"
        "for number in (signal.SIGINT, signal.SIGTERM): os.kill(os.getpid(), number)\n"
        "print('goes on', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "print('still there')\n"
    )
    done = execute(workplace, [sys.executable, "-c", code], cwd=SCRIPT.parent)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert done.stdout.count("Ctrl-C now ends the run") == 1
    assert "goes on" in done.stdout and "still there" not in done.stdout


@pytest.mark.slow("compares for as long as it may")
def test_a_comparison_trains_dense_for_no_more_steps_than_sparse(comparison):
    output, printed = comparison
    sparse, dense = (training_losses(output, name)[-1][0] for name in ("sparse", "dense"))
    assert 1 <= dense <= sparse
    assert "block and it is off" not in printed
    assert f"after {sparse} steps" in printed and f"after {dense} steps" in printed
    assert (f"dense trained {dense} of the {sparse} steps" in printed) == (dense < sparse)
    assert (output / "0001" / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow("compares for as long as it may")
def test_a_resumed_comparison_does_not_train_sparse_on_by_minutes(workplace, comparison):
    """As if it had been killed before the first checkpoint of dense, which then takes the steps of sparse."""
    output = copied(comparison[0], workplace / "comparison_again")
    shutil.rmtree(output / "0001" / "dense")
    before, steps = losses(output), training_losses(output)[-1][0]
    printed = succeed(workplace, output, *COMPARISON, "--max-minutes", "1", "--resume")
    assert f"sparse: nothing left to train, {steps} steps are done" in printed
    assert losses(output) == before
    assert training_losses(output, "dense")[-1][0] == steps


@pytest.fixture(scope="module")
def trained(workplace):
    """Short runs with other JSONs, by name: how `main` ended and what it printed."""
    short = ("--deepspeed_sparse_attention", "--max_steps", "1", "--max_seq_length", "512")
    runs = {path.stem: (path, *short) for path in shipped_configs()}
    block = {"mode": "bigbird", "num_local_blocks": 4}
    runs["no flag"] = (write_config(workplace, "block.json", sparse_attention=block), "--max_steps", "2")
    commands = [
        command(workplace, workplace / "trained" / name, *more, config=config) for name, (config, *more) in runs.items()
    ]
    return dict(zip(runs, run_in_one_process(workplace, commands), strict=True))


def shipped_configs():
    return sorted(path for path in CONFIGS.glob("*.json") if path.stem != "sparse_attention.schema")


@pytest.mark.slow("trains with every shipped JSON")
def test_the_same_json_without_the_flag_trains_dense(workplace, trained):
    ended, printed = trained["no flag"]
    assert ended == 0 and "has a sparse_attention block and it is off" in printed
    assert printed.count(f"{workplace / 'block.json'}: sparse_attention.num_local_blocks: belongs to") == 1
    assert len(losses(workplace / "trained" / "no flag", "dense")) == 2 + 2


@pytest.mark.parametrize("name", [path.stem for path in shipped_configs()])
@pytest.mark.slow("trains with every shipped JSON")
def test_every_shipped_json_trains(trained, name):
    ended, printed = trained[name]
    assert ended == 0 and "after 1 steps" in printed
    assert ("The JSON asks for Lamb" in printed) == (name == "deepspeed_bsz64k_lamb_config_seq128")


@pytest.fixture(scope="module")
def zero(workplace, device):
    """Each ZeRO stage in each precision, 4 steps at once and 2 + 2: the folder, how `main` ended, what it printed."""
    if missing_kernels(device, BLOCK_OPERATORS):
        pytest.skip(f"no {device} kernel for {', '.join(missing_kernels(device, BLOCK_OPERATORS))}")
    runs = {}
    for stage, precision in itertools.product(range(4), PRECISIONS[device]):
        name, changes = f"{precision} zero{stage} {device}", {"zero_optimization": {"stage": stage}}
        config = write_config(workplace, f"{name}.json", **changes, **PRECISIONS[device][precision])
        more = ("--deepspeed_sparse_attention", "--eval-steps", "2")
        runs[stage, precision, "whole"] = command(workplace, workplace / name, *more, "--max-steps", "4", config=config)
        half = command(workplace, workplace / f"{name} half", *more, "--max-steps", "2", config=config)
        runs[stage, precision, "half"] = half
        runs[stage, precision, "resumed"] = [*half, "--max-steps", "4", "--resume"]
    ended = run_in_one_process(workplace, runs.values(), device)
    outputs = [Path(run[run.index("--output_dir") + 1]) for run in runs.values()]
    return {key: (output, *end) for key, output, end in zip(runs, outputs, ended, strict=True)}


OVERFLOWING = {"fp16": {"enabled": True, "initial_scale_power": 24}}
PRECISIONS = {
    "cpu": {"bf16": {"bf16": {"enabled": True}}, "overflowing": OVERFLOWING},
    "cuda": {"bf16": {}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}, "overflowing": OVERFLOWING},
}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.slow("trains 24 runs")
def test_every_zero_stage_trains_saves_and_resumes_exactly(zero, device, stage):
    for precision in PRECISIONS[device]:
        whole, half, resumed = (zero[stage, precision, part] for part in ("whole", "half", "resumed"))
        assert [ended for _, ended, _ in (whole, half, resumed)] == [0, 0, 0], (whole, half, resumed)
        assert "continuing after step 2" in resumed[2]
        assert losses(resumed[0]) == losses(whole[0]), precision
        assert ("bf16 is used on the GPU" in whole[2]) == (device == "cuda" and precision == "bf16")
        assert ("overflowed in fp16 and were skipped" in whole[2]) == (precision == "overflowing")


def refused_runs(workplace, trained):
    """Runs with wrong arguments, one that would continue with other terms, and the help."""
    other_terms = ("--deepspeed_sparse_attention", "--resume", "--seed", "43", "--eval_sequences", "1")
    commands = [command(workplace, workplace / "refused", *arguments) for arguments, _ in WRONG_ARGUMENTS]
    commands.append(command(workplace, trained, *other_terms))
    return [*commands, command(workplace, workplace / "refused", "--help")]


@pytest.fixture(scope="module")
def refused(short_runs):
    return short_runs["refused"]


WRONG_ARGUMENTS = [
    (["--corpus", "no_such_corpus"], "no_such_corpus"),
    (["--cf", "no_such.json"], "no_such.json: No such file"),
    (["--max_minutes", "0"], "--max-minutes is 0"),
    (["--compare_dense"], "add --deepspeed_sparse_attention"),
    (["--resume"], "start one without --resume"),
    (["--deepspeed_config", "no_such.json"], "no_such.json: no such file"),
]


@pytest.mark.parametrize("number", range(len(WRONG_ARGUMENTS)), ids=lambda number: WRONG_ARGUMENTS[number][1])
def test_wrong_arguments_end_in_a_sentence(refused, number):
    ended, printed = refused[number]
    assert ended != 0
    assert WRONG_ARGUMENTS[number][1] in f"{ended}{printed}"


def dry_runs(workplace, trained):
    """One that is new, one that continues, one that is done, and one that has nothing to continue."""
    new, flags = workplace / "dry", ("--deepspeed_sparse_attention", "--dry-run")
    return [
        command(workplace, new, *flags, "--compare-dense"),
        command(workplace, trained, *flags, "--resume", "--max_steps", str(STEPS + 2)),
        command(workplace, trained, *flags, "--resume"),
        command(workplace, new, *flags, "--resume"),
    ]


@pytest.fixture(scope="module")
def dry(short_runs):
    """The dry runs by name: how `main` ended and what it printed."""
    return dict(zip(("new", "continues", "done", "none"), short_runs["dry"], strict=True))


def test_a_dry_run_says_what_a_run_would_do_and_does_nothing(workplace, dry):
    ended, printed = dry["new"]
    assert ended == 0
    assert re.search(r"sparse: [\d,]+ parameters, trained in fp32\n", printed)
    assert re.search(r"sparse: layers 0-1: bigbird, block 16, density [\d.]+%\n", printed)
    assert "dense: layers 0-1: dense\n" in printed
    assert "a step has 4 sequences, 1,024 tokens, 2 at once, 2 times, on 1 rank, ZeRO 0; an epoch has " in printed
    assert "TFLOP a step and rank" in printed and "the time of a step is not known" in printed
    assert f"sparse: starts at step 0, and ends after step {STEPS} or 5 minutes" in printed
    assert "The run ends" not in printed
    folder = workplace / "dry" / "0001"
    for name in ("sparse", "dense"):
        assert f"{name}: checkpoints every 1 steps in {folder / name / 'checkpoints'}" in printed


def test_a_dry_run_says_what_it_would_continue_or_why_it_could_not(dry):
    ended, printed = dry["continues"]
    assert ended == 0 and f"continues after step {STEPS}, and ends after step {STEPS + 2}" in printed
    assert dry["done"][0] == 0 and f"nothing left to train, {STEPS} steps are done" in dry["done"][1]
    assert "start one without --resume" in dry["none"][0]


def test_other_terms_cannot_be_resumed(refused):
    sentence, _ = refused[-2]
    assert "seed was 42 and is 43" in sentence and "eval_sequences was 2 and is 1" in sentence


def test_the_help_has_every_option_once_in_either_spelling(refused):
    ended, printed = refused[-1]
    assert ended == 0 and printed.startswith("usage: deepspeed_train.py --deepspeed_config FILE")
    for option in ("--corpus NAME", "--max-minutes M", "--max-steps N", "--compare-dense ", "--resume "):
        assert printed.count(f"\n  {option}") == 1
    assert "\n  --deepspeed_config " in printed and "--max_steps" not in printed


@pytest.mark.slow("starts the script for four seconds")
def test_a_wrong_json_ends_the_process_with_a_sentence_and_leaves_the_run_as_it_is(workplace, finished):
    config = write_config(workplace, "wrong.json", optimizer={"type": "AdamW", "params": {"lrr": 1}})
    before = (finished[0] / "0001" / "manifest.json").read_bytes()
    done = run(workplace, finished[0], "--deepspeed_sparse_attention", "--resume", config=config)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith(f"deepspeed_train.py: {config}: optimizer.params.lrr: ")
    assert (finished[0] / "0001" / "manifest.json").read_bytes() == before
