"""Training to a quality: jobs, what is masked, folders of runs, and the experiment on Python sources."""

import itertools
import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import conv1d

from benchmarks.program import main
from benchmarks.train import quality, texts, trainer
from benchmarks.train.models import Attention, Neighbours, make_bert
from benchmarks.train.results import Case
from benchmarks.train.tasks import (
    IGNORED,
    MASKED,
    Found,
    Rows,
    TokenTask,
    hidden,
    log_frequencies,
    macro_f1,
    masked_places,
    masked_task,
    unigram_cross_entropy,
)
from benchmarks.train.trainer import Folder, Task, Training, schedule, steps_of, stops

CPU = torch.device("cpu")
JOB = Case("toy", "tiny", "fp32", "cpu", True, 10, 1e-2, 10, arm="dense-10", seed=3, tokens=400)
QUICK = Case("quality", "tiny", "fp32", "cpu", True, 1024, 2e-3, 512)
TOKENS = np.random.default_rng(1).integers(0, 90, (6, 64)).astype(np.uint16)
MASK = 99


class Toy(Task):
    """Learns a sum."""

    tokens_per_step = 10
    asked = "sums"

    def __init__(self, before=None):
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)) if before is None else before
        self.trained = []

    def error(self, seed):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
        return (self.model(x)[:, 0] - x.sum(1)).square().mean()

    def loss(self, step):
        assert self.model.training
        self.trained.append(step)
        return self.error(step)

    def evaluate(self):
        assert not self.model.training and not torch.is_grad_enabled()
        return self.error(10**6).item()

    def unigram(self):
        return 4.0


def test_a_job_learns_and_says_how():
    row = Training(JOB, CPU).run([Toy])
    assert [point.tokens for point in row.curve] == list(range(40, 401, 40))
    assert row.held_out == row.curve[-1].held_out < row.curve[0].held_out
    assert all(a.seconds < b.seconds for a, b in itertools.pairwise(row.curve))
    assert row.tokens_per_second == pytest.approx(400 / row.curve[-1].seconds)
    assert row.milliseconds == pytest.approx(row.curve[-1].seconds / 40 * 1e3)
    assert row.wall_seconds > row.curve[-1].seconds and row.parameters == 49
    assert row.weights == Training(JOB, CPU).run([Toy]).weights, "the same of a seed"


def test_a_second_phase_has_the_model_of_the_first():
    given = []
    phases = [Toy, lambda before: given.append(before) or Toy(before)]
    assert len(Training(JOB, CPU).run(phases).curve) == 10
    assert isinstance(given[0], nn.Sequential)


def test_steps_that_are_tried_leave_no_trace(monkeypatch):
    """A budget of minutes tries more of them than one of tokens."""
    monkeypatch.setattr(trainer, "TRIED_SECONDS", 0.1)
    task = Toy()
    before = {name: x.clone() for name, x in task.model.state_dict().items()}
    assert Training(replace(JOB, tokens=0, minutes=1.0), CPU).try_steps(task) > 0 and len(task.trained) > 3
    assert all(torch.equal(x, before[name]) for name, x in task.model.state_dict().items())


def test_a_loss_that_is_no_number_is_an_error():
    class Lost(Toy):
        def evaluate(self):
            return math.nan

    with pytest.raises(ArithmeticError, match="the held-out loss is nan after 40 tokens"):
        Training(JOB, CPU).run([Lost])


def test_budgets_evaluations_and_learning_rates_are_numbers_of_steps():
    assert steps_of(replace(JOB, tokens=1000), 0.5, 10, step_seconds=99.0) == 50
    assert steps_of(replace(JOB, tokens=0, minutes=2.0), 0.5, 10, step_seconds=0.5) == 120
    assert stops(40, 10) == list(range(4, 41, 4)) and stops(3, 10) == [1, 2, 3]
    rates = [schedule(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert max(rates) == rates[9] == 1.0
    assert [schedule(step, 100, decays=False) for step in range(100)] == [*rates[:10], *[1.0] * 90]
    assert all(a > b for a, b in itertools.pairwise(rates[9:])) and 0 < rates[-1] < 0.02


def test_every_length_trains_on_the_same_tokens_masked_at_the_same_places():
    seen = []

    class Model(nn.Module):
        cls = None
        base_model = property(lambda self: self)

        def forward(self, input_ids):
            seen.append(input_ids)
            raise KeyError

    masked = masked_places((2, 64), 3, 5)
    tokens, labels = hidden(TOKENS[:2], masked, MASK)
    assert ((tokens == MASK) == masked).all() and (labels[masked] == TOKENS[:2][masked]).all()
    assert (tokens[~masked] == TOKENS[:2][~masked]).all() and (labels[~masked] == IGNORED).all()
    for length in (64, 16):
        case = replace(QUICK, tokens_per_step=128, seed=7)
        fixed = TOKENS, (tokens, labels), torch.zeros(90), MASK, case, CPU
        task = masked_task(TokenTask, Model(), length, *fixed)
        for call in (lambda task=task: task.loss(4), task.evaluate):
            with pytest.raises(KeyError):
                call()
    assert [x.shape for x in seen] == [(2, 64), (2, 64), (8, 16), (8, 16)]
    assert torch.equal(seen[0].flatten(), seen[2].flatten()) and torch.equal(seen[1].flatten(), seen[3].flatten())
    assert not torch.equal(seen[0], seen[1])
    assert masked_places((100, 100), 1, 2).mean() == pytest.approx(MASKED, abs=0.02)


def test_an_epoch_has_every_piece_once_in_an_order_of_its_own():
    rows = Rows(7, 2, seed=0)
    first, second = ([rows.of(step).tolist() for step in steps] for steps in (range(3), range(3, 6)))
    for epoch in (first, second):
        assert len({number for step in epoch for number in step}) == 6
    assert first != second and rows.of(1).tolist() == first[1], "at each call, in any order"


def test_frequencies_count_each_label_once_more_and_a_task_knows_their_loss():
    found = log_frequencies([np.array([[0, 0], [0, 1]], np.uint16), np.array([2], np.uint8)], classes=4)
    assert found.exp().tolist() == pytest.approx([4 / 9, 2 / 9, 2 / 9, 1 / 9])
    loss = -(math.log(4 / 9) + math.log(1 / 9)) / 2
    assert unigram_cross_entropy(found, np.array([[0, 3]], np.uint16)) == pytest.approx(loss)


def test_f1_is_the_harmonic_mean_of_precision_and_recall():
    assert Found(predicted=5, there=4, right=3).f1 == pytest.approx(2 / (5 / 3 + 4 / 3)) and Found().f1 == 0
    classes = np.array([0, 0, 0, 0, 1, 2])
    assert macro_f1(np.zeros(6, int), classes) == pytest.approx((8 / 10 + 0 + 0) / 3)


def test_a_new_model_has_neighbours_in_its_embeddings_and_begins_with_the_frequencies():
    frequencies = log_frequencies([np.repeat(5, 1000)], 8)
    model = make_bert(Attention("bigbird", 128), QUICK, frequencies, CPU)
    assert (model(input_ids=torch.randint(8, (2, 128))).logits.argmax(-1) == 5).all()
    module = model.bert.embeddings.neighbours
    assert isinstance(module, Neighbours)
    x = torch.randn(2, 7, 128)
    kernel = torch.cat([module.weight[:2], torch.ones(1, 128), module.weight[2:]]).T[:, None]
    torch.testing.assert_close(module(x), conv1d(x.transpose(1, 2), kernel, padding=2, groups=128).transpose(1, 2))


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
    command = "train --quick --tokens-per-step 1024 --tokens 4096 --folder"
    return main([*command.split(), str(folder), *map(str, more)])


def rows_of(path):
    return {row["arm"]: row for row in json.loads(path.read_text())["rows"]}


def test_the_data_is_pieces_of_whole_documents(prepared):
    train, held_out, far = (np.load(prepared / "data" / f"{name}.npy") for name in ("train", "held_out", "far"))
    assert train.dtype == np.uint16 and train.shape[1] == held_out.shape[1] == 512
    assert len(train) > 200 and far.shape == held_out.shape and far.any()
    assert train.max() < texts.QUICK_VOCABULARY - 1, "the last token is the one that masks"
    assert not {row.tobytes() for row in train} & {row.tobytes() for row in held_out}


def test_a_name_is_far_where_it_stands_before_and_nowhere_near():
    vocabulary = [b"read_rows", b" ", b"RowReader", b"rows", b".", b"_"]
    ids = [0, 1, 2, 4, 4, 3, 4, 4, 0, 4, 2, 4, 2, 4, 3]
    # read_rows stands 8 tokens after its last place; RowReader has another 2 after; rows is no name of several words.
    assert np.flatnonzero(quality.far_tokens(np.array(ids), vocabulary, 5)).tolist() == [8]
    assert not quality.far_tokens(np.array(ids), vocabulary, 8).any()


def test_pieces_are_the_bytes_of_the_text():
    text = "def läuft(row_reader):\n\treturn '\x00 ☃'\n"
    tokenizer = texts.trained_tokenizer([text * 3], 300)
    (ids,) = texts.encoded(tokenizer, [text])
    known = texts.pieces(tokenizer)
    assert len(ids) < len(text.encode()) and b"".join(known[token] for token in ids) == text.encode()


def test_a_continued_arm_begins_with_the_dense_weights(prepared):
    make, make_longer = quality.phases(replace(QUICK, arm="continued-bslongformer-512"), prepared / "data", CPU)
    first = make(None)
    positions = first.model.bert.embeddings.position_embeddings.weight.clone()
    second = make_longer(first.model)
    longer = second.model.bert.embeddings.position_embeddings.weight
    assert torch.equal(longer, positions.repeat(8, 1)) and (first.length, second.length) == (64, 512)


@pytest.mark.slow("trains every arm")
def test_a_quick_run_compares_arms_and_trains_none_of_them_again(folder, tmp_path, printed_again, monkeypatch):
    path, arms = tmp_path / "rows.json", ("--arms", "dense-64,dense-512,bigbird-512")
    assert run(folder, "--json", path, *arms) == 0
    printed = printed_again(path)
    rows = rows_of(path)
    assert [row["curve"][-1]["tokens"] for row in rows.values()] == [4096] * 3
    (line,) = (line for line in printed.splitlines() if line.startswith("`bigbird-512`"))
    assert f"{rows['bigbird-512']['held_out'] / rows['dense-512']['held_out']:.3f}" in line.split()
    assert "far loss" in printed
    monkeypatch.setattr(TokenTask, "loss", lambda *_: pytest.fail("trains"))
    assert run(folder, "--json", path, "--force", *arms) == 0 and rows_of(path) == rows


def test_jobs_of_another_process_and_after_the_time_are_not_trained(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(TokenTask, "loss", lambda *_: pytest.fail("trains"))
    path = tmp_path / "rows.json"
    with Folder(folder, QUICK).claimed(replace(QUICK, arm="dense-64", tokens=4096)) as mine:
        assert mine
        arms = "--arms", "dense-64,dense-512,dense-64"  # given twice, trained once
        assert run(folder, "--stop-after", 0, *arms, "--json", path) == 0
    assert [row["reason"] for row in rows_of(path).values()] == [
        "not tried: another process trains it; give the command again for its row",
        "not tried: stopped; give the command again to go on",
    ]


@pytest.mark.parametrize(
    "status, options, sentence",
    [
        (2, "--arms bigbat-512", "--arms bigbat-512: is no arm of quality; give ATTENTION-LENGTH of dense, bigbird"),
        (2, "--arms dense-1024", "sequences of 1024 tokens do not divide documents of 512; give --document-tokens"),
        (2, "--arms bigbird-16", "has no layout of 16 tokens"),
        (2, "--tokens-per-step 1000", "--tokens-per-step 1000: is no multiple of the 512 tokens of a document's piece"),
        (1, "--dtype bf16", "holds a run with dtype fp32, not dtype bf16; give its options or a new folder."),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_trained(folder, capsys, status, options, sentence):
    before = sorted(folder.iterdir())
    assert run(folder, *options.split()) == status
    printed = capsys.readouterr()
    assert sentence in printed.err and not printed.out
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    "options, sentence",
    [
        ("--tokens 5", "--folder: name a folder for data and rows, from which a run can go on."),
        ("--quick --stop-after 2", "--stop-after: the rest is trained later; name a folder"),
        ("--folder new", "give --tokens or --minutes: how much each arm trains."),
        ("--quick --genomes x --experiment documents", "--genomes: documents reads none"),
    ],
)
def test_a_run_that_is_not_quick_says_where_and_how_much(capsys, monkeypatch, tmp_path, options, sentence):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *options.split()]) == 2
    assert sentence in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_folder_of_something_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.txt").touch()
    assert run(tmp_path) == 1
    assert f"--folder {tmp_path}: holds something else; name a new folder." in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("experiment", ["quality", "dna"])
def test_quick_runs_on_a_gpu(tmp_path, experiment):
    path = tmp_path / "rows.json"
    command = f"train --quick --experiment {experiment} --device cuda --arms dense-64,bigbird-512 --minutes 0.02"
    assert main([*command.split(), "--json", str(path)]) == 0
    rows = rows_of(path)
    assert {row["dtype"] for row in rows.values()} == {"bf16"} and not any(row["reason"] for row in rows.values())
