"""The pretraining run as its users start it: one process and two, sparse and dense, killed and resumed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import deepspeed
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "bing_bert" / "deepspeed_train.py"
TOKENS, STEPS = 256, 6


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
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")}
    return clean | {"DS_SPARSE_CACHE": str(workplace / "cache"), "CXX": "/nonexistent", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def run(workplace, *arguments, **settings):
    done = subprocess.run(command(workplace, *arguments, **settings), capture_output=True, text=True, env=environment(workplace), timeout=120)
    return done


def losses(output, name="sparse", number="0001"):
    lines = (output / number / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [(r["step"], r.get("mlm_loss"), r.get("nsp_loss"), r.get("held_out_mlm_loss")) for r in records]


@pytest.fixture(scope="module")
def one_rank(workplace):
    output = workplace / "one_rank"
    done = run(workplace, output, "--deepspeed_sparse_attention")
    assert done.returncode == 0, done.stderr
    return output, done.stdout


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
    output = workplace / "dense"
    done = run(workplace, output)
    assert done.returncode == 0, done.stderr
    assert "has a sparse_attention block and it is off" in done.stdout
    assert len(losses(output, "dense")) == STEPS + 2


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
@pytest.mark.parametrize("stage", [0, 2])
def test_two_ranks_agree_with_one(workplace, one_rank, launcher, stage):
    scripts = Path(sys.executable).parent
    start = {
        "torchrun": [str(scripts / "torchrun"), "--standalone", "--nproc_per_node=2"],
        "deepspeed": [sys.executable, str(scripts / "deepspeed"), "--num_accelerators=2", f"--master_port={29600 + stage}"],
    }[launcher]
    output = workplace / f"{launcher}{stage}"
    config = write_config(workplace, f"{launcher}{stage}.json", zero_optimization={"stage": stage})
    done = run(workplace, output, "--deepspeed_sparse_attention", config=config, launcher=start)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"after {STEPS} steps") == 1
    for mine, theirs in zip(losses(output), losses(one_rank[0]), strict=True):
        assert mine[0] == theirs[0]
        for ours, reference in zip(mine[1:], theirs[1:]):
            assert (ours is None) == (reference is None)
            assert ours is None or abs(ours - reference) < 1e-5


@pytest.mark.parametrize("seed", [0, 1])
def test_a_killed_run_resumes_with_the_same_losses_bit_for_bit(workplace, seed):
    settings = {"model": "dropout.json", "config": write_config(workplace, "killed.json")}
    whole, killed = workplace / f"whole{seed}", workplace / f"killed{seed}"
    assert run(workplace, whole, "--deepspeed_sparse_attention", **settings).returncode == 0
    process = subprocess.Popen(
        command(workplace, killed, "--deepspeed_sparse_attention", **settings), env=environment(workplace),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    latest = killed / "0001" / "sparse" / "checkpoints" / "latest"
    deadline = time.monotonic() + 120
    while not latest.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(random.Random(seed).random() * 0.5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert latest.exists()
    done = run(workplace, killed, "--deepspeed_sparse_attention", "--resume", **settings)
    assert done.returncode == 0, done.stderr
    assert losses(killed) == losses(whole)


def test_a_stopped_run_saves_and_says_how_to_continue(workplace):
    output = workplace / "stopped"
    process = subprocess.Popen(
        command(workplace, output, "--deepspeed_sparse_attention", "--max_steps", "100000"), env=environment(workplace),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    latest = output / "0001" / "sparse" / "checkpoints" / "latest"
    while not latest.exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "continue with --resume" in printed


def test_other_terms_cannot_be_resumed(workplace, one_rank):
    done = run(workplace, one_rank[0], "--deepspeed_sparse_attention", "--resume", "--seed", "43")
    assert done.returncode == 1
    assert "seed was 42 and is 43" in done.stderr and "Traceback" not in done.stderr


def test_compare_dense_trains_both_into_one_picture(workplace):
    output = workplace / "both"
    done = run(workplace, output, "--deepspeed_sparse_attention", "--compare_dense")
    assert done.returncode == 0, done.stderr
    assert "sparse: held-out" in done.stdout and "dense: held-out" in done.stdout
    assert len(losses(output, "sparse")) == len(losses(output, "dense")) == STEPS + 2


def test_lamb_is_replaced_on_the_cpu_and_said(workplace):
    config = write_config(workplace, "lamb.json", optimizer={"type": "Lamb", "params": {"lr": 11e-3, "weight_decay": 0.01}})
    done = run(workplace, workplace / "lamb", "--max_steps", "1", config=config)
    assert done.returncode == 0, done.stderr
    assert "The JSON asks for Lamb" in done.stdout


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_of_the_json_trains(workplace, precision):
    config = write_config(workplace, f"{precision}.json", **{precision: {"enabled": True}})
    done = run(workplace, workplace / precision, "--deepspeed_sparse_attention", "--max_steps", "3", config=config)
    assert done.returncode == 0, done.stderr
    assert len(losses(workplace / precision)) == 5
    supported = {"bf16": True, "fp16": deepspeed.get_accelerator().is_fp16_supported()}[precision]
    assert supported != (f"{precision}, which DeepSpeed does not support on this CPU: fp32 is used" in done.stdout)


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "configs").glob("*.json") if "schema" not in path.name))
def test_every_shipped_json_trains(workplace, name):
    done = run(workplace, workplace / name, "--deepspeed_sparse_attention", "--max_steps", "1", "--max_seq_length", "512", config=ROOT / "configs" / name)
    if name == "deepspeed_bsz64k_lamb_config_seq128.json":
        assert "The JSON asks for Lamb" in done.stdout
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--corpus", "no_such_corpus"], "no_such_corpus"),
        (["--cf", "no_such.json"], "no_such.json: no such file"),
        (["--max_minutes", "0"], "--max_minutes is 0"),
        (["--compare_dense"], "add --deepspeed_sparse_attention"),
        (["--resume"], "start one without --resume"),
        (["--deepspeed_config", "no_such.json"], "no_such.json: no such file"),
    ],
)
def test_wrong_arguments_end_in_a_sentence(workplace, tmp_path, arguments, sentence):
    done = run(workplace, tmp_path, *arguments)
    assert done.returncode != 0
    assert sentence in done.stderr and "Traceback" not in done.stderr
