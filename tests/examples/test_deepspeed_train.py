"""The pretraining run as its users start it: one process and two, sparse and dense, killed and resumed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import deepspeed
import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
SCRIPT = ROOT / "examples" / "bing_bert" / "deepspeed_train.py"
TOKENS, STEPS, MANY_STEPS = 256, 6, 40


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
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
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


def environment(workplace):
    """No launcher's variables, no compiler, no ninja: the run must not need them."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")
    clean = {name: value for name, value in os.environ.items() if name not in launcher}
    return clean | {
        "DS_SPARSE_CACHE": str(workplace / "cache"), "CXX": "/nonexistent", "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip


def run(workplace, *arguments, **settings):
    return execute(workplace, command(workplace, *arguments, **settings))


def execute(workplace, command, **settings):
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(workplace), timeout=120, **settings
    )


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
    deadline = time.monotonic() + 60
    try:
        while not (metrics.exists() and f'"step": {step}, "mlm_loss"' in metrics.read_text()):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, f"the run did not reach step {step}"
            time.sleep(0.01)
        process.send_signal(number)
        printed, _ = process.communicate(timeout=60)
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
def one_rank(workplace):
    output = workplace / "one_rank"
    return output, succeed(workplace, output, "--deepspeed_sparse_attention")


@pytest.fixture(scope="module")
def restarted(workplace, one_rank):
    """The same run killed before its first checkpoint and resumed, now to two steps more; and what it printed."""
    output = copied(one_rank[0], workplace / "restarted")
    shutil.rmtree(output / "0001" / "sparse" / "checkpoints")
    more = ("--deepspeed_sparse_attention", "--resume", "--max_steps", str(STEPS + 2))
    return output, succeed(workplace, output, *more)


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


def test_a_run_shows_layout_losses_and_the_unigram_line(one_rank):
    output, printed = one_rank
    assert "density" in printed and "sparse attention is on in 2 of 2 attention layers" in printed
    assert f"after {STEPS} steps" in printed and "unigram cross-entropy" in printed
    assert "Training on the CPU" in printed
    folder = output / "0001"
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG") and (folder / "sparse" / "layout.png").exists()
    assert json.loads((folder / "manifest.json").read_text())["sequence_length"] == TOKENS
    steps = [step for step, mlm_loss, *_ in losses(output) if mlm_loss is not None]
    assert steps == list(range(1, STEPS + 1))


def test_the_same_json_without_the_flag_trains_dense(workplace):
    block = {"mode": "bigbird", "num_local_blocks": 4}
    output, config = workplace / "dense", write_config(workplace, "block.json", sparse_attention=block)
    printed = succeed(workplace, output, "--max_steps", "2", config=config)
    assert "has a sparse_attention block and it is off" in printed
    assert f"{config}: sparse_attention.num_local_blocks: belongs to" in printed
    assert len(losses(output, "dense")) == 2 + 2


@pytest.mark.parametrize("launcher, stage", [("torchrun", 0), ("deepspeed", 2)])
def test_two_ranks_agree_with_one(workplace, one_rank, launcher, stage):
    scripts = Path(sys.executable).parent
    start = {
        "torchrun": [str(scripts / "torchrun"), "--standalone", "--nproc_per_node=2"],
        "deepspeed": [sys.executable, str(scripts / "deepspeed"), "--num_accelerators=2", "--master_port=29602"],
    }[launcher]
    output = workplace / f"{launcher}{stage}"
    config = write_config(workplace, f"{launcher}{stage}.json", zero_optimization={"stage": stage})
    printed = succeed(workplace, output, "--deepspeed_sparse_attention", config=config, launcher=start)
    assert printed.count(f"after {STEPS} steps") == 1
    for mine, theirs in zip(losses(output), losses(one_rank[0]), strict=True):
        assert mine[0] == theirs[0]
        for ours, reference in zip(mine[1:], theirs[1:]):
            assert (ours is None) == (reference is None)
            assert ours is None or abs(ours - reference) < 1e-5


def test_a_rank_without_a_held_out_sequence(workplace, one_rank):
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc_per_node=2"]
    output = workplace / "one_sequence"
    more = ("--deepspeed_sparse_attention", "--max_steps", "1", "--eval_sequences", "1")
    assert "after 1 steps" in succeed(workplace, output, *more, launcher=torchrun)
    assert losses(output)[1][1] == pytest.approx(losses(one_rank[0])[1][1], abs=1e-5)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_killed_run_resumes_with_the_same_losses_bit_for_bit(workplace, many_steps, seed):
    more = ("--deepspeed_sparse_attention", "--max_steps", str(MANY_STEPS))
    output, step = workplace / f"killed{seed}", random.Random(seed).randrange(2, 10)
    code, printed = interrupted(workplace, signal.SIGKILL, step, output, *more, model="dropout.json")
    assert code == -signal.SIGKILL, printed
    assert "continuing after step" in succeed(workplace, output, *more, "--resume", model="dropout.json")
    assert losses(output) == losses(many_steps)


def test_a_resume_without_a_checkpoint_says_that_it_starts_again(one_rank, restarted):
    output, printed = restarted
    assert "has no checkpoint of it yet; it starts from step 0" in printed
    assert training_losses(output)[:STEPS] == training_losses(one_rank[0])
    assert len(losses(output)) == STEPS + 2 + 2


def test_a_finished_run_continues_with_more_steps(workplace, one_rank, restarted):
    output = copied(one_rank[0], workplace / "longer")
    printed = succeed(workplace, output, "--deepspeed_sparse_attention", "--resume", "--max_steps", str(STEPS + 2))
    assert f"continuing after step {STEPS}" in printed and f"after {STEPS + 2} steps" in printed
    assert training_losses(output) == training_losses(restarted[0])
    assert losses(output)[-1] == losses(restarted[0])[-1]


def test_a_finished_run_has_nothing_left_to_do(workplace, one_rank):
    output = copied(one_rank[0], workplace / "again")
    printed = succeed(workplace, output, "--deepspeed_sparse_attention", "--resume")
    assert f"nothing left to train, {STEPS} steps are done" in printed and f"after {STEPS} steps" in printed
    assert losses(output) == losses(one_rank[0])


def test_a_stopped_run_saves_and_says_how_to_continue(stopped):
    output, printed = stopped
    step = losses(output)[-1][0]
    assert "a checkpoint is written after this step; Ctrl-C now ends the run without one" in printed
    assert f"after step {step}; continue with --resume" in printed
    assert (output / "0001" / "sparse" / "checkpoints" / "latest").read_text() == f"step{step}"


def test_a_stopped_run_that_has_its_steps_only_gets_its_held_out_loss(workplace, stopped):
    output = copied(stopped[0], workplace / "few")
    step = losses(output)[-1][0]
    for _ in range(2):
        printed = succeed(workplace, output, "--deepspeed_sparse_attention", "--resume", "--max_steps", "2")
        assert f"after {step} steps" in printed
    assert losses(output)[:-1] == losses(stopped[0])
    assert losses(output)[-1][0] == step and losses(output)[-1][3] is not None


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


def test_other_terms_cannot_be_resumed_and_leave_the_run_as_it_is(workplace, one_rank):
    manifest = one_rank[0] / "0001" / "manifest.json"
    before = manifest.read_bytes()
    others = ("--seed", "43", "--eval_sequences", "1")
    done = run(workplace, one_rank[0], "--deepspeed_sparse_attention", "--resume", *others)
    assert done.returncode == 1
    assert "seed was 42 and is 43" in done.stderr and "eval_sequences was 2 and is 1" in done.stderr
    assert "Traceback" not in done.stderr
    assert manifest.read_bytes() == before


def test_a_comparison_trains_dense_for_no_more_steps_than_sparse(comparison):
    output, printed = comparison
    sparse, dense = (training_losses(output, name)[-1][0] for name in ("sparse", "dense"))
    assert 1 <= dense <= sparse
    assert f"after {sparse} steps" in printed and f"after {dense} steps" in printed
    assert (f"dense trained {dense} of the {sparse} steps" in printed) == (dense < sparse)
    assert (output / "0001" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_resumed_comparison_does_not_train_sparse_on_by_minutes(workplace, comparison):
    """As if it had been killed before the first checkpoint of dense, which then takes the steps of sparse."""
    output = copied(comparison[0], workplace / "comparison_again")
    shutil.rmtree(output / "0001" / "dense")
    before, steps = losses(output), training_losses(output)[-1][0]
    printed = succeed(workplace, output, *COMPARISON, "--max-minutes", "1", "--resume")
    assert f"sparse: nothing left to train, {steps} steps are done" in printed
    assert losses(output) == before
    assert training_losses(output, "dense")[-1][0] == steps


def test_bf16_of_the_json_trains(workplace):
    output, config = workplace / "bf16", write_config(workplace, "bf16.json", bf16={"enabled": True})
    succeed(workplace, output, "--deepspeed_sparse_attention", "--max_steps", "3", config=config)
    assert len(losses(output)) == 3 + 2


@pytest.mark.parametrize("name", sorted({path.stem for path in CONFIGS.glob("*.json")} - {"sparse_attention.schema"}))
def test_every_shipped_json_trains(workplace, name):
    more = ("--deepspeed_sparse_attention", "--max_steps", "1", "--max_seq_length", "512")
    printed = succeed(workplace, workplace / "shipped" / name, *more, config=CONFIGS / f"{name}.json")
    is_original = name == "deepspeed_bsz64k_lamb_config_seq128"
    assert ("The JSON asks for Lamb" in printed) == is_original
    replaced = is_original and not deepspeed.get_accelerator().is_fp16_supported()
    assert ("fp16, which DeepSpeed does not support on this CPU: fp32 is used" in printed) == replaced


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--corpus", "no_such_corpus"], "no_such_corpus"),
        (["--cf", "no_such.json"], "no_such.json: No such file"),
        (["--max_minutes", "0"], "--max-minutes is 0"),
        (["--compare_dense"], "add --deepspeed_sparse_attention"),
        (["--resume"], "start one without --resume"),
        (["--deepspeed_config", "no_such.json"], "no_such.json: no such file"),
    ],
)
def test_wrong_arguments_end_in_a_sentence(workplace, tmp_path, arguments, sentence):
    done = run(workplace, tmp_path, *arguments)
    assert done.returncode != 0
    assert sentence in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "changes, sentences",
    [
        ({"fp16": True, "optimizer": {"params": {}}}, ["fp16: ", "(given true)", "optimizer.type: Field required"]),
        ({"optimizer": {"type": "AdamX"}}, ["optimizer.type: DeepSpeed and torch.optim have no AdamX"]),
        ({"train_batch_size": 5}, ["train_batch_size is 5; it has to be a multiple of 2: 1 ranks x"]),
        ({"gradient_accumulation_steps": 3, "train_batch_size": 12}, ["DeepSpeed refuses it: ", "12 != 2 * 3 * 1"]),
        ({"zero_optimization": {"stagee": 2}}, ["stagee: Extra inputs are not permitted (given 2)"]),
        ({"data_types": True}, ["DeepSpeed refuses it: "]),
        ({"sparse_attention": {"mode": "bslongformer", "num_sliding_window_blocks": 31}}, ["31", "length of 256"]),
    ],
)
def test_wrong_jsons_end_in_a_sentence_that_names_the_file(workplace, tmp_path, changes, sentences):
    config = write_config(tmp_path, **changes)
    done = run(workplace, tmp_path, "--deepspeed_sparse_attention", config=config)
    assert done.returncode == 1
    assert str(config) in done.stderr and "Traceback" not in done.stderr and "http" not in done.stderr
    for sentence in sentences:
        assert sentence in done.stderr


def test_the_help_has_every_option_once_in_either_spelling(workplace):
    done = execute(workplace, [sys.executable, str(SCRIPT), "--help"])
    assert done.returncode == 0 and done.stdout.startswith("usage: deepspeed_train.py --deepspeed_config FILE")
    for option in ("--corpus NAME", "--max-minutes M", "--max-steps N", "--compare-dense ", "--resume "):
        assert done.stdout.count(f"\n  {option}") == 1
    assert "\n  --deepspeed_config " in done.stdout and "--max_steps" not in done.stdout
