import json
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from benchmarks.program import main
from benchmarks.train import experiment, quality, sources, vocabulary
from benchmarks.train.folder import Folder
from benchmarks.train.masked import MaskedTask
from benchmarks.train.results import Case, case_of
from benchmarks.train.settings import Budget, Job, Settings
from ds_sparse.bench.show import load

QUICK = Settings("quality", "tiny", "fp32", "cpu", True, 1024, 2e-3, 512)
COMMAND = "train --quick --tokens-per-step 1024 --tokens 4096"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = Folder(tmp_path_factory.mktemp("prepared") / "run", QUICK)
    folder.data(lambda data: quality.prepare(QUICK, data))
    return folder.path


@pytest.fixture
def folder(prepared, tmp_path):
    """Of a run, with its data."""
    return shutil.copytree(prepared, tmp_path / "run")


def run(folder, *more):
    return main([*COMMAND.split(), "--folder", str(folder), *map(str, more)])


def rows_of(path):
    return {row["arm"]: row for row in json.loads(path.read_text())["rows"]}


def test_the_data_is_pieces_of_whole_documents(prepared):
    train, held_out, far = (np.load(prepared / "data" / f"{name}.npy") for name in ("train", "held_out", "far"))
    assert train.dtype == np.uint16 and train.shape[1] == held_out.shape[1] == 512
    assert len(train) > 200 and far.shape == held_out.shape and far.any()
    assert train.max() < vocabulary.QUICK_SIZE - 1, "the last token is the one that masks"
    assert not {row.tobytes() for row in train} & {row.tobytes() for row in held_out}


@pytest.mark.slow("trains every arm")
def test_quick_compares_the_arms(folder, tmp_path, printed_again):
    path = tmp_path / "rows.json"
    assert run(folder, "--json", path, "--arms", "dense-64,dense-512,bigbird-512") == 0
    printed = printed_again(path)
    rows = rows_of(path)
    assert [row["curve"][-1]["tokens"] for row in rows.values()] == [4096] * 3
    assert all(row["measures"]["far_tokens"] == rows["dense-64"]["measures"]["far_tokens"] for row in rows.values())
    of_dense = rows["bigbird-512"]["held_out"] / rows["dense-512"]["held_out"]
    (line,) = (line for line in printed.splitlines() if line.startswith("bigbird-512  "))
    assert f"{of_dense:.4f}" in line.split()
    assert "far_loss: dense-64 " in printed


@pytest.mark.slow("trains in processes that are killed")
def test_a_run_that_is_killed_goes_on_with_the_same_bits(folder, tmp_path, monkeypatch):
    whole = shutil.copytree(folder, tmp_path / "whole")
    arms = "--arms", "dense-64,continued-bigbird-512", "--save-seconds", 0
    assert run(whole, *arms, "--json", tmp_path / "whole.json") == 0
    right, calls = MaskedTask.loss, []

    def killed(task, step):
        calls.append(task)
        if len(calls) == 6 + 4 + 4:  # the last step of the second arm's second phase; two are tried before each phase
            raise KeyboardInterrupt
        return right(task, step)

    monkeypatch.setattr(MaskedTask, "loss", killed)
    assert run(folder, *arms, "--json", tmp_path / "killed.json") == 130
    monkeypatch.setattr(MaskedTask, "loss", right)
    first = rows_of(tmp_path / "killed.json")
    assert list(first) == ["dense-64"]
    assert (folder / "continued-bigbird-512-seed0-4096-tokens.checkpoint").exists()
    assert run(folder, *arms, "--json", tmp_path / "rest.json") == 0
    wanted, found = rows_of(tmp_path / "whole.json"), rows_of(tmp_path / "rest.json")
    assert found["dense-64"] == first["dense-64"], "what is finished is not trained again"
    for arm in wanted:
        assert found[arm]["weights"] == wanted[arm]["weights"]
        losses = [[point["held_out"] for point in of[arm]["curve"]] for of in (wanted, found)]
        assert losses[0] == losses[1]
    assert not list(folder.glob("*.checkpoint"))


def test_jobs_of_another_process_and_after_the_time_are_not_trained(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(MaskedTask, "loss", lambda *_: pytest.fail("trains"))
    path = tmp_path / "rows.json"
    taken = Folder(folder, QUICK)
    with taken.claimed(Job("dense-64", 0, Budget(tokens=4096))) as mine:
        assert mine
        assert run(folder, "--stop-after", 0, "--arms", "dense-64,dense-512", "--json", path) == 0
    reasons = [row["reason"] for row in rows_of(path).values()]
    assert reasons == [
        "not tried: another process trains it; give the command again for its row",
        "not tried: stopped; give the command again to go on",
    ]


@pytest.mark.slow("trains every arm twice")
def test_both_budgets_are_trained_with_each_seed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(quality, "prepare", lambda *_: None)
    path = tmp_path / "rows.json"
    command = "train --quick --stop-after 0 --arms dense-64 --seeds 0,5 --minutes 0.5 --tokens 99"
    assert main([*command.split(), "--folder", str(tmp_path / "run"), "--json", str(path)]) == 0
    assert "dense-64, seed 5, 0.5 minutes: not tried" in capsys.readouterr().out
    run, _, results = load(str(path))
    assert [(case.seed, case.minutes, case.tokens) for case, _ in results] == [
        (0, 0.0, 99), (0, 0.5, 0), (5, 0.0, 99), (5, 0.5, 0),
    ]  # fmt: skip
    assert isinstance(results[0][0], Case) and run.operation == "train"


@pytest.mark.parametrize(
    "options, sentence",
    [
        ("--arms bigbat-512", "--arms bigbat-512: is no arm of quality; give ATTENTION-LENGTH of dense, bigbird"),
        ("--arms dense-long", "--arms dense-long: is no arm of quality"),
        ("--arms dense-1024", "sequences of 1024 tokens do not divide documents of 512; give --document-tokens"),
        ("--arms bigbird-16", "has no layout of 16 tokens"),
        ("--tokens-per-step 1000", "--tokens-per-step 1000: is no multiple of the 512 tokens of a document's piece"),
        ("--dtype bf16", "holds a run with dtype fp32, not dtype bf16; give its options or a new folder."),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_trained(folder, capsys, options, sentence):
    before = sorted(folder.iterdir())
    assert run(folder, *options.split()) == 1
    printed = capsys.readouterr()
    assert sentence in printed.err and not printed.out
    assert sorted(folder.iterdir()) == before


def test_arms_and_seeds_given_twice_are_trained_once(folder, tmp_path):
    path = tmp_path / "out.json"
    assert run(folder, "--arms", "dense-64,dense-64", "--seeds", "0,0", "--stop-after", 0, "--json", path) == 0
    assert [(case.arm, case.seed) for case, _ in load(str(path))[2]] == [("dense-64", 0)]


def test_a_folder_whose_settings_are_damaged_says_so(folder):
    (folder / "settings.json").write_text("{")
    with pytest.raises(ValueError, match=r"settings\.json is damaged; name a new folder"):
        Folder(folder, QUICK)


def test_processes_may_begin_a_run_together(tmp_path):
    begin, folders = threading.Barrier(4), [tmp_path / str(number) for number in range(100)]

    def process(_):
        for folder in folders:
            begin.wait(timeout=60)
            Folder(folder, QUICK).data(lambda data: (data / "tokens").touch())

    with ThreadPoolExecutor(4) as processes:  # what is locked is locked for threads too
        assert list(processes.map(process, range(4))) == [None] * 4


@pytest.mark.parametrize(
    "options, sentence",
    [
        ("--tokens 5", "--folder: name a folder for data and checkpoints, from which a run can go on."),
        ("--quick --stop-after 2", "--stop-after: saves what is trained; name a folder for it with --folder."),
        ("--folder new", "give --tokens or --minutes: how much each arm trains."),
    ],
)
def test_a_run_that_is_not_quick_says_where_and_how_much(capsys, monkeypatch, tmp_path, options, sentence):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *options.split()]) == 1
    assert sentence in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_folder_of_something_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.txt").touch()
    assert run(tmp_path) == 1
    assert f"--folder {tmp_path}: holds something else; name a new folder." in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_without_transformers_it_says_what_to_install(monkeypatch, capsys):
    for name in ("bert", "bert_models", "no_attention", "train.models", "train.masked", "train.quality"):
        monkeypatch.delitem(sys.modules, f"ds_sparse.bench.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["train", "--quick"]) == 1
    assert "pip install 'ds_sparse[transformers]'" in capsys.readouterr().err


def test_sources_are_read_once_each_in_an_order(monkeypatch, tmp_path):
    monkeypatch.setattr(
        sources.sysconfig, "get_paths", lambda: dict.fromkeys(("stdlib", "purelib", "platlib"), tmp_path)
    )
    for name, text in {
        "b.py": "b" * 20,
        "a.py": "a" * 20,
        "c.py": "b" * 20,
        "d.txt": "d" * 20,
        "e.py": "short",
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "f.py").write_text("f" * 20)
    (tmp_path / "g.py").write_bytes(b"\xff" * 20)
    assert list(sources.documents(10)) == ["a" * 20, "b" * 20]


def test_a_continued_arm_begins_with_the_dense_weights(prepared):
    phases = quality.phases(QUICK, prepared / "data", "continued-bslongformer-512", 0, torch.device("cpu"))
    first = phases[0].make(None)
    words = first.model.bert.embeddings.word_embeddings.weight
    positions = first.model.bert.embeddings.position_embeddings.weight.clone()
    second = phases[1].make(first.model)
    assert second.model.bert.embeddings.word_embeddings.weight is words
    longer = second.model.bert.embeddings.position_embeddings.weight
    assert torch.equal(longer, positions.repeat(8, 1)) and (first.length, second.length) == (64, 512)
    assert [phase.share for phase in phases] == [0.5, 0.5]


def test_an_experiment_is_a_module():
    assert experiment.load("quality") is quality.EXPERIMENT
    assert case_of(QUICK, Job("dense-64", 1, Budget(minutes=0.5))).job == Job("dense-64", 1, Budget(minutes=0.5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_quick_runs_on_a_gpu(tmp_path):
    path = tmp_path / "rows.json"
    command = "train --quick --device cuda --arms dense-64,dense-512,bigbird-512 --minutes 0.02"
    assert main([*command.split(), "--json", str(path)]) == 0
    rows = rows_of(path)
    assert {row["dtype"] for row in rows.values()} == {"bf16"} and not any(row["reason"] for row in rows.values())
    assert all(row["curve"][-1]["held_out"] < row["curve"][0]["held_out"] for row in rows.values())
