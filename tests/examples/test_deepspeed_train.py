"""The pretraining run as its users start it: one process and two, sparse and dense, killed and resumed."""

import itertools
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_sparse.ops import BLOCK_OPERATORS, missing_kernels

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
STEPS = 6
FLAG = "--deepspeed_sparse_attention"

# As the commands of these names do, wherever they are installed.
LAUNCHERS = {
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
    "deepspeed": (sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators=2", "--master_port=29602"),
}


def interrupted(workplace, number, step, output, *arguments, **settings):
    """A run that gets signal `number` once `step` is in its metrics: how it ended and what it printed."""
    process = subprocess.Popen(
        [sys.executable, str(workplace.script), *workplace.options(output, FLAG, *arguments, **settings)],
        env=workplace.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    metrics = workplace.folder / output / "0001" / "sparse" / "metrics.jsonl"
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


def checkpoint_files(folder):
    """When each file of the checkpoints was written, and what is in it."""
    folder = folder / "0001" / "sparse" / "checkpoints"
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.fixture(scope="module")
def finished(workplace):
    """Output of a run of one rank that has ended, in the folder of this name."""
    return workplace.succeed("finished", FLAG)


@pytest.fixture(scope="module")
def stopped(workplace):
    """Output of a run that SIGTERM stopped."""
    code, printed = interrupted(workplace, signal.SIGTERM, 3, "stopped", "--max_steps", "100000")
    assert code == 128 + signal.SIGTERM, printed
    return printed


@pytest.fixture(scope="module")
def resumed(workplace, finished, stopped):
    """Output of copies of runs that were continued, in folders of these names."""
    longer = ("--max_steps", str(STEPS + 2))
    runs = {"anew": longer, "longer": longer, "again": (), "ended": ("--max_steps", "2")}
    for name in runs:
        shutil.copytree(workplace.folder / ("stopped" if name == "ended" else "finished"), workplace.folder / name)
    shutil.rmtree(workplace.folder / "anew" / "0001" / "sparse" / "checkpoints")
    options = [workplace.options(name, FLAG, "--resume", *more) for name, more in runs.items()]
    found = workplace.run([*options, options[-1]])
    assert [ended for ended, _ in found] == [0] * len(found), found
    assert found[-1][1].count("nothing left to train") == 1
    return {name: printed for name, (_, printed) in zip(runs, found)}


COMPARISON = (FLAG, "--compare-dense", "--max-steps", "100000", "--max-minutes", "0.08")


@pytest.fixture(scope="module")
def comparison(workplace):
    """Output of a comparison that ended by time."""
    return workplace.succeed("comparison", *COMPARISON)


def test_a_run_shows_its_layout_losses_speed_and_page(workplace, finished):
    for words in ("density", "sparse attention is on in 2 of 2 attention layers", "Training on the CPU"):
        assert words in finished
    assert f"\nThe run ends after step {STEPS} or 5 minutes at most; " in finished
    speed = r"sparse: [\d,]+ tokens/s  [\d.]+ TFLOP/s a rank in the median step, [\d,]+ tokens/s in all steps"
    assert re.search(speed, finished)
    folder = workplace.folder / "finished" / "0001"
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "report.html").read_text()
    assert f"after {STEPS} steps" in page and "srcdoc" in page and "operations on the CPU" in page
    assert json.loads((folder / "manifest.json").read_text())["sequence_length"] == 256

    records = map(json.loads, (folder / "sparse" / "metrics.jsonl").read_text().splitlines())
    rates = {record["step"]: record["learning_rate"] for record in records if "learning_rate" in record}
    assert rates == pytest.approx({step: 1e-3 * (step + 1) / 100 for step in range(1, STEPS + 1)})  # of the step after
    unigram = float(re.search(rf"after {STEPS} steps, .* the unigram cross-entropy (\S+) of", finished)[1])
    assert workplace.losses("finished")[0][3] == pytest.approx(unigram, abs=0.05), "a run starts there"


@pytest.mark.slow("trains, continues and compares in several processes")
def test_a_run_ends_with_masked_lines_and_what_fills_them_in(finished, resumed, comparison):
    *_, lines = finished.partition("Held-out lines with masked words")
    assert lines.count("[MASK]") == 4 * lines.count("the text") > 0
    assert lines.count("\n    sparse    ") == lines.count("the text")
    assert lines.partition("Report: ")[0] in resumed["again"]  # kept with the checkpoint
    assert comparison.count("\n    sparse    ") == comparison.count("\n    dense     ") > 0


@pytest.mark.parametrize("launcher, stage", [("torchrun", 0), ("deepspeed", 2)])
@pytest.mark.slow("starts a launcher and two ranks")
def test_two_ranks_agree_with_one(workplace, finished, launcher, stage):
    config = workplace.config(launcher, zero_optimization={"stage": stage})
    printed = workplace.succeed(launcher, FLAG, config=config, launcher=LAUNCHERS[launcher])
    assert printed.count(f"after {STEPS} steps") == printed.count("The run ends after") == 1
    nothing = {None: -1.0}
    ours, theirs = ([[nothing.get(x, x) for x in row] for row in workplace.losses(o)] for o in (launcher, "finished"))
    assert len(ours) == len(theirs)
    for mine, one in zip(ours, theirs):
        assert mine == pytest.approx(one, abs=1e-5)


@pytest.mark.slow("trains in two ranks")
def test_zero_3_with_a_rank_that_has_no_held_out_sequence(workplace, finished):
    """ZeRO 3 gathers weights from all ranks in each forward, so one that does fewer of them would stop the others."""
    config = workplace.config("z3", zero_optimization={"stage": 3})
    options = workplace.options("z3", FLAG, "--max_steps", "2", "--eval_sequences", "1", config=config)
    ((*ended, printed),) = workplace.run([options], [2])
    assert ended == [0, 0] and "after 2 steps" in printed
    ours, theirs = (workplace.training_losses(output)[1][1] for output in ("z3", "finished"))
    assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.slow("trains in three processes")
def test_a_killed_run_resumes_with_the_same_losses_bit_for_bit(workplace):
    more, step = ("--max_steps", "20"), random.Random().randrange(2, 10)
    workplace.succeed("whole", FLAG, *more, model="dropout")
    code, printed = interrupted(workplace, signal.SIGKILL, step, "killed", *more, model="dropout")
    assert code == -signal.SIGKILL, printed
    assert "continuing after step" in workplace.succeed("killed", FLAG, *more, "--resume", model="dropout")
    assert workplace.losses("killed") == workplace.losses("whole"), f"killed after step {step}"


@pytest.fixture(scope="module")
def short_runs(workplace, finished):
    """Lists of runs that train few steps or none, by kind: how each `main` ended and what it printed."""
    csv = {"enabled": True, "output_path": str(workplace.folder / "monitor"), "job_name": "job"}
    monitored = workplace.config("monitored", csv_monitor=csv)
    again = (FLAG, "--resume-or-start", "--eval-steps", "2", "--max_steps")
    dry = (FLAG, "--dry-run")
    kinds = {
        # A job that is started twice with the same command but for its steps, watched by DeepSpeed's monitor.
        "monitored": [workplace.options("monitored", *again, steps, config=monitored) for steps in ("2", "4")],
        "late": [workplace.options("late", FLAG, "--max_steps", "40", "--max-minutes", "0.001")],
        "dry": [
            workplace.options("dry", *dry, "--compare-dense"),
            workplace.options("finished", *dry, "--resume", "--max_steps", str(STEPS + 2)),
            workplace.options("finished", *dry, "--resume"),
        ],
        "refused": [workplace.options(output, *more) for output, more, _ in REFUSED],
        "help": [["--help"]],
    }
    before = checkpoint_files(workplace.folder / "finished")
    found = iter(workplace.run(list(itertools.chain(*kinds.values()))))
    assert checkpoint_files(workplace.folder / "finished") == before and not (workplace.folder / "dry").exists()
    return {kind: [next(found) for _ in runs] for kind, runs in kinds.items()}


def test_resume_or_start_starts_a_run_and_then_continues_it(workplace, finished, short_runs):
    (first, started), (second, continued) = short_runs["monitored"]
    assert first == second == 0 and "continuing" not in started and "continuing after step 2" in continued
    assert [path.name for path in (workplace.folder / "monitored").iterdir()] == ["0001"]
    assert workplace.training_losses("monitored") == workplace.training_losses("finished")[:4], "as if it never ended"


def test_held_out_losses_are_said_as_a_run_goes_and_monitors_of_the_json_get_figures_by_sequences(
    workplace, short_runs
):
    (_, started), (_, continued) = short_runs["monitored"]
    held_out = {step: loss for step, *_, loss in workplace.losses("monitored") if loss is not None}
    assert sorted(held_out) == [0, 2, 4]
    assert f"sparse: step 0  held-out loss {held_out[0]:.4f}\n" in started
    assert f"sparse: step 4  held-out loss {held_out[4]:.4f}\n" in continued
    folder = workplace.folder / "monitor" / "job"
    lines = (folder / "sparse_held_out_mlm_loss.csv").read_text().splitlines()
    rows = [line.split(",") for line in lines if not line.startswith("step")]  # the head, once a start
    assert [(int(at), float(value)) for at, value in rows] == [(4 * step, loss) for step, loss in held_out.items()]
    assert (folder / "sparse_mlm_loss.csv").exists() and (folder / "sparse_tokens_per_second.csv").exists()


def test_a_run_that_is_out_of_time_ends_after_its_step_with_a_loss_and_a_checkpoint(workplace, short_runs):
    ((ended, printed),) = short_runs["late"]
    assert ended == 0 and "after 1 steps" in printed
    assert [step for step, *_ in workplace.losses("late")] == [0, 1, 1]
    assert (workplace.folder / "late" / "0001" / "sparse" / "checkpoints" / "latest").read_text() == "step1"


@pytest.mark.slow("trains, is stopped and continues in three processes")
def test_a_finished_run_continues_with_more_steps_and_without_a_checkpoint_anew(workplace, resumed):
    assert "has no checkpoint of it yet; it starts from step 0" in resumed["anew"]
    assert f"continuing after step {STEPS}" in resumed["longer"] and f"after {STEPS + 2} steps" in resumed["longer"]
    anew, longer = (workplace.losses(output) for output in ("anew", "longer"))
    assert workplace.training_losses("anew") == workplace.training_losses("longer") and anew[-1] == longer[-1]
    assert workplace.training_losses("anew")[:STEPS] == workplace.training_losses("finished")


@pytest.mark.slow("trains, is stopped and continues in three processes")
def test_a_finished_run_has_nothing_left_to_do_and_writes_no_checkpoint(workplace, resumed):
    assert f"nothing left to train, {STEPS} steps are done" in resumed["again"]
    assert f"after {STEPS} steps" in resumed["again"]
    assert workplace.losses("again") == workplace.losses("finished")
    again, finished = (checkpoint_files(workplace.folder / output) for output in ("again", "finished"))
    assert again == finished


@pytest.mark.slow("trains, is stopped and continues in three processes")
def test_a_stopped_run_saves_and_one_that_has_its_steps_only_gets_its_held_out_loss(workplace, stopped, resumed):
    before, after = workplace.losses("stopped"), workplace.losses("ended")
    step = before[-1][0]
    assert "a checkpoint is written after this step; Ctrl-C now ends the run without" in stopped
    assert f"after step {step}; resume with: " in stopped and "--resume" in stopped.rpartition("resume with: ")[2]
    assert f"after {step} steps" in resumed["ended"]
    assert after[:-1] == before and after[-1][0] == step and after[-1][3] is not None
    before, after = (checkpoint_files(workplace.folder / output) for output in ("stopped", "ended"))
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {f"step{step}/state.json"} and before["latest"][1] == f"step{step}".encode()


INTERRUPTED = """
import os, signal, deepspeed_train
deepspeed_train.remember_signals()
for number in (signal.SIGINT, signal.SIGTERM): os.kill(os.getpid(), number)
print('goes on', flush=True)
os.kill(os.getpid(), signal.SIGINT)
print('still there')
"""


@pytest.mark.slow("starts the script for three seconds")
def test_a_second_interrupt_ends_the_process_at_once(workplace):
    """In the deepspeed launcher a SIGTERM follows the terminal's Ctrl-C; that is no second one."""
    done = workplace.execute([sys.executable, "-c", INTERRUPTED], cwd=workplace.script.parent)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert done.stdout.count("Ctrl-C now ends the run") == 1
    assert "goes on" in done.stdout and "still there" not in done.stdout


@pytest.mark.slow("compares for as long as it may")
def test_a_comparison_trains_dense_for_no_more_steps_than_sparse(workplace, comparison):
    sparse, dense = (workplace.training_losses("comparison", name)[-1][0] for name in ("sparse", "dense"))
    assert 1 <= dense <= sparse and "block and it is off" not in comparison
    assert f"after {sparse} steps" in comparison and f"after {dense} steps" in comparison
    assert (f"dense trained {dense} of the {sparse} steps" in comparison) == (dense < sparse)


@pytest.mark.slow("compares for as long as it may")
def test_a_resumed_comparison_does_not_train_sparse_on_by_minutes(workplace, comparison):
    """As if it had been killed before the first checkpoint of dense, which then takes the steps of sparse."""
    shutil.copytree(workplace.folder / "comparison", workplace.folder / "half")
    shutil.rmtree(workplace.folder / "half" / "0001" / "dense")
    before, steps = workplace.losses("half"), workplace.training_losses("half")[-1][0]
    printed = workplace.succeed("half", *COMPARISON, "--max-minutes", "1", "--resume")
    assert f"sparse: nothing left to train, {steps} steps are done" in printed
    assert workplace.losses("half") == before
    assert workplace.training_losses("half", "dense")[-1][0] == steps


@pytest.mark.slow("trains with every shipped JSON")
def test_every_shipped_json_trains_and_one_without_the_flag_dense(workplace):
    short = (FLAG, "--max_steps", "1", "--max_seq_length", "512")
    for_decoders = ("nsa", "sparse_attention.schema")
    shipped = [path for path in sorted(CONFIGS.glob("*.json")) if path.stem not in for_decoders]
    block = workplace.config("block", sparse_attention={"mode": "bigbird", "num_local_blocks": 4})
    runs = [workplace.options(path.stem, *short, config=path) for path in shipped]
    *ended, (dense, printed) = workplace.run([*runs, workplace.options("off", "--max_steps", "2", config=block)])
    for path, (status, said) in zip(shipped, ended, strict=True):
        assert status == 0 and "after 1 steps" in said, (path, status, said)
        assert ("The JSON asks for Lamb" in said) == (path.stem == "deepspeed_bsz64k_lamb_config_seq128")
    assert dense == 0 and "has a sparse_attention block and it is off" in printed
    assert printed.count(f"{block}: sparse_attention.num_local_blocks: belongs to") == 1
    assert len(workplace.losses("off", "dense")) == 2 + 2


OVERFLOWING = {"fp16": {"enabled": True, "initial_scale_power": 24}}
PRECISIONS = {
    "cpu": {"bf16": {"bf16": {"enabled": True}}, "overflowing": OVERFLOWING},
    "cuda": {"bf16": {}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}, "overflowing": OVERFLOWING},
}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.slow("trains 24 runs")
def test_every_zero_stage_trains_saves_and_resumes_exactly(workplace, device, stage):
    """4 steps at once and 2 + 2, in each precision."""
    if missing_kernels(device, BLOCK_OPERATORS):
        pytest.skip(f"no {device} kernel for {', '.join(missing_kernels(device, BLOCK_OPERATORS))}")
    for precision, changes in PRECISIONS[device].items():
        name = f"{precision} zero{stage} {device}"
        config = workplace.config(name, zero_optimization={"stage": stage}, **changes)
        more = (FLAG, "--eval-steps", "2", "--max-steps")
        runs = [workplace.options(name, *more, "4", config=config)]
        runs += [workplace.options(f"{name} half", *more, *rest, config=config) for rest in (["2"], ["4", "--resume"])]
        found = workplace.run(runs, device=device)
        assert [ended for ended, _ in found] == [0, 0, 0], found
        whole, printed = workplace.losses(name), found[0][1]
        assert "continuing after step 2" in found[2][1] and workplace.losses(f"{name} half") == whole, precision
        assert ("bf16 is used on the GPU" in printed) == (device == "cuda" and precision == "bf16")
        assert ("gradients that overflowed, and were skipped" in printed) == (precision == "overflowing")


REFUSED = [
    ("refused", ["--corpus", "no_such_corpus"], "no_such_corpus"),
    ("refused", ["--cf", "no_such.json"], "no_such.json: No such file"),
    ("refused", ["--max_minutes", "0"], "--max-minutes is 0"),
    ("refused", ["--compare_dense"], "add --deepspeed_sparse_attention"),
    ("refused", ["--weights-from", "no_such_run"], "no_such_run: has no checkpoint"),
    ("refused", ["--resume"], "start one without --resume"),
    ("refused", ["--resume", "--dry-run"], "start one without --resume"),
    ("refused", ["--deepspeed_config", "no_such.json"], "no_such.json: no such file"),
    (
        "finished",
        [FLAG, "--resume", "--seed", "43", "--eval_sequences", "1"],
        "seed was 42 and is 43. Give the old",
    ),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda number: REFUSED[number][2])
def test_what_cannot_be_run_ends_in_a_sentence(short_runs, number):
    ended, printed = short_runs["refused"][number]
    assert ended != 0 and REFUSED[number][2] in f"{ended}{printed}"


def test_a_dry_run_says_what_a_run_would_do_and_does_nothing(workplace, short_runs):
    (ended, printed), continues, done = short_runs["dry"]
    assert ended == 0 and "The run ends" not in printed
    assert re.search(r"sparse: [\d,]+ parameters, trained in fp32\n", printed)
    assert re.search(r"sparse: layers 0-1: bigbird, block 16, density [\d.]+%\n", printed)
    assert "dense: layers 0-1: dense\n" in printed
    assert (
        "a step has 4 sequences, 1,024 tokens, micro-batch 2 x accumulation 2, on 1 rank, ZeRO 0; an epoch has "
        in printed
    )
    assert "TFLOP a step and rank" in printed and "the time of a step is not known" in printed
    assert f"sparse: starts at step 0, and ends after step {STEPS} or 5 minutes" in printed
    for name in ("sparse", "dense"):
        folder = workplace.folder / "dry" / "0001" / name / "checkpoints"
        assert f"{name}: checkpoints every 1 steps in {folder}" in printed
    assert f"continues after step {STEPS}, and ends after step {STEPS + 2}" in continues[1]
    assert f"nothing left to train, {STEPS} steps are done" in done[1] and continues[0] == done[0] == 0


def test_the_help_has_every_option_once_in_either_spelling(short_runs):
    ((ended, printed),) = short_runs["help"]
    assert ended == 0 and printed.startswith("usage: deepspeed_train.py --deepspeed_config FILE")
    for option in ("--corpus NAME", "--max-minutes M", "--max-steps N", "--compare-dense ", "--resume "):
        assert printed.count(f"\n  {option}") == 1
    assert "\n  --deepspeed_config " in printed and "--max_steps" not in printed


@pytest.mark.slow("starts the script for four seconds")
def test_a_wrong_json_ends_the_process_with_a_sentence_and_leaves_the_run_as_it_is(workplace, finished):
    config = workplace.config("wrong", optimizer={"type": "AdamW", "params": {"lrr": 1}})
    manifest = workplace.folder / "finished" / "0001" / "manifest.json"
    before = manifest.read_bytes()
    command = [sys.executable, workplace.script, *workplace.options("finished", FLAG, "--resume", config=config)]
    done = workplace.execute(command)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith(f"deepspeed_train.py: {config}: optimizer.params.lrr: ")
    assert manifest.read_bytes() == before
